"""A worker and its leader on a network in memory: joining, loading, adopting, failing, coming back after every break.

The leader is a script with the real shard service; the worker is whole but for its backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from capabilities.errors import NoLeader, NotReady
from swarmnode import limits
from swarmnode.leadership import NamedLeader
from swarmnode.member_messages import (
    PROTOCOL,
    Assign,
    Begin,
    FromLeader,
    Hello,
    Progress,
    Refuse,
    decode_from_worker,
    encode,
)
from swarmnode.net.interface import Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.pinger import serve_pings
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import ShardCache
from swarmnode.wire import encode_frame, read_frame
from swarmnode.worker import loader, membership
from swarmnode.worker.service import Worker
from tests.fake_backend import FakeBackend
from tests.fault_tools import hello
from tests.memory_swarm import EXPERT_BYTES, LAYERS, MODEL
from tests.net_tools import eventually

ALL = dict.fromkeys(LAYERS, (0, 1, 2, 3))
HALF = dict.fromkeys(LAYERS, (0, 1))
OTHER_HALF = dict.fromkeys(LAYERS, (2, 3))


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
class Lab:
    """The leader's side: streams of the worker's stays, and what it said in each."""

    hub: MemoryHub
    leader: MemoryNetwork
    network: MemoryNetwork
    worker: Worker
    backends: list[FakeBackend]
    streams: list[Stream] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        self.streams.append(stream)
        while True:
            message = decode_from_worker(await read_frame(stream, limits.MEMBER_REPORT))
            if isinstance(message, Hello):
                self.hellos.append(message)
            else:
                self.reports.append(message)

    async def tell(self, message: FromLeader) -> None:
        await self.streams[-1].send(encode(message))

    async def assign(self, held: dict[int, tuple[int, ...]], epoch: int = 1, term: int = 1, **fields: Any) -> None:
        self.reports.clear()
        given = {"model": "m", "manifest": MODEL.manifest.id, "sources": (str(self.leader.peer_id),), **fields}
        await self.tell(Assign(term=term, epoch=epoch, held=held, **given))

    async def phase(self, phase: str, epoch: int = 1, term: int = 1) -> Progress:
        """The report of this phase."""

        def found() -> list[Progress]:
            return [r for r in self.reports if (r.phase, r.term, r.epoch) == (phase, term, epoch)]

        await eventually(lambda: bool(found()))
        return found()[-1]

    async def begin(self, epoch: int = 1, term: int = 1) -> None:
        await self.tell(Begin(term, epoch))
        await eventually(lambda: self.current is not None and (self.current.term, self.current.epoch) == (term, epoch))

    @property
    def current(self) -> Any:
        return self.worker.epochs.current

    @property
    def open_backends(self) -> int:
        return sum(not backend.closed for backend in self.backends)


@asynccontextmanager
async def lab(folder: Path, *, budget: int = 1 << 30, joined: bool = True) -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        leader, network = hub.join(), hub.join()
        served = ServedModel(MODEL.manifest, MODEL.manifest.to_bytes(), MODEL)
        ShardService({MODEL.manifest.id: served}.get).register(leader)
        serve_pings(leader)
        backends: list[FakeBackend] = []

        def make_backend() -> FakeBackend:
            backends.append(FakeBackend())
            return backends[-1]

        cache = ShardCache(folder, 1 << 30)
        view = NamedLeader(leader.peer_id, leader.addresses[0])
        worker = Worker(network, view, lambda: hello("w"), cache, budget, make_backend)  # type: ignore[arg-type]
        made = Lab(hub, leader, network, worker, backends)
        leader.serve(PROTOCOL, made.serve, max_streams_per_peer=limits.MEMBER_STREAMS_PER_PEER_MAX)
        nursery.start_soon(worker.run)
        if joined:
            await eventually(lambda: bool(made.hellos) and worker.membership.state.connected)
        yield made
        nursery.cancel_scope.cancel()
    assert made.open_backends == 0


async def test_a_worker_joins_loads_and_serves(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        assert worker.hellos == [hello("w")]
        await worker.assign(HALF)
        report = await worker.phase("loaded")
        assert report.memory_used_bytes == 4 * EXPERT_BYTES
        assert (report.done, report.total, report.error) == (4 * EXPERT_BYTES, 4 * EXPERT_BYTES, None)
        assert worker.current is None
        await worker.begin()
        assert worker.current.experts_held == 4
        assert worker.current.wanted == HALF
        assert {layer: held for layer, (_, held) in worker.backends[0].layers.items()} == HALF


async def test_the_same_share_is_reported_whenever_it_is_assigned_and_loaded_once(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        await worker.assign(HALF)
        await worker.phase("loaded")
        await worker.assign(HALF)  # the very same assignment: the leader wants to hear it again
        await worker.phase("loaded")
        await worker.begin()
        for term, epoch in ((1, 2), (1, 3), (2, 1)):
            await worker.assign(HALF, epoch, term)
            await worker.phase("loaded", epoch, term)
            await worker.begin(epoch, term)
        assert len(worker.backends) == 1


async def test_another_share_is_loaded_beside_the_one_that_serves(tmp_path: Path) -> None:
    async with lab(tmp_path, budget=8 * EXPERT_BYTES) as worker:
        await worker.assign(HALF)
        await worker.phase("loaded")
        await worker.begin()
        await worker.assign(OTHER_HALF, 2)
        await worker.phase("loaded", 2)
        assert (worker.current.epoch, worker.open_backends) == (1, 2)
        await worker.assign(ALL, 3)  # no room for two any more
        await worker.phase("loaded", 3)
        assert (worker.current, worker.open_backends) == (None, 1)
        await worker.begin(3)


async def test_a_new_assignment_replaces_one_that_is_being_loaded(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        make = worker.worker.membership._loader._make_backend

        def slow() -> Any:
            backend = make()
            backend.hold.clear()
            return backend

        worker.worker.membership._loader._make_backend = slow
        await worker.assign(HALF, 1)
        await eventually(lambda: len(worker.backends) == 1)
        worker.worker.membership._loader._make_backend = make
        await worker.assign(OTHER_HALF, 2)
        await trio.sleep(0.05)
        worker.backends[0].hold.set()
        await worker.phase("loaded", 2)
        assert [backend.closed for backend in worker.backends] == [True, False]
        assert not any(report.epoch == 1 and report.phase == "loaded" for report in worker.reports)


@pytest.mark.parametrize(
    ("held", "fields", "type_", "says"),
    [
        (ALL, {}, "internal", "over this worker's budget"),
        ({LAYERS[0]: (0, 4)}, {}, "peer_mistake", "expert 4 of 4"),
        ({LAYERS[0] + 1: (0,)}, {}, "peer_mistake", "no experts"),
        (HALF, {"manifest": "0" * 64}, "model_not_found", "no peer gave the manifest"),
        (HALF, {"sources": ("nobody",)}, "model_not_found", "nobody"),
    ],
    ids=["too large", "no such expert", "no such layer", "no such model", "no such source"],
)
async def test_a_share_that_cannot_be_loaded_is_reported_and_the_next_one_is_loaded(
    tmp_path: Path, held: dict[int, tuple[int, ...]], fields: dict[str, Any], type_: str, says: str
) -> None:
    async with lab(tmp_path, budget=5 * EXPERT_BYTES) as worker:
        await worker.assign(held, **fields)
        report = await worker.phase("failed")
        assert report.error is not None
        assert (report.error.type, says in report.error.message) == (type_, True), report.error.message
        await worker.assign(HALF, 2)
        await worker.phase("loaded", 2)


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), OSError("disk full"), NotReady("no device")], ids=repr)
async def test_a_backend_that_cannot_load_is_reported_and_leaves_nothing_behind(
    tmp_path: Path, fault: Exception
) -> None:
    async with lab(tmp_path) as worker:
        make = worker.worker.membership._loader._make_backend

        def broken() -> Any:
            backend = make()
            backend.fault = fault
            return backend

        worker.worker.membership._loader._make_backend = broken
        await worker.assign(HALF)
        report = await worker.phase("failed")
        assert report.error is not None
        assert report.error.type == ("not_ready" if isinstance(fault, NotReady) else "internal")
        assert worker.open_backends == 0
        worker.worker.membership._loader._make_backend = make
        await worker.assign(HALF)
        await worker.phase("loaded")


async def test_a_worker_comes_back_after_every_break_with_what_it_holds(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        await worker.assign(HALF)
        await worker.phase("loaded")
        await worker.begin()
        breaks: list[Callable[[], Any]] = [
            worker.streams[0].reset,
            lambda: worker.streams[-1].aclose(),  # noqa: PLW0108 - the newest stream at that time
            lambda: worker.leader.disconnect(worker.network.peer_id),
            lambda: worker.streams[-1].send(b"\xff" * 66),
            lambda: worker.streams[-1].send(encode_frame({"kind": "surprise"})),
            lambda: worker.tell(Refuse(NotReady("full"))),
        ]
        for number, fault in enumerate(breaks, 1):
            await fault()
            await eventually(lambda number=number: len(worker.hellos) == number + 1)  # type: ignore[misc]
            await eventually(lambda: worker.worker.membership.state.connected)
        await worker.assign(HALF, 1, 2)
        await worker.phase("loaded", 1, 2)
        assert len(worker.backends) == 1


async def test_why_there_is_no_leader_is_known(tmp_path: Path) -> None:
    async with lab(tmp_path, joined=False) as worker:
        worker.hub.cut(worker.leader.peer_id, worker.network.peer_id)
        state = worker.worker.membership.state
        await eventually(lambda: "cut" in state.reason)
        refusal = worker.worker.refusal()
        assert isinstance(refusal, NoLeader)
        assert refusal.details["peer"] == str(worker.leader.peer_id)
        worker.hub.mend(worker.leader.peer_id, worker.network.peer_id)
        await eventually(lambda: worker.worker.refusal() is None)
        await worker.tell(Refuse(NotReady("this leader is full")))
        await eventually(lambda: "full" in state.reason or state.connected)


async def test_a_silent_leader_is_no_leader_until_it_speaks_again(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        peers = worker.leader.peer_id, worker.network.peer_id
        worker.hub.set_delay(*peers, float("inf"))
        await eventually(lambda: worker.worker.refusal() is not None)
        refusal = worker.worker.refusal()
        assert refusal is not None
        assert "does not answer pings" in refusal.message
        # The connection breaks while it is silent, and a new one comes up: the verdict must not outlive the silence.
        worker.hub.cut(*peers)
        await eventually(lambda: not worker.worker.membership.state.connected)
        worker.hub.set_delay(*peers, 0.0)
        worker.hub.mend(*peers)
        await eventually(lambda: worker.worker.refusal() is None)


async def test_a_load_that_the_leader_lost_sight_of_goes_on_from_the_cache(tmp_path: Path) -> None:
    async with lab(tmp_path) as worker:
        make = worker.worker.membership._loader._make_backend

        def slow() -> Any:
            backend = make()
            backend.hold.clear()
            return backend

        worker.worker.membership._loader._make_backend = slow
        await worker.assign(HALF)
        await eventually(lambda: len(worker.backends) == 1)  # all is fetched
        sent = worker.leader.statistics().bytes_sent
        await worker.streams[-1].reset()
        worker.backends[0].hold.set()
        await eventually(lambda: len(worker.hellos) == 2)
        worker.worker.membership._loader._make_backend = make
        await worker.assign(HALF)
        await worker.phase("loaded")
        assert worker.leader.statistics().bytes_sent - sent < EXPERT_BYTES
