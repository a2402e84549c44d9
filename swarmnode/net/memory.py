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
import threading
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
    ProtocolNotSupported,
    StreamHandler,
    StreamReset,
)
from swarmnode.net.muxer_stream import MuxerStream

Frame = Callable[[], None]


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
        end = self._connections.get(peer)
        if end is None:
            raise ConnectionLost(f"there is no connection to {peer}")
        return await end.open_stream(protocol)

    async def connect(self, multiaddr: str) -> PeerId:
        """See interface.Network."""
        other = self.hub.network(PeerId(multiaddr.rpartition("/p2p/")[2]))
        if other is None or multiaddr not in other.addresses or other is self:
            raise DialFailed(multiaddr, "nobody listens there")
        link = self.hub.link(self.peer_id, other.peer_id)
        arrived = trio.Event()
        with trio.move_on_after(limits.CONNECT_SECONDS_MAX):
            if other.peer_id not in self._connections:
                self.hub.carry(link, other.peer_id, lambda: self.hub.carry(link, self.peer_id, arrived.set))
                await arrived.wait()
                if link.cut:
                    raise DialFailed(multiaddr, "the link is cut")
            if other.peer_id not in self._connections:  # the other side may have dialed meanwhile
                _connect(self, other)
            return other.peer_id
        raise DialFailed(multiaddr, f"no answer for {limits.CONNECT_SECONDS_MAX:.0f} s")

    async def disconnect(self, peer: PeerId) -> None:
        """See interface.Network."""
        if peer in self._connections:
            self._connections[peer].end(f"disconnected by {self.peer_id}")

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
    near.other, far.other = far, near
    dialer.add_connection(near)
    listener.add_connection(far)


class _End:
    """One side of a connection: what MuxerStream needs from its owner (see stream_owner.StreamOwner)."""

    other: _End

    def __init__(self, network: MemoryNetwork, peer: PeerId, first_id: int) -> None:
        self.peer = peer
        self.turn = trio.Lock()
        self.push_lock = threading.RLock()
        self.writable = True
        self._network = network
        self._hub = network.hub
        self._link = network.hub.link(network.peer_id, peer)
        self._next_id = first_id
        self._streams: dict[int, MuxerStream] = {}
        self._reason: str | None = None

    async def open_stream(self, protocol: str) -> MuxerStream:
        stream = self._add(self._next_id, protocol)
        self._next_id += 2
        served: list[bool] = []
        answered = trio.Event()

        def answer(accepted: bool) -> None:
            served.append(accepted)
            answered.set()

        self._send(lambda other: other.on_open(stream.stream_id, protocol, answer))
        try:
            with trio.move_on_after(limits.OPEN_STREAM_SECONDS_MAX):
                await answered.wait()
        finally:
            if served != [True]:
                await stream.reset()
        if served == [False]:
            raise ProtocolNotSupported(f"{self.peer} does not serve {protocol}")
        if not served or self._reason is not None:
            raise ConnectionLost(self._reason or f"{self.peer} did not answer")
        return stream

    def on_open(self, stream_id: int, protocol: str, answer: Callable[[bool], None]) -> None:
        """The other side opened a stream."""
        accepted = protocol in self._network.handlers
        self._send(lambda _: answer(accepted))
        if accepted:
            self._hub.nursery.start_soon(self._network.handlers.run, self._add(stream_id, protocol))
        else:
            self._network.counters.streams_refused += 1

    def end(self, reason: str) -> None:
        """Both sides lose the connection, at once."""
        for side in (self, self.other):
            if side._reason is None:
                side._reason = reason
                for stream in list(side._streams.values()):
                    stream.fail(ConnectionLost, f"the connection to {side.peer} is lost: {reason}")
                side._network.remove_connection(side)

    def check_waits(self, now: float) -> None:
        for stream in list(self._streams.values()):
            stream.check_waits(now)

    def send_data_from_thread(self, stream_id: int, data: bytes) -> bool:
        """Never: what happens here happens in one thread, so that a run repeats exactly."""
        return False

    def _add(self, stream_id: int, protocol: str) -> MuxerStream:
        stream = self._streams[stream_id] = MuxerStream(self, stream_id, self.peer)
        stream.protocol = protocol
        self._network.counters.streams_open += 1
        return stream

    def _send(self, action: Callable[[_End], None]) -> None:
        """Do `action` with the other end when the frame arrives there; a connection's frames die with it."""

        def arrive() -> None:
            if self._reason is None:
                action(self.other)

        if self._reason is None:
            self._hub.carry(self._link, self.peer, arrive)

    def _send_to_stream(self, stream_id: int, action: Callable[[MuxerStream], object]) -> None:
        def act(other: _End) -> None:
            stream = other._streams.get(stream_id)
            if stream is not None:
                action(stream)

        self._send(act)

    # --- StreamOwner ---

    async def drained(self) -> None:
        return

    def send_data(self, stream_id: int, data: bytes | bytearray | memoryview) -> None:
        copy = bytes(data)
        self._network.counters.bytes_sent += len(copy)
        self.other._network.counters.bytes_received += len(copy)
        self._send_to_stream(stream_id, lambda stream: stream.deliver(memoryview(copy)))

    def grant(self, stream_id: int, n: int) -> None:
        self._send_to_stream(stream_id, lambda stream: stream.receive_credit(n))

    def send_end(self, stream_id: int) -> None:
        self._send_to_stream(stream_id, lambda stream: stream.end())

    def send_reset(self, stream_id: int) -> None:
        self._send_to_stream(stream_id, lambda stream: stream.fail(StreamReset, "the peer reset the stream"))

    def extend_window(self, window: int, goal: int) -> int:
        return max(window, min(goal, limits.WINDOW_BYTES_MAX))

    def account(self, n: int) -> None:
        return

    def forget(self, stream: MuxerStream) -> None:
        del self._streams[stream.stream_id]
        self._network.counters.streams_open -= 1


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
