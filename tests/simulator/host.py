"""One machine: a clock of its own, a disk, and the behaviours that run on it.

A host is up, stopped (its messages and timers wait, as they do for a stopped process) or down (they are lost, and only
the disk remains). Booting builds its behaviours anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulator.network import Network
from tests.simulator.world import World

if TYPE_CHECKING:
    from tests.simulator.streams import End

FSYNC_S_MIN, FSYNC_S_MAX = 0.001, 0.03


class Behaviour(Protocol):
    """A part of a node. It is built at each boot, with what the disk holds."""

    channel: str  # whose messages it gets

    def start(self) -> None:
        """The host has booted."""

    def receive(self, sender: str, message: Any) -> None:
        """A message came on the channel."""


class Host:
    """See the module. `build` makes the behaviours, the order is that of starting."""

    def __init__(
        self, world: World, network: Network, name: str, build: Callable[[Host], Sequence[Behaviour]], *, skewed: bool
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.random = world.chance(f"host {name}")
        self.lucky = True
        self.disk = Disk(self)
        self.behaviours: dict[str, Behaviour] = {}
        self.streams: list[End] = []  # its ends of them
        self.boots = 0
        self.up = False
        self.stopped = False
        self.awake_since = 0.0  # simulated time
        self._build = build
        self._rate = self.random.uniform(0.9, 1.1) if skewed else 1.0
        self._offset = self.random.uniform(0, 1e6) if skewed else 0.0
        self._waiting: list[Callable[[], None]] = []
        network.attach(self)

    # -- what behaviours use ------------------------------------------------------------------------------------

    def now(self) -> float:
        """This host's monotonic clock, in seconds: wrong by an offset and by a rate."""
        return self._offset + self.world.now * self._rate

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it when that much time has passed on this host's clock; never, if it goes down before."""
        boot = self.boots

        def due() -> None:
            if self.boots == boot and self.up:
                self.do(action)

        self.world.at(self.world.now + seconds / self._rate, due)

    def draw(self) -> float:
        """A number in [0, 1) for a behaviour. The unlucky draw nearly the same ones, and so do everything together."""
        return self.random.random() * (1.0 if self.lucky else 0.03)

    def send(self, receiver: str, channel: str, message: Any) -> None:
        self.network.send(self.name, receiver, channel, message)

    # -- what happens to it -------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start, or start again."""
        assert not self.up
        self.up, self.stopped = True, False
        self.boots += 1
        self.world.note(f"{self.name} boots")
        built = self._build(self)
        self.behaviours = {behaviour.channel: behaviour for behaviour in built}
        for behaviour in built:
            behaviour.start()

    def crash(self) -> None:
        """Lose everything but the disk."""
        if self.up:
            self.world.note(f"{self.name} crashes")
            self.up = self.stopped = False
            self._waiting.clear()
            self.behaviours = {}
            streams, self.streams = self.streams, []
            for end in streams:
                if end.open:
                    end.abandon()
            self.disk.crash()

    def stop(self) -> None:
        """As SIGSTOP does."""
        if self.up and not self.stopped:
            self.world.note(f"{self.name} stops")
            self.stopped = True

    def resume(self) -> None:
        """As SIGCONT does: what came meanwhile is handled now, in its order."""
        if self.up and self.stopped:
            self.world.note(f"{self.name} goes on")
            self.stopped = False
            self.awake_since = self.world.now
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                self.do(action)

    def deliver(self, sender: str, channel: str, message: Any) -> None:
        """A message arrived."""
        if self.up:
            self.do(lambda: self._handle(sender, channel, message))

    def _handle(self, sender: str, channel: str, message: Any) -> None:
        behaviour = self.behaviours.get(channel)
        if behaviour is not None:
            self.world.note(f"{sender} -> {self.name} {type(message).__name__}")
            behaviour.receive(sender, message)

    def do(self, action: Callable[[], None]) -> None:
        """Now, or once the host goes on; never if it is down."""
        if self.stopped:
            self._waiting.append(action)
        elif self.up:
            action()


class Disk:
    """Files that are replaced whole (written beside, fsynced, renamed), which takes time.

    A crash meanwhile leaves the old content or the new one. A disk that lies (`tears`) may leave something that is
    neither: part of the new one and the rest of the old.
    """

    def __init__(self, host: Host) -> None:
        self.files: dict[str, bytes] = {}
        self.tears = False
        self.fsync_s_max = FSYNC_S_MAX
        self.on_write: Callable[[Host, float], None] | None = None  # hears of each write and how long it will take
        self._host = host
        self._writing: dict[str, bytes] = {}

    def write(self, name: str, data: bytes, done: Callable[[], None]) -> None:
        """Replace a file; `done` when it is safe."""
        assert name not in self._writing, "one write of a file at a time"
        self._writing[name] = data
        seconds = self._host.random.uniform(FSYNC_S_MIN, self.fsync_s_max)

        def written() -> None:
            self.files[name] = self._writing.pop(name)
            self._host.world.note(f"{self._host.name} has written {name}")
            done()

        self._host.after(seconds, written)
        if self.on_write is not None:
            self.on_write(self._host, seconds)

    def crash(self) -> None:
        """The power goes."""
        random = self._host.random
        for name, data in self._writing.items():
            if self.tears:
                self.files[name] = torn(random, self.files.get(name, b""), data)
                self._host.world.note(f"{self._host.name} has torn {name}")
            elif random.random() < 0.5:
                self.files[name] = data
        self._writing.clear()


def torn(random: Random, old: bytes, new: bytes) -> bytes:
    """Neither `old` nor `new`."""
    cut = random.randrange(1, len(new))
    mixed = new[:cut] + (old[cut:] if random.random() < 0.5 else b"")
    return mixed if mixed not in (old, new) else mixed + b"\0"
