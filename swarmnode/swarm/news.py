"""The owner's word on its way to every member: bans, releases, rotations of its key, and which backbone acts.

Each piece carries its own proof (record.py); spreading.py brings it to everybody, over gossip and /swarmnode/news/1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.swarm.record import NEWS_BYTES_MAX, NEWS_MAX, SwarmRecord, parse_news
from swarmnode.swarm.spreading import Channel
from swarmnode.swarm.store import SwarmStore

PROTOCOL: Final = "/swarmnode/news/1"


def topic_of(swarm: str) -> str:
    """The swarm's topic for news."""
    return f"swarmnode/{swarm[:16]}/news"


def news_channel(swarm: str) -> Channel:
    return Channel(
        what="news",
        topic=topic_of(swarm),
        protocol=PROTOCOL,
        pieces_max=NEWS_MAX,
        piece_bytes_max=NEWS_BYTES_MAX,
        reply=limits.NEWS_REPLY,
        served_burst_bytes=limits.NEWS_SERVED_BURST_BYTES,
        served_bytes_per_second=limits.NEWS_SERVED_BYTES_PER_SECOND,
    )


class RecordNews:
    """What the store's record tells and hears (spreading.Pieces)."""

    def __init__(self, store: SwarmStore) -> None:
        self._store = store
        self._known: tuple[SwarmRecord, tuple[bytes, ...]] | None = None

    def parse(self, piece: bytes) -> None:
        parse_news(piece)

    def is_news(self, piece: bytes) -> bool:
        record = self._store.record
        return record is not None and record.hear(piece) is not record

    def take(self, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
        record, true = self._store.need(), []
        for each in pieces:
            try:
                before, record = record, record.hear(each)
            except PeerMistake:
                continue  # the rest may be true all the same
            if record is not before:
                true.append(each)
        return self._store.hear(true) if true else ()

    def all(self) -> tuple[bytes, ...]:
        """Checking what can be told takes a tenth of a millisecond a ban, so it is kept."""
        record = self._store.need()
        if self._known is None or self._known[0] is not record:
            self._known = record, record.news()
        return self._known[1]
