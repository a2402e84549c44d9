"""/swarmnode/prompt/1: one stream a request, from any peer to the leader.

    asker   ask      parameters in the header; the payload is the text as JSON, {"prompt"} or {"messages"}, and then,
                     where an answer is to be continued, its tokens so far, uint32 little-endian
    leader  queued   its place in the queue, at every change; 0 = it runs
    leader  token    index and id in the header, the text that became safe to show as payload
    leader  alive    once a second when nothing else is sent, so that an asker tells a queue from a dead leader
    leader  done     finish reason, usage, timings; the rest of the text as payload
    leader  error    a typed error

The asker draws a missing seed, so that a request can be repeated; it cancels by closing its stream. A request that lost
its leader goes to the next one under the same id as another attempt, and its tokens go on where they stood.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from capabilities.errors import PeerMistake, SwarmError, UsageError
from scheduler.requests import Timings, Usage
from scheduler.sampling import SamplingParams
from scheduler.text_stream import check_stops
from swarmnode import limits
from swarmnode.wire import Fields, Frame, Header, bounded_error, encode_frame

PROTOCOL: Final = "/swarmnode/prompt/1"
MESSAGES_MAX: Final = 1024
_TOKEN: Final = np.dtype("<u4")
_TOKEN_MAX: Final = 2**31 - 1
_ATTEMPT_MAX: Final = 2**31
ROLES: Final = ("system", "user", "assistant", "tool")

Message = dict[str, str]


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

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise UsageError("a request has either a prompt or messages")
        if len(self.messages) > MESSAGES_MAX:
            raise UsageError(f"a conversation has at most {MESSAGES_MAX} messages")
        for message in self.messages:
            if set(message) != {"role", "content"} or not all(isinstance(v, str) for v in message.values()):
                raise UsageError("each message has a role and a content, both texts")
            if message["role"] not in ROLES:
                raise UsageError(f"a message's role is one of {', '.join(ROLES)}")
        if self.max_tokens is not None and not 0 <= self.max_tokens <= limits.MAX_TOKENS_MAX:
            raise UsageError(f"max_tokens must be between 0 and {limits.MAX_TOKENS_MAX}, not {self.max_tokens}")
        if len(self.generated) > limits.MAX_TOKENS_MAX:
            raise UsageError(f"an answer has at most {limits.MAX_TOKENS_MAX} tokens")
        check_stops(self.stop)

    def text_bytes(self) -> bytes:
        """The text as a payload.

        Raises:
            UsageError: it is longer than a request may be.
        """
        text: Any = {"prompt": self.prompt} if self.prompt is not None else {"messages": list(self.messages)}
        data = json.dumps({**text, "stop": list(self.stop)}, ensure_ascii=False).encode("utf-8", errors="replace")
        if len(data) > limits.REQUEST_TEXT_BYTES_MAX:
            raise UsageError(
                f"the request has {len(data)} bytes of text; at most {limits.REQUEST_TEXT_BYTES_MAX}",
                hint="Shorten the prompt.",
            )
        return data


@dataclass(frozen=True, slots=True)
class Queued:
    """The request's place in the leader's queue; 0: it runs."""

    position: int


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer: its index from 0, its id, and the text that became safe to show with it."""

    index: int
    token: int
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new, but the leader lives."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete; `text` is what was held back until now.

    `mixed`: a peer of another numeric class than the placement's computed some of it, at this leader. `leader` is not
    sent: the asker fills in whom it heard it from.
    """

    finish_reason: Literal["stop", "length"]
    text: str = field(repr=False)
    usage: Usage
    timings: Timings
    mixed: bool = False
    leader: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without a complete answer; what was sent stands."""

    error: SwarmError


Reply = Queued | Token | Alive | Done | Failed

_PARAM_KEYS: Final = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")


def encode_ask(ask: Ask) -> bytes:
    """A request as one frame. UsageError if its text is too long."""
    p = ask.params
    header: dict[str, Any] = {"kind": "ask", "id": ask.request_id, "top_k": p.top_k, "seed": p.seed}
    header.update({key: float(getattr(p, key)) for key in _PARAM_KEYS})
    if ask.ignore_eos:
        header["ignore_eos"] = True
    if ask.max_tokens is not None:
        header["max_tokens"] = ask.max_tokens
    if ask.deadline_s is not None:
        header["deadline_s"] = ask.deadline_s
    if ask.attempt:
        header["attempt"] = ask.attempt
    if ask.generated:
        header["generated"] = len(ask.generated)
    return encode_frame(header, ask.text_bytes(), np.array(ask.generated, _TOKEN))


def generated_count(header: Header) -> int:
    """How many tokens stand at the end of a request's payload. PeerMistake if the header is none."""
    fields = Fields(header, "ask")
    return fields.integer("generated", 0, limits.MAX_TOKENS_MAX) if fields.has("generated") else 0


