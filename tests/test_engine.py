"""The decode thread with a model in the hands of the test: requests, cancellations, steps that fail, and its end."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio

from capabilities.errors import ExpertsUnavailable, NoLeader, Overloaded, SwarmError
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from scheduler.requests import Effect, FailedEffect, FinishedEffect, QueuedEffect, Request, TokenEffect
from scheduler.sampling import SamplingParams
from swarmnode.leader.engine import DecodeEngine
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

N_VOCAB = 50
SLOTS, QUEUE = 2, 1


class CountingModel:
    """The next token is the last one plus one. Each decode may be held back, or fail."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.running = threading.Event()
        self.error: BaseException | None = None
        self.cleared: list[int] = []
        self.steps: list[tuple[str, ...]] = []
        self.hold_width = 0  # hold the next step of so many requests back

    routings = 0
    mixed = False
    give_up: Callable[[], SwarmError | None]

    def begin_step(self, requests: Sequence[str]) -> None:
        self.steps.append(tuple(requests))
        if len(requests) == self.hold_width:
            self.hold_width = 0
            self.may_run.clear()

    def clear(self, sequence: int) -> None:
        self.cleared.append(sequence)

    def decode(self, tokens: Any, positions: Any, sequences: Any, wants_logits: Any) -> Any:
        self.running.set()
        while not self.may_run.wait(0.01):
            if (given_up := self.give_up()) is not None:
                self.running.clear()
                raise given_up
        self.running.clear()
        if (error := self.error) is not None:
            self.error = None
            raise error
        logits = np.zeros((int(wants_logits.sum()), N_VOCAB), np.float32)
        logits[np.arange(len(logits)), (tokens[wants_logits] + 1) % N_VOCAB] = 1.0
        return logits


@dataclass
class Heard:
    """The effects that one request's sink got."""

    effects: list[Effect] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [effect.token for effect in self.effects if isinstance(effect, TokenEffect)]

    @property
    def end(self) -> Effect | None:
        ends = [effect for effect in self.effects if isinstance(effect, FinishedEffect | FailedEffect)]
        assert len(ends) <= 1
        assert not ends or ends[0] is self.effects[-1]
        return ends[0] if ends else None

    @property
    def error(self) -> SwarmError:
        assert isinstance(self.end, FailedEffect)
        return self.end.error


@dataclass
class Lab:
    model: CountingModel
    engine: DecodeEngine

    def submit(self, name: str, max_tokens: int = 5, deadline_s: float = 30.0) -> Heard:
        heard = Heard()
        params = SamplingParams(temperature=0)
        self.engine.submit(Request(name, (1, 2, 3), params, max_tokens, deadline_s=deadline_s), heard.effects.append)
        return heard

    def running(self) -> int:
        return self.engine.statistics().batcher.running


@asynccontextmanager
async def lab(batcher: Callable[..., Batcher] = Batcher) -> AsyncIterator[Lab]:
    model = CountingModel()
    vocabulary = Vocabulary(N_VOCAB, lambda token: bytes([97 + token % 26]), lambda token: token == N_VOCAB - 1)
    engine = DecodeEngine(model, model, batcher(SLOTS, 100, 16, QUEUE, vocabulary))  # type: ignore[arg-type]
    engine.start()
    try:
        yield Lab(model, engine)
    finally:
        model.may_run.set()
        await engine.stop()


async def ended(*heard: Heard) -> None:
    await eventually(lambda: all(one.end is not None for one in heard))


async def test_requests_are_answered() -> None:
    async with lab() as engine:
        one, two = engine.submit("one"), engine.submit("two", max_tokens=100)
        await ended(one, two)
        assert one.tokens == [4, 5, 6, 7, 8]
        assert two.tokens == list(range(4, N_VOCAB - 1))  # up to its end token
        assert isinstance(one.effects[0], QueuedEffect)
        assert engine.engine.statistics().batcher.finished == 2
        assert engine.engine.statistics().steps > 40
        assert set(engine.model.cleared) <= {0, 1}
        assert not one.end.mixed
        engine.model.mixed = True
        three = engine.submit("three")
        await ended(three)
        assert three.end.mixed


