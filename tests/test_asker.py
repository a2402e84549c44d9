"""Prompts that follow the leader: whatever happens to leaders, whoever asked gets one answer, once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from capabilities.errors import NoLeader, NotReady
from scheduler.attempts import NO_LEADER_S, PARTED_S
from scheduler.requests import Timings, Usage
from scheduler.sampling import SamplingParams
from swarmnode import limits
from swarmnode.asker import FIRST_LEADER_S, FollowingAsker
from swarmnode.net.interface import Stream
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.prompt_frames import decode_ask, encode_reply
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
from swarmnode.wire import read_frame
from tests.leader_views import SettableView
from tests.net_tools import eventually
from tests.patience import PATIENCE_S
from tests.prompt_leaders import PromptLeader, prompt_leader

DONE = Done("stop", "!", Usage(3, 2), Timings(0.0, 0.1, 0.2))
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.5, seed=7, frequency_penalty=0.5)


@dataclass
class Answer:
    """What one request brought."""

    replies: list[Reply] = field(default_factory=list)
    over: trio.Event = field(default_factory=trio.Event)

    @property
    def tokens(self) -> list[Token]:
        return [reply for reply in self.replies if isinstance(reply, Token)]

    @property
    def end(self) -> Done | Failed:
        last = self.replies[-1]
        assert isinstance(last, Done | Failed)
        return last

    @property
    def text(self) -> str:
        assert isinstance(self.end, Done)
        return "".join(token.text for token in self.tokens) + self.end.text

    async def hear(self, asker: FollowingAsker, ask: Ask) -> None:
        async with asker.replies(ask) as replies:
            async for reply in replies:
                self.replies.append(reply)
        self.over.set()

    async def wait(self, n: int) -> None:
        await eventually(lambda: len(self.tokens) >= n or self.over.is_set())


@dataclass
class Lab:
    """`asking` asks; the first leader is its own node's."""

    hub: MemoryHub
    asking: MemoryNetwork
    leaders: list[PromptLeader]
    view: SettableView
    asker: FollowingAsker
    nursery: trio.Nursery

    def elect(self, number: int | None, term: int = 0) -> None:
        self.view.set(None if number is None else self.leaders[number].network.peer_id, term)

    def ask(self, params: SamplingParams = GREEDY, **fields: Any) -> Answer:
        answer = Answer()
        ask = Ask("req-1", params, prompt="hello", **{"max_tokens": 60, "ignore_eos": True, **fields})
        self.nursery.start_soon(answer.hear, self.asker, ask)
        return answer


@asynccontextmanager
async def lab(leaders: int = 3) -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub, AsyncExitStack() as stack:
        networks = [hub.join() for _ in range(leaders)]
        made = [await stack.enter_async_context(prompt_leader(network)) for network in networks]
        for network in networks[1:]:
            await networks[0].connect(network.addresses[0])
        view = SettableView()
        async with trio.open_nursery() as nursery:
            with trio.fail_after(PATIENCE_S):
                yield Lab(hub, networks[0], made, view, FollowingAsker(networks[0], view), nursery)
            nursery.cancel_scope.cancel()


async def undisturbed(params: SamplingParams, **fields: Any) -> Answer:
    async with lab(1) as alone:
        alone.elect(0, 1)
        answer = alone.ask(params, **fields)
        await answer.over.wait()
        return answer


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop", [(), ("bc", "é\n", "ab a"), ("never to be seen",)], ids=["", "stops", "no stop"])
async def test_leaders_that_change_in_the_middle_change_nothing(params: SamplingParams, stop: tuple[str, ...]) -> None:
    whole = await undisturbed(params, stop=stop)
    assert len(whole.tokens) > 3
    async with lab() as swarm:
        for leader in swarm.leaders:
            leader.model.step_s = 0.002
        swarm.elect(1, 1)
        answer = swarm.ask(params, stop=stop)
        for term, number in enumerate((2, 0, 1, 2), 2):  # one of them is the asking node itself
            await answer.wait(len(answer.tokens) + 1)
            swarm.elect(number, term)
        await answer.over.wait()
        assert (answer.tokens, answer.text) == (whole.tokens, whole.text)
        assert [token.index for token in answer.tokens] == list(range(len(answer.tokens)))
        end = answer.end
        assert isinstance(end, Done)
        assert isinstance(whole.end, Done)
        assert (end.finish_reason, end.usage) == (whole.end.finish_reason, whole.end.usage)


