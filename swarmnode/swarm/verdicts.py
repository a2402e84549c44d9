"""Verdicts on peers in a daemon: the board of whoever leads here, and what was heard of other leaders.

    publish     this node's own, while it leads: signed, in the book at once, then on the disk and to everybody
    hear        others', over gossip and /swarmnode/verdicts/1 (spreading.py): checked, then in the book
    adopt       a new leader signs what it finds of earlier terms in its own name, one after the other
    keep        data/verdicts, a backbone peer's only: who may lead next must know them after a restart

All of it is on the event loop but for signatures of whole exchanges and the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake
from capabilities.verdict import EVIDENCE_MAX, Evidence, Fitness, OnVerdict, Verdict
from scheduler.election_state import DamagedState
from swarmnode import limits
from swarmnode.durable import write_whole
from swarmnode.identity import Identity, verify
from swarmnode.net.gossip import Gossip
from swarmnode.net.interface import Network
from swarmnode.swarm.spreading import Channel, Spreading, SpreadingStatistics
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.verdict_book import FILE_BYTES_MAX, PIECE_BYTES_MAX, Ignored, SignedVerdict, VerdictBook

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

PROTOCOL: Final = "/swarmnode/verdicts/1"
_LOOK_S: Final = 1.0
_HARMLESS: Final = (Ignored.KNOWN, Ignored.OLDER)  # honest peers send these, too


def topic_of(swarm: str) -> str:
    """The swarm's topic for verdicts."""
    return f"swarmnode/{swarm[:16]}/verdicts"


def verdict_channel(swarm: str) -> Channel:
    return Channel(
        what="verdicts",
        topic=topic_of(swarm),
        protocol=PROTOCOL,
        pieces_max=limits.VERDICTS_MAX,
        piece_bytes_max=PIECE_BYTES_MAX,
        reply=limits.VERDICTS_REPLY,
        served_burst_bytes=limits.VERDICTS_SERVED_BURST_BYTES,
        served_bytes_per_second=limits.VERDICTS_SERVED_BYTES_PER_SECOND,
    )


@dataclass(frozen=True, slots=True)
class VerdictStatistics:
    known: int
    ignored: dict[str, int]
    """By reason."""
    spreading: SpreadingStatistics | None
    """None before it runs."""


