"""What a layer costs in time: how widely to spread it, and which of its holders should answer.

Intuition: a layer waits for the slowest worker that it needs. A worker takes its round trip, then what it is busy with,
then its rows. More workers have fewer rows each, but the slowest of n round trips is later than a typical one, and each
worker costs the leader a frame. So with H(n) = 1 + 1/2 + ... + 1/n, the mean of the largest of n exponential delays,

    layer_s = max over its n workers of (rtt_s * (1 + JITTER * (H(n) - 1)) + busy_s + rows / rows_per_s) + n * FRAME_S

At 0.3 ms between slow CPUs that spreads a layer over all of them; at 20 ms, or between GPUs, it keeps whole layers on
one to three workers. Placement spreads by this formula, dispatch chooses among holders by it, the report judges by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

ROWS_TYPICAL = 32.0  # rows a layer that placement plans for: four streams of a model that uses eight experts
JITTER = 0.1  # of the round trip: what a home link's delay varies by
FRAME_S = 0.2e-3  # the leader's own work for one worker's frame there and back, measured: pack, encrypt, write, read
EVEN_WORTH = 1.1  # a layer may take this much longer than at best if that puts load on more workers
PREFERRED_WORTH = 1.1  # the preferred holder answers unless another is faster by this much: measurements waver
WIDER_GAIN = 0.95  # more workers take part only if a layer then takes at most this share of the time
POPULARITY_TRUST = 0.9  # the rest of an expert's share is as if all were equally popular
ROWS_PER_S_LIMITS = (1.0, 1e7)  # measured rates are held within: a peer's own number must not upset the arithmetic
SECONDS_MAX = 60.0  # and so are delays
_WIDER_STEPS_MAX = 6  # each may double the workers that take part
_BOTTLENECK = 0.9  # of the slowest worker's time: who takes longer is relieved in the same step
_SWEEPS, _SWEPT_MAX = 3, 32  # turns after the first; among more groups than this one turn is even enough
_FAN_OUTS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128)  # a wider frame pays for nobody


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """What was measured of a peer: round trip, seconds of work that wait there, expert rows a second.

    numeric_class: None if unknown; an unknown class is never the same as another.
    """

    rtt_s: float
    rows_per_s: float
    busy_s: float = 0.0
    numeric_class: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Keep first copies on the `near` nearest workers, and a layer's on `fan_out` of them if they have the room."""

    near: int
    fan_out: int


def layer_seconds(rtt_s: F64, busy_s: F64, rows: F64, rows_per_s: F64) -> float:
    """The formula above over one layer's n workers, each argument float64 [n]. 0 for no workers."""
    if not len(rows):
        return 0.0
    each = rtt_s * _lateness(len(rows)) + busy_s + rows / rows_per_s
    return float(each.max()) + len(rows) * FRAME_S


def row_shares(n_expert: int, popularity: Sequence[float] | None) -> F64:
    """The share of a layer's rows to expect for each expert, float64 [n_expert], all positive, adding up to 1.

    popularity: how often each was chosen, in any unit; equal if not given. It was counted on some texts and tells about
    the next only so far, hence POPULARITY_TRUST.
    """
    equal = np.full(n_expert, 1 / n_expert)
    if popularity is None:
        return equal
    counted = np.asarray(popularity, np.float64)
    total = counted.sum()
    return POPULARITY_TRUST * counted / total + (1 - POPULARITY_TRUST) * equal if total > 0 else equal


def choose_spread(rtt_s: F64, rows_per_s: F64, *, near_min: int, rows: float = ROWS_TYPICAL) -> Spread:
    """How many of the workers should hold first copies, and how many each layer's.

    rtt_s, rows_per_s: float64 [W], nearest first. near_min: how many it takes for lack of memory.

    The mean layer's cost is estimated for groups of `fan_out` neighbours, each of which serves layers in proportion to
    its rate; a last group that is smaller is joined by some of the one before. Of all that come within EVEN_WORTH of
    the best the widest wins: load on more shoulders.
    """
    workers = len(rtt_s)
    total = np.concatenate([[0.0], np.cumsum(rows_per_s)])
    costs: dict[Spread, float] = {}
    for fan_out in (f for f in _FAN_OUTS if f <= workers):
        ends = np.minimum(np.arange(fan_out, workers + fan_out, fan_out), workers)
        each = rtt_s[ends - 1] * _lateness(fan_out) + rows / (total[ends] - total[ends - fan_out])
        served = np.diff(total[ends], prepend=0.0)
        seconds = np.cumsum(served * each) / total[ends] + fan_out * FRAME_S
        costs.update(
            (Spread(near, fan_out), cost)
            for near, cost in zip(ends.tolist(), seconds.tolist(), strict=True)
            if near >= near_min
        )
    best = min(costs.values())
    near = max(spread.near for spread, cost in costs.items() if cost <= best * EVEN_WORTH)
    return min((spread for spread in costs if spread.near == near), key=lambda spread: (costs[spread], spread.fan_out))


