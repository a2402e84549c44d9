"""The leader's own copy: experts that no worker can give at this moment, computed from the model's own file.

It is what a layer falls back to when the last holder of an expert fails in its middle, so it is slow and rare: an
expert is read when it is needed, and those needed last are kept within a bound. Layers whose experts are alike share
room for them, made once: to read another expert is to write it over the one that was not needed for longest. The
kernels are those of the workers, so on alike processors the bits are, too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.manifest import ExpertSource, LayerExperts, Manifest
from backends.program import ExpertProgram

OWN_COPY: Final = "own copy"
"""Its name among peers, in routings and in errors; no peer id looks like it."""

OWN_COPY_BYTES_MAX: Final = 256 << 20  # a layer or two of a large model: more would be a worker, which a budget is for
_PLACES_MIN: Final = 2  # ggml repacks no fewer


class OwnExperts:
    """Computes any expert of a model. Not thread-safe: the decode thread calls it, and after that has ended `close`.

    make_device is called once, when it is first needed: kernels of another thread must not run on the same one.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: ExpertSource,
        make_device: Callable[[], Device],
        bytes_max: int = OWN_COPY_BYTES_MAX,
    ) -> None:
        self.loads = 0  # experts read since the start
        self.kernels_s = 0.0  # processor time of computing alone
        self._manifest = manifest
        self._source = source
        self._make_device = make_device
        self._device: Device | None = None
        alike: dict[object, list[LayerExperts]] = {}
        for layer in manifest.layers:
            alike.setdefault((layer.program, layer.n_in, layer.n_out, layer.tensors), []).append(layer)
        self._rooms: dict[int, _Room] = {}  # by layer
        for layers in alike.values():
            fit = bytes_max // len(alike) // layers[0].expert_bytes
            room = _Room(layers[0], max(_PLACES_MIN, min(fit, sum(each.n_expert for each in layers))))
            self._rooms |= {each.layer: room for each in layers}

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        """Row r of the result [R, n_out] is expert experts[r] applied to x[tokens[r]], as of ExpertBackend.compute.

        Raises:
            SwarmError: the file cannot be read, or there is no memory.
        """
        out = np.empty((len(experts), self._manifest.experts_of(layer).n_out), np.float32)
        room = self._rooms[layer]
        wanted = np.unique(experts).tolist()
        for start in range(0, len(wanted), room.places):
            some = wanted[start : start + room.places]
            place_of = np.full(self._manifest.experts_of(layer).n_expert, -1, np.int32)
            place_of[some] = self._places(room, layer, some)
            chosen = np.flatnonzero(place_of[experts] >= 0)
            began_s = time.thread_time()
            out[chosen] = room.compute(x, tokens[chosen], place_of[experts[chosen]], ask_f32=ask_f32)
            self.kernels_s += time.thread_time() - began_s
        return out

    def holds(self, layer: int, expert: int) -> bool:
        """Whether it would not be read anew."""
        return (layer, expert) in self._rooms[layer].kept

    def close(self) -> None:
        for room in self._rooms.values():
            room.close()

    def _places(self, room: _Room, layer: int, experts: Sequence[int]) -> list[int]:
        """Where these are, no more than there are places; read where they are not."""
        if room.backend is None:
            if self._device is None:
                self._device = self._make_device()
            room.open(self._device, ExpertProgram.from_bytes(self._manifest.programs[room.spec.program]))
        for expert in experts:  # first of all, so that none of them makes room for another
            if (layer, expert) in room.kept:
                room.kept.move_to_end((layer, expert))
        for expert in experts:
            if (layer, expert) not in room.kept:
                self._read(room, layer, expert)
        return [room.kept[layer, expert] for expert in experts]

    def _read(self, room: _Room, layer: int, expert: int) -> None:
        spec = self._manifest.experts_of(layer)
        room.put(
            (layer, expert),
            lambda index: self._source.read(layer, expert, spec.offsets[index], spec.tensors[index].nbytes),
        )
        self.loads += 1


class _Room:
    """Places for experts of layers that are alike: to its backend a layer with so many experts. spec: that layer."""

    def __init__(self, layer: LayerExperts, places: int) -> None:
        self.spec = replace(layer, n_expert=places, hashes=())
        self.places = places
        self.backend: GgmlExperts | None = None
        self.kept: OrderedDict[tuple[int, int], int] = OrderedDict()  # (layer, expert) -> place, last needed last
        self._free = list(range(places))

    def open(self, device: Device, program: ExpertProgram) -> None:
        backend = GgmlExperts(device)
        backend.reserve(self.spec, program)
        self.backend = backend

    def put(self, key: tuple[int, int], read: Callable[[int], memoryview | bytes]) -> None:
        """Write an expert into a place that is free, or over the one that was not needed for longest."""
        assert self.backend is not None
        if not self._free:
            self._free.append(self.kept.popitem(last=False)[1])
        self.backend.put(self.spec.layer, self._free[-1], read)  # which may fail
        self.kept[key] = self._free.pop()

    def compute(self, x: F32, tokens: I32, places: I32, *, ask_f32: bool) -> F32:
        assert self.backend is not None
        return self.backend.compute(self.spec.layer, x, tokens, places, ask_f32=ask_f32)

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()
            self.backend = None
        self.kept.clear()
        self._free = list(range(self.places))
