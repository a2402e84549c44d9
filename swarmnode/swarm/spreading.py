"""Signed pieces on their way to every member: the owner's news (news.py), leaders' verdicts (verdicts.py).

    gossip     one topic a swarm; each message is one piece, which carries its own proof
    exchange   who connects asks the other for all that it knows, and now and then asks anybody

    asker      the digest of what it knows
    responder  nothing if it knows the same, else all of its pieces in the payload

A node passes on what is news to itself, once it has checked the proof; it is kept a moment later. What cannot be
checked yet (a ban by an owner key whose rotation was not heard) is not passed on: whoever brought it is asked for all.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog
import trio

from capabilities.errors import PeerMistake, SwarmError
from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.limits import FrameLimits
from swarmnode.net.gossip import Gossip, MessageTooLarge, Verdict
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.wire import Fields, encode_frame, read_frame

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

MESSAGE_FORMAT: Final = 1
_DIGEST_BYTES: Final = 16

OnPieces = Callable[[tuple[bytes, ...]], object]


@dataclass(frozen=True, slots=True)
class Channel:
    """Where pieces of one kind go: `what` they are called in logs, a topic, a protocol, and its bounds.

    served_bytes: to one asker at once, and then so many a second.
    """

    what: str
    topic: str
    protocol: str
    pieces_max: int
    piece_bytes_max: int
    reply: FrameLimits
    served_burst_bytes: int
    served_bytes_per_second: float


class Pieces(Protocol):
    """What this node knows of one kind, and how it hears more. Those that say "thread" may wait for the disk."""

    def parse(self, piece: bytes) -> None:
        """PeerMistake unless it is a piece at all."""

    def is_news(self, piece: bytes) -> bool:
        """Whether it is new here and true. PeerMistake if its proof is false, or cannot be checked yet."""

    def take(self, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
        """In a thread: keep what is new and true; which that was."""

    def all(self) -> tuple[bytes, ...]:
        """In a thread: all that this node can tell, in the order in which it can be checked."""


@dataclass(frozen=True, slots=True)
class SpreadingStatistics:
    """Counters since the start."""

    heard: int
    """Pieces that were new here."""
    refused: int
    """That are no pieces of this kind."""
    unproven: int
    """Whose proof is false, or by a key that is not known (yet)."""
    dropped: int
    """That came faster than the disk takes them; they come again."""
    exchanges: int
    exchanges_failed: int


class Spreading:
    """Spreads and hears pieces of one kind. Run `run` in a nursery."""

    def __init__(
        self, channel: Channel, pieces: Pieces, network: Network, gossip: Gossip, on_news: OnPieces
    ) -> None:
        self._channel = channel
        self._pieces = pieces
        self._network = network
        self._gossip = gossip
        self._on_news = on_news
        self._send, self._heard = trio.open_memory_channel[tuple[bytes, ...]](limits.NEWS_QUEUE_MAX)
        self._to_ask: set[PeerId] = set()
        self._asked: dict[PeerId, float] = {}
        self._served: dict[PeerId, TokenBucket] = {}
        self._unproven: dict[PeerId, TokenBucket] = {}
        self._wake = trio.Event()
        self._counts = Counter[str]()

    def spread(self, pieces: Iterable[bytes]) -> None:
        """Tell everybody that is connected; the others hear when they connect. This node should know it already."""
        for each in pieces:
            try:
                self._gossip.publish(self._channel.topic, bytes((MESSAGE_FORMAT,)) + each)
            except MessageTooLarge as error:
                _log.error("spreading.too_large", what=self._channel.what, reason=str(error))

    def statistics(self) -> SpreadingStatistics:
        return SpreadingStatistics(**{name: self._counts[name] for name in SpreadingStatistics.__slots__})

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen for ever."""
        channel = self._channel
        await self._gossip.subscribe(channel.topic, self._hear, bytes_max=channel.piece_bytes_max + 1)
        self._network.serve(channel.protocol, self._serve, max_streams_per_peer=limits.NEWS_STREAMS_PER_PEER_MAX)
        self._network.on_connection(self._on_connection)
        for peer in self._network.connected_peers():
            self._on_connection(peer, True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep)
            nursery.start_soon(self._ask)
            task_status.started()

    # --- Gossip ---

    def _hear(self, message: bytes, neighbour: PeerId) -> Verdict:
        if message[:1] != bytes((MESSAGE_FORMAT,)):
            return Verdict.IGNORE  # a later version's, perhaps
        piece = message[1:]
        try:
            self._pieces.parse(piece)
        except PeerMistake:
            self._counts["refused"] += 1
            return Verdict.REFUSE
        try:
            if not self._pieces.is_news(piece):
                return Verdict.IGNORE
        except PeerMistake:
            self._counts["unproven"] += 1
            self._want(neighbour)
            return Verdict.IGNORE if self._forgives(neighbour) else Verdict.REFUSE
        try:
            self._send.send_nowait((piece,))
        except trio.WouldBlock:
            self._counts["dropped"] += 1
            return Verdict.IGNORE
        return Verdict.PASS_ON

    def _forgives(self, neighbour: PeerId) -> bool:
        """Whether what cannot be checked may still be an honest neighbour's, that knows more than this node."""
        now = trio.current_time()
        share = self._unproven.pop(neighbour, None) or TokenBucket(
            limits.NEWS_UNPROVEN_BURST, limits.NEWS_UNPROVEN_PER_SECOND, now
        )
        self._unproven[neighbour] = share
        if len(self._unproven) > limits.NEWS_SERVED_PEERS_MAX:
            del self._unproven[next(iter(self._unproven))]
        return share.take(now)

    async def _keep(self) -> None:
        """Take in what was heard: on the disk first, then for everybody else in this daemon."""
        async for pieces in self._heard:
            try:
                new = await trio.to_thread.run_sync(self._pieces.take, pieces)
            except (SwarmError, OSError) as error:
                _log.error("spreading.not_kept", what=self._channel.what, reason=str(error))
                continue
            if new:
                self._counts["heard"] += len(new)
                _log.info("spreading.heard", what=self._channel.what, pieces=len(new))
                self._on_news(new)

    # --- Exchange ---

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        if up:
            self._want(peer)
        else:
            self._to_ask.discard(peer)

    def _want(self, peer: PeerId) -> None:
        """Ask the peer for everything, unless that was done lately."""
        oldest = trio.current_time() - limits.NEWS_ASK_SECONDS_MIN
        self._asked = {each: then for each, then in self._asked.items() if then > oldest}
        if peer not in self._asked:
            self._to_ask.add(peer)
            self._wake.set()

    async def _ask(self) -> None:
        """Ask those that connected, one after the other, and anybody every few minutes."""
        while True:
            with trio.move_on_after(limits.NEWS_ASK_SECONDS * random.uniform(0.5, 1.5)):
                await self._wake.wait()
            self._wake = trio.Event()
            connected = self._network.connected_peers()
            if not self._to_ask and connected:
                self._to_ask.add(random.choice(connected))
            while self._to_ask:
                peer = self._to_ask.pop()
                self._asked[peer] = trio.current_time()
                await self._ask_one(peer)

    async def _ask_one(self, peer: PeerId) -> None:
        channel = self._channel
        try:
            with trio.fail_after(limits.NEWS_SECONDS_MAX):
                digest = _digest(await trio.to_thread.run_sync(self._pieces.all))
                stream = await self._network.open_stream(peer, channel.protocol)
                try:
                    await stream.send(encode_frame([digest]))
                    frame = await read_frame(stream, channel.reply)
                finally:
                    await stream.reset()
            pieces = split_blobs(frame.payload, channel.what, channel.pieces_max)
        except (NetworkError, SwarmError, trio.TooSlowError) as error:
            self._counts["exchanges_failed"] += 1
            _log.debug("spreading.not_got", what=channel.what, peer=peer, reason=str(error))
            return
        self._counts["exchanges"] += 1
        if pieces:
            await self._send.send(pieces)

    async def _serve(self, stream: Stream) -> None:
        with trio.fail_after(limits.NEWS_SECONDS_MAX):
            frame = await read_frame(stream, limits.NEWS_REQUEST)
            digest = Fields(frame.header, self._channel.what, list).binary(0, _DIGEST_BYTES, _DIGEST_BYTES)
            pieces = await trio.to_thread.run_sync(self._pieces.all)
            payload = b"" if digest == _digest(pieces) else join_blobs(pieces)
            await self._wait_for_share(stream.peer, len(payload))
            await stream.send(encode_frame([], payload))

    async def _wait_for_share(self, peer: PeerId, size: int) -> None:
        now = trio.current_time()
        share = self._served.pop(peer, None) or TokenBucket(
            self._channel.served_burst_bytes, self._channel.served_bytes_per_second, now
        )
        self._served[peer] = share
        if len(self._served) > limits.NEWS_SERVED_PEERS_MAX:
            del self._served[next(iter(self._served))]
        await trio.sleep(share.owe(now, size))


def _digest(pieces: Sequence[bytes]) -> bytes:
    return hashlib.sha256(join_blobs(sorted(pieces))).digest()[:_DIGEST_BYTES]
