"""The prompt protocol to the byte: its messages (prompt_messages.py) as frames, and whatever a peer sends as messages.

No bytes of a peer raise anything but a PeerMistake, or a UsageError where they are a request that cannot be served.
Fields that are absent have the meaning that they had before there were any, so older peers are understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Never, cast, get_args

import numpy as np

from capabilities.errors import PeerMistake, UsageError
from scheduler.requests import FinishReason, Timings, Usage
from scheduler.sampling import BIAS_ENTRIES_MAX, SamplingParams
from scheduler.tool_calls import ToolCall
from swarmnode import limits
from swarmnode.chat_messages import ToolChoice
from swarmnode.prompt_messages import Alive, Ask, Done, Failed, Queued, Reply, Token
from swarmnode.wire import Fields, Frame, Header, bounded_error, encode_frame

_TOKEN: Final = np.dtype("<u4")
_TOKEN_MAX: Final = 2**31 - 1
_ATTEMPT_MAX: Final = 2**31
_CHOICE_MAX: Final = 2**32 - 1
_OPTIONS_MAX: Final = 64
_OPTION_CHARS_MAX: Final = 40
_LOGPROB_MAX: Final = 1e9  # logits are float32, but nobody computes with this number
_ID_DIGITS: Final = 10  # of a token id
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
    if ask.choice:
        header["choice"] = ask.choice
    if ask.logprobs is not None:
        header["logprobs"] = ask.logprobs
    if ask.generated:
        header["generated"] = len(ask.generated)
    return encode_frame(header, _text_bytes(ask), np.array(ask.generated, _TOKEN))


def _text_bytes(ask: Ask) -> bytes:
    """A request's text as a payload. UsageError if it is longer than one may be."""
    text: dict[str, Any] = {"stop": list(ask.stop)}
    text.update({"prompt": ask.prompt} if ask.prompt is not None else {"messages": list(ask.messages)})
    if ask.params.logit_bias:
        text["logit_bias"] = dict(ask.params.logit_bias)
    text.update({key: value for key in ("grammar", "json_schema") if (value := getattr(ask, key)) is not None})
    if ask.tools:
        text["tools"] = list(ask.tools)
    if ask.tool_choice != "auto":
        text["tool_choice"] = ask.tool_choice
    data = json.dumps(text, ensure_ascii=False).encode("utf-8", errors="replace")
    if len(data) > limits.REQUEST_TEXT_BYTES_MAX:
        message = f"the request has {len(data)} bytes of text; at most {limits.REQUEST_TEXT_BYTES_MAX}"
        raise UsageError(message, hint="Shorten the prompt.", parameter="prompt")
    return data


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
    text = _Text(_json_object(bytes(frame.payload[:text_bytes])))
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
            logit_bias=text.bias(),
        ),
        prompt=text.text("prompt"),
        messages=text.objects("messages"),
        max_tokens=fields.integer("max_tokens", 0, limits.MAX_TOKENS_MAX) if fields.has("max_tokens") else None,
        stop=text.texts("stop"),
        deadline_s=fields.number("deadline_s", 0.001, 86_400) if fields.has("deadline_s") else None,
        ignore_eos=fields.has("ignore_eos") and fields.flag("ignore_eos"),
        generated=tuple(tokens.tolist()),
        attempt=fields.integer("attempt", 0, _ATTEMPT_MAX) if fields.has("attempt") else 0,
        choice=fields.integer("choice", 0, _CHOICE_MAX) if fields.has("choice") else 0,
        logprobs=fields.integer("logprobs", 0, limits.TOP_LOGPROBS_MAX) if fields.has("logprobs") else None,
        grammar=text.text("grammar"),
        json_schema=text.text("json_schema"),
        tools=text.objects("tools"),
        tool_choice=text.tool_choice(),
    )


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise PeerMistake("a message's text is no JSON") from None
    if not isinstance(value, dict):
        raise PeerMistake("a message's text is no JSON object")
    return value


