"""The batcher against a model that hashes what its cache holds: any slip of slot, position or order changes tokens."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ExpertsUnavailable,
    Overloaded,
    RequestCancelled,
    UsageError,
)
from scheduler.answer import Vocabulary
from scheduler.batching import PREFILL_ROWS_BESIDE_DECODE, Batcher
from scheduler.requests import Effect, FailedEffect, FinishedEffect, QueuedEffect, Request, TokenEffect, Usage
from scheduler.sampling import NonFiniteLogits, SamplingParams, sample
from scheduler.steps import Step

N_VOCAB = 24
END = 23
# Tokens 20 to 22 are the bytes of a euro sign, one each: text that a cut token stream could break.
PIECES = [chr(ord("a") + i).encode() for i in range(20)] + [b"\xe2", b"\x82", b"\xac", b"<end>"]
VOCABULARY = Vocabulary(N_VOCAB, PIECES.__getitem__, END.__eq__)
GREEDY = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
LOST = ExpertsUnavailable("gone", layer=3, experts=[1], peer="p", cause="timeout")


class HashModel:
    """Logits are a hash of the sequence's tokens. Checks what llama.cpp would: positions go on from the cache."""

    def __init__(self, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.cache: dict[int, list[int]] = {}

    def run(self, step: Step) -> NDArray[np.float32]:
        assert (step.tokens.dtype, step.positions.dtype, step.sequences.dtype) == (np.int32, np.int32, np.int32)
        assert len(step.tokens) == len(step.positions) == len(step.sequences) == len(step.wants_logits) > 0
        for sequence in step.clear:
            self.cache.pop(sequence, None)
        logits = []
        rows = zip(step.tokens, step.positions, step.sequences, step.wants_logits, strict=True)
        for token, position, sequence, wants in rows:
            cached = self.cache.setdefault(int(sequence), [])
            assert position == len(cached) < self.context_tokens
            cached.append(int(token))
            if wants:
                logits.append(self.logits(cached))
        return np.array(logits, dtype=np.float32).reshape(len(logits), N_VOCAB)

    @staticmethod
    def logits(tokens: list[int]) -> NDArray[np.float32]:
        digest = blake2b(repr(tokens).encode(), digest_size=N_VOCAB).digest()
        return np.frombuffer(digest, dtype=np.uint8).astype(np.float32) / np.float32(40)


def batcher(slots: int = 2, context: int = 64, batch: int = 32, queue: int = 4) -> Batcher:
    return Batcher(slots, context, batch, queue, VOCABULARY)


def request(name: str = "r", prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 5, **fields: Any) -> Request:
    fields = {"params": GREEDY, "stop_at_end": False, **fields}
    return Request(name, tuple(prompt), max_tokens=max_tokens, **fields)


def run(core: Batcher, model: HashModel, now: float = 0.0, steps: int = 1_000) -> list[Effect]:
    """Step until there is nothing to do."""
    effects: list[Effect] = []
    for _ in range(steps):
        step = core.next_step(now)
        if step is None:
            return effects
        effects += core.step_done(step, model.run(step), now)
    raise AssertionError("no end")


def tokens_of(effects: Iterable[Effect], name: str = "r") -> list[int]:
    return [effect.token for effect in effects if isinstance(effect, TokenEffect) and effect.request == name]


def text_of(effects: Iterable[Effect], name: str = "r") -> str:
    return "".join(e.text for e in effects if isinstance(e, TokenEffect | FinishedEffect) and e.request == name)


def end_of(effects: Iterable[Effect], name: str = "r") -> FinishedEffect | FailedEffect:
    ends = [e for e in effects if isinstance(e, FinishedEffect | FailedEffect) and e.request == name]
    assert len(ends) == 1
    return ends[0]


def alone(wanted: Request, context: int = 64) -> list[Effect]:
    """The request's own effects when nobody else is served."""
    core = batcher(slots=1, context=context, batch=7)
    return [*core.submit(wanted, 0.0), *run(core, HashModel(context))]


# One request


def test_a_request_from_submit_to_end() -> None:
    core, model = batcher(), HashModel(64)
    assert core.submit(request(max_tokens=2), 10.0) == [QueuedEffect("r", 0)]
    step = core.next_step(11.0)
    assert step is not None
    assert (step.kind, step.clear, step.requests) == ("prefill", (), ("r",))
    assert step.tokens.tolist() == [1, 2, 3]
    assert step.positions.tolist() == [0, 1, 2]
    assert step.sequences.tolist() == [0, 0, 0]
    assert step.wants_logits.tolist() == [False, False, True]
    (first,) = core.step_done(step, model.run(step), 12.0)
    assert isinstance(first, TokenEffect)
    assert (first.index, first.token) == (0, int(np.argmax(HashModel.logits([1, 2, 3]))))
    step = core.next_step(12.0)
    assert step is not None
    assert (step.kind, step.tokens.tolist(), step.positions.tolist()) == ("decode", [first.token], [3])
    second, end = core.step_done(step, model.run(step), 14.5)
    assert isinstance(second, TokenEffect)
    assert second.index == 1
    assert isinstance(end, FinishedEffect)
    assert (end.finish_reason, end.usage) == ("length", Usage(3, 2))
    assert (end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) == (0.0, 2.0, 2.5)
    assert core.next_step(15.0) is None


def test_an_answer_tells_if_one_of_its_steps_mixed_classes() -> None:
    core, model = batcher(), HashModel(64)
    core.submit(request("mixed", max_tokens=3), 0.0)
    ends = []
    for number in range(4):
        if number == 2:
            core.submit(request("pure", max_tokens=1), 0.0)
        step = core.next_step(0.0)
        assert step is not None
        ends += [
            (effect.request, effect.mixed)
            for effect in core.step_done(step, model.run(step), 0.0, mixed=number == 1)
            if isinstance(effect, FinishedEffect)
        ]
    assert sorted(ends) == [("mixed", True), ("pure", False)]


def test_requests_that_a_cheat_had_a_part_in_begin_anew_and_are_tainted_if_they_have_delivered() -> None:
    core, model = batcher(slots=3, batch=6), HashModel(64)
    wanted = {
        "early": request("early", range(4), 6),
        "new": request("new", (*range(5, 20), *range(10)), 3),
        "other": request("other", range(9, 12), 3),
    }
    core.submit(wanted["early"], 0.0)
    effects = run_steps(core, model, 2)
    assert len(tokens_of(effects, "early")) == 2
    core.submit(wanted["new"], 0.0)
    core.submit(wanted["other"], 0.0)
    effects += run_steps(core, model, 1)
    assert tokens_of(effects, "new") == []  # some of its prompt is in the cache
    for sequence in (0, 1):
        model.cache[sequence][0] = 23  # what the cheat made of it
    assert core.distrust(["early", "new", "gone"]) == ["early", "new"]
    effects += run(core, model)
    ends = {effect.request: effect.tainted for effect in effects if isinstance(effect, FinishedEffect)}
    assert ends == {"early": True, "new": False, "other": False}
    for name, each in wanted.items():
        assert tokens_of(effects, name) == tokens_of(alone(each), name)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_any_chunks_give_the_same_tokens(batch: int) -> None:
    wanted = request(prompt=range(20), max_tokens=6)
    core, model = batcher(slots=1, batch=batch), HashModel(64)
    core.submit(wanted, 0.0)
    effects = run(core, model)
    assert tokens_of(effects) == tokens_of(alone(wanted))
    assert core.statistics().rows_decoded == 20 + 5


def test_the_end_token_stops_and_is_no_part_of_the_answer() -> None:
    ends = request(params=SamplingParams(temperature=0, logit_bias={END: 100}), stop_at_end=True)
    effects = alone(ends)
    assert tokens_of(effects) == []
    end = end_of(effects)
    assert isinstance(end, FinishedEffect)
    assert (end.finish_reason, end.text, end.usage) == ("stop", "", Usage(3, 0))
    assert tokens_of(alone(dataclasses.replace(ends, stop_at_end=False))) == [END] * 5


def test_max_tokens_0_is_an_empty_answer() -> None:
    (end,) = batcher().submit(request(max_tokens=0), 0.0)
    assert isinstance(end, FinishedEffect)
    assert (end.finish_reason, end.usage) == ("length", Usage(3, 0))


def test_a_full_context_ends_with_length() -> None:
    end = end_of(effects := alone(request(prompt=[1] * 6, max_tokens=100), context=8))
    assert isinstance(end, FinishedEffect)
    assert end.finish_reason == "length"
    assert len(tokens_of(effects)) == 3  # cells 6 and 7 take two; the third needs none
    assert len(tokens_of(alone(request(prompt=[1] * 8, max_tokens=100), context=8))) == 1


def test_an_answer_that_had_filled_the_context_needs_no_step() -> None:
    (end,) = batcher(context=10).submit(request(prompt=[1] * 8, generated=(1, 1, 1), max_tokens=100), 0)
    assert isinstance(end, FinishedEffect)
    assert (end.finish_reason, end.usage) == ("length", Usage(8, 3))


def test_draws_use_the_position_the_choice_and_the_answer_as_history() -> None:
    params = dataclasses.replace(WARM, presence_penalty=1.0)
    tokens = [1, 2, 3]
    for _ in range(8):
        sampled = sample(HashModel.logits(tokens), params, len(tokens), choice=2, history=tokens[3:])
        tokens.append(sampled.token)
    assert tokens_of(alone(request(params=params, choice=2, max_tokens=8))) == tokens[3:]


def test_a_stop_string_with_the_last_allowed_token_is_a_stop() -> None:
    end = end_of(alone(request(params=SamplingParams(temperature=0, logit_bias={2: 100}), max_tokens=2, stop=("cc",))))
    assert isinstance(end, FinishedEffect)
    assert end.finish_reason == "stop"


def test_text_is_held_back_and_flushed() -> None:
    forced = SamplingParams(temperature=0, logit_bias={20: 100})  # half a euro sign, again and again
    effects = alone(request(params=forced, max_tokens=2))
    assert [e.text for e in effects if isinstance(e, TokenEffect)] == ["", "\ufffd"]
    end = end_of(effects)
    assert isinstance(end, FinishedEffect)
    assert end.text == ""  # the second half never came: nothing is shown for it


def test_a_stop_string_over_tokens_ends_the_answer_and_does_not_leak() -> None:
    whole = alone(request(prompt=[5, 6], params=WARM, max_tokens=30))
    text, tokens = text_of(whole), tokens_of(whole)
    stop = text[8:11]
    effects = alone(request(prompt=[5, 6], params=WARM, max_tokens=30, stop=(stop,)))
    end = end_of(effects)
    assert isinstance(end, FinishedEffect)
    assert end.finish_reason == "stop"
    assert text_of(effects) == text[: text.index(stop)]
    assert tokens_of(effects) == tokens[: len(tokens_of(effects))]
    assert end.usage.completion_tokens == len(tokens_of(effects)) < 30
    # Text that only looks like one comes out at the end.
    assert text_of(alone(request(prompt=[5, 6], params=WARM, max_tokens=30, stop=(text[-3:] + "x",)))) == text


@pytest.mark.parametrize("done", range(13))
def test_a_request_continues_where_another_leader_left_it(done: int) -> None:
    params = dataclasses.replace(WARM, frequency_penalty=0.5)
    wanted = request(prompt=[7, 8], params=params, max_tokens=12, stop=("zz",), choice=1)
    whole = alone(wanted)
    first = [e for e in whole if isinstance(e, TokenEffect)][:done]
    rest = alone(dataclasses.replace(wanted, generated=tuple(e.token for e in first)))
    assert [e for e in whole if not isinstance(e, QueuedEffect)][done:] == [
        e for e in rest if not isinstance(e, QueuedEffect)
    ]
    end = end_of(rest)
    assert isinstance(end, FinishedEffect)
    assert end.usage == Usage(2, 12)


def test_a_continued_request_knows_the_stop_string_that_it_was_in() -> None:
    core = batcher()
    core.submit(request(generated=(0, 1), stop=("abc",), params=SamplingParams(temperature=0, logit_bias={2: 100})), 0)
    effects = run(core, HashModel(64))
    assert text_of(effects) == ""
    assert end_of(effects).finish_reason == "stop"  # type: ignore[union-attr]


# Refusals


def test_what_cannot_be_served_is_refused_with_its_numbers() -> None:
    core = batcher(context=10)
    with pytest.raises(ContextLengthExceeded, match=r"11 tokens.*holds 10"):
        core.submit(request(prompt=[1] * 11), 0.0)
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens and the answer so far 2"):
        core.submit(request(prompt=[1] * 10, generated=(1, 1)), 0.0)
    with pytest.raises(UsageError, match=f"token id {N_VOCAB}"):
        core.submit(request(prompt=[N_VOCAB]), 0.0)
    with pytest.raises(UsageError, match="token id -1"):
        core.submit(request(generated=(-1,)), 0.0)
    with pytest.raises(UsageError, match="token id 500"):
        core.submit(request(params=SamplingParams(logit_bias={500: 1})), 0.0)
    core.submit(request(), 0.0)
    with pytest.raises(UsageError, match="in use"):
        core.submit(request(), 0.0)
    assert core.statistics().accepted == 1


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"prompt": ()}, "prompt is empty"), ({"prompt": ("a",)}, "token ids"), ({"prompt": (True,)}, "token ids"),
        ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"), ({"deadline_s": math.inf}, "deadline_s"), ({"choice": -1}, "choice"),
        ({"stop": ("",)}, "stop"), ({"name": ""}, "id"), ({"name": "x" * 129}, "id"),
    ],
)  # fmt: skip
def test_bad_requests_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        request(**fields)


