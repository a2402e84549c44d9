"""When to place anew: the leader's policy over who is there.

A placement is kept while its holders are there, or were lost only a moment ago: a worker that restarts comes back to
what it had on disk, and nothing moves. Newcomers are taken in once joining has settled, and holders that stay away are
given up after a while, so that the swarm serves again with those it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REPLACE_AFTER_S = 30.0  # a daemon restarts, and a laptop wakes, well within this; its share waits for it


@dataclass(frozen=True, slots=True)
class Present:
    """A worker that is connected: since when, in seconds of the monotonic clock."""

    since_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Place on `workers` now (None: do not), and look again in `again_s` seconds (None: when somebody comes or goes)."""

    workers: frozenset[str] | None
    again_s: float | None
    waiting_for: str = ""


def decide(
    holders: frozenset[str],
    present: Mapping[str, Present],
    lost_since_s: Mapping[str, float],
    *,
    expected: int,
    settle_s: float,
    now: float,
) -> Decision:
    """Whether to place anew.

    holders: the workers of the placement that is wanted now, empty if there is none. lost_since_s: when those of them
    that are away left. expected: workers to wait for at first; 0 takes who is there once joining has settled.
    """
    away = {peer: lost_since_s.get(peer, now) for peer in holders if peer not in present}
    if away:
        left = max(lost + REPLACE_AFTER_S - now for lost in away.values())
        if left > 0:
            return Decision(None, left, f"{len(away)} of {len(holders)} workers to come back")
    if not present:
        return Decision(None, None, "workers to join")
    if frozenset(present) == holders:
        return Decision(None, None)
    if not holders and len(present) < expected:
        return Decision(None, None, f"{expected - len(present)} of {expected} workers to join")
    if not holders and expected and len(present) >= expected:
        return Decision(frozenset(present), None)
    settled = max(worker.since_s for worker in present.values()) + settle_s - now
    if settled > 0:
        return Decision(None, settled, "joining to settle")
    return Decision(frozenset(present), None)
