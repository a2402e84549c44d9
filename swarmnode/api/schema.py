"""The bodies of requests, as OpenAI documents them. null means absent; fields that are not known are passed over.

What is known and cannot be served is refused by name (asking.py), never passed over: an answer that ignores what it was
asked for would look like one that did not.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarmnode.api import limits
from swarmnode.api.errors import Refusal

Number = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(_Body):
    """A part of a message's content. Only texts can be read, those of an earlier refusal included."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(_Body):
    name: str
    arguments: str = ""


class ToolCallBody(_Body):
    id: str = ""
    type: str = "function"
    function: FunctionCall


class MessageBody(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None


class StreamOptions(_Body):
    include_usage: bool = False


class ResponseFormat(_Body):
    type: str
    json_schema: dict[str, Any] | None = None


class SamplingBody(_Body):
    """What both endpoints have."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=limits.CHOICES_MAX)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # These two are not OpenAI's; other servers have them under the same names.
    grammar: str | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class DrainBody(_Body):
    """POST /api/drain."""

    on: bool


BodyT = TypeVar("BodyT", bound=BaseModel)


async def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """A body from its bytes. Refusal, naming the field, if it is none."""
    if len(data) <= limits.INLINE_JSON_BYTES_MAX:
        return _parse(kind, data)
    return await trio.to_thread.run_sync(_parse, kind, data)


def _parse(kind: type[BodyT], data: bytes) -> BodyT:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        first = faults[0]
        if first["type"] == "json_invalid":  # what it says of where and why quotes nothing
            raise Refusal(400, f"the body is no valid JSON: {first['ctx']['error']}", "invalid_json") from None
        # Of a value that may be several kinds, each is told; what is wrong within one of them tells more.
        param = max((_name(fault["loc"]) for fault in faults), key=lambda name: _within(name, _name(first["loc"])))
        first = next(fault for fault in faults if _name(fault["loc"]) == param)
        reasons = dict.fromkeys(_reason(fault["msg"]) for fault in faults if _name(fault["loc"]) == param)
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise Refusal(400, f"{param or 'the body'} {' or '.join(reasons)}", code, param or None) from None


_PLAIN_WORDS: Final = {
    "Field required": "is required",
    "Input should": "should",
    "List should": "should",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "a valid array": "a list",
    "a valid ": "a ",
    " after validation": "",
}


def _within(name: str, outer: str) -> int:
    """How deep a name is within another one; -1: it is none of its parts."""
    return len(name) - len(outer) if name.startswith(outer) else -1


def _reason(message: str) -> str:
    for theirs, ours in _PLAIN_WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _name(loc: tuple[int | str, ...]) -> str:
    """messages[0].content, without the names of the kinds that a value was tried as."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list"):
            name += f".{part}" if name else part
    return name