def test_a_full_queue_refuses_and_positions_are_told() -> None:
    core, model = batcher(slots=1, queue=2), HashModel(64)
    assert core.submit(request("a", max_tokens=2), 0) == [QueuedEffect("a", 0)]
    assert core.submit(request("b"), 0) == [QueuedEffect("b", 1)]
    assert core.submit(request("c"), 0) == [QueuedEffect("c", 2)]
    with pytest.raises(Overloaded, match="2 requests wait"):
        core.submit(request("d"), 0)
    assert [core.queue_position(name) for name in "abcd"] == [0, 1, 2, None]
    for _ in range(2):
        step = core.next_step(0)
        assert step is not None
        effects = core.step_done(step, model.run(step), 0)
    assert effects[-2:] == [QueuedEffect("b", 0), QueuedEffect("c", 1)]
    assert core.submit(request("d"), 0) == [QueuedEffect("d", 2)]


# Several at once


def test_many_at_once_each_as_if_alone() -> None:
    core, model = batcher(slots=4, queue=8, batch=9), HashModel(64)
    wanted = [
        request(f"q{i}", prompt=range(i % 3, 3 * i + 2), params=dataclasses.replace(WARM, seed=i), max_tokens=20)
        for i in range(7)
    ]
    effects = [effect for w in wanted for effect in core.submit(w, 0)] + run(core, model)
    for w in wanted:
        assert tokens_of(effects, w.id) == tokens_of(alone(w), w.id)
        assert text_of(effects, w.id) == text_of(alone(w), w.id)


