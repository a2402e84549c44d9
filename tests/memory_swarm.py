"""A leader's parts among fake workers on a network in memory: experts are plain arithmetic, the clock may be a mock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
import trio.testing

from backends.experts import F32
from backends.manifest import LayerExperts, Manifest
from capabilities.agreement import MEDIAN_LIMIT, compare, same_function
from capabilities.precision import Precision
from capabilities.row_grades import grade_rows
from capabilities.verdict import MemoryBoard, VerdictBoard
from scheduler.combine import weighted_sums
from scheduler.placement_record import PlacementRecord
from swarmnode import limits
from swarmnode.expert_messages import DispatchHead, HeldLayer, decode_dispatch
from swarmnode.leader.members import Member, Members
from swarmnode.leader.placer import Placer, PlacerSettings
from swarmnode.leader.probe import Crafted
from swarmnode.leader.recomputing import Judged, Sample
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.member_messages import PROTOCOL as MEMBER
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.pinger import serve_pings
from tests.fault_tools import FakeWorker
from tests.shard_models import shard_model

MODEL = shard_model()
LAYERS = tuple(layer.layer for layer in MODEL.manifest.layers)
N_EXPERT = MODEL.manifest.layers[0].n_expert
EXPERT_BYTES = MODEL.manifest.layers[0].expert_bytes


def rows_of(layer: int, x: F32, tokens: Iterable[int], experts: Iterable[int], n_out: int) -> F32:
    """The arithmetic: expert e of layer l makes sum(x) * (e + 1) + l, in every column a little more."""
    sums = x.sum(1)
    firsts = [sums[token] * np.float32(expert + 1) + layer for token, expert in zip(tokens, experts, strict=True)]
    return (np.array(firsts, np.float32)[:, None] + np.arange(n_out, dtype=np.float32)).astype(np.float32)


class Arithmetic:
    """What every fake worker computes: any expert of any layer."""

    def __init__(self, manifest: Manifest = MODEL.manifest) -> None:
        self._layers = {layer.layer: HeldLayer.of(layer, range(layer.n_expert)) for layer in manifest.layers}

    def rows(self, head: DispatchHead, payload: bytes | memoryview) -> F32:
        layer = self._layers[head.layer]
        dispatch = decode_dispatch(head, payload, layer)
        x = np.asarray(dispatch.x, np.float32)
        y = rows_of(head.layer, x, dispatch.tokens, dispatch.experts, layer.n_out)
        return y if dispatch.weights is None else weighted_sums(y, dispatch.weights, dispatch.tokens)


class Reference:
    """What the leader's own computation says (in place of ProbeReference)."""

    def activations(self, layer: LayerExperts) -> F32:
        return np.ones((1, layer.n_in), np.float32)

    async def expected(self, layer: LayerExperts, experts: Sequence[int], holder: PeerId) -> F32:
        return rows_of(layer.layer, self.activations(layer), [0] * len(experts), experts, layer.n_out)

    async def crafted(
        self, layer: LayerExperts, expert: int, holder: PeerId, ordinary: F32, seed: int, *, rounded: bool
    ) -> Crafted:
        """Any row shows how a worker adds: who is off by a little adds in half precision."""
        right = rows_of(layer.layer, ordinary, range(len(ordinary)), [expert] * len(ordinary), layer.n_out)

        async def judge(answer: F32) -> Precision:
            off = compare(answer, right)
            if off.median_relative_l2 < MEDIAN_LIMIT:
                return Precision.F32
            return Precision.F16 if same_function(off) else Precision.UNKNOWN

        async def explains(answer: F32) -> bool:
            return False

        return Crafted(ordinary, judge, explains)

    async def explains(self, layer: LayerExperts, experts: Sequence[int], rows: F32, holder: PeerId) -> bool:
        return False


