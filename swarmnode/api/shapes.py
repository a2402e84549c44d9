"""How the two endpoints tell an answer: whole, and piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from scheduler.tool_calls import ToolCall
from swarmnode.api.answering import Choice
from swarmnode.prompt_messages import Token

Json = dict[str, Any]


class Shape(Protocol):
    """`index` counts the answers to one request."""

    @property
    def kind(self) -> str: ...

    @property
    def chunk_kind(self) -> str: ...

    @property
    def prefix(self) -> str:
        """Of the answer's id."""

    def whole(self, index: int, choice: Choice) -> Json: ...

    def first(self, index: int) -> Json | None:
        """What a stream tells of an answer before its text, if anything."""

    def piece(self, index: int, text: str, token: Token | None) -> Json:
        """`token`: whose probability is to be told, if that was asked for."""

    def last(self, index: int, choice: Choice) -> Json: ...


def _finish_reason(choice: Choice) -> str | None:
    return None if choice.done is None else choice.done.finish_reason


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


class ChatShape:
    """A stream tells calls of tools at its end, each as a whole: half a call is of no use to anybody."""

    kind: Final = "chat.completion"
    chunk_kind: Final = "chat.completion.chunk"
    prefix: Final = "chatcmpl"

    def whole(self, index: int, choice: Choice) -> Json:
        calls = () if choice.done is None else choice.done.tool_calls
        content = "".join(choice.text)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        told = {"index": index, "message": message, "finish_reason": _finish_reason(choice)}
        return {**told, "logprobs": _chat_logprobs(choice.told_tokens)}

    def first(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, text: str, token: Token | None) -> Json:
        return {**self._chunk(index, {"content": text}), "logprobs": _chat_logprobs([token] if token else [])}

    def last(self, index: int, choice: Choice) -> Json:
        calls = () if choice.done is None else choice.done.tool_calls
        delta = {"tool_calls": [{"index": i, **_call(call)} for i, call in enumerate(calls)]} if calls else {}
        return self._chunk(index, delta, _finish_reason(choice))

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(tokens: Sequence[Token]) -> Json | None:
    content = [
        {
            **_likely(token.bytes, token.logprob),
            "top_logprobs": [_likely(data, logprob) for _, logprob, data in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _likely(data: bytes, logprob: float | None) -> Json:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


class TextShape:
    """`echo`: each answer's prompt, to be told before it; empty where that was not asked for."""

    kind: Final = "text_completion"
    chunk_kind: Final = "text_completion"
    prefix: Final = "cmpl"

    def __init__(self, echo: Sequence[str], answers: int) -> None:
        self._echo = echo
        self._told = [len(self._prompt(index)) for index in range(answers)]  # characters, of each answer

    def whole(self, index: int, choice: Choice) -> Json:
        told = self._choice(index, self._prompt(index) + "".join(choice.text), _finish_reason(choice))
        return {**told, "logprobs": self._logprobs(index, choice.told_tokens)}

    def first(self, index: int) -> Json | None:
        prompt = self._prompt(index)
        return self._choice(index, prompt, None) if prompt else None

    def piece(self, index: int, text: str, token: Token | None) -> Json:
        return {**self._choice(index, text, None), "logprobs": self._logprobs(index, [token] if token else [])}

    def last(self, index: int, choice: Choice) -> Json:
        return self._choice(index, "", _finish_reason(choice))

    def _prompt(self, index: int) -> str:
        return self._echo[index] if self._echo else ""

    def _choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._told[index])
            self._told[index] += len(_text(token.bytes))
        return {
            "tokens": [_text(token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{_text(data): logprob for _, logprob, data in token.top} for token in tokens],
            "text_offset": offsets,
        }
