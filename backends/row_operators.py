"""Softmax and RMS norm over rows, on a ggml device and in NumPy.

No expert computes them, so no ExpertBackend has them, but every trunk does. They are here to be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.device import Device
from backends.ggml import STATUS_SUCCESS, TYPE_F32, InitParams, library, read_tensor, write_tensor
from capabilities.errors import Internal

F32 = NDArray[np.float32]

EPSILON: Final = 1e-5  # under the root of a norm, as most models have it
_NODES: Final = 8


class RowOperators(Protocol):
    """Each takes rows [R, width] and returns rows of the same shape, F32."""

    def softmax(self, x: F32) -> F32: ...

    def rms_norm(self, x: F32) -> F32: ...


class GgmlRows:
    """RowOperators by a ggml device's kernels."""

    def __init__(self, device: Device) -> None:
        self._device, self._lib = device, library()

    def softmax(self, x: F32) -> F32:
        return self._run(x, self._lib.ggml_soft_max)

    def rms_norm(self, x: F32) -> F32:
        return self._run(x, lambda context, rows: self._lib.ggml_rms_norm(context, rows, EPSILON))

    def _run(self, x: F32, operator: Callable[[int, int], int]) -> F32:
        lib = self._lib
        room = _NODES * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(_NODES, False)
        context = lib.ggml_init(InitParams(room, None, True))
        rows = lib.ggml_new_tensor_2d(context, TYPE_F32, x.shape[1], x.shape[0])
        out = operator(context, rows)
        graph = lib.ggml_new_graph_custom(context, _NODES, False)
        lib.ggml_build_forward_expand(graph, out)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, self._device.buffer_type)
        try:
            if not buffer:
                raise Internal(f"{self._device.name} has no memory for {x.shape} values")
            write_tensor(lib, rows, np.ascontiguousarray(x, np.float32))
            if lib.ggml_backend_graph_compute(self._device.backend, graph) != STATUS_SUCCESS:
                raise Internal(f"{self._device.name} failed to compute rows")
            result: F32 = read_tensor(lib, out, np.float32)[0, 0]
        finally:
            if buffer:
                lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(context)
        return result


class NumpyRows:
    """RowOperators by their formulas, computed in `dtype`."""

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self._dtype = dtype

    def softmax(self, x: F32) -> F32:
        values = x.astype(self._dtype)
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)

    def rms_norm(self, x: F32) -> F32:
        values = x.astype(self._dtype)
        mean = (values * values).mean(axis=1, keepdims=True)
        return np.asarray(values / np.sqrt(mean + self._dtype(EPSILON)), np.float32)
