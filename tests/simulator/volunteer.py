"""A worker: it joins whoever leads, holds what it is told to, and computes for the leader of the newest term alone.

It may turn bad (`Mischief`), which shows whether leaders believe only what they have checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from scheduler.combine import weighted_sums
from scheduler.liveness import PING_INTERVAL_S, TICK_S, FailureDetector, PeerState
from scheduler.term_guard import StaleTerm, UncertifiedTerm
from tests.simulator.checks import Breach, Checks
from tests.simulator.host import Host
from tests.simulator.member import Member
from tests.simulator.messages import Assign, Begin, Dispatch, Held, Hello, Loaded, Ping, Policy, Pong, Rows
from tests.simulator.streams import End, dial
from tests.simulator.toy import EXPERT_BYTES, Experts

REDIAL_S = 0.4
LOAD_S = (0.02, 0.4)  # from its disk, or over the network
COMPUTE_S = (0.001, 0.008)


class Mischief(StrEnum):
    """How a worker is bad."""

    NOTHING = "nothing"
    NOT_FINITE = "not finite"
    SHAPE = "another shape"
    DTYPE = "another type"
    SILENT = "no answer"
    REFUSES = "refuses"
    SLOW = "slow"
    WRONG = "another function"
    CANNOT_LOAD = "cannot load"


PASSING = (Mischief.NOT_FINITE, Mischief.SHAPE, Mischief.DTYPE, Mischief.SILENT, Mischief.REFUSES, Mischief.SLOW)
"""What may befall a worker at any time without changing an answer."""


@dataclass(slots=True)
class Health:
    """A worker's state that outlives its process: what is wrong with the machine."""

    budget_bytes: int
    numeric_class: str
    machine: str  # which it shares with others; empty: its own
    draining: bool = False
    mischief: Mischief = Mischief.NOTHING


@dataclass(slots=True)
class _Set:
    """The experts of an epoch in memory; `names`: the (term, epoch)s under which it answers.

    begun: a leader has begun it, and so has found it right since it was loaded.
    """

    held: Held
    names: set[tuple[int, int]] = field(default_factory=set)
    begun: bool = False

    @property
    def bytes(self) -> int:
        return EXPERT_BYTES * sum(map(len, self.held.values()))


