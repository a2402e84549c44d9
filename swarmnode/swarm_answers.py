"""What a member of a swarm answers to its user's commands, and to other members while it leads.

While this node leads it answers itself; else the leader is asked (status_service.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from capabilities.advert_content import AdvertContent
from capabilities.errors import UsageError
from swarmnode.backbone.leader_watch import LeaderWatch
from swarmnode.explaining import Known, explain, find_peer
from swarmnode.fetch_model import Origin
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.mesh import SwarmMesh
from swarmnode.net.interface import Network, PeerId
from swarmnode.status import LeaderStatus, NodeFacts, Status, counters
from swarmnode.status_service import NodeStatus, ask_leader, placement_request
from swarmnode.swarm.advert_node import SwarmAdverts
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.verdicts import Verdicts
from swarmnode.worker.service import Worker


class SwarmAnswers:
    """leader: this node's own, while it leads. adverts: once there are any. describe: what this node says of itself."""

    def __init__(
        self,
        network: Network,
        store: SwarmStore,
        watch: LeaderWatch,
        worker: Worker,
        verdicts: Verdicts,
        mesh: SwarmMesh,
        facts: NodeFacts,
        protocols: LeaderProtocols,
        *,
        leader: Callable[[], Leader | None],
        adverts: Callable[[], SwarmAdverts | None],
        describe: Callable[[], AdvertContent],
    ) -> None:
        self._network = network
        self._store = store
        self._watch = watch
        self._worker = worker
        self._verdicts = verdicts
        self._mesh = mesh
        self._facts = facts
        self._protocols = protocols
        self._leader = leader
        self._adverts = adverts
        self._describe = describe
        self._status = NodeStatus(network, watch, facts, mesh, worker, lambda: watch.term)

    async def status(self) -> Status:
        if (leader := self._leader()) is None:
            return await self._status.view()
        return self._status.with_own(self._leader_status(leader).view())

    def counters(self) -> Status:
        return counters(self._network, self._worker)

    def _leader_status(self, leader: Leader) -> LeaderStatus:
        return LeaderStatus(self._network, leader, self._facts, self._mesh)

    async def as_leader(self, request: Mapping[str, Any]) -> Status:
        """What another member asks this node as the leader."""
        if (leader := self._leader()) is None:
            raise self._protocols.refusal()
        if request["kind"] == "status":
            return self._leader_status(leader).view()
        if request["kind"] == "placement":
            return leader.placement(request.get("without"))
        if request["kind"] == "outline":
            return leader.outline(request.get("without"))
        raise UsageError(f"a leader answers no request of kind {request['kind']!r}")

    async def placement(self, without: str | None) -> Status:
        return await self._of_leader(placement_request(without))

    async def outline(self) -> Status:
        """The swarm without this node, in outline (outline.py)."""
        return await self._of_leader({"kind": "outline", "without": str(self._network.peer_id)})

    async def whole_outline(self) -> Status:
        """For newcomers."""
        return await self._of_leader({"kind": "outline"})

    async def _of_leader(self, request: Mapping[str, Any]) -> Status:
        if self._leader() is not None:
            return await self.as_leader(request)
        return await ask_leader(self._network, self._watch, request)

    async def peer(self, name: str) -> Status:
        status, adverts = await self.status(), self._adverts()
        record, heard = self._store.need(), {} if adverts is None else adverts.peers()
        peer = find_peer(name, status, (*heard, *record.bans.by_peer, *record.releases.by_peer))
        view, release = heard.get(peer), record.releases.by_peer.get(peer)
        own = self._describe() if peer == self._network.peer_id else None
        known = Known(
            own if view is None else view.advert.content,
            0.0 if view is None else view.silent_s,
            self._verdicts.verdict_of(peer),
            (0, 0) if release is None else (release.number, release.at_s),
            record.bans.is_banned(peer),
        )
        return explain(peer, status, known)

    def origin(self) -> Origin:
        """Whence the model comes that the swarm serves: backbone peers may have all of it, the leader first."""
        record, adverts, model = self._store.need(), self._adverts(), self.active_model() or ""
        connected, backbone = self._network.connected_peers(), set(record.backbone.peers)
        leader = self._watch.leader
        sources = sorted(backbone & set(connected), key=lambda peer: leader is None or peer != leader.peer)
        others = {} if adverts is None else adverts.peers()
        holdings = {
            peer: held
            for peer in connected
            if peer in others
            for held in others[peer].advert.content.held
            if held.model == model
        }
        return Origin(self._network, model, [PeerId(peer) for peer in sources], holdings)

    def active_model(self) -> str | None:
        """The id of the manifest that the swarm serves."""
        if (leader := self._leader()) is not None:
            return None if leader.active is None else leader.active.manifest.id
        return self._watch.model or None
