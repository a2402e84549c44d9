"""Prompts from asker to engine and back: an asker on one peer, the leader's service on another, a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from capabilities.errors import ExpertsUnavailable, NoLeader, NotReady, Overloaded
from scheduler.requests import (
    Effect,
    FailedEffect,
    FinishedEffect,
    QueuedEffect,
    Request,
    Timings,
    TokenEffect,
    Usage,
)
from scheduler.sampling import SamplingParams
from swarmnode import limits
from swarmnode.asker import FollowingAsker
from swarmnode.leader import asked as asked_module
from swarmnode.leader.prompts import EFFECTS_MAX, PromptService, PromptStreams
from swarmnode.leadership import NamedLeader
from swarmnode.net.interface import Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.prompt_frames import decode_reply, encode_ask, encode_reply
from swarmnode.prompt_messages import (
    PROTOCOL,
    Alive,
    Ask,
    Done,
    Failed,
    Queued,
    Reply,
    Token,
)
from swarmnode.wire import encode_frame, read_frame
from tests.prompt_leaders import settled_at_once

CONTEXT = 20


class Letters:
    """A vocabulary of single letters."""

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) % 50 for c in text]

    tool_form = None

    def render_chat(self, messages: Any, tools: Any = ()) -> str:
        return "".join(message["content"] for message in messages)


@dataclass
class ScriptedEngine:
    """Takes requests and says what the test tells it to."""

    requests: dict[str, Request] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    sinks: dict[str, Callable[[Effect], None]] = field(default_factory=dict)
    refuses: bool = False

    def submit(self, request: Request, sink: Callable[[Effect], None]) -> None:
        if self.refuses:
            raise Overloaded("full")
        self.requests[request.id], self.sinks[request.id] = request, sink

    def cancel(self, request_id: str, reason: str) -> None:
        self.cancelled[request_id] = reason
        self.sinks.pop(request_id, None)

    def token(self, request_id: str, index: int, text: str = "x") -> None:
        self.sinks[request_id](TokenEffect(request_id, index, 7, text, -1.0))

    def finish(self, request_id: str) -> None:
        self.sinks[request_id](FinishedEffect(request_id, "stop", "!", Usage(3, 2), Timings(0.0, 0.1, 0.2)))


@dataclass
class Lab:
    hub: MemoryHub
    leader: MemoryNetwork
    asker: FollowingAsker
    asking: MemoryNetwork
    engine: ScriptedEngine
    service: PromptService
    events: list[str]
    refusal: NoLeader | None = None
    ready: NotReady | None = None

    async def heard(self, ask: Ask, replies: list[Reply]) -> None:
        """Collect the replies to a request, to the last."""
        async with self.asker.replies(ask) as found:
            async for reply in found:
                replies.append(reply)  # noqa: PERF401


@asynccontextmanager
async def lab() -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub:
        leader, asking = hub.join(), hub.join()
        engine, events = ScriptedEngine(), list[str]()
        service = PromptService(
            engine,  # type: ignore[arg-type]
            Letters(),  # type: ignore[arg-type]
            CONTEXT,
            60.0,
            lambda: made.ready,
            lambda request_id: events.append(f"begin {request_id}"),
            lambda request_id: events.append(f"end {request_id}"),
            settled_at_once,
        )
        PromptStreams(service.answer).register(leader)
        await asking.connect(leader.addresses[0])
        asker = FollowingAsker(asking, NamedLeader(leader.peer_id), refusal=lambda: made.refusal, no_leader_s=0.0)
        made = Lab(hub, leader, asker, asking, engine, service, events)
        yield made


def ask(name: str = "req-1", **fields: Any) -> Ask:
    return Ask(name, SamplingParams(temperature=0), **{"prompt": "abc", **fields})


async def asked(lab: Lab, nursery: trio.Nursery, request: Ask | None = None) -> list[Reply]:
    """A request under way, and the list that fills with its replies."""
    replies: list[Reply] = []
    nursery.start_soon(lab.heard, request or ask(), replies)
    await trio.testing.wait_all_tasks_blocked()
    return replies


async def sent(lab: Lab, nursery: trio.Nursery, request: Ask) -> list[Reply]:
    """The same for a single attempt, as it stands."""
    replies: list[Reply] = []

    async def hear() -> None:
        stream = await lab.asking.open_stream(lab.leader.peer_id, PROTOCOL)
        await stream.send(encode_ask(request))
        while not replies or not isinstance(replies[-1], Done | Failed):
            replies.append(decode_reply(await read_frame(stream, limits.PROMPT_REPLY)))

    nursery.start_soon(hear)
    await trio.testing.wait_all_tasks_blocked()
    return replies


async def test_an_answer_streams_to_the_asker(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        replies = await asked(leader, nursery, ask(stop=("z",), max_tokens=9, ignore_eos=True, deadline_s=5.0))
        request = leader.engine.requests["req-1"]
        assert (request.prompt_tokens, request.max_tokens, request.stop) == ((47, 48, 49), 9, ("z",))
        assert (request.stop_at_end, request.deadline_s) == (False, 5.0)
        sink = leader.engine.sinks["req-1"]
        sink(QueuedEffect("req-1", 1))
        assert leader.events == []
        sink(QueuedEffect("req-1", 0))
        assert leader.events == ["begin req-1"]
        leader.engine.token("req-1", 0, "é")
        leader.engine.token("req-1", 1)
        leader.engine.finish("req-1")
        await trio.testing.wait_all_tasks_blocked()
        expected = [Queued(1), Queued(0), Token(0, 7, "é"), Token(1, 7, "x")]
        assert replies == [*expected, Done("stop", "!", Usage(3, 2), Timings(0.0, 0.1, 0.2))]
        assert leader.events == ["begin req-1", "end req-1"]
        s = leader.service.statistics
        assert (s.accepted, s.finished, s.failed, s.cancelled, s.tokens) == (1, 1, 0, 0, 2)
        assert leader.leader.statistics().streams_open == 0


async def test_what_is_not_given_has_its_bounds(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        await asked(leader, nursery, ask(deadline_s=1e4))
        request = leader.engine.requests["req-1"]
        assert (request.max_tokens, request.deadline_s) == (CONTEXT - 3, 60.0)
        nursery.cancel_scope.cancel()


async def test_a_waiting_asker_hears_of_life_every_second(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        replies = await asked(leader, nursery)
        await trio.sleep(30.5)
        assert replies == [Alive()] * 30
        leader.engine.finish("req-1")


async def test_an_error_of_the_engine_reaches_the_asker(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        replies = await asked(leader, nursery)
        error = ExpertsUnavailable("gone", layer=3, experts=[1, 2], peer="p", cause="suspended")
        leader.engine.sinks["req-1"](FailedEffect("req-1", error))
        await trio.testing.wait_all_tasks_blocked()
        (reply,) = replies
        assert isinstance(reply, Failed)
        assert reply.error.to_json() == error.to_json()
        assert leader.service.statistics.failed == 1


@pytest.mark.parametrize("fault", ["not ready", "overloaded", "empty"])
async def test_a_request_that_is_not_accepted_fails_once_with_its_reason(autojump_clock: MockClock, fault: str) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        if fault == "not ready":
            leader.ready = NotReady("it waits for workers")
        leader.engine.refuses = fault == "overloaded"
        request = ask(prompt="") if fault == "empty" else ask()
        (reply,) = await asked(leader, nursery, request)
        assert isinstance(reply, Failed)
        assert reply.error.type == {"not ready": "not_ready", "overloaded": "overloaded", "empty": "usage"}[fault]
        s = leader.service.statistics
        assert (s.accepted, s.failed, s.cancelled) == (0, 1, 0)
        assert leader.engine.cancelled == {}
        assert leader.events == []


@pytest.mark.parametrize("how", ["closes", "vanishes"])
async def test_an_asker_that_goes_away_frees_the_engine_at_once(autojump_clock: MockClock, how: str) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def leave() -> None:
            with scope:
                await leader.heard(ask(), [])

        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        if how == "closes":
            scope.cancel()
        else:
            await leader.asking.disconnect(leader.leader.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        assert leader.engine.cancelled == {"req-1": "the asker went away"}
        assert leader.events == ["end req-1"]
        assert leader.service.statistics.cancelled == 1


async def test_an_asker_that_reads_too_slowly_ends_as_overloaded(autojump_clock: MockClock) -> None:
    async with lab() as leader, leader.service.answer(ask(), "slow") as replies:
        for index in range(3 * EFFECTS_MAX):
            leader.engine.token("req-1", index)
        found = [reply async for reply in replies]
        assert len(found) == EFFECTS_MAX
        assert isinstance(found[-1], Failed)
        assert found[-1].error.type == "overloaded"


async def test_a_peer_that_does_not_read_its_answer_is_dropped(autojump_clock: MockClock) -> None:
    async with lab() as leader:
        stream = await leader.asking.open_stream(leader.leader.peer_id, PROTOCOL)
        await stream.send(encode_ask(ask()))
        await trio.testing.wait_all_tasks_blocked()
        for index in range(EFFECTS_MAX - 10):
            leader.engine.token("req-1", index, "x" * 200)
        await trio.sleep(limits.SEND_SECONDS_MAX + 1)
        assert "req-1" in leader.engine.cancelled
        assert leader.leader.statistics().peer_mistakes == 1


async def test_texts_of_all_peers_together_are_bounded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_TEXTS_BYTES_MAX", 250_000)
    monkeypatch.setattr(asked_module, "_INLINE_CHARS", 1 << 20)  # a thread would not stop this clock
    async with lab() as leader, trio.open_nursery() as nursery:
        for number in (1, 2):
            await asked(leader, nursery, ask(f"req-{number}", prompt="x" * 100_000))
        (refused,) = await asked(leader, nursery, ask("req-3", prompt="x" * 100_000))
        assert isinstance(refused, Failed)
        assert refused.error.type == "overloaded"
        small = await asked(leader, nursery, ask("req-4", prompt="x" * 100))
        leader.engine.finish("req-1")
        await trio.testing.wait_all_tasks_blocked()
        again = await asked(leader, nursery, ask("req-5", prompt="x" * 100_000))
        for name in ("req-2", "req-4", "req-5"):
            leader.engine.finish(name)
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(small[-1], Done)
        assert isinstance(again[-1], Done)


async def test_an_answer_is_continued_where_another_leader_stopped(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        replies = await sent(leader, nursery, ask(generated=(4, 5), attempt=2, max_tokens=9))
        (name,) = leader.engine.requests
        assert (leader.engine.requests[name].generated, leader.engine.requests[name].max_tokens) == ((4, 5), 9)
        leader.engine.sinks[name](QueuedEffect(name, 0))
        leader.engine.token(name, 2)
        leader.engine.sinks[name](FailedEffect(name, NoLeader("stopping", request_id=name)))
        await trio.testing.wait_all_tasks_blocked()
        assert replies[:-1] == [Queued(0), Token(2, 7, "x")]
        assert isinstance(replies[-1], Failed)
        assert replies[-1].error.details["request_id"] == "req-1"
        s = leader.service.statistics
        assert (s.accepted, s.failed, s.cancelled) == (1, 0, 1), "it goes on elsewhere"
        assert leader.events == ["begin req-1", "end req-1"]


async def test_a_newer_attempt_takes_the_place_of_one_that_still_runs(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        old = await sent(leader, nursery, ask())
        new = await sent(leader, nursery, ask(attempt=1, generated=(7,)))
        assert set(leader.engine.cancelled) == {"req-1"}
        assert isinstance(old[-1], Failed)
        assert old[-1].error.type == "cancelled"
        assert new == []
        assert leader.events == []  # the request has not ended
        leader.engine.finish("req-1#1")
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(new[-1], Done)
        assert leader.events == ["end req-1"]
        s = leader.service.statistics
        assert (s.accepted, s.finished, s.failed, s.cancelled) == (2, 1, 0, 1)


@pytest.mark.parametrize(("error", "failed"), [(NotReady("it waits for workers"), 0), (None, 1)])
async def test_an_attempt_that_its_asker_repeats_has_not_failed(
    autojump_clock: MockClock, error: NotReady | None, failed: int
) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        leader.ready = error
        (reply,) = await sent(leader, nursery, ask(attempt=1, generated=(7,), prompt="abc" if error else ""))
        assert isinstance(reply, Failed)
        s = leader.service.statistics
        assert (s.accepted, s.failed, s.cancelled) == (0, failed, 0)


@pytest.mark.parametrize("who", ["an older attempt", "the same attempt", "somebody else"])
async def test_a_request_that_runs_is_replaced_by_nobody_else(autojump_clock: MockClock, who: str) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        first = await sent(leader, nursery, ask(attempt=3))
        number = {"an older attempt": 2, "the same attempt": 3, "somebody else": 4}[who]
        asker = "stranger" if who == "somebody else" else str(leader.asking.peer_id)
        async with leader.service.answer(ask(attempt=number), asker) as replies:
            (reply,) = [reply async for reply in replies]
        assert isinstance(reply, Failed)
        assert reply.error.type == "overloaded"
        assert leader.engine.cancelled == {}
        assert first == []
        nursery.cancel_scope.cancel()


async def test_tokens_of_an_answer_so_far_count_as_text(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_TEXTS_BYTES_MAX", 250_000)
    async with lab() as leader, trio.open_nursery() as nursery:
        (refused,) = await sent(leader, nursery, ask(generated=(1,) * 20_000))  # 80 KB on the wire, 0.8 MB in memory
        assert isinstance(refused, Failed)
        assert refused.error.type == "overloaded"


# --- The asker's side -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def scripted_leader(handle: Callable[[Stream], Any]) -> AsyncIterator[tuple[FollowingAsker, MemoryHub, Any]]:
    """An asker whose leader is this handler."""
    async with open_memory_hub() as hub:
        leader, asking = hub.join(), hub.join()
        leader.serve(PROTOCOL, handle, max_streams_per_peer=4)
        await asking.connect(leader.addresses[0])
        asker = FollowingAsker(asking, NamedLeader(leader.peer_id), no_leader_s=0.0)
        yield asker, hub, (leader.peer_id, asking.peer_id)


async def outcome(asker: FollowingAsker) -> list[Reply]:
    async with asker.replies(ask()) as replies:
        return [reply async for reply in replies]


def sends(*frames: bytes, then_waits: bool = True) -> Callable[[Stream], Any]:
    async def handle(stream: Stream) -> None:
        await read_frame(stream, limits.PROMPT_REQUEST)
        for data in frames:
            await stream.send(data)
        if then_waits:
            await trio.sleep_forever()

    return handle


async def test_a_leader_that_falls_silent_is_lost(autojump_clock: MockClock) -> None:
    async with scripted_leader(sends(encode_reply(Token(0, 5, "a")))) as (asker, _, (leader, _)):
        started = trio.current_time()
        first, last = await outcome(asker)
        assert trio.current_time() - started == pytest.approx(limits.PROMPT_SILENCE_SECONDS_MAX, abs=0.1)
        assert first == Token(0, 5, "a")
        assert isinstance(last, Failed)
        assert (last.error.type, last.error.details["peer"]) == ("no_leader", str(leader))
        assert last.error.details["request_id"] == "req-1"


async def test_a_leader_that_takes_no_stream_is_lost_as_soon(autojump_clock: MockClock) -> None:
    async with scripted_leader(sends()) as (asker, hub, peers):
        hub.set_delay(*peers, float("inf"))
        started = trio.current_time()
        (last,) = await outcome(asker)
        assert trio.current_time() - started == pytest.approx(limits.PROMPT_SILENCE_SECONDS_MAX, abs=0.1)
        assert isinstance(last, Failed)
        assert last.error.type == "no_leader"


async def test_a_connection_that_breaks_says_so_at_once(autojump_clock: MockClock) -> None:
    async with scripted_leader(sends()) as (asker, hub, peers), trio.open_nursery() as nursery:

        async def cut() -> None:
            await trio.sleep(0.5)
            hub.cut(*peers)

        nursery.start_soon(cut)
        started = trio.current_time()
        (last,) = await outcome(asker)
        assert trio.current_time() - started < 1.0
        assert isinstance(last, Failed)
        assert last.error.type == "no_leader"
        (again,) = await outcome(asker)
        assert isinstance(again, Failed)
        assert again.error.type == "no_leader"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 66,
        encode_frame({"kind": "surprise"}),
        encode_frame({"kind": "token", "i": 0, "t": 1}, b"\xff"),
        encode_frame({"kind": "done", "finish_reason": "bored"}),
        encode_reply(Token(1, 5, "too early")),
        encode_reply(Token(0, 5, "a")) + encode_reply(Token(0, 6, "a")),
    ],
    ids=["junk", "kind", "text", "reason", "gap", "another"],
)
async def test_a_leader_that_breaks_the_protocol_ends_the_request(autojump_clock: MockClock, data: bytes) -> None:
    async with scripted_leader(sends(data)) as (asker, _, _):
        last = (await outcome(asker))[-1]
        assert isinstance(last, Failed)
        assert last.error.type == "internal"


async def test_an_answer_without_an_end_is_a_lost_leader(autojump_clock: MockClock) -> None:
    handler = sends(encode_reply(Token(0, 5, "a")), then_waits=False)
    async with scripted_leader(handler) as (asker, _, _):
        last = (await outcome(asker))[-1]
        assert isinstance(last, Failed)
        assert last.error.type == "no_leader"


async def test_a_known_reason_is_told_without_asking(autojump_clock: MockClock) -> None:
    async with lab() as leader, trio.open_nursery() as nursery:
        leader.refusal = NoLeader("it does not answer pings")
        assert leader.asker.leader == str(leader.leader.peer_id)
        (reply,) = await asked(leader, nursery)
        assert isinstance(reply, Failed)
        assert reply.error is leader.refusal
        assert leader.engine.requests == {}
