"""Many streams over one encrypted connection: yamux on the wire, plain function calls inside.

A frame that arrives is decrypted, parsed and put into its stream's buffer in one go, by the task that reads the socket;
a frame that leaves is sealed and handed to the kernel by the task that sends it. Tasks wait only where the kernel or
flow control makes them: on a full socket (one task then writes what is left, so that a cancelled sender harms nobody),
on credit, and on data.

The peer may be hostile. What it can make this side store is bounded by windows, stream counts and the output backlog;
whatever breaks the rules ends the connection, and nothing that happens here raises out of `run`.

Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md. Beyond it: a silent connection is pinged, and
closed when nothing comes back.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from swarmnode.net import limits
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionLost, PeerId, StreamReset
from swarmnode.net.muxer_stream import MuxerStream, Waiter
from swarmnode.net.noise_session import BrokenSession, NoiseSession

log = structlog.get_logger(__name__)

_HEADER: Final = struct.Struct("!BBHII")  # version, kind, flags, stream id, length of the data or a number
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_STREAM_ID_MAX: Final = 2**32 - 1


class RuleBroken(Exception):
    """The peer sent what the protocol forbids."""


class ReceiveBudget:
    """Unread bytes of all connections of a network. Over the limit, the connection that holds most has to go."""

    def __init__(self, limit: int = limits.NETWORK_BUFFERED_BYTES_MAX) -> None:
        self._limit = limit
        self._total = 0
        self.muxers: set[Muxer] = set()

    def change(self, n: int) -> None:
        self._total += n
        if self._total > self._limit:
            max(self.muxers, key=lambda muxer: muxer.buffered).break_off("too much unread data")


class Muxer:
    """One connection to `peer`. Somebody must `run` it; until then frames can be sent but none is received."""

    def __init__(self, session: NoiseSession, peer: PeerId, counters: Counters, budget: ReceiveBudget) -> None:
        self.peer = peer
        self.session = session
        self.closed = trio.Event()
        """Set at once when the connection is over, whoever ended it; `reason` then says why."""
        self.reason = ""
        self.buffered = 0
        self.turn = trio.Lock()
        self._link = session.link
        self._counters = counters
        self._budget = budget
        self._streams: dict[int, MuxerStream] = {}
        self._next_id = 1 if session.is_initiator else 2
        self._last_remote_id = 0
        self._inbound_open = 0
        self._extra_window = 0
        self._accepted, self._to_accept = trio.open_memory_channel[MuxerStream](limits.INBOUND_STREAMS_MAX)
        self._output = bytearray()
        self.push_lock = threading.RLock()
        self._token = trio.lowlevel.current_trio_token()
        self._output_waiter = Waiter()
        self._drained_waiter = Waiter()
        self._header = bytearray()
        self._body_left = 0
        self._body_stream: MuxerStream | None = None
        self._body_flags = 0
        self._parsing = False
        self._answers = bytearray()
        self._last_received = trio.current_time()
        self._small_frames = 0
        counters.connections_open += 1
        budget.muxers.add(self)

    @property
    def streams_open(self) -> int:
        return len(self._streams)

    # --- Life ---

    async def run(self) -> None:
        """Carry the connection until it is over. Raises nothing but Cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                for part in (self._receive, self._write_output, self._keep_alive):
                    nursery.start_soon(self._guarded, part)
                await self.closed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close("this node shut down")

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except ConnectionLost as error:
            self._end(str(error))
        except (RuleBroken, BrokenSession) as error:
            self.break_off(str(error))
        except Exception:
            log.exception("muxer failed", peer=self.peer)
            self.break_off("internal error")

    def close(self, reason: str) -> None:
        """End the connection now; the peer is told. Does nothing if it has ended already."""
        if not self.closed.is_set():
            self._control(_GO_AWAY, 0, 0, 0)
            self._end(reason)

    def break_off(self, reason: str) -> None:
        """End the connection because of what the peer did or failed to do."""
        if not self.closed.is_set():
            self._counters.connections_broken += 1
            log.info("connection broken off", peer=self.peer, reason=reason)
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self.reason = reason
        self._link.close_now()
        self._accepted.close()
        self._drained_waiter.wake()
        for stream in list(self._streams.values()):
            stream.fail(ConnectionLost, f"the connection to {self.peer} is lost: {reason}")
        self._counters.connections_open -= 1
        self._budget.muxers.discard(self)
        self._budget.change(-self.buffered)
        self.buffered = 0

    async def _keep_alive(self) -> None:
        tick = limits.KEEPALIVE_TICK_SECONDS
        while True:
            slept_at = trio.current_time()
            await trio.sleep(tick)
            now = trio.current_time()
            self._small_frames = 0
            # This process itself was suspended (a laptop's lid): that time says nothing about the peer.
            self._last_received += max(0.0, now - slept_at - 2 * tick)
            silence = now - self._last_received
            if silence > limits.SILENCE_SECONDS_MAX:
                raise RuleBroken(f"no sign of life for {silence:.0f} s")
            if silence >= tick:
                self._control(_PING, _SYN, 0, int(now) & 0xFFFF_FFFF)
            for stream in list(self._streams.values()):
                stream.check_waits(now)

    # --- Streams ---

    def open_stream(self) -> MuxerStream:
        """A new stream to the peer. Raises ConnectionLost, or StreamReset if too many are open."""
        if self.closed.is_set():
            raise ConnectionLost(f"the connection to {self.peer} is lost: {self.reason}")
        if len(self._streams) - self._inbound_open >= limits.OUTBOUND_STREAMS_MAX:
            raise StreamReset(f"{limits.OUTBOUND_STREAMS_MAX} streams to {self.peer} are open already")
        if self._next_id > _STREAM_ID_MAX:
            self._end("all stream numbers are used up")
            raise ConnectionLost(self.reason)
        stream = self._add(self._next_id)
        self._next_id += 2
        self._control(_WINDOW, _SYN, stream.stream_id, 0)
        return stream

    async def accept_stream(self) -> MuxerStream:
        """The next stream that the peer opened. Raises ConnectionLost."""
        try:
            return await self._to_accept.receive()
        except trio.EndOfChannel:
            raise ConnectionLost(self.reason) from None

    def _add(self, stream_id: int) -> MuxerStream:
        stream = self._streams[stream_id] = MuxerStream(self, stream_id, self.peer)
        self._counters.streams_open += 1
        return stream

    def _is_local(self, stream_id: int) -> bool:
        return stream_id % 2 == self._next_id % 2

    def forget(self, stream: MuxerStream) -> None:
        del self._streams[stream.stream_id]
        self._counters.streams_open -= 1
        self._extra_window -= stream.window - limits.FIRST_WINDOW_BYTES
        if not self._is_local(stream.stream_id):
            self._inbound_open -= 1

    def extend_window(self, window: int, goal: int) -> int:
        left = limits.CONNECTION_EXTRA_BYTES_MAX - self._extra_window
        extra = max(0, min(min(goal, limits.WINDOW_BYTES_MAX) - window, left))
        self._extra_window += extra
        return window + extra

    def account(self, n: int) -> None:
        if not self.closed.is_set():
            self.buffered += n
            self._budget.change(n)

    # --- Sending ---

    @property
    def writable(self) -> bool:
        return not self._output and not self.turn.locked()

    async def drained(self) -> None:
        while self._output and not self.closed.is_set():
            await self._drained_waiter.wait()

    def send_data(self, stream_id: int, data: bytes | bytearray | memoryview) -> None:
        self._push(_HEADER.pack(0, _DATA, 0, stream_id, len(data)) + data)

    def send_end(self, stream_id: int) -> None:
        self._control(_WINDOW, _FIN, stream_id, 0)

    def send_reset(self, stream_id: int) -> None:
        self._control(_WINDOW, _RST, stream_id, 0)

    def grant(self, stream_id: int, n: int) -> None:
        self._control(_WINDOW, 0, stream_id, n)

    def _control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        frame = _HEADER.pack(0, kind, flags, stream_id, value)
        if self._parsing:
            self._answers += frame
        else:
            self._push(frame)

    def _push(self, frames: bytes) -> None:
        """Seal and send; what the kernel does not take, `_write_output` sends. Never waits and never raises."""
        if self.closed.is_set():
            return
        with self.push_lock:
            rest = self.session.seal(frames)
            if not self._output:
                try:
                    rest = rest[self._link.send_now(rest) :]
                except ConnectionLost as error:
                    self._end(str(error))
                    return
                if not rest:
                    return
            self._output += rest
        self._output_waiter.wake()
        if len(self._output) > limits.OUTPUT_BACKLOG_BYTES_MAX:
            self.break_off("the peer does not read what it asked for")

    async def _write_output(self) -> None:
        while True:
            while not self._output:
                await self._output_waiter.wait()
            with trio.move_on_after(limits.WRITE_STALL_SECONDS_MAX) as scope:
                await self._link.wait_writable()
            if scope.cancelled_caught:
                raise RuleBroken(f"the peer read nothing for {limits.WRITE_STALL_SECONDS_MAX:.0f} s")
            with self.push_lock:
                del self._output[: self._link.send_now(self._output)]
            if not self._output:
                self._drained_waiter.wake()

    def send_data_from_thread(self, stream_id: int, data: bytes) -> bool:
        """See StreamOwner. What the kernel does not take is left to the network's thread."""
        if self.closed.is_set():
            return False
        frame = self.session.seal(_HEADER.pack(0, _DATA, 0, stream_id, len(data)) + data)
        try:
            sent = self._link.send_now(frame)
        except ConnectionLost as error:
            self._token.run_sync_soon(self._end, str(error))
            return True  # the frame is lost with the connection
        if sent < len(frame):
            self._output += frame[sent:]
            self._token.run_sync_soon(self._output_waiter.wake)
        return True

    # --- Receiving ---

    async def _receive(self) -> None:
        self._parse([self.session.take_ahead()])
        while True:
            plaintexts = self.session.receive_now()
            if plaintexts is not None:
                self._last_received = trio.current_time()
                self._parse(plaintexts)
            if self._link.may_have_more:
                await trio.lowlevel.checkpoint()
            else:
                await self._link.wait_readable()

    def _parse(self, plaintexts: list[bytes]) -> None:
        """Take in all frames. What they make this side answer leaves in one piece afterwards."""
        self._parsing = True
        try:
            for plaintext in plaintexts:
                self._take_in(memoryview(plaintext))
        finally:
            self._parsing = False
            if self._answers:
                answers, self._answers = bytes(self._answers), bytearray()
                self._push(answers)

    def _take_in(self, rest: memoryview) -> None:
        """Frames may be cut anywhere: headers are collected, bodies are delivered as they come."""
        while rest:
            if self._body_left:
                body = rest[: self._body_left]
                rest = rest[len(body) :]
                self._body_left -= len(body)
                if self._body_stream is not None:
                    self._body_stream.deliver(body)
                if not self._body_left:
                    self._on_flags(self._body_stream, self._body_flags)
            elif self._header or len(rest) < _HEADER.size:
                missing = _HEADER.size - len(self._header)
                self._header += rest[:missing]
                rest = rest[missing:]
                if len(self._header) == _HEADER.size:
                    header, self._header = self._header, bytearray()
                    self._on_header(*_HEADER.unpack(header))
            else:
                self._on_header(*_HEADER.unpack_from(rest))
                rest = rest[_HEADER.size :]

    def _on_header(self, version: int, kind: int, flags: int, stream_id: int, value: int) -> None:
        if version != 0:
            raise RuleBroken(f"a frame of version {version}")
        if kind != _DATA or value < limits.SMALL_FRAME_BYTES:
            self._small_frames += 1
            if self._small_frames > limits.SMALL_FRAMES_PER_TICK_MAX:
                raise RuleBroken("a flood of small frames")
        if kind == _PING:
            if flags & _SYN:
                self._control(_PING, _ACK, 0, value)
        elif kind == _GO_AWAY:
            raise ConnectionLost("the peer closed the connection")
        elif kind in (_DATA, _WINDOW):
            if flags & _SYN:
                self._on_syn(stream_id)
            self._on_stream_frame(kind, flags, stream_id, value)
        else:
            raise RuleBroken(f"a frame of unknown kind {kind}")

    def _on_syn(self, stream_id: int) -> None:
        if self._is_local(stream_id) or stream_id <= self._last_remote_id:
            raise RuleBroken(f"a new stream with the used number {stream_id}")
        self._last_remote_id = stream_id
        if self._inbound_open < limits.INBOUND_STREAMS_MAX:
            stream = self._add(stream_id)
            self._inbound_open += 1
            try:
                self._accepted.send_nowait(stream)
            except trio.WouldBlock:
                stream.fail(StreamReset, "too many new streams at once")
            else:
                self._control(_WINDOW, _ACK, stream_id, 0)
                return
        self._counters.streams_refused += 1
        self._control(_WINDOW, _RST, stream_id, 0)

    def _on_stream_frame(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            last = self._next_id - 1 if self._is_local(stream_id) else self._last_remote_id
            if not 0 < stream_id <= last:
                raise RuleBroken(f"a frame for stream {stream_id}, which was never opened")
        if kind == _WINDOW:
            if stream is not None and not stream.receive_credit(value):
                raise RuleBroken("a window beyond all sizes")
            self._on_flags(stream, flags)
            return
        if value and stream is not None and stream.got_end:
            raise RuleBroken("data after the end of a stream")
        if value > (limits.WINDOW_BYTES_MAX if stream is None else stream.credit):
            raise RuleBroken(f"{value} bytes beyond the window")
        self._body_left, self._body_stream, self._body_flags = value, stream, flags
        if not value:
            self._on_flags(stream, flags)

    def _on_flags(self, stream: MuxerStream | None, flags: int) -> None:
        if stream is not None and flags & _RST:
            stream.fail(StreamReset, "the peer reset the stream")
        elif stream is not None and flags & _FIN:
            stream.end()
