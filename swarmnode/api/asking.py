"""From a request's body to what the swarm is asked: one Ask for each answer."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from scheduler.sampling import SamplingParams
from swarmnode.api import limits
from swarmnode.api.errors import Refusal
from swarmnode.api.schema import ChatBody, CompletionBody, MessageBody, SamplingBody, TextPart
from swarmnode.api.served import ServedModel
from swarmnode.chat_messages import Message
from swarmnode.limits import MAX_TOKENS_MAX, TOP_LOGPROBS_MAX
from swarmnode.prompt_messages import Ask, new_request_id, new_seed

COMPLETION_TOKENS: Final = 16
"""OpenAI's default for /v1/completions; chats have none."""
_ANY_OBJECT: Final = '{"type": "object"}'
_SEED_MASK: Final = 2**64 - 1
_PARAMS: Final = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")


def chat_asks(body: ChatBody) -> list[Ask]:
    """`n` requests. Raises Refusal, UsageError."""
    for field in ("functions", "audio"):
        if getattr(body, field):
            raise _unsupported(field, "use tools" if field == "functions" else "this model writes text alone")
    if body.modalities not in (None, ["text"]):
        raise _unsupported("modalities", "this model writes text alone")
    if body.top_logprobs and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", "invalid_value", "top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= TOP_LOGPROBS_MAX:
        raise Refusal(400, f"top_logprobs must be between 0 and {TOP_LOGPROBS_MAX}", "invalid_value", "top_logprobs")
    what: dict[str, Any] = {
        "messages": tuple(_message(message, i) for i, message in enumerate(body.messages)),
        "max_tokens": _most(body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        **_tools(body),
    }
    return _asks(body, what, body.n)


def _most(max_tokens: int | None) -> int | None:
    """More than any context holds is as good as that."""
    return None if max_tokens is None else min(max_tokens, MAX_TOKENS_MAX)


def _tools(body: ChatBody) -> dict[str, Any]:
    tools, choice = tuple(body.tools or ()), body.tool_choice or "auto"
    if choice == "none":
        return {}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _Allowed.of(choice)
        tools = tuple(tool for tool in tools if _function_name(tool) in allowed.names)
        choice = allowed.mode
    return {"tools": tools, "tool_choice": choice}


class _Allowed(NamedTuple):
    """A choice of tools that leaves the model some of them."""

    mode: str
    names: frozenset[str]

    @classmethod
    def of(cls, choice: dict[str, Any]) -> _Allowed:
        allowed = choice.get("allowed_tools")
        mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else [None]
        if mode not in ("auto", "required") or None in names:
            message = "tool_choice.allowed_tools has a mode, auto or required, and tools, each a function with its name"
            raise Refusal(400, message, "invalid_value", "tool_choice")
        return cls(mode, frozenset(name for name in names if name is not None))


def _function_name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def completion_asks(body: CompletionBody) -> list[Ask]:
    """`n` requests for each prompt. Raises Refusal, UsageError."""
    if body.suffix:
        raise _unsupported("suffix", "this API does not fill in")
    if body.best_of not in (None, body.n):
        raise _unsupported("best_of", "it must equal n")
    prompts = _prompts(body)
    if len(prompts) * body.n > limits.CHOICES_MAX:
        raise Refusal(400, f"n times the prompts is more than {limits.CHOICES_MAX}", "invalid_value", "n")
    what = {
        "max_tokens": COMPLETION_TOKENS if body.max_tokens is None else _most(body.max_tokens),
        "logprobs": body.logprobs,
    }
    return [ask for text in prompts for ask in _asks(body, {"prompt": text, **what}, body.n)]


def _prompts(body: CompletionBody) -> list[str]:
    """The texts to continue."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise _unsupported("prompt", "it must be text: token ids are the leader's own affair")
    if not texts:
        raise Refusal(400, "prompt: it is empty", "invalid_value", "prompt")
    return texts


def _asks(body: SamplingBody, what: dict[str, Any], count: int) -> list[Ask]:
    given = {name: value for name in _PARAMS if (value := getattr(body, name)) is not None}
    seed = new_seed() if body.seed is None else body.seed & _SEED_MASK  # OpenAI's clients may send negative ones
    request_id, bias, schema = new_request_id(), _logit_bias(body), _json_schema(body)
    return [
        Ask(
            request_id=request_id if count == 1 else f"{request_id}-{choice}",
            choice=choice,
            params=SamplingParams(**given, seed=seed, logit_bias=bias),
            stop=body.stops,
            ignore_eos=body.ignore_eos,
            grammar=body.grammar,
            json_schema=schema,
            **what,
        )
        for choice in range(count)
    ]


def _logit_bias(body: SamplingBody) -> dict[int, float]:
    bias = body.logit_bias or {}
    if not all(re.fullmatch(r"\d{1,10}", token) for token in bias):
        raise Refusal(400, "logit_bias: its keys are token ids", "invalid_value", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _json_schema(body: SamplingBody) -> str | None:
    """The schema that an answer obeys, as JSON text."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    schema = (wanted.json_schema or {}).get("schema") if wanted.type == "json_schema" else None
    if not isinstance(schema, dict):
        message = "response_format is text, json_object, or json_schema with a schema"
        raise Refusal(400, message, "invalid_value", "response_format")
    return json.dumps(schema, ensure_ascii=False)


def _message(message: MessageBody, index: int) -> Message:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(_part_text(part, f"messages[{index}].content[{n}]") for n, part in enumerate(content))
    elif content is None:
        content = message.refusal
    if content is None and not message.tool_calls:
        raise _missing(f"messages[{index}].content")
    made: Message = {"role": role, "content": content}
    if message.tool_calls:
        made["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            made[key] = value
    return made


def _part_text(part: TextPart, param: str) -> str:
    if part.type not in ("text", "refusal"):
        raise _unsupported(param, f"it is of type {part.type[:40]!r}, and this model reads text alone")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise _missing(f"{param}.{part.type}")
    return text


def _missing(param: str) -> Refusal:
    return Refusal(400, f"{param} is required", "missing_required_parameter", param)


def _unsupported(param: str, why: str) -> Refusal:
    return Refusal(400, f"{param} is not supported here: {why}", "unsupported_parameter", param)


def check_model(wanted: str | None, served: ServedModel | None) -> None:
    """Refusal if a model is named that is not the one that the swarm serves, as far as that is known."""
    if wanted is not None and served is not None and wanted not in (served.name, served.id):
        message = f"the model {wanted[:80]!r} does not exist here; the swarm serves {served.name!r}"
        raise Refusal(404, message, "model_not_found", "model")
