"""Placement, driven: decide, assign, load, probe, and only then begin the epoch.

`current` is the epoch that serves, `wanted` one that is being prepared. A worker that comes back is assigned what it
held, proves it again, and serves; the swarm is ready exactly when every holder of the current epoch is usable. The
decisions themselves are pure (scheduler/settling.py, scheduler/placement.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import structlog
import trio

from backends.activations import q8_0_is_exact
from backends.manifest import Manifest
from backends.program import ExpertProgram
from capabilities.errors import Internal, NotReady, SwarmError
from scheduler.dispatch import LayerRouting
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, even_split
from scheduler.settling import Present, decide
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.link import PeerLink
from swarmnode.leader.members import Member, Members
from swarmnode.leader.probe import ProbeReference, probe
from swarmnode.leader.remote_experts import RemoteExperts, Routing
from swarmnode.member_messages import Assign, Begin, Progress
from swarmnode.net.interface import Network, PeerId
from swarmnode.wire import Q8_0_BLOCK_VALUES

_log = structlog.get_logger(__name__)

PROVE_RETRY_S: Final = 3.0
RELOAD_RETRY_S: Final = 5.0

ActivationsChoice = Literal["auto", "f32", "q8_0"]


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """From the configuration: see SwarmConfig and LeaderConfig."""

    workers_expected: int
    settle_s: float
    activations: ActivationsChoice


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
        self.current: Placement | None = None
        self.wanted: Placement | None = None
        self.waiting_for = "workers to join"
        self._network = network
        self.members = members
        self._manifest = manifest
        self._reference = reference
        self._remote = remote
        self._engine = engine
        self._settings = settings
        self._epoch = 0
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._proving: set[PeerId] = set()
        self._q8_layers = self._quantizable(settings.activations)

    # -- what others ask ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that serves, 0 before the first."""
        return 0 if self.current is None else self.current.epoch

    def refusal(self) -> NotReady | None:
        """Why no prompt can be served now, or None."""
        if self.current is None:
            return NotReady(f"the swarm is not ready: it waits for {self.waiting_for}")
        away = [peer for peer in self.current.peers() if not self._usable(peer)]
        if not away:
            return None
        names = ", ".join(self._name(peer) for peer in away)
        lost = sum(len(experts) for peer in away for experts in self.current.held_by(peer).values())
        return NotReady(f"the swarm is not ready: {lost} experts wait for {names}", peer=away[0])

    def copies(self) -> tuple[int, list[dict[str, int]]]:
        """The fewest usable copies of any expert, and the experts that have none."""
        if self.current is None:
            missing = [{"layer": l.layer, "expert": e} for l in self._manifest.layers for e in range(l.n_expert)]
            return 0, missing
        usable = {peer for peer in self.current.peers() if self._usable(peer)}
        fewest, missing = 1 << 30, []
        for layer, holders in self.current.holders.items():
            for expert, peers in enumerate(holders):
                copies = sum(peer in usable for peer in peers)
                fewest = min(fewest, copies)
                if not copies:
                    missing.append({"layer": layer, "expert": expert})
        return fewest, missing

    def state_of(self, member: Member) -> str:
        """joining, loading, ready, suspect or gone, as `status` names it."""
        if not member.stream_up:
            return "gone"
        if member.silent:
            return "suspect"
        placement = self.wanted or self.current
        if placement is None or str(member.peer) not in placement.peers():
            return "joining"
        return "ready" if member.is_usable(placement.term, placement.epoch) else "loading"

    def held_now(self, peer: str) -> int:
        """Experts that this peer serves or is to serve."""
        placement = self.current or self.wanted
        return 0 if placement is None else sum(map(len, placement.held_by(peer).values()))

    def _usable(self, peer: str) -> bool:
        member = self.members.by_peer.get(PeerId(peer))
        return self.current is not None and member is not None and member.is_usable(self.term, self.current.epoch)

    def _name(self, peer: str) -> str:
        member = self.members.by_peer.get(PeerId(peer))
        return member.name if member is not None else peer

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A worker said hello: if it is a holder, it gets its assignment (again)."""
        placement = self.wanted or self.current
        if placement is not None and str(member.peer) in placement.peers():
            self._assign(member, placement)
        self._changed.set()

    def left(self, member: Member) -> None:
        self._publish()
        self._changed.set()

    def spoke(self, member: Member) -> None:
        """A worker fell silent, or answers again after it had."""
        self._publish()
        if not member.silent:
            self._try_to_prove(member)

    def progressed(self, member: Member, progress: Progress) -> None:
        placement = self.wanted or self.current
        if placement is None or (progress.term, progress.epoch) != (placement.term, placement.epoch):
            return
        if progress.phase == "failed":
            member.phase, member.error = "failed", progress.error or Internal("the worker could not load")
            _log.warning("placement.worker_failed", peer=member.peer, name=member.name, error=member.error.to_json())
            self._later(RELOAD_RETRY_S, lambda: self._reassign(member))
        elif progress.phase == "loaded":
            self._try_to_prove(member)
        else:
            member.phase = "loading"

    def _reassign(self, member: Member) -> None:
        placement = self.wanted or self.current
        if placement is not None and member.stream_up and member.phase == "failed":
            self._assign(member, placement)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        async def wait() -> None:
            await trio.sleep(seconds)
            action()

        if self._nursery is not None:
            self._nursery.start_soon(wait)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                self._changed = trio.Event()
                again_s = self._decide()
                self.members.forget_absent()
                with trio.move_on_after(30.0 if again_s is None else min(again_s, 30.0)):
                    await self._changed.wait()

    def _decide(self) -> float | None:
        now = time.monotonic()
        placement = self.wanted or self.current
        members = self.members.by_peer
        decision = decide(
            frozenset(placement.peers()) if placement is not None else frozenset(),
            {str(m.peer): Present(m.joined_s) for m in self.members.present()},
            {str(peer): m.lost_s for peer, m in members.items() if m.lost_s is not None},
            expected=self._settings.workers_expected,
            settle_s=self._settings.settle_s,
            now=now,
        )
        if decision.workers is not None:
            return self._place(sorted(decision.workers))
        if decision.waiting_for:
            self.waiting_for = decision.waiting_for
        elif self.wanted is not None:
            self.waiting_for = "its workers to load and prove their experts"
        return decision.again_s

    def _place(self, workers: list[str]) -> float | None:
        specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in self._manifest.layers]
        budgets = [
            WorkerSpec(peer, self.members.by_peer[PeerId(peer)].hello.memory_budget_bytes) for peer in workers
        ]
        try:
            placement = even_split(specs, budgets, term=self.term, epoch=self._epoch + 1)
        except PlacementImpossible as error:
            self.waiting_for = f"more memory: {error.message}"
            _log.warning("placement.impossible", error=error.message)
            return None
        self._epoch += 1
        self.wanted = placement
        self.waiting_for = "its workers to load and prove their experts"
        _log.info("placement.made", term=self.term, epoch=self._epoch, workers=[self._name(p) for p in workers])
        for peer in placement.peers():
            self._assign(self.members.by_peer[PeerId(peer)], placement)
        return None

    def _assign(self, member: Member, placement: Placement) -> None:
        member.phase, member.error, member.probed = "loading", None, None
        member.tell(
            Assign(
                term=placement.term,
                epoch=placement.epoch,
                model=self._manifest.name,
                manifest=self._manifest.id,
                sources=(str(self._network.peer_id),),
                held=placement.held_by(str(member.peer)),
            )
        )

    # -- proving ------------------------------------------------------------------------------------------------

    def _try_to_prove(self, member: Member) -> None:
        if self._nursery is not None and member.peer not in self._proving and member.stream_up:
            self._proving.add(member.peer)
            self._nursery.start_soon(self._prove, member)

    async def _prove(self, member: Member) -> None:
        """Open the link if there is none, probe what the worker should hold, and let it serve."""
        placement = self.wanted or self.current
        progress = member.progress
        try:
            if placement is None or progress is None or progress.phase != "loaded" or member.silent:
                return
            if (progress.term, progress.epoch) != (placement.term, placement.epoch):
                return
            member.phase = "probing"
            link = await self._open_link(member)
            held = placement.held_by(str(member.peer))
            member.agreement = await probe(
                link, self._reference, self._manifest, held, term=placement.term, epoch=placement.epoch
            )
            member.probed, member.phase, member.error = (placement.term, placement.epoch), "ready", None
            _log.info(
                "probe.passed",
                peer=member.peer,
                name=member.name,
                epoch=placement.epoch,
                experts=sum(map(len, held.values())),
                bit_identical=member.agreement.bit_identical,
            )
            await self._begin_if_proven(placement)
        except SwarmError as error:
            member.phase, member.error = "failed", error
            _log.warning("probe.failed", peer=member.peer, name=member.name, error=error.to_json())
            self._later(PROVE_RETRY_S, lambda: self._try_to_prove(member))
        finally:
            self._proving.discard(member.peer)

    async def _open_link(self, member: Member) -> PeerLink:
        if member.link is not None and member.link.closed is None:
            return member.link
        assert self._nursery is not None
        link = member.link = PeerLink(member.peer, member.name)
        self._nursery.start_soon(self._run_link, member, link)
        if not await link.wait_up() and link.closed is not None:
            raise link.closed
        return link

    async def _run_link(self, member: Member, link: PeerLink) -> None:
        await link.run(self._network)
        if member.link is link:
            member.probed = None
            member.phase = "loading"
            self._publish()
            if member.stream_up and not member.silent:
                self._later(PROVE_RETRY_S, lambda: self._try_to_prove(member))

    async def _begin_if_proven(self, placement: Placement) -> None:
        members = [self.members.by_peer.get(PeerId(peer)) for peer in placement.peers()]
        usable = [m for m in members if m is not None and m.is_usable(placement.term, placement.epoch)]
        if placement is self.wanted:
            if len(usable) < len(members):
                return
            self.current, self.wanted = placement, None
            _log.info("epoch.begun", term=placement.term, epoch=placement.epoch)
        self._publish()
        await self._engine.step_boundary()  # what was dispatched under the old epoch has been answered
        for member in usable:
            member.tell(Begin(placement.term, placement.epoch))
        self._changed.set()

    def _publish(self) -> None:
        """Give the decode thread the current epoch with the links that are usable at this moment."""
        placement = self.current
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
