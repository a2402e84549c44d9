"""How closely two computations of the same rows agree, and how close is close enough.

Within one numeric class the bits are equal. Across classes a kernel that rounds its activations to 8 bits may round one
of them the other way, which shifts a whole row by up to a percent while most rows agree to seven digits. So there are
two limits: one on the median row, which catches another function, and one on the worst row, which allows for ties.

A kernel that rounds otherwise on purpose, as one that adds in half precision or one that does not round activations at
all, is beyond them and still computes the same function: for that there are limits of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# Measured over nine kernels of two instruction sets (quantised weights): median 1.8e-7, worst row 1e-2. The limits
# leave a factor of fifty on the median and three on the worst row.
MEDIAN_LIMIT: Final = 1e-5
WORST_LIMIT: Final = 3e-2
# F16 weights on processors that accumulate their products in half precision: 1e-2 in every row, and still one function.
MEDIAN_LIMIT_F16: Final = 2e-2
# Measured over weight types: sums in half precision, or activations that are not rounded, are up to 1.8e-2 away in the
# median row and 2.5e-2 in the worst. A scale that is missing, or another expert, is 5e-2 and more.
SAME_MEDIAN_LIMIT: Final = 3e-2
SAME_WORST_LIMIT: Final = 1e-1
# Of the gain: as many standard deviations as never happen by chance, and what the worst kernels are off in any case.
GAIN_SIGMAS: Final = 6.0
GAIN_MIN: Final = 4e-4
# BF16 products round both factors to 8 bits of mantissa.
_TYPE_F16, _TYPE_BF16 = 1, 30


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences between two [rows, width] results. Relative errors are L2 norms over a row.

    gain_excess: how much larger all values are on the whole, or smaller, as a multiple of what rounding can explain.
    """

    bit_identical: bool
    max_abs_diff: float
    median_relative_l2: float
    worst_relative_l2: float
    min_cosine: float
    gain_excess: float = 0.0


def compare(actual: F32, expected: F32) -> Agreement:
    """Compare rows of the same shape [R, width]. A row of zeros agrees only with zeros."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {actual.shape} and {expected.shape}")
    if actual.size == 0 or np.array_equal(actual, expected):
        return Agreement(True, 0.0, 0.0, 0.0, 1.0)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    difference, norm_e, norm_a = (np.linalg.norm(v, axis=1) for v in (a - e, e, a))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference == 0, 0.0, difference / norm_e)
        cosine = np.where(difference == 0, 1.0, (a * e).sum(1) / (norm_a * norm_e))
    return Agreement(
        False,
        float(np.abs(a - e).max()),
        float(np.median(relative)),
        float(relative.max()),
        float(np.nan_to_num(cosine, nan=0.0).min()),
        _gain_excess(a, e, float(np.median(relative))),
    )


def _gain_excess(a: NDArray[np.float64], e: NDArray[np.float64], relative: float) -> float:
    """Of N values with independent errors of this relative size the gain <a, e> / <e, e> is off by relative / sqrt(N)
    (one standard deviation)."""
    energy = float((e * e).sum())
    if not energy or not np.isfinite(relative):
        return 0.0
    explained = GAIN_SIGMAS * relative / float(np.sqrt(e.size)) + GAIN_MIN
    return abs(float((a * e).sum()) / energy - 1.0) / explained


def within_tolerance(agreement: Agreement, weight_types: frozenset[int]) -> bool:
    """Whether two backends round alike, but for ties, given the ggml types of the expert's weights."""
    if agreement.bit_identical:
        return True
    loose = bool(weight_types & {_TYPE_F16, _TYPE_BF16})
    median = MEDIAN_LIMIT_F16 if loose else MEDIAN_LIMIT
    return agreement.median_relative_l2 <= median and agreement.worst_relative_l2 <= WORST_LIMIT


def same_function(agreement: Agreement) -> bool:
    """Whether two backends compute the same function, however they round."""
    return (
        agreement.median_relative_l2 <= SAME_MEDIAN_LIMIT
        and agreement.worst_relative_l2 <= SAME_WORST_LIMIT
    )  # of what is not finite neither holds


def one_sided(agreement: Agreement) -> bool:
    """Whether the differences all go one way, as those of a wrong scale do, and of sums in half precision (which lose
    small terms), but not those of rounding."""
    return agreement.gain_excess > 1.0
