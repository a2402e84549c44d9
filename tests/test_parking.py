"""Requests wait for experts that nobody can compute: they lose and repeat nothing, and hold up nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.llama import LlamaModel, LlamaSettings
from capabilities.errors import ExpertsUnavailable, Internal, NotReady, SwarmError
from scheduler.batching import Batcher
from scheduler.parking import RETRY_S_MAX, RETRY_S_MIN
from scheduler.requests import Effect, FailedEffect, FinishedEffect, Request
from scheduler.steps import Step
from tests.test_batching import N_VOCAB, VOCABULARY, WARM, HashModel, alone, end_of, request, tokens_of
from tests.tiny_architectures import write_tiny_model

STEP_S = 0.05
PARK_S = 10.0


def missing(tokens: Iterable[int]) -> ExpertsUnavailable:
    return ExpertsUnavailable("nobody answers", layer=2, experts=sorted(set(tokens)), peer="p", cause="disconnected")


@dataclass
class Patchy:
    """A HashModel whose tokens need experts: `lacks(token, now)` says which are gone. A step that fails leaves rows
    behind, and wrong ones."""

    model: HashModel
    lacks: Callable[[int, float], bool]
    failed: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, step: Step, now: float) -> NDArray[np.float32] | SwarmError:
        for sequence, position in step.cut:
            assert sequence not in step.clear
            assert position <= len(self.model.cache[sequence])
            del self.model.cache[sequence][position:]
        lost = [token for token in step.tokens.tolist() if self.lacks(token, now)]
        if not lost:
            return self.model.run(step)
        for sequence in step.clear:
            self.model.cache.pop(sequence, None)
        for token, sequence in zip(step.tokens.tolist(), step.sequences.tolist(), strict=True):
            self.model.cache.setdefault(sequence, []).append(token + 100)
        self.failed.append(step.requests)
        return missing(lost)


def batcher(slots: int = 3, *, can_cut: bool = True, park_s: float = PARK_S, batch: int = 8) -> Batcher:
    return Batcher(slots, 64, batch, 8, VOCABULARY, park_s=park_s, can_cut=can_cut)


def go(
    core: Batcher, model: Patchy, *, until: float, now: float = 0.0, routing_at: float | None = None
) -> tuple[list[Effect], dict[str, float]]:
    """Step for a while; the effects, and when each request ended."""
    effects: list[Effect] = []
    ends: dict[str, float] = {}
    while now < until:
        if routing_at is not None and now >= routing_at:
            core.retry()
            routing_at = None
        new = core.expire(now)
        step = core.next_step(now)
        if step is not None:
            result = model.run(step, now)
            if isinstance(result, SwarmError):
                new += core.step_failed(step, result, False, now)
            else:
                new += core.step_done(step, result, now)
        ends |= {e.request: now for e in new if isinstance(e, FinishedEffect | FailedEffect)}
        effects += new
        now += STEP_S
    return effects, ends


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_is_missing_and_for_how_long_nothing_is_lost_and_nothing_repeated(data: st.DataObject) -> None:
    can_cut = data.draw(st.booleans())
    core = batcher(data.draw(st.integers(1, 3)), can_cut=can_cut)
    modulus = data.draw(st.integers(1, 6))
    begins, lasts = data.draw(st.floats(0, 2)), data.draw(st.floats(0, 5))
    told = data.draw(st.booleans())
    patchy = Patchy(HashModel(64), lambda token, now: token % modulus == 0 and begins <= now < begins + lasts)
    wanted: list[Request] = []
    for i in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=12))
        params = {"params": WARM} if data.draw(st.booleans()) else {}
        wanted.append(request(f"r{i}", prompt, data.draw(st.integers(1, 9)), **params))
    effects = [effect for each in wanted for effect in core.submit(each, 0.0)]
    more, _ = go(core, patchy, until=120.0, routing_at=begins + lasts if told else None)
    effects += more
    for each in wanted:
        assert isinstance(end_of(effects, each.id), FinishedEffect)
        assert tokens_of(effects, each.id) == tokens_of(alone(each), each.id)
    assert core.next_deadline() is None
    assert core.statistics().parked == 0


def test_others_go_on_while_one_waits() -> None:
    core, well = batcher(), [request("a", [1, 2], 9), request("b", [3], 9)]
    used = {token for each in well for token in (*each.prompt_tokens, *tokens_of(alone(each), each.id))}
    gone = min(set(range(N_VOCAB)) - used)
    patchy, stuck = Patchy(HashModel(64), lambda token, now: token == gone), request("stuck", [gone, gone, 7], 9)
    for each in (stuck, *well):
        core.submit(each, 0.0)
    effects, ends = go(core, patchy, until=PARK_S + 1)
    for each in well:
        assert tokens_of(effects, each.id) == tokens_of(alone(each), each.id)
        assert ends[each.id] < 2 * (9 + 9 + 4) * STEP_S  # each by itself, but at once
    failed = end_of(effects, "stuck")
    assert isinstance(failed, FailedEffect)
    assert failed.error.details["experts"] == [gone]
    assert PARK_S <= ends["stuck"] < PARK_S + 0.2
    tries = [step for step in patchy.failed if step == ("stuck",)]
    assert PARK_S / RETRY_S_MAX <= len(tries) < 12  # rarer and rarer


def test_a_routing_that_changes_is_tried_at_once() -> None:
    core = batcher(slots=1)
    patchy = Patchy(HashModel(64), lambda token, now: now < 6.0)
    core.submit(request(max_tokens=2), 0.0)
    _, ends = go(core, patchy, until=9.0, routing_at=6.05)
    assert ends["r"] < 6.0 + 5 * STEP_S
    core, patchy = batcher(slots=1), Patchy(HashModel(64), lambda token, now: now < 6.0)
    core.submit(request(max_tokens=2), 0.0)
    _, ends = go(core, patchy, until=9.0)
    assert 6.0 + RETRY_S_MIN < ends["r"] <= 6.0 + RETRY_S_MAX + 5 * STEP_S


def test_a_request_waits_no_longer_than_its_own_deadline() -> None:
    core = batcher()
    patchy = Patchy(HashModel(64), lambda token, now: now > 1.0)
    core.submit(request(max_tokens=60, prompt=[1], deadline_s=4.0), 0.0)
    effects, ends = go(core, patchy, until=6.0)
    failed = end_of(effects)
    assert isinstance(failed, FailedEffect)
    assert failed.error.type == "experts_unavailable"
    assert 4.0 <= ends["r"] < 4.2
    assert len(tokens_of(effects)) > 5


def test_the_waiting_begins_anew_after_each_success() -> None:
    core = batcher()
    patchy = Patchy(HashModel(64), lambda token, now: now % 9.0 < 6.0)
    core.submit(request(max_tokens=60, prompt=[1]), 0.0)
    effects, _ = go(core, patchy, until=60.0)
    assert isinstance(end_of(effects), FinishedEffect)


@pytest.mark.parametrize(
    ("park_s", "error"), [(0.0, missing([1])), (PARK_S, Internal("a fault"))], ids=["off", "another error"]
)
def test_what_is_not_parked_fails_at_once(park_s: float, error: SwarmError) -> None:
    core = batcher(park_s=park_s)
    core.submit(request(), 0.0)
    step = core.next_step(0.0)
    assert step is not None
    (failed,) = core.step_failed(step, error, False, 0.0)
    assert isinstance(failed, FailedEffect)
    assert failed.error is error


def test_no_placement_at_all_is_waited_for_too() -> None:
    core = batcher()
    core.submit(request(), 0.0)
    step = core.next_step(0.0)
    assert step is not None
    assert core.step_failed(step, NotReady("none"), False, 0.0) == []
    assert (core.statistics().parked, core.next_step(0.0)) == (1, None)
    assert core.next_deadline() == RETRY_S_MIN
    assert [type(e) for e in core.cancel("r", "gone", 0.1)] == [FailedEffect]
    assert (core.statistics().parked, core.next_deadline()) == (0, None)


@pytest.mark.parametrize("kind", ["olmoe", "lfm2moe"])
def test_a_real_sequence_is_cut_back_and_goes_on_with_the_same_bits(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_tiny_model(tmp_path_factory.mktemp("cut") / "m.gguf", kind)
    with LlamaModel(path, LlamaSettings(context_tokens=64, sequences=2)) as model:

        def decode(tokens: list[int], start: int) -> NDArray[np.float32]:
            n = len(tokens)
            positions = np.arange(start, start + n, dtype=np.int32)
            wants = np.zeros(n, np.bool_)
            wants[-1] = True
            return model.decode(np.array(tokens, np.int32), positions, np.ones(n, np.int32), wants)

        decode([5, 6, 7, 8], 0)
        expected = decode([9], 4)
        if model.is_recurrent:
            with pytest.raises(Internal, match="cannot be cut"):
                model.cut(1, 4)
            return
        model.cut(1, 4)
        decode([30], 4)
        model.cut(1, 4)
        np.testing.assert_array_equal(decode([9], 4), expected)
        assert expected.shape[1] > N_VOCAB