class Judge:
    """The same, of answers that requests got (in place of judge.Judge)."""

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Callable[[Sample], Awaitable[Judged]]]:
        yield self._judge

    async def prepare(self) -> None:
        pass

    async def rest(self) -> None:
        pass

    async def _judge(self, sample: Sample) -> Judged:
        x = np.asarray(sample.x, np.float32)
        right = rows_of(sample.layer.layer, x, sample.tokens, sample.experts, sample.layer.n_out)
        return Judged(grade_rows(sample.answer, right, lambda _: None, 1024), sample.experts, telling=True)


class Engine:
    """A decode thread that is between two steps."""

    boundaries = 0
    running = 0

    def __init__(self) -> None:
        self.distrusted: list[list[str]] = []

    def distrust(self, find: Callable[[], Sequence[str]], told: Callable[[Sequence[str]], None]) -> None:
        self.distrusted.append(list(find()))
        told(())

    async def step_boundary(self) -> None:
        self.boundaries += 1

    def statistics(self) -> Any:
        return SimpleNamespace(batcher=SimpleNamespace(running=self.running))


@dataclass
class Lab:
    """A leader: members, placement and links, without a model in llama.cpp."""

    hub: MemoryHub
    network: MemoryNetwork
    members: Members
    placer: Placer
    remote: RemoteExperts
    nursery: trio.Nursery
    engine: Engine

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    @property
    def ready(self) -> bool:
        return self.placer.coverage.refusal() is None

    async def join(self, name: str, **fields: Any) -> Stay:
        """A fake worker that says hello; it stays until `leave`."""
        network = fields.pop("network", None) or self.hub.join()
        stay = Stay(FakeWorker(network, self.address, name=name, right=Arithmetic(), **fields), self)
        await stay.back()
        return stay


@dataclass
class Stay:
    fake: FakeWorker
    lab: Lab
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def peer(self) -> PeerId:
        return self.fake.network.peer_id

    @property
    def member(self) -> Member:
        """What the leader knows of it."""
        return self.lab.members.by_peer[self.peer]

    @property
    def state(self) -> str:
        return self.lab.placer.coverage.state_of(self.member)

    async def run(self) -> None:
        with self.scope:
            await self.fake.run()

    async def leave(self) -> None:
        self.scope.cancel()
        await self.fake.network.disconnect(self.lab.network.peer_id)
        await trio.testing.wait_all_tasks_blocked()

    async def back(self) -> None:
        """The same peer joins again."""
        self.scope = trio.CancelScope()
        self.lab.nursery.start_soon(self.run)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def leader_lab(
    expected: int = 0,
    settle_s: float = 3.0,
    term: int = 1,
    *,
    inherited: PlacementRecord | None = None,
    on_record: Callable[[bytes], None] = lambda _: None,
    board: VerdictBoard | None = None,
    **settings: Any,
) -> AsyncIterator[Lab]:
    """settings: more of PlacerSettings."""
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        network = hub.join()

        def to_placer(event: str) -> Callable[..., None]:
            return lambda *news: getattr(placer, event)(*news)  # noqa: PLW0108 - there is no placer yet

        members = Members(network, *map(to_placer, ("joined", "progressed", "left", "spoke")))
        remote = RemoteExperts(MODEL.manifest.layers, trio.lowlevel.current_trio_token())
        made = PlacerSettings(expected, settle_s, "f32", **settings)
        engine = Engine()
        placer = Placer(
            network, members, MODEL.manifest, Reference(), Judge(), remote, engine, made, term,  # type: ignore[arg-type]
            board=board or MemoryBoard(), inherited=inherited, on_record=on_record,
        )  # fmt: skip
        await nursery.start(members.watch.run)
        network.serve(MEMBER, members.handle, max_streams_per_peer=limits.MEMBER_STREAMS_PER_PEER_MAX)
        serve_pings(network)
        nursery.start_soon(placer.run)
        yield Lab(hub, network, members, placer, remote, nursery, engine)
        nursery.cancel_scope.cancel()