async def test_news_do_not_wait_for_a_step() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        first = engine.submit("first")
        await eventually(engine.model.running.is_set)
        await eventually(lambda: [type(effect) for effect in first.effects] == [QueuedEffect])  # before the step's end
        second, third, fourth = (engine.submit(name) for name in ("second", "third", "fourth"))
        engine.model.may_run.set()
        await ended(first, second, third, fourth)
        assert fourth.error.type == "overloaded"
        assert len(third.tokens) == 5


async def test_a_cancelled_request_hears_nothing_more_and_costs_one_step_at_most() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        gone = engine.submit("gone", max_tokens=90)
        stays = engine.submit("stays")
        await eventually(engine.model.running.is_set)
        engine.engine.cancel("gone", "the asker went away")
        engine.engine.cancel("never there", "nobody")
        engine.model.may_run.set()
        await ended(stays)
        assert gone.end is None
        assert gone.tokens == []
        assert sum("gone" in step for step in engine.model.steps) <= 1
        await eventually(lambda: engine.engine.statistics().batcher.cancelled == 1)
        assert engine.submit("gone") is not None  # the name is free again


async def test_whoever_goes_away_frees_the_slot_before_the_step_ends() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        engine.submit("one", max_tokens=40)
        two = engine.submit("two", max_tokens=40)
        await eventually(engine.model.running.is_set)
        engine.model.hold_width = 2
        engine.model.may_run.set()
        await eventually(lambda: engine.model.hold_width == 0 and engine.model.running.is_set())
        waits = engine.submit("waits")
        engine.engine.cancel("one", "the asker went away")
        await eventually(lambda: [QueuedEffect("waits", 1), QueuedEffect("waits", 0)] == waits.effects)
        assert engine.model.running.is_set(), "the step goes on for the other one"
        assert engine.engine.statistics().batcher.cancelled == 1
        engine.model.may_run.set()
        await ended(two, waits)
        assert two.tokens == list(range(4, 44))
        assert waits.tokens == [4, 5, 6, 7, 8]


async def test_a_step_for_which_nobody_waits_any_more_is_given_up() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        one, two = engine.submit("one"), engine.submit("two", deadline_s=30.0)
        await eventually(engine.model.running.is_set)
        first = engine.model.steps[0]
        for name in first:
            engine.engine.cancel(name, "the asker went away")
        await eventually(lambda: engine.engine.statistics().batcher.failed_steps == 1)
        assert engine.engine.statistics().batcher.cancelled == len(first)
        engine.model.may_run.set()
        three = engine.submit("three")
        await ended(three, *(heard for heard, name in ((one, "one"), (two, "two")) if name not in first))
        assert three.tokens == [4, 5, 6, 7, 8]


async def test_a_step_ends_with_the_last_of_its_deadlines() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        soon = engine.submit("soon", deadline_s=0.2)
        await ended(soon)
        assert soon.error.type == "deadline_exceeded"
        assert "after 0 tokens" in soon.error.message
        engine.model.may_run.set()
        later = engine.submit("later")
        await ended(later)
        assert later.tokens == [4, 5, 6, 7, 8]


async def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    async with lab() as engine:
        error = ExpertsUnavailable("gone", layer=1, experts=[2], peer="p", cause="timeout")
        engine.model.may_run.clear()
        one, two, waits = (engine.submit(name) for name in ("one", "two", "waits"))
        await eventually(engine.model.running.is_set)
        engine.model.error = error
        engine.model.may_run.set()
        await ended(one, two, waits)
        failed = [heard for heard in (one, two) if isinstance(heard.end, FailedEffect)]
        assert failed
        assert all(heard.error is error for heard in failed)
        assert waits.tokens == [4, 5, 6, 7, 8]
        assert engine.engine.statistics().batcher.failed_steps == 1
        later = engine.submit("later")
        await ended(later)
        assert later.tokens == [4, 5, 6, 7, 8]


