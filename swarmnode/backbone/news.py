"""The owner's word on its way to every member: a digest says whether two nodes know the same.

Who the backbone is, which keys the owner had, who is banned or released: all of it stands in the swarm's record
(swarm/record.py). Checking which of it can be passed on costs a signature each, so it is done once for each change, in
a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import structlog
import trio

from capabilities.packing import pack
from swarmnode.backbone.leadership_messages import DIGEST_BYTES
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.record import SwarmRecord, backbone_news
from swarmnode.swarm.store import SwarmStore

_log = structlog.get_logger(__name__)


class Told(NamedTuple):
    """`digest` is equal exactly if the same is known, whichever proof shows it."""

    digest: bytes
    news: tuple[bytes, ...]


class News:
    """What this node can tell, and how it hears."""

    def __init__(self, store: SwarmStore) -> None:
        self._store = store
        self._from: SwarmRecord | None = None
        self._told = Told(bytes(DIGEST_BYTES), ())

    async def told(self) -> Told:
        """All that this node knows of the owner's word."""
        record, known = self._store.record, self._from
        if record is not None and not _same(record, known):
            self._told = await trio.to_thread.run_sync(_tell, record)
            self._from = record
        return self._told

    async def hear(self, news: Iterable[bytes]) -> None:
        """Take it in, all or none. PeerMistake if any of it is false."""
        try:
            await trio.to_thread.run_sync(self._store.hear, tuple(news))
        except NotInSwarm:
            return  # this node has just left
        except OSError as error:  # whoever is asked next, or connects, tells it again
            _log.error("news.not_written", reason=str(error))


def _same(record: SwarmRecord, known: SwarmRecord | None) -> bool:
    """Whether they tell the same: records are values whose unchanged parts stay the same objects."""
    if known is None:
        return False
    same = (record.chain is known.chain, record.bans is known.bans, record.releases is known.releases)
    return all(same) and record.backbone.version == known.backbone.version


def _tell(record: SwarmRecord) -> Told:
    """A backbone counts by its version: there are many proofs of one."""
    news, proof = record.news(), backbone_news(record.enactment)
    others = hashlib.sha256(b"".join(sorted(each for each in news if each != proof))).digest()
    named = pack((record.swarm, record.backbone.version, others))
    return Told(hashlib.sha256(named).digest()[:DIGEST_BYTES], news)
