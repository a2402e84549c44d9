"""One member's ear at one backbone peer: a stream of /swarmnode/leadership/1, opened again whenever it broke.

It keeps the newest word and since when it holds; what proves something, or is to be kept, goes to whoever listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.backbone.dialer import Dialer
from swarmnode.backbone.kept import LeaderRecord
from swarmnode.backbone.leadership_messages import (
    PROTOCOL,
    FromMember,
    Knows,
    Proof,
    RecordPart,
    Still,
    Word,
    decode_from_backbone,
    encode,
)
from swarmnode.backbone.news import Told
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.wire import read_frame

_log = structlog.get_logger(__name__)


class Ears(Protocol):
    """Who listens. What these raise as PeerMistake ends the stream, and is the peer's fault."""

    async def knows(self) -> tuple[Knows, Told, Mandate | None]:
        """What this node knows, to be shown; the news, and the newest mandate on disk."""

    async def hear_proof(self, proof: Proof) -> None: ...

    async def hear_word(self, peer: PeerId, word: Word) -> None: ...

    def wants_record(self, peer: PeerId, term: int) -> bool:
        """Whether the leader of that term is this peer, and this node keeps its record."""

    async def hear_record(self, record: LeaderRecord) -> None: ...

    def lost(self, peer: PeerId) -> None:
        """Its word counts no more."""

    def mistaken(self, peer: PeerId) -> None:
        """It broke the protocol."""


@dataclass(slots=True)
class _Shown:
    """What the peer was told over this stream."""

    knows: Knows
    term: int = 0
    news: bytes = b""


class Listener:
    """Run `run` in a nursery."""

    def __init__(self, network: Network, dialer: Dialer, peer: PeerId, ears: Ears) -> None:
        self.peer = peer
        self.word: Word | None = None
        self.scope = trio.CancelScope()
        self._heard_at = 0.0
        self._network = network
        self._dialer = dialer
        self._ears = ears
        self._parts: list[bytes] = []
        self._parts_term = 0

    @property
    def fresh_word(self) -> Word | None:
        """The word that holds now."""
        return None if trio.current_time() > self.fresh_until else self.word

    @property
    def fresh_until(self) -> float:
        """The instant until which it holds, if nothing is heard before."""
        return self._heard_at + limits.LEADERSHIP_FRESH_SECONDS

    async def run(self) -> None:
        pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
        with self.scope:
            while True:
                await self._dialer.wait_connected(self.peer)
                opened = trio.current_time()
                try:
                    await self._converse()
                except (NetworkError, trio.TooSlowError) as error:
                    _log.debug("leader.word_lost", peer=self.peer, reason=str(error))
                except PeerMistake as error:
                    _log.warning("leader.peer_mistake", peer=self.peer, error=error.message)
                    self._ears.mistaken(self.peer)
                finally:
                    self.word, self._parts = None, []
                    self._ears.lost(self.peer)
                if trio.current_time() - opened >= limits.BACKBONE_STABLE_SECONDS:
                    pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.BACKBONE_RETRY_SECONDS_MAX)

    async def _converse(self) -> None:
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            stream = await self._network.open_stream(self.peer, PROTOCOL)
        try:
            knows, _, _ = await self._ears.knows()
            await _send(stream, knows)
            shown = _Shown(knows)
            while True:
                with trio.fail_after(limits.LEADERSHIP_SILENCE_SECONDS_MAX):
                    frame = await read_frame(stream, limits.LEADERSHIP_FRAME)
                match decode_from_backbone(frame):
                    case Word() as word:
                        self.word, self._heard_at = word, trio.current_time()
                        await self._ears.hear_word(self.peer, word)
                    case Still():
                        self._heard_at = trio.current_time()
                    case Proof() as proof:
                        await self._ears.hear_proof(proof)
                    case RecordPart() as part:
                        await self._collect(part)
                await self._show(stream, shown)
        finally:
            await stream.reset()

    async def _collect(self, part: RecordPart) -> None:
        if part.offset == 0:
            wanted = self._ears.wants_record(self.peer, part.term)
            self._parts, self._parts_term = [], part.term if wanted else 0
        if part.term != self._parts_term:
            return  # not wanted, or it no longer leads
        if part.offset != sum(map(len, self._parts)):
            raise PeerMistake("leadership record: a piece is out of order")
        self._parts.append(part.data)
        if part.offset + len(part.data) == part.total:
            data, self._parts, self._parts_term = b"".join(self._parts), [], 0
            await self._ears.hear_record(LeaderRecord(part.term, data))

    async def _show(self, stream: Stream, shown: _Shown) -> None:
        """Tell the peer what this node knows by now, and prove what the peer's word shows it not to know."""
        knows, told, mandate = await self._ears.knows()
        if knows != shown.knows:
            await _send(stream, knows)
            shown.knows = knows
        if self.word is None:
            return
        news: tuple[bytes, ...] = ()
        if mandate is None or mandate.term <= max(self.word.term, shown.term):
            mandate = None
        else:
            shown.term = mandate.term
        if told.digest not in (self.word.news, shown.news):
            shown.news, news = told.digest, told.news
        if mandate is not None or news:
            await _send(stream, Proof(mandate, news))


async def _send(stream: Stream, message: FromMember) -> None:
    with trio.fail_after(limits.ELECTION_SEND_SECONDS_MAX):
        await stream.send(encode(message))