async def test_a_bug_in_a_step_is_internal_and_survived() -> None:
    async with lab() as engine:
        engine.model.error = RuntimeError("a bug")
        one = engine.submit("one")
        await ended(one)
        assert (one.error.type, "a bug" in one.error.message) == ("internal", False)
        again = engine.submit("again")
        await ended(again)
        assert again.tokens == [4, 5, 6, 7, 8]
        assert not engine.engine.stopped


async def test_deadlines_end_requests_that_wait_and_that_run() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        both = [engine.submit(name, deadline_s=0.05) for name in ("one", "two", "three")]
        await trio.sleep(0.1)
        engine.model.may_run.set()
        await ended(*both)
        assert {heard.error.type for heard in both} == {"deadline_exceeded"}


async def test_an_idle_engine_notices_deadlines_and_requests_at_once() -> None:
    async with lab() as engine:
        seconds = []
        for number in range(5):  # the machine may stand still during one of them
            await trio.sleep(0.05)
            started = trio.current_time()
            await ended(engine.submit(f"request {number}"))
            seconds.append(trio.current_time() - started)
        assert min(seconds) < 1.0


async def test_a_name_in_use_is_refused() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        one = engine.submit("one")
        with pytest.raises(Overloaded, match="in use"):
            engine.submit("one")
        engine.model.may_run.set()
        await ended(one)
        assert one.tokens == [4, 5, 6, 7, 8]


async def test_a_boundary_is_the_end_of_the_step_that_runs_now() -> None:
    async with lab() as engine:
        with trio.fail_after(PATIENCE_S):
            await engine.engine.step_boundary()  # nothing runs
        engine.model.may_run.clear()
        one = engine.submit("one", max_tokens=2)
        await eventually(engine.model.running.is_set)
        two = engine.submit("two")  # its news are told after this step, but say nothing of the next one
        passed = trio.Event()

        async def wait() -> None:
            await engine.engine.step_boundary()
            passed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.05)
            assert not passed.is_set()
            engine.model.may_run.set()
            with trio.fail_after(PATIENCE_S):
                await passed.wait()
        await ended(one, two)


async def test_stopping_ends_everything_with_an_error() -> None:
    async with lab() as engine:
        engine.model.may_run.clear()
        heard = [engine.submit(name, max_tokens=90) for name in ("one", "two", "three")]
        await eventually(engine.model.running.is_set)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.engine.stop)
            await trio.sleep(0.02)
            with pytest.raises(NoLeader):
                engine.submit("late")
            engine.model.may_run.set()
        assert {one.error.type for one in heard} == {"no_leader"}
        assert engine.engine.stopped
        with trio.fail_after(PATIENCE_S):
            await engine.engine.step_boundary()


async def test_a_thread_that_dies_leaves_no_request_waiting() -> None:
    class Dying(Batcher):
        def next_step(self, now: float) -> Any:
            if self.statistics().running:
                raise RuntimeError("a bug in the batcher")
            return super().next_step(now)

    async with lab(Dying) as engine:
        one = engine.submit("one")
        await ended(one)
        assert one.error.type == "internal"
        assert engine.engine.stopped
        with pytest.raises(NoLeader):
            engine.submit("two")
        with trio.fail_after(PATIENCE_S):
            await engine.engine.step_boundary()


async def test_a_flood_of_submissions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.leader.engine.COMMANDS_MAX", 8)
    async with lab() as engine:
        engine.model.may_run.clear()
        first = engine.submit("first")
        await eventually(engine.model.running.is_set)
        accepted = [engine.submit(str(number)) for number in range(8)]
        with pytest.raises(Overloaded):
            engine.submit("one too many")
        engine.model.may_run.set()
        await ended(first, *accepted)
