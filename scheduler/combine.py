"""Partial sums: a peer weights and adds its own rows of each token, and the leader adds the peers' sums.

A *group* is the experts of one layer that the epoch gave to the same first holder. A group's sum for a token is
((w1 * y1) + w2 * y2) + ..., over its rows in ascending slot order; a token's total adds its groups' sums in the order
of the holders' names. Each product and each sum is elementwise and rounded to F32 by itself, so a token's bits depend
on its own rows alone: not on the batch around it, on who answered first, or on who answered in a holder's place.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler.dispatch import Plan

F32 = NDArray[np.float32]


def weighted_sums(y: F32, weights: F32, tokens: NDArray[np.int32]) -> F32:
    """One group's sums, float32 [distinct tokens, n_out], ascending by token.

    y float32 [R, n_out], weights float32 [R] and tokens int32 [R], which never descends; R is at least 1. What
    overflows becomes infinite, and whoever gets it refuses it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if tokens[0] == tokens[-1]:  # a decode step's only token
            total: F32 = y[:1] * weights[0]
            for row, weight in zip(y[1:], weights[1:], strict=True):
                total += row * weight
            return total
        starts = np.flatnonzero(np.diff(tokens, prepend=tokens[0] - 1))
        counts = np.diff(starts, append=len(tokens))
        sums: F32 = y[starts] * weights[starts, None]
        for place in range(1, int(counts.max())):
            longer = np.flatnonzero(counts > place)
            rows = starts[longer] + place
            sums[longer] += y[rows] * weights[rows, None]
        return sums


def add_partials(groups: Plan, partials: Mapping[str, F32], n_out: int) -> F32:
    """Every token's total [n_tokens, n_out] from each group's sums [its tokens, n_out].

    They are float32, or all float64 where the sum is held against an exact one.
    """
    totals = np.zeros((groups.n_tokens, n_out), np.result_type(np.float32, *partials.values()))
    for part in groups.parts:
        if len(part.rows) == groups.n_tokens:
            totals += partials[part.peer]
        else:
            totals[part.rows] += partials[part.peer]
    return totals


def sum_rows(groups: Plan, rows: F32, weights: F32) -> F32:
    """The same totals from every expert's row, for where some came from others than their group's holder.

    rows float32 [n_tokens, n_used, n_out], weights float32 [n_tokens, n_used].
    """
    n_out = rows.shape[2]
    y, w = rows.reshape(-1, n_out), weights.reshape(-1)
    partials = {part.peer: weighted_sums(y[part.slots], w[part.slots], part.tokens) for part in groups.parts}
    return add_partials(groups, partials, n_out)
