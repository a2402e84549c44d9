"""Placement, driven: decide, assign, load, probe, and only then begin the epoch.

`current` is the epoch that serves, `wanted` one that is being prepared; the first serves until the second is proven
(shares.py has workers change over). The swarm is ready as long as every expert has a copy that can be used. The
decisions themselves are pure (scheduler/settling.py, scheduler/placing.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog
import trio

from backends.manifest import Manifest
from capabilities.agreement import Agreement
from capabilities.errors import Internal
from capabilities.verdict import VerdictBoard
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, apart, output_ranks
from scheduler.placement_record import PlacementRecord
from scheduler.placement_report import Loss, PlacementReport
from scheduler.placing import place
from scheduler.settling import decide, exclusion_s
from swarmnode.leader.auditing import Auditing, Judging
from swarmnode.leader.checking import Checking, Imprecise
from swarmnode.leader.coverage import Coverage, lacks
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.inheritance import Inheritance
from swarmnode.leader.members import Member, Members
from swarmnode.leader.probe import ProbeReference, SomethingElse
from swarmnode.leader.proving import Prover
from swarmnode.leader.publishing import ActivationsChoice, make_routing, quantizable
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.repeating import Repeating
from swarmnode.leader.shares import Shares, Sources
from swarmnode.leader.specs import Specs, hard_facts, may_hold
from swarmnode.member_messages import Begin, Progress
from swarmnode.net.interface import Network, PeerId
from swarmnode.outline import Outline

_log = structlog.get_logger(__name__)

AGAIN_S_MAX = 30.0  # how long the loop sleeps at most: some conditions are only a matter of time, and speeds change
_SECRET_BYTES: Final = 32
_INLINE_MAX: Final = 50_000  # experts times workers that are placed on the event loop: a few ten milliseconds


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """From the configuration: see SwarmConfig and LeaderConfig. own_copy: the leader can compute experts itself."""

    workers_expected: int
    settle_s: float
    activations: ActivationsChoice
    partial_sums: bool = False
    replicas: int = 1
    own_copy: bool = False
    audits: bool = True


def _ignore(*_told: object) -> None:
    pass


class Placer:
    """Places one model's experts on the members. `run` never ends; the other methods are called on the event loop.

    changed: called whenever what can be used, or what serves, may have changed. inherited: a predecessor's record, to
    start from. on_record: gets what a successor should have, whenever that changes.
    """

    def __init__(
        self,
        network: Network,
        members: Members,
        manifest: Manifest,
        reference: ProbeReference,
        judge: Judging,
        remote: RemoteExperts,
        engine: DecodeEngine,
        settings: PlacerSettings,
        term: int,
        *,
        board: VerdictBoard,
        sources: Sources | None = None,
        changed: Callable[[], None] = _ignore,
        inherited: PlacementRecord | None = None,
        on_record: Callable[[bytes], None] = _ignore,
    ) -> None:
        self.term = term
        self.members = members
        self.coverage = Coverage(members, manifest, own_copy=settings.own_copy, joined_epochs=not settings.partial_sums)
        self.layers = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers]
        self._own = str(network.peer_id)
        self._manifest = manifest
        self._remote = remote
        self._engine = engine
        self._settings = settings
        self._tell_changed = changed
        self._ask_f32 = output_ranks(self.layers)
        self._q8_layers = quantizable(manifest, settings.activations)
        self._prover = Prover(
            network, manifest, reference, self, partial_sums=settings.partial_sums, ask_f32=self._ask_f32
        )
        self._checking = Checking(
            self, members, self.coverage, manifest, reference, remote,
            output=self._ask_f32, q8_layers=self._q8_layers, partial_sums=settings.partial_sums,
        )  # fmt: skip
        self._repeating = Repeating(self, members, self.coverage)
        self.auditing = Auditing(self, members, judge, self._repeating, board, secrets.token_bytes(_SECRET_BYTES))
        remote.tap = self.auditing.tap
        self.last_epoch = 0  # the newest of this term; set before `run` to what another model's placements took
        self._specs = Specs(members, self.layers, settings.replicas, self._ask_f32)
        self._considered: dict[str, WorkerSpec] = {}  # as the last attempt to place took them into account
        self._inheritance = Inheritance(manifest, members, inherited, on_record, self.auditing.records)
        if inherited is not None:  # whatever model it was of
            self.auditing.adopt(inherited.audits)
        self._classes = self._inheritance.classes()
        self._shares = Shares(self, members, self.coverage, manifest, sources or (lambda _peer: (self._own,)))
        self._changed = trio.Event()
        self._started_s = trio.current_time()

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A worker said hello: if it is a holder, it gets its assignment (again)."""
        peer = str(member.peer)
        self.auditing.joined(member)
        if self.share_of(peer) is not None:
            self._considered.setdefault(peer, self._specs.of(peer))  # of a placement that was inherited
        self.assign(member)
        self._changed.set()

    def left(self, member: Member) -> None:
        target = self.coverage.target
        if target is None or str(member.peer) not in target.peers():
            self._considered.pop(str(member.peer), None)  # it may come back with more memory
        self.usable_changed()

    def spoke(self, member: Member) -> None:
        """A worker fell silent, answers again after it had, or wants to hold nothing more (or does again)."""
        self.usable_changed()
        self._prover.try_to_prove(member)

    def progressed(self, member: Member, progress: Progress) -> None:
        share = self.share_of(str(member.peer))
        if share is None or (progress.term, progress.epoch) != (share.term, share.epoch) or member.resting:
            return
        if progress.phase == "failed":
            self._prover.failed(member, progress.error or Internal("the worker could not load, and does not say why"))
        elif progress.phase == "loaded":
            self._prover.try_to_prove(member)
        else:
            member.phase = "loading"

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        if (record := self._inheritance.record) is not None:
            self.last_epoch += 1
            self.coverage.current = replace(record.placement, term=self.term, epoch=self.last_epoch)
            _log.info("placement.inherited", term=self.term, epoch=self.last_epoch, was=record.name)
            for member in self.members.present():
                self.joined(member)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prover.run)
            nursery.start_soon(self._checking.run)
            nursery.start_soon(self.auditing.run, self._settings.audits)
            while True:
                self._changed = trio.Event()
                again_s = await self._decide()
                self.members.forget_absent()
                self._publish()
                with trio.move_on_after(again_s):
                    await self._changed.wait()

    async def _decide(self) -> float:
        """Place anew if it is time; in how many seconds to look again, if nothing happens."""
        now, target = trio.current_time(), self.coverage.target
        holders = frozenset(target.peers()) if target is not None else frozenset()
        lost = dict.fromkeys(holders, self._started_s)  # an inherited holder gets its time to come
        seen = self._specs.roll_call(holders, now)
        present, again_s = seen.present, min(AGAIN_S_MAX, seen.again_s)
        decision = decide(
            holders,
            frozenset(self._considered),
            present,
            lost | seen.lost_since_s,
            expected=self._settings.workers_expected,
            settle_s=self._settings.settle_s,
            now=now,
            uncovered=target is not None and not self.coverage.complete and lacks(target, present.keys()),
            outdated=any(self._is_outdated(peer) for peer in holders & present.keys()),
        )
        if decision.waiting_for:
            self.coverage.waiting_for = decision.waiting_for
        if decision.workers is not None:
            await self._place(sorted(decision.workers))
            self._give_up(holders - decision.workers, now)
        return again_s if decision.again_s is None else min(again_s, decision.again_s)

    def _is_outdated(self, peer: str) -> bool:
        """Whether what the hard rules look at has changed since the last attempt to place."""
        before = self._considered.get(peer)
        return before is not None and hard_facts(self._specs.of(peer)) != hard_facts(before)

    def _give_up(self, peers: frozenset[str], now: float) -> None:
        """These were holders, and are there, but fail."""
        for peer in peers:
            member = self.members.by_peer.get(PeerId(peer))
            if member is not None and member.stream_up and may_hold(member):
                member.given_up += 1
                member.excluded_until_s = now + exclusion_s(member.given_up)
                member.failing_since_s, member.failures = None, 0
                _log.warning("placement.given_up", peer=peer, name=member.name, seconds=exclusion_s(member.given_up))

    async def _place(self, workers: list[str]) -> None:
        specs = [self._specs.of(peer) for peer in workers]
        newcomers = [peer for peer in workers if peer not in self._considered]
        self._considered = {spec.peer: spec for spec in specs}
        attempt = partial(
            place,
            self.layers,
            term=self.term,
            epoch=self.last_epoch + 1,
            previous=self._shown,
            newcomers=newcomers,
            replicas=self._settings.replicas,
            output=self._ask_f32,
        )
        work_out = partial(_place_sparing, self._own, specs, attempt)
        try:
            if len(specs) * sum(layer.n_expert for layer in self.layers) <= _INLINE_MAX:
                placement = work_out()
            else:
                placement = await trio.to_thread.run_sync(work_out)
        except PlacementImpossible as error:
            self.coverage.waiting_for = f"more memory: {error.message}"
            _log.warning("placement.impossible", error=error.message)
            return
        if self.coverage.target is not None and placement.holders == self.coverage.target.holders:
            return  # nobody is better placed than now
        self.last_epoch += 1
        self.coverage.wanted = placement
        self.coverage.waiting_for = "its workers to load and prove their experts"
        names = [self.coverage.name(peer) for peer in workers]
        _log.info("placement.made", term=self.term, epoch=placement.epoch, workers=names)
        self._shares.begin_to_change(placement)
        self.usable_changed()

    def start_change_over(self, member: Member) -> None:
        self._prover.start(self._change_over, member)

    async def _change_over(self, member: Member) -> None:
        await self._answered()
        self.assign(member)

    async def _answered(self) -> None:
        """Wait until what was dispatched to old shares, under the epoch's old name, has been answered."""
        await self._engine.step_boundary()
        await self._repeating.answered()
        await self._checking.answered()

    # -- what the prover asks and tells -------------------------------------------------------------------------

    def share_of(self, peer: str) -> Placement | None:
        return self._shares.of(peer)

    def assign(self, member: Member) -> None:
        self._shares.assign(member)

    def usable_changed(self) -> None:
        """Somebody can be used, or cannot any more."""
        self._publish()
        self._shares.let_go()
        self._changed.set()

    def believed(self, member: Member, share: Placement) -> Agreement | None:
        self.auditing.expect(member)
        found = self._inheritance.believed(member, share)
        if found is not None and self._inheritance.was_unfit(member):
            member.unfit = Imprecise(f"peer {member.name} was found imprecise by the leader before", peer=member.peer)
            self.auditing.found_unfit(member, "probe")
        return found

    def spend(self, member: Member) -> None:
        self._inheritance.spend(member)

    def found_unfit(self, member: Member) -> None:
        self.auditing.found_unfit(member, "probe")

    def found_imprecise(self, member: Member) -> None:
        self.auditing.found_unfit(member, "service")
        self.fitness_changed(member)

    def found_precise(self, member: Member, precise: bool) -> None:
        self.auditing.found_precise(member, precise)

    def found_wrong(self, member: Member, error: SomethingElse) -> None:
        self.auditing.found_wrong(member, error)

    # -- what audits tell ---------------------------------------------------------------------------------------

    def fitness_changed(self, member: Member) -> None:
        """It may hold no output rank any more, or may again: a new placement moves them, and a successor is told."""
        self._inheritance.leave(self.coverage)
        self._changed.set()

    def convicted(self, member: Member, trusted: int) -> None:
        """It gets no work any more, and what it had a part in since that answer is made anew, where that can be."""
        self.usable_changed()
        find = partial(self.auditing.tap.used_since, str(member.peer), trusted)
        self._engine.distrust(find, self.auditing.settling.telling())
        self._inheritance.leave(self.coverage)

    def doubted(self, requests: Sequence[str]) -> None:
        self._engine.distrust(lambda: requests, self.auditing.settling.telling())

    def reconsider(self, member: Member) -> None:
        """It may hold experts again."""
        member.excluded_until_s, member.given_up = 0.0, 0
        member.failing_since_s, member.failures, member.error = None, 0, None
        self.assign(member)
        self._changed.set()

    @property
    def idle(self) -> bool:
        """Nobody waits for a token."""
        return self._engine.statistics().batcher.running == 0

    async def proven(self) -> None:
        """Begin the wanted epoch once it is proven; tell the workers which epoch runs.

        That is when all its workers have proven it, or, where the present one falls short, one for each expert.
        """
        wanted = self.coverage.wanted
        self._publish()
        if wanted is not None and self.coverage.is_proven(wanted, whole=self.coverage.complete):
            self.coverage.current, self.coverage.wanted = wanted, None
            self._shares.changed()
            _log.info("epoch.begun", term=wanted.term, epoch=wanted.epoch)
        self.usable_changed()
        self._inheritance.leave(self.coverage)
        await self._answered()
        current = self.coverage.current
        if current is None or self.coverage.wanted is not None:
            return  # to begin the old one (again) would end the name of the new one
        for member in self.members.present():
            if member.is_usable(current.term, current.epoch):
                member.tell(Begin(current.term, current.epoch))

    def _publish(self) -> None:
        """Give the decode thread the current epoch with the links that are usable at this moment."""
        self.coverage.refresh()
        self._remote.set_routing(
            make_routing(
                self.coverage, self.members, self._classes,
                q8_layers=self._q8_layers, ask_f32=self._ask_f32, partial_sums=self._settings.partial_sums,
            )
        )  # fmt: skip
        self._tell_changed()

    # -- reports ------------------------------------------------------------------------------------------------

    @property
    def _shown(self) -> Placement | None:
        return self.coverage.current or self.coverage.wanted

    def outline(self, without: str | None) -> Outline:
        """The model and the workers that are here, but for one, without their names."""
        others = [spec for spec in self._specs.there() if spec.peer != without]
        return Outline.of_model(self._manifest, others, self._settings.replicas)

    def describe(self) -> PlacementReport | None:
        """The placement that serves, or is prepared, on the workers as they are now; None if there is none."""
        return None if self._shown is None else self._specs.describe(self._shown)

    def wrong_outputs(self) -> tuple[str, ...]:
        """The output ranks on workers that are not right for them, as sentences."""
        return () if self._shown is None else self._specs.wrong_outputs(self._shown)

    def without(self, peer: str) -> Loss | None:
        """What the loss of a peer would cost; None if there is no placement."""
        return None if self._shown is None else self._specs.without(self._shown, peer)


def _place_sparing(
    own: str, specs: Sequence[WorkerSpec], attempt: Callable[[list[WorkerSpec]], Placement]
) -> Placement:
    """A placement on others than this node, which has enough to do as a leader, or on it, too, if it must be.

    Raises PlacementImpossible as `attempt` does.
    """
    others = [spec for spec in specs if spec.peer != own]
    try:
        return attempt(apart(others))
    except PlacementImpossible:
        if len(others) == len(specs):
            raise
        return attempt(apart(specs))
