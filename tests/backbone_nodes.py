"""Members of a swarm that find out who leads: the real services on real files, on a network in memory or on libp2p."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from capabilities.backbone import VOTE_FILE_BYTES, BackboneSet, Enactment, Stored
from capabilities.membership_certificate import MembershipCertificate
from scheduler.election_state import BackboneChanged, HandOverFailed, HardState, LeaderChanged
from swarmnode.backbone.dialer import Dialer
from swarmnode.backbone.election_service import ElectionService
from swarmnode.backbone.leader_watch import LeaderWatch
from swarmnode.backbone.leadership_service import LeadershipService
from swarmnode.identity import Identity
from swarmnode.net.interface import Network
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.swarm.founding import with_member
from swarmnode.swarm.record import SwarmRecord, backbone_news
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import open_vote_file, write_vote_file
from tests.swarm_members import NOW_S, Founder, quick_keys


@contextmanager
def mock_threads(disk_s: float) -> Iterator[None]:
    """What would wait in a thread for the disk takes so long: trio's MockClock does not know of threads."""

    async def run_sync(call: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(disk_s)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", run_sync)
        yield


@dataclass
class Node:
    """One member; `start` and `stop` are a daemon's. `heard` is what its daemon would be told, in order."""

    identity: Identity
    folder: Path
    addresses_of: Callable[[str], Sequence[str]]
    network: Network = None  # type: ignore[assignment]  # made by start
    dialer: Dialer = None  # type: ignore[assignment]
    election: ElectionService = None  # type: ignore[assignment]
    voice: LeadershipService = None  # type: ignore[assignment]
    watch: LeaderWatch = None  # type: ignore[assignment]
    heard: list[LeaderChanged | BackboneChanged | HandOverFailed] = field(default_factory=list)
    unreached: list[tuple[str, str, str]] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    stopped: trio.Event = field(default_factory=trio.Event)

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def store(self) -> SwarmStore:
        return SwarmStore.open(SwarmFiles(self.folder)) if self.election is None else self.election._store

    @property
    def leads(self) -> bool:
        leader = self.watch.leader
        return leader is not None and leader.peer == self.peer

    def sees(self, other: Node) -> bool:
        leader = self.watch.leader
        return leader is not None and leader.peer == other.peer

    async def run(self, network: Network, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        store = SwarmStore.open(SwarmFiles(self.folder))
        self.network, self.scope, self.stopped = network, trio.CancelScope(), trio.Event()
        self.dialer = Dialer(network, self.addresses_of, on_unreached=lambda *what: self.unreached.append(what))
        self.election = ElectionService(
            network,
            self.identity,
            store,
            self.dialer,
            on_leader=self.heard.append,
            on_backbone=self.heard.append,
            on_hand_over_failed=self.heard.append,
        )
        self.voice = LeadershipService(network, store, self.election)
        self.watch = LeaderWatch(network, store, self.dialer, self.voice)
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.dialer.run)
                await nursery.start(self.election.run)
                self.voice.register()
                await nursery.start(self.watch.run)
                task_status.started()
        self.stopped.set()

    async def stop(self) -> None:
        """Gone from one instant to the next, as after kill -9."""
        self.scope.cancel()
        for peer in self.network.connected_peers():
            await self.network.disconnect(peer)
        if isinstance(self.network, MemoryNetwork):
            del self.network.hub._networks[self.network.peer_id]
        await self.stopped.wait()


@dataclass
class Swarm:
    """`founder` has the owner's key; `nodes[0]` is its node."""

    founder: Founder
    nodes: list[Node]
    hub: MemoryHub | None
    nursery: trio.Nursery

    @classmethod
    def make(cls, root: Path, backbone: int, others: int, hub: MemoryHub | None, nursery: trio.Nursery) -> Swarm:
        """Members whose files are as after many a `join` and `backbone add`; none runs yet."""
        founder = Founder.make(root / "0")
        swarm = cls(founder, [], hub, nursery)
        identities = [founder.identity, *(Identity.generate() for _ in range(backbone + others - 1))]
        names = [founder.record.backbone.members[0].vote_file]
        names += [secrets.token_bytes(VOTE_FILE_BYTES) for _ in identities[1:]]
        enactment = founder.record.enactment
        for identity, name in zip(identities[1:backbone], names[1:backbone], strict=True):
            voters = [each for each in identities if each.peer_id in enactment.current.peers] + [identity]
            after = with_member(enactment.current, identity.peer_id, name, founder.key.sign)
            enactment = enacted(enactment.current, after, voters)
        if backbone > 1:
            founder.store.hear([backbone_news(enactment)])
        for index, (identity, name) in enumerate(zip(identities, names, strict=True)):
            folder = root / str(index)
            if index:
                folder.mkdir(parents=True)
                swarm.enter(identity, folder)
            if index < backbone:
                files = SwarmFiles(folder)
                write_vote_file(files.votes, HardState(founder.record.swarm, name, enactment=enactment))
            swarm.nodes.append(Node(identity, folder, swarm.addresses_of))
        return swarm

    def enter(self, identity: Identity, folder: Path) -> None:
        """The record of a member that the founder has admitted."""
        record, founder = self.founder.record, self.founder
        issue = MembershipCertificate.issue
        certificate = issue(record.swarm, identity.peer_id, record.peer, founder.identity.sign, issued_at_s=NOW_S)
        own = SwarmRecord.from_news(record.name, record.psk, record.chain, certificate, record.news())
        SwarmStore.open(SwarmFiles(folder)).enter(own)

    def addresses_of(self, peer: str) -> Sequence[str]:
        return next((node.network.addresses for node in self.nodes if node.peer == peer and node.network), ())

    def node(self, peer: str) -> Node:
        return next(node for node in self.nodes if node.peer == peer)

    async def start(self, *nodes: Node, network: Network | None = None) -> None:
        """Run nodes, in memory unless a network is given."""
        for node in nodes or self.nodes:
            chosen = network
            if chosen is None:
                assert self.hub is not None
                chosen = self.hub.join(node.identity.peer_id)
            await self.nursery.start(partial(node.run, chosen))

    async def all_may_lead(self, *nodes: Node, eligible: bool = True) -> None:
        for node in nodes or self.nodes:
            await node.election.report(eligible=eligible, covers=eligible)

    def leader(self, *nodes: Node) -> Node | None:
        """The one that leads by the word of all these (or of all)."""
        asked = nodes or tuple(self.nodes)
        seen = {None if node.watch.leader is None else node.watch.leader.peer for node in asked}
        return next((node for node in self.nodes if seen == {node.peer}), None)

    def seat_of(self, node: Node) -> bytes:
        record = node.store.need()
        return open_vote_file(node.store.files.votes, record.swarm, record.enactment).vote_file

    def cut(self, one: Sequence[Node], other: Sequence[Node], *, mend: bool = False) -> None:
        assert self.hub is not None
        change = self.hub.mend if mend else self.hub.cut
        for a in one:
            for b in other:
                change(a.identity.peer_id, b.identity.peer_id)


def enacted(before: BackboneSet, after: BackboneSet, voters: Sequence[Identity]) -> Enactment:
    """The proof that `after` acts, with the words of these."""
    words = {voter.peer_id: Stored.make(after, voter.peer_id, 0, voter.sign) for voter in voters}
    enactment = Enactment.of(before, after, words)
    assert enactment is not None
    return enactment


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait until it is true; the seconds that it took."""
    begin = trio.current_time()
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - conditions are of all kinds
            await trio.sleep(0.01)
    return trio.current_time() - begin


@asynccontextmanager
async def memory_swarm(root: Path, backbone: int, others: int = 0, disk_s: float = 0.0) -> AsyncIterator[Swarm]:
    """A swarm on a network in memory, under trio's MockClock; it runs, and nobody may lead yet."""
    with quick_keys(), mock_threads(disk_s):
        async with open_memory_hub() as hub, trio.open_nursery() as nursery:
            swarm = Swarm.make(root, backbone, others, hub, nursery)
            await swarm.start()
            yield swarm
            nursery.cancel_scope.cancel()
