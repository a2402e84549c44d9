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
from collections.abc import Callable
from importlib import import_module

import psutil
import structlog
import trio

from backends.device import Device
from backends.experts import ExpertBackend, GgmlExperts
from backends.numpy_reference import NumpyExperts
from capabilities.errors import UsageError
from swarmnode.config import Config
from swarmnode.control import serve_control
from swarmnode.handlers import Handlers
from swarmnode.identity import Identity, load_or_create_identity, lock_data_folder
from swarmnode.leader.service import Leader
from swarmnode.member_messages import WIRE_VERSION, Hello
from swarmnode.models import Models, OpenModel
from swarmnode.net.interface import Network
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
    with lock_data_folder(paths.data), claim_threads(config.compute.threads) as threads:
        trio.run(_main, config, paths, load_or_create_identity(paths.data), threads)


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


async def _start_leader(
    nursery: trio.Nursery, network: Network, config: Config, paths: Paths, threads: int
) -> None:
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


async def _start_worker(
    nursery: trio.Nursery, network: Network, config: Config, paths: Paths, threads: int
) -> None:
    make_backend, name, description = _backend_maker(config, threads)
    budget = config.node.memory_bytes(psutil.virtual_memory().available)
    disk = config.node.disk_bytes(psutil.disk_usage(str(paths.shards)).free)
    facts = _facts(config, name, description, threads, budget)

    def hello() -> Hello:
        return Hello(
            name=facts.name,
            version=VERSION,
            wire=WIRE_VERSION,
            backend=name,
            device=description,
            threads=threads,
            memory_budget_bytes=budget,
            q8_0=config.compute.backend == "ggml" and not config.compute.factory,
        )

    cache = await trio.to_thread.run_sync(ShardCache, paths.shards, disk)
    worker = Worker(network, config.swarm.leader, hello, cache, budget, make_backend)
    status = WorkerStatus(network, worker, facts)
    handlers = Handlers(status=status.view, asker=worker.asker, models=Models(paths.models), leader=None)
    await nursery.start(serve_control, paths.socket_to_bind(), handlers.table())
    nursery.start_soon(worker.run)


def _backend_maker(config: Config, threads: int) -> tuple[Callable[[], ExpertBackend], str, str]:
    """(maker, name, description of the device) of the configured expert backend.

    `compute.factory` names a class that is called with `threads=` and returns an ExpertBackend.
    """
    if config.compute.factory:
        module, _, attribute = config.compute.factory.partition(":")
        try:
            made = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"compute.factory {config.compute.factory} cannot be loaded: {error}") from error
        return (lambda: made(threads=threads)), config.compute.factory, "factory"
    if config.compute.backend == "numpy":
        return (lambda: NumpyExperts("float32")), "numpy-f32", "NumPy"
    device = Device(config.compute.device, threads=threads)
    return (lambda: GgmlExperts(device)), device.name, device.info.description


def _facts(config: Config, backend: str, device: str, threads: int, budget: int) -> NodeFacts:
    name = config.node.name or socket.gethostname().split(".")[0][:63] or "node"
    return NodeFacts(name, backend, device, threads, budget, time.monotonic())


async def _stop_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            _log.info("daemon.stopping", signal=signal.Signals(number).name)
            scope.cancel()
            return

