"""The backbone's side of /swarmnode/leadership/1: to every member that asks, who leads, as this peer knows it.

A word goes out at every change and once a second, so that silence means something. Mandates, and the owner's news,
go to those alone who have shown that they do not know them. While this peer leads, members of the backbone also get the
record that its successor will need, in pieces between the words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.backbone.election_service import ElectionService
from swarmnode.backbone.kept import LeaderRecord
from swarmnode.backbone.leadership_messages import (
    DIGEST_BYTES,
    PROTOCOL,
    FromBackbone,
    Knows,
    Proof,
    RecordPart,
    Still,
    Word,
    decode_from_member,
    encode,
)
from swarmnode.backbone.news import News, Told
from swarmnode.backbone.pace import Pace
from swarmnode.backbone.reasons import MAY_NOT_LEAD
from swarmnode.net.interface import Network, NetworkError, Stream
from swarmnode.swarm.store import SwarmStore
from swarmnode.wire import read_frame

_log = structlog.get_logger(__name__)

_NOTHING_TOLD: Final = Told(bytes(DIGEST_BYTES), ())


@dataclass(slots=True)
class _Member:
    """What the other end of a stream knows, by what it said and what was sent to it."""

    knows: Knows
    told_term: int = 0
    told_news: bytes = b""
    record: LeaderRecord | None = None  # being sent
    offset: int = 0
    word: Word | None = None
    spoke: trio.Event = field(default_factory=trio.Event)


class LeadershipService:
    """Speaks for one node, whether it is in the backbone or not: members ask those that are."""

    def __init__(self, network: Network, store: SwarmStore, election: ElectionService) -> None:
        self.election = election
        self.record: LeaderRecord | None = None
        """What this peer leaves to its successor, while it leads or since it did."""
        self._network = network
        self._store = store
        self._news = News(store)
        self._told = _NOTHING_TOLD
        self._model = ""
        self._pace = Pace()
        self._set = trio.Event()
        self.peer_mistakes = 0

    def register(self) -> None:
        """Serve the protocol."""
        self._network.serve(PROTOCOL, self._serve, max_streams_per_peer=limits.LEADERSHIP_STREAMS_PER_PEER_MAX)

    @property
    def changed(self) -> trio.Event:
        """Set at the next set_model or set_record. Take it before you look."""
        return self._set

    def set_model(self, manifest_id: str) -> None:
        """The manifest that this peer serves while it leads; empty for none."""
        if manifest_id != self._model:
            self._model = manifest_id
            self._tell_change()

    def set_record(self, data: bytes) -> None:
        """What the successor will need. It is passed on while this peer leads, and dropped if it does not.

        Raises:
            ValueError: it is empty, or longer than LEADER_RECORD_BYTES_MAX.
        """
        if not 0 < len(data) <= limits.LEADER_RECORD_BYTES_MAX:
            raise ValueError(f"a leader's record of {len(data):,} bytes")
        if self.election.leader == self.election.peer:
            self.record = LeaderRecord(self.election.term, data)
            self._tell_change()

    def word(self) -> Word:
        """What this peer says now."""
        leader = self.election.leader or ""
        return Word(
            term=self.election.term,
            leader=leader,
            eligible=self.election.eligible,
            why=self._why(),
            model=self._model if leader == self.election.peer else "",
            news=self._told.digest,
            addresses=self._network.addresses[: limits.SWARM_ADDRESSES_PER_PEER_MAX],
        )

    def _why(self) -> str:
        if cannot_vote := self.election.cannot_vote:  # of interest while another one leads, too
            return cannot_vote
        why, own = self.election.status().why, self.election.may_not_lead
        return f"{MAY_NOT_LEAD}: {own}" if own and why.startswith(MAY_NOT_LEAD) else why

    def _tell_change(self) -> None:
        self._set.set()
        self._set = trio.Event()

    # -- a stream -----------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        try:
            with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
                opening = decode_from_member(await read_frame(stream, limits.LEADERSHIP_FRAME))
            if not isinstance(opening, Knows):
                raise PeerMistake("a member begins with something else than what it knows")
            member = _Member(opening)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._speak, stream, member)
                await self._listen(stream, member)
        except* (NetworkError, trio.TooSlowError) as errors:
            _log.debug("leadership.stream_ended", peer=stream.peer, reason=str(errors.exceptions[0]))
        except* PeerMistake:
            self.peer_mistakes += 1
            self._pace.erred(stream.peer)
            raise

    async def _listen(self, stream: Stream, member: _Member) -> None:
        while True:
            await self._pace.spoke(stream.peer)
            match decode_from_member(await read_frame(stream, limits.LEADERSHIP_FRAME)):
                case Knows() as knows:
                    member.knows = knows
                case Proof() as proof:
                    await self._news.hear(proof.news)
                    if (record := self._store.record) is not None:
                        await self.election.hear_backbone(record.enactment)
                    if proof.mandate is not None:
                        await self.election.learn(proof.mandate)
            member.spoke.set()

    async def _speak(self, stream: Stream, member: _Member) -> None:
        while True:
            if self._store.is_banned(stream.peer):
                raise PeerMistake("this peer is banned")
            election_changed, own_changed = self.election.changed, self._set
            member.spoke = trio.Event()
            self._told = await self._news.told()
            if (proof := self._proof_for(member)) is not None:
                await _send(stream, proof)
            word = self.word()
            await _send(stream, Still() if word == member.word else word)
            member.word = word
            due = trio.current_time() + limits.LEADERSHIP_WORD_SECONDS
            events = (election_changed, own_changed, member.spoke)
            while trio.current_time() < due and not any(event.is_set() for event in events):
                part = self._part_for(stream.peer, member)
                if part is None:
                    with trio.move_on_at(due):
                        await _first_of(events)
                    break
                await _send(stream, part)

    def _proof_for(self, member: _Member) -> Proof | None:
        """What this peer knows and the member does not, once for each."""
        mandate = self.election.mandate
        news: tuple[bytes, ...] = ()
        if mandate is None or mandate.term <= max(member.knows.term, member.told_term):
            mandate = None
        else:
            member.told_term = mandate.term
        if self._told.digest not in (member.knows.news, member.told_news):
            member.told_news, news = self._told.digest, self._told.news
        return Proof(mandate, news) if mandate is not None or news else None

    def _part_for(self, peer: str, member: _Member) -> RecordPart | None:
        """The next piece of the record; a newer one begins when the last one is through."""
        record, election = self.record, self.election
        if record is None or election.leader != election.peer or record.term != election.term:
            member.record = None
            return None
        if member.record is None:
            if record.digest == member.knows.record or peer not in election.enactment.current.peers:
                return None
            member.record, member.offset = record, 0
        sent, offset = member.record, member.offset
        data = sent.data[offset : offset + limits.LEADER_RECORD_CHUNK_BYTES]
        member.offset += len(data)
        if member.offset == len(sent.data):
            member.record = None
            member.knows = Knows(member.knows.term, member.knows.news, sent.digest)
        return RecordPart(sent.term, len(sent.data), offset, data)


async def _send(stream: Stream, message: FromBackbone) -> None:
    with trio.fail_after(limits.SEND_SECONDS_MAX):
        await stream.send(encode(message))


async def _first_of(events: tuple[trio.Event, ...]) -> None:
    """Return when one of them is set."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)
