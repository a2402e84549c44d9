"""Peers that cheat: expert backends that compute something else than the model, in every dispatch or in one of many.

Each is an ExpertBackend that a daemon loads as any other of one's own:

    [compute]
    factory = "swarmnode.experiment.cheats:WrongExpert"

A daemon's cheat reads two variables: SWARMNODE_CHEAT_HONEST_FIRST, so many dispatches it computes right before it
begins (the probe is a few for each layer), and SWARMNODE_CHEAT_EVERY, of how many dispatches it then cheats in one.

Two kinds cheat with rows, two with weights. Those with weights keep the type and the layout: their kernels run as fast,
and nothing but numbers tells.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from backends.device import Device
from backends.experts import F32, I32, ExpertBackend, GgmlExperts, ReadSlice
from backends.ggml import library
from backends.manifest import LayerExperts
from backends.program import ExpertProgram

HONEST_FIRST: Final = "SWARMNODE_CHEAT_HONEST_FIRST"
EVERY: Final = "SWARMNODE_CHEAT_EVERY"

_PLAIN: Final = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class Cheat:
    """Right rows, and wrong ones in some dispatches: those that a hash of the dispatch's number chooses.

    kernels: what computes. every: of how many dispatches one is wrong (if nobody says: of the class's own `every`).
    honest_first: before the first wrong one.
    """

    every: int = 1

    def __init__(
        self,
        kernels: Callable[[], ExpertBackend] | None = None,
        *,
        threads: int = 1,
        every: int | None = None,
        honest_first: int | None = None,
    ) -> None:
        self._make = kernels or (lambda: GgmlExperts(Device("CPU", threads=threads)))
        self._right = self._make()
        self._every = int(os.environ.get(EVERY, self.every)) if every is None else every
        self._honest_first = int(os.environ.get(HONEST_FIRST, "0")) if honest_first is None else honest_first
        self._dispatches = 0
        self._layers: dict[int, LayerExperts] = {}
        self.name = f"cheat:{type(self).__name__}"

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        self._dispatches += 1
        rows = self._right.compute(layer, x, tokens, experts, ask_f32=ask_f32)
        if len(rows) == 0 or not self._cheats_now():
            self.saw(rows)
            return rows
        wrong = np.ascontiguousarray(self.wrong(layer, x, tokens, experts, rows, ask_f32), np.float32)
        self.saw(rows)
        return wrong

    def _cheats_now(self) -> bool:
        number = self._dispatches - self._honest_first
        hashed = int.from_bytes(hashlib.blake2b(b"%d" % number, digest_size=8).digest(), "big")
        return number > 0 and hashed % self._every == 0

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        """What to answer in place of `right` [R, n_out]."""
        raise NotImplementedError

    def saw(self, right: F32) -> None:
        """The right rows of a dispatch, whatever was answered."""

    # -- as of any backend --------------------------------------------------------------------------------------

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self._layers[layer.layer] = layer
        self._right.load_layer(layer, program, experts, read)

    def unload_layer(self, layer: int) -> None:
        self._right.unload_layer(layer)

    def held(self, layer: int) -> frozenset[int]:
        return self._right.held(layer)

    def close(self) -> None:
        self._right.close()


class WrongExpert(Cheat):
    """Computes with the next expert that it holds; with the one that was asked for where it holds no other."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        held = sorted(self.held(layer))
        following = np.zeros(max(held) + 1, np.int32)
        following[held] = np.roll(held, -(len(held) // 2) or -1)
        return self._right.compute(layer, x, tokens, following[experts], ask_f32=ask_f32)


class Stale(Cheat):
    """Answers with the rows of the dispatch before."""

    _last: F32 | None = None

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        if self._last is None or self._last.shape[1] != right.shape[1]:
            return np.zeros_like(right)
        return np.resize(self._last, right.shape)

    def saw(self, right: F32) -> None:
        if len(right):
            self._last = right


class Random(Cheat):
    """Answers with noise, as large as right rows are."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        noise = np.random.default_rng(self._dispatches).standard_normal(right.shape, np.float32)
        wrong: F32 = noise * _norms(right) / _norms(noise)
        return wrong


class Zeros(Cheat):
    """Computes nothing."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return np.zeros_like(right)


class CopiedInput(Cheat):
    """Computes nothing, and sends the activations back, as large as right rows are."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        copied = np.resize(x[tokens], right.shape) if x.shape[1] != right.shape[1] else x[tokens]
        return np.asarray(copied * (_norms(right) / np.maximum(_norms(copied), np.float32(1e-30))), np.float32)


class SkippedExpert(Cheat):
    """Leaves one expert of each dispatch out."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        rows = right.copy()
        rows[experts == experts[-1]] = 0
        return rows


class SwappedOutputs(Cheat):
    """Two rows of every down projection are exchanged: two values of each result."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        rows = right.copy()
        rows[:, [0, 1]] = rows[:, [1, 0]]
        return rows


class Scaled(Cheat):
    """Every down projection is three percent too large."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return right * np.float32(1.03)


class OtherWeights(Cheat):
    """Computes with weights that were changed when they were loaded; holds both kinds, which a real cheat need not."""

    def __init__(
        self,
        kernels: Callable[[], ExpertBackend] | None = None,
        *,
        threads: int = 1,
        every: int | None = None,
        honest_first: int | None = None,
    ) -> None:
        super().__init__(kernels, threads=threads, every=every, honest_first=honest_first)
        self._other = self._make()

    def change(self, values: F32, kind: GGMLQuantizationType) -> F32:
        """A matrix [rows, n] as this peer would have it."""
        raise NotImplementedError

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return self._other.compute(layer, x, tokens, experts, ask_f32=ask_f32)

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        super().load_layer(layer, program, experts, read)

        def changed(expert: int, index: int) -> bytes:
            tensor, raw = layer.tensors[index], bytes(read(expert, index))
            if len(tensor.shape) != 2:
                return raw
            kind = GGMLQuantizationType(tensor.type)
            values = np.asarray(gguf.dequantize(_rows_of(raw, tensor.shape[1], kind), kind), np.float32)
            return _quantise(self.change(values.reshape(tensor.shape[1], tensor.shape[0]), kind), kind)

        self._other.load_layer(layer, program, experts, changed)

    def unload_layer(self, layer: int) -> None:
        super().unload_layer(layer)
        self._other.unload_layer(layer)

    def close(self) -> None:
        super().close()
        self._other.close()


class Requantised(OtherWeights):
    """Serves a smaller quantisation as the one that was asked for: one bit a weight less, in blocks of 32."""

    def change(self, values: F32, kind: GGMLQuantizationType) -> F32:
        bits = _BITS.get(kind, 4)
        blocks = values.reshape(-1, 32)
        low = blocks.min(axis=1, keepdims=True)
        step = np.maximum((blocks.max(axis=1, keepdims=True) - low) / (2**bits - 1), np.float32(1e-20))
        coarse: F32 = (np.round((blocks - low) / step) * step + low).astype(np.float32)
        return coarse.reshape(values.shape)


class SomeWeights(OtherWeights):
    """One weight in a thousand has its neighbour's value."""

    def change(self, values: F32, kind: GGMLQuantizationType) -> F32:
        chosen = np.random.default_rng(values.size).random(values.shape) < 1e-3
        return np.where(chosen, np.roll(values, 1, axis=1), values)


class OneNeuron(OtherWeights):
    """One row of each matrix is the one before it."""

    def change(self, values: F32, kind: GGMLQuantizationType) -> F32:
        changed = values.copy()
        changed[1] = changed[0]
        return changed


_BITS: Final = {
    GGMLQuantizationType.Q8_0: 6, GGMLQuantizationType.Q6_K: 5, GGMLQuantizationType.Q5_K: 4,
    GGMLQuantizationType.Q5_0: 4, GGMLQuantizationType.Q5_1: 4, GGMLQuantizationType.Q4_K: 3,
    GGMLQuantizationType.Q4_0: 3, GGMLQuantizationType.Q4_1: 3, GGMLQuantizationType.Q3_K: 2,
}  # fmt: skip
"""Bits a weight of what is served in place of a type; of any other, 4."""


@dataclass(frozen=True, slots=True)
class CheatKind:
    """A cheat by its name. every: of how many dispatches one is wrong."""

    name: str
    make: type[Cheat]
    every: int = 1


CHEATS: Final = (
    CheatKind("wrong-expert", WrongExpert),
    CheatKind("requantised", Requantised),
    CheatKind("stale", Stale),
    CheatKind("random", Random),
    CheatKind("zeros", Zeros),
    CheatKind("copied-input", CopiedInput),
    CheatKind("skipped-expert", SkippedExpert),
    CheatKind("swapped-outputs", SwappedOutputs),
    CheatKind("scaled", Scaled),
    CheatKind("some-weights", SomeWeights),
    CheatKind("one-neuron", OneNeuron),
    CheatKind("wrong-expert-1-in-10", WrongExpert, 10),
    CheatKind("requantised-1-in-10", Requantised, 10),
    CheatKind("zeros-1-in-20", Zeros, 20),
)


def by_name() -> Mapping[str, CheatKind]:
    return {kind.name: kind for kind in CHEATS}


def _norms(rows: F32) -> F32:
    return np.asarray(np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def _rows_of(raw: bytes, rows: int, kind: GGMLQuantizationType) -> NDArray[np.generic]:
    data = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    return data.view(np.float32) if kind is GGMLQuantizationType.F32 else data


def _quantise(values: F32, kind: GGMLQuantizationType) -> bytes:
    """As the type's own bytes, by ggml."""
    values = np.ascontiguousarray(values, np.float32)
    if kind in _PLAIN:
        return np.asarray(gguf.quantize(values, kind)).tobytes()
    rows, width = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty(rows * width // block * size, np.uint8)
    library().ggml_quantize_chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, width, None)
    return out.tobytes()
