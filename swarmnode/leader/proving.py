"""Links to workers, and the proof that each must give over its link before it gets work.

Whatever goes wrong with a worker ends the same way: it rests for a while, is assigned its share again (which costs
nothing if it still holds it), proves it again, and serves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import structlog
import trio

from backends.manifest import Manifest
from capabilities.agreement import Agreement
from capabilities.errors import SwarmError
from scheduler.placement import Placement
from scheduler.settling import rest_s
from swarmnode.leader.checking import imprecision
from swarmnode.leader.link import PeerLink
from swarmnode.leader.members import Member
from swarmnode.leader.probe import ProbeReference, SomethingElse, probe
from swarmnode.net.interface import Network, PeerId

_log = structlog.get_logger(__name__)

_IDLE_LOOK_S: Final = 1.0


class Owner(Protocol):
    """Whom the prover asks and tells: the placer."""

    def share_of(self, peer: str) -> Placement | None:
        """The placement whose share a worker should hold now."""

    def assign(self, member: Member) -> None:
        """Tell a worker its share (again)."""

    def usable_changed(self) -> None:
        """Somebody can be used, or cannot any more."""

    async def proven(self) -> None:
        """Somebody has proven its share."""

    def believed(self, member: Member, share: Placement) -> Agreement | None:
        """A verdict that a predecessor left, if this worker need not prove its share before it serves."""

    def spend(self, member: Member) -> None:
        """That verdict is used up."""

    def found_unfit(self, member: Member) -> None:
        """Its sums are not precise enough for output ranks."""

    def found_wrong(self, member: Member, error: SomethingElse) -> None:
        """Its rows are those of another function."""

    @property
    def idle(self) -> bool:
        """No request is running."""


class Prover:
    """Everything is on the event loop. `run` holds its tasks."""

    def __init__(
        self,
        network: Network,
        manifest: Manifest,
        reference: ProbeReference,
        owner: Owner,
        *,
        partial_sums: bool,
        ask_f32: frozenset[int],
    ) -> None:
        """ask_f32: layers whose kernels are asked to accumulate in F32, as in service."""
        self._network = network
        self._manifest = manifest
        self._reference = reference
        self._owner = owner
        self._partial_sums = partial_sums
        self._ask_f32 = ask_f32
        self._nursery: trio.Nursery | None = None
        self._proving: set[PeerId] = set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    def start(self, task: Callable[[Member], Awaitable[None]], member: Member) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(task, member)

    def failed(self, member: Member, error: SwarmError) -> None:
        """Let a worker rest, and assign its share again."""
        if member.resting or not member.stream_up:
            return
        member.phase, member.error, member.resting = "failed", error, True
        member.failures += 1
        if member.failing_since_s is None:
            member.failing_since_s = trio.current_time()
        _log.warning("placement.worker_failed", peer=member.peer, name=member.name, error=error.to_json())
        self.start(self._rest, member)
        self._owner.usable_changed()

    async def _rest(self, member: Member) -> None:
        await trio.sleep(rest_s(member.failures))
        member.resting = False
        self._owner.assign(member)

    def try_to_prove(self, member: Member) -> None:
        """Probe a worker, if it has loaded what it should hold and is there."""
        if member.peer not in self._proving and not member.resting:
            self._proving.add(member.peer)
            self.start(self._prove, member)

    async def _prove(self, member: Member) -> None:
        """Open the link if there is none, probe what the worker should hold, and let it serve."""
        share, progress, passed = self._owner.share_of(str(member.peer)), member.progress, False
        try:
            if share is None or progress is None or member.silent or not member.stream_up:
                return
            if progress.phase != "loaded" or (progress.term, progress.epoch) != (share.term, share.epoch):
                return
            if member.is_usable(share.term, share.epoch):
                member.phase = "ready"
                return
            member.phase = "probing"
            link = await self._open_link(member)
            believed = self._owner.believed(member, share)
            if believed is None:
                await self._probe(link, share, member)
            else:
                member.agreement = believed
            if link.closed is not None:
                raise link.closed
            self._passed(member, share)
            if believed is not None:
                self._owner.spend(member)
                self.start(self._probe_when_idle, member)
            passed = True
        except SwarmError as error:
            self.failed(member, error)
            if isinstance(error, SomethingElse):
                self._owner.found_wrong(member, error)
        finally:
            self._proving.discard(member.peer)
        if share is not self._owner.share_of(str(member.peer)):  # it changed, and perhaps the new one is loaded already
            self.try_to_prove(member)
        elif passed:
            await self._owner.proven()

    async def _probe(self, link: PeerLink, share: Placement, member: Member) -> None:
        """Compare all that a worker should hold. Who was found unfit stays that as long as it stays."""
        probed = await probe(
            link,
            self._reference,
            self._manifest,
            share.held_by(str(link.peer)),
            term=share.term,
            epoch=share.epoch,
            partial_sums=self._partial_sums,
            ask_f32=self._ask_f32,
        )
        if not probed.within and member.unfit is None:
            member.unfit = await imprecision(
                link, self._reference, self._manifest, share, probed.agreement, share.epoch
            )
            if member.unfit is not None:
                self._owner.found_unfit(member)
        member.agreement = probed.agreement

    async def _probe_when_idle(self, member: Member) -> None:
        """Make up for the proof that a worker was spared, while nobody waits for an answer."""
        link = member.link
        while not self._owner.idle:  # noqa: ASYNC110 - it is looked at rarely, and nobody waits for it
            await trio.sleep(_IDLE_LOOK_S)
        share = self._owner.share_of(str(member.peer))
        if link is None or member.link is not link or share is None or not member.is_usable(share.term, share.epoch):
            return  # it has to prove itself anyway
        try:
            await self._probe(link, share, member)
            _log.info("probe.made_up", peer=member.peer, name=member.name, epoch=share.epoch)
        except SwarmError as error:
            if link.closed is None and self._owner.share_of(str(member.peer)) is share:
                link.fail("bad_reply", error.message)  # which lets it rest
                if isinstance(error, SomethingElse):
                    self._owner.found_wrong(member, error)

    def _passed(self, member: Member, share: Placement) -> None:
        member.proven.add((share.term, share.epoch))
        member.phase, member.error = "ready", None
        member.failing_since_s, member.failures, member.given_up = None, 0, 0
        _log.info(
            "probe.passed",
            peer=member.peer,
            name=member.name,
            epoch=share.epoch,
            experts=sum(map(len, share.held_by(str(member.peer)).values())),
            bit_identical=member.agreement is not None and member.agreement.bit_identical,
            unfit=None if member.unfit is None else member.unfit.message,
        )

    async def _open_link(self, member: Member) -> PeerLink:
        if member.link is not None and member.link.closed is None:
            return member.link
        assert self._nursery is not None
        link = member.link = PeerLink(member.peer, member.name)
        member.proven.clear()
        self._nursery.start_soon(self._run_link, member, link)
        if not await link.wait_up() and link.closed is not None:
            raise link.closed
        return link

    async def _run_link(self, member: Member, link: PeerLink) -> None:
        await link.run(self._network)
        if member.link is link:
            self._owner.usable_changed()
            if link.closed is not None and not member.silent and member.peer not in self._proving:
                self.failed(member, link.closed)
