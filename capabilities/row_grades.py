"""Single rows of live work, graded: the leader's own bits, within tolerance, coarse, or another function's.

A row is held against this node's kernels first. Only where it is further away than kernels are from each other does it
meet every arithmetic that is known (row_check.RowReferences), on the same activations and weights. With e the exact
result, h = |halves - e| / |e| what half-precision sums would be off by, and d the distance from the nearest reference
that adds in F32:

    within    d is at most NEAR, or a quarter of h
    coarse    above, up to HALVES_TIMES h: known sums in half precision, measured at 0.5 to 6 (capabilities/row_check.py
              says more of rows that were crafted); or an 8-bit code or two that fell on the other side of a tie
    wrong     beyond

A row in which one value outweighs the others may be wrong by that and only be rounded the other way: it counts as
coarse, too, up to twice what rounding activations does to it, unless more rows of the answer are wrong than not.

Kernels that round activations more coarsely than this machine's (backends/known_roundings.py: one step for a whole row,
8-bit floating point, four bits) are as far off as wrong weights are. But what each would answer can be computed. A row
that would be wrong or odd meets all of them, or those that explain others of its answer, and is coarse if one of them
is off in just that direction: an error that knows nothing of a rounding is no nearer to what it gives than the exact
row is. Such peers are unfit, and no cheats.

Small errors that are no rounding hide among the coarse rows. A row is `odd` if d is more than FAR_TIMES h, or nearly
all of d is a wrong length where no neuron is known to take the error of all. One odd row says nothing: a code at a tie
may do that, or half-precision sums that were lucky in h. How many rows are odd tells (scheduler/audit_tests.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capabilities.agreement import MEDIAN_LIMIT, SAME_MEDIAN_LIMIT, SAME_WORST_LIMIT
from capabilities.precision import Precision
from capabilities.row_check import RowReferences
from capabilities.tolerances import product_limits

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

NEAR: Final = MEDIAN_LIMIT
_QUARTER: Final = 1 / 4  # as row_check asks of a median row: measured references are at 1/1000
HALVES_TIMES: Final = 8.0
FAR_TIMES: Final = 4.5  # medians of known half-precision sums are 0.7 to 3.8, however they are ordered
_ALONG: Final = 9 / 10  # of d: a wrong length alone is all of it; of independent errors it is 1 / sqrt(width)
_ALONG_SIGMAS: Final = 6.0
_ALONG_HALVES: Final = 1 / 2  # of h, where a hot neuron makes sums themselves long or short: then length says nothing
# A code at a tie is half a step off, whichever side it falls on, and the sides are a step apart. Where one value of a
# row outweighs the others, that is most of what rounding does to it, and may be a wrong length and nothing else.
_FLIP_TIMES: Final = 2.0
# What a known coarse arithmetic leaves of an error. One that knows nothing of it leaves all, and more; its own leaves a
# thousandth, or a code or two at ties.
WELL_EXPLAINED: Final = 1 / 8
EXPLAINED: Final = 1 / 2
_FEW: Final = 8  # of more, the median of h is no luck
_ODD_ASKS: Final = 1 / 2  # of an answer's rows: fewer convict nobody, and to take rows apart takes long
_TAKEN_APART: Final = 4  # rows that meet everything: a second or two for large experts
_LENGTH_MIN: Final = 1e-4  # below, no kernel need be that exact


class Grade(IntEnum):
    SAME = 0
    WITHIN = 1
    COARSE = 2
    WRONG = 3


@dataclass(frozen=True, slots=True, eq=False)
class Graded:
    """Of rows [R]: grade (of Grade), distance d, its ratio to h (0 where it was not needed), and whether it is odd."""

    grade: NDArray[np.int8]
    distance: F64
    ratio: F64
    odd: NDArray[np.bool_]

    def count(self, grade: Grade) -> int:
        return int((self.grade == grade).sum())

    def put(self, rows: NDArray[np.intp], of: Graded) -> None:
        """In place of these rows, those of another."""
        for each in fields(self):
            getattr(self, each.name)[rows] = getattr(of, each.name)

    def only(self, rows: NDArray[np.bool_]) -> Graded:
        """Of these rows."""
        return Graded(*(getattr(self, each.name)[rows] for each in fields(self)))


Refer = Callable[[NDArray[np.intp]], RowReferences | None]
"""Every known arithmetic for these of the rows; None if that cannot be had here."""


def grade_rows(answer: F32, own: F32, refer: Refer, terms: int, agreeing: int = 0) -> Graded:
    """Grade rows [R, n_out] against this node's own [R, n_out].

    terms: the length of the shortest sum of products in them. agreeing: other rows of the same answer that are near.
    """
    y, o = answer.astype(np.float64), own.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        distance, ratio = _relative(y - o, o), np.zeros(len(y))
    grade = np.where((answer == own).all(axis=1), Grade.SAME, Grade.WITHIN).astype(np.int8)
    graded = Graded(grade, distance, ratio, np.zeros(len(y), bool))
    far = np.flatnonzero(~(distance <= NEAR) & (grade != Grade.SAME))
    if len(far) == 0:
        return graded
    references = refer(far)
    if references is None:  # by size alone
        grade[far] = np.where(distance[far] <= SAME_MEDIAN_LIMIT, Grade.WITHIN, Grade.COARSE)
        grade[far[~(distance[far] <= SAME_WORST_LIMIT)]] = Grade.WRONG
        graded.odd[:] = grade == Grade.WRONG
        return graded
    graded.put(far, _grade_far(y[far], distance[far], o[far], references, terms, agreeing + len(y) - len(far)))
    return graded


def _grade_far(y: F64, from_own: F64, own: F64, references: RowReferences, terms: int, agreeing: int) -> Graded:
    exact = references.exact.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        halves = _off(references.halves, exact)
        nearest, near_to = from_own.copy(), own.copy()
        for reference in (references.exact, *references.rounded):
            r = reference.astype(np.float64)
            d = _relative(y - r, r)
            closer = d < nearest
            nearest[closer], near_to[closer] = d[closer], r[closer]
        length = np.abs(_length(y, near_to))
        hot = np.abs(_length(references.halves.astype(np.float64), exact)) >= _ALONG_HALVES * halves
    within = nearest <= np.maximum(NEAR, _QUARTER * np.where(np.isfinite(halves), halves, 0.0))
    along = max(_ALONG, _ALONG_SIGMAS / np.sqrt(y.shape[1]))
    stretched = (length >= along * nearest) & (nearest > _LENGTH_MIN) & ~hot
    wrong, ratio = _against_halves(nearest, halves, terms)
    odd = wrong | (~within & ((ratio > FAR_TIMES) | stretched))
    if len(y) < _FEW and odd.any():
        rows = np.flatnonzero(odd)
        halves[rows] = _root_mean_square([halves[rows], *(_off(r, exact[rows]) for r in references.half_sums(rows))])
        wrong, ratio = _against_halves(nearest, halves, terms)
        odd = wrong | (~within & ((ratio > FAR_TIMES) | stretched))
    if wrong.any() or odd.sum() > _ODD_ASKS * len(odd):
        rows = np.flatnonzero(odd)
        share = _unexplained(y, exact, references, rows)
        wrong[rows[share <= EXPLAINED]] = False
        odd[rows[share <= WELL_EXPLAINED]] = False
    excused = wrong & (nearest <= np.minimum(_FLIP_TIMES * _rounding(references), SAME_WORST_LIMIT))
    if excused.sum() <= agreeing + (~wrong).sum():  # else it is no accident of single rows
        wrong &= ~excused
    grade = np.where(wrong, Grade.WRONG, np.where(within, Grade.WITHIN, Grade.COARSE)).astype(np.int8)
    return Graded(grade, nearest, ratio, odd)


def _against_halves(nearest: F64, halves: F64, terms: int) -> tuple[NDArray[np.bool_], F64]:
    """Which rows are further off than half-precision sums can be, and how each is in proportion to those."""
    ties = product_limits("", 32, terms, Precision.Q8, Precision.Q8).worst_relative_l2
    usual = np.maximum(halves, np.median(halves))  # a single row's may be small by luck
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        limit = np.minimum(np.maximum(HALVES_TIMES * usual, ties), SAME_WORST_LIMIT)
        ratio = np.nan_to_num(nearest / halves, nan=0.0, posinf=np.finfo(np.float64).max)
    return ~(nearest <= limit), ratio


def _unexplained(y: F64, exact: F64, references: RowReferences, rows: NDArray[np.intp]) -> F64:
    """Of how far each of these rows is off from the exact one: the share that no coarse arithmetic is off by, too.

    Some of them meet every one that is known, the others those alone that these are explained by.
    """
    least = np.full(len(rows), np.inf)
    first = np.unique(np.linspace(0, len(rows) - 1, _TAKEN_APART).astype(np.intp))
    by, shares = np.full(len(first), -1), np.full(len(first), np.inf)
    for way, coarse in references.coarse(rows[first], None):
        share = unexplained(y[rows[first]], exact[rows[first]], coarse)
        by, shares = np.where(share < shares, way, by), np.fmin(share, shares)
        if (shares <= WELL_EXPLAINED).all():
            break
    least[first] = shares
    others = np.setdiff1d(np.arange(len(rows)), first)
    ways = set(by[shares <= EXPLAINED].tolist())
    if ways and len(others):
        for _, coarse in references.coarse(rows[others], ways):
            least[others] = np.fmin(least[others], unexplained(y[rows[others]], exact[rows[others]], coarse))
    return least


def unexplained(y: NDArray[Any], exact: F64, coarse: NDArray[Any]) -> F64:
    """Of how far each row of y is off from the exact one: the share that this coarse arithmetic is not off by, too."""
    c = coarse.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        share: F64 = np.linalg.norm(y - c, axis=1) / np.linalg.norm(c - exact, axis=1)
    return np.nan_to_num(share, nan=np.inf)


def _root_mean_square(each: list[F64]) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(np.sqrt(np.mean(np.square(each), axis=0)), np.float64)


def _off(rows: NDArray[Any], exact: F64) -> F64:
    """How far each is from the exact one; infinite where it overflowed."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.nan_to_num(_relative(rows.astype(np.float64) - exact, exact), nan=np.inf)


def _rounding(references: RowReferences) -> F64:
    """How far rounding activations to 8 bits takes each row."""
    exact = references.exact.astype(np.float64)
    every = [_off(each, exact) for each in references.rounded]
    return np.asarray(np.max(every, axis=0), np.float64)


def _relative(difference: NDArray[Any], of: NDArray[Any]) -> F64:
    """|difference| / |of| of each row; 0 where both are zero, infinite where only the second is."""
    lengths, norms = np.linalg.norm(difference, axis=1), np.linalg.norm(of, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(lengths == 0, 0.0, np.nan_to_num(lengths / norms, nan=np.inf))


def _length(y: F64, e: F64) -> F64:
    """By how much each row is longer than it should be, along it; 0 for rows of zeros."""
    energy = (e * e).sum(axis=1)
    lengths: F64 = np.divide((y * e).sum(axis=1), energy, out=np.ones(len(e)), where=energy > 0)
    return lengths - 1
