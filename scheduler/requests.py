"""What goes into the batcher and what comes out of it: requests and effects.

A request may carry the tokens that another leader already generated for it. They are prefilled like the prompt but
count as answer: indices, positions, penalties and stop strings go on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from capabilities.errors import SwarmError, UsageError
from capabilities.tool_form import ToolUse
from scheduler.constraint import Constraint
from scheduler.sampling import SamplingParams
from scheduler.text_stream import check_stops
from scheduler.tool_calls import ToolCall

ID_CHARACTERS_MAX = 128  # ids are written into every peer's log
DEADLINE_S_MAX = 86_400.0  # nothing waits for longer than a day

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate. Raises UsageError where a field is out of its bounds.

    id             unique among the requests that are waiting or running
    prompt_tokens  at least one token
    max_tokens     length of the whole answer, `generated` included; 0 gives an empty answer
    deadline_s     seconds from submission after which the request fails, waiting or running
    generated      the answer so far, if the request continues one
    choice         which of several answers to the same prompt this is; it selects the random numbers
    client         whoever asks: nobody's many requests keep another's waiting (fair_queue.py)
    stop_at_end    False makes the model's end tokens ordinary ones (for benchmarks of a fixed length)
    logprobs       tell each token's probability precisely, and so many of the likeliest tokens; None: neither
    constraint     narrows the answer down; it has seen `generated`, and belongs to this request alone
    tools          what the answer may call: calls then come with its end, and not as text
    """

    id: str
    prompt_tokens: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = field(default=(), repr=False)
    deadline_s: float = 600.0
    generated: tuple[int, ...] = field(default=(), repr=False)
    choice: int = 0
    client: str = ""
    stop_at_end: bool = True
    logprobs: int | None = None
    constraint: Constraint | None = field(default=None, repr=False, compare=False)
    tools: ToolUse | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not 0 < len(self.id) <= ID_CHARACTERS_MAX:
            raise UsageError(f"a request id must be a string of 1 to {ID_CHARACTERS_MAX} characters")
        if not self.prompt_tokens:
            raise UsageError("the prompt is empty", hint="Give at least one token of text.")
        if not all(type(token) is int for token in (*self.prompt_tokens, *self.generated)):
            raise UsageError("token ids must be whole numbers")
        if type(self.max_tokens) is not int or self.max_tokens < 0:
            raise UsageError(f"max_tokens must be a whole number, 0 or more, not {self.max_tokens!r:.40}")
        if type(self.deadline_s) not in (int, float) or not 0 < self.deadline_s <= DEADLINE_S_MAX:
            raise UsageError(f"deadline_s must be above 0 and at most {DEADLINE_S_MAX:g}, not {self.deadline_s!r:.40}")
        if type(self.choice) is not int or not 0 <= self.choice < 2**32:
            raise UsageError(f"choice must be a whole number from 0 to 4294967295, not {self.choice!r:.40}")
        check_stops(self.stop)
        if self.constraint is not None and not self.stop_at_end:
            message = "an answer with a grammar ends where the grammar does: end tokens cannot be ignored"
            raise UsageError(message, parameter="ignore_eos")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of the answer (its end token not counted; tokens that it came with counted).

    cached_tokens  of the prompt's, those that were in the cache already
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, from there to the first token, and from the first token to the end."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class QueuedEffect:
    """The request's place changed: 0 = it has a slot, 1 = it is next. A slot may be taken back, once."""

    request: str
    position: int


@dataclass(frozen=True, slots=True)
class TokenEffect:
    """One more token of the answer.

    index    its place in the answer, from 0; each index comes once, in order
    text     what became safe to show with it: may be empty, may end the text of earlier tokens
    logprob  natural logarithm, under the model's own distribution
    top      the likeliest tokens with theirs, where the request asks for them
    """

    request: str
    index: int
    token: int
    text: str = field(repr=False)
    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class FinishedEffect:
    """The answer is complete. Terminal.

    finish_reason  "stop": the end token or a stop string; "length": max_tokens, or the context is full; "tool_calls":
                   like "stop", and the answer calls tools
    text           the rest of the text, held back until now
    mixed          a peer of another numeric class than the placement's computed some of it
    tool_calls     what the answer calls
    tainted        so did a peer that was convicted afterwards of computing something else
    """

    request: str
    finish_reason: FinishReason
    text: str = field(repr=False)
    usage: Usage
    timings: Timings
    mixed: bool = False
    tool_calls: tuple[ToolCall, ...] = field(default=(), repr=False)
    tainted: bool = False


@dataclass(frozen=True, slots=True)
class FailedEffect:
    """The request ended without a complete answer; what was delivered stands. Terminal."""

    request: str
    error: SwarmError


Effect = QueuedEffect | TokenEffect | FinishedEffect | FailedEffect
