"""Backends that add in half precision, for daemons of tests: [compute] factory = "tests.half_backends:CLASS"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts, ReadSlice
from backends.manifest import LayerExperts
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram

TURN_FILE: Final = "SWARMNODE_TEST_TURN_FILE"
"""The variable that names the file which turns a Turncoat."""


class BoastfulHalves(NumpyExperts):
    """Adds in half precision and says otherwise."""

    def __init__(self, *, threads: int) -> None:
        super().__init__("float16")
        self.declares = ("f32", "f32")


class Turncoat:
    """ggml's kernels, when measured and probed, and half precision once a file is there."""

    def __init__(self, *, threads: int) -> None:
        self.name = "turncoat"
        self._turn = Path(os.environ[TURN_FILE])
        self._good, self._bad = GgmlExperts(Device("CPU", threads=threads)), NumpyExperts("float16")

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        for backend in (self._good, self._bad):
            backend.load_layer(layer, program, experts, read)

    def unload_layer(self, layer: int) -> None:
        for backend in (self._good, self._bad):
            backend.unload_layer(layer)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        backend = self._bad if self._turn.exists() else self._good
        return backend.compute(layer, x, tokens, experts, ask_f32=ask_f32)

    def held(self, layer: int) -> frozenset[int]:
        return self._good.held(layer)

    @property
    def bytes_held(self) -> int:
        return self._good.bytes_held

    def close(self) -> None:
        self._good.close()
        self._bad.close()
