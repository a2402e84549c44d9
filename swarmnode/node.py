"""A daemon that belongs to a swarm, or to none yet: it takes part for as long as its record says so.

The record (swarm/store.py) is what makes a member. `swarmctl init`, `join` and `leave` change it while the daemon runs;
each time the network is closed and opened again under the new swarm's key, with everything that takes part in it
(participant.py). Outside of a swarm the daemon listens nowhere, leads nothing, and waits for its user.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from capabilities.errors import NotReady, UsageError
from swarmnode.asker import Asker
from swarmnode.comparing.asking import Asking
from swarmnode.config import Config
from swarmnode.fetch_model import fetch_model
from swarmnode.identity import Identity
from swarmnode.kept_requests import KeepingAsker, KeptRequests
from swarmnode.leader.service import Leader
from swarmnode.machine_parts import MachineParts
from swarmnode.models import Models, OnProgress
from swarmnode.net.interface import ListenFailed
from swarmnode.net.kademlia import open_kademlia
from swarmnode.net.libp2p_host import Libp2pNetwork, open_libp2p_network
from swarmnode.participant import Participant
from swarmnode.paths import Paths
from swarmnode.status import Status, peer_row
from swarmnode.swarm.commands import RunningSwarm, SwarmCommands
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.version import VERSION

_END_S: Final = 8.0  # a step that runs has 5 s to end

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_own_network(
    identity: Identity, config: Config, *, psk: bytes | None = None
) -> AsyncIterator[Libp2pNetwork]:
    """Listen where the configuration says. UsageError where that cannot be: the daemon ends with it."""
    async with AsyncExitStack() as stack:
        opening = open_libp2p_network(identity, config.node.listen, psk=psk)
        try:
            network = await stack.enter_async_context(opening)
        except ListenFailed as error:
            hint = "Another program may use the port: change node.listen, or end that program."
            raise UsageError(str(error), hint=hint) from error
        yield network


class Node:
    """See the module. It is what the commands need, too (handlers.Services). Make it with `open`."""

    def __init__(
        self, config: Config, identity: Identity, store: SwarmStore, models: Models, parts: MachineParts
    ) -> None:
        self.models = models
        self.commands = SwarmCommands(identity, store, running=self._running, changed=self._has_changed)
        self._config = config
        self._identity = identity
        self._store = store
        self._parts = parts
        self.kept = KeptRequests(parts.paths.requests, config.requests.keep)
        self._participant: Participant | None = None
        self._part_scope = trio.CancelScope()
        self._part_ended = trio.Event()
        self._changed = trio.Event()

    @classmethod
    async def open(cls, config: Config, paths: Paths, identity: Identity, threads: int) -> Node:
        """The node, with what its folders hold.

        Raises:
            DamagedState: the swarm's record cannot be read.
            UsageError: the configured backend cannot be had.
        """
        store = await trio.to_thread.run_sync(SwarmStore.open, SwarmFiles(paths.data))
        parts = await MachineParts.open(config, paths, threads)
        return cls(config, identity, store, Models(paths.models, parts.cache), parts)

    async def run(self) -> None:
        """Take part in whatever swarm the record names, from now on. Never ends by itself."""
        async with trio.open_nursery() as machine:
            machine.start_soon(self._parts.measuring.run)
            await self._parts.availability.look()
            machine.start_soon(self._parts.availability.run)
            while True:
                self._changed = trio.Event()
                if self._store.record is None:
                    _log.info("node.alone", peer_id=self._identity.peer_id)
                    await self._changed.wait()
                    continue
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._take_part, self._store.record)
                    await self._changed.wait()
                    await self.goodbye()
                    nursery.cancel_scope.cancel()

    async def _take_part(self, record: SwarmRecord) -> None:
        async with open_own_network(self._identity, self._config, psk=record.psk) as network:
            part = Participant(
                network,
                self._config,
                self._identity,
                self._store,
                self.models,
                self._parts,
                lambda rank: open_kademlia(network, rank, server=bool(network.addresses)),
            )
            self._participant = part
            self._part_scope, self._part_ended = trio.CancelScope(), trio.Event()
            _log.info("node.member", swarm=record.swarm, name=record.name, addresses=network.addresses)
            try:
                with self._part_scope:
                    await part.run()
            finally:
                self._participant = None
                self._part_ended.set()

    async def goodbye(self) -> None:
        """Before this daemon ends, or leaves its swarm: see Participant.goodbye. Then the part ends, and only then the
        network: whoever waits for an answer hears why it does not come."""
        if self._participant is not None:
            await self._participant.goodbye()
            self._part_scope.cancel()
            with trio.move_on_after(_END_S):
                await self._part_ended.wait()

    def _has_changed(self) -> None:
        self._changed.set()

    def _running(self) -> RunningSwarm | None:
        return None if self._participant is None else self._participant.running

    # -- what the commands need ---------------------------------------------------------------------------------

    def _need_part(self) -> Participant:
        if self._participant is None:
            if self._store.record is None:
                raise NotInSwarm("this node belongs to no swarm")
            raise NotReady("this node is about to take part in its swarm", hint="Ask again in a moment.")
        return self._participant

    @property
    def asker(self) -> Asker:
        return KeepingAsker(self._need_part().asker, self.kept, self.active_model)

    @property
    def leader(self) -> Leader | None:
        return None if self._participant is None else self._participant.leader

    @property
    def asking(self) -> Asking:
        return self._need_part().asking

    async def status(self) -> Mapping[str, Any]:
        if self._participant is None:
            return self._alone()
        return await self._participant.answers.status()

    def counters(self) -> Mapping[str, Any]:
        return {"network": None, "worker": None} if self._participant is None else self._participant.answers.counters()

    def _alone(self) -> Status:
        """Outside of a swarm, or on the way into one."""
        facts, me, record = self._parts.facts, self._identity.peer_id, self._store.record
        row = peer_row(
            me,
            facts.name,
            "joining",
            self._parts.measuring.current.backends_json(),
            memory={"used_bytes": 0, "budget_bytes": facts.memory_budget_bytes},
        )
        why = "it belongs to no swarm: `swarmctl init` makes one, `swarmctl join TOKEN` enters one"
        return {
            "swarm": {"id": None, "name": None} if record is None else {"id": record.swarm, "name": record.name},
            "self": me,
            "leader": None,
            "term": 0,
            "epoch": 0,
            "ready": False,
            "reason": why if record is None else "this node is about to take part in its swarm",
            "addresses": [],
            "peers": [row],
            "model": None,
            "requests": None,
            "network": None,
            "findings": [],
            "version": VERSION,
            "uptime_s": facts.uptime_s,
        }

    async def placement(self, without: str | None) -> Mapping[str, Any]:
        return await self._need_part().answers.placement(without)

    async def outline(self) -> Mapping[str, Any]:
        return await self._need_part().answers.outline()

    async def peer(self, name: str) -> Mapping[str, Any]:
        return await self._need_part().answers.peer(name)

    async def drain(self, on: bool) -> Mapping[str, Any]:
        return await self._need_part().drain(on)

    async def use_model(self, name: str) -> Mapping[str, Any]:
        return await self._need_part().use_model(name)

    async def fetch_model(self, target: Path, bytes_max: int | None, progress: OnProgress) -> Mapping[str, Any]:
        origin = self._need_part().answers.origin()
        return await fetch_model(origin, self.models, self._parts.cache, target, bytes_max, progress)

    def check_may_add(self) -> None:
        """Models are added on backbone peers: they are who may lead with them."""
        record = self._store.record
        if record is not None and record.peer not in record.backbone.peers:
            hint = "Run the command on one of those that `swarmctl backbone list` shows."
            raise UsageError("this node is not in the backbone, and only its peers lead with a model", hint=hint)

    def active_model(self) -> str | None:
        return None if self._participant is None else self._participant.answers.active_model()

    def models_changed(self) -> None:
        if self._participant is not None:
            self._participant.models_changed()