def test_prefill_and_decode_alternate_and_neither_starves() -> None:
    core, model = batcher(slots=2, context=2_000, batch=512), HashModel(2_000)
    core.submit(request("talker", max_tokens=100), 0)
    run_one(core, model)
    core.submit(request("reader", prompt=[1] * 1_000, max_tokens=1), 0)
    kinds, sizes = [], []
    while core.queue_position("reader") is not None:
        step = run_one(core, model)
        kinds.append(step.kind)
        sizes.append(len(step.tokens))
    assert kinds == ["decode", "prefill"] * 8
    assert sizes[1] == PREFILL_ROWS_BESIDE_DECODE
    # With nobody generating, chunks are as large as the batch.
    core.cancel("talker", "done", 0)
    core.submit(request("reader", prompt=[1] * 1_000, max_tokens=1), 0)
    assert len(run_one(core, model).tokens) == 512


def run_one(core: Batcher, model: HashModel) -> Step:
    step = core.next_step(0)
    assert step is not None
    core.step_done(step, model.run(step), 0)
    return step


def test_prompts_share_a_prefill_evenly() -> None:
    core = batcher(slots=4, batch=32)
    for name, length in (("a", 30), ("b", 3), ("c", 30), ("d", 9)):
        core.submit(request(name, prompt=[1] * length), 0)
    step = core.next_step(0)
    assert step is not None
    assert [(part.request, part.rows, part.wants_logits) for part in step.parts] == [
        ("a", 10, False), ("b", 3, True), ("c", 10, False), ("d", 9, True),
    ]  # fmt: skip
    assert step.sequences.tolist() == [0] * 10 + [1] * 3 + [2] * 10 + [3] * 9


