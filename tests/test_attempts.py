"""One request across leaders: whatever happens to them, the answer is that of one leader that nothing happened to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ExpertsUnavailable,
    NoLeader,
    NotReady,
    Overloaded,
    RequestCancelled,
    SwarmError,
    UsageError,
)
from scheduler.answer import Answer, Vocabulary
from scheduler.attempts import (
    ATTEMPTS_MAX,
    NO_LEADER_S,
    RETRY_S,
    AttemptEffect,
    Attempts,
    Deliver,
    Fail,
    Finish,
    Leading,
    Submit,
)
from scheduler.requests import FinishedEffect, Request
from scheduler.sampling import SamplingParams

A, B, C = Leading("a", 1), Leading("b", 2), Leading("c", 3)


def begun(leader: Leading = A, **fields: float) -> Attempts:
    attempts = Attempts("req-1", 0.0, **fields)
    assert attempts.begin(leader, "", 0.0) == [Submit(0, leader, (), fields.get("deadline_s"))]
    return attempts


def error_of(effects: list[AttemptEffect]) -> SwarmError:
    (effect,) = effects
    assert isinstance(effect, Fail)
    return effect.error


def test_an_answer_of_one_leader() -> None:
    attempts = begun()
    assert attempts.spoke(0)
    assert attempts.token(0, 0, 7, "x") == [Deliver(0, 7, "x")]
    assert attempts.token(0, 1, 8, "y") == [Deliver(1, 8, "y")]
    assert attempts.done(0) == [Finish(A)]
    assert attempts.ended
    assert attempts.done(0) == attempts.token(0, 2, 9, "") == attempts.lost(0, "", 1.0) == attempts.tick(1e9) == []


def test_without_a_leader_a_request_fails_at_once_and_says_why() -> None:
    error = error_of(Attempts("req-1", 0.0).begin(None, "2 of 5 backbone peers are reached", 0.0))
    assert error.type == "no_leader"
    assert "2 of 5 backbone peers" in error.message


def test_a_newer_leader_gets_the_answer_so_far_and_the_old_one_is_not_heard() -> None:
    attempts = begun()
    attempts.token(0, 0, 7, "x")
    assert attempts.follow(B, "", 1.0) == [Submit(1, B, (7,), None)]
    assert attempts.token(0, 1, 66, "from the old leader") == []
    assert not attempts.spoke(0)
    assert attempts.failed(0, UsageError("old"), 1.0) == attempts.lost(0, "old", 1.0) == attempts.done(0) == []
    assert attempts.token(1, 1, 8, "y") == [Deliver(1, 8, "y")]
    assert attempts.done(1) == [Finish(B)]


def test_a_lost_leader_is_replaced_as_soon_as_another_is_known() -> None:
    attempts = begun()
    attempts.token(0, 0, 7, "x")
    assert attempts.lost(0, "the connection broke", 1.0) == []
    assert attempts.token(0, 1, 8, "late") == []
    assert attempts.follow(None, "election", 1.5) == []
    assert attempts.follow(B, "", 3.0) == [Submit(1, B, (7,), None)]


def test_who_took_over_before_the_loss_was_noticed_is_asked_at_once() -> None:
    attempts = begun()
    attempts.follow(None, "election", 0.5)
    attempts.token(0, 0, 7, "x")  # nobody else leads yet: what comes is good
    assert attempts.tokens == [7]
    attempts.follow(B, "", 0.6)
    assert attempts.failed(1, NoLeader("the leader is stopping"), 0.7) == []
    attempts.follow(C, "", 0.8)
    assert attempts.attempt == 2


def test_a_leader_that_only_lost_the_connection_is_asked_again_after_a_while() -> None:
    attempts = begun()
    assert attempts.lost(0, "reset", 1.0) == []
    assert attempts.follow(A, "", 1.1) == []
    assert attempts.next_instant() == 1.0 + RETRY_S
    assert attempts.tick(1.0 + RETRY_S - 0.01) == []
    assert attempts.tick(1.0 + RETRY_S) == [Submit(1, A, (), None)]


def test_nobody_takes_over_in_time() -> None:
    attempts = begun()
    attempts.lost(0, "the connection broke", 2.0)
    attempts.follow(None, "only 1 of 3 answers", 2.0)
    assert attempts.next_instant() == 2.0 + NO_LEADER_S
    assert attempts.tick(2.0 + NO_LEADER_S - 0.1) == []
    error = error_of(attempts.tick(2.0 + NO_LEADER_S))
    assert (error.type, error.details) == ("no_leader", {"peer": "a", "request_id": "req-1"})
    for part in ("the connection broke", "15 s", "only 1 of 3 answers"):
        assert part in error.message


def test_tries_that_come_to_nothing_do_not_prolong_the_wait() -> None:
    attempts = begun()
    attempts.token(0, 0, 7, "x")
    now, effects = 1.0, attempts.lost(0, "reset", 1.0)
    while not effects or isinstance(effects[0], Submit):
        now = attempts.next_instant()
        effects = attempts.tick(now)
        if effects and isinstance(effects[0], Submit):
            now += 0.1
            effects = attempts.lost(effects[0].attempt, "refused", now)
    assert now <= 1.0 + NO_LEADER_S + 0.1
    assert "refused" in error_of(effects).message


def test_a_leader_that_is_lost_again_and_again_ends_it() -> None:
    attempts, now, submits = begun(), 0.0, 1
    while not attempts.ended:
        assert attempts.spoke(attempts.attempt)
        effects = attempts.lost(attempts.attempt, "reset", now)
        if not attempts.ended:
            now = attempts.next_instant()
            effects = attempts.tick(now)
            submits += isinstance(effects[0], Submit)
    assert submits == ATTEMPTS_MAX
    assert error_of(effects).type == "no_leader"


def test_where_the_configuration_names_the_leader_its_loss_is_the_end() -> None:
    attempts = begun(no_leader_s=0.0)
    error = error_of(attempts.lost(0, "it was silent for 4 s", 4.0))
    assert (error.type, error.message) == ("no_leader", "the leader a was lost: it was silent for 4 s")


@pytest.mark.parametrize(
    "error",
    [
        UsageError("u"),
        ContextLengthExceeded("c"),
        RequestCancelled("c"),
        DeadlineExceeded("d"),
        ExpertsUnavailable("e"),
    ],
    ids=lambda error: error.type,
)
def test_errors_that_another_attempt_cannot_mend_are_final(error: SwarmError) -> None:
    attempts = begun()
    attempts.follow(B, "", 1.0)
    assert attempts.failed(1, error, 1.0) == [Fail(error)]


@pytest.mark.parametrize("error", [NotReady("loading"), Overloaded("queue")], ids=lambda error: error.type)
def test_a_leader_that_has_just_taken_over_is_given_time(error: SwarmError) -> None:
    assert begun().failed(0, error, 1.0) == [Fail(error)]  # nothing was begun: it is the asker's to decide
    attempts = begun()
    attempts.follow(B, "", 1.0)
    assert attempts.failed(1, error, 1.0) == []
    assert attempts.tick(1.0 + RETRY_S) == [Submit(2, B, (), None)]
    attempts.failed(2, error, 2.0)
    assert error_of(attempts.tick(1.0 + NO_LEADER_S)) is error


def test_the_deadline_is_for_all_attempts_together() -> None:
    attempts = begun(deadline_s=10.0)
    assert attempts.next_instant() == 10.0
    (submit,) = attempts.follow(B, "", 4.0)
    assert isinstance(submit, Submit)
    assert submit.deadline_s == 6.0
    error = error_of(attempts.tick(10.0))
    assert error.type == "deadline_exceeded"


def test_an_older_term_is_no_news() -> None:
    attempts = begun(B)
    assert attempts.follow(A, "", 1.0) == []
    assert attempts.lost(0, "gone", 1.0) == []
    assert attempts.follow(A, "", 1.0) == []
    assert attempts.follow(Leading("b", 3), "", 1.5) == [Submit(1, Leading("b", 3), (), None)]  # elected again


@pytest.mark.parametrize(("index", "token"), [(2, 9), (0, 9), (5, 9)], ids=["gap", "another", "far"])
def test_a_leader_that_breaks_the_order_ends_the_request(index: int, token: int) -> None:
    attempts = begun()
    attempts.token(0, 0, 7, "x")
    assert error_of(attempts.token(0, index, token, "")).type == "internal"


def test_a_token_that_comes_twice_is_delivered_once() -> None:
    attempts = begun()
    assert [*attempts.token(0, 0, 7, "x"), *attempts.token(0, 0, 7, "x")] == [Deliver(0, 7, "x")]


# --- Real answers, continued by other leaders -----------------------------------------------------------------------

CONTEXT = 24
PIECES = [
    b"a",
    b"b",
    b"ab",
    "é".encode()[:1],
    "é".encode()[1:],
    "👋".encode()[:3],
    "👋".encode()[3:],
    b"\xff",
    b"",
    b"c",
]
END = len(PIECES)
VOCABULARY = Vocabulary(END + 1, [*PIECES, b""].__getitem__, END.__eq__)


@dataclass
class Script:
    """What every leader would generate: the sampler's choice follows from the tokens so far, as with a real model."""

    seed: int
    temperature: float
    penalty: float
    max_tokens: int
    stop: tuple[str, ...]

    def answer(self, generated: tuple[int, ...] = ()) -> Answer:
        params = SamplingParams(temperature=self.temperature, seed=self.seed, frequency_penalty=self.penalty)
        request = Request("req-1", (1, 2), params, self.max_tokens, self.stop, generated=generated)
        return Answer(request, CONTEXT, VOCABULARY, 0.0)

    def logits(self, answer: Answer) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        made = np.random.default_rng([self.seed, *answer.tokens]).normal(0, 2, VOCABULARY.n_tokens)
        made[END] -= 2
        return made.astype(np.float32)

    def replies(self, generated: tuple[int, ...] = ()) -> Iterator[Deliver | FinishedEffect]:
        """A leader's replies to a request with this much of the answer."""
        answer = self.answer(generated)
        while answer.ended is None:
            effect = answer.take(self.logits(answer), 0.0)
            if effect is not None:
                yield Deliver(effect.index, effect.token, effect.text)
        yield answer.finish(0.0)


