"""A link to one worker: answers, and every way in which it ends. The worker is a script on a network in memory."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from capabilities.errors import ExpertsUnavailable, Internal, SwarmError
from swarmnode import limits
from swarmnode.expert_messages import PROTOCOL, DispatchHead, encode_failure, encode_reply, request_head
from swarmnode.leader.link import OUTBOX_MAX, Answer, PeerLink
from swarmnode.net.interface import NetworkError, Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.wire import encode_frame, read_frame

WIDTH = 4


@dataclass
class Scripted:
    """A link, the stream's other end in the hands of the test, and what the link answered."""

    link: PeerLink
    hub: MemoryHub
    leader: MemoryNetwork
    worker: MemoryNetwork
    streams: list[Stream] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    ended: bool = False

    def send(self, name: str, experts: list[int], layer: int = 5, n_tokens: int = 1) -> None:
        self.answers[name] = []
        ids = np.array(experts, np.int32)
        self.link.send(
            term=1,
            epoch=2,
            layer=layer,
            x=np.ones((n_tokens, WIDTH), np.float32),
            tokens=np.zeros(len(ids), np.int32),
            experts=ids,
            n_out=WIDTH,
            ask_f32=False,
            on_answer=self.answers[name].append,
        )

    async def head(self) -> DispatchHead:
        """The next dispatch that arrived."""
        head = request_head((await read_frame(self.streams[-1], limits.EXPERTS_REQUEST)).header)
        assert isinstance(head, DispatchHead)
        return head

    async def say(self, data: bytes) -> None:
        await self.streams[-1].send(data)
        await trio.testing.wait_all_tasks_blocked()

    def error(self, name: str) -> SwarmError:
        (answer,) = self.answers[name]
        assert isinstance(answer, SwarmError)
        return answer


@asynccontextmanager
async def scripted(*, serves: bool = True) -> AsyncIterator[Scripted]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        leader, worker = hub.join(), hub.join()
        script = Scripted(PeerLink(worker.peer_id, "walter"), hub, leader, worker)

        async def keep(stream: Stream) -> None:
            script.streams.append(stream)
            await trio.sleep_forever()

        async def run() -> None:
            await script.link.run(leader)
            script.ended = True

        if serves:
            worker.serve(PROTOCOL, keep, max_streams_per_peer=9)
        await leader.connect(worker.addresses[0])
        nursery.start_soon(run)
        assert await script.link.wait_up() == serves
        await trio.testing.wait_all_tasks_blocked()
        yield script
        nursery.cancel_scope.cancel()


def rows(n: int, value: float = 1.0) -> Any:
    return np.full((n, WIDTH), value, np.float32)


async def test_answers_find_their_dispatches_in_any_order() -> None:
    async with scripted() as script:
        for name, experts in (("a", [1, 2]), ("b", [3]), ("c", [2, 4, 6])):
            script.send(name, experts)
        sequences = [(await script.head()).sequence for _ in range(3)]
        for sequence, n in zip(reversed(sequences), (3, 1, 2), strict=True):
            await script.say(encode_reply(sequence, 7, rows(n, n)))
        for name, n in (("a", 2), ("b", 1), ("c", 3)):
            (answer,) = script.answers[name]
            np.testing.assert_array_equal(answer, rows(n, n))
        s = script.link.statistics
        assert (s.dispatches, s.rows, s.tokens, s.compute_us, s.failures) == (3, 6, 3, 21, 0)
        assert script.link.rate.rows_per_s is not None


