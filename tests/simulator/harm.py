"""What goes wrong in a whole swarm: what the nemesis does to elections, less often, and workers that turn bad.

Faults leave time to serve between them, and many strike in the middle of a token: at a moment when a dispatch has just
left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulator.forger import Forger
from tests.simulator.messages import Dispatch
from tests.simulator.nemesis import FAULT_S, FORGE_S, Nemesis
from tests.simulator.volunteer import PASSING, Mischief, Volunteer

if TYPE_CHECKING:
    from tests.simulator.whole import WholeSwarm

ROUGH = 0.15  # share of the seeds that are as rough as elections alone
AT_DISPATCH = 0.03  # chance that a dispatch is what a fault waits for
AT_DISPATCH_S_MIN = 1.5  # between two of those


class Harm(Nemesis):
    """See the module."""

    fault_s = (0.5, 8.0)
    change_s = (1.0, 8.0)
    first_split = 0.1
    losses = (0, 0, 0.01, 0.05)
    crash_at_write = (0.05, 0.05)

    def __init__(self, swarm: WholeSwarm, until: float) -> None:
        super().__init__(swarm, until)
        self._whole = swarm
        self._struck = 0.0
        if self._random.random() < ROUGH:
            self.fault_s = FAULT_S
        self._dispatches = ForgedDispatches(swarm.forger)
        self._faults += [self._spoil_worker, self._crash_worker, self._drain_worker]
        swarm.network.taps.append(self._sent)

    def begin(self) -> None:
        super().begin()
        if self._random.random() < 0.5:
            self._repeat(FORGE_S, self._dispatches.strike)

    def _sent(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        """Hears every message (the network's tap)."""
        now = self._world.now
        if isinstance(message, Dispatch):
            self._dispatches.overhear(message)
        if not isinstance(message, Dispatch) or now >= self._until or now - self._struck < AT_DISPATCH_S_MIN:
            return
        if self._random.random() < AT_DISPATCH:
            self._struck = now
            self._world.at(now + self._random.uniform(0, 0.03), self._choose_at_dispatch(sender, receiver))

    def _choose_at_dispatch(self, leader: str, worker: str) -> Callable[[], None]:
        hosts, random = self._swarm.hosts, self._random
        victim = hosts.get(random.choice((leader, worker)))
        if victim is None:
            return self._spoil_worker
        seconds = random.choice((0.3, 2.0, 6.0))
        chosen: list[Callable[[], None]] = [
            lambda: self._bring_down(victim, seconds),
            lambda: self._stop_one(victim, seconds),
            lambda: self._cut([(leader, worker), (worker, leader)], seconds),
            lambda: self._cut([(worker, leader)], seconds),
            lambda: self._spoil(worker, seconds),
        ]
        return random.choice(chosen)

    # -- faults -------------------------------------------------------------------------------------------------

    def _spoil_worker(self) -> None:
        self._spoil(self._random.choice(self._whole.volunteers), self._random.choice((0.5, 3.0, 12.0)))

    def _crash_worker(self) -> None:
        """It may come back with more memory or less, or compute something else from then on."""
        name = self._random.choice(self._whole.volunteers)
        host, health = self._swarm.hosts[name], self._whole.machines.health[name]
        if not host.up or self._world.now >= self._until:
            return
        if self._random.random() < 0.3:
            health.budget_bytes = self._whole.draw_budget()
        if self._random.random() < 0.2 and health.mischief is Mischief.NOTHING:
            health.mischief = Mischief.WRONG
            self._whole.checks.wrong.add(name)
            self._world.note(f"{name} is bad from now on: {health.mischief}")
        self._bring_down(host, 2.0)

    def _drain_worker(self) -> None:
        """It wants to hold nothing for a while."""
        name = self._random.choice(self._whole.volunteers)
        self._set_draining(name, True)
        self._for_a_while(self._random.choice((2.0, 10.0)), lambda: self._set_draining(name, False))

    def _set_draining(self, name: str, draining: bool) -> None:
        self._whole.machines.health[name].draining = draining
        host = self._swarm.hosts[name]
        volunteer = host.behaviours.get("dispatch")
        if isinstance(volunteer, Volunteer):
            host.do(volunteer.tell_policy)

    def _spoil(self, worker: str, seconds: float) -> None:
        """A worker turns bad for a while."""
        health = self._whole.machines.health.get(worker)
        if health is None or health.mischief is not Mischief.NOTHING or self._world.now >= self._until:
            return
        health.mischief = self._random.choice((*PASSING, Mischief.CANNOT_LOAD))
        self._world.note(f"{worker} is bad: {health.mischief}")

        def over() -> None:
            health.mischief = Mischief.NOTHING

        self._for_a_while(seconds, over)

    def _end(self) -> None:
        self._whole.make_room()
        for health in self._whole.machines.health.values():
            health.mischief = Mischief.NOTHING
        super()._end()
        for name in sorted(self._whole.checks.wrong):
            self._whole.release(name)


class ForgedDispatches:
    """Work that nobody ordered: of a stranger, or of a backbone peer that does not lead (any more)."""

    def __init__(self, forger: Forger) -> None:
        self._forger = forger
        self._seen: Dispatch | None = None

    def overhear(self, dispatch: Dispatch) -> None:
        self._seen = dispatch

    def strike(self) -> None:
        """Repeat the last one in another's name, perhaps with another term."""
        if self._seen is not None:
            self._forger.order(self._seen)