SCRIPTS = st.builds(
    Script, st.integers(0, 2**32), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0]), st.integers(0, CONTEXT),
    st.lists(st.text(st.sampled_from("abcé👋�"), min_size=1, max_size=4), max_size=3).map(tuple),
)  # fmt: skip


@given(SCRIPTS)
def test_an_answer_continued_at_any_point_goes_on_exactly_there(script: Script) -> None:
    """Neither characters that a token cut nor what may become a stop string is lost, or shown twice."""
    whole = list(script.replies())
    tokens = [reply.token for reply in whole if isinstance(reply, Deliver)]
    for cut in range(len(tokens) + 1):
        assert list(script.replies(tuple(tokens[:cut]))) == whole[cut:]


@dataclass
class World:
    """Leaders that come and go while they answer, and everything that they ever said still on its way."""

    script: Script
    attempts: Attempts
    now: float = 0.0
    streams: dict[int, list[Deliver | FinishedEffect]] = field(default_factory=dict)
    heard: list[Deliver | FinishedEffect] = field(default_factory=list)
    error: SwarmError | None = None

    def obey(self, effects: list[AttemptEffect], end: FinishedEffect | None = None) -> None:
        for effect in effects:
            match effect:
                case Submit(attempt, _, generated, _):
                    self.streams[attempt] = list(self.script.replies(generated))
                case Deliver():
                    self.heard.append(effect)
                case Finish():
                    assert end is not None
                    self.heard.append(end)
                case Fail(error):
                    self.error = error

    def bring(self, attempt: int, again: bool = False) -> None:
        """The next of what an attempt's leader said arrives; `again`: it will once more."""
        if not self.streams[attempt]:
            return
        reply = self.streams[attempt][0] if again else self.streams[attempt].pop(0)
        if isinstance(reply, Deliver):
            self.obey(self.attempts.token(attempt, reply.index, reply.token, reply.text))
        else:
            self.obey(self.attempts.done(attempt), reply)


