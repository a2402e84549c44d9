"""What every node of a whole swarm has: a view of who leads, from the leader's own words and its mandate."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.checks import Checks
from tests.simulator.election import Order, Parts, Worker
from tests.simulator.host import Host

FRESH_S = 2.5  # how long a leader's word counts, on this host's clock
LOOK_S = 0.25


class Member(Worker):
    """Obeys orders as a `Worker`: the newest one that it obeyed says who leads, as long as it is fresh."""

    def __init__(self, host: Host, parts: Parts, checks: Checks) -> None:
        super().__init__(host, parts, checks)
        self.on_change: list[Callable[[], None]] = []  # the leader may be another one
        self._said: tuple[int, str] | None = None
        self._heard = 0.0
        self._seen: tuple[int, str] | None = None

    def start(self) -> None:
        self._look()

    def leader(self) -> tuple[int, str] | None:
        """(term, leader), None if nobody is known to lead now."""
        said = self._said
        if said is None or self.host.now() - self._heard > FRESH_S or self.guard.term > said[0]:
            return None
        return said

    def obeyed(self, sender: str, order: Order) -> None:
        self._said, self._heard = (order.term, sender), self.host.now()
        self._tell()

    def _look(self) -> None:
        self._tell()
        self.host.after(LOOK_S, self._look)

    def _tell(self) -> None:
        now = self.leader()
        if now != self._seen:
            self._seen = now
            for tell in self.on_change:
                tell()
