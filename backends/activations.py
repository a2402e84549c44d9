"""Activations in the kernel's own type.

ggml's CPU kernels round activations to Q8_0 (blocks of 32 values: an F16 scale and 32 signed bytes) before they
multiply by Q4_0, Q8_0 and their relatives. If the leader rounds once and sends that, rounding again on the worker
changes nothing: the same bits with 3.76 times fewer bytes, and one decision less in the workers' hands. For other
weight types the kernels round to other blocks, for which this is not exact: `q8_0_is_exact` says no.
"""

from __future__ import annotations

import ctypes as ct
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.ggml import TYPE_Q8_0, cpu_library, library
from backends.manifest import LayerExperts
from backends.program import ExpertProgram

BLOCK: Final = 32
BLOCK_BYTES: Final = 34


class _CpuTraits(ct.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", ct.c_void_p),
        ("vec_dot", ct.c_void_p),
        ("vec_dot_type", ct.c_int),
        ("nrows", ct.c_int64),
    )


@cache
def _traits(ggml_type: int) -> _CpuTraits | None:
    handle = cpu_library()
    if handle is None:
        return None
    get: Any = ct.CFUNCTYPE(ct.POINTER(_CpuTraits), ct.c_int)(("ggml_get_type_traits_cpu", handle))
    traits: _CpuTraits = get(ggml_type).contents
    return traits


def q8_0_is_exact(layer: LayerExperts, program: ExpertProgram) -> bool:
    """Whether this machine's CPU kernels see the same bits when the layer's activations travel as Q8_0."""
    if layer.n_in % BLOCK or not program.x_is_only_multiplied():
        return False
    types = {t.name: t.type for t in layer.tensors}
    for name in program.first_matmul_weights():
        traits = _traits(types[name])
        if traits is None or traits.vec_dot_type != TYPE_Q8_0:
            return False
    return True


@cache
def _quantizer() -> Any:
    library()
    traits = _traits(TYPE_Q8_0)
    if traits is None:
        raise RuntimeError("no CPU kernels to quantise with; q8_0_is_exact says so")
    return ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p, ct.c_int64)(traits.from_float)


def quantize_q8_0(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows x [T, n] as Q8_0 blocks [T, n / 32 * 34], by the CPU kernels' own rounding. n is a multiple of 32."""
    rows, width = x.shape
    out = np.empty((rows, width // BLOCK * BLOCK_BYTES), np.uint8)
    source = np.ascontiguousarray(x, np.float32)
    _quantizer()(source.ctypes.data, out.ctypes.data, rows * width)
    return out


def dequantize_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values [T, n] of Q8_0 blocks [T, n / 32 * 34]."""
    rows, row_bytes = blocks.shape
    source = np.ascontiguousarray(blocks, np.uint8)
    values = np.empty((rows, row_bytes // BLOCK_BYTES * BLOCK), np.float32)
    library().dequantize_row_q8_0(source.ctypes.data, values.ctypes.data, values.size)
    return values
