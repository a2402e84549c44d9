"""What a stream needs from the connection that it belongs to: the muxer's, or the one of a network without sockets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from swarmnode.net.muxer_stream import MuxerStream


class StreamOwner(Protocol):
    """What a stream needs from its connection. None of the plain calls waits or raises."""

    @property
    def writable(self) -> bool:
        """Nothing is queued: the next frame may go to the kernel at once."""
        ...

    def send_data(self, stream_id: int, data: bytes | bytearray | memoryview) -> None: ...

    push_lock: threading.RLock
    """Held while credit is taken and bytes are sealed and given to the kernel: another thread may do that, too."""

    def send_data_from_thread(self, stream_id: int, data: bytes) -> bool:
        """With `push_lock` held, from any thread; False: nothing was sent."""
        ...

    @property
    def turn(self) -> trio.Lock:
        """Held while one frame waits to be sent: streams take turns in the order in which they came."""
        ...

    async def drained(self) -> None:
        """Wait, as the holder of `turn`, until nothing is queued."""
        ...

    def grant(self, stream_id: int, n: int) -> None: ...

    def send_end(self, stream_id: int) -> None: ...

    def send_reset(self, stream_id: int) -> None: ...

    def extend_window(self, window: int, goal: int) -> int:
        """The new size of a window that should grow to `goal`, as far as the connection's budget allows."""
        ...

    def account(self, n: int) -> None:
        """`n` more bytes are buffered; negative for fewer."""
        ...

    def forget(self, stream: MuxerStream) -> None: ...