def test_slots_stay_dense() -> None:
    core = batcher(slots=3, queue=3)
    for name in "abcde":
        core.submit(request(name), 0)
    core.cancel("b", "gone", 0)
    core.cancel("a", "gone", 0)
    core.cancel("d", "gone", 0)  # it took b's slot
    core.cancel("e", "gone", 0)
    core.submit(request("f"), 0)
    step = core.next_step(0)
    assert step is not None
    assert [(part.request, part.sequence) for part in step.parts] == [("f", 0), ("c", 2)]


# Ends that are not good


def test_cancelling_while_a_step_runs_frees_the_slot_at_once() -> None:
    core, model = batcher(slots=1), HashModel(64)
    core.submit(request("a"), 0)
    core.submit(request("b"), 0)
    step = core.next_step(0)
    assert step is not None
    failed, queued = core.cancel("a", "the asker left", 0)
    assert isinstance(failed, FailedEffect)
    assert isinstance(failed.error, RequestCancelled)
    assert str(failed.error) == "the asker left"
    assert queued == QueuedEffect("b", 0)
    assert core.cancel("a", "again", 0) == []
    assert core.step_done(step, model.run(step), 0) == []
    step = core.next_step(0)
    assert step is not None
    assert (step.requests, step.clear) == (("b",), (0,))
    effects = core.step_done(step, model.run(step), 0) + run(core, model)
    assert tokens_of(effects, "b") == tokens_of(alone(request("b")), "b")


