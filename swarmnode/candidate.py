"""Whether this node may lead, and with which model: what its election is told, and what it keeps for that.

A backbone peer may lead once the trunk of the swarm's model is in its memory: added here, or fetched from the others as
soon as the leader names it. Then it takes over without loading anything. Who drains may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog
import trio

from backends.manifest import Manifest
from capabilities.errors import NotReady, SwarmError, UsageError
from capabilities.held_experts import HeldExperts, covers_all
from swarmnode.backbone.election_service import ElectionService
from swarmnode.backbone.leader_watch import LeaderWatch
from swarmnode.backbone.leadership_service import LeadershipService
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.model_choice import ModelChoice
from swarmnode.model_keeper import ModelKeeper
from swarmnode.models import Models, OpenModel
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.store import ShardCache
from swarmnode.swarm.store import SwarmStore

_log = structlog.get_logger(__name__)

_LOOK_S: Final = 0.5  # how late it is noticed that the leader names another model, or has lost its last copies
_LOOK_OUTSIDE_S: Final = 2.0  # the same for a peer that may not lead anyway


class Candidate:
    """Run `run` in a nursery; everything is on the event loop, but `choose`, which may be called in any thread."""

    def __init__(
        self,
        network: Network,
        store: SwarmStore,
        models: Models,
        cache: ShardCache,
        choice: ModelChoice,
        trunks: Trunks,
        leadership: LeadershipService,
        watch: LeaderWatch,
        within_reach: Callable[[str], Iterable[HeldExperts]],
    ) -> None:
        """`within_reach`: what the peers say to hold of a model that this node could send work to, itself included."""
        self.reason = ""
        """Why this node may not lead, after "this peer may not lead: "; empty if it may."""
        self._me = network.peer_id
        self._store = store
        self._models = models
        self._choice = choice
        self._trunks = trunks
        self._leadership = leadership
        self._election: ElectionService = leadership.election
        self._watch = watch
        self._within_reach = within_reach
        self._keeper = ModelKeeper(network, models, cache, self.wake)
        self._leader: Leader | None = None
        self._draining = False
        self._loaded: Manifest | None = None  # whose trunk is in memory
        self._has_file = False  # of that model, experts and all
        self._news = trio.Event()

    async def run(self) -> None:
        """Never ends."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keeper.run)
                while True:
                    self._news = trio.Event()
                    await self._look()
                    with trio.move_on_after(_LOOK_S if self._in_backbone else _LOOK_OUTSIDE_S):
                        await self._news.wait()
        finally:
            with trio.CancelScope(shield=True):
                await self._trunks.close()

    # -- events -------------------------------------------------------------------------------------------------

    def leads(self, leader: Leader | None) -> None:
        """This node leads from now on, or no longer."""
        self._leader = leader
        self.wake()

    def set_draining(self, draining: bool) -> None:
        self._draining = draining
        self.wake()

    def models_changed(self) -> None:
        """A model was added or removed here."""
        self._keeper.models_changed()
        if self._leader is not None:
            self._leader.models_changed()
        self.wake()

    def choose(self) -> OpenModel:
        """Open the model to lead with. Blocks.

        Raises:
            SwarmError: there is none, or a choice.
        """
        return self._choice.open(self._models)

    async def use(self, name: str) -> dict[str, Any]:
        """Let the swarm serve a model of this node's.

        Raises:
            ModelNotFound: there is none of this name.
            UsageError: another peer leads, or the configuration names the model.
        """
        if configured := self._choice.configured:
            hint = "Change it there, and start the daemon again."
            raise UsageError(f"leader.model in the configuration names {configured} for this node", hint=hint)
        manifest = await trio.to_thread.run_sync(self._models.manifest, name)
        leader = self._watch.leader
        if leader is not None and leader.peer != self._me:
            hint = f"Run the command on the machine of {leader.peer}; the others follow it."
            raise UsageError("the leader decides which model the swarm serves", hint=hint, peer=str(leader.peer))
        await trio.to_thread.run_sync(self._choice.remember, manifest.id)
        self.models_changed()
        return {"used": name, "id": manifest.id}

    def wake(self) -> None:
        """Something has changed that the election may need to know."""
        self._news.set()

    # -- looking ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        await self._follow_the_leader()
        try:
            await self._get_ready()
            self.reason = ""
        except SwarmError as error:
            if self.reason != error.message:
                _log.info("candidate.may_not_lead", reason=error.message)
            self.reason = error.message
        may = not self.reason
        await self._election.report(eligible=may, covers=may and self._covers(), why=self.reason)

    async def _follow_the_leader(self) -> None:
        """The model that it serves is the one to keep; this node's own, while it leads, is what it tells."""
        if self._leader is not None:
            active = "" if self._leader.active is None else self._leader.active.manifest.id
            self._leadership.set_model(active)
            if active and (self._choice.configured or not self._choice.swarm_active):  # else it follows the choice
                await self._remember(active)
            return
        record, leader, in_backbone = self._store.record, self._watch.leader, self._in_backbone
        if leader is not None and (model := self._watch.model):
            self._choice.heard = model
            if in_backbone:
                await self._remember(model)
                assert record is not None
                others = sorted(set(record.backbone.peers) - {leader.peer, self._me})
                self._keeper.want(model, [leader.peer, *map(PeerId, others)])
        if not in_backbone:
            self._keeper.want("", ())

    @property
    def _in_backbone(self) -> bool:
        record = self._store.record
        return record is not None and self._me in record.backbone.peers

    async def _remember(self, model: str) -> None:
        try:
            await trio.to_thread.run_sync(self._choice.remember, model)
        except OSError as error:
            _log.warning("candidate.choice_not_stored", reason=error.strerror)

    async def _get_ready(self) -> None:
        """Have the trunk in memory. Raises SwarmError with what is missing."""
        if not self._in_backbone:
            raise NotReady("it is not in the backbone")
        if self._draining and self._leader is None:  # a leader leads on until another one has taken over
            raise NotReady("it is draining")
        ids = await trio.to_thread.run_sync(self._models.ids)
        try:
            name = self._choice.name(ids)
        except NotReady as error:
            raise NotReady(f"it needs {error.message}") from error
        if self._choice.heard and ids.get(name) != self._choice.heard:
            raise NotReady("its configuration names another model than the swarm's")
        leads = self._leader is not None
        if self._leader is not None and self._leader.active is not None:
            return
        if leads or self._loaded is None or self._loaded.id != ids.get(name):
            self._loaded = None  # what cannot be opened any more must be opened again before this node may lead
            opened = await trio.to_thread.run_sync(self._models.open, name)
            try:
                if leads:
                    return  # it is about to load it
                await self._trunks.load(opened)
                self._loaded, self._has_file = opened.manifest, opened.gguf is not None
            finally:
                opened.close()

    def _covers(self) -> bool:
        """Whether every expert is within reach, as far as this node can tell."""
        if self._leader is not None and self._leader.covers:
            return True
        # A leader whose workers still load is judged like the others: else it would hand over to one that is no better.
        if self._loaded is None:
            return False
        if self._has_file:
            return True
        n_expert = {layer.layer: layer.n_expert for layer in self._loaded.layers}
        return covers_all(n_expert, self._within_reach(self._loaded.id))