class _Text:
    """Typed reading of a request's text; absent and null are the same, and a value of another kind a PeerMistake."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self._text = text

    def text(self, key: str) -> str | None:
        value = self._text.get(key)
        return value if value is None or isinstance(value, str) else self._fail(key)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._text.get(key) or []
        return tuple(value) if isinstance(value, list) and all(isinstance(s, str) for s in value) else self._fail(key)

    def objects(self, key: str) -> tuple[dict[str, Any], ...]:
        value = self._text.get(key) or []
        return tuple(value) if isinstance(value, list) and all(isinstance(o, dict) for o in value) else self._fail(key)

    def bias(self) -> dict[int, float]:
        value = self._text.get("logit_bias") or {}
        if not isinstance(value, dict) or len(value) > BIAS_ENTRIES_MAX:
            self._fail("logit_bias")
        if not all(key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS for key in value):
            self._fail("logit_bias")
        return {int(key): bias for key, bias in value.items()}

    def tool_choice(self) -> ToolChoice:
        value = self._text.get("tool_choice") or "auto"
        return value if isinstance(value, str | dict) else self._fail("tool_choice")

    def _fail(self, key: str) -> Never:
        raise PeerMistake(f"a request's text has a {key} of the wrong kind")


def _request_id(fields: Fields) -> str:
    request_id = fields.text("id", limits.REQUEST_ID_CHARS_MAX, 1)
    if not all(c.isascii() and (c.isalnum() or c in "_.:-") for c in request_id):
        raise PeerMistake("a request id holds other characters than letters, digits and _.:-")
    return request_id


def encode_reply(reply: Reply) -> bytes:
    """A reply as one frame."""
    match reply:
        case Queued(position, options):
            return encode_frame({"kind": "queued", "position": position, "options": sorted(options)})
        case Token(index, token, text, logprob, top, piece):
            header: dict[str, Any] = {"kind": "token", "i": index, "t": token}
            if logprob is not None:
                header |= {"logprob": logprob, "bytes": piece[: limits.TOKEN_BYTES_MAX]}
                header |= {"top_t": [t for t, _, _ in top], "top_logprob": [lp for _, lp, _ in top]}
                header["top_bytes"] = [b[: limits.TOKEN_BYTES_MAX] for _, _, b in top]
            return encode_frame(header, text.encode("utf-8", errors="replace"))
        case Alive():
            return encode_frame({"kind": "alive"})
        case Done(reason, text, usage, timings, mixed, _, calls, tainted):
            header = {
                "kind": "done",
                "finish_reason": reason,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "queue_s": timings.queue_s,
                "prefill_s": timings.prefill_s,
                "decode_s": timings.decode_s,
                "mixed": mixed,
                "tainted": tainted,
            }
            data = b""
            if calls:
                data = json.dumps({"tool_calls": [asdict(call) for call in calls]}).encode()
                header["calls_bytes"] = len(data)
            return encode_frame(header, text.encode("utf-8", errors="replace"), data)
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
            options = fields.texts("options", _OPTIONS_MAX, _OPTION_CHARS_MAX) if fields.has("options") else []
            return Queued(fields.integer("position", 0, 2**31), frozenset(options))
        case "token":
            return _token(fields, _utf8(frame.payload))
        case "alive":
            return Alive()
        case "done":
            return _done(fields, frame.payload)
        case "error":
            return Failed(fields.error("error"))
        case kind:
            raise PeerMistake(f"a prompt reply of kind {kind!r}")


def _token(fields: Fields, text: str) -> Token:
    index, token = fields.integer("i", 0, 2**31), fields.integer("t", 0, 2**31)
    if not fields.has("logprob"):
        return Token(index, token, text)
    count = limits.TOP_LOGPROBS_MAX
    ids = fields.integers("top_t", count, 0, 2**31)
    logprobs = fields.numbers("top_logprob", count, -_LOGPROB_MAX, 0)
    pieces = fields.binaries("top_bytes", count, limits.TOKEN_BYTES_MAX)
    if not len(ids) == len(logprobs) == len(pieces):
        raise PeerMistake("a token's alternatives are not as many as their probabilities")
    return Token(
        index,
        token,
        text,
        fields.number("logprob", -_LOGPROB_MAX, 0),
        tuple(zip(ids, logprobs, pieces, strict=True)),
        fields.binary("bytes", limits.TOKEN_BYTES_MAX),
    )


def _done(fields: Fields, payload: bytes | memoryview) -> Done:
    reason = fields.text("finish_reason", 16)
    if reason not in get_args(FinishReason):
        raise PeerMistake(f"an answer ended for the reason {reason!r}")
    cached = fields.integer("cached_tokens", 0, 2**31) if fields.has("cached_tokens") else 0
    usage = Usage(fields.integer("prompt_tokens", 0, 2**31), fields.integer("completion_tokens", 0, 2**31), cached)
    seconds = [fields.number(key, 0, 1e9) for key in ("queue_s", "prefill_s", "decode_s")]
    mixed, tainted = (fields.has(key) and fields.flag(key) for key in ("mixed", "tainted"))
    calls_bytes = fields.integer("calls_bytes", 0, len(payload)) if fields.has("calls_bytes") else 0
    end = len(payload) - calls_bytes
    calls = _calls(bytes(payload[end:])) if calls_bytes else ()
    finish = cast(FinishReason, reason)
    return Done(finish, _utf8(payload[:end]), usage, Timings(*seconds), mixed, tool_calls=calls, tainted=tainted)


def _calls(data: bytes) -> tuple[ToolCall, ...]:
    calls = _json_object(data).get("tool_calls")
    if not isinstance(calls, list) or len(calls) > limits.TOOL_CALLS_MAX:
        raise PeerMistake("an answer's tool calls are no list, or too many")
    names = ("id", "name", "arguments")
    if not all(isinstance(call, dict) and all(isinstance(call.get(key), str) for key in names) for call in calls):
        raise PeerMistake("an answer's tool call has fields of the wrong kind")
    return tuple(ToolCall(*(call[key] for key in names)) for call in calls)


def _utf8(payload: bytes | memoryview) -> str:
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError:
        raise PeerMistake("a reply's text is not UTF-8") from None
