"""The leader's own copy: experts that no worker can give at this moment, computed from the model's own file.

It is what a layer falls back to when the last holder of an expert fails in its middle, so it is slow and rare: an
expert is read when it is needed, and those needed last are kept within a bound. The kernels are those of the workers,
and each expert is loaded as a share of one, so on alike processors the bits are, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.manifest import ExpertSource, Manifest
from swarmnode.local_experts import load_layer

OWN_COPY: Final = "own copy"
"""Its name among peers, in routings and in errors; no peer id looks like it."""

OWN_COPY_BYTES_MAX: Final = 256 << 20  # a layer or two of a large model: more would be a worker, which a budget is for


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
        self._manifest = manifest
        self._source = source
        self._make_device = make_device
        self._device: Device | None = None
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[int, int], GgmlExperts] = OrderedDict()

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        """Row r of the result [R, n_out] is expert experts[r] applied to x[tokens[r]], as of ExpertBackend.compute.

        Raises:
            SwarmError: the file cannot be read, or there is no memory.
        """
        out = np.empty((len(experts), self._manifest.experts_of(layer).n_out), np.float32)
        for expert in np.unique(experts).tolist():
            chosen = np.flatnonzero(experts == expert)
            rows = np.arange(len(chosen), dtype=np.int32)
            backend = self._backend(layer, expert)
            out[chosen] = backend.compute(layer, x[tokens[chosen]], rows, experts[chosen], ask_f32=ask_f32)
        return out

    def holds(self, layer: int, expert: int) -> bool:
        """Whether it would not be read anew."""
        return (layer, expert) in self._kept

    def close(self) -> None:
        for backend in self._kept.values():
            backend.close()
        self._kept.clear()
        self._bytes = 0

    def _backend(self, layer: int, expert: int) -> GgmlExperts:
        backend = self._kept.get((layer, expert))
        if backend is not None:
            self._kept.move_to_end((layer, expert))
            return backend
        size = 2 * self._manifest.experts_of(layer).expert_bytes  # a repacked share of one is held twice
        while self._kept and self._bytes + size > self._bytes_max:
            (number, _), oldest = self._kept.popitem(last=False)
            oldest.close()
            self._bytes -= 2 * self._manifest.experts_of(number).expert_bytes
        if self._device is None:
            self._device = self._make_device()
        backend = GgmlExperts(self._device)
        load_layer(backend, self._manifest, layer, [expert], self._source)
        self.loads += 1
        self._kept[layer, expert] = backend
        self._bytes += size
        return backend
