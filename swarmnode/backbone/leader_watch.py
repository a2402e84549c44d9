"""Who leads, as a member sees it: LeaderView on what the backbone peers say, proven by mandates.

A peer counts as the leader while it says so itself, in the newest term that this node knows, whose mandate is on this
node's disk, and its word is fresh. A backbone peer's own election is heard like the others', without a stream, so a
swarm of one has a leader, too. What this node learns here (mandates, the backbone, the owner's news) it stores first
and tells its own election.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, SwarmError
from scheduler.election_state import DamagedState
from scheduler.term_guard import StaleTerm, TermGuard
from swarmnode.backbone.dialer import Dialer
from swarmnode.backbone.kept import Kept, LeaderRecord
from swarmnode.backbone.leadership_messages import Knows, Proof, Word
from swarmnode.backbone.leadership_service import LeadershipService
from swarmnode.backbone.listener import Listener
from swarmnode.backbone.news import News, Told
from swarmnode.backbone.reasons import DISABLED, why_nobody_leads
from swarmnode.identity import verify
from swarmnode.leadership import KnownLeader
from swarmnode.net.interface import Network, PeerId
from swarmnode.printable import printable_line
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.record import peer_of
from swarmnode.swarm.store import SwarmStore

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

_DIALS_FOR: Final = "leader"
_LOOK_S_MIN: Final = 0.25  # how late a word that is no longer fresh is noticed
_LOOK_S_MAX: Final = 1.0  # how late another backbone is, or a disk that works again


class LeaderWatch:
    """See leadership.LeaderView. Run `run` in a nursery; it has started when what was kept is read."""

    def __init__(self, network: Network, store: SwarmStore, dialer: Dialer, own: LeadershipService) -> None:
        """`own` is this node's voice, whether it is in the backbone or not."""
        record = store.need()
        self.peer_mistakes = 0
        self._network = network
        self._store = store
        self._swarm = record.swarm
        self._dialer = dialer
        self._own = own
        self._kept = Kept(store.files.data, record.swarm)
        self._guard = TermGuard(record.swarm, verify, store.verify_owner, None)
        self._record: LeaderRecord | None = None
        self._news = News(store)
        self._listeners: dict[PeerId, Listener] = {}
        self._leader: KnownLeader | None = None
        self._parted = False
        self._changed = trio.Event()
        self._disk_turn = trio.Lock()
        self._disk_fault = ""
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Raises DamagedState if what was kept cannot be read."""
        try:
            stored = await trio.to_thread.run_sync(self._kept.load_mandate)
            self._record = await trio.to_thread.run_sync(self._kept.load_record)
        except OSError as error:
            hint = "Check the file's owner and mode."
            raise DamagedState(f"cannot read {error.filename}: {error.strerror}", hint=hint) from error
        self._guard = TermGuard(self._swarm, verify, self._store.verify_owner, stored)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._hear_own)
            self._tend()
            task_status.started()
            while True:
                self._tend()
                self._judge()
                if self._guard.known is not self._guard.obeyed:  # it could not be stored, or was interrupted
                    await self._store_newest()
                    self._judge()
                await trio.sleep(self._next_look_s())

    # -- LeaderView ---------------------------------------------------------------------------------------------

    @property
    def leader(self) -> KnownLeader | None:
        return self._leader

    @property
    def reason(self) -> str:
        if self._leader is not None:
            return ""
        if self._store.is_banned(self._network.peer_id):
            return "the owner has banned this peer from the swarm"
        if self._disk_fault:
            return f"the newest term cannot be stored here: {self._disk_fault}"
        members = self._members()
        return why_nobody_leads(self._network.peer_id, members, self._words(), self._dialer.reason)

    @property
    def parted(self) -> bool:
        return self._parted

    async def changed(self) -> None:
        await self._changed.wait()

    @property
    def cannot_vote(self) -> dict[str, str]:
        """The backbone peers that are there and can neither vote nor lead, and why, in their own words."""
        said = {peer: word.why for peer, word in self._words().items() if peer in self._members()}
        return {peer: printable_line(why) for peer, why in sorted(said.items()) if why.startswith(DISABLED)}

    def is_heard(self, peer: str) -> bool:
        """Whether this backbone peer speaks; of one that is silent or away, its last word is not fresh any more."""
        return peer in self._words()

    def check(self, term: int, peer: str) -> None:
        """Raises StaleTerm or UncertifiedTerm."""
        self._guard.check(term, peer)

    # -- what else the leader says ------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The newest certified term that this node knows, 0 before any."""
        return self._guard.term

    @property
    def model(self) -> str:
        """The id of the manifest that the leader serves; empty if it has none, or nobody leads."""
        word = None if self._leader is None else self._words().get(self._leader.peer)
        return "" if word is None else word.model

    @property
    def record(self) -> LeaderRecord | None:
        """The newest record that a leader left here, this node itself included. Only backbone peers get one."""
        return self._record

    async def learn(self, mandate: Mandate) -> None:
        """A mandate from anywhere, for example from a leader's hello: stored, then obeyed.

        Raises:
            PeerMistake: it is none of this swarm.
        """
        try:
            self._guard.receive(mandate)
        except StaleTerm:
            return
        self._judge()  # an older leader leads no more, whatever the disk does
        await self._store_newest()
        await self._own.election.learn(mandate)
        self._judge()

    # -- judging ------------------------------------------------------------------------------------------------

    def _members(self) -> tuple[str, ...]:
        record = self._store.record
        return () if record is None else record.backbone.peers

    def _words(self) -> dict[str, Word]:
        """What the backbone peers say now, this one included."""
        words: dict[str, Word] = {}
        for peer, listener in self._listeners.items():
            if (word := listener.fresh_word) is not None:
                words[peer] = word
        if self._network.peer_id in self._members():
            words[self._network.peer_id] = self._own.word()
        return words

    def _judge(self) -> None:
        """Look anew who leads."""
        mandate, found = self._guard.obeyed, None
        if mandate is not None and mandate is self._guard.known:
            word = self._words().get(mandate.leader)
            if word is not None and (word.leader, word.term) == (mandate.leader, mandate.term):
                found = KnownLeader(PeerId(mandate.leader), mandate.term, mandate)
        before, self._leader = self._leader, found
        parted, self._parted = self._parted, self._is_parted()
        if _named(before) != _named(found):
            _log.info("leader.known", leader=None if found is None else found.peer, term=self._guard.term)
        if _named(before) != _named(found) or parted != self._parted:
            self._changed.set()
            self._changed = trio.Event()

    def _is_parted(self) -> bool:
        record = self._store.record
        return record is not None and not record.backbone.is_quorum(self._words())

    def _next_look_s(self) -> float:
        """Until the next word is no longer fresh, unless it is heard again."""
        now = trio.current_time()
        ends = [listener.fresh_until for listener in self._listeners.values() if listener.fresh_until >= now]
        return max(min([*ends, now + _LOOK_S_MAX]) - now, _LOOK_S_MIN)

    # -- hearing ------------------------------------------------------------------------------------------------

    def _tend(self) -> None:
        """Listen to those who are in the backbone now."""
        assert self._nursery is not None
        others = {PeerId(peer) for peer in self._members()} - {self._network.peer_id}
        for peer in self._listeners.keys() - others:
            self._listeners.pop(peer).scope.cancel()
        for peer in sorted(others - self._listeners.keys()):
            listener = self._listeners[peer] = Listener(self._network, self._dialer, peer, self)
            self._nursery.start_soon(listener.run)
        self._dialer.keep(_DIALS_FOR, others)

    async def _hear_own(self) -> None:
        """This node's own election, like that of any backbone peer."""
        election = self._own.election
        while True:
            election_changed, said = election.changed, self._own.changed
            if (mandate := election.mandate) is not None and mandate.term > self._guard.term:
                try:
                    await self.learn(mandate)
                except PeerMistake as error:  # a quorum gave one term twice: there is nobody to tell
                    _log.error("leader.contradiction", reason=error.message)
            if (record := self._own.record) is not None and record is not self._record:
                await self.hear_record(record)
            self._judge()
            async with trio.open_nursery() as nursery:
                for event in (election_changed, said):
                    nursery.start_soon(_end_with, event, nursery.cancel_scope)

    async def knows(self) -> tuple[Knows, Told, Mandate | None]:
        """See listener.Ears; so are the following."""
        told, obeyed = await self._news.told(), self._guard.obeyed
        record = b"" if self._record is None else self._record.digest
        return Knows(0 if obeyed is None else obeyed.term, told.digest, record), told, obeyed

    async def hear_proof(self, proof: Proof) -> None:
        if proof.news:
            await self._news.hear(proof.news)
            if (record := self._store.record) is not None:
                await self._own.election.hear_backbone(record.enactment)
        if proof.mandate is not None:
            await self.learn(proof.mandate)

    async def hear_word(self, peer: PeerId, word: Word) -> None:
        own = [address for address in word.addresses if peer_of(address) == peer]
        record = self._store.record
        if record is not None and not set(own) <= set(record.addresses):
            try:
                await trio.to_thread.run_sync(self._store.learn_addresses, own)
            except (OSError, NotInSwarm) as error:
                _log.warning("leader.addresses_not_kept", reason=str(error))
        self._judge()

    def wants_record(self, peer: PeerId, term: int) -> bool:
        try:
            self._guard.check(term, peer)
        except SwarmError:
            return False
        return self._network.peer_id in self._members()

    async def hear_record(self, record: LeaderRecord) -> None:
        async with self._disk_turn:
            if self._record is not None and self._record.term > record.term:
                return
            try:
                await trio.to_thread.run_sync(self._kept.store_record, record)
            except OSError as error:  # it serves this process all the same
                _log.error("leader.record_not_kept", reason=error.strerror)
            self._record = record

    def lost(self, peer: PeerId) -> None:
        self._judge()

    def mistaken(self, peer: PeerId) -> None:
        self.peer_mistakes += 1

    # -- the disk -----------------------------------------------------------------------------------------------

    async def _store_newest(self) -> None:
        async with self._disk_turn:
            mandate = self._guard.known
            if mandate is None or mandate is self._guard.obeyed:
                return
            try:
                await trio.to_thread.run_sync(self._kept.store_mandate, mandate)
            except OSError as error:
                if not self._disk_fault:
                    _log.error("leader.mandate_not_stored", reason=error.strerror)
                self._disk_fault = error.strerror or "the disk failed"
                return
            self._guard.stored(mandate)
            self._disk_fault = ""


def _named(leader: KnownLeader | None) -> tuple[str, int] | None:
    return None if leader is None else (leader.peer, leader.term)


async def _end_with(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
