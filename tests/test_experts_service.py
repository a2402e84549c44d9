"""A worker's answers to dispatches, right ones and every kind of wrong ones, and its sets of experts meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.experts import F32
from capabilities.errors import Internal, PeerMistake, UnsupportedModel
from swarmnode import limits
from swarmnode.expert_messages import (
    PROTOCOL,
    DispatchHead,
    Expected,
    Failure,
    HeldLayer,
    Reply,
    decode_answer,
    encode_dispatch,
    encode_notice,
)
from swarmnode.leadership import NamedLeader
from swarmnode.net.interface import NetworkError, Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.wire import encode_frame, read_frame
from swarmnode.worker.epochs import Epochs, ExpertSet
from swarmnode.worker.experts_service import REQUESTS_LOGGED_MAX, ExpertsService
from tests.fake_backend import FakeBackend
from tests.memory_swarm import LAYERS, MODEL, rows_of
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

LAYER = MODEL.manifest.layers[0]
WIDTH = LAYER.n_in
HELD = (0, 2, 3)  # of four
TERM, EPOCH = 7, 3


def expert_set(
    term: int = TERM, epoch: int = EPOCH, held: tuple[int, ...] = HELD, *, nbytes: int = 100, loaded: bool = True
) -> ExpertSet:
    backend = FakeBackend()
    backend.layers[LAYER.layer] = (LAYER, held)
    layers = {LAYER.layer: HeldLayer.of(LAYER, held)}
    return ExpertSet(term, epoch, "manifest", {LAYER.layer: held}, backend, layers, nbytes, loaded)


SLOW_S = 0.02


class FarBackend(FakeBackend):
    """Its computations wait for another process."""

    waits_for_process = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def compute(self, *arguments: Any, **asked: Any) -> F32:
        self.threads.add(threading.get_ident())
        return super().compute(*arguments, **asked)


class SlowBackend(FakeBackend):
    """It computes for a while."""

    def compute(self, *arguments: Any, **asked: Any) -> F32:
        time.sleep(SLOW_S)
        return super().compute(*arguments, **asked)


def backend_of(held: ExpertSet) -> FakeBackend:
    assert isinstance(held.backend, FakeBackend)
    return held.backend


@dataclass
class Lab:
    hub: MemoryHub
    worker: MemoryNetwork
    leader: MemoryNetwork
    epochs: Epochs
    service: ExpertsService
    stream: Stream
    sequence: int = 0

    @property
    def backend(self) -> FakeBackend:
        assert self.epochs.current is not None
        return backend_of(self.epochs.current)

    async def ask(self, data: bytes, sequence: int, n_rows: int = 1) -> Reply | Failure:
        await self.stream.send(data)
        with trio.fail_after(PATIENCE_S):
            frame = await read_frame(self.stream, limits.EXPERTS_REPLY)
        return decode_answer(frame, {sequence: Expected(n_rows, WIDTH)})

    async def dispatch(self, x: Any, tokens: list[int], experts: list[int], **fields: Any) -> Reply | Failure:
        self.sequence += 1
        data = encode_dispatch(
            **{
                "term": TERM, "epoch": EPOCH, "sequence": self.sequence, "layer": LAYER.layer, "x": x,
                "tokens": np.array(tokens, np.int32), "experts": np.array(experts, np.int32), **fields,
            }
        )  # fmt: skip
        return await self.ask(data, self.sequence, len(experts))

    async def check(self) -> None:
        """It still computes."""
        x = activations(2)
        reply = await self.dispatch(x, [0, 1, 1], [0, 3, 2])
        assert isinstance(reply, Reply)
        np.testing.assert_array_equal(reply.y, rows_of(LAYER.layer, x, [0, 1, 1], [0, 3, 2], WIDTH))


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub:
        worker, leader = hub.join(), hub.join()
        epochs = Epochs()
        epochs.current = expert_set()
        service = ExpertsService(epochs, NamedLeader(leader.peer_id))
        service.register(worker)
        await leader.connect(worker.addresses[0])
        stream = await leader.open_stream(worker.peer_id, PROTOCOL)
        yield Lab(hub, worker, leader, epochs, service, stream)


def activations(n_tokens: int) -> F32:
    return np.random.default_rng(n_tokens).standard_normal((n_tokens, WIDTH), np.float32)


async def test_dispatches_are_answered_in_either_type() -> None:
    async with lab() as worker:
        for n_tokens in (1, 2, 300):
            x = activations(n_tokens)
            tokens = [t for t in range(n_tokens) for _ in HELD]
            experts = list(HELD) * n_tokens
            reply = await worker.dispatch(x, tokens, experts, f32_accumulation=n_tokens == 2)
            assert isinstance(reply, Reply)
            np.testing.assert_array_equal(reply.y, rows_of(LAYER.layer, x, tokens, experts, WIDTH))
            reply = await worker.dispatch(quantize_q8_0(x), tokens, experts)
            assert isinstance(reply, Reply)
            rounded = dequantize_q8_0(quantize_q8_0(x))
            np.testing.assert_array_equal(reply.y, rows_of(LAYER.layer, rounded, tokens, experts, WIDTH))
        s = worker.service.statistics
        assert (s.dispatches, s.rows, s.refused) == (6, 2 * 303 * len(HELD), 0)
        assert s.rows_per_s > 0
        assert worker.backend.asked_f32 == [False, False, True, False, False, False]


ONE = np.ones((1, WIDTH), np.float32)
TWO = np.ones((2, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"x": ONE, "tokens": [0], "experts": [1]}, "not held"),
        ({"x": ONE, "tokens": [0], "experts": [4]}, "expert 4 of 4"),
        ({"x": ONE, "tokens": [0], "experts": [65_535]}, "expert 65535"),
        ({"x": ONE, "tokens": [0, 0], "experts": [2, 2]}, "twice"),
        ({"x": TWO, "tokens": [0, 1, 1], "experts": [2, 3, 3]}, "twice"),
        ({"x": TWO, "tokens": [0, 2], "experts": [2, 3]}, "token 2"),
        ({"x": ONE, "tokens": [0], "experts": [2], "layer": LAYERS[1]}, f"layer {LAYERS[1]}"),
        ({"x": ONE, "tokens": [0], "experts": [2], "layer": 65_535}, "layer 65535"),
        ({"x": ONE, "tokens": [0], "experts": [2], "term": TERM - 1}, f"term {TERM - 1}"),
        ({"x": ONE, "tokens": [0], "experts": [2], "epoch": EPOCH + 1}, f"epoch {EPOCH + 1}"),
        ({"x": ONE[:, :-1], "tokens": [0], "experts": [2]}, "bytes of payload"),
        ({"x": np.ones((1, WIDTH + 1), np.float32), "tokens": [0], "experts": [2]}, "bytes of payload"),
        ({"x": ONE * np.nan, "tokens": [0], "experts": [2]}, "not finite"),
        ({"x": ONE * np.inf, "tokens": [0], "experts": [2]}, "not finite"),
        ({"x": np.full((1, WIDTH // 32 * 34), 0xFF, np.uint8), "tokens": [0], "experts": [2]}, "not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_wrong_dispatch_is_a_typed_failure_and_is_counted(wrong: dict[str, Any], says: str) -> None:
    async with lab() as worker:
        answer = await worker.dispatch(**wrong)
        assert isinstance(answer, Failure)
        assert isinstance(answer.error, PeerMistake)
        assert says in answer.error.message
        assert worker.service.statistics.refused == 1
        assert worker.service.statistics.last_refusal == answer.error.message
        assert worker.backend.asked_f32 == []
        await worker.check()


def header(**fields: int) -> list[int]:
    named = {"kind": 1, "term": TERM, "epoch": EPOCH, "sequence": 1, "layer": LAYER.layer, "n_tokens": 1, "n_rows": 1,
             "dtype": 0, "flags": 0, **fields}  # fmt: skip
    return list(named.values())


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(150, 216)),
        encode_frame(header(n_rows=0), ONE, b"\x02\x00"),
        encode_frame(header(n_tokens=0), b"\x02\x00"),
        encode_frame(header(n_tokens=limits.DISPATCH_TOKENS_MAX + 1), ONE),
        encode_frame(header(n_rows=limits.DISPATCH_ROWS_MAX + 1), ONE),
        encode_frame(header(dtype=2), ONE, b"\x02\x00"),
        encode_frame(header(flags=1 << 7), ONE, b"\x02\x00"),
        encode_frame(header(kind=4), ONE, b"\x02\x00"),
        encode_frame(header(layer=-1), ONE, b"\x02\x00"),
        encode_frame(header()[:-1], ONE, b"\x02\x00"),
        encode_frame({"kind": 1}, ONE),
        encode_frame([2, TERM, "bad id\n"]),
        encode_frame([2, TERM, "x" * 65]),
        encode_frame(header(n_tokens=4096, n_rows=32_768))[:4] + b"\xff\xff\xff\x7f",
        encode_frame(header(n_tokens=600), np.ones((550, WIDTH), np.float32), b"\x02\x00" * 2),  # beyond eager, wrong
        encode_frame([2, TERM, "req-1"], bytes(limits.EAGER_PAYLOAD_BYTES + 1)),
    ],
)
async def test_bytes_that_are_no_request_end_the_stream_and_nothing_else(data: bytes) -> None:
    async with lab() as worker:
        await worker.stream.send(data)
        with pytest.raises(NetworkError), trio.fail_after(PATIENCE_S):
            await worker.stream.receive_exactly(1)
        assert worker.service.statistics.refused == 1
        worker.stream = await worker.leader.open_stream(worker.worker.peer_id, PROTOCOL)
        await worker.check()
        assert worker.worker.statistics().handler_errors == 0


async def test_a_reply_that_no_frame_holds_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLY_PAYLOAD_BYTES_MAX", 8 * WIDTH)
    async with lab() as worker:
        answer = await worker.dispatch(ONE, [0, 0, 0], [0, 2, 3])
        assert isinstance(answer, Failure)
        assert "do not fit a reply" in answer.error.message


async def test_only_the_leader_is_served() -> None:
    async with lab() as worker:
        stranger = worker.hub.join()
        await stranger.connect(worker.worker.addresses[0])
        stream = await stranger.open_stream(worker.worker.peer_id, PROTOCOL)
        with pytest.raises(NetworkError):
            await stream.receive_exactly(1)
        assert "only the swarm's leader" in worker.service.statistics.last_refusal
        await worker.check()


@pytest.mark.parametrize(
    ("fault", "says"),
    [(RuntimeError("secret"), "its log has the details"), (UnsupportedModel("no such op"), "no such op")],
)
async def test_a_backend_that_fails_is_a_typed_failure(fault: Exception, says: str) -> None:
    async with lab() as worker:
        worker.backend.fault = fault
        answer = await worker.dispatch(ONE, [0], [2])
        assert isinstance(answer, Failure)
        assert says in answer.error.message
        assert "secret" not in answer.error.message
        assert isinstance(answer.error, Internal if isinstance(fault, RuntimeError) else UnsupportedModel)
        worker.backend.fault = None
        await worker.check()


async def test_a_long_computation_leaves_the_event_loop_free() -> None:
    async with lab() as worker:
        worker.backend.hold.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.check)
            await eventually(worker.backend.computing.is_set)
            with trio.fail_after(PATIENCE_S / 2):  # less than the backend waits
                other = await worker.leader.open_stream(worker.worker.peer_id, PROTOCOL)
            await other.reset()
            worker.backend.hold.set()


async def test_no_set_is_freed_under_a_kernel_and_what_waited_for_it_is_told() -> None:
    async with lab() as worker:
        old = worker.backend
        new = expert_set(TERM, EPOCH + 1)
        worker.epochs.prepare(new)
        old.hold.clear()
        second = Lab(**vars(worker))
        second.stream = await worker.leader.open_stream(worker.worker.peer_id, PROTOCOL)
        second.sequence = 100
        answers: dict[str, Reply | Failure] = {}

        async def ask(name: str, lab: Lab) -> None:
            answers[name] = await lab.dispatch(ONE, [0], [2])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "running", worker)
            await eventually(old.computing.is_set)
            nursery.start_soon(worker.epochs.begin, TERM, EPOCH + 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "waiting", second)
            await trio.testing.wait_all_tasks_blocked()
            assert not old.closed
            old.hold.set()
        assert isinstance(answers["running"], Reply)
        late = answers["waiting"]
        assert isinstance(late, Failure)
        assert "ended while the dispatch waited" in late.error.message
        assert old.closed
        assert worker.epochs.current is new


async def test_requests_are_logged_from_begin_to_end_and_bounded() -> None:
    async with lab() as worker:
        with capture_logs() as logs:
            await worker.stream.send(encode_notice(TERM, "req-1", begins=True))
            await worker.check()
            await worker.stream.send(encode_notice(TERM, "req-1", begins=False))
            await worker.stream.send(encode_notice(TERM, "req-never-begun", begins=False))
            await worker.check()
        ours = [(line["event"], line.get("dispatches"), line.get("rows")) for line in logs if "request_id" in line]
        assert ours == [("request.begin", None, None), ("request.end", 1, 3)]
        for number in range(2 * REQUESTS_LOGGED_MAX):
            await worker.stream.send(encode_notice(TERM, f"req-{number}", begins=True))
        await worker.check()
        assert len(worker.service._running) == REQUESTS_LOGGED_MAX


# --- Epochs -----------------------------------------------------------------------------------------------------------


def head(term: int, epoch: int, layer: int = LAYER.layer) -> DispatchHead:
    return DispatchHead(term, epoch, 1, layer, 1, 1, 0, 0)


async def test_the_prepared_set_serves_beside_the_current_one_until_it_begins() -> None:
    epochs = Epochs()
    first, second = expert_set(1, 1), expert_set(1, 2, (1,))
    epochs.prepare(first)
    assert epochs.layer_of(head(1, 1))[0] is first
    await epochs.begin(1, 1)
    assert (epochs.current, epochs.prepared) == (first, None)
    epochs.prepare(second)
    assert epochs.layer_of(head(1, 1))[0] is first
    assert epochs.layer_of(head(1, 2))[0] is second
    await epochs.begin(1, 9)  # never heard of
    assert (epochs.current, epochs.prepared) == (first, second)
    await epochs.begin(1, 2)
    assert (epochs.current, epochs.prepared) == (second, None)
    assert backend_of(first).closed
    with pytest.raises(PeerMistake, match=r"holds 1\.2"):
        epochs.layer_of(head(1, 1))
    with pytest.raises(PeerMistake, match="layer 99"):
        epochs.layer_of(head(1, 2, 99))


async def test_an_unchanged_share_is_adopted_under_its_new_name() -> None:
    epochs = Epochs()
    held = expert_set(1, 5)
    epochs.prepare(held)
    await epochs.begin(1, 5)
    assert epochs.adopt(2, 1, "another manifest", held.wanted) is None
    assert epochs.adopt(2, 1, "manifest", {LAYER.layer: (0, 1)}) is None
    assert epochs.adopt(2, 1, "manifest", {LAYER.layer: HELD}) is held
    assert epochs.layer_of(head(1, 5))[0] is epochs.layer_of(head(2, 1))[0] is held
    await epochs.begin(2, 1)
    assert (held.term, held.epoch, held.also) == (2, 1, set())
    with pytest.raises(PeerMistake):
        epochs.layer_of(head(1, 5))
    assert not backend_of(held).closed


async def test_only_a_set_that_has_begun_is_named_to_the_next_leader() -> None:
    """One that was loaded again after a restart is not what its leader once found right."""
    epochs = Epochs()
    assert epochs.names() == ()
    epochs.prepare(expert_set(1, 5))
    assert epochs.names() == ()
    await epochs.begin(1, 5)
    epochs.adopt(2, 1, "manifest", {LAYER.layer: HELD})
    epochs.prepare(expert_set(2, 2, (1,)))
    assert epochs.names() == ((2, 1), (1, 5))


async def test_a_set_that_is_not_whole_is_not_adopted() -> None:
    epochs = Epochs()
    epochs.prepare(expert_set(1, 1, loaded=False))
    assert epochs.adopt(1, 2, "manifest", {LAYER.layer: HELD}) is None


@pytest.mark.parametrize(("budget", "current_stays"), [(250, True), (199, False)])
async def test_room_is_made_before_another_set_is_loaded(budget: int, current_stays: bool) -> None:
    epochs = Epochs()
    current, prepared = expert_set(1, 1), expert_set(1, 2)
    epochs.current = current
    epochs.prepare(prepared)
    await epochs.make_room(100, budget)
    assert backend_of(prepared).closed
    assert backend_of(current).closed is not current_stays
    assert (epochs.current is current, epochs.prepared) == (current_stays, None)
    epochs.prepare(expert_set(1, 3))
    await epochs.drop()
    assert (epochs.current, epochs.prepared) == (None, None)
    assert backend_of(current).closed


async def test_kernels_rest_for_the_share_of_time_that_is_not_theirs() -> None:
    async with lab() as it:
        assert it.epochs.current is not None
        slow = it.epochs.current.backend = SlowBackend()
        slow.layers[LAYER.layer] = (LAYER, HELD)
        it.service.cpu_share = 0.25
        begin = trio.current_time()
        for _ in range(3):
            await it.check()
        assert trio.current_time() - begin >= SLOW_S * (3 + 2 * 3)  # three times at work, twice at rest


async def test_a_backend_in_another_process_never_holds_up_the_event_loop() -> None:
    async with lab() as it:
        assert it.epochs.current is not None
        far = it.epochs.current.backend = FarBackend()
        far.layers[LAYER.layer] = (LAYER, HELD)
        it.service.statistics.rows_per_s = 1e9  # by which every dispatch would be short
        await it.check()
        assert far.threads
        assert threading.get_ident() not in far.threads
