"""Greedy answers of both models to many prompts: the level generation.

The prompts are pieces of the text, all of one length, so that many run as one batch. Both sides go on token by token
until they part. There A's margin and the movement of its logits are kept, and from the margins of all positions before
follows how many answers should part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from backends.experts import F32, I32
from backends.llama import LlamaModel, LlamaSettings
from capabilities.equivalence import logit_rows, predicted_flips
from capabilities.errors import UsageError
from capabilities.generation_level import Fork, Generated, generation_level
from swarmnode.equivalence.splits import Split

Progress = Callable[[str, int, int], None]
Open = Callable[[LlamaSettings], AbstractContextManager[LlamaModel]]

PROMPT_TOKENS: Final = 16
TOGETHER: Final = 20  # prompts that run as one batch


def generation(split: Split, text: str, prompts: int, tokens: int, progress: Progress) -> dict[str, Any]:
    """Compare `tokens` greedy tokens for each of so many prompts.

    Raises:
        UsageError: the text has too few tokens for so many prompts.
    """
    a, b = split.plain_hooks()
    of_models = _generate(
        lambda settings: split.open_trunk(settings, a),
        lambda settings: split.open_trunk(settings, b),
        text, prompts, tokens, False, lambda done: progress("greedy answers of both models", done, prompts),
    )  # fmt: skip
    of_noise = _generate(
        split.open_whole, split.open_whole,
        text, prompts, tokens, True, lambda done: progress("llama.cpp's own noise in answers", done, prompts),
    )  # fmt: skip
    return generation_level(of_models, of_noise)


def _generate(
    open_a: Open, open_b: Open, text: str, prompts: int, tokens: int, fast: bool, progress: Callable[[int], None]
) -> Generated:
    together = min(prompts, TOGETHER)
    settings = LlamaSettings(PROMPT_TOKENS + tokens, together, together * PROMPT_TOKENS)
    forks: list[Fork | None] = []
    predicted = 0.0
    with open_a(settings) as a, open_b(replace(settings, fast=fast)) as b:
        every = _prompts(a, text, prompts)
        for start in range(0, prompts, together):
            progress(start)
            some, expected = race(a, b, every[start : start + together], tokens)
            forks += some
            predicted += expected
    return Generated(tokens, tuple(forks), predicted)


def _prompts(model: LlamaModel, text: str, count: int) -> I32:
    """Pieces of the text [count, PROMPT_TOKENS], evenly spread."""
    every = np.array(model.vocabulary.tokenize(text), np.int32)
    last = len(every) - PROMPT_TOKENS
    if last < count - 1:
        raise UsageError(f"the bundled text has only {len(every)} tokens for this model", hint="Lower --prompts.")
    starts = np.linspace(0, last, count).astype(np.int64)
    return np.stack([every[start : start + PROMPT_TOKENS] for start in starts])


def race(a: LlamaModel, b: LlamaModel, prompts: I32, tokens: int) -> tuple[list[Fork | None], float]:
    """Where each prompt's two answers part, and how many of them were to be expected to."""
    forks: list[Fork | None] = [None] * len(prompts)
    predicted, fed = 0.0, prompts
    for model in (a, b):
        model.clear_all()
    for index in range(tokens):
        position = 0 if index == 0 else PROMPT_TOKENS + index - 1
        rows = logit_rows(*(_step(model, fed, position) for model in (a, b)))
        alive = np.array([fork is None for fork in forks])
        predicted += predicted_flips(rows.margins[alive], rows.deviations[alive])
        for prompt in np.flatnonzero(alive & rows.flips).tolist():
            forks[prompt] = Fork(index, float(rows.margins[prompt]), float(rows.l_infinity[prompt]))
        if all(fork is not None for fork in forks):
            break
        fed = rows.top_a[:, None]  # answers that have parted go on as A's: nobody looks at them any more
    return forks, predicted


def _step(model: LlamaModel, tokens: I32, position: int) -> F32:
    """Feed tokens [S, n], one row a sequence, all from the same position on; logits [S, V] of the last ones."""
    sequences, n = tokens.shape
    wanted = np.zeros((sequences, n), bool)
    wanted[:, -1] = True
    positions = np.tile(np.arange(position, position + n, dtype=np.int32), sequences)
    return model.decode(
        np.ascontiguousarray(tokens.reshape(-1)), positions, np.repeat(np.arange(sequences, dtype=np.int32), n),
        wanted.reshape(-1),
    )  # fmt: skip
