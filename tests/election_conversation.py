"""A few backbone peers around a table: what they say, store and believe, line by line.

Messages take 10 ms, everybody's clock is right, and each peer always draws the same number, so a scene has one course.
Heartbeats appear only where they carry a mandate or answer with one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from capabilities.backbone import BackboneSet, Enactment
from capabilities.errors import PeerMistake
from scheduler.election import Election
from scheduler.election_messages import (
    BackboneUpdate,
    Heartbeat,
    HeartbeatReply,
    Message,
    PreVoteReply,
    PreVoteRequest,
    VoteReply,
    VoteRequest,
)
from scheduler.election_roles import Role
from scheduler.election_state import BackboneChanged, HandOverFailed, HardState, LeaderChanged, Ready
from scheduler.election_times import TICK_S
from tests.election_tools import SWARM, backbone_of, keys_of, vote_file

WAY_S = 0.01


class Conversation:
    """Peers begin with `backbone` acting; `draws` are the numbers in [0, 1) that they draw (0.5 if not given)."""

    def __init__(self, backbone: Iterable[str], draws: dict[str, float] | None = None, guests: str = "") -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.elections: dict[str, Election] = {}
        self.disks: dict[str, HardState] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.lost: Callable[[str, str, Message], bool] = lambda sender, receiver, message: False
        self.backbone = backbone_of(backbone)
        self.draws = draws or {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._down: set[str] = set()
        self._roles: dict[str, Role] = {}
        self._ticks: dict[str, int] = {}
        for peer in (*self.backbone.peers, *guests):
            acting = Enactment.of_first(self.backbone) if peer in self.backbone.peers else None
            self.disks[peer] = HardState(SWARM, vote_file(peer), enactment=acting)
            self.boot(peer)

    # -- what a scene does --------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.lines.append(f"-- {line}")

    def boot(self, peer: str, *, lost_votes: bool = False) -> None:
        """Start a peer with what its disk holds."""
        self._down.discard(peer)
        if lost_votes:
            self.disks[peer] = HardState(SWARM, bytes(16))
        election = Election(peer, self.disks[peer], keys_of(peer), lambda: self.draws.get(peer, 0.5), self.now)
        self.elections[peer] = election
        self._roles[peer] = election.role
        self._ticks[peer] = self._ticks.get(peer, 0) + 1
        self.act(peer, election.report(eligible=True, covers=True, now=self.now))
        boot = self._ticks[peer]

        def tick() -> None:
            if boot == self._ticks[peer] and peer not in self._down:
                self.act(peer, self.elections[peer].tick(self.now))
                self._at(TICK_S, tick)

        self._at(TICK_S, tick)

    def crash(self, peer: str) -> None:
        self._down.add(peer)

    def cut(self, *peers: str) -> None:
        """These peers and the others hear each other no more."""
        for a in peers:
            for b in self.elections:
                if b not in peers:
                    self.cuts |= {(a, b), (b, a)}

    def mend(self) -> None:
        self.cuts.clear()

    def event(self, peer: str, name: str, *args: Any, **named: Any) -> None:
        """Call an election's method with the time of day."""
        self.act(peer, getattr(self.elections[peer], name)(*args, **named, now=self.now))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until + 1e-9:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    def deliver(self, sender: str, receiver: str, message: Message) -> None:
        """At once, whoever sends it."""
        try:
            self.act(receiver, self.elections[receiver].receive(message, sender, self.now))
        except PeerMistake as mistake:
            self._line(f"{receiver} refuses {type(message).__name__} of {sender}: {mistake.message}")

    @property
    def leader(self) -> str:
        """The one leader that is up and believes in itself."""
        (leader,) = [p for p, e in self.elections.items() if e.role is Role.LEADER and p not in self._down]
        return leader

    # -- acting and writing down --------------------------------------------------------------------------------

    def act(self, peer: str, ready: Ready) -> None:
        """Store, send, announce."""
        election = self.elections[peer]
        if election.role != self._roles[peer]:
            self._line(f"{peer} becomes {election.role} (was {self._roles[peer]})")
            self._roles[peer] = election.role
        if ready.state is not None:
            self._line(f"{peer} stores {_difference(self.disks[peer], ready.state)}")
            self.disks[peer] = ready.state
        for receiver, message in ready.messages:
            self._send(peer, receiver, message)
        for change in ready.changes:
            match change:
                case LeaderChanged(term, leader, _):
                    self._line(f"{peer} sees {leader or 'nobody'} lead term {term}")
                case BackboneChanged(backbone, seated):
                    where = "in" if seated else "outside"
                    self._line(f"{peer} is {where} backbone {backbone.version}: {' '.join(backbone.peers)}")
                case HandOverFailed(tried):
                    self._line(f"{peer} could not hand over; tried {' '.join(tried) or 'nobody'}")

    def _send(self, sender: str, receiver: str, message: Message) -> None:
        gone = receiver in self._down or (sender, receiver) in self.cuts or self.lost(sender, receiver, message)
        if self._shown(message):
            self._line(f"{sender} -> {receiver} {describe(message)}{'  (lost)' if gone else ''}")
        if not gone:
            self._at(WAY_S, lambda: self._arrive(sender, receiver, message))

    def _arrive(self, sender: str, receiver: str, message: Message) -> None:
        if receiver not in self._down:
            self.deliver(sender, receiver, message)

    def _shown(self, message: Message) -> bool:
        return not isinstance(message, Heartbeat | HeartbeatReply) or message.mandate is not None

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (round(self.now + seconds, 6), self._count, action))

    def _line(self, text: str) -> None:
        self.lines.append(f"{self.now:5.2f} {text}")


