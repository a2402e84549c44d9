"""Pings: each side asks the other twice a second, since a suspended peer's sockets look perfectly alive.

/swarmnode/ping/1 echoes small frames on one stream; `serve_pings` answers for a node. `PeerWatch` keeps such a stream
to each watched peer, feeds one FailureDetector and reports its verdicts. A lost connection is not its business: streams
break by themselves then.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog
import trio

from capabilities.errors import PeerMistake
from scheduler.liveness import PING_INTERVAL_S, TICK_S, FailureDetector, PeerState
from swarmnode import limits
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.wire import Fields, encode_frame, read_frame

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

PROTOCOL: Final = "/swarmnode/ping/1"
_NUMBER_BITS: Final = 62
_RETRY_S: Final = 0.5
_FIRST_PINGS: Final = 3  # follow each other at once: who is placed as soon as it joins should not be judged by one pong
_FIRST_INTERVAL_S: Final = 0.05

OnState = Callable[[PeerId, PeerState], object]


def _ignore(peer: PeerId, state: PeerState) -> None:
    pass


async def _echo(stream: Stream) -> None:
    while True:
        with trio.fail_after(limits.IDLE_STREAM_SECONDS_MAX):
            frame = await read_frame(stream, limits.PING_FRAME)
        number = Fields(frame.header, "ping", list).integer(0, 0, 1 << _NUMBER_BITS)
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(encode_frame([number]))


def serve_pings(network: Network) -> None:
    """Answer the pings of whoever is connected. Once for each node."""
    network.serve(PROTOCOL, _echo, max_streams_per_peer=limits.PING_STREAMS_PER_PEER_MAX)


class PeerWatch:
    """Watches peers; `on_state` hears of every change. Run `run` in a nursery; everything is on the event loop.

    This node itself may be among them: it always answers.
    """

    def __init__(self, network: Network, on_state: OnState = _ignore) -> None:
        self._network = network
        self._on_state = on_state
        self._detector = FailureDetector(trio.current_time())
        self._scopes: dict[PeerId, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                for change in self._detector.tick(trio.current_time()):
                    _log.info("peer.state", peer=change.peer, before=change.before, after=change.after)
                    self._on_state(PeerId(change.peer), change.after)
                await trio.sleep(TICK_S)

    def watch(self, peer: PeerId) -> None:
        """Start to ping a peer, from a clean sheet."""
        self.unwatch(peer)
        if self._nursery is None:
            raise RuntimeError("PeerWatch.run has not started")
        if peer == self._network.peer_id:
            return
        self._detector.add(peer, trio.current_time())
        scope = self._scopes[peer] = trio.CancelScope()
        self._nursery.start_soon(self._watch, peer, scope)

    def unwatch(self, peer: PeerId) -> None:
        self._detector.remove(peer)
        if scope := self._scopes.pop(peer, None):
            scope.cancel()

    def state(self, peer: PeerId) -> PeerState:
        if peer == self._network.peer_id:
            return PeerState.ALIVE
        return self._detector.state(peer, trio.current_time())

    def rtt_ms(self, peer: PeerId) -> float | None:
        """Smoothed round trip in milliseconds, None before the first."""
        seconds = 0.0 if peer == self._network.peer_id else self._detector.rtt_s(peer)
        return None if seconds is None else round(seconds * 1e3, 3)

    def rtt_least_ms(self, peer: PeerId) -> float | None:
        """The least of the last round trips in milliseconds, None before the second."""
        seconds = 0.0 if peer == self._network.peer_id else self._detector.rtt_least_s(peer)
        return None if seconds is None else round(seconds * 1e3, 3)

    async def _watch(self, peer: PeerId, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                try:
                    await self._ping(peer)
                except* (NetworkError, trio.TooSlowError):
                    pass
                except* PeerMistake as errors:
                    _log.warning("ping.peer_mistake", peer=peer, error=str(errors.exceptions[0]))
                # Unanswered either way: a peer that takes no ping stream falls silent like one that takes no ping.
                self._detector.sent(peer, secrets.randbits(_NUMBER_BITS), trio.current_time())
                await trio.sleep(_RETRY_S)

    async def _ping(self, peer: PeerId) -> None:
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            stream = await self._network.open_stream(peer, PROTOCOL)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_pongs, peer, stream)
                for count in itertools.count(1):
                    number = secrets.randbits(_NUMBER_BITS)
                    self._detector.sent(peer, number, trio.current_time())
                    with trio.fail_after(limits.SEND_SECONDS_MAX):
                        await stream.send(encode_frame([number]))
                    await trio.sleep(_FIRST_INTERVAL_S if count < _FIRST_PINGS else PING_INTERVAL_S)
        finally:
            await stream.reset()

    async def _receive_pongs(self, peer: PeerId, stream: Stream) -> None:
        while True:
            frame = await read_frame(stream, limits.PING_FRAME)
            number = Fields(frame.header, "pong", list).integer(0, 0, 1 << _NUMBER_BITS)
            self._detector.pong(peer, number, trio.current_time())
