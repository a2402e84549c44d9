"""Which peers still answer: pings of our own, since a suspended peer's connection stays open for ever.

Intuition: a peer is silent from the moment it first leaves a ping unanswered, not from its last word, so one that was
not asked is not blamed. Two seconds of silence mean failed. Nor is a peer blamed for our own sleep: if this process was
stopped or starved, pongs lie unread in the socket while the clock runs. The detector therefore counts time of its own,
which advances by at most one stretch of ordinary length between two calls; so it must be ticked regularly.

    every PING_INTERVAL_S    ping each peer: sent(peer, number, now), transmit, later pong(peer, number, now)
    every TICK_S             tick(now) -> the changes of state since the last one
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from capabilities.errors import Overloaded

PING_INTERVAL_S = 0.5  # four pings fit into FAILED_S: one lost or late does not condemn
TICK_S = 0.25  # a failure is noticed this much late at most
SUSPECT_S = 1.0  # two pings unanswered: give it no new work if another can take it
FAILED_S = 2.0
STRETCH_S = 0.5  # longest time between two calls that counts in full: a tick that came one tick late
PINGS_OPEN_MAX = 16  # per peer; older ones are forgotten, which never makes a peer look better
PEERS_MAX = 1_024
_RTT_MEMORY = 0.8  # of the smoothed round trip at each new one
_LEAST_OF = 8  # pongs, four seconds of them: one at least that neither side was too busy to read at once


class PeerState(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Transition:
    """A peer's state changed; silent_s is how long it had been silent."""

    peer: str
    before: PeerState
    after: PeerState
    silent_s: float


@dataclass(slots=True)
class _Peer:
    state: PeerState = PeerState.ALIVE  # as of the last tick
    silent_since: float | None = None  # in the detector's own time; None: nothing unanswered
    open: dict[int, float] = field(default_factory=dict)  # ping number -> when, likewise; oldest first
    rtt_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LEAST_OF))  # the last round trips


class FailureDetector:
    """Ping bookkeeping for all peers. Instants are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._time = 0.0  # our own time: what of the clock counts
        self._peers: dict[str, _Peer] = {}

    def add(self, peer: str, now: float) -> None:
        """Watch a peer, from a clean sheet if it was watched before. Raises Overloaded beyond PEERS_MAX."""
        self._advance(now)
        if peer not in self._peers and len(self._peers) >= PEERS_MAX:
            raise Overloaded(f"{PEERS_MAX} peers are watched already")
        self._peers[peer] = _Peer()

    def remove(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def sent(self, peer: str, number: int, now: float) -> None:
        """A ping goes out. Numbers are the caller's, new ones each time, best not guessable."""
        self._advance(now)
        watched = self._peers.get(peer)
        if watched is None:
            return
        if watched.silent_since is None:
            watched.silent_since = self._time
        watched.open[number] = self._time
        if len(watched.open) > PINGS_OPEN_MAX:
            del watched.open[next(iter(watched.open))]

    def pong(self, peer: str, number: int, now: float) -> bool:
        """An answer came. False, and nothing else, if no such ping is open: a peer cannot answer ahead or twice."""
        self._advance(now)
        watched = self._peers.get(peer)
        if watched is None or number not in watched.open:
            return False
        rtt = self._time - watched.open[number]
        watched.recent_s.append(rtt)
        watched.rtt_s = rtt if watched.rtt_s is None else _RTT_MEMORY * watched.rtt_s + (1 - _RTT_MEMORY) * rtt
        # It lived when it answered, so what was sent before needs no answer any more; a later ping still does.
        numbers = list(watched.open)
        watched.open = {n: watched.open[n] for n in numbers[numbers.index(number) + 1 :]}
        watched.silent_since = self._time if watched.open else None
        return True

    def tick(self, now: float) -> list[Transition]:
        """The changes of state since the last tick, in the order in which peers were added."""
        self._advance(now)
        changes: list[Transition] = []
        for name, peer in self._peers.items():
            state = self._state(peer)
            if state != peer.state:
                changes.append(Transition(name, peer.state, state, self._silence(peer)))
                peer.state = state
        return changes

    def state(self, peer: str, now: float) -> PeerState:
        """The state at this instant. A peer that is not watched is failed."""
        self._advance(now)
        watched = self._peers.get(peer)
        return PeerState.FAILED if watched is None else self._state(watched)

    def rtt_s(self, peer: str) -> float | None:
        """Smoothed round trip in seconds; None before the first pong."""
        watched = self._peers.get(peer)
        return None if watched is None else watched.rtt_s

    def rtt_least_s(self, peer: str) -> float | None:
        """The least of the last round trips, in seconds: the distance, without what a busy machine added to one of
        them. None before the second pong, as the first may be that one."""
        watched = self._peers.get(peer)
        return min(watched.recent_s) if watched is not None and len(watched.recent_s) > 1 else None

    def _advance(self, now: float) -> None:
        self._time += min(max(0.0, now - self._now), STRETCH_S)
        self._now = max(self._now, now)

    def _silence(self, peer: _Peer) -> float:
        return 0.0 if peer.silent_since is None else self._time - peer.silent_since

    def _state(self, peer: _Peer) -> PeerState:
        silence = self._silence(peer)
        if silence >= FAILED_S:
            return PeerState.FAILED
        return PeerState.SUSPECT if silence >= SUSPECT_S else PeerState.ALIVE
