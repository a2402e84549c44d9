"""One stream to one peer of the election, opened again whenever it broke. What waits too long is dropped, oldest first.

Elections expect that any message may be lost or late, so nothing is ever sent twice, and nobody waits for a peer that
does not read.
"""

from __future__ import annotations

from collections import deque

import structlog
import trio

from swarmnode import limits
from swarmnode.backbone.dialer import Dialer
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream, StreamReset

_log = structlog.get_logger(__name__)


class Outlet:
    """Run `run` in a nursery; `put` takes no time."""

    def __init__(self, network: Network, dialer: Dialer, peer: PeerId, protocol: str) -> None:
        self._network = network
        self._dialer = dialer
        self._peer = peer
        self._protocol = protocol
        self._waiting: deque[bytes] = deque(maxlen=limits.ELECTION_OUTBOX_MAX)
        self._filled = trio.Event()
        self.scope = trio.CancelScope()

    def put(self, frame: bytes) -> None:
        """Send this as soon as the peer takes it."""
        self._waiting.append(frame)
        self._filled.set()

    async def run(self) -> None:
        pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
        with self.scope:
            while True:
                await self._wait_filled()  # most members never have anything to say to most others
                await self._dialer.wait_connected(self._peer)
                opened = trio.current_time()
                try:
                    await self._carry()
                except* (NetworkError, trio.TooSlowError) as errors:
                    _log.debug("election.stream_lost", peer=self._peer, reason=str(errors.exceptions[0]))
                if trio.current_time() - opened >= limits.BACKBONE_STABLE_SECONDS:
                    pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.BACKBONE_RETRY_SECONDS_MAX)

    async def _carry(self) -> None:
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            stream = await self._network.open_stream(self._peer, self._protocol)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._notice_end, stream)
                while True:
                    while self._waiting:
                        with trio.fail_after(limits.ELECTION_SEND_SECONDS_MAX):
                            await stream.send(self._waiting.popleft())
                    await self._wait_filled()
        finally:
            await stream.reset()

    async def _wait_filled(self) -> None:
        while not self._waiting:
            self._filled = trio.Event()
            await self._filled.wait()

    async def _notice_end(self, stream: Stream) -> None:
        """Raise when the stream is over, or the next message would find out, and be lost."""
        await stream.receive_exactly(1)
        raise StreamReset("the peer answers where it should only listen")