class Volunteer:
    """See the module. Channel "dispatch"; its member stream goes to the leader's channel "members"."""

    channel = "dispatch"

    def __init__(
        self, host: Host, member: Member, hosts: dict[str, Host], experts: Experts, health: Health, checks: Checks
    ) -> None:
        self.host = host
        self.health = health
        self._member = member
        self._hosts = hosts
        self._experts = experts
        self._checks = checks
        self._stream: End | None = None
        self._leader: tuple[int, str] | None = None  # whom the stream goes to
        self._detector = FailureDetector(host.now())
        self._pings = 0
        self._sets: list[_Set] = []  # the one that serves, and one that is prepared
        self._loading: Assign | None = None

    def start(self) -> None:
        self._member.on_change.append(self._look)
        self._look()
        self._ping()
        self._tick()

    # -- membership ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Be a member of whoever leads."""
        known = self._member.leader()
        if known != self._leader or (known is not None and self._stream is None):
            self._leave()
            self._leader = known
            if known is not None:
                self._join(*known)

    def _join(self, term: int, leader: str) -> None:
        stream = self._stream = dial(self.host, self._hosts[leader], "members")
        stream.on_message = lambda message: self._told(stream, message)
        stream.on_close = lambda: self._lost(stream)
        health = self.health
        holding = tuple(sorted(name for each in self._sets if each.begun for name in each.names))
        stream.send(Hello(term, health.budget_bytes, health.numeric_class, health.machine, holding))
        self.tell_policy()
        self._detector.add(leader, self.host.now())

    def tell_policy(self) -> None:
        """Whether it wants to hold nothing more."""
        if self._stream is not None:
            self._stream.send(Policy(self.health.draining))

    def _leave(self) -> None:
        if self._stream is not None and self._leader is not None:
            self._detector.remove(self._leader[1])
            self._stream.close()
            self._stream = None

    def _lost(self, stream: End) -> None:
        if stream is self._stream:
            self._leave()
            self.host.after(REDIAL_S, self._look)

    def _ping(self) -> None:
        if self._stream is not None and self._leader is not None:
            self._pings += 1
            self._detector.sent(self._leader[1], self._pings, self.host.now())
            self._stream.send(Ping(self._pings))
        self.host.after(PING_INTERVAL_S, self._ping)

    def _tick(self) -> None:
        for change in self._detector.tick(self.host.now()):
            if change.after is PeerState.FAILED and self._stream is not None:
                self._lost(self._stream)
        self.host.after(TICK_S, self._tick)

    def _told(self, stream: End, message: Any) -> None:
        match message:
            case Ping():
                stream.send(Pong(message.number))
            case Pong():
                self._detector.pong(stream.peer, message.number, self.host.now())
            case Assign() if self._obeys(message.term, stream.peer):
                self._assigned(stream, message)
            case Begin() if self._obeys(message.term, stream.peer):
                self._begin(message)

    def _obeys(self, term: int, leader: str) -> bool:
        try:
            self._member.guard.check(term, leader)
        except (StaleTerm, UncertifiedTerm):
            self._checks.refused(self.host.name, leader, term)
            return False
        self._checks.obeyed(self.host.name, leader, term)
        return True

    # -- experts ------------------------------------------------------------------------------------------------

    def _assigned(self, stream: End, order: Assign) -> None:
        name = (order.term, order.epoch)
        for each in self._sets:
            if each.held == order.held:
                each.names.add(name)
                stream.send(Loaded(*name, True))
                return
        bytes_asked = _Set(order.held).bytes
        if self.health.mischief is Mischief.CANNOT_LOAD or bytes_asked > self.health.budget_bytes:
            stream.send(Loaded(*name, False))
            return
        self._loading = order
        self.host.after(self.host.random.uniform(*LOAD_S), lambda: self._load(stream, order))

    def _load(self, stream: End, order: Assign) -> None:
        if self._loading is not order:
            return
        new = _Set(order.held, {(order.term, order.epoch)})
        del self._sets[1:]
        if self._sets and self._sets[0].bytes + new.bytes > self.health.budget_bytes:
            self._sets.clear()
        self._sets.append(new)
        if sum(each.bytes for each in self._sets) > self.health.budget_bytes:
            raise Breach(f"memory: {self.host.name} was told to hold {new.bytes} of {self.health.budget_bytes} bytes")
        stream.send(Loaded(order.term, order.epoch, True))

    def _begin(self, order: Begin) -> None:
        chosen = self._find(order.term, order.epoch)
        if chosen is not None:
            chosen.names, chosen.begun = {(order.term, order.epoch)}, True
            self._sets = [chosen]

    def _find(self, term: int, epoch: int) -> _Set | None:
        return next((each for each in self._sets if (term, epoch) in each.names), None)

    # -- dispatches ---------------------------------------------------------------------------------------------

    def receive(self, sender: str, message: Dispatch) -> None:
        if self.health.mischief is Mischief.REFUSES:
            self.host.send(sender, "rows", Rows(message.number, None, "I will not"))
            return
        if not self._obeys(message.term, sender):
            self.host.send(sender, "rows", Rows(message.number, None, "another leads"))
            return
        chosen = self._find(message.term, message.epoch)
        held = () if chosen is None else chosen.held.get(message.layer, ())
        if not set(message.experts.tolist()) <= set(held):
            self.host.send(sender, "rows", Rows(message.number, None, "not held"))
            return
        rows = self._experts.rows(message.layer, message.x, message.tokens, message.experts)
        if message.weights is not None:
            rows = weighted_sums(rows, message.weights, message.tokens)
        seconds = self.host.random.uniform(*COMPUTE_S)
        if self.health.mischief is Mischief.SLOW:
            seconds += self.host.random.uniform(1.0, 8.0)
        if self.health.mischief is not Mischief.SILENT:
            values = _SPOIL.get(self.health.mischief, lambda rows: rows)(rows)
            self.host.after(seconds, lambda: self.host.send(sender, "rows", Rows(message.number, values)))


def _not_finite(rows: Any) -> Any:
    rows = rows.copy()
    rows[-1, 3] = np.nan if len(rows) % 2 else np.inf
    return rows


_SPOIL: dict[Mischief, Callable[[Any], Any]] = {
    Mischief.NOT_FINITE: _not_finite,
    Mischief.SHAPE: lambda rows: rows[:, :-1] if len(rows) % 2 else np.concatenate([rows, rows]),
    Mischief.DTYPE: lambda rows: rows.astype(np.float64),
    Mischief.WRONG: lambda rows: rows * np.float32(1.5),
}
