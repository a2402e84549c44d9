"""One stream of a muxed connection: what waits where, and who may send how much.

Receiving: the muxer delivers into a buffer, synchronously, and wakes the reader only when all bytes that it asked for
are there. The peer may send as much as it was granted (its credit); credit is granted again when half a window was
read. A window grows when its reader takes half of it in a quarter of a second, or waits for a message that is larger.

Sending: a message that fits into one frame and meets no queue goes to the kernel at once, without a pass through the
scheduler. Otherwise it is cut into frames that wait for credit and for their turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost, PeerId, StreamClosed, StreamReset
from swarmnode.net.stream_owner import StreamOwner

_GROWTH_SECONDS = 0.25


class Waiter:
    """A place for one task to wait. Waking it is a plain call."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        if self._task is not None:
            raise trio.BusyResourceError("another task waits here already")
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


class MuxerStream:
    """A Stream (see interface.py), and what its muxer does to it: `deliver`, `receive_credit`, `end`, `fail`."""

    def __init__(self, owner: StreamOwner, stream_id: int, peer: PeerId) -> None:
        self.peer = peer
        self.protocol = ""
        self.stream_id = stream_id
        self.credit = limits.FIRST_WINDOW_BYTES
        """Bytes that the peer may still send."""
        self.window = limits.FIRST_WINDOW_BYTES
        self._owner = owner
        self._buffer = bytearray()
        self._wanted: float = 0
        self._reader = Waiter()
        self._taker: Callable[[], bool] | None = None
        self._taker_error: Exception | None = None
        self._reader_since = math.inf
        self._granted_at = -math.inf
        self._send_credit = limits.FIRST_WINDOW_BYTES
        self._send_turn = trio.Lock()
        self._sender = Waiter()
        self._sender_since = math.inf
        self._free_calls = limits.CALLS_WITHOUT_CHECKPOINT_MAX
        self._failure: tuple[type[StreamReset] | type[ConnectionLost], str] | None = None
        self._sent_end = False
        self.got_end = False
        """The peer has said that it sends no more."""
        self._abandoned_at = math.inf
        self._forgotten = False

    # --- Sending ---

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """See interface.Stream."""
        if self._free_calls and self.send_nowait(data):
            self._free_calls -= 1
            return
        self._free_calls = limits.CALLS_WITHOUT_CHECKPOINT_MAX
        async with self._send_turn:
            await self._send_frames(memoryview(data).cast("B"))

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """See interface.Stream."""
        n = data.nbytes if isinstance(data, memoryview) else len(data)
        with self._owner.push_lock:
            if not self._may_send_at_once(n):
                return False
            self._check_sending()
            if n:
                self._send_credit -= n
                self._owner.send_data(self.stream_id, data.cast("B") if isinstance(data, memoryview) else data)
            return True

    def _may_send_at_once(self, n: int) -> bool:
        fits = n <= self._send_credit and n <= limits.FRAME_PAYLOAD_BYTES
        return fits and self._owner.writable and not self._send_turn.locked()

    def send_from_thread(self, data: bytes) -> bool:
        """See interface.Stream."""
        with self._owner.push_lock:
            if not self._may_send_at_once(len(data)) or self._failure is not None or self._sent_end:
                return False
            sent = self._owner.send_data_from_thread(self.stream_id, data)
            if sent:
                self._send_credit -= len(data)
            return sent

    async def _send_frames(self, rest: memoryview) -> None:
        started = False
        try:
            while rest:
                self._check_sending()
                if not self._send_credit:
                    self._sender_since = trio.current_time()
                    await self._sender.wait()
                    continue
                async with self._owner.turn:
                    await self._owner.drained()
                    self._check_sending()
                    with self._owner.push_lock:
                        k = min(len(rest), self._send_credit, limits.FRAME_PAYLOAD_BYTES)
                        self._send_credit -= k
                        self._owner.send_data(self.stream_id, rest[:k])
                rest = rest[k:]
                started = True
        except trio.Cancelled:
            if started:
                self._give_up("a message was cancelled in its middle")
            raise
        finally:
            self._sender_since = math.inf

    def _check_sending(self) -> None:
        self._check_failure()
        if self._sent_end:
            raise StreamClosed("the stream is closed on this side", clean=False)

    def _check_failure(self) -> None:
        if self._failure is not None:
            kind, message = self._failure
            raise kind(message)

    # --- Receiving ---

    async def receive_exactly(self, n: int) -> bytes:
        """See interface.Stream."""
        if not self._free_calls:
            self._free_calls = limits.CALLS_WITHOUT_CHECKPOINT_MAX
            await trio.lowlevel.checkpoint()
        if n <= len(self._buffer):
            self._free_calls -= 1
            return bytes(self._take(n))
        self._free_calls = limits.CALLS_WITHOUT_CHECKPOINT_MAX
        return await self._receive_slowly(n)

    async def _receive_slowly(self, n: int) -> bytes:
        """The message is taken out in pieces of at most half a window, as the peer can send no more at once."""
        pieces: list[bytes | bytearray] = []
        missing = n
        try:
            while missing:
                if len(self._buffer) >= min(missing, self.window // 2):
                    pieces.append(self._take(min(missing, len(self._buffer))))
                    missing -= len(pieces[-1])
                    continue
                self._check_receiving(clean=not pieces and not self._buffer)
                self._expect(missing)
                self._wanted = min(missing, self.window // 2)
                self._reader_since = trio.current_time()
                await self._reader.wait()
        except BaseException:
            self._put_back(b"".join(pieces))
            raise
        finally:
            self._reader_since = math.inf
        return b"".join(pieces)

    async def arrivals(self, take: Callable[[], bool]) -> None:
        """See interface.Stream."""
        await trio.lowlevel.checkpoint()
        self._taker = take
        try:
            while self._taker_goes_on():
                self._check_receiving(clean=not self._buffer)
                self._wanted = math.inf
                self._reader_since = trio.current_time()
                await self._reader.wait()
        finally:
            self._taker = None
            self._reader_since = math.inf

    def _taker_goes_on(self) -> bool:
        """Let the taker look at what is there; whether it wants to be called again."""
        if self._taker_error is not None:
            error, self._taker_error = self._taker_error, None
            raise error
        return self._taker is not None and (not self._buffer or self._taker())

    def peek(self) -> bytearray:
        """See interface.Stream."""
        return self._buffer

    def receive_nowait(self, n: int) -> bytes:
        """See interface.Stream."""
        if n > len(self._buffer):
            raise ValueError(f"{n} bytes of {len(self._buffer)}")
        return bytes(self._take(n))

    async def receive_some(self, most: int | None = None) -> bytes:
        """At least one byte, at most `most`: what has arrived. For libp2p's own protocols."""
        if most == 0:
            return b""
        first = await self.receive_exactly(1)
        more = len(self._buffer) if most is None else min(len(self._buffer), most - 1)
        return first + self._take(more)

    def _check_receiving(self, *, clean: bool) -> None:
        self._check_failure()
        if self._abandoned_at < math.inf:
            raise StreamClosed("the stream is closed on this side", clean=False)
        if self.got_end:
            message = "the peer closed the stream" if clean else "the peer closed the stream inside a message"
            raise StreamClosed(message, clean=clean)

    def _take(self, n: int) -> bytes | bytearray:
        taken: bytes | bytearray
        buffer = self._buffer
        if n == len(buffer):
            taken = buffer
            self._buffer = bytearray()
        else:
            taken = bytes(memoryview(buffer)[:n])
            del buffer[:n]
        self._account(-n)
        if 2 * (self.credit + len(self._buffer)) <= self.window:
            self._grant()
        if self.got_end and self._sent_end and not self._buffer:
            self._forget()
        return taken

    def _put_back(self, taken: bytes) -> None:
        if taken and not (self._failure and self._failure[0] is StreamReset):
            self._buffer[:0] = taken
            self._account(len(taken))

    def _grant(self) -> None:
        """Half a window was read. It doubles if that went fast."""
        now = trio.current_time()
        if now - self._granted_at < _GROWTH_SECONDS:
            self._grow(2 * self.window)
        self._granted_at = now
        self._top_up()

    def _expect(self, n: int) -> None:
        """The reader waits for `n` bytes: let the peer send as many of them as possible without asking again."""
        if n > self.credit + len(self._buffer):
            self._grow(n)
            if 2 * (self.credit + len(self._buffer)) <= self.window:
                self._top_up()

    def _grow(self, goal: int) -> None:
        if not self._forgotten:
            self.window = self._owner.extend_window(self.window, goal)

    def _top_up(self) -> None:
        room = self.window - self.credit - len(self._buffer)
        if room > 0 and not self.got_end and not self._forgotten:
            self.credit += room
            self._owner.grant(self.stream_id, room)

    def _account(self, n: int) -> None:
        if n and not self._forgotten:
            self._owner.account(n)

    # --- Closing ---

    async def aclose(self) -> None:
        """See interface.Stream."""
        if self._abandoned_at < math.inf:
            return
        self.half_close()
        self._abandoned_at = trio.current_time()
        self._drop_buffer()
        self._reader.wake()
        if self.got_end:
            self._forget()

    async def reset(self) -> None:
        """See interface.Stream."""
        self._give_up("the stream was reset on this side")

    def half_close(self) -> None:
        """Send no more; what the peer still sends can be read."""
        if not self._sent_end and self._failure is None:
            self._sent_end = True
            self._owner.send_end(self.stream_id)
            self._sender.wake()
            if self.got_end and not self._buffer:
                self._forget()

    def _give_up(self, reason: str) -> None:
        if not self._forgotten:
            self._owner.send_reset(self.stream_id)
            self.fail(StreamReset, reason)

    def _drop_buffer(self) -> None:
        self._account(-len(self._buffer))
        self._buffer = bytearray()

    def _forget(self) -> None:
        if not self._forgotten:
            self._account(-len(self._buffer))
            self._forgotten = True
            self._owner.forget(self)

    # --- For the muxer ---

    def deliver(self, data: memoryview) -> None:
        """Bytes within the credit, which the muxer has checked."""
        if self._forgotten:
            return
        self.credit -= len(data)
        if self._abandoned_at < math.inf:
            self._give_up("the stream is closed on this side")
            return
        self._buffer += data
        self._account(len(data))
        if self._taker is not None:
            self._let_taker_look()
        elif len(self._buffer) >= self._wanted:
            self._reader.wake()

    def _let_taker_look(self) -> None:
        """What a taker raises belongs to the task that waits in `arrivals`, not to the muxer."""
        try:
            if self._taker_goes_on():
                return
        except Exception as error:
            self._taker_error = error
        self._taker = None
        self._reader.wake()

    def receive_credit(self, n: int) -> bool:
        """The peer grants `n` bytes; False if that is more than any peer can mean."""
        with self._owner.push_lock:
            self._send_credit += n
        self._sender.wake()
        return self._send_credit <= limits.SEND_WINDOW_BYTES_MAX

    def end(self) -> None:
        """The peer will send no more."""
        self.got_end = True
        self._reader.wake()
        if self._abandoned_at < math.inf or (self._sent_end and not self._buffer):
            self._forget()

    def fail(self, kind: type[StreamReset] | type[ConnectionLost], reason: str) -> None:
        """Nothing more happens here. Data of a lost connection can still be read, that of a reset stream cannot."""
        if self._forgotten:
            return
        self._failure = (kind, reason)
        if kind is StreamReset:
            self._drop_buffer()
        self._reader.wake()
        self._sender.wake()
        self._forget()

    def check_waits(self, now: float) -> None:
        """The bounds behind the callers' deadlines, looked at once in a while."""
        if now - self._sender_since > limits.SEND_STALL_SECONDS_MAX:
            self._give_up(f"the peer read nothing for {limits.SEND_STALL_SECONDS_MAX:.0f} s")
        elif now - self._reader_since > limits.RECEIVE_SECONDS_MAX:
            self._give_up(f"nothing was received for {limits.RECEIVE_SECONDS_MAX / 3600:.0f} h")
        elif now - self._abandoned_at > limits.LINGER_SECONDS_MAX:
            self._give_up("the peer never closed its side")