def test_the_same_id_again_does_not_get_the_old_steps_tokens() -> None:
    core, model = batcher(slots=1), HashModel(64)
    core.submit(request(prompt=[4, 4]), 0)
    step = core.next_step(0)
    assert step is not None
    core.cancel("r", "gone", 0)
    core.submit(request(prompt=[5, 5]), 0)
    assert core.step_done(step, model.run(step), 0) == []
    assert tokens_of(run(core, model)) == tokens_of(alone(request(prompt=[5, 5])))


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_step_ends_its_requests_and_no_others(lost: bool) -> None:
    core, model = batcher(slots=3), HashModel(64)
    core.submit(request("talker", params=WARM, max_tokens=9), 0)
    effects = core.step_done(step := core.next_step(0), model.run(step), 0)  # type: ignore[arg-type]
    effects += core.submit(request("reader", prompt=range(20)), 0)
    effects += core.step_done(step := core.next_step(0), model.run(step), 0)  # type: ignore[arg-type]
    step = core.next_step(0)
    assert step is not None
    assert step.requests == ("reader",)
    model.run(step)
    if lost:
        model.cache.clear()
    (failed,) = core.step_failed(step, LOST, lost, 0)
    assert failed == FailedEffect("reader", LOST)
    step = core.next_step(0)
    assert step is not None
    assert step.clear == ((0, 1) if lost else (1,))
    assert step.kind == ("prefill" if lost else "decode")
    effects += core.step_done(step, model.run(step), 0) + run(core, model)
    assert tokens_of(effects, "talker") == tokens_of(alone(request("talker", params=WARM, max_tokens=9)), "talker")
    assert core.statistics().failed_steps == 1


