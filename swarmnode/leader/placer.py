"""Placement, driven: decide, assign, load, probe, and only then begin the epoch.

`current` is the epoch that serves, `wanted` one that is being prepared; the first serves until the second is proven,
unless some worker has no room for both. Whatever goes wrong with a worker ends the same way: it rests for a while, is
assigned its share again (which costs nothing if it still holds it), proves it again, and serves. The swarm is ready
exactly when every holder of the current epoch is usable. The decisions themselves are pure (scheduler/settling.py,
scheduler/placement.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import structlog
import trio

from backends.activations import q8_0_is_exact
from backends.manifest import Manifest
from backends.program import ExpertProgram
from capabilities.agreement import Agreement
from capabilities.errors import Internal, SwarmError
from scheduler.dispatch import LayerRouting
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, even_split
from scheduler.settling import STALLED_S, Present, decide, exclusion_s, rest_s
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.link import PeerLink
from swarmnode.leader.members import Member, Members
from swarmnode.leader.probe import ProbeReference, probe
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.routing import Routing
from swarmnode.member_messages import Assign, Begin, Progress
from swarmnode.net.interface import Network, PeerId
from swarmnode.wire import Q8_0_BLOCK_VALUES

_log = structlog.get_logger(__name__)

AGAIN_S_MAX = 30.0  # how long the loop sleeps at most: some conditions are only a matter of time

ActivationsChoice = Literal["auto", "f32", "q8_0"]


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """From the configuration: see SwarmConfig and LeaderConfig."""

    workers_expected: int
    settle_s: float
    activations: ActivationsChoice
    partial_sums: bool = False


class Placer:
    """Places one model's experts on the members. `run` never ends; the other methods are called on the event loop."""

    def __init__(
        self,
        network: Network,
        members: Members,
        manifest: Manifest,
        reference: ProbeReference,
        remote: RemoteExperts,
        engine: DecodeEngine,
        settings: PlacerSettings,
        term: int,
    ) -> None:
        self.term = term
        self.members = members
        self.coverage = Coverage(members, manifest)
        self._network = network
        self._manifest = manifest
        self._reference = reference
        self._remote = remote
        self._engine = engine
        self._settings = settings
        self._epoch = 0
        self._considered: set[str] = set()  # workers that the last attempt to place took into account
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._proving: set[PeerId] = set()
        self._q8_layers = self._quantizable(settings.activations)

    @property
    def last_epoch(self) -> int:
        """The newest epoch of this term. Set before `run`: what another model's placements took."""
        return self._epoch

    @last_epoch.setter
    def last_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A worker said hello: if it is a holder, it gets its assignment (again)."""
        self._assign(member)
        self._changed.set()

    def left(self, member: Member) -> None:
        target = self.coverage.target
        if target is None or str(member.peer) not in target.peers():
            self._considered.discard(str(member.peer))  # it may come back with more memory
        self._publish()
        self._changed.set()

    def spoke(self, member: Member) -> None:
        """A worker fell silent, or answers again after it had."""
        self._publish()
        self._try_to_prove(member)

    def progressed(self, member: Member, progress: Progress) -> None:
        target = self.coverage.target
        if target is None or (progress.term, progress.epoch) != (target.term, target.epoch) or member.resting:
            return
        if progress.phase == "failed":
            self._failed(member, progress.error or Internal("the worker could not load, and does not say why"))
        elif progress.phase == "loaded":
            self._try_to_prove(member)
        else:
            member.phase = "loading"

    def _failed(self, member: Member, error: SwarmError) -> None:
        """Let a worker rest, and assign its share again."""
        if member.resting or not member.stream_up:
            return
        member.phase, member.error, member.resting = "failed", error, True
        member.failures += 1
        if member.failing_since_s is None:
            member.failing_since_s = trio.current_time()
        _log.warning("placement.worker_failed", peer=member.peer, name=member.name, error=error.to_json())
        self._start(self._rest, member)
        self._changed.set()

    async def _rest(self, member: Member) -> None:
        await trio.sleep(rest_s(member.failures))
        member.resting = False
        self._assign(member)

    def _start(self, task: Callable[[Member], Awaitable[None]], member: Member) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(task, member)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                self._changed = trio.Event()
                again_s = self._decide()
                self.members.forget_absent()
                with trio.move_on_after(again_s):
                    await self._changed.wait()

    def _decide(self) -> float:
        """Place anew if it is time; in how many seconds to look again, if nothing happens."""
        now, target = trio.current_time(), self.coverage.target
        holders = frozenset(target.peers()) if target is not None else frozenset()
        present: dict[str, Present] = {}
        lost = {str(peer): m.lost_s for peer, m in self.members.by_peer.items() if m.lost_s is not None}
        again_s = AGAIN_S_MAX
        for member in self.members.present():
            peer, failing_since_s = str(member.peer), _failing_since(member, now)
            if peer in holders and failing_since_s is not None:
                lost[peer] = failing_since_s
            elif peer in holders or member.excluded_until_s <= now:
                present[peer] = Present(member.joined_s)
            else:
                again_s = min(again_s, member.excluded_until_s - now)
        decision = decide(
            holders,
            frozenset(self._considered),
            present,
            lost,
            expected=self._settings.workers_expected,
            settle_s=self._settings.settle_s,
            now=now,
        )
        if decision.waiting_for:
            self.coverage.waiting_for = decision.waiting_for
        if decision.workers is not None:
            self._place(sorted(decision.workers))
            self._give_up(holders - decision.workers, now)
        return again_s if decision.again_s is None else min(again_s, decision.again_s)

    def _give_up(self, peers: frozenset[str], now: float) -> None:
        """These were holders, and are there, but fail."""
        for peer in peers:
            member = self.members.by_peer.get(PeerId(peer))
            if member is not None and member.stream_up:
                member.given_up += 1
                member.excluded_until_s = now + exclusion_s(member.given_up)
                member.failing_since_s, member.failures = None, 0
                _log.warning("placement.given_up", peer=peer, name=member.name, seconds=exclusion_s(member.given_up))

    def _place(self, workers: list[str]) -> None:
        specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in self._manifest.layers]
        budgets = {peer: self.members.by_peer[PeerId(peer)].hello.memory_budget_bytes for peer in workers}
        self._considered = set(workers)
        try:
            placement = even_split(
                specs, [WorkerSpec(*each) for each in budgets.items()], term=self.term, epoch=self._epoch + 1
            )
        except PlacementImpossible as error:
            self.coverage.waiting_for = f"more memory: {error.message}"
            _log.warning("placement.impossible", error=error.message)
            return
        self._epoch += 1
        self.coverage.wanted = placement
        self.coverage.waiting_for = "its workers to load and prove their experts"
        _log.info("placement.made", term=self.term, epoch=self._epoch, workers=list(map(self.coverage.name, workers)))
        if not self._has_room_for_both(placement, budgets):
            self.coverage.current = None
            self._publish()
        for peer in placement.peers():
            self._assign(self.members.by_peer[PeerId(peer)])

    def _has_room_for_both(self, new: Placement, budgets: Mapping[str, int]) -> bool:
        """Whether each worker can load its new share beside the one that serves: if not, it frees that first."""
        old = self.coverage.current
        if old is None:
            return True
        sizes = {layer.layer: layer.expert_bytes for layer in self._manifest.layers}
        for peer, budget in budgets.items():
            before, after = old.held_by(peer), new.held_by(peer)
            held = sum(sizes[layer] * len(experts) for share in (before, after) for layer, experts in share.items())
            if before != after and held > budget:
                return False
        return True

    def _assign(self, member: Member) -> None:
        """Tell a worker what it should hold, if anything."""
        target = self.coverage.target
        if target is None or str(member.peer) not in target.peers() or not member.stream_up or member.resting:
            return
        member.phase, member.progress, member.progress_s = "loading", None, trio.current_time()
        member.tell(
            Assign(
                term=target.term,
                epoch=target.epoch,
                model=self._manifest.name,
                manifest=self._manifest.id,
                sources=(str(self._network.peer_id),),
                held=target.held_by(str(member.peer)),
            )
        )

    # -- proving ------------------------------------------------------------------------------------------------

    def _try_to_prove(self, member: Member) -> None:
        if member.peer not in self._proving and not member.resting:
            self._proving.add(member.peer)
            self._start(self._prove, member)

    async def _prove(self, member: Member) -> None:
        """Open the link if there is none, probe what the worker should hold, and let it serve."""
        target, progress, passed = self.coverage.target, member.progress, False
        try:
            if target is None or progress is None or member.silent or not member.stream_up:
                return
            if progress.phase != "loaded" or (progress.term, progress.epoch) != (target.term, target.epoch):
                return
            member.phase = "probing"
            link, held = await self._open_link(member), target.held_by(str(member.peer))
            agreement = await probe(
                link,
                self._reference,
                self._manifest,
                held,
                term=target.term,
                epoch=target.epoch,
                partial_sums=self._settings.partial_sums,
            )
            if link.closed is not None:
                raise link.closed
            self._passed(member, target, agreement)
            passed = True
        except SwarmError as error:
            self._failed(member, error)
        finally:
            self._proving.discard(member.peer)
        if target is not self.coverage.target:  # the share changed meanwhile, and perhaps it is loaded already
            self._try_to_prove(member)
        elif passed:
            await self._begin_if_proven()

    def _passed(self, member: Member, placement: Placement, agreement: Agreement) -> None:
        member.proven.add((placement.term, placement.epoch))
        member.agreement, member.phase, member.error = agreement, "ready", None
        member.failing_since_s, member.failures, member.given_up = None, 0, 0
        _log.info(
            "probe.passed",
            peer=member.peer,
            name=member.name,
            epoch=placement.epoch,
            experts=sum(map(len, placement.held_by(str(member.peer)).values())),
            bit_identical=agreement.bit_identical,
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
            self._publish()
            if link.closed is not None and not member.silent and member.peer not in self._proving:
                self._failed(member, link.closed)

    async def _begin_if_proven(self) -> None:
        """Begin the wanted epoch once all its workers have proven it; tell the workers which epoch runs."""
        wanted = self.coverage.wanted
        if wanted is not None:
            members = [self.members.by_peer.get(PeerId(peer)) for peer in wanted.peers()]
            if not all(m is not None and m.is_usable(wanted.term, wanted.epoch) for m in members):
                return
            self.coverage.current, self.coverage.wanted = wanted, None
            _log.info("epoch.begun", term=wanted.term, epoch=wanted.epoch)
        self._publish()
        await self._engine.step_boundary()  # what was dispatched under the old epoch has been answered
        current = self.coverage.current
        for member in self.members.present():
            if current is not None and member.is_usable(current.term, current.epoch):
                member.tell(Begin(current.term, current.epoch))
        self._changed.set()

    def _publish(self) -> None:
        """Give the decode thread the current epoch with the links that are usable at this moment."""
        placement = self.coverage.current
        if placement is None:
            self._remote.set_routing(None)
            return
        links: dict[str, PeerLink] = {}
        quantized: dict[str, frozenset[int]] = {}
        for peer in placement.peers():
            member = self.members.by_peer.get(PeerId(peer))
            if member is not None and member.link is not None and member.is_usable(placement.term, placement.epoch):
                links[peer] = member.link
                if member.hello.q8_0:
                    quantized[peer] = self._q8_layers
        away = [peer for peer in placement.peers() if peer not in links]
        routing = {layer: LayerRouting(layer, holders, away) for layer, holders in placement.holders.items()}
        self._remote.set_routing(Routing(placement.term, placement.epoch, routing, links, quantized))

    def _quantizable(self, choice: ActivationsChoice) -> frozenset[int]:
        """The layers whose activations travel as Q8_0."""
        if choice == "f32":
            return frozenset()
        layers = self._manifest.layers
        if choice == "q8_0":
            return frozenset(layer.layer for layer in layers if layer.n_in % Q8_0_BLOCK_VALUES == 0)
        programs = [ExpertProgram.from_bytes(program) for program in self._manifest.programs]
        return frozenset(layer.layer for layer in layers if q8_0_is_exact(layer, programs[layer.program]))


def _failing_since(member: Member, now: float) -> float | None:
    """Since when a worker fails, or should have made progress; None: all is well."""
    if member.failing_since_s is not None:
        return member.failing_since_s
    stalled = member.progress_s + STALLED_S
    return stalled if member.phase == "loading" and now > stalled else None
