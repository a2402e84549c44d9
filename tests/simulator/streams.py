"""Streams between hosts, as TCP carries them: in order, nothing lost or doubled, until they break.

A lost packet makes what follows late. A cut link makes everything wait, and breaks the stream if it lasts. A host that
crashed knows nothing of its streams: whoever writes to one learns that it is gone, if the way back is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulator.host import Host
from tests.simulator.network import Weather

RESENT_S = (0.2, 0.8)  # how late a packet is that was lost once
CUT_POLL_S = 0.25
CUT_S_MAX = 15.0  # a stream that cannot move for this long breaks


class Listener(Protocol):
    """A behaviour that takes streams."""

    channel: str

    def accept(self, end: End) -> None:
        """A peer opened a stream; `end.peer` is who."""


class End:
    """One end of a stream. Set `on_message` and `on_close` before anything can come: in `accept`, or after `dial`."""

    def __init__(self, host: Host, peer: Host, label: str) -> None:
        self.host = host
        self.peer = peer.name
        self.on_message: Callable[[Any], None] = _nothing
        self.on_close: Callable[[], None] = lambda: None
        self.open = True
        self._label = label
        self._remote = peer
        self._boot = host.boots
        self._random = host.world.chance(f"stream {label} {host.name} {peer.name} {host.world.now}")
        self._other: End | None = None
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._last = 0.0
        self._pumping = False

    def send(self, message: Any) -> None:
        """In order, or never."""
        if self.open:
            self._push(lambda: self._arrive(message))

    def close(self) -> None:
        """Both ends are closed, the other one once it hears of it. This one is not told."""
        if self.open:
            self._push(self._arrive_close)
            self.open = False

    def abandon(self) -> None:
        """The host has crashed; its system tells the other end, or does not."""
        self.open = False
        if self._random.random() < 0.5:
            self._push(self._arrive_close)

    @property
    def alive(self) -> bool:
        return self.open and self.host.up and self.host.boots == self._boot

    # -- under way ----------------------------------------------------------------------------------------------

    def _push(self, arrive: Callable[[], None]) -> None:
        weather, random = self.host.network.weather, self._random
        delay = 0.0 if self.peer == self.host.name else random.uniform(weather.delay_min, weather.delay_max)
        while self.peer != self.host.name and random.random() < weather.loss:
            delay += random.uniform(*RESENT_S)
        if weather.straggler > 0 and random.random() < weather.straggler / 4:
            delay += random.uniform(0, Weather.STRAGGLER_S / 4)
        self._last = max(self._last, self.host.world.now + delay)
        self._queue.append((self._last, arrive))
        if not self._pumping:
            self._pumping = True
            self.host.world.at(self._last, self._pump)

    def _pump(self) -> None:
        world = self.host.world
        self._pumping = False
        while self._queue and self._queue[0][0] <= world.now:
            if (self.host.name, self.peer) in self.host.network.cuts:
                if world.now - self._queue[0][0] > CUT_S_MAX:
                    self._queue.clear()
                    self._told_closed()
                    return
                self._pumping = True
                world.at(world.now + CUT_POLL_S, self._pump)
                return
            self._queue.popleft()[1]()
        if self._queue:
            self._pumping = True
            world.at(self._queue[0][0], self._pump)

    def _arrive(self, message: Any) -> None:
        other = self._other
        if other is None or not other.alive:
            self._bounce()
            return
        remote = self._remote

        def handle() -> None:
            if other.alive:
                remote.world.note(f"{self.host.name} => {remote.name} {self._label} {type(message).__name__}")
                other.on_message(message)

        remote.do(handle)

    def _bounce(self) -> None:
        """Nobody is there to read it: the reset comes back, if it can."""
        if (self.peer, self.host.name) not in self.host.network.cuts:
            self._told_closed()

    def _arrive_close(self) -> None:
        if self._other is not None:
            self._other._told_closed()

    def _told_closed(self) -> None:
        def handle() -> None:
            if self.alive:
                self.open = False
                self.on_close()

        if self.alive:
            self.host.do(handle)


def _keep(host: Host, end: End) -> None:
    host.streams = [each for each in host.streams if each.open]
    host.streams.append(end)


def _nothing(message: Any) -> None:
    pass


def dial(host: Host, peer: Host, channel: str) -> End:
    """Open a stream to a peer's behaviour of that channel: nothing tells whether it came about but its answers."""
    end = End(host, peer, channel)
    _keep(host, end)

    def arrive() -> None:
        if not peer.up:
            end._bounce()
            return

        def accept() -> None:
            behaviour: Any = peer.behaviours.get(channel)
            if behaviour is None or not end.alive:
                end._bounce()
                return
            other = End(peer, host, channel)
            other._other, end._other = end, other
            _keep(peer, other)
            behaviour.accept(other)

        peer.do(accept)

    end._push(arrive)
    return end
