"""What goes wrong, and when: drawn from the seed, aimed at leaders more often than chance would."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulator.host import FSYNC_S_MAX, Host
from tests.simulator.network import Weather

if TYPE_CHECKING:
    from tests.simulator.swarm import Swarm

FAULT_S = (0.05, 0.7)  # between two faults, at least and at most
FORGE_S = (0.02, 0.4)
CHANGE_S = (0.1, 1.5)
SLOW_FSYNC_S_MAX = 0.3


class Nemesis:
    """Plagues a swarm until a given instant, then mends everything."""

    fault_s = FAULT_S
    change_s = CHANGE_S
    first_split = 0.3  # chance of one before anybody leads
    losses = (0, 0.02, 0.1, 0.3)
    crash_at_write = (0.25, 0.5)  # chance at each of a backbone peer's and of a worker's, who writes seldom

    def __init__(self, swarm: Swarm, until: float) -> None:
        self._swarm = swarm
        self._world = swarm.world
        self._random: Random = swarm.world.chance("nemesis")
        self._until = until
        self._mending: list[Callable[[], None]] = []  # what ends each fault that lasts
        self._faults: list[Callable[[], None]] = self._choose_faults()

    def begin(self) -> None:
        """From now on."""
        self._swarm.network.weather = self._weather()
        if self._random.random() < 0.6:
            for host in self._swarm.hosts.values():
                host.disk.on_write = self._crash_at_write
        lucky = self._random.random() < 0.7
        for host in self._swarm.hosts.values():
            host.disk.fsync_s_max = self._random.choice((FSYNC_S_MAX, FSYNC_S_MAX, SLOW_FSYNC_S_MAX))
            host.lucky = lucky
        self._world.at(self._until, self._end)
        if self._random.random() < self.first_split:
            self._split(5.0)
        self._repeat(self.fault_s, self._any_fault)
        if self._random.random() < 0.5:
            self._repeat(FORGE_S, self._swarm.forger.strike)
        if self._random.random() < 0.5:
            self._repeat(self.change_s, self._swarm.change_backbone)

    def _choose_faults(self) -> list[Callable[[], None]]:
        """Each run has some kinds of fault, so that none hides the others."""
        kinds = [self._crash, self._stop, self._cut_one_way, self._cut_off, self._cut_from_peers, self._split]
        kinds += [self._change_weather, self._doubt, self._uncover, self._drain]
        return [kind for kind in kinds if self._random.random() < 0.5] or [self._crash]

    def _any_fault(self) -> None:
        self._random.choice(self._faults)()

    def _repeat(self, seconds: tuple[float, float], action: Callable[[], None]) -> None:
        """Again and again, until all heals."""

        def strike() -> None:
            if self._world.now < self._until:
                action()
                self._repeat(seconds, action)

        self._world.at(self._world.now + self._random.uniform(*seconds), strike)

    def _end(self) -> None:
        """Everything heals at once."""
        self._world.note("all heals")
        self._swarm.network.weather = Weather()
        for host in self._swarm.hosts.values():
            host.lucky = True
            host.disk.on_write, host.disk.fsync_s_max = None, FSYNC_S_MAX
            host.disk.tears = False
        mending, self._mending = self._mending, []
        for mend in mending:
            mend()
        for host in self._swarm.hosts.values():
            host.resume()
            if not host.up:
                host.boot()
        for name in self._swarm.backbone:
            self._swarm.report(name, eligible=True, covers=True)

    def _for_a_while(self, seconds: float, mend: Callable[[], None]) -> None:
        """Mend it then, or when all heals."""

        def over() -> None:
            if mend in self._mending:
                self._mending.remove(mend)
                mend()

        self._mending.append(mend)
        self._world.at(self._world.now + seconds, over)

    def _victim(self) -> Host:
        """Mostly a leader, if there is one."""
        swarm, random = self._swarm, self._random
        leaders = swarm.leaders()
        if leaders and random.random() < 0.7:
            return random.choice(leaders)
        return random.choice(list(swarm.hosts.values()))

    # -- faults -------------------------------------------------------------------------------------------------

    def _weather(self) -> Weather:
        random = self._random
        bad = random.random() < 0.6
        return Weather(
            loss=random.choice(self.losses) if bad else 0.0,
            doubled=random.choice((0, 0.1)) if bad else 0.0,
            delay_min=0.001,
            delay_max=random.choice((0.02, 0.1, 0.4)) if bad else 0.02,
            straggler=random.choice((0, 0.02, 0.1)) if bad else 0.0,
        )

    def _change_weather(self) -> None:
        self._swarm.network.weather = self._weather()

    def _crash(self) -> None:
        self._bring_down(self._victim(), self._random.choice((0.05, 0.5, 3.0)))

    def _bring_down(self, host: Host, seconds: float) -> None:
        if not host.up or self._world.now >= self._until:
            return
        host.disk.tears = self._swarm.may_tear(host) and self._random.random() < 0.3
        host.crash()
        host.disk.tears = False
        self._for_a_while(seconds, lambda: None if host.up else host.boot())

    def _crash_at_write(self, host: Host, seconds: float) -> None:
        """Within a write or right after it, when what follows from it is just being sent."""
        if self._random.random() < self.crash_at_write[host.name not in self._swarm.backbone]:
            when = seconds * self._random.choice((0.5, 1.0, 1.05, 1.5))
            down = self._random.choice((0.02, 0.1, 1.0))
            self._world.at(self._world.now + when, lambda: self._bring_down(host, down))

    def _stop(self) -> None:
        self._stop_one(self._victim(), self._random.choice((0.3, 1.5, 5.0)))

    def _stop_one(self, host: Host, seconds: float) -> None:
        host.stop()
        self._for_a_while(seconds, host.resume)

    def _cut(self, pairs: list[tuple[str, str]], seconds: float | None = None) -> None:
        network = self._swarm.network
        self._world.note(f"cut {pairs}")
        network.cut(pairs)
        self._for_a_while(seconds or self._random.choice((0.3, 1.5, 4.0)), lambda: network.mend(pairs))

    def _cut_one_way(self) -> None:
        """Somebody speaks but does not hear, or hears but does not speak."""
        host = self._victim().name
        others = [name for name in self._swarm.hosts if name != host and self._random.random() < 0.7]
        if self._random.random() < 0.5:
            self._cut([(host, other) for other in others])
        else:
            self._cut([(other, host) for other in others])

    def _cut_off(self) -> None:
        host = self._victim().name
        others = [name for name in self._swarm.hosts if name != host]
        self._cut([(host, other) for other in others] + [(other, host) for other in others])

    def _cut_from_peers(self) -> None:
        """A backbone peer reaches the workers, but no other backbone peer."""
        host = self._victim().name
        others = [name for name in self._swarm.backbone if name != host]
        self._cut([(host, other) for other in others] + [(other, host) for other in others])

    def _split(self, seconds: float | None = None) -> None:
        """Two halves; each may have workers."""
        left = [name for name in self._swarm.hosts if self._random.random() < 0.5]
        right = [name for name in self._swarm.hosts if name not in left]
        self._cut([(a, b) for a in left for b in right] + [(b, a) for a in left for b in right], seconds)

    def _doubt(self) -> None:
        """A peer is not fit to lead for a while."""
        self._report(self._random.choice(self._swarm.backbone), eligible=False, covers=True)

    def _uncover(self) -> None:
        """A peer cannot reach every expert for a while."""
        self._report(self._victim().name, eligible=True, covers=False)

    def _report(self, name: str, *, eligible: bool, covers: bool) -> None:
        self._swarm.report(name, eligible=eligible, covers=covers)
        self._for_a_while(self._random.choice((1.0, 6.0)), lambda: self._swarm.report(name, eligible=True, covers=True))

    def _drain(self) -> None:
        """A leader is asked to hand over."""
        for host in self._swarm.leaders():
            self._swarm.hand_over(host)