@pytest.mark.parametrize("how", ["cut off", "stops"])
async def test_a_leader_that_is_lost_is_replaced_when_another_is_elected(how: str) -> None:
    whole = await undisturbed(GREEDY)
    async with lab() as swarm:
        swarm.leaders[1].model.step_s = 0.02
        swarm.elect(1, 1)
        answer = swarm.ask()
        await answer.wait(5)
        if how == "cut off":
            swarm.hub.cut(swarm.asking.peer_id, swarm.leaders[1].network.peer_id)
        else:
            await swarm.leaders[1].engine.stop()
        swarm.elect(None)
        await trio.sleep(0.2)
        assert not answer.over.is_set()
        assert 5 <= len(answer.tokens) < 60
        swarm.elect(2, 2)
        await answer.over.wait()
        assert answer.tokens == whole.tokens
        assert isinstance(answer.end, Done)
        assert answer.end.leader == str(swarm.leaders[2].network.peer_id)


async def test_a_leader_of_the_past_that_streams_on_is_not_heard() -> None:
    whole = await undisturbed(GREEDY)
    async with lab() as swarm:
        hung = swarm.leaders[1]
        swarm.elect(1, 1)
        hung.model.step_s = 0.02
        answer = swarm.ask()
        await answer.wait(3)
        # Its link stays up, and what it says arrives late: the asker's farewell as well.
        swarm.hub.set_delay(swarm.asking.peer_id, hung.network.peer_id, 0.5)
        swarm.elect(2, 2)
        await answer.over.wait()
        assert answer.tokens == whole.tokens
        await eventually(lambda: hung.running() == 0)


async def test_a_request_comes_back_to_a_leader_that_still_works_on_it() -> None:
    """Elected again at once: the attempt before may not have heard yet that it is over."""
    whole = await undisturbed(GREEDY)
    async with lab() as swarm:
        swarm.leaders[1].model.step_s = 0.005
        swarm.elect(1, 1)
        answer = swarm.ask()
        for term in range(2, 5):
            await answer.wait(len(answer.tokens) + 2)
            swarm.elect(1, term)
        await answer.over.wait()
        assert answer.tokens == whole.tokens
        assert swarm.leaders[1].running() == 0


@pytest.mark.parametrize("ends", ["length", "stop string", "end token"])
async def test_an_answer_that_lacks_only_its_end_gets_it_from_the_next_leader(ends: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 10} if ends == "length" else {}
    if ends == "stop string":
        fields["stop"] = ((await undisturbed(SAMPLED)).text[20:23],)
    whole = await undisturbed(SAMPLED, **{"ignore_eos": ends != "end token", **fields})
    assert isinstance(whole.end, Done)
    assert whole.end.finish_reason == ("length" if ends == "length" else "stop")
    generated = tuple(token.token for token in whole.tokens)
    ask = Ask("req-1", SAMPLED, prompt="hello", generated=generated, attempt=1)
    ask = replace(ask, max_tokens=60, ignore_eos=ends != "end token")
    async with lab(1) as swarm, swarm.leaders[0].prompts.answer(replace(ask, **fields), "asker") as replies:
        found = [reply async for reply in replies if not isinstance(reply, Queued | Alive)]
    assert [type(reply) for reply in found] == [Done]
    assert isinstance(found[0], Done)
    assert (found[0].finish_reason, found[0].text, found[0].usage) == (
        whole.end.finish_reason, whole.end.text, whole.end.usage,
    )  # fmt: skip


async def test_a_new_leader_that_is_not_ready_yet_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.attempts.RETRY_S", 0.05)
    async with lab() as swarm:
        swarm.leaders[1].model.step_s = 0.02
        swarm.leaders[2].refusal = NotReady("it waits for workers")
        swarm.elect(1, 1)
        answer = swarm.ask()
        await answer.wait(3)
        swarm.elect(2, 2)
        await trio.sleep(0.3)
        assert not answer.over.is_set()
        swarm.leaders[2].refusal = None
        await answer.over.wait()
        assert isinstance(answer.end, Done)


@pytest.mark.parametrize("itself", [True, False], ids=["at itself", "elsewhere"])
async def test_a_request_that_is_left_is_dropped_long_before_its_end(itself: bool) -> None:
    async with lab() as swarm:
        number = 0 if itself else 1
        leader = swarm.leaders[number]
        leader.model.step_s = 0.05  # ten seconds for all of it
        swarm.elect(number, 1)
        scope = trio.CancelScope()

        async def leave() -> None:
            with scope:
                await Answer().hear(swarm.asker, Ask("req-9", GREEDY, prompt="x", ignore_eos=True))

        swarm.nursery.start_soon(leave)
        await eventually(lambda: leader.running() == 1)
        scope.cancel()
        await eventually(lambda: leader.running() == 0)
        assert leader.prompts.statistics.cancelled == 1
        assert leader.ended == ["req-9"]


