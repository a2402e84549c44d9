"""The level task: figures of known differences, the bundled text and questions, and models that read them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from backends.llama import LlamaModel, LlamaSettings
from capabilities.equivalence import F64, log_softmax
from capabilities.task_level import choice_figures, log_likelihoods, task_level
from capabilities.tolerances import OPTIONS_SPREAD_LIMIT
from swarmnode.equivalence import task as module
from swarmnode.equivalence.passes import WINDOW, decode, windows_of
from swarmnode.equivalence.run import run_equivalence
from swarmnode.equivalence.task import SEQUENCE_MAX, TOGETHER, answer, options_of, read_windows, windows_to_predict
from swarmnode.equivalence.text import bundled_questions, bundled_text
from tests.expert_models import quiet, tiny_file

RANDOM = np.random.default_rng(1)


def judged(nll: tuple[F64, F64] | None = None, options: tuple[F64, F64] | None = None) -> dict[str, Any]:
    same = np.ones(9), np.ones(9)
    same_options = some_options(), some_options()
    return task_level(nll or same, same, options or same_options, same_options)


def some_options() -> F64:
    return np.random.default_rng(2).normal(-8, 2, (50, 4))


# -- figures ----------------------------------------------------------------------------------------------------------


def test_likelihoods_are_those_of_the_softmax() -> None:
    logits = (10 * RANDOM.standard_normal((20, 30))).astype(np.float32)
    tokens = RANDOM.integers(0, 30, 20).astype(np.int32)
    assert log_likelihoods(logits, tokens) == pytest.approx(log_softmax(logits)[np.arange(20), tokens], abs=1e-5)
    assert log_likelihoods(logits[:0], tokens[:0]).shape == (0,)


def test_a_text_that_became_less_likely_fails() -> None:
    nll = RANDOM.gamma(2.0, 1.0, 500)
    noisy = nll + RANDOM.normal(0, 1e-3, 500)
    assert judged((nll, noisy))["pass"]
    worse = judged((nll, noisy + 0.05))
    assert not worse["pass"]
    assert worse["nll_difference"] == pytest.approx(0.05, abs=1e-3)
    assert worse["perplexity_b"] / worse["perplexity_a"] == pytest.approx(np.exp(0.05), rel=1e-2)


def test_a_long_text_shows_what_a_short_one_cannot() -> None:
    """Pairs take the text's own spread out of the difference; what is left shrinks as the root of the length."""
    nll = RANDOM.gamma(2.0, 1.0, 50_000)
    noisy = nll + RANDOM.normal(0.02, 0.3, 50_000)
    assert judged((nll[:500], noisy[:500]))["pass"]
    found = judged((nll, noisy))
    assert found["standard_error"] == pytest.approx(0.3 / 50_000**0.5, rel=0.05)
    assert not found["pass"]


def test_answers_change_as_often_as_their_margins_say() -> None:
    a = RANDOM.normal(-8, 2, (20_000, 4))
    found = choice_figures(a, a + RANDOM.normal(0, 0.2, a.shape) + RANDOM.normal(0, 3, (20_000, 1)))
    assert found["spread"] == pytest.approx(0.2, rel=0.02)  # what all answers of a question share is no movement
    assert found["changed_predicted"] > 500
    assert found["changed"] == pytest.approx(found["changed_predicted"], rel=0.1)
    assert choice_figures(a, a)["changed"] == choice_figures(a, a)["changed_predicted"] == 0


def test_accuracy_is_the_share_whose_right_answer_beats_all_others() -> None:
    a = np.array([[-1.0, -2, -3, -4], [-2.0, -1, -3, -4], [-1.0, -1, -1, -1], [-1.0, -1.5, -9, -9]])
    found = choice_figures(a, a[:, ::-1])
    assert (found["questions"], found["accuracy_a"], found["accuracy_b"]) == (4, 0.5, 0.0)


