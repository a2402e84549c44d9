"""An expert's rows under every coarser arithmetic that is known: who rounds so computes the model, only less precisely.

Each rounding of known_roundings.py is tried at the expert's input, between its products, and at both, with products as
in NumPy and as this machine's kernels make them, who round once more. A few ways round the weights, too. That is some
hundreds of ways: they are computed one group after the other, and only for who asks for the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from backends.experts import F32, ReadSlice
from backends.known_roundings import BF16_SUMS, BY_BATCH, ROUNDINGS, Rounding, Sums, to_codes
from backends.manifest import LayerExperts
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram

_ROWS_AT_ONCE: Final = 256  # so many make one product worth its weights' way through memory


@dataclass(frozen=True, slots=True)
class Way:
    """How one device rounds: the expert's input, what goes into its other products, its weights. None: not at all.

    as_kernels: and then as this machine's kernels do. sums: how it adds, else in single precision. only: for weights of
    this type. whole: all rows of a batch must be there.
    """

    at_input: Rounding | None
    within: Rounding | None
    weights: Rounding | None = None
    as_kernels: bool = False
    sums: Sums | None = None
    only: GGMLQuantizationType | None = None
    whole: bool = False


def _ways() -> Iterator[Way]:
    for name, each in ROUNDINGS.items():
        yield Way(each, each, whole=name in BY_BATCH)
    for name in ("bf16", "bf16 cut off", "tf32 cut off"):  # matrix units that take both factors so
        yield Way(ROUNDINGS[name], ROUNDINGS[name], ROUNDINGS[name])
    channels = partial(to_codes, block=0)  # KleidiAI repacks Q8_0 with one step for each neuron
    for name in ("codes with offset by row", "codes by row"):
        yield Way(ROUNDINGS[name], ROUNDINGS[name], channels, only=GGMLQuantizationType.Q8_0)
    for as_kernels in (True, False):
        for name, each in ROUNDINGS.items():
            yield Way(each, None, as_kernels=as_kernels, whole=name in BY_BATCH)
            yield Way(None, each, as_kernels=as_kernels, whole=name in BY_BATCH)
    for name, each in ROUNDINGS.items():
        yield Way(each, each, as_kernels=True, whole=name in BY_BATCH)
    for sums in BF16_SUMS:
        yield Way(ROUNDINGS["bf16"], ROUNDINGS["bf16"], ROUNDINGS["bf16"], sums=sums)
        yield Way(None, None, sums=sums)


WAYS: Final = tuple(_ways())


def coarse_rows(
    layer: LayerExperts,
    program: ExpertProgram,
    expert: int,
    read: ReadSlice,
    x: F32,
    some: NDArray[np.intp],
    ways: Collection[int] | None = None,
) -> Iterator[tuple[int, F32]]:
    """What the expert gives for `some` of the rows x [n, n_in] in each known way, or in these: its number and
    [len(some), n_out], one after the other.

    Raises:
        UnsupportedModel: weights that cannot be dequantised here.
    """
    backend = _Rounding()
    backend.load_layer(layer, program, [expert], read)
    numbers = range(len(WAYS)) if ways is None else sorted(ways)
    for _, group in groupby(numbers, lambda number: _alike(WAYS[number])):
        alike = list(group)
        whole = WAYS[alike[0]].whole
        rows = x if whole else x[some]
        step = max(1, _ROWS_AT_ONCE // len(rows))
        for start in range(0, len(alike), step):
            now = alike[start : start + step]
            found = backend.rows(layer.layer, expert, rows, [WAYS[number] for number in now])
            for number, values in zip(now, np.split(found, len(now)), strict=True):
                yield number, values[some] if whole else values


def _alike(way: Way) -> tuple[object, ...]:
    """What ways have in common that can be computed at once."""
    return way.weights, way.as_kernels, way.sums, way.only, way.whole


class _Rounding(NumpyExperts):
    """Products of one expert over rows in several ways at once: the same rows, one way after the other."""

    def __init__(self) -> None:
        super().__init__("float32")
        self._ways: Sequence[Way] = ()
        self._of_input: Iterator[bool] = iter(())

    def rows(self, layer: int, expert: int, x: F32, ways: Sequence[Way]) -> F32:
        """[ways * n, n_out]; the ways are `_alike`."""
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
        if (sums := self._ways[0].sums) is not None:
            return sums(np.concatenate(parts), weight)
        return super()._multiply(np.concatenate(parts), weight, kind)