async def test_more_requests_than_a_leader_takes_of_one_peer_wait_for_their_turn() -> None:
    async with lab() as swarm:
        swarm.elect(1, 1)
        answers = [Answer() for _ in range(2 * limits.PROMPT_STREAMS_PER_PEER_MAX)]
        for number, answer in enumerate(answers):
            ask = Ask(f"req-{number}", GREEDY, prompt="x", max_tokens=1, ignore_eos=True)
            swarm.nursery.start_soon(answer.hear, swarm.asker, ask)
        swarm.leaders[1].model.may_run.clear()
        statistics = swarm.leaders[1].prompts.statistics
        await eventually(lambda: statistics.accepted == limits.PROMPT_STREAMS_PER_PEER_MAX)
        await trio.sleep(0.1)
        swarm.leaders[1].model.may_run.set()
        for answer in answers:
            await answer.over.wait()
            assert isinstance(answer.end, Done)
        assert swarm.leaders[1].network.statistics().streams_refused == 0


# --- With a mock clock: leaders that are scripts ---------------------------------------------------------------------


@dataclass
class Scripted:
    hub: MemoryHub
    asking: MemoryNetwork
    leaders: list[MemoryNetwork]
    view: SettableView
    asker: FollowingAsker
    asks: list[tuple[int, Ask]] = field(default_factory=list)

    async def answer(self, **fields: Any) -> list[Reply]:
        async with self.asker.replies(Ask("req-1", GREEDY, prompt="x", **fields)) as replies:
            return [reply async for reply in replies]


Script = Callable[[Ask, Stream], Any]


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[Scripted]:
    """A leader for each script, all connected; nobody is elected."""
    async with open_memory_hub() as hub:
        asking, leaders = hub.join(), [hub.join() for _ in scripts]
        view = SettableView()
        made = Scripted(hub, asking, leaders, view, FollowingAsker(asking, view))

        def serve(number: int, script: Script) -> None:
            async def handle(stream: Stream) -> None:
                ask = decode_ask(await read_frame(stream, limits.PROMPT_REQUEST))
                made.asks.append((number, ask))
                await script(ask, stream)
                await trio.sleep_forever()

            leaders[number].serve(PROTOCOL, handle, max_streams_per_peer=16)

        for number, script in enumerate(scripts):
            serve(number, script)
            await asking.connect(leaders[number].addresses[0])
        yield made


def says(*replies: Reply) -> Script:
    async def script(_: Ask, stream: Stream) -> None:
        for reply in replies:
            await stream.send(encode_reply(reply))

    return script


