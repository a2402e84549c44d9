"""The Network of interface.py inside one process: no sockets, no libp2p, the same streams.

    async with open_memory_hub() as hub:
        left, right = hub.join(), hub.join()
        hub.set_delay(left.peer_id, right.peer_id, 0.010)
        peer = await left.connect(right.addresses[0])

Streams are the muxer's own (MuxerStream), so flow control, closing and errors are the real thing; only what carries
their frames differs. All frames of a hub pass one queue, ordered by the time of their arrival and then by the order in
which they were sent: with trio's MockClock the same program sees the same events. Nothing pings here: a link that is
infinitely slow stays up, as one to a suspended peer would for a while.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from swarmnode.net import limits
from swarmnode.net.counters import Counters
from swarmnode.net.groups import without_groups
from swarmnode.net.handlers import ConnectionNews, Handlers
from swarmnode.net.interface import (
    ConnectionCallback,
    ConnectionLost,
    DialFailed,
    NetworkStatistics,
    PeerId,
    StreamHandler,
)
from swarmnode.net.loopback import Frame, LocalEnd, Loopback, join_ends
from swarmnode.net.muxer_stream import MuxerStream


@dataclass(slots=True)
class _Link:
    """What lies between two peers, whether they are connected or not."""

    delay_seconds: float = 0.0
    cut: bool = False
    last_arrival: dict[PeerId, float] = field(default_factory=dict)
    held: list[tuple[PeerId, Frame]] = field(default_factory=list)


class MemoryHub:
    """All the peers of one simulated network, and the power over what lies between them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self._networks: dict[PeerId, MemoryNetwork] = {}
        self._links: dict[frozenset[PeerId], _Link] = {}
        self._queue: list[tuple[float, int, Frame]] = []
        self._order = itertools.count()
        self._changed = trio.Event()

    def join(self, peer: PeerId | None = None) -> MemoryNetwork:
        """A new peer. Without an id it gets one that only looks like libp2p's, the same in every run."""
        number = len(self._networks) + 1
        network = MemoryNetwork(self, PeerId(f"12D3KooWMemory{number:038d}") if peer is None else peer, number)
        if network.peer_id in self._networks:
            raise ValueError(f"{network.peer_id} has joined already")
        self._networks[network.peer_id] = network
        return network

    def set_delay(self, a: PeerId, b: PeerId, seconds: float) -> None:
        """Frames between the two take so long, each way. With math.inf nothing arrives until the delay is finite."""
        link = self.link(a, b)
        link.delay_seconds = seconds
        held, link.held = link.held, []
        for receiver, frame in held:
            self.carry(link, receiver, frame)

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Break the connection between the two, and refuse new ones until `mend`."""
        self.link(a, b).cut = True
        connection = self._networks[a].connection(b)
        if connection is not None:
            connection.end("the link was cut")

    def mend(self, a: PeerId, b: PeerId) -> None:
        self.link(a, b).cut = False

    # --- For the networks ---

    def network(self, peer: PeerId) -> MemoryNetwork | None:
        return self._networks.get(peer)

    def link(self, a: PeerId, b: PeerId) -> _Link:
        return self._links.setdefault(frozenset((a, b)), _Link())

    def carry(self, link: _Link, receiver: PeerId, frame: Frame) -> None:
        """Call `frame` when it arrives at `receiver`: never before one that was sent to it earlier."""
        if math.isinf(link.delay_seconds):
            link.held.append((receiver, frame))
            return
        arrival = max(trio.current_time() + link.delay_seconds, link.last_arrival.get(receiver, -math.inf))
        link.last_arrival[receiver] = arrival
        heapq.heappush(self._queue, (arrival, next(self._order), frame))
        self._changed.set()

    async def run(self) -> None:
        """Deliver frames, one after the other."""
        while True:
            while self._queue and self._queue[0][0] <= trio.current_time():
                _, _, frame = heapq.heappop(self._queue)
                frame()
            self._changed = trio.Event()
            with trio.move_on_at(self._queue[0][0] if self._queue else math.inf):
                await self._changed.wait()

    async def watch_bounds(self) -> None:
        """What the muxer's keepalive does for its streams."""
        while True:
            await trio.sleep(limits.KEEPALIVE_TICK_SECONDS)
            for network in self._networks.values():
                network.check_waits(trio.current_time())


