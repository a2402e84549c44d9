"""Kernels whose process ends in the middle: started anew, a bounded number of times, with the experts that they held.

Drivers crash now and then (Mesa's does, while it compiles a shader), and minutes of comparing should not be lost by it.
The call in which it happened is made again: its numbers are those of a process that came through. Each time is kept,
with the driver's last words, and told in the report. A process that ends over the same call again and again knows no
better, and the third time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from backends.experts import F32, I32, ExpertBackend, ReadSlice
from backends.manifest import LayerExperts
from backends.program import ExpertProgram
from backends.row_operators import RowOperators
from capabilities.errors import KernelFailed

IN_A_ROW_MAX: Final = 2  # for one call
IN_ALL_MAX: Final = 10  # of one target, whatever it was at: a driver that needs more is not to be measured

Result = TypeVar("Result")


class Restarts:
    """`reasons`: what was said each time, the oldest first."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def call(self, work: Callable[[], Result], restore: Callable[[], object] = lambda: None) -> Result:
        """What `work` gives; if its process ends, once more after `restore`.

        Raises:
            KernelFailed: it ends every time, or has too often.
        """
        failed = 0
        while True:
            try:
                if failed:
                    restore()
                return work()
            except KernelFailed as error:
                if failed == IN_A_ROW_MAX or len(self.reasons) == IN_ALL_MAX:
                    raise
                failed += 1
                self.reasons.append(error.message)


class RestartedExperts:
    """ExpertBackend that loads again what it held."""

    def __init__(self, experts: ExpertBackend, restarts: Restarts) -> None:
        self.name = experts.name
        self.declares = getattr(experts, "declares", ("unknown", "unknown"))
        self._experts = experts
        self._restarts = restarts
        self._loaded: dict[int, tuple[LayerExperts, ExpertProgram, Sequence[int], ReadSlice]] = {}

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self.unload_layer(layer.layer)
        wanted = layer, program, experts, read
        self._restarts.call(lambda: self._experts.load_layer(*wanted), self._restore)
        self._loaded[layer.layer] = wanted

    def unload_layer(self, layer: int) -> None:
        self._loaded.pop(layer, None)
        self._experts.unload_layer(layer)

    def held(self, layer: int) -> frozenset[int]:
        return self._experts.held(layer)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        return self._restarts.call(
            lambda: self._experts.compute(layer, x, tokens, experts, ask_f32=ask_f32), self._restore
        )

    def close(self) -> None:
        self._loaded.clear()
        self._experts.close()

    def _restore(self) -> None:
        for wanted in self._loaded.values():
            self._experts.load_layer(*wanted)


class RestartedRows:
    """RowOperators, which hold nothing."""

    def __init__(self, rows: RowOperators, restarts: Restarts) -> None:
        self._rows, self._restarts = rows, restarts

    def softmax(self, x: F32) -> F32:
        return self._restarts.call(lambda: self._rows.softmax(x))

    def rms_norm(self, x: F32) -> F32:
        return self._restarts.call(lambda: self._rows.rms_norm(x))
