"""Behaviours of an election: a backbone peer, the orders of a leader, and a worker that obeys them.

They are thin shells, as the daemon's are: an event goes into the object of `scheduler/`, and what comes out is written,
sent and announced in that order. `Parts` names the objects, so that tests can put broken ones in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from capabilities.backbone import VOTE_FILE_BYTES, BackboneSet
from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake
from scheduler.election import Election
from scheduler.election_messages import from_plain, to_plain
from scheduler.election_state import NOTHING, BackboneChanged, DamagedState, HardState, LeaderChanged, Ready
from scheduler.election_times import TICK_S
from scheduler.term_guard import StaleTerm, TermGuard, UncertifiedTerm, from_file, to_file
from tests.election_tools import SWARM, keys_of, verify, verify_owner
from tests.simulator.checks import Checks
from tests.simulator.host import Behaviour, Host

ORDER_S = 0.3
CODEC_SAMPLE = 8  # one message in so many goes through its plain form
VOTES, TERM = "votes", "term"  # file names


class BackbonePeer:
    """Runs an `Election`: ticks it, carries its messages, keeps its vote file."""

    channel = "election"

    def __init__(self, host: Host, parts: Parts, checks: Checks, first: BackboneSet | None) -> None:
        """`first`: the owner's first backbone, which its members have from the beginning."""
        self.host = host
        self.election: Election | None = None  # None until the vote file is there
        self.on_leader: list[Callable[[LeaderChanged], None]] = []  # hear who leads, and so whether this host does
        self._parts = parts
        self._checks = checks
        self._first = first
        self._ready: deque[Ready] = deque()
        self._writing = False
        self._sent = 0
        self.eligible = self.covers = True

    @property
    def peers(self) -> tuple[str, ...]:
        """The other backbone peers."""
        return () if self.election is None else self.election.peers

    def start(self) -> None:
        try:
            state = HardState.from_file(self.host.disk.files[VOTES])
        except DamagedState:
            state = HardState(SWARM, self.host.random.randbytes(VOTE_FILE_BYTES))
            self.host.disk.write(VOTES, state.to_file(), lambda: self._begin(state))
        else:
            self._begin(state)

    def _begin(self, state: HardState) -> None:
        self.election = self._parts.election(
            self.host.name, state, keys_of(self.host.name), self.host.draw, self.host.now()
        )
        if self._first is not None and state.enactment is None:
            self.take(self.election.propose(self._first, self.host.now()))
        self.report(self.eligible, self.covers)
        self._tick()

    def report(self, eligible: bool, covers: bool) -> None:
        """Whether this peer may lead, and reaches every expert."""
        self.eligible, self.covers = eligible, covers
        if self.election is not None:
            self.take(self.election.report(eligible=eligible, covers=covers, now=self.host.now()))

    def receive(self, sender: str, message: Any) -> None:
        if self.election is None:
            return
        now = self.host.now()
        self._checks.heard(self.host.name, sender, now)
        try:
            ready = self.election.receive(message, sender, now)
        except PeerMistake as mistake:
            self._checks.mistake(sender, self.host.name, message, mistake)
        else:
            self.take(ready)

    def learn(self, sender: str, message: Answer) -> None:
        """A worker showed a newer mandate."""
        if self.election is None or message.known is None:
            return
        try:
            ready = self.election.learn(message.known, self.host.now())
        except PeerMistake as mistake:
            self._checks.mistake(sender, self.host.name, message, mistake)
        else:
            self.take(ready)

    def _tick(self) -> None:
        assert self.election is not None
        self.take(self.election.tick(self.host.now()))
        self._checks.ticked(self)
        self.host.after(TICK_S, self._tick)

    # -- acting on a Ready: write, then send, then announce, one after the other ---------------------------------

    def take(self, ready: Ready) -> None:
        if ready is not NOTHING:
            self._ready.append(ready)
            self._act()

    def _act(self) -> None:
        while self._ready and not self._writing:
            state = self._ready[0].state
            if state is not None:
                self._writing = True
                self.host.disk.write(VOTES, state.to_file(), self._written)
                return
            self._finish(self._ready.popleft())

    def _written(self) -> None:
        self._writing = False
        self._finish(self._ready.popleft())
        self._act()

    def _finish(self, ready: Ready) -> None:
        for peer, message in ready.messages:
            self._sent += 1
            if self._sent % CODEC_SAMPLE == 0:
                assert from_plain(to_plain(message)) == message
            self.host.send(peer, self.channel, message)
        for change in ready.changes:
            if isinstance(change, LeaderChanged):
                self.host.world.note(f"{self.host.name} sees {change.leader} lead {change.term}")
                self._checks.leads(self.host, change)
                for hear in self.on_leader:
                    hear(change)
            elif isinstance(change, BackboneChanged):
                self.host.world.note(f"{self.host.name} acts under backbone {change.backbone.version}")


