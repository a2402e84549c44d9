"""Streams within one process: both ends are here, and a frame is a call. A node's streams to itself are of this kind,
and so are all those of the network in memory.

A leader computes with its own experts, and answers its own user, by the same protocols as everybody else's. The streams
are the muxer's own (MuxerStream), so flow control, limits, closing and errors are the real thing.

Frames are never delivered while they are sent: whoever sends would otherwise run the receiver's code in the middle of
its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from swarmnode.net import limits
from swarmnode.net.counters import Counters
from swarmnode.net.handlers import Handlers
from swarmnode.net.interface import ConnectionLost, PeerId, ProtocolNotSupported, StreamReset
from swarmnode.net.muxer_stream import MuxerStream, Waiter

Frame = Callable[[], None]


class Host(Protocol):
    """Where an end lives: its node's handlers, its counters, and a nursery for them."""

    handlers: Handlers
    counters: Counters

    @property
    def nursery(self) -> trio.Nursery: ...


class LocalEnd:
    """One side of a connection within this process: what MuxerStream needs of its owner (stream_owner.StreamOwner).

    `carry` brings a frame to the other side, later and in order. `peer` is the other side's id. Join the two with
    `join_ends`.
    """

    other: LocalEnd

    def __init__(self, host: Host, peer: PeerId, first_id: int, carry: Callable[[Frame], None]) -> None:
        self.peer = peer
        self.turn = trio.Lock()
        self.push_lock = threading.RLock()
        self.writable = True
        self.lost: str | None = None
        self._host = host
        self._carry = carry
        self._next_id = first_id
        self._streams: dict[int, MuxerStream] = {}

    async def open_stream(self, protocol: str) -> MuxerStream:
        """See interface.Network."""
        if len(self._streams) >= limits.OUTBOUND_STREAMS_MAX:
            raise StreamReset(f"too many streams to {self.peer} are open")
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
        if not served or self.lost is not None:
            raise ConnectionLost(self.lost or f"{self.peer} did not answer")
        return stream

    def on_open(self, stream_id: int, protocol: str, answer: Callable[[bool], None]) -> None:
        """The other side opened a stream."""
        accepted = protocol in self._host.handlers
        self._send(lambda _: answer(accepted))
        if accepted:
            self._host.nursery.start_soon(self._host.handlers.run, self._add(stream_id, protocol))
        else:
            self._host.counters.streams_refused += 1

    def lose(self, reason: str) -> None:
        """This side's connection is gone. Once."""
        self.lost = reason
        for stream in list(self._streams.values()):
            stream.fail(ConnectionLost, f"the connection to {self.peer} is lost: {reason}")

    def check_waits(self, now: float) -> None:
        for stream in list(self._streams.values()):
            stream.check_waits(now)

    def _add(self, stream_id: int, protocol: str) -> MuxerStream:
        stream = self._streams[stream_id] = MuxerStream(self, stream_id, self.peer)
        stream.protocol = protocol
        self._host.counters.streams_open += 1
        return stream

    def _send(self, action: Callable[[LocalEnd], None]) -> None:
        """Do `action` with the other end when the frame arrives there; a connection's frames die with it."""

        def arrive() -> None:
            if self.lost is None:
                action(self.other)

        if self.lost is None:
            self._carry(arrive)

    def _send_to_stream(self, stream_id: int, action: Callable[[MuxerStream], object]) -> None:
        def act(other: LocalEnd) -> None:
            stream = other._streams.get(stream_id)
            if stream is not None:
                action(stream)

        self._send(act)

    # --- StreamOwner ---

    async def drained(self) -> None:
        return

    def send_data(self, stream_id: int, data: bytes | bytearray | memoryview) -> None:
        copy = bytes(data)
        self.count_bytes(len(copy))
        self._send_to_stream(stream_id, lambda stream: stream.deliver(memoryview(copy)))

    def count_bytes(self, n: int) -> None:
        """`n` bytes leave for the other side. Within one node they go over no wire."""

    def send_data_from_thread(self, stream_id: int, data: bytes) -> bool:
        """Never: what happens here happens in one thread."""
        return False

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
        self._host.counters.streams_open -= 1


def join_ends(near: LocalEnd, far: LocalEnd) -> None:
    near.other, far.other = far, near


class Loopback:
    """A node's connection to itself: always there. `carry` as of LocalEnd."""

    def __init__(self, host: Host, peer: PeerId, carry: Callable[[Frame], None]) -> None:
        self._near, self._far = LocalEnd(host, peer, 1, carry), LocalEnd(host, peer, 2, carry)
        join_ends(self._near, self._far)

    async def open_stream(self, protocol: str) -> MuxerStream:
        """See interface.Network."""
        return await self._near.open_stream(protocol)

    def check_waits(self, now: float) -> None:
        """The bounds behind the callers' deadlines; to be called once in a while."""
        self._near.check_waits(now)
        self._far.check_waits(now)


class Courier:
    """Brings frames in order, in a task of its own; others have their turn in between."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._waiter = Waiter()

    def carry(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._waiter.wake()

    async def run(self) -> None:
        while True:
            for _ in range(len(self._frames)):
                self._frames.popleft()()
            if self._frames:
                await trio.lowlevel.checkpoint()
            else:
                await self._waiter.wait()