@lru_cache(maxsize=4_096)
def _lateness(n: int) -> float:
    """How much later than a typical round trip the slowest of n is."""
    return 1 + JITTER * (math.fsum(1 / i for i in range(1, n + 1)) - 1)


def _held_within(values: Sequence[float], low: float, high: float, no_number: float) -> F64:
    return np.nan_to_num(np.array(values, np.float64), nan=no_number).clip(low, high)


class _Groups:
    """A layer's experts by the holders that they have in common; all arrays are over the layer's W workers."""

    def __init__(
        self, options: Sequence[Sequence[int]], weights: F64, speeds: Sequence[PeerSpeed], rows: float
    ) -> None:
        self.experts: dict[tuple[int, ...], list[int]] = {}
        for expert, holders in enumerate(options):
            self.experts.setdefault(tuple(holders), []).append(expert)
        self.experts.pop((), None)
        self.rows = {holders: rows * float(weights[group].sum()) for holders, group in self.experts.items()}
        self.rtt_s = _held_within([speed.rtt_s for speed in speeds], 0.0, SECONDS_MAX, SECONDS_MAX)
        self.busy_s = _held_within([speed.busy_s for speed in speeds], 0.0, SECONDS_MAX, SECONDS_MAX)
        self.rate = _held_within([speed.rows_per_s for speed in speeds], *ROWS_PER_S_LIMITS, ROWS_PER_S_LIMITS[0])
        self.start_s = self.rtt_s + self.busy_s

    def cover(self) -> list[int]:
        """Few and fast workers that hold every expert: those without whom it cannot be, then the best for its price."""
        chosen = sorted({holders[0] for holders in self.experts if len(holders) == 1})
        left = {holders for holders in self.experts if not set(holders) & set(chosen)}
        gain, preferred = np.zeros(len(self.rate)), np.zeros(len(self.rate))
        for holders in left:
            gain[list(holders)] += self.rows[holders]
            preferred[holders[0]] += self.rows[holders]
        while left:
            with np.errstate(divide="ignore", invalid="ignore"):
                price = (self.start_s + FRAME_S + gain / self.rate) / gain
                price *= 1 + (PREFERRED_WORTH - 1) * (1 - preferred / gain)
            best = int(np.where(gain > 1e-12, price, np.inf).argmin())
            chosen.append(best)
            for holders in [holders for holders in left if best in holders]:
                left.remove(holders)
                gain[list(holders)] -= self.rows[holders]
                preferred[holders[0]] -= self.rows[holders]
        return chosen

    def share(self, active: set[int]) -> _Split:
        """Let only these answer: what each gets of each group, and how long they take.

        Groups with one active holder leave no choice. The others, in turn, fill up whoever would finish first, and do
        so again once all have had their turn.
        """
        done = self.rtt_s * _lateness(len(active)) + self.busy_s
        total = dict.fromkeys(active, 0.0)
        shares: dict[tuple[int, ...], dict[int, float]] = {holders: {} for holders in self.experts}
        choices = {holders: [w for w in holders if w in active] for holders in self.experts}
        order = sorted(choices, key=lambda holders: (len(choices[holders]), -self.rows[holders], holders))
        free = [holders for holders in order if len(choices[holders]) > 1]
        sweeps = _SWEEPS if 1 < len(free) <= _SWEPT_MAX else 0
        for holders in order + sweeps * free:
            for w, rows in shares[holders].items():
                total[w] -= rows
                done[w] -= rows / self.rate[w]
            shares[holders] = _level({w: float(done[w]) for w in choices[holders]}, self.rate, self.rows[holders])
            for w, rows in shares[holders].items():
                total[w] += rows
                done[w] += rows / self.rate[w]
        used = [w for w in sorted(active) if total[w] > 1e-9]
        rows_of = np.array([total[w] for w in used])
        seconds = layer_seconds(self.rtt_s[used], self.busy_s[used], rows_of, self.rate[used])
        return _Split(active, shares, seconds, {w: total[w] / float(self.rate[w]) for w in used}, done)

    def relief(self, split: _Split) -> set[int]:
        """For each of the slowest, the nearest worker that is not active yet and could take some of its rows."""
        if not split.busy_s:
            return set()
        slowest = max(split.done_s[w] for w in split.busy_s)
        late = {w for w, busy_s in split.busy_s.items() if split.done_s[w] >= slowest * _BOTTLENECK}
        if max(split.busy_s[w] for w in late) < (1 - WIDER_GAIN) * split.seconds:
            return set()  # their rows are not what takes the time
        found: dict[int, int] = {}
        for holders in self.experts:
            for w in late.intersection(holders):
                idle = [other for other in holders if other not in split.active]
                if idle:
                    best = min(idle, key=lambda other: (float(self.start_s[other]), other))
                    current = found.get(w, best)
                    found[w] = min(best, current, key=lambda other: (float(self.start_s[other]), other))
        return set(found.values())


