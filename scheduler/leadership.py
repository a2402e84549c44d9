"""What a leader does while it leads: heartbeats, the lease, and handing over.

An answer to a heartbeat counts from when that was sent, not from when the answer arrived, so answers that were long
under way do not prolong the lease. The lease makes a leader step down and does nothing else.

To hand over is to ask one follower after the other to stand for election at once. The leader leads on until one of them
has a newer term.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from capabilities.backbone import BackboneSet
from scheduler.election_messages import Heartbeat, HeartbeatReply, Message, TimeoutNow
from scheduler.election_times import COVER_PATIENCE_S, HAND_OVER_S, HEARTBEAT_S, LEASE_S
from scheduler.voter import Voter

_ROUNDS_KEPT = round(LEASE_S / HEARTBEAT_S) + 1  # an answer to an older heartbeat would not prolong the lease


@dataclass(slots=True)
class _Follower:
    heard: float  # when the newest heartbeat that it answered was sent
    informed: bool = False  # it has this term's mandate
    eligible: bool = False
    covers: bool = False


@dataclass(slots=True)
class _HandOver:
    only_covering: bool  # only to a peer that reaches a copy of every expert
    heir: str | None = None
    due: float = 0.0  # when to try the next one
    tried: tuple[str, ...] = ()


class Leadership:
    """One term of this peer's. Instants are seconds of the election's own time."""

    def __init__(self, voter: Voter, backbone: BackboneSet, time: float) -> None:
        self.failed: tuple[str, ...] | None = None  # whom a hand-over tried in vain; for the caller to take
        self._voter = voter
        self._backbone = backbone
        self._followers: dict[str, _Follower] = {}
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS_KEPT)  # (number, when sent)
        self._number = 0
        self._heartbeat_due = time
        self._uncovered_since: float | None = None
        self._hand_over: _HandOver | None = None
        self.change_backbone(backbone, time)

    def change_backbone(self, backbone: BackboneSet, time: float) -> None:
        """Another version acts; its new members count as heard now."""
        known = self._followers
        others = (peer for peer in backbone.peers if peer != self._voter.peer)
        self._followers = {peer: known.get(peer) or _Follower(time) for peer in others}
        self._backbone = backbone

    def lease_over(self, time: float) -> bool:
        """Whether no quorum, this leader included, was heard for LEASE_S."""
        heard = sum(time - follower.heard <= LEASE_S for follower in self._followers.values())
        return 1 + heard < self._backbone.quorum

    def answered(self, peer: str, reply: HeartbeatReply) -> None:
        """A follower answered a heartbeat. Strangers, and answers to heartbeats long past, count for nothing."""
        follower = self._followers.get(peer)
        sent = next((sent for number, sent in self._rounds if number == reply.number), None)
        if follower is None or sent is None:
            return
        follower.heard = max(follower.heard, sent)
        follower.informed = reply.term >= self._voter.term
        follower.eligible, follower.covers = reply.eligible, reply.covers

    def tick(self, time: float, *, covers: bool) -> list[tuple[str, Message]]:
        """What to send now. `covers`: this leader reaches a copy of every expert."""
        self._watch_coverage(time, covers)
        messages = self._ask_heir(time)
        if time >= self._heartbeat_due:
            self._heartbeat_due = time + HEARTBEAT_S
            messages += self._heartbeats(time)
        return messages

    def _heartbeats(self, time: float) -> list[tuple[str, Message]]:
        self._number += 1
        self._rounds.append((self._number, time))
        version, term = self._voter.ledger.version, self._voter.term
        bare = Heartbeat(version, term, self._number, None)
        full = Heartbeat(version, term, self._number, self._voter.mandate)
        return [(peer, bare if follower.informed else full) for peer, follower in self._followers.items()]

    # -- handing over -------------------------------------------------------------------------------------------

    def start_hand_over(self, *, only_covering: bool = False) -> None:
        """Let another peer lead; the next tick asks the first one."""
        self._hand_over = _HandOver(only_covering)

    def _watch_coverage(self, time: float, covers: bool) -> None:
        if covers:
            self._uncovered_since = None
        elif self._uncovered_since is None:
            self._uncovered_since = time
        elif time - self._uncovered_since >= COVER_PATIENCE_S and self._hand_over is None:
            self._uncovered_since = time
            if self.best_heir(time, only_covering=True) is not None:
                self.start_hand_over(only_covering=True)

    def _ask_heir(self, time: float) -> list[tuple[str, Message]]:
        attempt = self._hand_over
        if attempt is None:
            return []
        if attempt.heir is None or time >= attempt.due:
            attempt.heir = self.best_heir(time, only_covering=attempt.only_covering, but=attempt.tried)
            attempt.due = time + HAND_OVER_S
            if attempt.heir is None:
                self._hand_over, self.failed = None, attempt.tried
                return []
            attempt.tried += (attempt.heir,)
        return self.ask(attempt.heir)

    def ask(self, heir: str) -> list[tuple[str, Message]]:
        """The message that makes a follower stand for election at once."""
        return [(heir, TimeoutNow(self._voter.ledger.version, self._voter.term))]

    def best_heir(self, time: float, *, only_covering: bool = False, but: Collection[str] = ()) -> str | None:
        """The eligible follower to take over: one that covers every expert before others, then whom we heard last."""
        choices = [
            (follower.covers, follower.heard, peer)
            for peer, follower in self._followers.items()
            if follower.eligible
            and follower.informed
            and time - follower.heard <= LEASE_S
            and (follower.covers or not only_covering)
            and peer not in but
        ]
        return max(choices)[2] if choices else None
