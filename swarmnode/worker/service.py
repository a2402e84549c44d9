"""A worker of a swarm: membership, expert sets and the experts protocol, put together.

It is a worker of whoever leads: when another leader is known it takes leave of the one before and joins that one, and
what it holds in memory stays. While no leader is known it stays with the last one for as long as that one speaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog
import trio

from backends.experts import ExpertBackend
from backends.manifest import Manifest
from capabilities.advert_content import Phase
from capabilities.errors import NoLeader
from scheduler.liveness import PeerState
from swarmnode.leadership import KnownLeader, LeaderView
from swarmnode.member_messages import Hello
from swarmnode.net.interface import Network, PeerId
from swarmnode.pinger import PeerWatch
from swarmnode.shards.store import ShardCache
from swarmnode.worker.epochs import Epochs, ExpertSet
from swarmnode.worker.experts_service import ExpertsService
from swarmnode.worker.load import LoadMeter
from swarmnode.worker.loader import Loader
from swarmnode.worker.membership import Membership

_log = structlog.get_logger(__name__)


class Worker:
    """Run `run` in a nursery. Somebody else answers pings on this network (pinger.serve_pings)."""

    def __init__(
        self,
        network: Network,
        view: LeaderView,
        hello: Callable[[], Hello],
        cache: ShardCache,
        memory_budget_bytes: int,
        make_backend: Callable[[], ExpertBackend],
        cpu_share: float = 1.0,
    ) -> None:
        """`hello` says what there is to say of this node; which sets it holds is filled in here.

        cpu_share: of the time in which experts are computed (experts_service.py).
        """
        self.view = view
        self.epochs = Epochs()
        self.experts = ExpertsService(self.epochs, view, cpu_share)
        self.load = LoadMeter(lambda: self.experts.statistics.compute_us, time.monotonic)
        self.watch = PeerWatch(network)
        self._loader = Loader(network, cache, self.epochs, memory_budget_bytes, make_backend)
        self.membership = Membership(network, self.watch, view, hello, self.epochs, self._loader)
        self.experts.register(network)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.watch.run)
                nursery.start_soon(self._follow)
        finally:
            with trio.CancelScope(shield=True):  # a kernel that runs must end before its memory goes
                await self.epochs.drop()

    async def _follow(self) -> None:
        leader: KnownLeader | None = None
        while True:
            async with trio.open_nursery() as nursery:
                if leader is not None:
                    nursery.start_soon(self.membership.run, leader)
                leader = await self._next_leader(leader)
                nursery.cancel_scope.cancel()

    async def _next_leader(self, current: KnownLeader | None) -> KnownLeader:
        """Whoever leads a newer term than the current one, or the first leader that is known."""
        while True:
            leader = self.view.leader
            if leader is not None and (current is None or _name(leader) != _name(current)):
                return leader
            await self.view.changed()

    def set_draining(self, draining: bool) -> None:
        """Whether this node wants to hold nothing more; the leader then moves its experts elsewhere."""
        _log.info("worker.policy", draining=draining)
        self.membership.set_draining(draining)

    @property
    def serving(self) -> ExpertSet | None:
        """The set that answers, or, before the first one has begun, the one that is prepared."""
        return self.epochs.current or self.epochs.prepared

    @property
    def phase(self) -> Phase:
        """How far it is with the share that it should have."""
        if self.membership.state.phase in ("fetching", "loading"):
            return Phase.LOADING
        return Phase.READY if self.held() else Phase.JOINING

    @property
    def bytes_held(self) -> int:
        """Of experts in memory, of both sets where there are two."""
        return sum(held.bytes_held for held in (self.epochs.current, self.epochs.prepared) if held is not None)

    @property
    def manifest(self) -> Manifest | None:
        """Of the model that this worker was assigned experts of, last; None before."""
        return self._loader.manifest

    def held(self) -> tuple[tuple[str, Mapping[int, tuple[int, ...]]], ...]:
        """What could be computed now: a manifest's id, and experts of its layers."""
        serving = self.serving
        return () if serving is None or not serving.loaded else ((serving.manifest, serving.wanted),)

    @property
    def leader_peer(self) -> PeerId | None:
        """Who leads, as far as is known."""
        leader = self.view.leader
        return None if leader is None else leader.peer

    def refusal(self) -> NoLeader | None:
        """Why the leader cannot be asked over this membership's connection now, or None."""
        leader, state = self.leader_peer, self.membership.state
        if leader is None:
            return NoLeader(f"the swarm has no leader: {self.view.reason}")
        if not state.connected:
            return NoLeader(f"no connection to the leader {leader}: {state.reason}", peer=str(leader))
        if self.watch.state(leader) == PeerState.FAILED:
            return NoLeader(f"the leader {leader} does not answer pings", peer=str(leader))
        return None


def _name(leader: KnownLeader) -> tuple[PeerId, int]:
    return leader.peer, leader.term