@dataclass(frozen=True, slots=True)
class _Split:
    """How a layer's rows are split over the active workers.

    shares: rows of each group, by worker. seconds: the layer's estimate. busy_s: seconds of computing, of those that
    got rows. done_s: float64 [W], when each would be done.
    """

    active: set[int]
    shares: dict[tuple[int, ...], dict[int, float]]
    seconds: float
    busy_s: dict[int, float]
    done_s: F64


def share_out(
    options: Sequence[Sequence[int]],
    speeds: Sequence[PeerSpeed],
    rows: float,
    popularity: Sequence[float] | None = None,
) -> tuple[NDArray[np.int64], float]:
    """Choose who answers for each expert of a layer when about `rows` rows are dispatched.

    options[expert]: indices into speeds of the holders that may, the preferred one first. popularity: see row_shares.

    Returns the index of each expert's worker, -1 where there is none, as int64 [n_expert], and the estimated seconds.
    It starts from few workers that hold everything and relieves the slowest, step by step; the fewest workers that come
    near the best time win. The same numbers give the same choice.
    """
    n = len(options)
    weights = row_shares(n, popularity)
    groups = _Groups(options, weights, speeds, rows)
    splits = [groups.share(set(groups.cover()))]
    for _ in range(_WIDER_STEPS_MAX):
        relief = groups.relief(splits[-1])
        if not relief:
            break
        splits.append(groups.share(splits[-1].active | relief))
    best = min(split.seconds for split in splits)
    chosen = next(split for split in splits if split.seconds * WIDER_GAIN <= best)
    owners = np.full(n, -1, np.int64)
    for holders, group in groups.experts.items():
        owners[group] = _cut(weights[group], chosen.shares[holders])
    return owners, chosen.seconds


def _cut(weights: F64, shares: Mapping[int, float]) -> NDArray[np.int64]:
    """Cut a run of experts [n] with these weights into consecutive pieces, one a key, in proportion to the shares.

    An expert goes where its middle falls, so that no piece is off by more than half an expert at either end.
    """
    ends = np.cumsum(np.fromiter(shares.values(), np.float64, len(shares)))
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    index = (ends[:-1] / ends[-1]).searchsorted(middles, side="right")
    pieces: NDArray[np.int64] = np.fromiter(shares, np.int64, len(shares))[index]
    return pieces


def _level(done: Mapping[int, float], rate: F64, rows: float) -> dict[int, float]:
    """Share rows among workers that would finish at `done` so that those that get some finish together."""
    order = sorted(done, key=done.__getitem__)  # stable: the preferred one first among equals
    speed = filled = 0.0
    level = math.inf
    for i, w in enumerate(order):
        speed += float(rate[w])
        filled += done[w] * float(rate[w])
        level = (rows + filled) / speed
        if i + 1 == len(order) or level <= done[order[i + 1]]:
            break
    return {w: (level - done[w]) * float(rate[w]) for w in done if done[w] < level}
