"""The level task: the bundled text and questions, read by both sides and by llama.cpp with two sets of kernels.

The text runs in windows, many as one batch, each a sequence of its own. An answer to a question is as likely as its
tokens after the question's; answers of one token share one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from backends.experts import F32, I32
from backends.llama import LlamaModel, LlamaSettings
from backends.vocabulary import Vocabulary
from capabilities.equivalence import F64
from capabilities.task_level import log_likelihoods, task_level
from swarmnode.equivalence.passes import WINDOW, windows_of
from swarmnode.equivalence.splits import Split
from swarmnode.equivalence.text import bundled_questions

Progress = Callable[[str, int, int], None]
Tokens = tuple[int, ...]

TOGETHER: Final = 8  # sequences of one batch: experts are then read once for as many windows
SEQUENCE_MAX: Final = 2 * WINDOW  # of a question and an answer, also where bytes are tokens


@dataclass(frozen=True, eq=False)
class _Option:
    """One answer: its tokens after those of its question."""

    question: Tokens
    answer: Tokens

    @property
    def fed(self) -> Tokens:
        return (*self.question, *self.answer[:-1])


def task(split: Split, text: str, tokens: int, progress: Progress) -> dict[str, Any]:
    """Compare how likely `tokens` tokens of the text are, and every question.

    Raises:
        UsageError: the text has fewer tokens.
    """
    a, b = split.plain_hooks()
    sides: list[tuple[str, Callable[[LlamaSettings], AbstractContextManager[LlamaModel]]]] = [
        ("text and questions, A", lambda settings: split.open_trunk(settings, a)),
        ("text and questions, B", lambda settings: split.open_trunk(settings, b)),
        ("text and questions, llama.cpp", split.open_whole),
        ("text and questions, llama.cpp with fast", lambda settings: split.open_whole(replace(settings, fast=True))),
    ]
    settings = LlamaSettings(SEQUENCE_MAX, TOGETHER, TOGETHER * SEQUENCE_MAX)
    nll: list[F64] = []
    options: list[F64] = []
    for name, open_side in sides:
        with open_side(settings) as model:
            windows = windows_to_predict(model.vocabulary, text, tokens)
            asked = [options_of(model.vocabulary, *question) for question in bundled_questions()]
            steps = len(windows) + len(asked)
            report = partial(_report, progress, name, steps)
            nll.append(read_windows(model, windows, report))
            report(len(windows))
            options.append(answer(model, asked))
    return task_level((nll[0], nll[1]), (nll[2], nll[3]), (options[0], options[1]), (options[2], options[3]))


def _report(progress: Progress, name: str, steps: int, done: int) -> None:
    progress(name, done, steps)


def windows_to_predict(vocabulary: Vocabulary, text: str, tokens: int) -> list[I32]:
    """Windows in which so many tokens have one before them: nothing predicts a window's first.

    Raises:
        UsageError: the text has too few.
    """
    return windows_of(vocabulary, text, tokens + -(-tokens // (WINDOW - 1)))


def read_windows(model: LlamaModel, windows: Sequence[I32], progress: Callable[[int], None]) -> F64:
    """Negative log-likelihoods of each window's tokens after its first."""
    found, done, left = [], 0, iter(windows)
    while batch := list(islice(left, TOGETHER)):
        progress(done)
        for window, logits in zip(batch, _decode(model, batch), strict=True):
            found.append(-log_likelihoods(logits[:-1], window[1:]))
        done += len(batch)
    return np.concatenate(found)


def options_of(vocabulary: Vocabulary, question: str, answers: Sequence[str]) -> list[_Option]:
    """A question's answers as tokens. Where the two meet, a tokenizer may join what belongs to both."""
    asked = f"Question: {question}\nAnswer:"
    alone = tuple(vocabulary.tokenize(asked))
    found = []
    for text in answers:
        whole = tuple(vocabulary.tokenize(f"{asked} {text}"))
        shared = next((i for i, (x, y) in enumerate(zip(whole, alone, strict=False)) if x != y), len(alone))
        found.append(_Option(whole[:shared], whole[shared:]))
    return found


def answer(model: LlamaModel, asked: Sequence[Sequence[_Option]]) -> F64:
    """Log-likelihoods of every question's answers [Q, N]."""
    found = np.empty((len(asked), len(asked[0])), np.float64)
    places: dict[Tokens, list[tuple[int, int]]] = {}
    for q, options in enumerate(asked):
        for n, option in enumerate(options):
            places.setdefault(option.fed, []).append((q, n))
    left = iter(sorted(places, key=len))  # sequences of one length are quicker together
    while batch := list(islice(left, TOGETHER)):
        for fed, logits in zip(batch, _decode(model, [np.array(tokens, np.int32) for tokens in batch]), strict=True):
            for q, n in places[fed]:
                said = np.array(asked[q][n].answer, np.int32)
                found[q, n] = log_likelihoods(logits[-len(said) :], said).sum()
    return found


def _decode(model: LlamaModel, sequences: Sequence[I32]) -> list[F32]:
    """Logits [T, V] of some sequences of tokens [T], each by itself, in one batch."""
    model.clear_all()
    lengths = [len(tokens) for tokens in sequences]
    logits = model.decode(
        np.concatenate(sequences),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        np.repeat(np.arange(len(sequences), dtype=np.int32), lengths),
        np.ones(sum(lengths), bool),
    )
    return np.split(logits, np.cumsum(lengths)[:-1])
