"""The formulas behind a program's operators, in NumPy: activation functions, gated units, and the kernels' roundings.

They are ggml's (ggml-cpu/vec.h, unary-ops.cpp, ops.cpp), computed in whatever precision the input has. Two things that
ggml's CPU kernels do are left out of the formulas and kept apart, since other devices do not do them: they look GELU
and GELU_QUICK up in a table of half-precision numbers (`GELU_BY_TABLE`), and they round the activations of a matrix
product to 8 or 16 bits, which depends on the weight's type (`round_activations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

Rows = NDArray[np.floating[Any]]  # [rows, width]

_SQRT_2_OVER_PI: Final = math.sqrt(2 / math.pi)
_SUPER_BLOCK: Final = 256
_BLOCK: Final = 32
_LEVELS: Final = 127  # of a signed byte, in both directions


def _sigmoid(x: Rows) -> Rows:
    return 1 / (1 + np.exp(-x))


def _erf(x: Rows) -> Rows:
    exact: Rows = np.vectorize(math.erf, otypes=[x.dtype])(x)
    return exact


def _gelu(x: Rows) -> Rows:
    y: Rows = 0.5 * x * (1 + np.tanh(_SQRT_2_OVER_PI * x * (1 + 0.044715 * x * x)))
    return y


def _gelu_quick(x: Rows) -> Rows:
    return x * _sigmoid(1.702 * x)


def _gelu_erf(x: Rows) -> Rows:
    return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))


def _silu(x: Rows) -> Rows:
    return x * _sigmoid(x)


def _hard_sigmoid(x: Rows) -> Rows:
    return np.clip((x + 3) / 6, 0, 1)


UNARY_FUNCTIONS: Final[dict[str, Callable[[Rows], Rows]]] = {
    "ABS": np.abs,
    "SGN": np.sign,
    "NEG": np.negative,
    "STEP": lambda x: (x > 0).astype(x.dtype),
    "TANH": np.tanh,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "RELU": lambda x: np.maximum(x, 0),
    "SIGMOID": _sigmoid,
    "GELU": _gelu,
    "GELU_QUICK": _gelu_quick,
    "GELU_ERF": _gelu_erf,
    "SILU": _silu,
    "HARDSWISH": lambda x: x * _hard_sigmoid(x),
    "HARDSIGMOID": _hard_sigmoid,
    "EXP": np.exp,
    "SOFTPLUS": lambda x: np.logaddexp(x, np.zeros_like(x)),
}


def _by_table(function: Callable[[Rows], Rows]) -> Callable[[Rows], Rows]:
    """The function with its argument and its value in half precision, as a table of 65,536 entries gives it."""

    def looked_up(x: Rows) -> Rows:
        exact = function(x.astype(np.float16).astype(np.float32))
        return exact.astype(np.float16).astype(x.dtype)

    return looked_up


def _gelu_by_table(x: Rows) -> Rows:
    """ggml uses the table between -10 and 10 only."""
    return np.where(np.abs(x) < 10, _by_table(_gelu)(x), np.maximum(x, 0))


GELU_BY_TABLE: Final[dict[str, Callable[[Rows], Rows]]] = {
    "GELU": _gelu_by_table,
    "GELU_QUICK": _by_table(_gelu_quick),
}

# Gated units: y = function(a) * b. The two that clamp are in `glu`.
_GATES: Final[dict[str, str]] = {
    "REGLU": "RELU",
    "GEGLU": "GELU",
    "GEGLU_ERF": "GELU_ERF",
    "GEGLU_QUICK": "GELU_QUICK",
    "SWIGLU": "SILU",
}


def unary(name: str, x: Rows, *, table: bool) -> Rows:
    """ggml's unary function of that name. `table`: GELU as the CPU kernels look it up."""
    function = GELU_BY_TABLE.get(name) if table else None
    return (function or UNARY_FUNCTIONS[name])(x)


def glu(name: str, gate: Rows, up: Rows, *, alpha: float, limit: float, table: bool) -> Rows:
    """ggml's gated unit of that name. `alpha` and `limit` belong to the clamped forms alone."""
    if name in _GATES:
        return unary(_GATES[name], gate, table=table) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if name == "SWIGLU_OAI":
        return gate * _sigmoid(alpha * gate) * (up + 1)
    return _silu(gate) * up


def round_activations(x: NDArray[np.float32], weight: GGMLQuantizationType) -> NDArray[np.float32]:
    """Rows as ggml's x86 kernels see them when they multiply by a weight of that type.

    Blocks of 32 signed bytes with a half-precision scale (Q8_0, Q8_1), or of 256 with a single-precision one (Q8_K)
    for weights in super-blocks; the weight's own type where that is F16 or BF16. Ties go to the even neighbour.
    """
    match weight:
        case GGMLQuantizationType.F32:
            return x
        case GGMLQuantizationType.F16:
            return x.astype(np.float16).astype(np.float32)
        case GGMLQuantizationType.BF16:
            return _round_bf16(x)
        case _ if GGML_QUANT_SIZES[weight][0] == _SUPER_BLOCK:
            return _round_q8_k(x)
        case _:
            return _round_q8_0(x)


def _round_bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return nearest.astype(np.uint32).view(np.float32)


def _round_q8_0(x: NDArray[np.float32]) -> NDArray[np.float32]:
    blocks = x.reshape(-1, _BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(_LEVELS, largest, out=np.zeros_like(largest), where=largest > 0)
    scale = (largest / np.float32(_LEVELS)).astype(np.float16).astype(np.float32)
    return np.asarray(np.rint(blocks * inverse) * scale, np.float32).reshape(x.shape)


def round_q8_plainly(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Blocks of 32 signed bytes as ggml's kernels without vectors round them: the step is inverted once it is rounded
    to single precision, and ties go away from zero. One code in some hundred thousand is another one."""
    blocks = x.reshape(-1, _BLOCK)
    step = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(_LEVELS)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    scaled = blocks * inverse
    codes = np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5)
    return np.asarray(codes * step.astype(np.float16), np.float32).reshape(x.shape)


def _round_q8_k(x: NDArray[np.float32]) -> NDArray[np.float32]:
    blocks = x.reshape(-1, _SUPER_BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    inverse = np.divide(-_LEVELS, largest, out=np.zeros_like(largest), where=largest != 0)
    scale = np.divide(1, inverse, out=np.zeros_like(inverse), where=inverse != 0)
    return (np.minimum(np.rint(blocks * inverse), _LEVELS) * scale).reshape(x.shape)