EVENTS = ("next", "next", "twice", "stale", "lose", "leader", "none", "refuse", "time")


@settings(max_examples=300)
@given(SCRIPTS, st.data())
def test_any_course_of_events_gives_the_answer_of_an_undisturbed_run(script: Script, data: st.DataObject) -> None:
    world = World(script, Attempts("req-1", 0.0))
    term = 1
    world.obey(world.attempts.begin(Leading("p1", term), "", 0.0))
    for _ in range(data.draw(st.integers(0, 40))):
        event = data.draw(
            st.sampled_from(("next", "next", "twice", "stale", "lose", "leader", "none", "refuse", "time"))
        )
        attempts, newest = world.attempts, world.attempts.attempt
        match event:
            case "next" | "twice":
                world.bring(newest, event == "twice")
            case "stale":
                world.bring(data.draw(st.integers(0, newest)))
            case "lose":
                world.obey(attempts.lost(data.draw(st.integers(0, newest)), "gone", world.now))
            case "leader":
                term += data.draw(st.integers(-1, 1))
                term = max(term, 1)
                world.obey(attempts.follow(Leading(f"p{term}", term), "", world.now))
            case "none":
                world.obey(attempts.follow(None, "election", world.now))
            case "refuse":
                world.obey(attempts.failed(newest, NoLeader("stopping"), world.now))
            case "time":
                world.now += data.draw(st.floats(0, 2))
                world.obey(attempts.tick(world.now))
        if world.attempts.ended:
            break
    if not world.attempts.ended:
        world.obey(world.attempts.follow(Leading("last", 1_000), "", world.now))
        while not world.attempts.ended:
            world.bring(world.attempts.attempt)
    whole = list(script.replies())
    if world.error is None:
        assert world.heard == whole
    else:
        assert isinstance(world.error, NoLeader)
        assert world.heard == whole[: len(world.heard)]
