"""This node's part in its swarm: everything that runs from joining to leaving, on one page.

adverts      who is there, by what they say; the owner's news            swarm/advert_node.py
verdicts     what leaders hold of peers; its own, while this node leads  swarm/verdicts.py
dialer       connections to the backbone                                 backbone/dialer.py
election     votes, and who leads as this node's election sees it        backbone/election_service.py
leadership   this node's word to the members                             backbone/leadership_service.py
watch        who leads: whom the worker obeys, where prompts go          backbone/leader_watch.py
admission    newcomers with an invite                                    swarm/admission.py
shards       what this node holds, to whoever fetches it                 shards/serving.py
worker       experts: assigned, loaded, computed                         worker/service.py
comparing    what other members have computed here, to compare           comparing/service.py
candidate    whether this node may lead, and with which model            candidate.py
leader       while it does                                               leader/service.py
answers      what commands and members are told                          swarm_answers.py
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from backends.manifest import Manifest
from capabilities.advert_content import Phase, Role
from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, SwarmError
from capabilities.held_experts import HeldExperts
from capabilities.membership_certificate import MembershipCertificate
from scheduler.placement_record import PlacementRecord
from swarmnode.asker import FollowingAsker
from swarmnode.backbone.dialer import Dialer
from swarmnode.backbone.election_service import ElectionService
from swarmnode.backbone.leader_watch import LeaderWatch
from swarmnode.backbone.leadership_service import LeadershipService
from swarmnode.candidate import Candidate
from swarmnode.comparing.asking import Asking
from swarmnode.comparing.service import CompareService
from swarmnode.comparing.work import Work
from swarmnode.config import Config
from swarmnode.draining import Draining
from swarmnode.identity import Identity
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.machine_parts import MachineParts
from swarmnode.member_messages import Hello
from swarmnode.mesh import SwarmMesh
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models
from swarmnode.net.interface import Network, PeerId
from swarmnode.pinger import serve_pings
from swarmnode.self_description import Memory, SelfDescription
from swarmnode.shards.borrowing import Borrowing
from swarmnode.shards.pace import Pace
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.status import Status
from swarmnode.status_service import serve_status
from swarmnode.swarm.admission import AdmissionService
from swarmnode.swarm.advert_node import OpenDht, SwarmAdverts, open_swarm_adverts
from swarmnode.swarm.commands import RunningSwarm
from swarmnode.swarm.joining import renew
from swarmnode.swarm.members_only import MembersOnly
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.verdicts import Verdicts
from swarmnode.swarm_answers import SwarmAnswers
from swarmnode.worker.service import Worker

_log = structlog.get_logger(__name__)

_RENEW_S: Final = 60.0
_MEASURE_S: Final = 2.0  # how late another model is noticed; the measurement takes as long
_GOODBYE_S: Final = 1.0
_HAND_OVER_S: Final = 2.0  # a peer that is asked to lead calls the vote at once


class Participant:
    """See the module. Run `run` once; it never ends by itself."""

    def __init__(
        self,
        network: Network,
        config: Config,
        identity: Identity,
        store: SwarmStore,
        models: Models,
        parts: MachineParts,
        open_dht: OpenDht | None = None,
    ) -> None:
        record, me = store.need(), network.peer_id
        self.leader: Leader | None = None
        self._network = network
        self._config = config
        self._identity = identity
        self._store = store
        self._parts = parts
        self._open_dht = open_dht
        self._adverts: SwarmAdverts | None = None
        self.members_only = MembersOnly(network, self._is_member)
        self.dialer = Dialer(network, self._addresses_of, on_reached=self._reached, on_unreached=self._unreached)
        self.election = ElectionService(network, identity, store, self.dialer)
        self.leadership = LeadershipService(network, store, self.election)
        self.verdicts = Verdicts(store, identity, self._mandate)
        self.watch = LeaderWatch(network, store, self.dialer, self.leadership)
        self.asker = FollowingAsker(network, self.watch)
        self.worker = Worker(
            network, self.watch, self._hello, parts.cache, parts.budget_bytes, parts.compute.make,
            config.limits.cpu_percent / 100,
        )  # fmt: skip
        self.trunks = Trunks(config.leader, parts.threads)
        self.protocols = LeaderProtocols(network, lambda: self.watch.leader, self.members_only)
        choice = ModelChoice(parts.paths.data / "model", config.leader.model, record.swarm)
        self.candidate = Candidate(
            network, store, models, parts.cache, choice, self.trunks, self.leadership, self.watch, self._within_reach
        )
        self._draining = Draining(
            parts.availability, self.worker, self.candidate, self._stop_leading, self._policy_changed
        )
        self.running = RunningSwarm(network, self.election.propose, self._spread)
        self.asking = Asking(network, self._addresses_of, self._other_backbone_peers)
        self._work = Work(parts.facts.name, config.compute, self.worker, parts.paths.data, fast=config.leader.fast)
        self._serving = Serving(models, parts.cache)
        self._mesh = SwarmMesh(
            me,
            store,
            lambda: self._adverts,
            lambda: parts.measuring.current,
            leader=lambda: _peer(self.watch),
            load=self.worker.load,
            paused=lambda: parts.availability.reasons,
            cannot_vote=lambda: self.watch.cannot_vote,
            verdict_of=self.verdicts.verdict_of,
            is_heard=self.watch.is_heard,
            connected=network.connected_peers,
        )
        self._describe = SelfDescription(
            name=parts.facts.name,
            host=parts.host_in(record.swarm),
            addresses=lambda: network.addresses,
            roles=self._roles,
            phase=self._phase,
            memory=lambda: Memory(self.worker.bytes_held, parts.budget_bytes),
            held=self.worker.held,
            measured=lambda: parts.measuring.current,
            policy=lambda: self._draining.policy,
        )
        self.answers = SwarmAnswers(
            network, store, self.watch, self.worker, self.verdicts, self._mesh, parts.facts, self.protocols,
            leader=lambda: self.leader, adverts=lambda: self._adverts, describe=self._describe,
        )  # fmt: skip
        self.admission = AdmissionService(
            store,
            identity.sign,
            addresses=self._backbone_addresses,
            seat=self.election.vote_file,
            outline=self.answers.whole_outline,
        )

    async def run(self) -> None:
        # The worker outlives the leader: this node's own may be one of its workers, and must not be lost under a step.
        works = trio.CancelScope(shield=True)

        async def work() -> None:
            with works:
                await self.worker.run()

        async with self._open_adverts() as adverts, trio.open_nursery() as nursery:
            await nursery.start(self.verdicts.run, self._network, adverts.gossip)
            nursery.start_soon(work)
            try:
                await self._run_all_but_the_worker()
            finally:
                works.cancel()

    async def _run_all_but_the_worker(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.dialer.run)
            await nursery.start(self.election.run)
            await nursery.start(self.watch.run)
            self.leadership.register()
            self.admission.register(self._network)
            ShardService(self._serving.find, Pace.of_mbit(self._config.limits.upload_mbit)).register(self.members_only)
            serve_pings(self._network)
            serve_status(self.members_only, self.answers.as_leader)
            CompareService(self._network, self._work, self._is_backbone).register(self.members_only)
            nursery.start_soon(self.candidate.run)
            nursery.start_soon(self._lead)
            nursery.start_soon(self._renew)
            nursery.start_soon(self._draining.follow_availability)
            nursery.start_soon(self._measure_the_model)

    async def goodbye(self) -> None:
        """Before this node goes: let another peer lead, if it does, and tell everybody. Takes seconds at most."""
        with trio.move_on_after(_HAND_OVER_S):
            await self._hand_over()
        with trio.move_on_after(_GOODBYE_S):
            if self._adverts is not None:
                await self._adverts.leave()

    async def _hand_over(self) -> None:
        """Return when another peer leads, or nobody else could."""
        me = self._network.peer_id
        if self.leader is None or self._store.need().backbone.peers == (me,):
            return
        await self.election.hand_over()
        while self.election.leader == me:
            await self.election.changed.wait()

    @asynccontextmanager
    async def _open_adverts(self) -> AsyncIterator[SwarmAdverts]:
        async with open_swarm_adverts(
            self._network, self._store, self._identity, self._describe, self.worker.load,
            open_dht=self._open_dht, lan=self._config.swarm.mdns,
        ) as adverts:  # fmt: skip
            self._adverts = adverts
            with self._parts.measuring.on_change(adverts.changed):  # which outlives this swarm
                yield adverts

    # -- leading ------------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Be the leader whenever this node's election says so, for as long as it does."""
        while True:
            changed, term = self.election.changed, self.election.term
            if self.election.leader != self._network.peer_id:
                await changed.wait()
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lead_term, term)
                while self.election.leader == self._network.peer_id and self.election.term == term:
                    await changed.wait()
                    changed = self.election.changed
                nursery.cancel_scope.cancel()

    async def _lead_term(self, term: int) -> None:
        network, cache = self._network, self._parts.cache
        self.leader = leader = Leader(
            self.protocols,
            self.trunks,
            self.candidate.choose,
            self._config,
            self._parts.threads,
            term,
            borrow=lambda manifest: Borrowing(network, manifest, cache, network.connected_peers).obtain,
            backbone=self._other_backbone_peers,
            on_covers=lambda _: self.candidate.wake(),
            inherited=self._inherited(),
            on_record=self.leadership.set_record,
            verify_member=self._verify_member,
            board=self.verdicts,
            own_classes=lambda: self._parts.own_classes,
        )
        self.candidate.leads(leader)
        try:
            with self._parts.measuring.on_change(leader.measured):
                await leader.run()
        finally:
            self.leader = None
            self.candidate.leads(None)

    def _mandate(self) -> Mandate | None:
        """Of the term that this node leads now."""
        mandate, me = self.election.mandate, self._network.peer_id
        leads = mandate is not None and mandate.leader == me and self.election.leader == me
        return mandate if leads else None

    def _inherited(self) -> PlacementRecord | None:
        """What the leader before has left: who holds what, and who has proven it."""
        left = self.watch.record
        if left is None:
            return None
        try:
            return PlacementRecord.from_bytes(left.data)
        except PeerMistake as mistake:
            _log.warning("leader.record_unusable", term=left.term, reason=mistake.message)
            return None

    def _other_backbone_peers(self) -> list[PeerId]:
        """Those that are connected."""
        backbone = self._store.need().backbone.peers
        return [peer for peer in self._network.connected_peers() if peer in backbone]

    def _within_reach(self, model: str) -> Iterator[HeldExperts]:
        """What this node and the peers that are connected to it hold of a model, as their adverts say."""
        adverts = self._adverts
        if adverts is None:
            return
        connected = set(self._network.connected_peers())
        said = [view.advert.content for peer, view in adverts.peers().items() if peer in connected]
        for content in (*said, self._describe()):
            yield from (held for held in content.held if held.model == model)

    # -- measuring ----------------------------------------------------------------------------------------------

    async def _measure_the_model(self) -> None:
        """Measure this node's kernels on the very types and widths of the model that it is to compute."""
        while True:
            if (manifest := self.worker.manifest or self._led_manifest()) is not None:
                self._parts.measuring.for_model(manifest)
            await trio.sleep(_MEASURE_S)

    def _led_manifest(self) -> Manifest | None:
        """Of the model that this node serves as the leader: it may hold none of its experts."""
        active = None if self.leader is None else self.leader.active
        return None if active is None else active.manifest

    # -- belonging ----------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Have this member's certificate renewed where its issuer has left the backbone."""
        while True:
            record = self._store.record
            if record is not None and record.needs_renewal:
                for peer in record.backbone.peers:
                    if self.dialer.is_connected(peer):
                        with contextlib.suppress(SwarmError, OSError):
                            certificate = await renew(self._network, PeerId(peer), record)
                            await trio.to_thread.run_sync(self._store.renew, certificate)
                            break
            await trio.sleep(_RENEW_S)

    def _spread(self, news: Sequence[bytes]) -> None:
        if self._adverts is not None:
            self._adverts.spread(news)

    def _backbone_addresses(self) -> list[str]:
        backbone = self._store.need().backbone.peers
        others = [address for peer in backbone for address in self._addresses_of(peer)]
        return [*self._network.addresses, *others]

    def _verify_member(self, peer: str, certificate: bytes) -> None:
        """PeerMistake unless the peer is a member by this certificate, and not banned."""
        self._store.need().verify_member(peer, MembershipCertificate.from_bytes(certificate))

    def _is_member(self, peer: PeerId) -> bool:
        """Whether the peer, whose key was proven, has shown that it belongs: an advert counts by its certificate."""
        record = self._store.record
        if record is None or record.bans.is_banned(peer):
            return False
        known = (record.peer, *record.backbone.peers)
        return peer in known or (self._adverts is not None and peer in self._adverts.peers())

    # -- what this node says of itself --------------------------------------------------------------------------

    def _hello(self) -> Hello:
        record = self._store.need()
        return self._parts.hello(certificate=record.certificate.to_bytes(), swarm=record.swarm)

    def _is_backbone(self) -> bool:
        record = self._store.record
        return record is not None and record.peer in record.backbone.peers

    def _roles(self) -> list[Role]:
        return [Role.BACKBONE, Role.WORKER] if self._is_backbone() else [Role.WORKER]

    def _phase(self) -> Phase:
        serves = self.leader is not None and self.leader.active is not None  # perhaps it holds no experts besides
        return Phase.READY if serves else self.worker.phase

    def _addresses_of(self, peer: str) -> Sequence[str]:
        if self._adverts is not None:
            return self._adverts.addresses_of(peer)
        record = self._store.record
        return () if record is None else record.addresses

    def _reached(self, peer: PeerId) -> None:
        if self._adverts is not None:
            self._adverts.reached(peer)

    def _unreached(self, peer: PeerId, address: str, reason: str) -> None:
        if self._adverts is not None:
            self._adverts.unreachable(peer, address, reason)

    # -- what the commands need ---------------------------------------------------------------------------------

    async def drain(self, on: bool) -> Status:
        return {"draining": await self._draining.drain(on)}

    async def _stop_leading(self) -> None:
        if self.leader is not None:
            await self.election.hand_over()

    def _policy_changed(self) -> None:
        if self._adverts is not None:
            self._adverts.changed()

    async def use_model(self, name: str) -> Status:
        return await self.candidate.use(name)

    def models_changed(self) -> None:
        self.candidate.models_changed()


def _peer(watch: LeaderWatch) -> str | None:
    return None if watch.leader is None else watch.leader.peer
