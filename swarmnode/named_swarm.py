"""A fixed set of machines: the configuration names the leader, nobody is elected, and anybody who knows it may join.

    leader:  shards, status, pings, model, decode thread, placement, prompts
    worker:  shards, status, pings, membership, loading, experts

Benchmarks use it, and whoever wants a leader that never changes. Each node is what its commands need, too
(handlers.Services).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil
import trio

from backends.device import Device
from capabilities.errors import UsageError
from swarmnode import leadership
from swarmnode.asker import Asker, FollowingAsker
from swarmnode.compute import choose_compute
from swarmnode.config import Config
from swarmnode.durable import next_counter
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.machine import machine_name
from swarmnode.member_messages import WIRE_VERSION, Hello
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models
from swarmnode.net.interface import Network, PeerId
from swarmnode.paths import Paths
from swarmnode.pinger import serve_pings
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.shards.store import ShardCache
from swarmnode.status import LeaderStatus, NodeFacts, WorkerStatus
from swarmnode.swarm.record import peer_of
from swarmnode.version import VERSION
from swarmnode.worker.service import Worker


class _NamedNode:
    """What commands of a swarm without elections have in common."""

    leader: Leader | None

    def active_model(self) -> str | None:
        active = None if self.leader is None else self.leader.active
        return None if active is None else active.manifest.id

    def models_changed(self) -> None:
        if self.leader is not None:
            self.leader.models_changed()


class NamedLeader(_NamedNode):
    """The peer that leads."""

    def __init__(self, network: Network, config: Config, paths: Paths, threads: int) -> None:
        self.models = Models(paths.models)
        serve_pings(network)
        ShardService(Serving(self.models, None).find).register(network)
        choose = partial(ModelChoice(paths.data / "model", config.leader.model).open, self.models)
        trunks, term = Trunks(config.leader, threads), next_counter(paths.data / "term")
        self.leader: Leader = Leader(LeaderProtocols(network), trunks, choose, config, threads, term)
        device = Device(config.compute.device, threads=threads)
        facts = NodeFacts.of(config, device.name, device.info.description, threads, 0)
        self._view = LeaderStatus(network, self.leader, facts)
        self._view.register()

    @property
    def asker(self) -> Asker:
        return self.leader

    async def status(self) -> Mapping[str, Any]:
        return self._view.view()

    def check_may_add(self) -> None:
        pass

    async def run(self) -> None:
        await self.leader.run()


class NamedWorker(_NamedNode):
    """A peer that computes for it. Make it with `open`."""

    leader = None

    def __init__(self, worker: Worker, asker: Asker, view: WorkerStatus, models: Models) -> None:
        self.models = models
        self.asker = asker
        self._worker = worker
        self._view = view

    @classmethod
    async def open(cls, network: Network, config: Config, paths: Paths, threads: int) -> NamedWorker:
        """The worker, with its cache read from the disk."""
        compute = choose_compute(config.compute, threads)
        budget = config.node.memory_bytes(psutil.virtual_memory().available)
        disk = config.node.disk_bytes(psutil.disk_usage(str(paths.shards)).free)
        facts = NodeFacts.of(config, compute.name, compute.device, threads, budget)
        host = config.node.host or await trio.to_thread.run_sync(machine_name, paths.data)

        def hello() -> Hello:
            return Hello(
                name=facts.name,
                version=VERSION,
                wire=WIRE_VERSION,
                backend=compute.name,
                device=compute.device,
                threads=threads,
                memory_budget_bytes=budget,
                q8_0=compute.rounds_as_ggml_cpu,
                host=host,
            )

        cache = await trio.to_thread.run_sync(ShardCache, paths.shards, disk)
        serve_pings(network)
        models = Models(paths.models, cache)
        ShardService(Serving(models, cache).find).register(network)
        named = leadership.NamedLeader(PeerId(peer_of(config.swarm.leader)), config.swarm.leader)
        worker = Worker(network, named, hello, cache, budget, compute.make)
        asker = FollowingAsker(network, named, refusal=worker.refusal, no_leader_s=0.0)
        return cls(worker, asker, WorkerStatus(network, worker, facts), models)

    async def status(self) -> Mapping[str, Any]:
        return await self._view.view()

    def check_may_add(self) -> None:
        hint = "Run the command on the leader's machine."
        raise UsageError("this node is a worker; only the leader adds models", hint=hint)

    async def run(self) -> None:
        await self._worker.run()
