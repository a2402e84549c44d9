"""Expert backends of another arithmetic, or of another function, for `module:Class`."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.numpy_functions import round_activations
from backends.numpy_reference import NumpyExperts

WIDE = 32  # rows of a batch
IN_STEP = 0.01  # of a row's root mean square


class OffByAThousandth(GgmlExperts):
    """Subtly wrong weights: every result is too large by a thousandth."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(Device("CPU", threads=threads))

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        return super().compute(layer, x, tokens, experts, ask_f32=ask_f32) * np.float32(1.001)


class WrongExpert(GgmlExperts):
    """Each row from the neighbour of the expert that was asked for."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(Device("CPU", threads=threads))

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        held = max(self.held(layer)) + 1
        return super().compute(layer, x, tokens, (experts + 1) % np.int32(held), ask_f32=ask_f32)


class HalfWhenWide(NumpyExperts):
    """Like many a GPU: adds in half precision only where a batch is wide."""

    def __init__(self, *, threads: int) -> None:
        super().__init__("float64")

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        self._accumulate = "float16" if len(x) > WIDE else "float64"
        return super().compute(layer, x, tokens, experts, ask_f32=ask_f32)


class RoundsWhenWide(NumpyExperts):
    """Adds exactly, but where a batch is wide activations are in half precision, as on many a GPU that is asked for
    single precision."""

    def __init__(self, *, threads: int) -> None:
        super().__init__("float64")

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        rounded = x.astype(np.float16).astype(np.float32) if len(x) > WIDE else x
        return super().compute(layer, rounded, tokens, experts, ask_f32=ask_f32)


class BlocksOf32(NumpyExperts):
    """Rounds activations to 8 bits in blocks of 32 whatever the weights' own blocks are, as CUDA does."""

    def __init__(self, *, threads: int) -> None:
        super().__init__("float64")

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        return super().compute(layer, round_activations(x, GGMLQuantizationType.Q8_0), tokens, experts, ask_f32=ask_f32)


class AlwaysTheSameWay(GgmlExperts):
    """Every result is off by a little, and always in the same direction: errors that add up in step over the layers."""

    STEP = IN_STEP

    def __init__(self, *, threads: int) -> None:
        super().__init__(Device("CPU", threads=threads))

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        y = super().compute(layer, x, tokens, experts, ask_f32=ask_f32)
        size = np.sqrt((y * y).mean(axis=1, keepdims=True))
        return y + np.float32(self.STEP) * size


class TwiceTheSameWay(AlwaysTheSameWay):
    """The same, by twice as much."""

    STEP = 2 * IN_STEP
