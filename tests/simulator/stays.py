"""A leader's workers: who is there, since when, and whether they answer pings. As swarmnode/leader/members.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from capabilities.verdict import Fitness
from scheduler.dispatch import RowRate
from scheduler.layer_cost import PeerSpeed
from scheduler.liveness import PING_INTERVAL_S, TICK_S, FailureDetector, PeerState
from scheduler.placement import Placement, WorkerSpec
from tests.simulator.host import Host
from tests.simulator.messages import Hello, Loaded, Ping, Policy, Pong
from tests.simulator.streams import End

RTT_S_UNMEASURED = 0.05
ROWS_PER_S_UNMEASURED = 50.0


@dataclass(eq=False)
class Stay:
    """One worker, from a hello until its stream ends, and what is remembered of it. Instants are the leader's.

    link_up    dispatches may go there: it has answered them since it last failed
    loaded     the (term, epoch) that it says it holds
    proven     those that a probe found right since
    """

    peer: str
    hello: Hello
    stream: End
    joined_s: float
    up: bool = True
    lost_s: float | None = None
    silent: bool = False
    draining: bool = False
    link_up: bool = True
    resting: bool = False
    loaded: tuple[int, int] | None = None
    proven: set[tuple[int, int]] = field(default_factory=set)
    failing_since_s: float | None = None
    failures: int = 0
    given_up: int = 0
    excluded_until_s: float = -math.inf
    rate: RowRate = field(default_factory=RowRate)
    quarantined: bool = False

    @property
    def may_hold(self) -> bool:
        return not self.draining and not self.quarantined

    def is_usable(self, placement: Placement) -> bool:
        """Whether it has proven a placement's share and answers."""
        proven = (placement.term, placement.epoch) in self.proven
        return proven and self.up and not self.silent and self.link_up and not self.quarantined

    def spec(self) -> WorkerSpec:
        """What is known of it for placing."""
        hello = self.hello
        kind = hello.numeric_class or None
        fitness: Fitness = "quarantined" if self.quarantined else "fit"
        return WorkerSpec(
            self.peer, hello.budget_bytes, hello.host, numeric_class=kind, draining=self.draining, fitness=fitness
        )


class Owner(Protocol):
    """Who hears of them: the placer."""

    def joined(self, stay: Stay) -> None: ...
    def left(self, stay: Stay) -> None: ...
    def spoke(self, stay: Stay) -> None: ...
    def progressed(self, stay: Stay, message: Loaded) -> None: ...


class Stays:
    """Of one leadership, until it is ended."""

    def __init__(self, host: Host, owner: Owner) -> None:
        self.by_peer: dict[str, Stay] = {}
        self.live = True
        self._host = host
        self._owner = owner
        self._detector = FailureDetector(host.now())
        self._pings = 0
        self._ping()
        self._tick()

    def end(self) -> None:
        """The leadership is over."""
        self.live = False
        for stay in self.present():
            stay.stream.close()

    def present(self) -> list[Stay]:
        return [stay for stay in self.by_peer.values() if stay.up]

    def is_usable(self, peer: str, placement: Placement) -> bool:
        stay = self.by_peer.get(peer)
        return stay is not None and stay.is_usable(placement)

    def speed(self, peer: str) -> PeerSpeed:
        stay = self.by_peer[peer]
        rtt_s = self._detector.rtt_s(peer) or RTT_S_UNMEASURED
        rows_per_s = stay.rate.rows_per_s or ROWS_PER_S_UNMEASURED
        return PeerSpeed(rtt_s, rows_per_s, numeric_class=stay.hello.numeric_class or None)

    def join(self, stream: End, hello: Hello) -> None:
        """A worker said hello on its stream."""
        old = self.by_peer.get(stream.peer)
        stay = Stay(stream.peer, hello, stream, self._host.now())
        if old is not None:
            old.stream.close()
            self._end(old)
            stay.given_up, stay.excluded_until_s = old.given_up, old.excluded_until_s
        self.by_peer[stay.peer] = stay
        stream.on_message = lambda message: self._told(stay, message)
        stream.on_close = lambda: self._end(stay)
        self._detector.add(stay.peer, self._host.now())
        self._owner.joined(stay)

    def _end(self, stay: Stay) -> None:
        if stay.up and self.live:
            stay.up, stay.lost_s = False, self._host.now()
            if self.by_peer.get(stay.peer) is stay:
                self._detector.remove(stay.peer)
            self._owner.left(stay)

    def _told(self, stay: Stay, message: Any) -> None:
        if not self.live or not stay.up:
            return
        match message:
            case Ping():
                stay.stream.send(Pong(message.number))
            case Pong():
                self._detector.pong(stay.peer, message.number, self._host.now())
            case Policy():
                stay.draining = message.draining
                self._owner.spoke(stay)
            case Loaded():
                self._owner.progressed(stay, message)

    def _ping(self) -> None:
        if not self.live:
            return
        for stay in self.present():
            self._pings += 1
            self._detector.sent(stay.peer, self._pings, self._host.now())
            stay.stream.send(Ping(self._pings))
        self._host.after(PING_INTERVAL_S, self._ping)

    def _tick(self) -> None:
        if not self.live:
            return
        for change in self._detector.tick(self._host.now()):
            stay = self.by_peer[change.peer]
            if change.after is PeerState.FAILED:
                stay.silent, stay.link_up = True, False
                stay.proven.clear()
                self._owner.spoke(stay)
            elif change.after is PeerState.ALIVE and stay.silent:
                stay.silent = False
                self._owner.spoke(stay)
        self._host.after(TICK_S, self._tick)