class Verdicts:
    """See the file's head: a capabilities.verdict.VerdictBoard, and spreading.Pieces. Run `run` in a nursery.

    mandate: of the term that this node leads, None while it does not.
    """

    def __init__(
        self,
        store: SwarmStore,
        identity: Identity,
        mandate: Callable[[], Mandate | None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._identity = identity
        self._mandate = mandate
        self._wall_s = wall_s
        self._book = VerdictBook(verify)
        self._path: Path = store.files.verdicts
        self._spreading: Spreading | None = None
        self._on_change: list[OnVerdict] = []
        self._releases = store.need().releases
        self._unkept = trio.Event()

    # -- the board ----------------------------------------------------------------------------------------------

    def verdict_of(self, peer: str) -> Verdict | None:
        found = self._book.of(peer)
        return None if found is None or found.released < self.released(peer) else found

    def released(self, peer: str) -> int:
        record = self._store.record
        return 0 if record is None else record.releases.number_of(peer)

    @contextmanager
    def on_change(self, callback: OnVerdict) -> Iterator[None]:
        self._on_change.append(callback)
        try:
            yield
        finally:
            self._on_change.remove(callback)

    def publish(
        self, subject: str, fitness: Fitness, evidence: Sequence[Evidence], audits_agreed: int, audits_differed: int
    ) -> None:
        """Where this node leads no more, nothing happens: its successor judges anew."""
        mandate = self._mandate()
        if mandate is None:
            _log.warning("verdict.not_leading", subject=subject, fitness=fitness)
            return
        now_s = int(self._wall_s())
        kept = tuple(
            (each if each.at_s else replace(each, at_s=now_s)).bounded() for each in evidence[-EVIDENCE_MAX:]
        )
        before = self.verdict_of(subject)
        verdict = Verdict(subject, fitness, kept, audits_agreed, audits_differed, 0, 0, self.released(subject))
        self._sign(verdict, mandate)
        if before is None or before.fitness != fitness:
            _log.warning(
                "verdict.given",
                subject=subject,
                fitness=fitness,
                evidence=kept[-1].text if kept else "",
                agreed=audits_agreed,
                differed=audits_differed,
            )

    def _sign(self, verdict: Verdict, mandate: Mandate) -> None:
        named = replace(verdict, term=mandate.term, sequence=self._book.next_sequence(mandate.term))
        signed = SignedVerdict.make(mandate.certificate.swarm, named, mandate, self._identity.sign)
        self._book.put_own(signed)
        self._unkept.set()
        if self._spreading is not None:
            self._spreading.spread([signed.to_bytes()])
        self._tell(verdict.subject)

    def statistics(self) -> VerdictStatistics:
        ignored = {str(reason): count for reason, count in self._book.ignored.items()}
        spreading = None if self._spreading is None else self._spreading.statistics()
        return VerdictStatistics(len(self._book), ignored, spreading)

    def to_json(self, peer: str) -> dict[str, Any] | None:
        """The verdict on a peer, as docs/status.md says; None if there is none."""
        found = self.verdict_of(peer)
        return None if found is None else found.to_json()

    # -- hearing (spreading.Pieces) -----------------------------------------------------------------------------

    def parse(self, piece: bytes) -> None:
        self._book.parse(piece)

    def is_news(self, piece: bytes) -> bool:
        record, signed = self._store.record, self._book.parse(piece)
        if record is None:
            return False
        ignored = self._book.judge(signed, record)
        if ignored is None:
            return True
        self._book.ignored[ignored] += 1
        if ignored in _HARMLESS:
            return False
        raise PeerMistake(f"a verdict on {signed.verdict.subject} does not count: {ignored}")

    def take(self, pieces: Sequence[bytes]) -> tuple[bytes, ...]:
        """Check them, in a thread; `_after` puts them into the book, on the event loop."""
        record, true = self._store.need(), []
        for piece in pieces:
            try:
                signed = self._book.parse(piece)
            except PeerMistake:
                continue  # counted; the rest may be true all the same
            ignored = self._book.judge(signed, record)
            if ignored is None:
                true.append(piece)
            elif ignored not in _HARMLESS:
                self._book.ignored[ignored] += 1
        return tuple(true)

    def all(self) -> tuple[bytes, ...]:
        return tuple(each.to_bytes() for each in self._book.all(self._store.need()))

    def _after(self, new: tuple[bytes, ...]) -> None:
        record = self._store.record
        for piece in new if record is not None else ():
            signed = SignedVerdict.from_bytes(piece)
            if record is not None and self._book.hear(signed, record) is None:
                self._unkept.set()
                self._tell(signed.verdict.subject)

    # -- running ------------------------------------------------------------------------------------------------

    async def run(
        self, network: Network, gossip: Gossip, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Load what was kept, then hear, keep and, while this node leads, adopt; for ever."""
        record = self._store.need()
        await self._load(record.swarm)
        self._spreading = Spreading(verdict_channel(record.swarm), self, network, gossip, self._after)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._spreading.run)
            nursery.start_soon(self._keep)
            nursery.start_soon(self._look)
            task_status.started()

    async def _load(self, swarm: str) -> None:
        try:
            data = await trio.to_thread.run_sync(_read, self._path)
            if data is not None:
                self._book.load(data, swarm)
        except (DamagedState, OSError) as error:
            _log.error("verdicts.damaged", path=str(self._path), reason=str(error))  # other members tell them again

    async def _keep(self) -> None:
        while True:
            await self._unkept.wait()
            self._unkept = trio.Event()
            record = self._store.record
            if record is not None and record.peer in record.backbone.peers:
                data = self._book.to_file()
                try:
                    await trio.to_thread.run_sync(write_whole, self._path, data)
                except OSError as error:
                    _log.error("verdicts.not_kept", reason=str(error))
            await trio.sleep(limits.VERDICTS_KEEP_SECONDS)

    async def _look(self) -> None:
        """Adopt, and notice what the owner has released, whichever way this node heard of it."""
        pause_s = _LOOK_S
        while True:
            await trio.sleep(pause_s)
            record = self._store.record
            if record is not None and record.releases is not self._releases:
                before, self._releases = self._releases, record.releases
                for release in record.releases:
                    if release.number != before.number_of(release.peer):
                        self._tell(release.peer)
            mandate = self._mandate()
            older = None if mandate is None else self._book.signed_before(mandate.term)
            if mandate is not None and older is not None:
                self._sign(older.verdict, mandate)
            pause_s = _LOOK_S if older is None else limits.VERDICTS_ADOPT_SECONDS

    def _tell(self, peer: str) -> None:
        for callback in self._on_change:
            try:
                callback(peer)
            except Exception:
                _log.exception("a callback for verdicts failed")


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