def test_a_clear_that_a_failed_step_did_not_come_to_is_repeated() -> None:
    core, model = batcher(slots=2), HashModel(64)
    core.submit(request("a"), 0)
    core.submit(request("b"), 0)
    run_one(core, model)
    core.cancel("a", "gone", 0)
    step = core.next_step(0)
    assert step is not None
    assert (step.clear, step.requests) == ((0,), ("b",))
    core.step_failed(step, LOST, False, 0)
    core.submit(request("c"), 0)
    step = core.next_step(0)
    assert step is not None
    assert step.clear == (0, 1)


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    core, model = batcher(slots=2), HashModel(64)
    core.submit(request("a"), 0)
    core.submit(request("b"), 0)
    step = core.next_step(0)
    assert step is not None
    logits = model.run(step)
    logits[0, 5] = np.nan
    effects = core.step_done(step, logits, 0) + run(core, model)
    end = end_of(effects, "a")
    assert isinstance(end, FailedEffect)
    assert isinstance(end.error, NonFiniteLogits)
    assert tokens_of(effects, "b") == tokens_of(alone(request("b")), "b")


def test_deadlines_end_requests_waiting_and_running() -> None:
    core, model = batcher(slots=1), HashModel(64)
    core.submit(request("a", deadline_s=5), 100)
    core.submit(request("b", deadline_s=3), 100)
    core.submit(request("c", deadline_s=9), 100)
    assert core.next_deadline() == 103
    step = core.next_step(101)
    assert step is not None
    core.step_done(step, model.run(step), 101)
    assert core.expire(102.9) == []
    failed, moved = core.expire(103)
    assert isinstance(failed, FailedEffect)
    assert isinstance(failed.error, DeadlineExceeded)
    assert (failed.request, str(failed.error)) == ("b", "the request's deadline of 3 s passed in the queue")
    assert moved == QueuedEffect("c", 1)
    assert core.next_step(105) is None  # a has no time left, expire not yet called
    failed, moved = core.expire(105)
    assert isinstance(failed, FailedEffect)
    assert str(failed.error) == "the request's deadline of 5 s passed after 1 tokens"
    assert moved == QueuedEffect("c", 0)
    assert core.expire(109)[0].request == "c"
    assert core.next_deadline() is None


def test_who_expires_in_the_queue_gets_no_slot_on_the_way() -> None:
    core = batcher(slots=1)
    core.submit(request("a", deadline_s=5), 0)
    core.submit(request("b", deadline_s=5), 0)
    assert [(type(effect), effect.request) for effect in core.expire(5)] == [(FailedEffect, "b"), (FailedEffect, "a")]


def test_steps_run_one_at_a_time() -> None:
    core, model = batcher(), HashModel(64)
    core.submit(request(), 0)
    step = core.next_step(0)
    assert step is not None
    with pytest.raises(RuntimeError, match="not ended"):
        core.next_step(0)
    with pytest.raises(ValueError, match="shape"):
        core.step_done(step, np.zeros((2, N_VOCAB), dtype=np.float32), 0)
    core.step_done(step, model.run(step), 0)
    with pytest.raises(RuntimeError, match="not the one"):
        core.step_done(step, np.zeros((1, N_VOCAB), dtype=np.float32), 0)
    with pytest.raises(RuntimeError, match="not the one"):
        core.step_failed(step, LOST, False, 0)


