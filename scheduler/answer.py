"""One answer while it grows: what a row of logits means for it, and when it has ended.

Its whole state is its tokens, prompt and answer so far, and how many of them the cache holds. Sampling, penalties and
stop strings follow from the token ids alone, so an answer that was begun elsewhere goes on exactly where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.requests import FinishedEffect, FinishReason, Request, Timings, TokenEffect, Usage
from scheduler.sampling import sample
from scheduler.text_stream import TextStream
from scheduler.tool_calls import ToolCall, ToolCallReader, call_id


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What generation must know of the model's tokens: how many, each one's bytes, and which of them end an answer."""

    n_tokens: int
    piece: Callable[[int], bytes]
    is_end: Callable[[int], bool]


class Answer:
    """The state of one accepted request.

    tokens   prompt and answer so far
    cached   how many of them, from the first, are in the cache of its sequence
    slot     that sequence, once it has one
    touched  the sequence may hold something of it
    ended    why the answer is complete, or None while it grows
    mixed    a peer of another numeric class than the placement's computed some of it
    tainted  a peer that was convicted of computing something else had a part in what was delivered

    displaced   it had to give its slot back, once
    slot_since  when it got the one that it has
    """

    def __init__(self, request: Request, context_tokens: int, vocabulary: Vocabulary, now: float) -> None:
        self.request = request
        self.tokens = [*request.prompt_tokens, *request.generated]
        self.cached = 0
        self.slot: int | None = None
        self.touched = False
        self.queue_position: int | None = None  # as last told
        self.deadline = now + request.deadline_s
        self.ended: FinishReason | None = None
        self.mixed = False
        self.displaced = False
        self.slot_since = now
        self.tainted = False
        self._context_tokens = context_tokens
        self._vocabulary = vocabulary
        self._submitted_at = now
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._text = TextStream(request.stop)
        self._calls = None if request.tools is None else ToolCallReader(request.tools)
        self._markers = {} if request.tools is None else request.tools.markers
        for token in request.generated:  # whoever continues the answer has this text already
            self._extend_text(token)
        self._end_if_complete()

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache: 1 while it generates, more while its prompt is prefilled."""
        return len(self.tokens) - self.cached

    @property
    def completion(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def delivered(self) -> bool:
        """It has tokens besides those that it came with."""
        return self.completion > len(self.request.generated)

    def admitted(self, slot: int, now: float) -> None:
        """It has a slot, perhaps not for the first time."""
        self.slot, self.slot_since, self.queue_position = slot, now, 0
        if self._admitted_at is None:
            self._admitted_at = now

    def displace(self) -> None:
        """It gives its slot back, and begins at an empty cache when it has another."""
        self.cached, self.touched, self.displaced = 0, False, True

    def take(self, logits: NDArray[np.float32], now: float) -> TokenEffect | None:
        """Sample the next token from logits [n_vocab]; None for the end token, which is no part of the answer.

        `ended` is set if that was the last. Raises NonFiniteLogits, and what the request's constraint raises.
        """
        request = self.request
        history: Sequence[int] = self.tokens[len(request.prompt_tokens) :] if request.params.penalises else ()
        constraint = request.constraint
        allowed = None if constraint is None else constraint.allowed()
        sampled = sample(logits, request.params, len(self.tokens), request.choice, history, allowed, request.logprobs)
        if self._first_token_at is None:
            self._first_token_at = now
        if request.stop_at_end and self._vocabulary.is_end(sampled.token):
            self.ended = "stop"
            return None
        self.tokens.append(sampled.token)
        if constraint is not None:
            constraint.accept(sampled.token)
        text = self._extend_text(sampled.token)
        self._end_if_complete()
        return TokenEffect(request.id, self.completion - 1, sampled.token, text, sampled.logprob, sampled.top)

    def finish(self, now: float) -> FinishedEffect:
        """The terminal effect of an answer that has ended, with the text that was still held back."""
        rest = self._text.finish()
        if rest.stopped:  # the bytes' end can still complete a stop string, if that one ends in U+FFFD
            self.ended = "stop"
        assert self.ended is not None
        text, calls = self._finish_calls(rest.text)
        if calls and self.ended == "stop":
            self.ended = "tool_calls"
        admitted = now if self._admitted_at is None else self._admitted_at
        first = now if self._first_token_at is None else self._first_token_at
        return FinishedEffect(
            self.request.id,
            self.ended,
            text,
            Usage(len(self.request.prompt_tokens), self.completion),
            Timings(queue_s=admitted - self._submitted_at, prefill_s=first - admitted, decode_s=now - first),
            self.mixed,
            calls,
            self.tainted,
        )

    def _finish_calls(self, rest: str) -> tuple[str, tuple[ToolCall, ...]]:
        if self._calls is None:
            return rest, ()
        shown = self._calls.feed(rest)
        more, calls = self._calls.finish()
        request = self.request
        names = (call_id(request.id, request.choice, number) for number in range(len(calls)))
        return shown + more, tuple(ToolCall(name, *call) for name, call in zip(names, calls, strict=True))

    def _extend_text(self, token: int) -> str:
        delta = self._text.feed(self._markers.get(token) or self._vocabulary.piece(token))
        if delta.stopped:
            self.ended = "stop"
        return delta.text if self._calls is None else self._calls.feed(delta.text)

    def _end_if_complete(self) -> None:
        if self.ended is None and self.request.constraint is not None and self.request.constraint.complete:
            self.ended = "stop"
        # The newest token needs a cell only to be followed by another: an answer may be one longer than the cache.
        full = self.completion >= self.request.max_tokens or len(self.tokens) > self._context_tokens
        if full and self.ended is None:
            self.ended = "length"
