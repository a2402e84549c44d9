"""Layers computed on two workers: the same bits in any order of answers, and errors that name who failed.

The workers are scripts on a network in memory; `collect` blocks a thread as the decode thread does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import trio

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.experts import F32, I32
from capabilities.errors import ExpertsUnavailable, Internal, NotReady, RequestCancelled, SwarmError
from scheduler.dispatch import LayerRouting
from swarmnode import limits
from swarmnode.expert_messages import (
    PROTOCOL,
    DispatchHead,
    HeldLayer,
    Notice,
    decode_dispatch,
    encode_failure,
    encode_reply,
    request_head,
)
from swarmnode.leader import flight, remote_experts
from swarmnode.leader.link import PeerLink
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.routing import Routing
from swarmnode.net.interface import PeerId, Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.wire import Q8_0, read_frame
from tests.memory_swarm import MODEL, N_EXPERT, rows_of
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

LAYER, OTHER = MODEL.manifest.layers
WIDTH = LAYER.n_in
HELD = {layer.layer: HeldLayer.of(layer, range(layer.n_expert)) for layer in (LAYER, OTHER)}


@dataclass
class Desk:
    """A worker whose answers lie on a desk until they are sent; `prompt` ones go at once."""

    network: MemoryNetwork
    prompt: bool = True
    finished: list[tuple[Stream, bytes]] = field(default_factory=list)
    heads: list[DispatchHead] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    async def handle(self, stream: Stream) -> None:
        while True:
            frame = await read_frame(stream, limits.EXPERTS_REQUEST)
            head = request_head(frame.header)
            if isinstance(head, Notice):
                self.notices.append(head)
                continue
            self.heads.append(head)
            dispatch = decode_dispatch(head, frame.payload, HELD[head.layer])
            x = dequantize_q8_0(dispatch.x) if head.dtype == Q8_0 else dispatch.x  # type: ignore[arg-type]
            y = rows_of(head.layer, x, dispatch.tokens, dispatch.experts, WIDTH)
            self.finished.append((stream, encode_reply(head.sequence, 1, y)))
            if self.prompt:
                await self.send(0)

    async def send(self, index: int, data: bytes | None = None) -> None:
        stream, right = self.finished.pop(index)
        await stream.send(right if data is None else data)


@dataclass
class Pair:
    """A leader's RemoteExperts and two workers: the first holds the lower half of every layer's experts."""

    remote: RemoteExperts
    desks: list[Desk]
    links: list[PeerLink]
    hub: MemoryHub
    leader: PeerId
    routing: Routing

    async def step(self, x: F32, ids: I32, layer: int = LAYER.layer) -> F32:
        """Dispatch and collect one layer, in a thread."""

        def run() -> F32:
            self.remote.begin_step(["req-1"])
            self.remote.dispatch(layer, x, ids)
            return self.remote.collect(layer)

        return await trio.to_thread.run_sync(run)

    async def failing_step(self, x: F32, ids: I32, fault: Callable[[], Any]) -> SwarmError:
        """The error of a step in which `fault` (async) happens once both workers have their dispatches."""
        error: list[SwarmError] = []

        async def step() -> None:
            with pytest.raises(SwarmError) as caught:
                await self.step(x, ids)
            error.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await eventually(lambda: all(desk.finished for desk in self.desks))
            await fault()
        return error[0]


@asynccontextmanager
async def pair(*, prompt: bool = True, quantized: bool = False) -> AsyncIterator[Pair]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        leader = hub.join()
        desks = [Desk(hub.join(), prompt) for _ in range(2)]
        links = [PeerLink(desk.network.peer_id, f"worker-{i}") for i, desk in enumerate(desks)]
        for desk, link in zip(desks, links, strict=True):
            desk.network.serve(PROTOCOL, desk.handle, max_streams_per_peer=9)
            await leader.connect(desk.network.addresses[0])
            nursery.start_soon(link.run, leader)
            assert await link.wait_up()
        names = [str(link.peer) for link in links]
        holders = [(names[0],)] * (N_EXPERT // 2) + [(names[1],)] * (N_EXPERT // 2)
        routing = Routing(
            1,
            1,
            {layer.layer: LayerRouting(layer.layer, holders) for layer in (LAYER, OTHER)},
            dict(zip(names, links, strict=True)),
            {names[1]: frozenset({LAYER.layer})} if quantized else {},
        )
        remote = RemoteExperts(MODEL.manifest.layers, trio.lowlevel.current_trio_token())
        remote.set_routing(routing)
        yield Pair(remote, desks, links, hub, leader.peer_id, routing)
        nursery.cancel_scope.cancel()


def inputs(n_tokens: int, seed: int = 0) -> tuple[F32, I32]:
    """Activations [T, WIDTH] and two chosen experts a token [T, 2], so that both workers have something to do."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n_tokens, WIDTH), np.float32)
    ids = np.stack([generator.permutation(N_EXPERT)[:2] for _ in range(n_tokens)]).astype(np.int32)
    ids[0] = [0, N_EXPERT - 1]
    return x, ids


