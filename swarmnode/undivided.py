"""llama.cpp on the whole model, on this machine: the yardstick of `demo`, `bench` and the tests.

The same settings as a leader's (one thread as well as batch invariance), the same sampling and the same loop, but every
expert inside llama.cpp's own graph and no swarm anywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from backends.llama import LlamaModel, LlamaSettings
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from scheduler.requests import DEADLINE_S_MAX, FailedEffect, FinishedEffect, Timings, TokenEffect
from swarmnode.leader.asked import Reader
from swarmnode.prompt_messages import Ask


@dataclass(frozen=True, slots=True)
class UndividedAnswer:
    """Token ids without the end token, and the same timings as the leader gives."""

    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    timings: Timings


class Undivided:
    """A whole model, loaded once. Not thread-safe."""

    def __init__(
        self, path: Path, *, context_tokens: int = 2048, batch_tokens: int = 512, threads: int = 1, fast: bool = False
    ) -> None:
        settings = LlamaSettings(context_tokens=context_tokens, batch_tokens=batch_tokens, threads=threads, fast=fast)
        self._model = LlamaModel(path, settings)
        self._batch_tokens = batch_tokens
        self._reader = Reader(self._model.vocabulary, self._model.context_tokens, DEADLINE_S_MAX)

    def tokenize(self, ask: Ask) -> list[int]:
        """The prompt as the leader would tokenise it."""
        vocabulary = self._model.vocabulary
        text = ask.prompt if ask.prompt is not None else vocabulary.render_chat(ask.messages)
        return vocabulary.tokenize(text)

    def piece(self, token: int) -> bytes:
        """The text of a token."""
        return self._model.vocabulary.piece(token)

    def answer(self, ask: Ask) -> UndividedAnswer:
        """Answer one request as the swarm would.

        Raises:
            SwarmError: what the request or llama.cpp runs into.
        """
        model, v = self._model, self._model.vocabulary
        request = self._reader.read(ask, ask.request_id)
        batcher = Batcher(1, model.context_tokens, self._batch_tokens, 0, Vocabulary(v.n_vocab, v.piece, v.is_end))
        model.clear_all()
        effects = batcher.submit(request, time.monotonic())
        tokens: list[int] = []
        while True:
            step = batcher.next_step(time.monotonic())
            if step is not None:
                logits = model.decode(step.tokens, step.positions, step.sequences, step.wants_logits)
                effects += batcher.step_done(step, logits, time.monotonic())
            for effect in effects:
                match effect:
                    case TokenEffect():
                        tokens.append(effect.token)
                    case FinishedEffect():
                        n_prompt = effect.usage.prompt_tokens
                        return UndividedAnswer(tuple(tokens), effect.finish_reason, n_prompt, effect.timings)
                    case FailedEffect():
                        raise effect.error
            effects = []

    def close(self) -> None:
        self._model.close()