async def test_a_lost_connection_fails_what_is_open_and_what_comes_later() -> None:
    async with scripted() as script:
        script.send("a", [1, 2])
        script.send("b", [7], layer=9)
        script.hub.cut(script.leader.peer_id, script.worker.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        script.send("late", [3])
        for name, layer, experts in (("a", 5, [1, 2]), ("b", 9, [7]), ("late", 5, [3])):
            error = script.error(name)
            assert isinstance(error, ExpertsUnavailable)
            assert error.details == {
                "layer": layer, "experts": experts, "peer": str(script.worker.peer_id), "cause": "disconnected",
            }  # fmt: skip
            assert "walter disconnected" in error.message
        assert script.ended
        assert script.link.statistics.failures == 2


def wrong_rows(head: DispatchHead) -> bytes:
    return encode_reply(head.sequence, 1, rows(3))


def another_number(head: DispatchHead) -> bytes:
    return encode_reply(head.sequence + 7, 1, rows(2))


def answered_twice(head: DispatchHead) -> bytes:
    return 2 * encode_reply(head.sequence, 1, rows(2))


def huge(head: DispatchHead) -> bytes:
    return struct.pack("<II", 5, 2**32 - 1) + bytes(5)


def junk(head: DispatchHead) -> bytes:
    return bytes(range(150, 216))


def a_request(head: DispatchHead) -> bytes:
    return encode_frame([1, 1, 2, 1, 5, 1, 1, 0, 0], rows(1))


@pytest.mark.parametrize(
    "answer", [wrong_rows, another_number, answered_twice, huge, junk, a_request], ids=lambda f: f.__name__
)
async def test_an_answer_that_breaks_the_protocol_ends_the_link(answer: Callable[[DispatchHead], bytes]) -> None:
    async with scripted() as script:
        script.send("a", [1, 2])
        head = await script.head()
        script.send("b", [3])
        await script.say(answer(head))
        error = script.error("b")
        assert error.details["cause"] == "bad_reply"
        assert (error.details["layer"], error.details["experts"]) == (5, [3])
        assert script.ended
        with pytest.raises(NetworkError):  # the worker hears of it, too
            await script.streams[-1].receive_exactly(1 << 20)
        assert script.leader.statistics().streams_open == 0


async def test_a_refusal_ends_the_link_with_the_workers_words() -> None:
    async with scripted() as script:
        script.send("a", [1, 2])
        await script.say(encode_failure((await script.head()).sequence, Internal("out of memory")))
        error = script.error("a")
        assert error.details["cause"] == "refused"
        assert "out of memory" in error.message
        assert script.ended


async def test_a_worker_that_takes_nothing_is_given_up_before_the_queue_grows() -> None:
    async with scripted() as script:
        script.hub.set_delay(script.leader.peer_id, script.worker.peer_id, float("inf"))
        for number in range(3 * OUTBOX_MAX):
            script.send(str(number), [1], n_tokens=200)
            await trio.lowlevel.checkpoint()
        assert script.link.closed is not None
        assert script.link.closed.details["cause"] == "timeout"
        assert all(isinstance(answers[0], SwarmError) for answers in script.answers.values())


async def test_a_frame_that_does_not_get_away_in_time_ends_the_link(autojump_clock: MockClock) -> None:
    async with scripted() as script:
        script.hub.set_delay(script.leader.peer_id, script.worker.peer_id, float("inf"))
        for number in range(6):  # more than the worker's window takes
            script.send(str(number), [1], n_tokens=4096)
        started = trio.current_time()
        await trio.sleep(limits.SEND_SECONDS_MAX + 1)
        assert script.ended
        assert script.error("5").details["cause"] == "timeout"
        assert trio.current_time() - started < 2 * limits.SEND_SECONDS_MAX


async def test_the_first_reason_stays() -> None:
    async with scripted() as script:
        script.send("a", [1])
        script.link.fail("suspended", "its pings stay unanswered")
        script.link.fail("timeout", "too late")
        await trio.testing.wait_all_tasks_blocked()
        assert script.ended
        assert script.error("a").details["cause"] == "suspended"
        script.send("b", [1])
        assert "fell silent (its pings stay unanswered)" in script.error("b").message
        script.link.send_frame(b"dropped")


async def test_a_peer_that_serves_no_experts_has_no_link() -> None:
    async with scripted(serves=False) as script:
        assert script.link.closed is not None
        assert script.link.closed.details["cause"] == "disconnected"
        assert script.ended


async def test_cancelling_frees_the_stream_and_fails_what_is_open() -> None:
    async with open_memory_hub() as hub:
        leader, worker = hub.join(), hub.join()

        async def keep(stream: Stream) -> None:
            await trio.sleep_forever()

        worker.serve(PROTOCOL, keep, max_streams_per_peer=1)
        await leader.connect(worker.addresses[0])
        script = Scripted(PeerLink(worker.peer_id, "walter"), hub, leader, worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(script.link.run, leader)
            await script.link.wait_up()
            script.send("a", [1])
            nursery.cancel_scope.cancel()
        assert script.error("a").details["cause"] == "disconnected"
        assert leader.statistics().streams_open == 0


async def test_an_answer_that_overflowed_fails_alone_and_the_link_only_where_that_goes_on() -> None:
    async with scripted() as script:

        async def answered(value: float) -> Answer:
            script.send("a", [1, 2])
            head = await script.head()
            await script.say(encode_reply(head.sequence, 1, rows(2, value)))
            (answer,) = script.answers["a"]
            return answer

        for value in (np.nan, np.inf, -np.inf):
            error = await answered(value)
            assert isinstance(error, ExpertsUnavailable)
            assert (error.details["cause"], error.details["experts"]) == ("not_finite", [1, 2])
            assert "not finite" in error.message
            for _ in range(8):
                np.testing.assert_array_equal(await answered(2.0), rows(2, 2.0))
        assert script.link.closed is None
        for _ in range(4):
            assert script.link.closed is None
            await answered(np.nan)
        assert script.link.closed is not None
        assert script.link.closed.details["cause"] == "bad_reply"
        assert script.link.statistics.not_finite == 7
