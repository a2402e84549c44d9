"""Partial sums over a network in memory: real workers' sums, the same bits whoever answers first, or for whom."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import trio

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from capabilities.errors import ExpertsUnavailable, PeerMistake, SwarmError
from scheduler.combine import sum_rows
from scheduler.dispatch import LayerRouting, plan
from swarmnode.expert_messages import PROTOCOL, DispatchHead, HeldLayer, Notice, encode_reply, request_head
from swarmnode.leader import remote_experts
from swarmnode.leader.link import PeerLink
from swarmnode.leader.probe import probe
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.routing import Routing
from swarmnode.leadership import NamedLeader
from swarmnode.net.interface import PeerId, Stream
from swarmnode.net.memory import MemoryNetwork, open_memory_hub
from swarmnode.worker.epochs import Epochs, ExpertSet
from swarmnode.worker.experts_service import ExpertsService
from tests.expert_models import take_apart
from tests.net_tools import eventually

MODEL = take_apart("olmoe")
LAYER = MODEL.layer
ALL = range(LAYER.n_expert)


class Mailbag:
    """A stream that keeps what a worker sends until the test delivers it."""

    def __init__(self, stream: Stream, kept: list[tuple[Stream, bytes]]) -> None:
        self._stream = stream
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def send_nowait(self, data: bytes) -> bool:
        self._kept.append((self._stream, bytes(data)))
        return True

    async def send(self, data: bytes) -> None:
        self.send_nowait(data)


@dataclass
class Hand:
    """A real worker that holds every expert of the layer. `held_back`: its answers wait in `kept`."""

    network: MemoryNetwork
    service: ExpertsService
    held_back: bool = False
    kept: list[tuple[Stream, bytes]] = field(default_factory=list)

    async def handle(self, stream: Stream) -> None:
        await self.service.handle(Mailbag(stream, self.kept) if self.held_back else stream)  # type: ignore[arg-type]

    async def deliver(self, data: bytes | None = None) -> None:
        stream, right = self.kept.pop(0)
        await stream.send(right if data is None else data)


@dataclass
class Trio:
    """A leader's RemoteExperts and three workers, among whom the experts are dealt in turn."""

    remote: RemoteExperts
    hands: list[Hand]
    links: list[PeerLink]
    routing: Routing

    @property
    def names(self) -> list[str]:
        return [str(link.peer) for link in self.links]

    def holders(self, *orders: Sequence[int]) -> list[tuple[str, ...]]:
        """For each expert its holders, by index, taking the orders in turn."""
        return [tuple(self.names[i] for i in order) for order, _ in zip(itertools.cycle(orders), ALL, strict=False)]

    def route(self, holders: Sequence[tuple[str, ...]], away: Sequence[str] = ()) -> None:
        self.routing = replace(self.routing, layers={LAYER.layer: LayerRouting(LAYER.layer, holders, away)})
        self.remote.set_routing(self.routing)

    async def totals(self, x: F32, ids: I32, weights: F32) -> F32:
        """Dispatch and collect, in a thread as the decode thread does."""

        def run() -> F32:
            self.remote.begin_step(["req-1"])
            self.remote.dispatch_sum(LAYER.layer, x, ids, weights)
            return self.remote.collect_sum(LAYER.layer)

        return await trio.to_thread.run_sync(run)

    def frames(self) -> int:
        return sum(len(hand.kept) for hand in self.hands)


@asynccontextmanager
async def three(*, held_back: bool = False, quantized: bool = False) -> AsyncIterator[Trio]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        leader, hands, links = hub.join(), [], []
        for i in range(3):
            network, backend = hub.join(), GgmlExperts(Device("CPU"))
            MODEL.load(backend)
            held = {LAYER.layer: HeldLayer.of(LAYER, ALL)}
            epochs = Epochs()
            epochs.current = ExpertSet(1, 1, "", {}, backend, held, loaded=True)
            hand = Hand(network, ExpertsService(epochs, NamedLeader(leader.peer_id)), held_back)
            network.serve(PROTOCOL, hand.handle, max_streams_per_peer=4)
            await leader.connect(network.addresses[0])
            link = PeerLink(PeerId(network.peer_id), f"worker-{i}")
            nursery.start_soon(link.run, leader)
            assert await link.wait_up()
            hands.append(hand)
            links.append(link)
        names = [str(link.peer) for link in links]
        q8 = {names[0]: frozenset({LAYER.layer})} if quantized else {}
        remote = RemoteExperts([LAYER], trio.lowlevel.current_trio_token())
        swarm = Trio(remote, hands, links, Routing(1, 1, {}, dict(zip(names, links, strict=True)), q8))
        swarm.route(swarm.holders([0], [1], [2]))
        yield swarm
        nursery.cancel_scope.cancel()


