"""When to place anew: the leader's policy over who is there.

A placement is kept while its holders are there, or were lost only a moment ago: a worker that restarts comes back to
what it had on disk, and nothing moves. As long as every expert has a copy on somebody else, a lost holder is no
emergency: it is given up, and its copies are made anew, after half a minute. If an expert has no copy left the swarm
stands still, and it is given up sooner. Newcomers are taken in once joining has settled. A holder that drains or is
quarantined, or one whose verdict or memory has changed, is a reason to place anew at once. Who joins before its
kernels are measured is waited for, within a bound: else the first placement would know of nobody who may hold output
ranks, and the next one would move them.

A holder that is there but fails (it cannot load, or its numbers are wrong) counts as away since its first failure. It
is asked again after a rest that grows with each failure; once given up, it counts as a newcomer only after a while that
grows each time, so a peer that never gets anything right costs the others little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

REPLACE_AFTER_S = 30.0  # a daemon restarts, and a laptop wakes, well within this; its share waits for it
MEASURING_S = 15.0  # a measurement takes a second if the machine knows its result, else three to ten
UNCOVERED_AFTER_S = 10.0  # a daemon restarts within this too, if barely; longer, nobody should wait for an answer
STALLED_S = 60.0  # without progress while it should load is as good as failed; a fetch gives up by then itself
REST_S_MIN, REST_S_MAX = 1.0, 30.0
EXCLUDED_S_MIN, EXCLUDED_S_MAX = 30.0, 600.0


@dataclass(frozen=True, slots=True)
class Present:
    """A worker that is connected: since when, in seconds of the monotonic clock, and whether it may hold experts.

    A quarantined or draining one may not (WorkerSpec.may_hold). measuring: its precision is not known yet, and will be.
    """

    since_s: float
    may_hold: bool = True
    measuring: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Place on `workers` now (None: do not); look again in `again_s` seconds (None: when somebody comes or goes)."""

    workers: frozenset[str] | None
    again_s: float | None
    waiting_for: str = ""


def rest_s(failures: int) -> float:
    """How long a worker is left alone after so many failures in a row (at least one)."""
    return min(REST_S_MIN * 2.0 ** min(failures - 1, 16), REST_S_MAX)


def exclusion_s(times: int) -> float:
    """How long a worker is no newcomer that was given up so many times in a row (at least one)."""
    return min(EXCLUDED_S_MIN * 2.0 ** min(times - 1, 16), EXCLUDED_S_MAX)


def decide(
    holders: frozenset[str],
    considered: frozenset[str],
    present: Mapping[str, Present],
    lost_since_s: Mapping[str, float],
    *,
    expected: int,
    settle_s: float,
    now: float,
    uncovered: bool = False,
    outdated: bool = False,
) -> Decision:
    """Whether to place anew.

    holders: the workers of the placement that is wanted now, empty if there is none. considered: whom the last attempt
    to place took into account; a worker without memory is one of them, and no holder. lost_since_s: when holders that
    are away left (one that nobody remembers left long ago). expected: workers to wait for at first; 0 takes who is
    there once joining has settled. uncovered: some expert has no copy on a holder that is there. outdated: what the
    hard rules look at (fitness, precision, budget, host) has changed for somebody since the last attempt.
    """
    able = {peer: worker for peer, worker in present.items() if worker.may_hold}
    away = [lost_since_s.get(peer, -math.inf) for peer in holders if peer not in present]
    if away and (left := _given_up_at(away, uncovered) - now) > 0:
        return Decision(None, left, f"{len(away)} of {len(holders)} workers to come back")
    if not able:
        return Decision(None, None, "workers to join")
    barred = any(peer in present and peer not in able for peer in holders)
    urgent = barred or outdated or (uncovered and bool(away))
    if not away and not urgent and able.keys() <= considered:
        return Decision(None, None)
    if not holders and len(able) < expected:
        return Decision(None, None, f"{expected - len(able)} of {expected} workers to join")
    if urgent:
        return Decision(frozenset(able), None)
    measuring = [worker.since_s for peer, worker in able.items() if worker.measuring and peer not in considered]
    if measuring and (left := max(measuring) + MEASURING_S - now) > 0:
        return Decision(None, left, f"{len(measuring)} of {len(able)} workers to be measured")
    if not holders and expected:
        return Decision(frozenset(able), None)
    settled = max(worker.since_s for worker in able.values()) + settle_s - now
    if settled > 0:
        return Decision(None, settled, "joining to settle")
    return Decision(frozenset(able), None)


def _given_up_at(away: list[float], uncovered: bool) -> float:
    """When holders that left at these instants are given up, all at once: the last to leave gets its time, but one that
    comes and goes cannot hold up the others for ever."""
    grace_s = UNCOVERED_AFTER_S if uncovered else REPLACE_AFTER_S
    return min(max(away) + grace_s, min(away) + 2 * grace_s)
