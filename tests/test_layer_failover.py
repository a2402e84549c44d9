"""A worker fails in the middle of a layer: another, or the leader's own copy, gives the rows that it would have given.

Real experts of a tiny model on a network in memory; `collect` blocks a thread as the decode thread does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from capabilities.errors import BadModelFile, ExpertsUnavailable, Internal, SwarmError
from scheduler.dispatch import LayerRouting
from scheduler.layer_cost import PeerSpeed
from swarmnode.expert_messages import PROTOCOL, HeldLayer, encode_failure, encode_reply
from swarmnode.leader import flight
from swarmnode.leader.link import PeerLink
from swarmnode.leader.own_experts import OWN_COPY, OwnExperts
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.routing import OWN_CLASS, Routing
from swarmnode.leadership import NamedLeader
from swarmnode.net.interface import PeerId, Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.worker.epochs import Epochs, ExpertSet
from swarmnode.worker.experts_service import ExpertsService
from tests.expert_models import TakenApart, take_apart
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

MODEL = take_apart("olmoe", "q4_0")
LAYER = MODEL.layer
ALL = range(LAYER.n_expert)
CLASS = OWN_CLASS


class Kept:
    """A stream that keeps what a worker sends, until the test delivers it."""

    def __init__(self, stream: Stream, hand: Hand) -> None:
        self._stream = stream
        self._hand = hand

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def send_nowait(self, data: bytes) -> bool:
        self._hand.kept.append((self._stream, bytes(data)))
        return True

    async def send(self, data: bytes) -> None:
        self.send_nowait(data)


@dataclass
class Hand:
    """A real worker that holds every expert of the layer; its answers wait in `kept` while `held_back`."""

    network: MemoryNetwork
    link: PeerLink
    service: ExpertsService | None = None
    held_back: bool = False
    kept: list[tuple[Stream, bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.link.peer)

    @property
    def asked(self) -> int:
        return self.link.statistics.dispatches

    async def handle(self, stream: Stream) -> None:
        assert self.service is not None
        await self.service.handle(Kept(stream, self) if self.held_back else stream)  # type: ignore[arg-type]

    async def deliver(self, data: bytes | None = None) -> None:
        stream, right = self.kept.pop(0)
        await stream.send(right if data is None else data)


@dataclass
class Bench:
    hub: MemoryHub
    leader: PeerId
    remote: RemoteExperts
    hands: list[Hand]

    def route(self, *orders: str, own: bool = False, classes: dict[int, str] | None = None) -> None:
        """Experts take the orders in turn: "01" is held by the first worker, then by the second."""
        kinds = {self.hands[i].name: kind for i, kind in (classes or dict.fromkeys(range(3), CLASS)).items()}
        speeds = {peer: PeerSpeed(0.0, 1_000.0, numeric_class=kind) for peer, kind in kinds.items()}
        holders = [tuple(self.hands[int(i)].name for i in orders[e % len(orders)]) for e in ALL]
        table = LayerRouting(LAYER.layer, holders, speeds=speeds, shares_load=False, fallback=OWN_COPY if own else None)
        links = {hand.name: hand.link for hand in self.hands}
        self.remote.set_routing(
            Routing(1, 1, {LAYER.layer: table}, links, {}, classes={**kinds, OWN_COPY: CLASS} if kinds else {})
        )

    async def step(self, x: F32, ids: I32, weights: F32 | None = None) -> F32:
        def run() -> F32:
            self.remote.begin_step(["req-1"])
            if weights is None:
                self.remote.dispatch(LAYER.layer, x, ids)
                return self.remote.collect(LAYER.layer)
            self.remote.dispatch_sum(LAYER.layer, x, ids, weights)
            return self.remote.collect_sum(LAYER.layer)

        return await trio.to_thread.run_sync(run)

    async def interrupted(self, fault: Callable[[], object], *args: F32 | I32) -> F32:
        """A step in which `fault` (async) happens once the first worker has computed."""
        out: list[F32] = []

        async def step() -> None:
            out.append(await self.step(*args))  # type: ignore[arg-type]

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(step)
                await eventually(lambda: self.hands[0].kept)
                await fault()  # type: ignore[misc]
        return out[0]


@asynccontextmanager
async def bench(*, held_back: str = "0", own: OwnExperts | None = None) -> AsyncIterator[Bench]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        leader, hands = hub.join(), []
        for i in range(3):
            network, backend = hub.join(), GgmlExperts(Device("CPU"))
            MODEL.load(backend)
            epochs = Epochs()
            epochs.current = ExpertSet(1, 1, "", {}, backend, {LAYER.layer: HeldLayer.of(LAYER, ALL)}, loaded=True)
            hand = Hand(network, PeerLink(PeerId(network.peer_id), f"worker-{i}"), held_back=str(i) in held_back)
            hand.service = ExpertsService(epochs, NamedLeader(leader.peer_id))
            network.serve(PROTOCOL, hand.handle, max_streams_per_peer=4)
            await leader.connect(network.addresses[0])
            nursery.start_soon(hand.link.run, leader)
            assert await hand.link.wait_up()
            hands.append(hand)
        yield Bench(hub, leader.peer_id, RemoteExperts([LAYER], trio.lowlevel.current_trio_token(), own), hands)
        nursery.cancel_scope.cancel()


def inputs(n_tokens: int = 3, n_used: int = 4) -> tuple[F32, I32]:
    generator = np.random.default_rng(n_tokens)
    x = generator.standard_normal((n_tokens, LAYER.n_in), np.float32)
    return x, np.stack([generator.permutation(ALL)[:n_used] for _ in range(n_tokens)]).astype(np.int32)


def right(x: F32, ids: I32) -> F32:
    backend = GgmlExperts(Device("CPU"))
    MODEL.load(backend)
    tokens = np.repeat(np.arange(len(ids), dtype=np.int32), ids.shape[1])
    return backend.compute(LAYER.layer, x, tokens, ids.reshape(-1)).reshape(*ids.shape, LAYER.n_out)


def own_copy(model: TakenApart = MODEL, **more: int) -> OwnExperts:
    return OwnExperts(model.manifest, model.source, lambda: Device("CPU"), **more)


NONSENSE = {
    "refusal": encode_failure(1, Internal("no memory")),
    "junk": b"\xff" * 66,
    "one row too few": encode_reply(1, 1, np.zeros((11, LAYER.n_out), np.float32)),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
async def test_nonsense_is_replaced_within_the_layer(data: bytes) -> None:
    x, ids = inputs()
    async with bench() as swarm:
        swarm.route("01")
        y = await swarm.interrupted(lambda: swarm.hands[0].deliver(data), x, ids)
        np.testing.assert_array_equal(y, right(x, ids))
        assert swarm.hands[0].link.closed is not None
        assert (swarm.hands[0].asked, swarm.hands[1].asked, swarm.hands[2].asked) == (1, 1, 0)
        np.testing.assert_array_equal(await swarm.step(x, ids), right(x, ids))  # the next layer goes around it
        assert swarm.hands[0].asked == 1
        assert (swarm.remote.failover.failures, swarm.remote.failover.mixed_steps) == (1, 0)


async def test_rows_that_overflowed_are_replaced_and_their_peer_is_asked_again() -> None:
    x, ids = inputs()
    async with bench() as swarm:
        swarm.route("01")
        overflowed = encode_reply(1, 1, np.full((12, LAYER.n_out), np.nan, np.float32))
        y = await swarm.interrupted(lambda: swarm.hands[0].deliver(overflowed), x, ids)
        np.testing.assert_array_equal(y, right(x, ids))
        assert swarm.hands[0].link.closed is None
        assert (swarm.hands[0].asked, swarm.hands[1].asked, swarm.hands[2].asked) == (1, 1, 0)
        again = await swarm.interrupted(swarm.hands[0].deliver, x, ids)
        np.testing.assert_array_equal(again, right(x, ids))
        assert (swarm.hands[0].asked, swarm.hands[1].asked) == (2, 1)
        assert swarm.remote.failover.failures == 0


async def test_a_broken_connection_is_replaced_by_several_where_no_one_holds_it_all() -> None:
    x, ids = inputs()
    async with bench() as swarm:
        swarm.route("01", "02")

        async def cut() -> None:
            swarm.hub.cut(swarm.leader, swarm.hands[0].network.peer_id)

        np.testing.assert_array_equal(await swarm.interrupted(cut, x, ids), right(x, ids))
        assert (swarm.hands[1].asked, swarm.hands[2].asked) == (1, 1)


async def test_two_failures_in_one_layer() -> None:
    x, ids = inputs()
    async with bench(held_back="01") as swarm:
        swarm.route("012")

        async def both() -> None:
            swarm.hands[0].link.fail("disconnected", "a test")
            await eventually(lambda: swarm.hands[1].kept)
            swarm.hands[1].link.fail("disconnected", "a test")

        np.testing.assert_array_equal(await swarm.interrupted(both, x, ids), right(x, ids))
        assert swarm.hands[2].asked == 1


async def test_a_silent_peer_is_asked_past_long_before_its_deadline_and_then_gone_around() -> None:
    x, ids = inputs()
    async with bench() as swarm:
        swarm.route("01")
        with trio.fail_after(flight.deadline_s(12, 0, None) - 1):
            np.testing.assert_array_equal(await swarm.step(x, ids), right(x, ids))
        assert (swarm.remote.failover.hedges, swarm.remote.failover.failures) == (1, 0)
        assert swarm.hands[0].link.closed is None  # slow is not dead
        await swarm.step(x, ids)
        assert (swarm.hands[0].asked, swarm.hands[1].asked) == (1, 2)
        await swarm.hands[0].deliver()  # late, and nobody minds
        await eventually(lambda: swarm.hands[0].link.statistics.bytes_back > 0)
        swarm.hands[0].held_back = False
        await swarm.interrupted(swarm.hands[0].deliver, x, ids)  # it is the first again
        assert swarm.hands[1].asked == 2


async def test_whoever_is_asked_past_and_never_answers_fails_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "deadline_s", lambda rows, nbytes, rate: 0.6)
    monkeypatch.setattr(flight, "hedge_after_s", lambda rows, rate: 0.1)
    x, ids = inputs()
    async with bench(held_back="02") as swarm:
        swarm.route("01")
        await swarm.step(x, ids)
        assert swarm.hands[0].link.closed is None
        swarm.route("20", "21")  # which takes some waiting, and so time passes
        with pytest.raises(SwarmError):
            await swarm.step(x, ids)
        await eventually(lambda: swarm.hands[0].link.closed is not None)
        assert swarm.hands[0].link.closed.details["cause"] == "timeout"  # type: ignore[union-attr]


async def test_another_class_is_asked_only_at_the_deadline_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "deadline_s", lambda rows, nbytes, rate: 0.6)
    x, ids = inputs()
    async with bench() as swarm:
        swarm.route("01", classes={0: "one", 1: "another"})
        np.testing.assert_array_equal(await swarm.step(x, ids), right(x, ids))
        assert (swarm.remote.failover.hedges, swarm.remote.failover.failures) == (0, 1)
        assert swarm.remote.mixed
        assert swarm.remote.failover.mixed_steps == 1
        await eventually(lambda: swarm.hands[0].link.closed is not None)
        swarm.route("12")
        await swarm.step(x, ids)
        assert not swarm.remote.mixed


@pytest.mark.parametrize("classes", [{0: CLASS, 1: "another"}, {0: "another", 1: "another"}, {0: CLASS}])
async def test_kernels_that_are_not_known_to_have_the_leaders_bits_are_told_though_nobody_stood_in(
    classes: dict[int, str],
) -> None:
    x, ids = inputs()
    async with bench(held_back="") as swarm:
        swarm.route("0", "1", classes=classes)
        await swarm.step(x, ids)
        assert swarm.remote.mixed
        swarm.route("0", "1")
        await swarm.step(x, ids)
        assert not swarm.remote.mixed, "that was another step"
        assert (swarm.remote.failover.failures, swarm.remote.failover.mixed_steps) == (0, 0)


async def test_sums_are_the_same_whoever_takes_a_group_over() -> None:
    x, ids = inputs(5)
    weights = np.random.default_rng(1).random(ids.shape, np.float32)
    async with bench(held_back="") as swarm:
        swarm.route("0", "1")
        expected = await swarm.step(x, ids, weights)
    for orders in (("02", "12"), ("01", "12"), ("01", "12", "02", "10"), ("0", "1")):
        async with bench(own=own_copy()) as swarm:
            swarm.route(*orders, own=True)

            async def fail(swarm: Bench = swarm) -> None:
                swarm.hands[0].link.fail("disconnected", "a test")

            np.testing.assert_array_equal(await swarm.interrupted(fail, x, ids, weights), expected)
            assert (swarm.remote.failover.own_rows > 0) == (orders == ("0", "1"))
            np.testing.assert_array_equal(await swarm.step(x, ids, weights), expected)


async def test_the_leaders_own_copy_is_the_last_that_is_asked() -> None:
    x, ids = inputs()
    own = own_copy()
    async with bench(own=own) as swarm:
        swarm.route("0", own=True)

        async def fail() -> None:
            swarm.hands[0].link.fail("disconnected", "a test")

        np.testing.assert_array_equal(await swarm.interrupted(fail, x, ids), right(x, ids))
        assert swarm.remote.failover.own_rows == ids.size
        assert not swarm.remote.mixed
        np.testing.assert_array_equal(await swarm.step(x, ids), right(x, ids))
        assert own.loads == len(set(ids.reshape(-1).tolist()))  # kept
    own.close()


async def test_an_own_copy_that_cannot_be_read_is_no_copy() -> None:
    class Gone:
        def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
            raise BadModelFile("the file is gone")

    x, ids = inputs()
    async with bench(own=OwnExperts(MODEL.manifest, Gone(), lambda: Device("CPU"))) as swarm:
        swarm.route("0", own=True)
        swarm.hands[0].link.fail("disconnected", "a test")
        with pytest.raises(ExpertsUnavailable) as caught:
            await swarm.step(x, ids)
        assert caught.value.details["peer"] == swarm.hands[0].name


@pytest.mark.parametrize("quantisation", ["f32", "q4_0", "q8_0"])
def test_the_own_copy_gives_the_bits_of_a_share_within_its_bound(quantisation: str) -> None:
    model = take_apart("olmoe", quantisation)
    layer = model.layer
    backend = GgmlExperts(Device("CPU"))
    model.load(backend)
    own = own_copy(model, bytes_max=2 * layer.expert_bytes)
    generator = np.random.default_rng(3)
    for n_tokens in (1, 9):
        x = generator.standard_normal((n_tokens, layer.n_in), np.float32)
        tokens = np.repeat(np.arange(n_tokens, dtype=np.int32), 3)
        experts = np.concatenate([generator.permutation(layer.n_expert)[:3] for _ in range(n_tokens)]).astype(np.int32)
        expected = backend.compute(layer.layer, x, tokens, experts)
        np.testing.assert_array_equal(own.compute(layer.layer, x, tokens, experts), expected)
    held = [expert for expert in range(layer.n_expert) if own.holds(layer.layer, expert)]
    assert len(held) == 2
    assert own.loads >= 3
    own.close()
