"""An expert backend of plain arithmetic that notices misuse: computing after its end, or without its experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from backends.experts import F32, I32
from backends.manifest import LayerExperts
from tests.memory_swarm import rows_of
from tests.patience import PATIENCE_S


class FakeBackend:
    """Holds what it is told to. `hold` keeps computations waiting; `fault` is raised by loading and computing."""

    name = "fake"

    def __init__(self) -> None:
        self.layers: dict[int, tuple[LayerExperts, tuple[int, ...]]] = {}
        self.closed = False
        self.computing = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self.fault: Exception | None = None
        self.asked_f32: list[bool] = []

    def load_layer(
        self, layer: LayerExperts, program: Any, experts: Sequence[int], read: Callable[[int, int], Any]
    ) -> None:
        if self.fault is not None:
            raise self.fault
        assert self.hold.wait(PATIENCE_S)
        for expert in experts:
            for index, tensor in enumerate(layer.tensors):
                assert len(read(expert, index)) == tensor.nbytes
        self.layers[layer.layer] = (layer, tuple(experts))

    def unload_layer(self, layer: int) -> None:
        self.layers.pop(layer, None)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        self.computing.set()
        assert self.hold.wait(PATIENCE_S)
        assert not self.closed, "memory was freed under a kernel"
        if self.fault is not None:
            raise self.fault
        spec, held = self.layers[layer]
        assert set(experts.tolist()) <= set(held)
        self.asked_f32.append(ask_f32)
        return rows_of(layer, x, tokens, experts, spec.n_out)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
