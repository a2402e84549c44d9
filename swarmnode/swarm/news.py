"""The owner's word on its way to every member: bans, rotations of the owner's key, and which backbone acts.

    gossip     one topic a swarm; each message is one piece of news, which carries its own proof (record.py)
    exchange   /swarmnode/news/1: who connects asks the other for all that it knows, and now and then asks anybody

    asker      the digest of what it knows
    responder  nothing if it knows the same, else all of its news in the payload

A node passes on what is news to itself, once it has checked the proof; it is on the disk a moment later. What cannot be
checked yet (a ban by an owner key whose rotation was not heard) is not passed on: whoever brought it is asked for all.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
import trio

from capabilities.errors import PeerMistake, SwarmError
from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.net.gossip import Gossip, MessageTooLarge, Verdict
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.record import NEWS_BYTES_MAX, NEWS_MAX, SwarmRecord, parse_news
from swarmnode.swarm.store import SwarmStore
from swarmnode.wire import Fields, encode_frame, read_frame

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

PROTOCOL: Final = "/swarmnode/news/1"
MESSAGE_FORMAT: Final = 1
_DIGEST_BYTES: Final = 16

OnNews = Callable[[tuple[bytes, ...]], object]


def topic_of(swarm: str) -> str:
    """The swarm's topic for news."""
    return f"swarmnode/{swarm[:16]}/news"


@dataclass(frozen=True, slots=True)
class NewsStatistics:
    """Counters since the start."""

    heard: int
    """Pieces that were new here."""
    refused: int
    """That are no news of this swarm."""
    unproven: int
    """Whose proof is false, or by an owner key that is not known (yet)."""
    dropped: int
    """That came faster than the disk takes them; they come again."""
    exchanges: int
    exchanges_failed: int


class NewsService:
    """Spreads and hears news. Run `run` in a nursery; the record is the store's, and is written in threads."""

    def __init__(self, store: SwarmStore, network: Network, gossip: Gossip, on_news: OnNews) -> None:
        self._store = store
        self._network = network
        self._gossip = gossip
        self._on_news = on_news
        self._topic = topic_of(store.need().swarm)
        self._send, self._heard = trio.open_memory_channel[tuple[bytes, ...]](limits.NEWS_QUEUE_MAX)
        self._to_ask: set[PeerId] = set()
        self._asked: dict[PeerId, float] = {}
        self._served: dict[PeerId, TokenBucket] = {}
        self._unproven: dict[PeerId, TokenBucket] = {}
        self._wake = trio.Event()
        self._known: tuple[SwarmRecord, tuple[bytes, ...]] | None = None
        self._counts = Counter[str]()

    def spread(self, news: Iterable[bytes]) -> None:
        """Tell everybody that is connected; the others hear when they connect. This node should know it already."""
        for each in news:
            try:
                self._gossip.publish(self._topic, bytes((MESSAGE_FORMAT,)) + each)
            except MessageTooLarge as error:
                _log.error("news cannot be spread", reason=str(error))

    def statistics(self) -> NewsStatistics:
        return NewsStatistics(**{name: self._counts[name] for name in NewsStatistics.__slots__})

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen for ever."""
        await self._gossip.subscribe(self._topic, self._hear, bytes_max=NEWS_BYTES_MAX + 1)
        self._network.serve(PROTOCOL, self._serve, max_streams_per_peer=limits.NEWS_STREAMS_PER_PEER_MAX)
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
        news, record = message[1:], self._store.record
        if record is None:
            return Verdict.IGNORE
        try:
            parse_news(news)
        except PeerMistake:
            self._counts["refused"] += 1
            return Verdict.REFUSE
        try:
            if record.hear(news) is record:
                return Verdict.IGNORE
        except PeerMistake:
            self._counts["unproven"] += 1
            self._want(neighbour)
            return Verdict.IGNORE if self._forgives(neighbour) else Verdict.REFUSE
        try:
            self._send.send_nowait((news,))
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
        async for news in self._heard:
            try:
                new = await trio.to_thread.run_sync(self._take, news)
            except (SwarmError, OSError) as error:
                _log.error("news not kept", reason=str(error))
                continue
            if new:
                self._counts["heard"] += len(new)
                _log.info("swarm.news", pieces=len(new))
                self._on_news(new)

    def _take(self, news: Sequence[bytes]) -> tuple[bytes, ...]:
        """In a thread: keep what is true of it; which was new."""
        record, true = self._store.need(), []
        for each in news:
            try:
                before, record = record, record.hear(each)
            except PeerMistake:
                self._counts["unproven"] += 1
                continue
            if record is not before:
                true.append(each)
        return self._store.hear(true) if true else ()

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
        try:
            with trio.fail_after(limits.NEWS_SECONDS_MAX):
                digest = _digest(await trio.to_thread.run_sync(self._news))
                stream = await self._network.open_stream(peer, PROTOCOL)
                try:
                    await stream.send(encode_frame([digest]))
                    frame = await read_frame(stream, limits.NEWS_REPLY)
                finally:
                    await stream.reset()
            news = split_blobs(frame.payload, "news", NEWS_MAX)
        except (NetworkError, SwarmError, trio.TooSlowError) as error:
            self._counts["exchanges_failed"] += 1
            _log.debug("news not got", peer=peer, reason=str(error))
            return
        self._counts["exchanges"] += 1
        if news:
            await self._send.send(news)

    async def _serve(self, stream: Stream) -> None:
        with trio.fail_after(limits.NEWS_SECONDS_MAX):
            frame = await read_frame(stream, limits.NEWS_REQUEST)
            digest = Fields(frame.header, "news", list).binary(0, _DIGEST_BYTES, _DIGEST_BYTES)
            news = await trio.to_thread.run_sync(self._news)
            payload = b"" if digest == _digest(news) else join_blobs(news)
            await self._wait_for_share(stream.peer, len(payload))
            await stream.send(encode_frame([], payload))

    async def _wait_for_share(self, peer: PeerId, size: int) -> None:
        now = trio.current_time()
        share = self._served.pop(peer, None) or TokenBucket(
            limits.NEWS_SERVED_BURST_BYTES, limits.NEWS_SERVED_BYTES_PER_SECOND, now
        )
        self._served[peer] = share
        if len(self._served) > limits.NEWS_SERVED_PEERS_MAX:
            del self._served[next(iter(self._served))]
        await trio.sleep(share.owe(now, size))

    def _news(self) -> tuple[bytes, ...]:
        """All that this node knows; checking what can be told takes a tenth of a millisecond a ban, so it is kept."""
        record = self._store.need()
        if self._known is None or self._known[0] is not record:
            self._known = record, record.news()
        return self._known[1]


def _digest(news: Sequence[bytes]) -> bytes:
    return hashlib.sha256(join_blobs(sorted(news))).digest()[:_DIGEST_BYTES]