def decode_ask(frame: Frame) -> Ask:
    """What a peer asks.

    Raises:
        PeerMistake: the frame is no request.
        UsageError: it is one, with values that cannot be served.
    """
    fields = Fields(frame.header, "ask")
    if fields.text("kind", 16) != "ask":
        raise PeerMistake("a prompt stream begins with a request")
    count = generated_count(frame.header)
    text_bytes = len(frame.payload) - count * _TOKEN.itemsize
    if not 0 <= text_bytes <= limits.REQUEST_TEXT_BYTES_MAX:
        raise PeerMistake("a request's payload is not as long as its header says")
    tokens = np.frombuffer(frame.payload, _TOKEN, count, text_bytes)
    if count and int(tokens.max()) > _TOKEN_MAX:
        raise PeerMistake("a request's answer so far holds what is no token id")
    try:
        text = json.loads(bytes(frame.payload[:text_bytes]))
    except (ValueError, RecursionError):
        raise PeerMistake("a request's text is no JSON") from None
    if not isinstance(text, dict):
        raise PeerMistake("a request's text is no JSON object")
    prompt, messages, stop = text.get("prompt"), text.get("messages") or [], text.get("stop") or []
    if not (prompt is None or isinstance(prompt, str)) or not isinstance(messages, list) or not isinstance(stop, list):
        raise PeerMistake("a request's text has fields of the wrong kind")
    if not all(isinstance(s, str) for s in stop) or not all(isinstance(m, dict) for m in messages):
        raise PeerMistake("a request's text has fields of the wrong kind")
    return Ask(
        request_id=_request_id(fields),
        params=SamplingParams(
            top_k=fields.integer("top_k", 0, 2**31),
            seed=fields.integer("seed", 0, 2**64 - 1),
            temperature=fields.number("temperature", -1e9, 1e9),
            top_p=fields.number("top_p", -1e9, 1e9),
            min_p=fields.number("min_p", -1e9, 1e9),
            frequency_penalty=fields.number("frequency_penalty", -1e9, 1e9),
            presence_penalty=fields.number("presence_penalty", -1e9, 1e9),
        ),
        prompt=prompt,
        messages=tuple(messages),
        max_tokens=fields.integer("max_tokens", 0, limits.MAX_TOKENS_MAX) if fields.has("max_tokens") else None,
        stop=tuple(stop),
        deadline_s=fields.number("deadline_s", 0.001, 86_400) if fields.has("deadline_s") else None,
        ignore_eos=fields.has("ignore_eos") and fields.flag("ignore_eos"),
        generated=tuple(tokens.tolist()),
        attempt=fields.integer("attempt", 0, _ATTEMPT_MAX) if fields.has("attempt") else 0,
    )


def _request_id(fields: Fields) -> str:
    request_id = fields.text("id", limits.REQUEST_ID_CHARS_MAX, 1)
    if not all(c.isascii() and (c.isalnum() or c in "_.:-") for c in request_id):
        raise PeerMistake("a request id holds other characters than letters, digits and _.:-")
    return request_id


def encode_reply(reply: Reply) -> bytes:
    """A reply as one frame."""
    match reply:
        case Queued(position):
            return encode_frame({"kind": "queued", "position": position})
        case Token(index, token, text):
            return encode_frame({"kind": "token", "i": index, "t": token}, text.encode("utf-8", errors="replace"))
        case Alive():
            return encode_frame({"kind": "alive"})
        case Done(reason, text, usage, timings, mixed, _):
            header = {
                "kind": "done",
                "finish_reason": reason,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "queue_s": timings.queue_s,
                "prefill_s": timings.prefill_s,
                "decode_s": timings.decode_s,
                "mixed": mixed,
            }
            return encode_frame(header, text.encode("utf-8", errors="replace"))
        case Failed(error):
            return encode_frame({"kind": "error", "error": bounded_error(error)})


def decode_reply(frame: Frame) -> Reply:
    """A leader's reply.

    Raises:
        PeerMistake: it is none.
    """
    fields = Fields(frame.header, "prompt reply")
    match fields.text("kind", 16):
        case "queued":
            return Queued(fields.integer("position", 0, 2**31))
        case "token":
            return Token(fields.integer("i", 0, 2**31), fields.integer("t", 0, 2**31), _text(frame))
        case "alive":
            return Alive()
        case "done":
            reason = fields.text("finish_reason", 16)
            if reason not in ("stop", "length"):
                raise PeerMistake(f"an answer ended for the reason {reason!r}")
            tokens = [fields.integer(key, 0, 2**31) for key in ("prompt_tokens", "completion_tokens")]
            seconds = [fields.number(key, 0, 1e9) for key in ("queue_s", "prefill_s", "decode_s")]
            mixed = fields.has("mixed") and fields.flag("mixed")
            finish: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
            return Done(finish, _text(frame), Usage(*tokens), Timings(*seconds), mixed)
        case "error":
            return Failed(fields.error("error"))
        case kind:
            raise PeerMistake(f"a prompt reply of kind {kind!r}")


def _text(frame: Frame) -> str:
    try:
        return bytes(frame.payload).decode()
    except UnicodeDecodeError:
        raise PeerMistake("a reply's text is not UTF-8") from None


def chat(prompt: str, system: str | None) -> tuple[Message, ...]:
    """One question as a conversation."""
    first: Sequence[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    return (*map(dict, first), {"role": "user", "content": prompt})
