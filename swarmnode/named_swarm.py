"""A fixed set of machines: the configuration names the leader, nobody is elected, and anybody who knows it may join.

    leader:  shards, status, pings, model, decode thread, placement, prompts
    worker:  shards, status, pings, membership, loading, experts

Benchmarks use it, and whoever wants a leader that never changes. Each node is what its commands need, too
(handlers.Services).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from backends.device import Device
from capabilities.errors import PeerMistake, UsageError
from scheduler.placement_record import PlacementRecord
from swarmnode.asker import Asker, FollowingAsker
from swarmnode.backbone.kept import Kept, LeaderRecord
from swarmnode.config import Config
from swarmnode.durable import next_counter
from swarmnode.explaining import Known, explain, find_peer
from swarmnode.fetch_model import Origin, fetch_model
from swarmnode.kept_requests import KeepingAsker, KeptRequests
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.leadership import NamedLeader
from swarmnode.machine_parts import MachineParts
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models, OnProgress
from swarmnode.net.interface import Network, PeerId
from swarmnode.paths import Paths
from swarmnode.pinger import serve_pings
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.status import LeaderStatus, NodeFacts, NoMesh, Status, counters
from swarmnode.status_service import NodeStatus, ask_leader, placement_request, serve_status
from swarmnode.swarm.record import peer_of
from swarmnode.worker.service import Worker

_log = structlog.get_logger(__name__)

_HINT = 'That takes a swarm of members: [swarm] role = "member" in the configuration, then `swarmctl init` or `join`.'


class _NamedNode:
    """What commands of a swarm without elections have in common."""

    leader: Leader | None

    def __init__(self, config: Config, paths: Paths) -> None:
        self.kept = KeptRequests(paths.requests, config.requests.keep)

    def _keeping(self, asker: Asker) -> Asker:
        return KeepingAsker(asker, self.kept, self.active_model)

    async def status(self) -> Mapping[str, Any]:
        raise NotImplementedError

    async def peer(self, name: str) -> Mapping[str, Any]:
        status = await self.status()
        peer = find_peer(name, status)
        verdict = None if self.leader is None else self.leader.board.verdict_of(peer)
        return explain(peer, status, Known(verdict=verdict))

    async def drain(self, on: bool) -> Mapping[str, Any]:
        raise UsageError("the configuration names who does what here: nobody can take over", hint=_HINT)

    async def use_model(self, name: str) -> Mapping[str, Any]:
        hint = f'Set model = "{name}" under [leader] in the leader\'s configuration, and restart it.'
        raise UsageError("the configuration names the model here", hint=hint)

    async def fetch_model(self, target: Path, bytes_max: int | None, progress: OnProgress) -> Mapping[str, Any]:
        raise UsageError("this node has the model's file: it leads with it")

    def active_model(self) -> str | None:
        active = None if self.leader is None else self.leader.active
        return None if active is None else active.manifest.id

    def models_changed(self) -> None:
        if self.leader is not None:
            self.leader.models_changed()


class _OwnRecord:
    """What this leader leaves to itself for after a restart: who holds what, and who has proven it.

    Not what its audits came to: nobody signs a release here, so a restart audits everybody like a newcomer.
    """

    def __init__(self, folder: Path, me: PeerId, term: int) -> None:
        self._kept = Kept(folder, str(me))
        self._term = term
        self._newest: LeaderRecord | None = None
        self._news = trio.Event()

    def load(self) -> PlacementRecord | None:
        """Waits for the disk. None if there is none that can be read."""
        try:
            kept = self._kept.load_record()
            return None if kept is None else replace(PlacementRecord.from_bytes(kept.data), audits={})
        except (PeerMistake, OSError) as error:
            _log.warning("leader.record_unusable", reason=str(error))
            return None

    def put(self, data: bytes) -> None:
        self._newest = LeaderRecord(self._term, data)
        self._news.set()

    async def run(self) -> None:
        """Write the newest, and again whenever there is a newer one."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            assert self._newest is not None
            try:
                await trio.to_thread.run_sync(self._kept.store_record, self._newest)
            except OSError as error:  # a restart takes longer then
                _log.error("leader.record_not_kept", reason=error.strerror)


