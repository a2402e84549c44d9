"""What a numeric class is a fingerprint of: rows for products, values for gated units, the same bits everywhere.

Kernels that differ at all differ somewhere, and most of their differences vanish on the way: an exponential function
that is off by a last bit is rounded to eight bits before the next product, and one row of 15,000 shows it. So each step
of an expert gets inputs of its own, and its results are looked at as they are. What goes in is hashed bytes, made by
exact operations only, for no two mathematical libraries round alike.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.experts import F32
from backends.probe_weights import hashed_bytes

VERSION: Final = 2  # raise it when inputs or weights change: fingerprints of different versions say nothing
PRODUCT_ROWS: Final = 256  # 32 of each kind
UNIT_VALUES: Final = 1 << 15  # AVX2 and AVX-512 differ in 11 % of SiLU's values, with and without FMA in 0.5 %
_BLOCK: Final = 32
_KINDS: Final = 8
_LN2: Final = 0.6931471805599453  # exponential functions are polynomials between odd halves of it
_STEPS: Final = 160  # of it, beyond which every exponential function is 0 or infinite
# Where functions change their formula: 0, ends of the range of exp in single precision, normal and not, and of tables
# and clamps in half precision.
_TURNS: Final = (0.0, 7.0, 8.0, 10.0, 16.6355, 87.33655, 88.37626, 88.72284, 103.97208, 126 * _LN2, 192 * _LN2)
_NEAR: Final = np.arange(-3, 4)  # last bits to either side
_EXPONENT_MAX: Final = 127 + 6  # of a drawn value's bits: below 128 in size, where every gate is open or shut


def rows_on_ties(n_rows: int, width: int) -> F32:
    """Input rows [n_rows, width] of four kinds in turn.

    0: numbers of 24 bits, even over +-2, as a control.
    1: (q + 1/2) * 2^-6 with a largest value of 127 * 2^-6 in each 32: exactly half-way for 8-bit blocks.
    2: the nearest to (q + 1/2) * max / 127 with any max: half-way but for the kernel's own rounding of its scale.
    3: 1 + (2 q + 1) / 2048 and 1 + (2 q + 1) / 256 in turn: half-way for half precision and for bfloat16.
    """
    raw = _integers("rows", n_rows, width)
    q = np.clip(raw >> 24, -126, 125).astype(np.float64)
    first = np.arange(width) % _BLOCK == 0
    largest = 1 + (raw[:, :1] & 0x7FFFFF) / 2**23
    rows = np.empty((n_rows, width), np.float64)
    rows[0::4] = raw[0::4] / 2**30
    rows[1::4] = np.where(first, 127, q[1::4] + 0.5) / 64
    rows[2::4] = np.where(first, largest[2::4], (q[2::4] + 0.5) * (largest[2::4] / 127))
    rows[3::4] = 1 + (2 * q[3::4] + 1) / np.where(np.arange(width) % 2, 2048, 256)
    return rows.astype(np.float32)


def product_rows(n_rows: int, width: int) -> F32:
    """Input rows [n_rows, width] of eight kinds in turn: those of `rows_on_ties`, and

    4: drawn from about a normal distribution, as normalised activations are.
    5: the product of three such numbers, as behind a gate: most are small and a few are large.
    6: each 32 of a size of its own between 2^-24 and 2^8, some of them noughts: scales that half precision cannot hold.
    7: each 32 of numbers of four bits and sign: blocks in which the largest comes several times, with either sign.
    """
    raw, bells = _integers("product rows", n_rows, width), _bells("bells", 3 * n_rows, width)
    rows = np.empty((n_rows, width), np.float64)
    ties = rows_on_ties(n_rows, width).astype(np.float64)
    for kind in range(4):
        rows[kind::_KINDS] = ties[kind::_KINDS]
    rows[4::_KINDS] = bells[4:n_rows:_KINDS]
    rows[5::_KINDS] = np.prod(bells.reshape(3, n_rows, width), axis=0)[5::_KINDS]
    blocks = np.arange(width) // _BLOCK * _BLOCK
    sizes = raw[6::_KINDS, blocks] & 0x3F
    scale = np.where(sizes < 4, 0.0, np.ldexp(1.0, sizes % 33 - 24))
    rows[6::_KINDS] = bells[6:n_rows:_KINDS] * scale
    rows[7::_KINDS] = (raw[7::_KINDS] >> 28) / 4
    return rows.astype(np.float32)


def unit_values(count: int = UNIT_VALUES) -> F32:
    """Values [count] that a gated unit may meet: turning points of its formulas and all sizes, most as in models."""
    halves = np.concatenate([(np.arange(-_STEPS, _STEPS) + 0.5) * _LN2, _TURNS, np.negative(_TURNS)])
    bits = halves.astype(np.float32).view(np.int32)[:, None] + _NEAR
    edges = np.ascontiguousarray(bits, np.int32).view(np.float32).ravel()
    edges = edges[np.isfinite(edges)]  # a last bit below nought is no number
    size = count // 8
    drawn = _integers("sizes", 1, size)[0]
    every = (drawn & ~0x7F800000 | (drawn >> 23 & 0xFF) % (_EXPONENT_MAX + 1) << 23).astype(np.int32).view(np.float32)
    far = _integers("far", 1, size)[0] / 2**24  # even over +-128
    near = _integers("near", 1, count)[0] / 2**28  # even over +-8
    bells = 2 * _bells("gates", 1, count)[0]
    left = count - len(edges) - 2 * size
    some = np.concatenate([edges, every, far, near[: left // 2], bells[: left - left // 2]])
    return some.astype(np.float32)


def _integers(name: str, n_rows: int, width: int) -> NDArray[np.int32]:
    hashed = hashed_bytes(f"{name} {VERSION} {n_rows} {width}", 4 * n_rows * width)
    return np.frombuffer(hashed, "<i4").astype(np.int32).reshape(n_rows, width)


def _bells(name: str, n_rows: int, width: int) -> NDArray[np.float64]:
    """Sums of four even numbers, with a standard deviation of 1.15: exact in float64, as single precision needs it."""
    parts = np.frombuffer(hashed_bytes(f"{name} {VERSION} {n_rows} {width}", 8 * n_rows * width), "<i2")
    sums: NDArray[np.int64] = parts.reshape(n_rows, width, 4).sum(axis=2, dtype=np.int64)
    return sums / 2.0**15
