"""An expert's rows under every coarser arithmetic that is known: who rounds so computes the model, only less precisely.

Each rounding of known_roundings.py is tried at the expert's input, between its products, and at both, with products as
in NumPy and as this machine's kernels make them, who round once more. A few ways round the weights, too. That is some
hundreds of ways: they are computed one group after the other, and only for who asks for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType

from backends.experts import F32, ReadSlice
from backends.known_roundings import ROUNDINGS, Rounding, to_codes
from backends.manifest import LayerExperts
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram

_ROWS_AT_ONCE: Final = 256  # so many make one product worth its weights' way through memory


@dataclass(frozen=True, slots=True)
class Way:
    """How one device rounds: the expert's input, what goes into its other products, its weights. None: not at all.

    as_kernels: and then as this machine's kernels do. only: for weights of this type.
    """

    at_input: Rounding | None
    within: Rounding | None
    weights: Rounding | None = None
    as_kernels: bool = False
    only: GGMLQuantizationType | None = None


def _ways() -> Iterator[Way]:
    for each in ROUNDINGS.values():
        yield Way(each, each)
    for name in ("bf16", "bf16 cut off", "tf32 cut off"):  # matrix units that take both factors so
        yield Way(ROUNDINGS[name], ROUNDINGS[name], ROUNDINGS[name])
    channels = partial(to_codes, block=0)  # KleidiAI repacks Q8_0 with one step for each neuron
    for name in ("codes with offset by row", "codes by row"):
        yield Way(ROUNDINGS[name], ROUNDINGS[name], channels, only=GGMLQuantizationType.Q8_0)
    for as_kernels in (True, False):
        for each in ROUNDINGS.values():
            yield Way(each, None, as_kernels=as_kernels)
            yield Way(None, each, as_kernels=as_kernels)
    for each in ROUNDINGS.values():
        yield Way(each, each, as_kernels=True)


WAYS: Final = tuple(_ways())


def coarse_rows(layer: LayerExperts, program: ExpertProgram, expert: int, read: ReadSlice, x: F32) -> Iterator[F32]:
    """What the expert gives for rows x [n, n_in] in each known way: [n, n_out], one after the other.

    Raises:
        UnsupportedModel: weights that cannot be dequantised here.
    """
    backend = _Rounding()
    backend.load_layer(layer, program, [expert], read)
    step = max(1, _ROWS_AT_ONCE // len(x))
    for _, alike in groupby(WAYS, lambda way: (way.weights, way.as_kernels)):
        ways = list(alike)
        for start in range(0, len(ways), step):
            some = ways[start : start + step]
            rows = backend.rows(layer.layer, expert, x, some)
            yield from np.split(rows, len(some))


class _Rounding(NumpyExperts):
    """Products of one expert over rows in several ways at once: the same rows, one way after the other."""

    def __init__(self) -> None:
        super().__init__("float32")
        self._ways: Sequence[Way] = ()
        self._of_input: Iterator[bool] = iter(())

    def rows(self, layer: int, expert: int, x: F32, ways: Sequence[Way]) -> F32:
        """[ways * n, n_out]; the ways have `weights` and `as_kernels` in common."""
        self._ways, self._as_kernels = ways, ways[0].as_kernels
        program = self._layers[layer].program
        self._of_input = iter([node.inputs == (0,) for node in program.nodes if node.op == "mul_mat_id"])
        count = len(ways) * len(x)
        tokens = np.tile(np.arange(len(x), dtype=np.int32), len(ways))
        return self.compute(layer, x, tokens, np.full(count, expert, np.int32))

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        of_input = next(self._of_input)
        parts = np.split(np.asarray(a, np.float32), len(self._ways))
        for at, way in enumerate(self._ways):
            rounding = way.at_input if of_input else way.within
            if rounding is not None and way.only in (None, kind):
                parts[at] = rounding(parts[at])
        if (of_weights := self._ways[0].weights) is not None and self._ways[0].only in (None, kind):
            weight = of_weights(np.asarray(weight, np.float32))
        return super()._multiply(np.concatenate(parts), weight, kind)
