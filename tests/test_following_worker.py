"""A worker of whoever leads: it changes over to the newest leader with what it holds, and obeys no older one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio

from swarmnode import limits
from swarmnode.expert_messages import PROTOCOL as EXPERTS
from swarmnode.expert_messages import Expected, Failure, Reply, decode_answer, encode_dispatch, encode_notice
from swarmnode.member_messages import (
    PROTOCOL,
    Assign,
    Begin,
    FromLeader,
    Hello,
    Policy,
    Progress,
    decode_from_worker,
    encode,
)
from swarmnode.net.interface import NetworkError, PeerId, Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.pinger import serve_pings
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import ShardCache
from swarmnode.wire import read_frame
from swarmnode.worker import loader, membership
from swarmnode.worker.service import Worker
from tests.fake_backend import FakeBackend
from tests.fault_tools import hello
from tests.leader_views import SettableView
from tests.memory_swarm import LAYERS, MODEL
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

ALL = dict.fromkeys(LAYERS, (0, 1, 2, 3))
HALF = dict.fromkeys(LAYERS, (0, 1))
WIDTH = MODEL.manifest.layers[0].n_in


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_S_MIN", 0.02)
    monkeypatch.setattr(membership, "RETRY_S_MAX", 0.05)
    monkeypatch.setattr(membership, "PROGRESS_INTERVAL_S", 0.02)

    class AnyProgram:
        @staticmethod
        def from_bytes(data: bytes) -> bytes:
            return data

    monkeypatch.setattr(loader, "ExpertProgram", AnyProgram)  # the test model's experts are random bytes


@dataclass
class ScriptedLeader:
    """A peer that may lead: it serves shards, and notes what the worker tells it."""

    network: MemoryNetwork
    streams: list[Stream] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    policies: list[bool] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)
    left: int = 0

    def __post_init__(self) -> None:
        self.network.serve(PROTOCOL, self._serve, max_streams_per_peer=limits.MEMBER_STREAMS_PER_PEER_MAX)

    async def _serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        try:
            while True:
                match decode_from_worker(await read_frame(stream, limits.MEMBER_REPORT)):
                    case Hello() as found:
                        self.hellos.append(found)
                    case Policy(draining):
                        self.policies.append(draining)
                    case Progress() as report:
                        self.reports.append(report)
        except NetworkError:
            self.left += 1
            raise

    async def tell(self, message: FromLeader) -> None:
        await self.streams[-1].send(encode(message))

    async def assign(self, term: int, epoch: int = 1, held: dict[int, tuple[int, ...]] = HALF) -> None:
        """Until it is loaded and serves."""
        await self.tell(Assign(term, epoch, "m", MODEL.manifest.id, (str(self.network.peer_id),), held))
        await eventually(lambda: any((r.phase, r.term, r.epoch) == ("loaded", term, epoch) for r in self.reports))
        await self.tell(Begin(term, epoch))

    async def dispatch(self, worker: PeerId, term: int, epoch: int = 1, n_tokens: int = 1) -> Reply | Failure:
        """One dispatch on a stream of its own."""
        stream = await self.network.open_stream(worker, EXPERTS)
        await stream.send(a_dispatch(term, epoch, n_tokens))
        with trio.fail_after(PATIENCE_S):
            frame = await read_frame(stream, limits.EXPERTS_REPLY)
        answer = decode_answer(frame, {1: Expected(n_tokens, WIDTH)})
        await stream.aclose()
        return answer


def a_dispatch(term: int, epoch: int = 1, n_tokens: int = 1) -> bytes:
    x = np.ones((n_tokens, WIDTH), np.float32)
    tokens, experts = np.arange(n_tokens, dtype=np.int32), np.zeros(n_tokens, np.int32)
    return encode_dispatch(term=term, epoch=epoch, sequence=1, layer=LAYERS[0], x=x, tokens=tokens, experts=experts)


@dataclass
class Lab:
    hub: MemoryHub
    network: MemoryNetwork
    view: SettableView
    worker: Worker
    leaders: list[ScriptedLeader]
    backends: list[FakeBackend]

    def elect(self, number: int, term: int) -> None:
        self.view.set(self.leaders[number].network.peer_id, term)

    async def joined(self, number: int, times: int = 1) -> None:
        await eventually(lambda: len(self.leaders[number].hellos) == times and self.worker.membership.state.connected)


@asynccontextmanager
async def lab(folder: Path) -> AsyncIterator[Lab]:
    """Two leaders and a worker, which may lead itself: that is the third."""
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        network, view = hub.join(), SettableView()
        leaders = [ScriptedLeader(each) for each in (hub.join(), hub.join(), network)]
        served = ServedModel(MODEL.manifest, MODEL.manifest.to_bytes(), MODEL)
        for leader in leaders:
            ShardService({MODEL.manifest.id: served}.get).register(leader.network)
            serve_pings(leader.network)
        for leader in leaders[:2]:
            await network.connect(leader.network.addresses[0])
        backends: list[FakeBackend] = []

        def make_backend() -> FakeBackend:
            backends.append(FakeBackend())
            return backends[-1]

        cache = ShardCache(folder, 1 << 30)
        worker = Worker(network, view, lambda: hello("w"), cache, 1 << 30, make_backend)  # type: ignore[arg-type]
        nursery.start_soon(worker.run)
        yield Lab(hub, network, view, worker, leaders, backends)
        nursery.cancel_scope.cancel()
    assert all(backend.closed for backend in backends)


async def test_a_worker_goes_over_to_the_newest_leader_and_takes_along_what_it_holds(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        refusal = swarm.worker.refusal()
        assert refusal is not None
        assert "there is an election" in refusal.message
        first, second, _ = swarm.leaders
        swarm.elect(0, 1)
        await swarm.joined(0)
        assert (first.hellos[0].holding, swarm.worker.refusal()) == ((), None)
        await first.assign(1, 3)
        await eventually(lambda: swarm.worker.epochs.names() == ((1, 3),))
        swarm.elect(1, 2)
        await swarm.joined(1)
        await eventually(lambda: first.left == 1)
        assert second.hellos[0].holding == ((1, 3),)
        await second.assign(2)
        await eventually(lambda: swarm.worker.epochs.names() == ((2, 1),))
        assert len(swarm.backends) == 1  # nothing was loaded again
        assert isinstance(await second.dispatch(swarm.network.peer_id, 2), Reply)


async def test_while_nobody_is_known_to_lead_the_last_leader_is_kept(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        swarm.elect(0, 1)
        await swarm.joined(0)
        swarm.view.set(None)
        await trio.sleep(0.1)
        assert swarm.leaders[0].left == 0
        swarm.elect(0, 1)
        await trio.sleep(0.1)
        assert (swarm.leaders[0].left, len(swarm.leaders[0].hellos)) == (0, 1)
        swarm.elect(0, 2)  # the same peer, elected again
        await swarm.joined(0, 2)
        assert swarm.leaders[0].left == 1


@pytest.mark.parametrize("n_tokens", [1, 2000], ids=["small", "large"])
async def test_a_leader_of_the_past_is_told_which_term_is_newer_and_gets_no_numbers(
    tmp_path: Path, n_tokens: int
) -> None:
    async with lab(tmp_path) as swarm:
        first = swarm.leaders[0]
        swarm.elect(0, 1)
        await swarm.joined(0)
        await first.assign(1)
        stream = await first.network.open_stream(swarm.network.peer_id, EXPERTS)
        await stream.send(a_dispatch(1))
        answer = decode_answer(await read_frame(stream, limits.EXPERTS_REPLY), {1: Expected(1, WIDTH)})
        assert isinstance(answer, Reply)
        swarm.elect(1, 2)
        await swarm.joined(1)
        dispatches = swarm.worker.experts.statistics.dispatches
        await stream.send(a_dispatch(1, n_tokens=n_tokens))
        failure = decode_answer(await read_frame(stream, limits.EXPERTS_REPLY), {1: Expected(1, WIDTH)})
        assert isinstance(failure, Failure)
        assert (failure.error.type, failure.error.details["term"]) == ("stale_term", 2)
        with pytest.raises(NetworkError):  # noqa: PT012 - a frame may still fit into the stream
            while True:
                await stream.send(a_dispatch(1))
                await trio.sleep(0.01)
        assert swarm.worker.experts.statistics.dispatches == dispatches
        assert "term 2 is certified" in swarm.worker.experts.statistics.last_refusal


async def test_a_term_that_is_not_certified_here_is_not_obeyed(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        swarm.elect(0, 1)
        await swarm.joined(0)
        await swarm.leaders[0].assign(1)
        answer = await swarm.leaders[0].dispatch(swarm.network.peer_id, 2)
        assert isinstance(answer, Failure)
        assert answer.error.type == "uncertified_term"
        assert swarm.worker.experts.statistics.refused == 1


@pytest.mark.parametrize("order", ["assign", "begin"])
async def test_orders_of_a_term_that_is_over_end_the_membership(tmp_path: Path, order: str) -> None:
    async with lab(tmp_path) as swarm:
        first = swarm.leaders[0]
        swarm.elect(0, 5)
        await swarm.joined(0)
        await first.assign(5)
        await first.tell(
            Begin(4, 9)
            if order == "begin"
            else Assign(4, 9, "m", MODEL.manifest.id, (str(first.network.peer_id),), ALL)
        )
        await swarm.joined(0, 2)
        assert swarm.worker.epochs.names() == ((5, 1),)
        assert len(swarm.backends) == 1


async def test_notices_of_strangers_are_not_logged_as_requests(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        swarm.elect(0, 1)
        await swarm.joined(0)
        stream = await swarm.leaders[0].network.open_stream(swarm.network.peer_id, EXPERTS)
        await stream.send(encode_notice(7, "req-1", begins=True))
        with pytest.raises(NetworkError):
            await stream.receive_exactly(1)
        assert swarm.worker.experts._running == {}


async def test_draining_is_told_to_this_leader_and_every_later_one(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        first, second, _ = swarm.leaders
        swarm.elect(0, 1)
        await swarm.joined(0)
        swarm.worker.set_draining(True)
        await eventually(lambda: first.policies == [True])
        await first.streams[-1].reset()
        await eventually(lambda: first.policies == [True, True])
        swarm.elect(1, 2)
        await eventually(lambda: second.policies == [True])
        swarm.worker.set_draining(False)
        await eventually(lambda: second.policies == [True, False])
        await second.streams[-1].reset()
        await swarm.joined(1, 2)
        await trio.sleep(0.1)
        assert second.policies == [True, False]  # the default needs no word


async def test_a_node_that_leads_is_its_own_worker(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        itself = swarm.leaders[2]
        swarm.elect(2, 1)
        await swarm.joined(2)
        assert swarm.worker.refusal() is None
        await itself.assign(1)
        for n_tokens in (1, 500):
            answer = await itself.dispatch(swarm.network.peer_id, 1, n_tokens=n_tokens)
            assert isinstance(answer, Reply)
        await trio.sleep(2.5)  # nobody pings it, and it is alive
        assert swarm.worker.refusal() is None
        swarm.elect(0, 2)
        await swarm.joined(0)
        assert swarm.leaders[0].hellos[0].holding == ((1, 1),)


async def test_a_connection_that_somebody_else_makes_is_waited_for(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        await swarm.network.disconnect(swarm.leaders[1].network.peer_id)
        swarm.elect(1, 1)
        await trio.sleep(0.1)
        assert not swarm.worker.membership.state.connected
        await swarm.leaders[1].network.connect(swarm.network.addresses[0])
        await swarm.joined(1)


async def test_no_more_names_than_a_hello_holds(tmp_path: Path) -> None:
    async with lab(tmp_path) as swarm:
        swarm.elect(0, 1)
        await swarm.joined(0)
        await swarm.leaders[0].assign(1, 1)
        for epoch in range(2, 7):  # the same share: further names of what has begun
            await swarm.leaders[0].tell(
                Assign(1, epoch, "m", MODEL.manifest.id, (str(swarm.leaders[0].network.peer_id),), HALF)
            )
            await eventually(lambda epoch=epoch: (1, epoch) in swarm.worker.epochs.names())  # type: ignore[misc]
        assert swarm.worker.epochs.names() == ((1, 6), (1, 5), (1, 4), (1, 3))