async def test_without_a_leader_a_request_waits_for_an_election_and_no_longer(autojump_clock: MockClock) -> None:
    async with scripted(says(DONE)) as swarm:

        async def elect() -> None:
            await trio.sleep(FIRST_LEADER_S - 0.1)
            swarm.view.set(swarm.leaders[0].peer_id, 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(elect)
            assert await swarm.answer() == [DONE]
        swarm.view.set(None)
        started = trio.current_time()
        (reply,) = await swarm.answer()
        assert trio.current_time() - started == pytest.approx(FIRST_LEADER_S)
        assert isinstance(reply, Failed)
        assert (reply.error.type, "there is an election" in reply.error.message) == ("no_leader", True)
        assert swarm.asker.leader is None


async def test_where_nobody_can_be_elected_a_request_without_a_token_fails_soon(autojump_clock: MockClock) -> None:
    async def silent(_: Ask, stream: Stream) -> None:
        await trio.sleep(1)
        swarm.view.set(None, parted=True)
        await stream.reset()

    async def begun(_: Ask, stream: Stream) -> None:
        await stream.send(encode_reply(Token(0, 5, "a")))
        await silent(_, stream)

    for script, patience_s in ((silent, PARTED_S), (begun, NO_LEADER_S)):
        async with scripted(script) as swarm:
            swarm.view.set(swarm.leaders[0].peer_id, 1)
            started = trio.current_time()
            *_, last = await swarm.answer()
            assert isinstance(last, Failed)
            assert trio.current_time() - started == pytest.approx(1 + patience_s)
            assert f"nobody took its place for {patience_s:g} s (there is an election)" in last.error.message


async def test_what_is_asked_again_has_the_answer_so_far_and_the_time_that_is_left(autojump_clock: MockClock) -> None:
    async with (
        scripted(says(Token(0, 5, "a"), Token(1, 6, "b")), says(Token(2, 7, "c"), DONE)) as swarm,
        trio.open_nursery() as nursery,
    ):
        swarm.view.set(swarm.leaders[0].peer_id, 1)

        async def elect() -> None:
            await trio.sleep(2)
            swarm.view.set(swarm.leaders[1].peer_id, 2)

        nursery.start_soon(elect)
        replies = await swarm.answer(deadline_s=30.0)
        assert replies == [Token(0, 5, "a"), Token(1, 6, "b"), Token(2, 7, "c"), DONE]
        assert [(n, ask.attempt, ask.generated) for n, ask in swarm.asks] == [(0, 0, ()), (1, 1, (5, 6))]
        assert swarm.asks[1][1].deadline_s == pytest.approx(28.0, abs=0.1)


async def test_a_silent_leader_is_waited_for_and_asked_again(autojump_clock: MockClock) -> None:
    async with scripted(says()) as swarm:
        swarm.view.set(swarm.leaders[0].peer_id, 1)
        started = trio.current_time()
        (reply,) = await swarm.answer()
        waited = trio.current_time() - started
        assert isinstance(reply, Failed)
        assert "was silent" in reply.error.message
        silence = limits.PROMPT_SILENCE_SECONDS_MAX
        assert silence + NO_LEADER_S <= waited <= 2 * silence + NO_LEADER_S + 1
        assert [ask.attempt for _, ask in swarm.asks] == list(range(len(swarm.asks)))
        assert len(swarm.asks) > 1


async def test_nobody_takes_over(autojump_clock: MockClock) -> None:
    async with scripted(says(Token(0, 5, "a"), Failed(NoLeader("the leader is stopping")))) as swarm:
        swarm.view.set(swarm.leaders[0].peer_id, 1)
        answer: list[Reply] = []
        async with swarm.asker.replies(Ask("req-1", GREEDY, prompt="x")) as replies:
            started = trio.current_time()
            async for reply in replies:
                answer.append(reply)
                swarm.view.set(None)
        assert trio.current_time() - started == pytest.approx(NO_LEADER_S, abs=0.1)
        assert answer[0] == Token(0, 5, "a")
        assert isinstance(answer[1], Failed)
        assert answer[1].error.type == "no_leader"
        assert "there is an election" in answer[1].error.message


async def test_the_deadline_ends_it_wherever_it_is(autojump_clock: MockClock) -> None:
    async def forever(_: Ask, stream: Stream) -> None:
        while True:
            await stream.send(encode_reply(Token(0, 5, "a")))
            await trio.sleep(1)

    async with scripted(forever) as swarm:
        swarm.view.set(swarm.leaders[0].peer_id, 1)
        first, last = await swarm.answer(deadline_s=7.0)
        assert trio.current_time() == pytest.approx(7.0, abs=0.1)
        assert first == Token(0, 5, "a")
        assert isinstance(last, Failed)
        assert last.error.type == "deadline_exceeded"


async def test_a_request_that_fits_no_frame_fails_typed(autojump_clock: MockClock) -> None:
    async with scripted(says(DONE)) as swarm:
        swarm.view.set(swarm.leaders[0].peer_id, 1)
        async with swarm.asker.replies(Ask("r", GREEDY, prompt="x" * (limits.REQUEST_TEXT_BYTES_MAX + 1))) as replies:
            (reply,) = [reply async for reply in replies]
        assert isinstance(reply, Failed)
        assert reply.error.type == "usage"


async def test_what_a_leader_of_an_older_version_would_leave_out_is_refused(autojump_clock: MockClock) -> None:
    async with scripted(says(Queued(0, frozenset({"choice"})), Token(0, 5, "a"), DONE)) as swarm:
        swarm.view.set(swarm.leaders[0].peer_id, 1)
        assert (await swarm.answer())[-1] == DONE
        assert (await swarm.answer(choice=1))[-1] == DONE
        (reply,) = await swarm.answer(logprobs=0)
        assert isinstance(reply, Failed)
        assert (reply.error.type, "does not know logprobs" in reply.error.message) == ("usage", True)


async def test_errors_of_whoever_reads_come_out_as_themselves(autojump_clock: MockClock) -> None:
    async with scripted(says(Token(0, 5, "a"))) as swarm:

        async def fail() -> None:
            async with swarm.asker.replies(Ask("req-1", GREEDY, prompt="x")) as replies:
                async for _ in replies:
                    raise KeyError("mine")

        swarm.view.set(swarm.leaders[0].peer_id, 1)
        with pytest.raises(KeyError, match="mine"):
            await fail()
        await trio.testing.wait_all_tasks_blocked()
        assert swarm.asking.statistics().streams_open == 0