def expected(x: F32, ids: I32, layer: int = LAYER.layer) -> F32:
    tokens = np.repeat(np.arange(len(ids)), ids.shape[1])
    return rows_of(layer, x, tokens, ids.reshape(-1), WIDTH).reshape(*ids.shape, WIDTH)


@pytest.mark.parametrize("n_tokens", [1, 2, 17])
async def test_every_row_lands_in_its_slot(n_tokens: int) -> None:
    async with pair() as swarm:
        for seed, layer in itertools.product(range(5), (LAYER.layer, OTHER.layer)):
            x, ids = inputs(n_tokens, seed)
            np.testing.assert_array_equal(await swarm.step(x, ids, layer), expected(x, ids, layer))
        assert swarm.remote.timing.layers == 10
        assert swarm.remote.timing.decode_layers == (10 if n_tokens == 1 else 0)


async def test_the_order_of_answers_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_experts, "dispatch_tokens_max", lambda n_in: 1)  # each token a frame of its own
    x, ids = inputs(4)
    async with pair(prompt=False) as swarm:
        for seed in range(12):
            order = random.Random(seed)
            results: list[F32] = []
            async with trio.open_nursery() as nursery:

                async def step() -> None:
                    results.append(await swarm.step(x, ids))  # noqa: B023

                nursery.start_soon(step)
                frames = sum(len(set(row // (N_EXPERT // 2))) for row in ids)
                await eventually(lambda: sum(len(desk.finished) for desk in swarm.desks) == frames)  # noqa: B023
                while waiting := [desk for desk in swarm.desks if desk.finished]:
                    desk = order.choice(waiting)
                    await desk.send(order.randrange(len(desk.finished)))
            np.testing.assert_array_equal(results[0], expected(x, ids))


async def test_large_dispatches_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids = inputs(40)
    async with pair() as swarm:
        for tokens, rows in ((7, 10**6), (10**6, 12), (10**6, 10**6)):
            monkeypatch.setattr(remote_experts, "dispatch_tokens_max", lambda n_in, tokens=tokens: tokens)
            monkeypatch.setattr(remote_experts, "dispatch_rows_max", lambda n_out, rows=rows: rows)
            for desk in swarm.desks:
                desk.heads.clear()
            np.testing.assert_array_equal(await swarm.step(x, ids), expected(x, ids))
            heads = [head for desk in swarm.desks for head in desk.heads]
            assert max(head.n_tokens for head in heads) <= tokens
            assert max(head.n_rows for head in heads) <= rows
        assert len(heads) == 2


async def test_activations_go_quantised_to_whom_that_is_agreed_with() -> None:
    x, ids = inputs(3)
    rounded = dequantize_q8_0(quantize_q8_0(x))
    async with pair(quantized=True) as swarm:
        y = await swarm.step(x, ids)
        upper = ids >= N_EXPERT // 2
        np.testing.assert_array_equal(y[upper], expected(rounded, ids)[upper])
        np.testing.assert_array_equal(y[~upper], expected(x, ids)[~upper])
        assert {head.dtype for head in swarm.desks[1].heads} == {Q8_0}
        assert Q8_0 not in {head.dtype for head in swarm.desks[0].heads}
        assert swarm.links[1].statistics.bytes_out < swarm.links[0].statistics.bytes_out


async def test_without_a_placement_nothing_is_dispatched() -> None:
    x, ids = inputs(1)
    async with pair() as swarm:
        swarm.remote.set_routing(None)
        with pytest.raises(NotReady):
            await swarm.step(x, ids)
        swarm.remote.set_routing(swarm.routing)
        np.testing.assert_array_equal(await swarm.step(x, ids), expected(x, ids))


async def test_an_expert_that_nobody_answers_for_is_named() -> None:
    x, ids = inputs(1)
    async with pair() as swarm:
        holders = [(str(link.peer),) for link in swarm.links for _ in range(N_EXPERT // 2)]
        away = str(swarm.links[1].peer)
        layers = {LAYER.layer: LayerRouting(LAYER.layer, holders, [away])}
        swarm.remote.set_routing(replace(swarm.routing, layers=layers))
        with pytest.raises(ExpertsUnavailable) as caught:
            await swarm.step(x, ids)
        assert caught.value.details["experts"] == [N_EXPERT - 1]
        assert caught.value.details["peer"] == away


async def test_who_is_waited_for_in_vain_holds_up_nobody() -> None:
    async with pair() as swarm:
        for desk in swarm.desks:
            desk.prompt = False
        x, ids = inputs(2)

        async def give_up() -> None:
            swarm.remote.give_up = lambda: RequestCancelled("nobody waits")

        with trio.fail_after(PATIENCE_S):
            error = await swarm.failing_step(x, ids, give_up)
        assert error.type == "cancelled"
        swarm.remote.give_up = lambda: None
        for desk in swarm.desks:
            desk.prompt = True
            await desk.send(0)
        assert (await swarm.step(x, ids)).shape == (2, ids.shape[1], WIDTH)


async def test_one_of_two_workers_fails_and_the_next_step_is_clean() -> None:
    x, ids = inputs(5)
    async with pair(prompt=False) as swarm:
        first, second = swarm.desks

        async def fault() -> None:
            swarm.hub.cut(swarm.leader, first.network.peer_id)

        error = await swarm.failing_step(x, ids, fault)
        assert isinstance(error, ExpertsUnavailable)
        assert error.details["peer"] == str(first.network.peer_id)
        assert error.details["layer"] == LAYER.layer
        assert error.details["experts"] == sorted({int(e) for e in ids.reshape(-1) if e < N_EXPERT // 2})
        assert "worker-0" in error.message
        # The second worker's answer to the aborted step comes late, in the middle of the next one.
        upper = np.full((2, 2), N_EXPERT - 1, np.int32)
        upper[:, 1] = N_EXPERT - 2
        results: list[F32] = []

        async def step() -> None:
            results.append(await swarm.step(x[:2], upper))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await eventually(lambda: len(second.finished) == 2)
            await second.send(0)
            await second.send(0)
        np.testing.assert_array_equal(results[0], expected(x[:2], upper))


async def test_a_refusal_and_a_wrong_answer_are_typed() -> None:
    x, ids = inputs(2)
    for data, cause in ((encode_failure(1, Internal("no memory")), "refused"), (b"\xff" * 66, "bad_reply")):
        async with pair(prompt=False) as swarm:

            async def fault(desk: Desk = swarm.desks[1], data: bytes = data) -> None:
                await desk.send(0, data)

            error = await swarm.failing_step(x, ids, fault)
            assert (error.type, error.details["cause"]) == ("experts_unavailable", cause)
            assert error.details["peer"] == str(swarm.links[1].peer)
            assert swarm.links[0].closed is None


async def test_a_worker_that_owes_an_answer_is_named_and_must_prove_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "deadline_s", lambda rows, nbytes, rate: 0.5)
    x, ids = inputs(2)
    async with pair(prompt=False) as swarm:
        started = trio.current_time()

        async def fault() -> None:
            await swarm.desks[0].send(0)

        error = await swarm.failing_step(x, ids, fault)
        assert trio.current_time() - started > 0.4
        assert (error.type, error.details["cause"]) == ("experts_unavailable", "timeout")
        assert error.details["peer"] == str(swarm.links[1].peer)
        assert "worker-1" in error.message
        await eventually(lambda: swarm.links[1].closed is not None)
        assert swarm.links[0].closed is None


async def test_workers_hear_of_requests_from_begin_to_end() -> None:
    async with pair() as swarm:
        swarm.remote.begin_request("req-a")
        swarm.remote.begin_request("req-b")
        swarm.remote.end_request("req-a")
        swarm.remote.end_request("req-never-begun")
        swarm.remote.end_request("req-a")
        for desk in swarm.desks:
            await eventually(lambda desk=desk: len(desk.notices) == 3)  # type: ignore[misc]
            heard = [(notice.begins, notice.request_id) for notice in desk.notices]
            assert heard == [(True, "req-a"), (True, "req-b"), (False, "req-a")]
