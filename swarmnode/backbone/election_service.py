"""The shell around the election: its clock, its disk and its streams. /swarmnode/election/1 is spoken here.

Each event (a tick, a message, a report) takes its turn, and its Ready is carried out whole before the next one: the
state is on disk before a message leaves, and both before anybody hears of a change. Waiting for a turn is bounded by
who may wait: a stream's next message is read when the last one was handled.

A peer whose vote file is damaged or cannot be written takes no part; it still learns which backbone acts. One that lost
the file has a new one without a seat, and is told apart by the election itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from capabilities.backbone import BackboneSet, Enactment
from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, SwarmError
from scheduler.backbone_ledger import Keys
from scheduler.election import Election
from scheduler.election_messages import BackboneUpdate, Message, from_plain, to_plain
from scheduler.election_state import BackboneChanged, DamagedState, HandOverFailed, HardState, LeaderChanged, Ready
from scheduler.election_status import LOST_SEAT, ElectionStatus
from scheduler.election_times import TICK_S
from swarmnode import limits
from swarmnode.backbone.dialer import Dialer
from swarmnode.backbone.outlet import Outlet
from swarmnode.backbone.pace import Pace
from swarmnode.identity import Identity, verify
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.record import backbone_news
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.vote_file import open_vote_file, reopen_vote_file, write_vote_file
from swarmnode.wire import encode_frame, read_frame

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

PROTOCOL: Final = "/swarmnode/election/1"
_DIALS_FOR: Final = "election"
_DISK_RETRY_S: Final = 5.0  # a person frees space in minutes; a try costs two small writes


class NoPart(SwarmError):
    """This node takes no part in elections: the file of its votes is damaged, or cannot be written."""

    type = "no_part"
    default_hint = "Look at the disk and the file that the message names: once it can be written this node votes again."


@dataclass(frozen=True, slots=True)
class ElectionReport:
    """For `status`. `election` is None while this node takes no part; `fault` says why."""

    election: ElectionStatus | None
    fault: SwarmError | None
    peer_mistakes: int

    @property
    def why(self) -> str:
        """Why this node knows no leader; empty if it knows one."""
        if self.election is None:
            return "this peer takes no part in elections" + ("" if self.fault is None else f": {self.fault.message}")
        return self.election.why


def _ignore(_: object) -> None:
    pass


class ElectionService:
    """One node's part in the elections of its swarm, whether it is in the backbone or not. Run `run` in a nursery.

    `on_leader`, `on_backbone` and `on_hand_over_failed` hear of what changed, in order: they must not block. `draw`
    gives uniform random numbers in [0, 1), `clock` seconds of a monotonic clock.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        store: SwarmStore,
        dialer: Dialer,
        *,
        on_leader: Callable[[LeaderChanged], object] = _ignore,
        on_backbone: Callable[[BackboneChanged], object] = _ignore,
        on_hand_over_failed: Callable[[HandOverFailed], object] = _ignore,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.peer = identity.peer_id
        self.eligible = False
        self.may_not_lead = ""
        """Why this node may not lead, as it was reported; empty if it may, or nothing was reported."""
        self.enactment: Enactment = store.need().enactment
        """Proof of the backbone that acts, as this node's election knows it."""
        self._network = network
        self._store = store
        self._swarm = store.need().swarm
        self._dialer = dialer
        self._keys = Keys(identity.sign, verify, store.verify_owner)
        self._on_leader = on_leader
        self._on_backbone = on_backbone
        self._on_hand_over_failed = on_hand_over_failed
        self._draw = draw
        self._clock = clock
        self._election: Election | None = None
        self._fault: SwarmError | None = None
        self._covers = False
        self._retry_at = 0.0
        self._turn = trio.Lock()  # who waits for it gets it in order
        self._disk = trio.CapacityLimiter(1)  # of its own: other files' reads must not delay a vote
        self._outlets: dict[str, Outlet] = {}
        self._strangers = 0
        self._pace = Pace()
        self._mistakes = 0
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._stepped = trio.Event()  # at the next event, ticks included

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. It has started when the vote file is open."""
        await self._open(open_vote_file)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._tend_outlets()
            await self.hear_backbone(self._store.need().enactment)
            self._network.serve(PROTOCOL, self._serve, max_streams_per_peer=limits.ELECTION_STREAMS_PER_PEER_MAX)
            task_status.started()
            await trio.sleep(TICK_S * self._draw())  # not in step with others: peers that tick at once stand at once
            while True:
                await self._step(lambda election, now: election.tick(now))
                await self._until_next_tick()
                if isinstance(self._fault, NoPart) and trio.current_time() >= self._retry_at:
                    await self._come_back()

    async def _until_next_tick(self) -> None:
        tick_s = TICK_S if self._election is None else self._election.tick_s
        if tick_s <= TICK_S:
            await trio.sleep(TICK_S)
            return
        with trio.move_on_after(tick_s):
            await self._stepped.wait()  # an event may make this peer a member, for which time counts
            await trio.sleep(TICK_S)

    # -- what others ask ----------------------------------------------------------------------------------------

    @property
    def leader(self) -> str | None:
        """Who leads, as this node's election sees it: heard lately, with a mandate."""
        return None if self._election is None else self._election.leader

    @property
    def term(self) -> int:
        """The newest certified term that this node's election knows, 0 before any."""
        return 0 if self._election is None else self._election.term

    @property
    def mandate(self) -> Mandate | None:
        """That term's."""
        return None if self._election is None else self._election.mandate

    @property
    def changed(self) -> trio.Event:
        """Set at the next change of the leader, the term or the backbone. Take it before you look."""
        return self._changed

    def status(self) -> ElectionReport:
        election = None if self._election is None else self._election.status()
        return ElectionReport(election, self._fault, self._mistakes)

    @property
    def cannot_vote(self) -> str:
        """Why this node can neither vote nor lead, whatever its backbone says; empty if it can."""
        status = self.status()
        if status.election is None:
            return status.why
        return LOST_SEAT if status.election.lost_seat else ""

    def vote_file(self) -> bytes:
        """The name of this node's vote file (16 bytes): its seat, for AdmissionService. NoPart if it has none."""
        return self._need().status().vote_file

    # -- events -------------------------------------------------------------------------------------------------

    async def report(self, *, eligible: bool, covers: bool, why: str = "") -> None:
        """Whether this node may lead (it holds the trunk, is fit), and reaches a copy of every expert.

        `why` says why it may not, after "this peer may not lead: ".
        """
        self.eligible, self.may_not_lead, self._covers = eligible, "" if eligible else why, covers
        await self._step(lambda election, now: election.report(eligible=eligible, covers=covers, now=now))

    async def hand_over(self) -> None:
        """Let another peer lead, if one can; see on_hand_over_failed."""
        await self._step(lambda election, now: election.hand_over(now))

    async def learn(self, mandate: Mandate) -> None:
        """A mandate from elsewhere. PeerMistake if it is none."""
        if mandate.term > self.term:
            await self._step(lambda election, now: election.learn(mandate, now))

    async def hear_backbone(self, enactment: Enactment) -> None:
        """A proof that a backbone acts, from elsewhere. PeerMistake if it is none."""
        if self._election is None:
            await self._tell_store(enactment)
        elif enactment.current.version > self.enactment.current.version:
            update = BackboneUpdate(enactment, None, ())
            await self._step(lambda election, now: election.receive(update, self.peer, now))

    async def propose(self, backbone: BackboneSet) -> None:
        """The owner's next version of the backbone. It is stored here when this returns, and acts later.

        Raises:
            PeerMistake: the owner did not sign it.
            UsageError: it does not follow the version that acts, or another one is pending.
            NoPart: this node has no vote file to store it in.
        """
        self._need()
        await self._step(lambda election, now: election.propose(backbone, now))
        self._need()

    def _need(self) -> Election:
        if self._election is None:
            raise NoPart(self.status().why)
        return self._election

    # -- carrying out -------------------------------------------------------------------------------------------

    async def _open(self, how: Callable[[Path, str, Enactment], HardState]) -> None:
        path, record = self._store.files.votes, self._store.need()
        try:
            state = await trio.to_thread.run_sync(how, path, record.swarm, record.enactment, limiter=self._disk)
        except DamagedState as error:
            self._give_up(error)
            return
        except OSError as error:
            self._give_up(_not_written(str(path), error))
            return
        self.enactment = state.enactment or self.enactment
        self._fault = None
        self._election = Election(self.peer, state, self._keys, self._draw, self._clock())
        if state.enactment is not None:
            await self._tell_store(state.enactment)  # a crash came between the vote file and the record

    async def _come_back(self) -> None:
        """Take part again if the disk takes the votes again: from what is on it, as after a restart."""
        async with self._turn:
            await self._open(reopen_vote_file)
            if self._election is None:
                return
            _log.info("election.part_again", path=str(self._store.files.votes))
            self._tend_outlets()
            self._tell_change()
        eligible, covers = self.eligible, self._covers
        await self._step(lambda election, now: election.report(eligible=eligible, covers=covers, now=now))
        await self.hear_backbone(self._store.need().enactment)

    async def _step(self, event: Callable[[Election, float], Ready]) -> None:
        """One event in its turn, with everything that follows from it. Raises what the event raises."""
        async with self._turn:
            if self._election is None:
                return
            with trio.CancelScope(shield=True):  # the election counts on what it asked for; the wait is one fsync
                await self._carry_out(event(self._election, self._clock()))
            self._stepped.set()
            self._stepped = trio.Event()

    async def _carry_out(self, ready: Ready) -> None:
        if ready.state is not None:
            path, state = self._store.files.votes, ready.state
            try:
                await trio.to_thread.run_sync(write_vote_file, path, state, limiter=self._disk)
            except OSError as error:
                self._give_up(_not_written(str(path), error))
                return
            self.enactment = state.enactment or self.enactment
            self._tend_outlets()
        for peer, message in ready.messages:
            self._send(peer, message)
        for change in ready.changes:
            match change:
                case LeaderChanged():
                    _log.info("election.leader", term=change.term, leader=change.leader)
                    self._on_leader(change)
                case BackboneChanged():
                    _log.info("election.backbone", version=change.backbone.version, seated=change.seated)
                    await self._tell_store(self.enactment)
                    self._on_backbone(change)
                case HandOverFailed():
                    self._on_hand_over_failed(change)
        if ready.changes:
            self._tell_change()

    def _give_up(self, fault: SwarmError) -> None:
        """Take no part any more: what the election believes is not on disk."""
        self._retry_at = trio.current_time() + _DISK_RETRY_S
        if self._fault is not None and self._fault.message == fault.message:
            return  # it was tried again
        _log.error("election.no_part", error=fault.to_json())
        election, self._election, self._fault = self._election, None, fault
        if election is not None:
            self._on_leader(LeaderChanged(election.term, None, election.mandate))
        self._tend_outlets()
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _tell_store(self, enactment: Enactment) -> None:
        """Keep the record's backbone current, too. PeerMistake if the proof is false."""
        try:
            await trio.to_thread.run_sync(self._store.hear, [backbone_news(enactment)], limiter=self._disk)
        except NotInSwarm:
            return  # this node has just left
        except OSError as error:  # the vote file has it: the next start tells the record
            _log.error("election.record_not_written", reason=error.strerror)

    # -- streams ------------------------------------------------------------------------------------------------

    def _tend_outlets(self) -> None:
        peers = () if self._election is None else self._election.peers
        self._dialer.keep(_DIALS_FOR, peers)
        if self._nursery is None:
            return
        for peer in self._outlets.keys() - set(peers):
            self._outlets.pop(peer).scope.cancel()
        for peer in peers:
            if peer not in self._outlets:
                outlet = self._outlets[peer] = Outlet(self._network, self._dialer, PeerId(peer), PROTOCOL)
                self._nursery.start_soon(outlet.run)

    def _send(self, peer: str, message: Message) -> None:
        frame = encode(message)
        if outlet := self._outlets.get(peer):
            outlet.put(frame)
        elif self._nursery is not None and peer != self.peer and self._strangers < limits.ELECTION_STRANGERS_MAX:
            self._strangers += 1
            self._nursery.start_soon(self._tell_stranger, PeerId(peer), frame)

    async def _tell_stranger(self, peer: PeerId, frame: bytes) -> None:
        """One message to a peer that is no member, as far as this one knows: it may have missed which version acts."""
        try:
            with trio.move_on_after(limits.ELECTION_SEND_SECONDS_MAX):
                stream = await self._network.open_stream(peer, PROTOCOL)
                await stream.send(frame)
                await stream.aclose()
        except NetworkError as error:
            _log.debug("election.stranger_not_told", peer=peer, reason=str(error))
        finally:
            self._strangers -= 1

    async def _serve(self, stream: Stream) -> None:
        try:
            while True:
                frame = await read_frame(stream, limits.ELECTION_FRAME)
                if self._store.is_banned(stream.peer):
                    raise PeerMistake("this peer is banned")
                await self._receive(from_plain(frame.header), stream.peer)
                await self._pace.spoke(stream.peer)
        except PeerMistake:
            self._mistakes += 1
            self._pace.erred(stream.peer)
            raise

    async def _receive(self, message: Message, sender: str) -> None:
        if self._election is not None:
            await self._step(lambda election, now: election.receive(message, sender, now))
        elif isinstance(message, BackboneUpdate) and message.enactment is not None:
            await self._tell_store(message.enactment)


def encode(message: Message) -> bytes:
    """One message as a frame."""
    return encode_frame(to_plain(message))


def _not_written(path: str, error: OSError) -> NoPart:
    return NoPart(f"cannot write {path}: {error.strerror}", path=path)
