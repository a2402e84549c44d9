"""A conversation and the tools that its model may call, in OpenAI's shapes: what of them a request may carry.

Everything here came from a stranger. What passes `check_messages` and `check_tools` may be handed to a chat template:
it is JSON of known keys and kinds, within bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from capabilities.errors import UsageError
from swarmnode import limits

Message = dict[str, Any]
"""role, content (a text, or None beside tool_calls), and where it applies name, tool_calls, tool_call_id."""

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}; parameters is a JSON schema."""

ToolChoice = str | Mapping[str, Any]
"""none, auto, required, or {"type": "function", "function": {"name": NAME}}."""

ROLES: Final = ("system", "user", "assistant", "tool")
_MESSAGE_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_CALL_KEYS: Final = frozenset({"id", "type", "function"})
_FUNCTION_KEYS: Final = frozenset({"name", "arguments"})
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's rule for functions, and the dot that others use


def chat(prompt: str, system: str | None) -> tuple[Message, ...]:
    """One question as a conversation."""
    first: Sequence[Message] = [] if system is None else [{"role": "system", "content": system}]
    return (*first, {"role": "user", "content": prompt})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError unless these are messages of a conversation."""
    if len(messages) > limits.MESSAGES_MAX:
        raise UsageError(f"a conversation has at most {limits.MESSAGES_MAX} messages")
    for message in messages:
        _check_message(message)


def _check_message(message: Mapping[str, Any]) -> None:
    if unknown := sorted(map(str, set(message) - _MESSAGE_KEYS)):
        raise UsageError(f"a message has no field {unknown[0]:.40}")
    if message.get("role") not in ROLES:
        raise UsageError(f"a message's role is one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and calls):
        raise UsageError("each message has a role and a content, both texts")
    for key in ("name", "tool_call_id"):
        if key in message and not isinstance(message[key], str):
            raise UsageError(f"a message's {key} is a text")
    if "tool_calls" in message:
        if message["role"] != "assistant" or not isinstance(calls, list) or len(calls) > limits.TOOL_CALLS_MAX:
            raise UsageError(f"tool_calls is a list of at most {limits.TOOL_CALLS_MAX}, of an assistant's message")
        for call in calls:
            _check_call(call)


def _check_call(call: object) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise UsageError("each of a message's tool_calls is a function's call")
    if not _CALL_KEYS.issuperset(call) or not _FUNCTION_KEYS.issuperset(function):
        raise UsageError("a tool call has an id, a type and a function, and that a name and arguments")
    if not all(isinstance(value, str) for value in (call.get("id", ""), function.get("name"))):
        raise UsageError("a tool call has an id and its function a name, both texts")
    if not isinstance(function.get("arguments"), str):
        raise UsageError("a tool call's arguments are JSON as a text")


def check_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> None:
    """Raise UsageError unless these are tools, and a choice that they allow."""
    if len(tools) > limits.TOOLS_MAX:
        raise UsageError(f"a request has at most {limits.TOOLS_MAX} tools")
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise UsageError("each tool is a function: {'type': 'function', 'function': {'name': ...}}")
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            raise UsageError("a function's name has 1 to 64 letters, digits, and _.-")
        if not isinstance(function.get("description") or "", str):
            raise UsageError("a function's description is a text")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise UsageError("a function's parameters are a JSON schema")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise UsageError("two tools have the same name")
    named = chosen_tool(choice)
    if named is not None and named not in names:
        raise UsageError(f"tool_choice names {named!r:.80}, which is none of the tools", parameter="tool_choice")
    if choice == "required" and not tools:
        raise UsageError("tool_choice requires a tool, but there is none", parameter="tool_choice")


def chosen_tool(choice: ToolChoice) -> str | None:
    """The function that a choice names, if it names one. UsageError where it is no choice at all."""
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return None
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    message = "tool_choice is none, auto, required, or {'type': 'function', 'function': {'name': ...}}"
    raise UsageError(message, parameter="tool_choice")


def json_bytes(value: object) -> int:
    """Bytes of a value as JSON. UsageError if it nests too deep for that."""
    try:
        return len(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace"))
    except RecursionError:
        raise UsageError("the tools nest too deep") from None
