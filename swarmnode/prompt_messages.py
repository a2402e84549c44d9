"""/swarmnode/prompt/1: one stream a request, from any peer to the leader.

    asker   ask      parameters in the header; the payload is the text as JSON, {"prompt"} or {"messages"} and what
                     belongs to it, and then, where an answer is to be continued, its tokens so far, uint32
                     little-endian
    leader  queued   its place in the queue, at every change; 0 = it runs; which options this leader knows
    leader  token    index and id in the header, the text that became safe to show as payload; if asked for, logprobs
    leader  alive    once a second when nothing else is sent, so that an asker tells a queue from a dead leader
    leader  done     finish reason, usage, timings; the rest of the text, and calls of tools, as payload
    leader  error    a typed error

The asker draws a missing seed, so that a request can be repeated; it cancels by closing its stream. A request that lost
its leader goes to the next one under the same id as another attempt, and its tokens go on where they stood.

A leader of an older version leaves out what it does not know. Where that would change the answer (`OPTIONS`) the asker
looks at what `queued` says that the leader knows, and ends the request if an option of its own is not among that.

prompt_frames.py has them to the byte.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

from capabilities.errors import SwarmError, UsageError, about
from scheduler.requests import FinishReason, Timings, Usage
from scheduler.sampling import SamplingParams
from scheduler.text_stream import check_stops
from scheduler.tool_calls import ToolCall
from swarmnode import limits
from swarmnode.chat_messages import Message, Tool, ToolChoice, check_messages, check_tools, json_bytes

PROTOCOL: Final = "/swarmnode/prompt/1"
OPTIONS: Final = frozenset({"choice", "grammar", "json_schema", "logit_bias", "logprobs", "tools"})


def new_request_id() -> str:
    """A fresh request id: it stands in the log of every peer that works on the request."""
    return f"req-{secrets.token_hex(8)}"


def new_seed() -> int:
    """A drawn seed: 63 bits, so that it is a plain number in JSON everywhere."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how to answer it. Exactly one of `prompt` (taken as it is) and `messages` (a chat) is given.

    `max_tokens` None: as many as the context holds; it counts the whole answer. `seed` is always there: the asker draws
    one. `generated` is the answer so far, whose text the asker has: replies begin at index `len(generated)`. Of several
    attempts at one request the highest counts.

    choice       which of several answers to the same prompt this is: it selects the random numbers
    logprobs     tell each token's probability, and those of so many alternatives, 0 to 20
    grammar      GBNF, whose language the answer is in; json_schema: JSON text of a schema that it obeys instead
    tools        what the model may call, where its chat template knows tools; tool_choice: whether it may or must
    """

    request_id: str
    params: SamplingParams
    prompt: str | None = field(default=None, repr=False)
    messages: tuple[Message, ...] = field(default=(), repr=False)
    max_tokens: int | None = None
    stop: tuple[str, ...] = field(default=(), repr=False)
    deadline_s: float | None = None
    ignore_eos: bool = False  # end tokens are ordinary ones: answers of a fixed length, for measurements
    generated: tuple[int, ...] = field(default=(), repr=False)
    attempt: int = 0
    choice: int = 0
    logprobs: int | None = None
    grammar: str | None = field(default=None, repr=False)
    json_schema: str | None = field(default=None, repr=False)
    tools: tuple[Tool, ...] = field(default=(), repr=False)
    tool_choice: ToolChoice = field(default="auto", repr=False)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise UsageError("a request has either a prompt or messages")
        with about("messages"):
            check_messages(self.messages)
        with about("max_tokens"):
            if self.max_tokens is not None and not 0 <= self.max_tokens <= limits.MAX_TOKENS_MAX:
                raise UsageError(f"max_tokens must be between 0 and {limits.MAX_TOKENS_MAX}, not {self.max_tokens}")
        if len(self.generated) > limits.MAX_TOKENS_MAX:
            raise UsageError(f"an answer has at most {limits.MAX_TOKENS_MAX} tokens")
        with about("stop"):
            check_stops(self.stop)
        with about("logprobs"):
            if self.logprobs is not None and not 0 <= self.logprobs <= limits.TOP_LOGPROBS_MAX:
                raise UsageError(f"logprobs must be between 0 and {limits.TOP_LOGPROBS_MAX}, not {self.logprobs!r:.40}")
        self._check_form()

    def _check_form(self) -> None:
        """What the answer must look like."""
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("a request has a grammar or a JSON schema, not both", parameter="grammar")
        for name, text in (("grammar", self.grammar), ("json_schema", self.json_schema)):
            if text is not None and len(text.encode(errors="replace")) > limits.GRAMMAR_BYTES_MAX:
                message = f"a grammar or JSON schema has at most {limits.GRAMMAR_BYTES_MAX} bytes"
                raise UsageError(message, parameter=name)
        with about("tools"):
            check_tools(self.tools, self.tool_choice)
            if self.tools and self.prompt is not None:
                raise UsageError("tools belong to a chat: a raw prompt has none")
            if json_bytes(self.tools) > limits.TOOLS_BYTES_MAX:
                raise UsageError(f"the tools of a request have at most {limits.TOOLS_BYTES_MAX} bytes")

    @property
    def options(self) -> frozenset[str]:
        """Those of OPTIONS without which the answer would be another one."""
        used = {
            "choice": self.choice != 0,
            "grammar": self.grammar is not None,
            "json_schema": self.json_schema is not None,
            "logit_bias": bool(self.params.logit_bias),
            "logprobs": self.logprobs is not None,
            "tools": bool(self.tools),
        }
        return frozenset(name for name, is_used in used.items() if is_used)


@dataclass(frozen=True, slots=True)
class Queued:
    """The request's place in the leader's queue; 0: it runs. `options`: those of OPTIONS that the leader knows."""

    position: int
    options: frozenset[str] = OPTIONS


Bytes = bytes  # a Token has a field of that name


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer: its index from 0, its id, and the text that became safe to show with it.

    Where logprobs were asked for: `logprob`, the natural logarithm of its probability under the model's own
    distribution, `top`, the best tokens as (id, logprob, bytes), and `bytes`, the token's own, cut to TOKEN_BYTES_MAX.
    """

    index: int
    token: int
    text: str = field(repr=False)
    logprob: float | None = None
    top: tuple[tuple[int, float, Bytes], ...] = field(default=(), repr=False)
    bytes: Bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new, but the leader lives."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete; `text` is what was held back until now.

    `mixed`: a peer of another numeric class than the placement's computed some of it, at this leader. `tainted`: one
    that was convicted meanwhile of computing something else had a part in what this leader delivered. `leader` is not
    sent: the asker fills in whom it heard it from.
    """

    finish_reason: FinishReason
    text: str = field(repr=False)
    usage: Usage
    timings: Timings
    mixed: bool = False
    leader: str = field(default="", compare=False)
    tool_calls: tuple[ToolCall, ...] = field(default=(), repr=False)
    tainted: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without a complete answer; what was sent stands."""

    error: SwarmError


def loggable(error: SwarmError) -> dict[str, object]:
    """An error for a log: without its words where they may quote the request."""
    return {"type": error.type} if isinstance(error, UsageError) else error.to_json()


Reply = Queued | Token | Alive | Done | Failed
