"""Messages under way: lost, doubled, late, out of order; links that are cut in one direction.

Who sent a message is always true, as it is on the daemon's authenticated connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulator.world import World


@dataclass(slots=True)
class Weather:
    """Chances are of one message; delays in seconds, drawn evenly, so that messages overtake each other."""

    loss: float = 0.0
    doubled: float = 0.0
    delay_min: float = 0.008
    delay_max: float = 0.012
    straggler: float = 0.0  # it comes up to STRAGGLER_S late

    STRAGGLER_S = 8.0


class Receiver(Protocol):
    """What messages arrive at."""

    name: str

    def deliver(self, sender: str, channel: str, message: Any) -> None: ...


class Network:
    """Carries messages between hosts by name."""

    def __init__(self, world: World) -> None:
        self.weather = Weather()
        self.cuts: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults cut it
        self.taps: list[Callable[[str, str, str, Any], None]] = []  # hear every message that is sent
        self._world = world
        self._random = world.chance("network")
        self._receivers: dict[str, Receiver] = {}

    def attach(self, receiver: Receiver) -> None:
        self._receivers[receiver.name] = receiver

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in pairs:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in pairs:
            left = self.cuts.get(pair, 0) - 1
            if left > 0:
                self.cuts[pair] = left
            else:
                self.cuts.pop(pair, None)

    def send(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        """The sender let it go."""
        for tap in self.taps:
            tap(sender, receiver, channel, message)
        if sender == receiver:
            self._world.at(self._world.now, _Delivery(self, sender, receiver, channel, message))
            return
        random, weather = self._random, self.weather
        copies = 1 + (weather.doubled > 0 and random.random() < weather.doubled)
        for _ in range(copies):
            if (sender, receiver) in self.cuts or random.random() < weather.loss:
                continue
            delay = random.uniform(weather.delay_min, weather.delay_max)
            if weather.straggler > 0 and random.random() < weather.straggler:
                delay += random.uniform(0, Weather.STRAGGLER_S)
            self._world.at(self._world.now + delay, _Delivery(self, sender, receiver, channel, message))

    def arrive(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        """A message reaches the other end, unless the link was cut meanwhile."""
        if (sender, receiver) not in self.cuts:
            self._receivers[receiver].deliver(sender, channel, message)


@dataclass(slots=True)
class _Delivery:
    network: Network
    sender: str
    receiver: str
    channel: str
    message: Any

    def __call__(self) -> None:
        self.network.arrive(self.sender, self.receiver, self.channel, self.message)
