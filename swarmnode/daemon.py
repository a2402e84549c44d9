"""The daemon. This file is the whole nursery tree: read it to know what runs.

open the network (libp2p)
  shard service, status service             on the network
  control socket                            for swarmctl
  leader:  pings, model, decode thread, placement, prompts
  worker:  pings, membership, loading, experts
"""

from __future__ import annotations

import signal
import socket
import time

import psutil
import structlog
import trio

from backends.device import Device
from backends.ggml import allow_wide_kernels
from capabilities.errors import UsageError
from swarmnode.compute import choose_compute
from swarmnode.config import Config
from swarmnode.control import serve_control
from swarmnode.handlers import Handlers
from swarmnode.identity import Identity, load_or_create_identity, lock_data_folder
from swarmnode.leader.service import Leader
from swarmnode.member_messages import WIRE_VERSION, Hello
from swarmnode.models import Models, OpenModel
from swarmnode.net.interface import ListenFailed, Network
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.paths import Paths
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import ShardCache
from swarmnode.status import LeaderStatus, NodeFacts, WorkerStatus
from swarmnode.threads import claim_threads
from swarmnode.version import VERSION
from swarmnode.worker.service import Worker

_log = structlog.get_logger(__name__)


def run(config: Config, paths: Paths) -> None:
    """Run the daemon until SIGINT or SIGTERM.

    Raises:
        SwarmError: it cannot start; the message says what to do.
    """
    paths.make()
    if config.leader.fast:
        allow_wide_kernels()
    with lock_data_folder(paths.data), claim_threads(config.compute.threads) as threads:
        try:
            trio.run(_main, config, paths, load_or_create_identity(paths.data), threads)
        except ListenFailed as error:
            hint = "Another program may use the port: change node.listen, or end that program."
            raise UsageError(str(error), hint=hint) from error


async def _main(config: Config, paths: Paths, identity: Identity, threads: int) -> None:
    async with (
        open_libp2p_network(identity, config.node.listen) as network,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_stop_on_signal, nursery.cancel_scope)
        if config.swarm.role == "leader":
            await _start_leader(nursery, network, config, paths, threads)
        else:
            await _start_worker(nursery, network, config, paths, threads)
        _log.info("daemon.started", peer_id=network.peer_id, addresses=network.addresses, threads=threads)
        await trio.sleep_forever()


async def _start_leader(nursery: trio.Nursery, network: Network, config: Config, paths: Paths, threads: int) -> None:
    models = Models(paths.models)
    leader = Leader(network, models, config, threads, paths.data / "term")

    def find(manifest_id: str) -> ServedModel | None:
        opened: OpenModel | None = leader.opened
        return opened.served if opened is not None and opened.manifest.id == manifest_id else None

    ShardService(find).register(network)
    device = Device(config.compute.device, threads=threads)
    facts = _facts(config, device.name, device.info.description, threads, 0)
    status = LeaderStatus(network, leader, facts)
    status.register()
    handlers = Handlers(status=status.view_async, asker=leader, models=models, leader=leader)
    await nursery.start(serve_control, paths.socket_to_bind(), handlers.table())
    nursery.start_soon(leader.run)


async def _start_worker(nursery: trio.Nursery, network: Network, config: Config, paths: Paths, threads: int) -> None:
    compute = choose_compute(config.compute, threads)
    budget = config.node.memory_bytes(psutil.virtual_memory().available)
    disk = config.node.disk_bytes(psutil.disk_usage(str(paths.shards)).free)
    facts = _facts(config, compute.name, compute.device, threads, budget)

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
        )

    cache = await trio.to_thread.run_sync(ShardCache, paths.shards, disk)
    worker = Worker(network, config.swarm.leader, hello, cache, budget, compute.make)
    status = WorkerStatus(network, worker, facts)
    handlers = Handlers(status=status.view, asker=worker.asker, models=Models(paths.models), leader=None)
    await nursery.start(serve_control, paths.socket_to_bind(), handlers.table())
    nursery.start_soon(worker.run)


def _facts(config: Config, backend: str, device: str, threads: int, budget: int) -> NodeFacts:
    name = config.node.name or socket.gethostname().split(".")[0][:63] or "node"
    return NodeFacts(name, backend, device, threads, budget, time.monotonic())


async def _stop_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            _log.info("daemon.stopping", signal=signal.Signals(number).name)
            scope.cancel()
            return
