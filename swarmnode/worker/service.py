"""A worker of a swarm: membership, expert sets and the experts protocol, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from backends.experts import ExpertBackend
from capabilities.errors import NoLeader
from scheduler.liveness import PeerState
from swarmnode.asker import RemoteAsker
from swarmnode.member_messages import Hello
from swarmnode.net.interface import Network, PeerId
from swarmnode.pinger import PeerWatch
from swarmnode.shards.store import ShardCache
from swarmnode.worker.epochs import Epochs
from swarmnode.worker.experts_service import ExpertsService
from swarmnode.worker.loader import Loader
from swarmnode.worker.membership import Membership

_log = structlog.get_logger(__name__)

PEER_PART: Final = "/p2p/"


def peer_of(address: str) -> PeerId:
    """The peer id at the end of a multiaddr."""
    return PeerId(address.rsplit(PEER_PART, 1)[1])


class Worker:
    """Run `run` in a nursery."""

    def __init__(
        self,
        network: Network,
        leader_address: str,
        hello: Callable[[], Hello],
        cache: ShardCache,
        memory_budget_bytes: int,
        make_backend: Callable[[], ExpertBackend],
    ) -> None:
        self.leader_peer = peer_of(leader_address)
        self.epochs = Epochs()
        self.experts = ExpertsService(self.epochs, self.leader_peer)
        self.watch = PeerWatch(network)
        loader = Loader(network, cache, self.epochs, memory_budget_bytes, make_backend)
        self.membership = Membership(network, self.watch, self.leader_peer, leader_address, hello, self.epochs, loader)
        self.asker = RemoteAsker(network, self.leader_peer, self.refusal)
        self.experts.register(network)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.watch.run)
                nursery.start_soon(self.membership.run)
        finally:
            with trio.CancelScope(shield=True):  # a kernel that runs must end before its memory goes
                await self.epochs.drop()

    def refusal(self) -> NoLeader | None:
        """Why the leader cannot be asked now, or None."""
        leader, state = self.leader_peer, self.membership.state
        if not state.connected:
            return NoLeader(f"no connection to the leader {leader}: {state.reason}", peer=str(leader))
        if self.watch.state(leader) == PeerState.FAILED:
            return NoLeader(f"the leader {leader} does not answer pings", peer=str(leader))
        return None
