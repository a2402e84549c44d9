"""The daemon. This file is the whole nursery tree: read it to know what runs.

control socket, for swarmctl
HTTP, for everybody else                                            api/service.py
the node
  a member of a swarm, or of none yet                               node.py, participant.py
  or the leader that the configuration names, or one of its workers  named_swarm.py
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import structlog
import trio

from backends.ggml import allow_wide_kernels
from swarmnode.api.service import Http
from swarmnode.comparing.commands import CompareCommands
from swarmnode.config import Config
from swarmnode.control import serve_control
from swarmnode.durable import sweep
from swarmnode.files_limit import raise_files_limit
from swarmnode.handlers import Handlers
from swarmnode.identity import Identity, load_or_create_identity, lock_data_folder
from swarmnode.models import Models
from swarmnode.named_swarm import NamedLeaderNode, NamedWorkerNode
from swarmnode.node import Node, open_own_network
from swarmnode.paths import Paths
from swarmnode.threads import claim_threads

_log = structlog.get_logger(__name__)


def run(config: Config, paths: Paths) -> None:
    """Run the daemon until SIGINT or SIGTERM.

    Raises:
        SwarmError: it cannot start; the message says what to do.
    """
    paths.make()
    raise_files_limit()
    if config.leader.fast:
        allow_wide_kernels()
    with lock_data_folder(paths.data), claim_threads(config.compute.threads) as threads:
        sweep([paths.data, paths.data / "owner", paths.run, paths.requests])
        Models(paths.models).sweep()
        trio.run(_main, config, paths, load_or_create_identity(paths.data), threads)


async def _main(config: Config, paths: Paths, identity: Identity, threads: int) -> None:
    if config.swarm.role != "member":
        await _run_named(config, paths, identity, threads)
        return
    async with trio.open_nursery() as nursery:
        node = await Node.open(config, paths, identity, threads)
        nursery.start_soon(_stop_on_signal, nursery.cancel_scope, node.goodbye)
        http = Http(config.api, node, paths)
        await nursery.start(http.run)
        handlers = {**Handlers(node, http).table(), **node.commands.table(), **CompareCommands(node).table()}
        await nursery.start(serve_control, paths.socket_to_bind(), handlers)
        _log.info("daemon.started", peer_id=identity.peer_id, threads=threads)
        await node.run()


async def _run_named(config: Config, paths: Paths, identity: Identity, threads: int) -> None:
    async with open_own_network(identity, config) as network, trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, nursery.cancel_scope)  # the network is there until all else has ended
        node: NamedLeaderNode | NamedWorkerNode
        if config.swarm.role == "leader":
            node = NamedLeaderNode(network, config, paths, threads)
        else:
            node = await NamedWorkerNode.open(network, config, paths, threads)
        http = Http(config.api, node, paths)
        await nursery.start(http.run)
        await nursery.start(serve_control, paths.socket_to_bind(), Handlers(node, http).table())
        _log.info("daemon.started", peer_id=network.peer_id, addresses=network.addresses, threads=threads)
        await node.run()


async def _nothing() -> None:
    pass


async def _stop_on_signal(scope: trio.CancelScope, goodbye: Callable[[], Awaitable[None]] = _nothing) -> None:
    """End the daemon at the first signal, after `goodbye`; at the second one without."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                _log.info("daemon.stopping", signal=signal.Signals(number).name)
                if nursery.child_tasks:
                    scope.cancel()
                nursery.start_soon(_end, scope, goodbye)


async def _end(scope: trio.CancelScope, goodbye: Callable[[], Awaitable[None]]) -> None:
    await goodbye()
    scope.cancel()
