"""Whole nodes that speak and listen: real libp2p with gossip, exchange and DHT, or the same in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import trio

from capabilities.advert import Advert
from capabilities.advert_content import AdvertContent
from capabilities.errors import PeerMistake
from scheduler.advert_book import PeerState, StateChange
from swarmnode.identity import Identity, verify
from swarmnode.net.gossipsub import GossipSubNode, open_gossipsub
from swarmnode.net.interface import Network
from swarmnode.net.kademlia import KademliaNode, open_kademlia
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import MemoryHub
from swarmnode.swarm.adverts import AdvertService, Speaker
from swarmnode.swarm.dht import AdvertDirectory, advert_rank
from tests.advert_tools import SWARM, admit_certified, usual_content

NO_SKEWS: Mapping[int, float] = MappingProxyType({})
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass
class SpeakingNode:
    """A node of the swarm; `content` may be changed at any time, `clock_skew_s` as well."""

    identity: Identity
    network: Network
    gossip: GossipSubNode
    content: AdvertContent
    clock_skew_s: float = 0.0
    service: AdvertService = None  # type: ignore[assignment]  # made right after
    dht: KademliaNode | None = None
    changes: list[StateChange] = field(default_factory=list)
    banned: set[str] = field(default_factory=set)
    cancel: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    def states(self) -> dict[str, PeerState]:
        return {peer: view.state for peer, view in self.service.peers().items()}

    def knows(self, *others: SpeakingNode) -> bool:
        states = self.states()
        return all(states.get(other.peer) == PeerState.READY for other in others)

    def make_service(self, directory: AdvertDirectory | None) -> None:
        speaker = Speaker(
            swarm=SWARM,
            peer=self.identity.peer_id,
            sign=self.identity.sign,
            verify=verify,
            admit=self.admit,
            content=lambda: self.content,
            load=lambda: 7,
            wall_s=lambda: time.time() + self.clock_skew_s,
        )
        self.service = AdvertService(speaker, self.network, self.gossip, directory)
        self.service.on_change(self.changes.append)

    def admit(self, advert: Advert) -> None:
        if advert.peer in self.banned:
            raise PeerMistake("banned")
        admit_certified(advert)

    async def run(self) -> None:
        with self.cancel:
            await self.service.run()


@asynccontextmanager
async def real_node(*, dht: bool = False, speaks: bool = True, **content: Any) -> AsyncIterator[SpeakingNode]:
    """A node on loopback; running, unless it is not to speak."""
    identity = Identity.generate()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_libp2p_network(identity, LOOPBACK))
        gossip = await stack.enter_async_context(open_gossipsub(network))
        said = {"name": identity.peer_id[-6:], "addresses": network.addresses, **content}
        node = SpeakingNode(identity, network, gossip, usual_content(**said))
        directory = None
        if dht:
            rank = advert_rank(SWARM, verify, admit_certified)
            node.dht = await stack.enter_async_context(open_kademlia(network, rank, server=True))
            directory = AdvertDirectory(node.dht, SWARM, identity.peer_id)
        node.make_service(directory)
        nursery = await stack.enter_async_context(trio.open_nursery())
        if speaks:
            nursery.start_soon(node.run)
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def memory_nodes(
    hub: MemoryHub, count: int, speakers: Sequence[Identity] = (), skews_s: Mapping[int, float] = NO_SKEWS
) -> AsyncIterator[list[SpeakingNode]]:
    """Running nodes of a hub, not connected yet. The first ones speak as `speakers`, whatever their network says.

    Those with a skewed clock do not run yet.
    """
    async with AsyncExitStack() as stack:
        nodes = []
        for index in range(count):
            identity = speakers[index] if index < len(speakers) else Identity.generate()
            network = hub.join(Identity.generate().peer_id if index < len(speakers) else identity.peer_id)
            gossip = await stack.enter_async_context(open_gossipsub(network))
            content = usual_content(name=identity.peer_id[-6:], addresses=network.addresses)
            node = SpeakingNode(identity, network, gossip, content, skews_s.get(index, 0.0))
            node.make_service(None)
            nodes.append(node)
        nursery = await stack.enter_async_context(trio.open_nursery())
        for node in nodes:
            if not node.clock_skew_s:
                nursery.start_soon(node.run)
        try:
            yield nodes
        finally:
            nursery.cancel_scope.cancel()


async def connect_chain(nodes: Iterable[SpeakingNode]) -> None:
    before: SpeakingNode | None = None
    for node in nodes:
        if before is not None:
            await node.network.connect(before.network.addresses[0])
        before = node