def test_answers_that_move_too_far_fail_and_so_do_more_changes_than_small_movements_explain() -> None:
    a = some_options()
    assert judged(options=(a, a + RANDOM.normal(0, 0.05, a.shape)))["pass"]
    wild = judged(options=(a, a + RANDOM.normal(0, 3, a.shape)))
    assert not wild["pass"]
    assert "against each other" in wild["reason"]
    clear = np.zeros((50, 4))
    clear[:, 0] = 0.5  # by more than so small a movement reaches
    turned = clear.copy()
    turned[:6] = [0.0, 0.01, 0.0, 0.0]
    changed = judged(options=(clear, turned))
    assert (changed["choices"]["spread"] < OPTIONS_SPREAD_LIMIT, changed["choices"]["changed"]) == (True, 6)
    assert "answers changed" in changed["reason"]


# -- what is read -----------------------------------------------------------------------------------------------------


def test_the_text_is_long_enough_and_plain() -> None:
    text = bundled_text()
    assert len(text) > 4.5 * 100_000  # characters of a common tokenizer's token
    assert text.isascii()
    assert text.startswith("It is a truth universally acknowledged")
    assert text.rstrip().endswith("its national importance.")
    lowered = text.lower()
    assert not [word for word in ("gutenberg", "copyright", "http", "e-text", "licence:") if word in lowered]


def test_every_question_has_four_answers_of_which_no_two_are_alike() -> None:
    questions = bundled_questions()
    assert len(questions) >= 40
    assert len({question for question, _ in questions}) == len(questions)
    for question, answers in questions:
        assert question.endswith("?")
        assert len(answers) == len(set(answers)) == 4, question
        assert all(answers), question


@cache
def tiny() -> LlamaModel:
    return LlamaModel(tiny_file("olmoe", "q8_0"), LlamaSettings(SEQUENCE_MAX, TOGETHER, TOGETHER * SEQUENCE_MAX))


def test_windows_in_one_batch_are_windows_alone() -> None:
    model = tiny()
    windows = windows_of(model.vocabulary, bundled_text(), 10 * WINDOW + 7)
    alone = [-log_softmax(decode(model, window))[np.arange(len(window) - 1), window[1:]] for window in windows]
    found = read_windows(model, windows, lambda _: None)
    assert len(found) == 10 * (WINDOW - 1) + 6
    assert found == pytest.approx(np.concatenate(alone), abs=1e-5)


@pytest.mark.parametrize("tokens", [16, WINDOW - 1, WINDOW, 10 * WINDOW])
def test_as_many_tokens_are_predicted_as_were_asked_for(tokens: int) -> None:
    windows = windows_to_predict(tiny().vocabulary, bundled_text(), tokens)
    assert sum(len(window) - 1 for window in windows) == tokens
    assert all(len(window) <= WINDOW for window in windows)


def test_an_answer_is_as_likely_as_its_tokens_after_the_question() -> None:
    model = tiny()
    questions = bundled_questions()[:3]
    asked = [options_of(model.vocabulary, *question) for question in questions]
    found = answer(model, asked)
    for row, (question, answers) in zip(found, questions, strict=True):
        before = f"Question: {question}\nAnswer:"
        for value, text in zip(row, answers, strict=True):
            start = len(model.vocabulary.tokenize(before))
            tokens = np.array(model.vocabulary.tokenize(f"{before} {text}"), np.int32)
            logits = log_softmax(decode(model, tokens))
            by_hand = sum(logits[i - 1, tokens[i]] for i in range(start, len(tokens)))
            assert value == pytest.approx(by_hand, abs=1e-4)


def test_both_sides_read_and_answer_and_another_function_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bundled_questions", lambda: bundled_questions()[:6])
    levels = {
        b: run_equivalence(
            "ggml-cpu", b, levels=("task",), model=lambda: tiny_file("olmoe", "q8_0"), own_model=True,
            tokens=5 * WINDOW, prompts=1, answer_tokens=1, progress=quiet,
        )["levels"][0]
        for b in ("reference", "tests.equivalence_backends:WrongExpert")
    }  # fmt: skip
    near, wrong = levels.values()
    assert near["pass"], near["reason"]
    assert near["choices"]["questions"] == 6
    assert near["choices"]["spread"] > 0
    assert not wrong["pass"]
