"""Kernels as they might be: NumPy backends that add, or round activations, in ways that are not this machine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from gguf import GGMLQuantizationType

from backends.experts import F32, I32, ExpertBackend, ReadSlice
from backends.manifest import LayerExperts
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram


class Interleaved(NumpyExperts):
    """Half-precision sums: `lanes` of them side by side, added up at the end. One is a plain running sum."""

    def __init__(self, lanes: int) -> None:
        super().__init__("float32")
        self.name = f"halves-{lanes}"
        self._lanes = lanes

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        a, weight = (v.astype(np.float16).astype(np.float32) for v in (a, weight))
        total = np.zeros((len(a), len(weight), self._lanes), np.float16)
        for start in range(0, a.shape[1], self._lanes):
            run = slice(start, start + self._lanes)
            total = (total + a[:, None, run] * weight[None, :, run]).astype(np.float16)  # rounded once, as by an FMA
        while total.shape[-1] > 1:
            total = total[..., ::2] + total[..., 1::2]
        return total[..., 0].astype(np.float32)


class RoundsInBlocks(NumpyExperts):
    """Activations in 8-bit blocks of a size that nobody else has (0: the whole row), sums in F32."""

    def __init__(self, block: int) -> None:
        super().__init__("float32")
        self.name = f"blocks-{block}"
        self._block = block

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        return rounded_in_blocks(np.asarray(a, np.float32), self._block) @ weight.T


class Rounds(NumpyExperts):
    """Rounds what its products take, by their number in the program."""

    def __init__(self, roundings: list[Callable[[F32], F32] | None], *, as_kernels: bool = False) -> None:
        super().__init__("float32", quantize_activations=as_kernels)
        self._roundings = roundings
        self._product = 0

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        rounding = self._roundings[self._product % len(self._roundings)]
        self._product += 1
        values = np.asarray(a, np.float32)
        return super()._multiply(values if rounding is None else rounding(values), weight, kind)


class ChangesWithWidth(ExpertBackend):
    """One arithmetic below a number of rows and another from there on, as GPUs have. `honours`: F32 if asked for."""

    def __init__(self, narrow: ExpertBackend, wide: ExpertBackend, at: int, *, honours: bool = False) -> None:
        self.name = f"{narrow.name}-then-{wide.name}"
        self._narrow, self._wide, self._at, self._honours = narrow, wide, at, honours

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        for backend in (self._narrow, self._wide):
            backend.load_layer(layer, program, experts, read)

    def unload_layer(self, layer: int) -> None:
        for backend in (self._narrow, self._wide):
            backend.unload_layer(layer)

    def held(self, layer: int) -> frozenset[int]:
        return self._narrow.held(layer)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        narrow = len(experts) < self._at or (ask_f32 and self._honours)
        return (self._narrow if narrow else self._wide).compute(layer, x, tokens, experts, ask_f32=ask_f32)

    def close(self) -> None:
        for backend in (self._narrow, self._wide):
            backend.close()


def rounded_in_blocks(x: F32, block: int, levels: int = 127) -> F32:
    """Rows with each block of values rounded to whole steps of its largest / `levels`; 0 takes the row for a block."""
    blocks = x.reshape(len(x), -1, block or x.shape[1])
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(levels)
    steps = np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)
    return np.asarray(np.rint(steps) * step, np.float32).reshape(x.shape)