def inputs(n_tokens: int, n_used: int = 4) -> tuple[F32, I32, F32]:
    """Activations, ids that need all three workers for each token, weights."""
    generator = np.random.default_rng(n_tokens)
    x = generator.standard_normal((n_tokens, LAYER.n_in), np.float32)
    ids = np.array([[0, 1, 2, *generator.permutation(range(3, 8))][:n_used] for _ in range(n_tokens)], np.int32)
    return x, generator.permuted(ids, axis=1), generator.random((n_tokens, n_used), np.float32)


def rows(x: F32, ids: I32) -> F32:
    """Every expert's row, computed here [T, K, n_out]."""
    backend = GgmlExperts(Device("CPU"))
    MODEL.load(backend)
    tokens = np.repeat(np.arange(len(ids), dtype=np.int32), ids.shape[1])
    return backend.compute(LAYER.layer, x, tokens, ids.reshape(-1)).reshape(*ids.shape, LAYER.n_out)


def expected(swarm: Trio, x: F32, ids: I32, weights: F32) -> F32:
    """The groups' sums, added here."""
    routing = LayerRouting(LAYER.layer, swarm.holders([0], [1], [2]))
    return sum_rows(plan(ids, routing), rows(x, ids), weights)


@pytest.mark.parametrize("n_tokens", [1, 2, 19])
async def test_workers_sums_are_what_their_rows_add_up_to(n_tokens: int) -> None:
    x, ids, weights = inputs(n_tokens)
    async with three() as swarm:
        totals = await swarm.totals(x, ids, weights)
        np.testing.assert_array_equal(totals, expected(swarm, x, ids, weights))
        exact = np.einsum("tk,tkn->tn", weights.astype(np.float64), rows(x, ids).astype(np.float64))
        assert (np.linalg.norm(totals - exact, axis=1) <= 1e-6 * np.linalg.norm(exact, axis=1)).all()
        for link in swarm.links:
            s = link.statistics
            assert s.bytes_back <= n_tokens * 4 * LAYER.n_out + 96
            assert s.bytes_out <= n_tokens * 4 * LAYER.n_in + 12 * s.rows + 96
        assert sum(link.statistics.rows for link in swarm.links) == ids.size


async def test_every_order_of_arrival_gives_the_same_bits() -> None:
    x, ids, weights = inputs(4)
    async with three(held_back=True) as swarm:
        for order in itertools.permutations(swarm.hands):
            results: list[F32] = []

            async def step(results: list[F32] = results) -> None:
                results.append(await swarm.totals(x, ids, weights))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(step)
                await eventually(lambda: swarm.frames() == 3)
                for hand in order:
                    assert not results
                    await hand.deliver()
                    await trio.sleep(0.002)
            np.testing.assert_array_equal(results[0], expected(swarm, x, ids, weights))


async def test_frames_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights = inputs(23)
    async with three() as swarm:
        whole = await swarm.totals(x, ids, weights)
        for tokens in (1, 5, 22):
            monkeypatch.setattr(remote_experts, "dispatch_tokens_max", lambda n_in, tokens=tokens: tokens)
            np.testing.assert_array_equal(await swarm.totals(x, ids, weights), whole)
        monkeypatch.undo()
        for token in range(len(x)):
            some = slice(token, token + 1)
            np.testing.assert_array_equal(await swarm.totals(x[some], ids[some], weights[some]), whole[some])