class MemoryNetwork:
    """One peer of a hub: see interface.Network."""

    def __init__(self, hub: MemoryHub, peer_id: PeerId, number: int) -> None:
        self.hub = hub
        self.handlers = Handlers(counters := Counters())
        self.counters = counters
        self._peer_id = peer_id
        self._address = f"/memory/{number}/p2p/{peer_id}"
        self._connections: dict[PeerId, _End] = {}
        self._news = ConnectionNews()
        self._refused: list[Callable[[PeerId], bool]] = []
        to_itself = hub.link(peer_id, peer_id)
        self._loopback = Loopback(self, peer_id, lambda frame: hub.carry(to_itself, peer_id, frame))

    @property
    def nursery(self) -> trio.Nursery:
        return self.hub.nursery

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self._address,)

    def serve(self, protocol: str, handler: StreamHandler, *, max_streams_per_peer: int) -> None:
        """See interface.Network."""
        self.handlers.add(protocol, handler, max_streams_per_peer)

    async def open_stream(self, peer: PeerId, protocol: str) -> MuxerStream:
        """See interface.Network."""
        if peer == self.peer_id:
            return await self._loopback.open_stream(protocol)
        end = self._connections.get(peer)
        if end is None:
            raise ConnectionLost(f"there is no connection to {peer}")
        return await end.open_stream(protocol)

    async def connect(self, multiaddr: str) -> PeerId:
        """See interface.Network."""
        other = self.hub.network(PeerId(multiaddr.rpartition("/p2p/")[2]))
        if other is None or multiaddr not in other.addresses:
            raise DialFailed(multiaddr, "nobody listens there")
        if other is self:
            return self.peer_id
        link = self.hub.link(self.peer_id, other.peer_id)
        arrived = trio.Event()
        with trio.move_on_after(limits.CONNECT_SECONDS_MAX):
            if other.peer_id not in self._connections:
                self.hub.carry(link, other.peer_id, lambda: self.hub.carry(link, self.peer_id, arrived.set))
                await arrived.wait()
                if link.cut:
                    raise DialFailed(multiaddr, "the link is cut")
            if self.refuses(other.peer_id) or other.refuses(self.peer_id):
                raise DialFailed(multiaddr, "refused")
            if other.peer_id not in self._connections:  # the other side may have dialed meanwhile
                _connect(self, other)
            return other.peer_id
        raise DialFailed(multiaddr, f"no answer for {limits.CONNECT_SECONDS_MAX:.0f} s")

    async def disconnect(self, peer: PeerId) -> None:
        """See interface.Network."""
        if peer in self._connections:
            self._connections[peer].end(f"disconnected by {self.peer_id}")

    def refuse(self, refused: Callable[[PeerId], bool]) -> None:
        """See interface.Network."""
        self._refused.append(refused)

    def refuses(self, peer: PeerId) -> bool:
        return any(refused(peer) for refused in self._refused)

    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(self._connections)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._news.add(callback)

    def statistics(self) -> NetworkStatistics:
        return self.counters.snapshot()

    # --- For the hub and its connections ---

    def connection(self, peer: PeerId) -> _End | None:
        return self._connections.get(peer)

    def check_waits(self, now: float) -> None:
        self._loopback.check_waits(now)
        for end in list(self._connections.values()):
            end.check_waits(now)

    def add_connection(self, end: _End) -> None:
        self._connections[end.peer] = end
        self.counters.connections_open += 1
        self._news.tell(end.peer, up=True)

    def remove_connection(self, end: _End) -> None:
        del self._connections[end.peer]
        self.counters.connections_open -= 1
        self._news.tell(end.peer, up=False)


def _connect(dialer: MemoryNetwork, listener: MemoryNetwork) -> None:
    """Both ends of a connection, known to each other before anybody is told."""
    near, far = _End(dialer, listener.peer_id, first_id=1), _End(listener, dialer.peer_id, first_id=2)
    join_ends(near, far)
    dialer.add_connection(near)
    listener.add_connection(far)


class _End(LocalEnd):
    """One side of a connection between two peers."""

    other: _End

    def __init__(self, network: MemoryNetwork, peer: PeerId, first_id: int) -> None:
        link = network.hub.link(network.peer_id, peer)
        super().__init__(network, peer, first_id, lambda frame: network.hub.carry(link, peer, frame))
        self._network = network

    def end(self, reason: str) -> None:
        """Both sides lose the connection, at once."""
        for side in (self, self.other):
            if side.lost is None:
                side.lose(reason)
                side._network.remove_connection(side)

    def count_bytes(self, n: int) -> None:
        self._network.counters.bytes_sent += n
        self.other._network.counters.bytes_received += n


@asynccontextmanager
async def open_memory_hub() -> AsyncIterator[MemoryHub]:
    """A running hub. On leaving, handlers are cancelled."""
    with without_groups():
        async with trio.open_nursery() as nursery:
            hub = MemoryHub(nursery)
            nursery.start_soon(hub.run)
            nursery.start_soon(hub.watch_bounds)
            yield hub
            nursery.cancel_scope.cancel()
