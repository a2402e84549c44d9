"""The times of an election, in seconds of each peer's own time.

A lost leader is replaced after ELECTION_S_MIN to ELECTION_S_MAX, two round trips and two fsyncs: within 3 s, with a
failed round to spare. Own time advances by at most STRETCH_S from one event to the next one, so that a process that was
stopped or starved does not take its own absence for the others'.
"""

from __future__ import annotations

from typing import Final

TICK_S: Final = 0.1
"""How often `tick` is due. Everything below is noticed this much late at most."""

OUTSIDER_TICK_S: Final = 1.0
"""The same for a peer outside of the backbone, for which nothing is a matter of time: to wake up is most of what it
costs while nothing happens."""

STRETCH_S: Final = 0.4
"""Four ticks: a busy event loop still keeps time, a stopped process wakes as if it had been away for this long."""

HEARTBEAT_S: Final = 0.2
"""Leader to followers. Six fit into an election timeout, so one or two lost or late ones start no election; a heartbeat
has about 40 bytes, so nine members cost the leader 2 KB/s. Messages that were not answered are repeated as often."""

LEASE_S: Final = 1.0
"""A leader that heard from no quorum for this long steps down: before its followers would elect another, so that those
who ask learn soon. It authorises nothing; safety rests on certificates."""

ELECTION_S_MIN: Final = 1.2
ELECTION_S_MAX: Final = 2.0
"""A follower misses its leader after a time drawn from here. Shorter, and a stall of the leader's event loop costs a
term; longer, and a loss is felt. The spread is many round trips wide, so that mostly one peer asks first. Voters refuse
for ELECTION_S_MIN after a heartbeat."""

ROUND_S_MIN: Final = 0.4
ROUND_S_MAX: Final = 0.8
"""How long a candidate waits for a quorum before it tries anew; drawn, so that two that split the votes part."""

HAND_OVER_S: Final = 1.0
"""How long a leader waits for the peer that it handed over to before it tries the next one: several round trips."""

COVER_PATIENCE_S: Final = 5.0
"""A leader that cannot reach a copy of every expert for this long hands over to a peer that can: twice what it takes to
see that a holder failed, so that one restart moves nothing."""

SHARE_S: Final = 0.5
"""How often a backbone version that does not act yet is told to the members that have not stored it, and the shortest
time between two answers to one peer that is behind."""