class NamedLeaderNode(_NamedNode):
    """The peer that leads."""

    def __init__(self, network: Network, config: Config, paths: Paths, threads: int) -> None:
        super().__init__(config, paths)
        self._network = network
        self.models = Models(paths.models)
        serve_pings(network)
        ShardService(Serving(self.models, None).find).register(network)
        choose = partial(ModelChoice(paths.data / "model", config.leader.model).open, self.models)
        trunks, term = Trunks(config.leader, threads), next_counter(paths.data / "term")
        self._record = _OwnRecord(paths.data, network.peer_id, term)
        self.leader: Leader = Leader(
            LeaderProtocols(network),
            trunks,
            choose,
            config,
            threads,
            term,
            inherited=self._record.load(),
            on_record=self._record.put,
        )
        device = Device(config.compute.device, threads=threads)
        facts = NodeFacts.of(config, device.name, device.info.description, threads, 0)
        self._view = LeaderStatus(network, self.leader, facts, NoMesh())
        serve_status(network, self._answer)

    @property
    def asker(self) -> Asker:
        return self._keeping(self.leader)

    async def status(self) -> Mapping[str, Any]:
        return self._view.view()

    def counters(self) -> Mapping[str, Any]:
        return counters(self._network, None)

    async def placement(self, without: str | None) -> Mapping[str, Any]:
        return self.leader.placement(without)

    async def outline(self) -> Mapping[str, Any]:
        return self.leader.outline(None)

    def check_may_add(self) -> None:
        pass

    async def _answer(self, request: Mapping[str, Any]) -> Status:
        if request["kind"] == "placement":
            return self.leader.placement(request.get("without"))
        if request["kind"] == "outline":
            return self.leader.outline(request.get("without"))
        return self._view.view()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._record.run)
            await self.leader.run()
            nursery.cancel_scope.cancel()


class NamedWorkerNode(_NamedNode):
    """A peer that computes for it. Make it with `open`."""

    leader = None

    def __init__(
        self, network: Network, config: Config, leader: NamedLeader, models: Models, parts: MachineParts
    ) -> None:
        super().__init__(config, parts.paths)
        self.models = models
        self._network = network
        self._leader = leader
        self._cache = parts.cache
        # Nothing is measured where nothing is chosen by it; the probe compares what counts.
        hello = replace(parts.hello(), accumulates_f32=True, measuring=False)
        self._worker = Worker(network, leader, lambda: hello, parts.cache, parts.budget_bytes, parts.compute.make)
        self._asker = FollowingAsker(network, leader, refusal=self._worker.refusal, no_leader_s=0)
        self._view = NodeStatus(
            network, leader, parts.facts, NoMesh(), self._worker, term=lambda: 0, refusal=self._worker.refusal
        )

    @classmethod
    async def open(cls, network: Network, config: Config, paths: Paths, threads: int) -> NamedWorkerNode:
        """The worker, with its cache read from the disk."""
        parts = await MachineParts.open(config, paths, threads)
        models = Models(paths.models, parts.cache)
        serve_pings(network)
        ShardService(Serving(models, parts.cache).find).register(network)
        leader = NamedLeader(PeerId(peer_of(config.swarm.leader)), config.swarm.leader)
        return cls(network, config, leader, models, parts)

    @property
    def asker(self) -> Asker:
        return self._keeping(self._asker)

    async def status(self) -> Mapping[str, Any]:
        return await self._view.view()

    def counters(self) -> Mapping[str, Any]:
        return counters(self._network, self._worker)

    async def placement(self, without: str | None) -> Mapping[str, Any]:
        request = placement_request(without)
        return await ask_leader(self._network, self._leader, request)

    async def outline(self) -> Mapping[str, Any]:
        return await ask_leader(self._network, self._leader, {"kind": "outline", "without": str(self._network.peer_id)})

    def check_may_add(self) -> None:
        hint = "Run the command on the leader's machine."
        raise UsageError("this node is a worker; only the leader adds models", hint=hint)

    async def fetch_model(self, target: Path, bytes_max: int | None, progress: OnProgress) -> Mapping[str, Any]:
        origin = Origin(self._network, self.active_model() or "", [self._leader.leader.peer])
        return await fetch_model(origin, self.models, self._cache, target, bytes_max, progress)

    def active_model(self) -> str | None:
        return None if (manifest := self._worker.manifest) is None else manifest.id

    async def run(self) -> None:
        await self._worker.run()