@pytest.mark.parametrize("sizes", [(0, 8, 8, 0), (4, 8, 3, 0), (1, 0, 8, 0), (1, 8, 8, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs"):
        Batcher(*sizes, VOCABULARY)


# Shares


def run_steps(core: Batcher, model: HashModel, steps: int) -> list[Effect]:
    effects: list[Effect] = []
    for _ in range(steps):
        step = core.next_step(0)
        assert step is not None
        effects += core.step_done(step, model.run(step), 0)
    return effects


def test_a_slot_is_taken_back_for_who_has_none_and_the_answer_stays_the_same() -> None:
    core, model = batcher(slots=3, queue=4), HashModel(64)
    many = [request(f"x{i}", (i, 5), 12, client="x", params=dataclasses.replace(WARM, seed=i)) for i in range(3)]
    effects = [effect for each in many for effect in core.submit(each, 0)]
    effects += run_steps(core, model, 5)
    assert core.expire(0) == []
    assert core.submit(request("y", (9, 9), 3, client="y"), 0) == [QueuedEffect("y", 1)]
    effects += (given := core.expire(0))
    assert [effect.request for effect in given] == ["y", "x0"]  # of several with as many tokens
    assert [core.queue_position(name) for name in ("y", "x0", "x1", "x2")] == [0, 1, 0, 0]
    assert core.expire(0) == []
    effects += core.submit(request("z", (9, 8), 3, client="z"), 0)
    assert core.expire(0) == []  # first comes who gave his slot
    effects += run(core, model)
    for each in many:
        assert tokens_of(effects, each.id) == tokens_of(alone(each), each.id)
        assert text_of(effects, each.id) == text_of(alone(each), each.id)
        assert isinstance(end_of(effects, each.id), FinishedEffect)


def test_no_slot_is_taken_back_while_a_step_runs() -> None:
    core, model = batcher(slots=2, queue=4), HashModel(64)
    core.submit(request("1", client="x"), 0)
    core.submit(request("2", client="x"), 0)
    step = core.next_step(0)
    assert step is not None
    core.submit(request("3", client="y"), 0)
    assert core.expire(0) == []
    core.step_done(step, model.run(step), 0)
    assert QueuedEffect("3", 0) in core.expire(0)


def test_a_full_queue_makes_room_for_who_has_little_in_it() -> None:
    core = batcher(slots=1, queue=3)
    for name in "1234":
        core.submit(request(name, client="x"), 0)
    with pytest.raises(Overloaded) as refused:
        core.submit(request("5", client="x"), 0)
    assert refused.value.details["retry_after_s"] == 20  # four answers' time
    first, *_ = core.submit(request("6", client="y"), 0)
    assert isinstance(first, FailedEffect)
    assert (first.request, first.error.type) == ("4", "overloaded")
    with pytest.raises(Overloaded):
        core.submit(request("7", client="y"), 0)  # two and one: nobody has more than he would have
    assert core.queue_position("6") == 1
    core.cancel("1", "left", 0.5)
    core.submit(request("8", client="y"), 0.5)
    with pytest.raises(Overloaded) as refused:
        core.submit(request("9", client="x"), 0.5)
    assert refused.value.details["retry_after_s"] < 20


# Any order of events


class Conversation:
    """Drives a batcher through arbitrary events and checks after each what must always hold."""

    def __init__(self, slots: int, batch: int, queue: int, context: int) -> None:
        self.core = Batcher(slots, context, batch, queue, VOCABULARY)
        self.model = HashModel(context)
        self.limits = (slots, batch, queue)
        self.now = 0.0
        self.step: Step | None = None
        self.requests: dict[str, Request] = {}
        self.effects: list[Effect] = []

    def submit(self, wanted: Request) -> None:
        try:
            effects = self.core.submit(wanted, self.now)
        except (Overloaded, ContextLengthExceeded):
            return
        self.requests[wanted.id] = wanted
        self.take(effects)

    def start(self) -> None:
        if self.step is None:
            self.take(self.core.expire(self.now))
            self.is_fair()
            self.step = self.core.next_step(self.now)
            if self.step is not None:
                assert 0 < len(self.step.tokens) <= self.limits[1]
                sequences = [part.sequence for part in self.step.parts]
                assert sequences == sorted(set(sequences))
                assert len(set(self.step.requests)) == len(sequences) <= self.limits[0]
                assert all(0 <= sequence < self.limits[0] for sequence in sequences)

    def is_fair(self) -> None:
        """The first in the queue has something running, or nobody has several slots that may be taken back."""
        place = {e.request: e.position for e in self.effects if isinstance(e, QueuedEffect)}
        over = {e.request for e in self.effects if isinstance(e, FinishedEffect | FailedEffect)}
        runs = Counter(self.requests[name].client for name, at in place.items() if at == 0 and name not in over)
        places = {at: name for name, at in place.items() if at and name not in over}
        assert sorted(places) == list(range(1, len(places) + 1))
        given = Counter(e.request for e in self.effects if isinstance(e, QueuedEffect) and e.position == 0)
        assert max(given.values(), default=0) <= 2  # a slot is taken back once
        if places and not runs[self.requests[places[1]].client]:
            able = [name for name, n in given.items() if n == 1 and place[name] == 0 and name not in over]
            assert all(runs[self.requests[name].client] <= 1 for name in able)

    def end(self, outcome: str) -> None:
        if self.step is None:
            return
        step, self.step = self.step, None
        if outcome == "done":
            self.take(self.core.step_done(step, self.model.run(step), self.now))
        else:
            if outcome != "before":  # it failed after the rows were in
                self.model.run(step)
            if outcome == "lost":
                self.model.cache.clear()
            self.take(self.core.step_failed(step, LOST, outcome == "lost", self.now))

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects
        statistics = self.core.statistics()
        assert statistics.running <= self.limits[0]
        assert statistics.waiting <= self.limits[2]
        assert statistics.waiting == 0 or statistics.running == self.limits[0]

    def finish(self) -> None:
        self.end("done")
        for _ in range(2_000):
            self.start()
            if self.step is None:
                break
            self.end("done")
        self.now += 1_000
        self.take(self.core.expire(self.now))
        statistics = self.core.statistics()
        assert (statistics.running, statistics.waiting) == (0, 0)
        assert statistics.accepted == statistics.finished + statistics.cancelled + statistics.failed
        assert {e.request for e in self.effects} == set(self.requests)
        for name, wanted in self.requests.items():
            own = [effect for effect in self.effects if effect.request == name]
            end = end_of(own, name)
            assert own[-1] is end
            expected = [e for e in alone(wanted, self.model.context_tokens) if isinstance(e, TokenEffect)]
            delivered = [e for e in own if isinstance(e, TokenEffect)]
            assert delivered == expected[: len(delivered)]
            if isinstance(end, FinishedEffect):
                assert delivered == expected


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    return Request(
        name,
        tuple(draw(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=14))),
        params=draw(st.sampled_from([GREEDY, WARM])),
        max_tokens=draw(st.integers(0, 6)),
        stop=draw(st.sampled_from([(), ("a",), ("€", "bc")])),
        deadline_s=draw(st.sampled_from([2.0, 100.0])),
        generated=tuple(draw(st.lists(st.integers(0, 19), max_size=3))),
        client=draw(st.sampled_from("aab")),
    )


@settings(max_examples=150)
@given(st.data())
def test_any_order_of_events_ends_every_request_once_and_right(data: st.DataObject) -> None:
    talk = Conversation(
        slots=data.draw(st.integers(1, 3), "slots"),
        batch=data.draw(st.integers(3, 10), "batch"),
        queue=data.draw(st.integers(0, 3), "queue"),
        context=data.draw(st.integers(8, 24), "context"),
    )
    events = st.sampled_from(
        ["submit", "submit", "start", "start", "done", "done", "done", "failed", "before", "lost", "cancel", "wait"]
    )
    for n, event in enumerate(data.draw(st.lists(events, max_size=50), "events")):
        match event:
            case "submit":
                talk.submit(data.draw(requests(f"q{n}")))
            case "start":
                talk.start()
            case "cancel":
                if talk.requests:
                    talk.take(talk.core.cancel(data.draw(st.sampled_from(sorted(talk.requests))), "left", talk.now))
            case "wait":
                talk.now += 1
                talk.take(talk.core.expire(talk.now))
            case outcome:
                talk.end(outcome)
    talk.finish()