async def test_who_answers_in_a_holders_place_answers_row_by_row() -> None:
    """The groups are the epoch's, so a replacement changes no bit, even where it holds experts of its own."""
    x, ids, weights = inputs(6)
    async with three() as swarm:
        whole = await swarm.totals(x, ids, weights)
        sent = swarm.links[2].statistics.dispatches
        swarm.route(swarm.holders([0, 1], [1, 2], [2, 0]), away=swarm.names[2:])
        back = [link.statistics.bytes_back for link in swarm.links]
        np.testing.assert_array_equal(await swarm.totals(x, ids, weights), whole)
        assert swarm.links[2].statistics.dispatches == sent
        more = [link.statistics.bytes_back - before for link, before in zip(swarm.links, back, strict=True)]
        assert sum(more) > ids.size * 4 * LAYER.n_out, "a row an expert"
        swarm.route(swarm.holders([0, 1], [1, 2], [2, 0]))
        np.testing.assert_array_equal(await swarm.totals(x, ids, weights), whole)


async def test_activations_go_quantised_with_weights_too() -> None:
    x, ids, weights = inputs(3)
    async with three(quantized=True) as swarm:
        totals = await swarm.totals(x, ids, weights)
        right = expected(swarm, x, ids, weights)
        error = np.linalg.norm(totals - right, axis=1) / np.linalg.norm(right, axis=1)
        assert 1e-5 < error.max() < 0.05
        assert swarm.links[0].statistics.bytes_out < swarm.links[1].statistics.bytes_out - 3 * LAYER.n_in


@pytest.mark.parametrize(("what", "cause"), [("a row an expert", "bad_reply"), ("not finite", "not_finite")])
async def test_a_wrong_answer_is_refused_and_named(what: str, cause: str) -> None:
    x, ids, weights = inputs(2)
    async with three(held_back=True) as swarm:
        errors: list[SwarmError] = []

        async def step() -> None:
            with pytest.raises(SwarmError) as caught:
                await swarm.totals(x, ids, weights)
            errors.append(caught.value)

        n_rows = 4 if what == "a row an expert" else 2
        y = np.full((n_rows, LAYER.n_out), 1 if n_rows == 4 else np.inf, np.float32)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await eventually(lambda: swarm.frames() == 3)
            await swarm.hands[1].deliver(encode_reply(1, 1, y))
        assert isinstance(errors[0], ExpertsUnavailable)
        assert (errors[0].details["peer"], errors[0].details["cause"]) == (swarm.names[1], cause)


# -- the probe --------------------------------------------------------------------------------------------------------


class Known:
    """The rows that the probe should find (in place of ProbeReference)."""

    def activations(self, _layer: object) -> F32:
        return inputs(1)[0]

    async def expected(self, _layer: object, experts: Sequence[int], _holder: object) -> F32:
        return rows(self.activations(None), np.array([experts], np.int32))[0]

    async def explains(self, *_about: object) -> bool:
        return False


async def prove(swarm: Trio, *, partial_sums: bool) -> bool:
    held = {LAYER.layer: tuple(ALL)}
    probed = await probe(
        swarm.links[0], Known(), MODEL.manifest, held, term=1, epoch=1, partial_sums=partial_sums  # type: ignore[arg-type]
    )  # fmt: skip
    return probed.agreement.bit_identical


async def test_the_probe_asks_for_sums_where_they_are_used() -> None:
    async with three() as swarm:
        assert await prove(swarm, partial_sums=False)
        assert swarm.links[0].statistics.dispatches == 1
        assert await prove(swarm, partial_sums=True)
        assert swarm.links[0].statistics.dispatches == 3


async def test_a_worker_that_adds_otherwise_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(y: F32, _weights: F32, _tokens: I32) -> F32:
        return y.sum(0, keepdims=True)

    monkeypatch.setattr("swarmnode.worker.experts_service.weighted_sums", unweighted)
    async with three() as swarm:
        with pytest.raises(ExpertsUnavailable, match="its sums differ") as caught:
            await prove(swarm, partial_sums=True)
        assert caught.value.details["cause"] == "bad_reply"
        assert await prove(swarm, partial_sums=False)


async def test_a_worker_that_does_not_know_sums_refuses_and_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def earlier(header: list[int]) -> DispatchHead | Notice:
        if header[8] > 1:
            raise PeerMistake(f"request: field 8 is {header[8]}, not an integer in 0..1")
        return request_head(header)

    monkeypatch.setattr("swarmnode.worker.experts_service.request_head", earlier)
    async with three() as swarm:
        assert await prove(swarm, partial_sums=False)
        with pytest.raises(ExpertsUnavailable) as caught:
            await prove(swarm, partial_sums=True)
        assert caught.value.details["peer"] == swarm.names[0]
        assert "field 8" in swarm.hands[0].service.statistics.last_refusal