def describe(message: Message) -> str:
    """A message in words."""
    match message:
        case PreVoteRequest(term=term):
            text = f"would you vote for me in term {term}?"
        case PreVoteReply(term=term, granted=granted):
            text = f"I would in term {term}" if granted else f"not in term {term}"
        case VoteRequest(term=term, transfer=transfer):
            text = f"vote for me in term {term}" + (", the leader asked me to lead" if transfer else "")
        case VoteReply(term=term, vote=vote):
            return f"my vote in term {vote.term} is for {vote.leader}" if vote else f"no vote in term {term}"
        case Heartbeat(term=term):
            text = f"I lead term {term}"
        case HeartbeatReply(term=term):
            text = f"I hear you, in term {term}"
        case BackboneUpdate(enactment=enactment, pending=pending, words=words):
            text = f"backbone {message.version} acts"
            if enactment is not None and enactment.floor:
                text += f" beyond term {enactment.floor}"
            if pending is not None:
                text += f", {pending.version} is stored by {' '.join(word.peer for word in words) or 'nobody'}"
        case _:
            text = f"leader of term {message.term}: take over now"
    for name in ("proof", "vote"):
        vote = getattr(message, name, None)
        if vote is not None:
            text += f" [vote of {vote.voter} in {vote.term}: {vote.leader}]"
    mandate = getattr(message, "mandate", None)
    return text if mandate is None else f"{text} [mandate {mandate.term}: {mandate.leader}]"


def _difference(before: HardState, after: HardState) -> str:
    parts = []
    if after.voted != before.voted and after.voted is not None:
        parts.append(f"its vote for {after.voted.leader} in term {after.voted.term}")
    if after.mandate != before.mandate and after.mandate is not None:
        parts.append(f"mandate {after.mandate.term}")
    if after.enactment != before.enactment and after.enactment is not None:
        parts.append(f"that backbone {after.enactment.current.version} acts")
    if after.pending != before.pending and after.pending is not None:
        parts.append(f"backbone {after.pending.version}")
    return " and ".join(parts) or "nothing new"


def next_backbone(conversation: Conversation, peers: Iterable[str], previous: BackboneSet | None = None) -> BackboneSet:
    """The owner's version after `previous` (the first one)."""
    return backbone_of(peers, previous or conversation.backbone)
