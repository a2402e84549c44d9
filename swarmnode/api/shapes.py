"""How the two endpoints tell an answer: whole, and piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from swarmnode.api.answering import Choice

Json = dict[str, Any]


class Shape(Protocol):
    """`index` counts the answers to one request. What gives None tells nothing there."""

    @property
    def kind(self) -> str: ...

    @property
    def chunk_kind(self) -> str: ...

    @property
    def prefix(self) -> str:
        """Of the answer's id."""

    def whole(self, index: int, choice: Choice) -> Json: ...

    def first(self, index: int) -> Json | None:
        """What a stream tells of an answer before its text."""

    def piece(self, index: int, text: str) -> Json: ...

    def last(self, index: int, choice: Choice) -> Json: ...


def _finish_reason(choice: Choice) -> str | None:
    return None if choice.done is None else choice.done.finish_reason


class ChatShape:
    kind: Final = "chat.completion"
    chunk_kind: Final = "chat.completion.chunk"
    prefix: Final = "chatcmpl"

    def whole(self, index: int, choice: Choice) -> Json:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": _finish_reason(choice)}

    def first(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, text: str) -> Json:
        return self._chunk(index, {"content": text})

    def last(self, index: int, choice: Choice) -> Json:
        return self._chunk(index, {}, _finish_reason(choice))

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class TextShape:
    """`echo`: each answer's prompt, to be told before it; empty where that was not asked for."""

    kind: Final = "text_completion"
    chunk_kind: Final = "text_completion"
    prefix: Final = "cmpl"

    def __init__(self, echo: Sequence[str]) -> None:
        self._echo = echo

    def whole(self, index: int, choice: Choice) -> Json:
        return self._choice(index, self._prompt(index) + "".join(choice.text), _finish_reason(choice))

    def first(self, index: int) -> Json | None:
        prompt = self._prompt(index)
        return self._choice(index, prompt, None) if prompt else None

    def piece(self, index: int, text: str) -> Json:
        return self._choice(index, text, None)

    def last(self, index: int, choice: Choice) -> Json:
        return self._choice(index, "", _finish_reason(choice))

    def _prompt(self, index: int) -> str:
        return self._echo[index] if self._echo else ""

    def _choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