@dataclass(frozen=True, slots=True)
class Show:
    """The leader shows its mandate."""

    mandate: Mandate


@dataclass(frozen=True, slots=True)
class Order:
    """The leader of `term` gives an order."""

    term: int
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker obeyed the order, or refused it and shows what it knows better."""

    term: int
    obeyed: bool
    known: Mandate | None


class Orders:
    """What a leader does for as long as it leads: shows its mandate, gives orders."""

    channel = "answers"

    def __init__(self, peer: BackbonePeer, workers: tuple[str, ...]) -> None:
        self._peer = peer
        self._host = peer.host
        self._workers = workers
        self._leads: LeaderChanged | None = None
        self._number = 0
        self._aware: set[str] = set()
        peer.on_leader.append(self._leader_changed)

    def start(self) -> None:
        pass

    def _leader_changed(self, change: LeaderChanged) -> None:
        leads = change.leader == self._host.name
        self._aware = set()
        self._leads = change if leads else None
        if leads:
            self._give(change)

    def _give(self, leads: LeaderChanged) -> None:
        if self._leads is not leads or self._peer.election is None:
            return
        for worker in self._workers:
            if worker not in self._aware and leads.mandate is not None:
                self._host.send(worker, "orders", Show(leads.mandate))
            self._number += 1
            self._host.send(worker, "orders", Order(leads.term, self._number))
        self._host.after(ORDER_S, lambda: self._give(leads))

    def receive(self, sender: str, message: Answer) -> None:
        if message.obeyed:
            if self._leads is not None and message.term == self._leads.term:
                self._aware.add(sender)
        else:
            self._aware.discard(sender)  # it may have lost what it was shown
            self._peer.learn(sender, message)


class Worker:
    """Runs a `TermGuard`: obeys orders, keeps the newest term on disk."""

    channel = "orders"

    def __init__(self, host: Host, parts: Parts, checks: Checks) -> None:
        self.host = host
        self._parts = parts
        self._checks = checks
        self._waiting: list[Mandate] = []
        self._writing = False
        self.guard: TermGuard = parts.guard(SWARM, verify, verify_owner, self._stored())

    def _stored(self) -> Mandate | None:
        try:
            return from_file(self.host.disk.files[TERM])
        except (KeyError, DamagedState):
            self._checks.forgot(self.host.name)
            return None

    def start(self) -> None:
        pass

    def receive(self, sender: str, message: Any) -> None:
        if isinstance(message, Show):
            self._shown(sender, message)
        else:
            self._ordered(sender, message)

    def _shown(self, sender: str, message: Show) -> None:
        try:
            mandate = self.guard.receive(message.mandate)
        except StaleTerm:
            return
        except PeerMistake as mistake:
            self._checks.mistake(sender, self.host.name, message, mistake)
            return
        if mandate is not None:
            self._waiting.append(mandate)
            self._write()

    def _write(self) -> None:
        if self._waiting and not self._writing:
            self._writing = True
            self.host.disk.write(TERM, to_file(self._waiting[0]), self._written)

    def _written(self) -> None:
        self._writing = False
        self.guard.stored(self._waiting.pop(0))
        self._write()

    def _ordered(self, sender: str, order: Order) -> None:
        try:
            self.guard.check(order.term, sender)
        except (StaleTerm, UncertifiedTerm) as refusal:
            self._checks.refused(self.host.name, sender, order.term)
            known = self.guard.known if isinstance(refusal, StaleTerm) else None
            self.host.send(sender, "answers", Answer(order.term, False, known))
        else:
            self._checks.obeyed(self.host.name, sender, order.term)
            self.host.world.note(f"{self.host.name} obeys {sender} in {order.term}")
            self.host.send(sender, "answers", Answer(order.term, True, None))
            self.obeyed(sender, order)

    def obeyed(self, sender: str, order: Order) -> None:
        """An order was obeyed."""


def no_behaviours(host: Host) -> list[Behaviour]:
    return []


@dataclass(frozen=True)
class Parts:
    """The objects under test. Tests of the simulator itself put broken ones here."""

    election: Callable[..., Election] = Election
    guard: Callable[..., TermGuard] = TermGuard
    backbone_peer: Callable[..., BackbonePeer] = BackbonePeer
    more: Callable[[Host], list[Behaviour]] = field(default=no_behaviours)  # further behaviours of every node
