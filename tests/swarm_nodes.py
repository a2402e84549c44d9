"""Members of one founded swarm with all that they tell each other: on a network in memory, or on real libp2p."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from capabilities.advert_content import AdvertContent
from capabilities.membership_certificate import MembershipCertificate
from scheduler.advert_book import PeerState, StateChange
from swarmnode.identity import Identity
from swarmnode.net.interface import Network
from swarmnode.net.kademlia import open_kademlia
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import MemoryHub
from swarmnode.swarm.advert_node import SwarmAdverts, open_swarm_adverts
from swarmnode.swarm.ownership import OwnerChain
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from tests.advert_tools import usual_content
from tests.swarm_members import NOW_S, Founder

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass
class SwarmNode:
    """One member. `content` may be changed at any time, `skew_s` as well."""

    identity: Identity
    network: Network
    store: SwarmStore
    content: AdvertContent
    skew_s: float = 0.0
    swarm: SwarmAdverts = None  # type: ignore[assignment]  # made when it runs
    changes: list[StateChange] = field(default_factory=list)
    news: list[bytes] = field(default_factory=list)
    cancel: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    def states(self) -> dict[str, PeerState]:
        return {peer: view.state for peer, view in self.swarm.peers().items()}

    def knows(self, *others: SwarmNode) -> bool:
        states = self.states()
        return all(states.get(other.peer) == PeerState.READY for other in others)

    def kinds(self) -> list[tuple[str, str | None]]:
        return [(str(finding.kind), finding.peer) for finding in self.swarm.findings()]

    async def run(self, *, dht: bool = False, lan: bool = False, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        def wall_s() -> float:
            return time.time() + self.skew_s

        with self.cancel:
            async with open_swarm_adverts(
                self.network,
                self.store,
                self.identity,
                lambda: self.content,
                lambda: 7,
                open_dht=(lambda rank: open_kademlia(self.network, rank, server=True)) if dht else None,  # type: ignore[arg-type]
                lan=lan,
                lan_interfaces=("127.0.0.1",),
                wall_s=wall_s,
            ) as self.swarm:
                self.swarm.on_change(self.changes.append)
                self.swarm.on_news(self.news.extend)
                task_status.started()
                await trio.sleep_forever()


def member_store(founder: Founder, folder: Path, identity: Identity) -> SwarmStore:
    """What a member keeps that the founder has admitted."""
    folder.mkdir(parents=True, exist_ok=True)
    record, store = founder.record, SwarmStore.open(SwarmFiles(folder))
    certificate = MembershipCertificate.issue(
        record.swarm, identity.peer_id, record.peer, founder.identity.sign, issued_at_s=NOW_S
    )
    first = OwnerChain(record.chain.first_key, record.chain.salt)
    store.enter(SwarmRecord.from_news(record.name, record.psk, first, certificate, record.news()))
    return store


def make_node(founder: Founder, folder: Path, network: Network, identity: Identity, **content: Any) -> SwarmNode:
    """The founder's own node, or a member's."""
    own = identity is founder.identity
    store = founder.store if own else member_store(founder, folder / identity.peer_id[-8:], identity)
    said = {"name": identity.peer_id[-6:], "addresses": network.addresses, "wire": 1, "membership": b"", **content}
    return SwarmNode(identity, network, store, usual_content(**said))


@asynccontextmanager
async def memory_swarm(hub: MemoryHub, folder: Path, count: int) -> AsyncIterator[tuple[Founder, list[SwarmNode]]]:
    """Running members of a hub, the founder first, not connected yet."""
    founder = Founder.make(folder / "founder")
    identities = [founder.identity, *(Identity.generate() for _ in range(count - 1))]
    nodes = [make_node(founder, folder, hub.join(each.peer_id), each) for each in identities]
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
        yield founder, nodes
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def real_swarm(
    folder: Path, count: int, *, dht: bool = False, lan: bool = False
) -> AsyncIterator[tuple[Founder, list[SwarmNode]]]:
    """The same on loopback, behind the swarm's network key."""
    founder = Founder.make(folder / "founder")
    async with AsyncExitStack() as stack:
        nodes = []
        for identity in (founder.identity, *(Identity.generate() for _ in range(count - 1))):
            opened = open_libp2p_network(identity, LOOPBACK, psk=founder.record.psk)
            nodes.append(make_node(founder, folder, await stack.enter_async_context(opened), identity))
        nursery = await stack.enter_async_context(trio.open_nursery())
        for node in nodes:
            await nursery.start(lambda node=node, **started: node.run(dht=dht, lan=lan, **started))
        try:
            yield founder, nodes
        finally:
            nursery.cancel_scope.cancel()


async def connect_all(nodes: list[SwarmNode]) -> None:
    """Everybody with the first one."""
    for node in nodes[1:]:
        await node.network.connect(nodes[0].network.addresses[0])
