"""What must hold at every instant, whatever goes wrong. A breach ends the run.

The checks look at what peers send, obey and believe, and know the truth that no peer knows: every backbone that the
owner ever made, what lies on each disk, and who obeyed whom before a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from capabilities.backbone import BackboneSet
from capabilities.certificates import Mandate, Vote
from capabilities.errors import PeerMistake
from scheduler.election_messages import PreVoteReply, VoteReply
from scheduler.election_roles import Role
from scheduler.election_state import Ballot, DamagedState, HardState, LeaderChanged
from scheduler.election_times import LEASE_S, STRETCH_S, TICK_S
from scheduler.term_guard import from_file
from tests.election_tools import verify

if TYPE_CHECKING:
    from tests.simulator.election import BackbonePeer
    from tests.simulator.host import Host

read_votes = lru_cache(maxsize=256)(HardState.from_file)  # checks look far more often than anybody writes
read_term = lru_cache(maxsize=256)(from_file)

LEASE_GRACE_S = LEASE_S + 2 * TICK_S + 0.01


class Breach(Exception):
    """Something that must never happen did."""


class Checks:
    """Called by behaviours and by the network; `forged` tells a message that was made up."""

    def __init__(self, hosts: dict[str, Host], backbones: list[BackboneSet], forged: Callable[[Any], bool]) -> None:
        self.mistakes = 0  # forged messages, recognised as such
        self.refusals = 0
        self.orders = 0  # obeyed
        self.terms: dict[int, Mandate] = {}
        self._hosts = hosts
        self._backbones = backbones  # all that the owner made, by version
        self._forged = forged
        self._seen: set[bytes] = set()  # mandates, by their bytes
        self._votes: dict[tuple[str, int], tuple[int, str]] = {}  # (voter, term) -> (backbone version, leader)
        self._obeyed: dict[str, int] = {}  # worker -> newest term that it obeyed
        self._led: dict[int, tuple[str, int]] = {}  # term -> (leader, its boot)
        self._leading: dict[str, _Leading] = {}
        self.wrong: set[str] = set()  # workers that have ever computed another function
        self.convictions = 0
        self._convicted: dict[int, set[str]] = {}  # term -> whom its leader may not trust
        self._left: dict[bytes, set[str]] = {}  # record -> whom its reader may not trust

    # -- what is sent -------------------------------------------------------------------------------------------

    def sent(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        """Hears every message (the network's tap). What is forged proves nothing."""
        if self._forged(message):
            return
        if isinstance(message, PreVoteReply | VoteReply) and message.vote is not None:
            self._voted(message.vote)
            self._is_stored(sender, message.vote)
        mandate = getattr(message, "mandate", None) or getattr(message, "known", None)
        if mandate is not None:
            self._certified(mandate)

    def _voted(self, vote: Vote) -> None:
        promise = (vote.backbone_version, vote.leader)
        before = self._votes.setdefault((vote.voter, vote.term), promise)
        if before != promise:
            raise Breach(f"double vote: {vote.voter} voted for {before} and {promise} in term {vote.term}")

    def _is_stored(self, voter: str, vote: Vote) -> None:
        state = read_votes(self._hosts[voter].disk.files["votes"])
        if state.voted is None or state.voted.term < vote.term:
            raise Breach(f"vote not stored: {voter} sent its vote of term {vote.term} before it was on its disk")
        if state.voted.term == vote.term and state.voted != Ballot(vote.backbone_version, vote.term, vote.leader):
            raise Breach(f"vote not stored: {voter} sent another vote of term {vote.term} than is on its disk")

    def _certified(self, mandate: Mandate) -> None:
        data = mandate.certificate.to_bytes()
        if data in self._seen:
            return
        self._seen.add(data)
        self._check_quorum(mandate)
        for vote in mandate.certificate.votes:
            self._voted(vote)
        other = self.terms.setdefault(mandate.term, mandate)
        if other.leader != mandate.leader:
            raise Breach(f"two leaders of term {mandate.term}: {other.leader} and {mandate.leader}")
        for known in self.terms.values():
            if (known.term < mandate.term) and known.backbone.version > mandate.backbone.version:
                raise Breach(f"backbone went back: term {known.term} has a newer one than term {mandate.term}")

    def _check_quorum(self, mandate: Mandate) -> None:
        """By other means than the product's: the owner's own list, and each signature."""
        backbone, votes = self._backbones[mandate.backbone.version - 1], mandate.certificate.votes
        voters = {vote.voter for vote in votes if verify(vote.voter, vote.payload(), vote.signature)}
        agreed = all((vote.term, vote.leader) == (mandate.term, mandate.leader) for vote in votes)
        if mandate.backbone != backbone or 2 * len(voters & set(backbone.peers)) <= len(backbone.peers) or not agreed:
            raise Breach(f"uncertified: {mandate.leader} does not lead term {mandate.term}")

    # -- what is believed ---------------------------------------------------------------------------------------

    def mistake(self, sender: str, receiver: str, message: Any, mistake: PeerMistake) -> None:
        """A receiver called a message forged."""
        if not self._forged(message):
            raise Breach(
                f"{receiver} calls an honest {type(message).__name__} of {sender} a mistake: {mistake.message}"
            )
        self.mistakes += 1

    def leads(self, host: Host, change: LeaderChanged) -> None:
        """A peer announced who leads."""
        self._leading.pop(host.name, None)
        if change.mandate is not None:
            self._certified(change.mandate)
        if change.leader is None:
            return
        if change.mandate is None or (change.mandate.term, change.mandate.leader) != (change.term, change.leader):
            raise Breach(f"uncertified: {host.name} believes that {change.leader} leads term {change.term}")
        if change.leader == host.name:
            held = self._led.setdefault(change.term, (host.name, host.boots))
            if held != (host.name, host.boots):
                raise Breach(f"term {change.term} is led by {held} and by {(host.name, host.boots)}")
            self._leading[host.name] = _Leading()

    def ticked(self, peer: BackbonePeer) -> None:
        """A backbone peer's time went on: does it lead without a quorum?"""
        leading, election = self._leading.get(peer.host.name), peer.election
        if leading is None or election is None or election.role is not Role.LEADER:
            return
        assert election.backbone is not None
        leading.advance(peer.host.now(), election.backbone)
        heard = leading.heard_lately()
        if 1 + heard < election.backbone.quorum:
            raise Breach(f"lease without quorum: {peer.host.name} leads and hears {heard} others")

    def heard(self, receiver: str, sender: str, now: float) -> None:
        """A backbone peer got a message of another one."""
        leading = self._leading.get(receiver)
        if leading is not None:
            leading.hear(sender, now)

    # -- what is obeyed -----------------------------------------------------------------------------------------

    def obeyed(self, worker: str, leader: str, term: int) -> None:
        """A worker obeyed an order."""
        mandate = self.terms.get(term)
        if mandate is None or mandate.leader != leader:
            raise Breach(f"uncertified order: {worker} obeyed {leader} in term {term}")
        if term < self._obeyed.get(worker, 0):
            raise Breach(f"old leader: {worker} obeyed term {term} after term {self._obeyed[worker]}")
        if self._stored_term(worker) < term:
            raise Breach(f"term not stored: {worker} obeyed term {term} before it was on its disk")
        self._obeyed[worker] = term
        self.orders += 1

    def _stored_term(self, worker: str) -> int:
        try:
            return read_term(self._hosts[worker].disk.files["term"]).term
        except (KeyError, DamagedState):
            return 0

    def refused(self, worker: str, leader: str, term: int) -> None:
        """A worker refused an order."""
        self.refusals += 1

    # -- who is trusted -----------------------------------------------------------------------------------------

    def convicted(self, term: int, worker: str) -> None:
        """A leader quarantined a worker."""
        if worker not in self.wrong:
            raise Breach(f"convicted: {worker} has never computed another function")
        self._convicted.setdefault(term, set()).add(worker)
        self.convictions += 1

    def left(self, term: int, record: bytes) -> None:
        """The leader of a term left a record to its successors."""
        if convicted := self._convicted.get(term):
            self._left[record] = set(convicted)

    def inherits(self, term: int, record: bytes) -> None:
        """The leader of a term begins with a record."""
        self._convicted.setdefault(term, set()).update(self._left.get(record, ()))

    def trusted(self, term: int, worker: str) -> None:
        """A leader gave a worker a share, or work."""
        if worker in self._convicted.get(term, ()):
            raise Breach(f"trusted: the leader of term {term} goes on with {worker}, which is quarantined")

    def released(self, worker: str) -> None:
        """The owner took a quarantine back."""
        for convicted in (*self._convicted.values(), *self._left.values()):
            convicted.discard(worker)

    def forgot(self, worker: str) -> None:
        """A worker boots without its file: it never had one, or the disk tore it."""
        self._obeyed.pop(worker, None)


class _Leading:
    """One leadership, as seen from outside: when its leader heard whom, on the leader's stretched time."""

    def __init__(self) -> None:
        self.time = 0.0
        self._clock: float | None = None
        self._since = 0.0  # beginning, or the last change of the backbone
        self._backbone: BackboneSet | None = None
        self._heard: dict[str, float] = {}

    def advance(self, now: float, backbone: BackboneSet) -> None:
        self._pass(now)
        if backbone is not self._backbone:
            self._backbone, self._since = backbone, self.time

    def hear(self, peer: str, now: float) -> None:
        self._pass(now)
        self._heard[peer] = self.time

    def heard_lately(self) -> int:
        assert self._backbone is not None
        if self.time - self._since < LEASE_GRACE_S:
            return len(self._backbone.members)  # it may still wait for the first answers
        return sum(self.time - self._heard.get(peer, -LEASE_GRACE_S) < LEASE_GRACE_S for peer in self._backbone.peers)

    def _pass(self, now: float) -> None:
        if self._clock is not None:
            self.time += min(now - self._clock, STRETCH_S)
        self._clock = now
