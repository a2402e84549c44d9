"""What a network counts while it runs; every layer adds to the same object, `statistics()` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.net.interface import NetworkStatistics


@dataclass(slots=True)
class Counters:
    """The mutable side of NetworkStatistics: see there for what each number means."""

    connections_open: int = 0
    streams_open: int = 0
    handshakes_pending: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    streams_refused: int = 0
    peer_mistakes: int = 0
    handler_errors: int = 0
    junk_connections: int = 0
    connections_broken: int = 0

    def snapshot(self) -> NetworkStatistics:
        return NetworkStatistics(**{name: getattr(self, name) for name in self.__slots__})
