"""In service: which precision a worker's sums had, from its answer to ordinary-looking rows.

The leader knows the expert's weights and has computed what the answer would be under several arithmetics. Two numbers
tell them apart. Over rows r, with e the exact result (float64 on dequantised weights):

    distance(y) = median_r |y - e| / |e|                 how far a result is from another
    stretch(y)  = root mean square_r (<y, e> / <e, e> - 1)       how much of that is only a wrong length

A kernel that rounds its activations and adds in F32 gives what that rounding gives, to five digits or more: its
distance from one of the references is nearly zero. Errors of sums show in the length, because the rows are made so
(backends/crafted_rows.py): one hot neuron gives most of the result, its long sum keeps one sign and carries every
rounding of its accumulator, and its error scales the whole result. Errors of single activations average out along that
sum and leave the rest of the result in other directions, so an unknown rounding has a distance far above its stretch.

What fits neither is UNKNOWN: another function, a rounding that nobody has described here, half-precision sums so short
or so finely interleaved that they do no harm. F16 is a reason for more checks and for an inner rank, no conviction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capabilities.precision import Precision

Rows = NDArray[np.floating[Any]]

ROWS_MIN: Final = 8  # of fewer, a root mean square of random errors says little
_NEAR: Final = 1 / 4  # of the distance that half-precision sums have: measured references are at 1/1000 of it
_STRETCHED: Final = 1 / 2  # of the stretch that half-precision sums have; sequential ones have three times theirs
_ALONG: Final = 1 / 2  # of the distance is stretch: 0.7 to 1 where sums are at fault, 0.1 where activations are
_SEPARATE: Final = 3.0  # half-precision sums must stretch so many times more than half-precision activations
_ANOTHER_FUNCTION: Final = 0.3


Some = NDArray[np.intp]
"""Numbers of rows."""


def _none_known(rows: Some, ways: Collection[int] | None = None) -> Iterable[tuple[int, Rows]]:
    return ()


def _no_other(rows: Some) -> Iterable[Rows]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class RowReferences:
    """The same rows under several arithmetics, each [rows, n_out].

    exact: float64. rounded: sums in F32 (or better), activations rounded as known kernels do; the first to F16.
    halves: sums in half precision.

    What takes long is computed when it is asked for, of some of the rows. half_sums: the same in other orders. coarse:
    what each coarser arithmetic gives that is known, or each of these `ways`, with its number.
    """

    exact: Rows
    rounded: tuple[Rows, ...]
    halves: Rows
    half_sums: Callable[[Some], Iterable[Rows]] = _no_other
    coarse: Callable[[Some, Collection[int] | None], Iterable[tuple[int, Rows]]] = _none_known

    def judge(self, answer: Rows) -> Precision:
        """F32 or F16 as the precision of the answer's sums, or UNKNOWN. The answer is [rows, n_out], as `exact` is."""
        y = answer.astype(np.float64)
        if y.shape != self.exact.shape or len(y) < ROWS_MIN or not np.isfinite(y).all():
            return Precision.UNKNOWN
        from_exact = distance(y, self.exact)
        if from_exact > _ANOTHER_FUNCTION:
            return Precision.UNKNOWN
        nearest = min(from_exact, *(distance(y, reference) for reference in self.rounded))
        if nearest <= _NEAR * distance(self.halves, self.exact):
            return Precision.F32
        of_halves, of_y = stretch(self.halves, self.exact), stretch(y, self.exact)
        if of_halves < _SEPARATE * stretch(self.rounded[0], self.exact):
            return Precision.UNKNOWN
        fits = of_y >= _STRETCHED * of_halves and of_y >= _ALONG * from_exact
        return Precision.F16 if fits else Precision.UNKNOWN


def distance(y: Rows, reference: Rows) -> float:
    """The median row's |y - reference| / |reference|; rows of zeros count as far."""
    y, reference = y.astype(np.float64), reference.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shares = np.linalg.norm(y - reference, axis=1) / np.linalg.norm(reference, axis=1)
    return float(np.median(np.nan_to_num(shares, nan=np.inf)))


def stretch(y: Rows, reference: Rows) -> float:
    """How much y's rows are longer or shorter than the reference's along it: a root mean square of relative errors."""
    y, reference = y.astype(np.float64), reference.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        lengths = (y * reference).sum(axis=1) / (reference * reference).sum(axis=1)
    return float(np.sqrt(np.mean(np.nan_to_num(lengths - 1, nan=np.inf) ** 2)))
