"""How models write calls of tools: three forms that chat templates teach them.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, after any text
    mistral  [TOOL_CALLS] and a list of such objects, or name[ARGS]{...}, after any text
    llama    the whole answer is {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls: what stands before one, what after it, and the key of the arguments."""

    name: Literal["hermes", "mistral", "llama"]
    begin: str
    end: str
    arguments: str
    inner: tuple[str, ...] = ()  # other marks within a call


HERMES = ToolForm("hermes", "<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolForm("mistral", "[TOOL_CALLS]", "", "arguments", ("[CALL_ID]", "[ARGS]"))
LLAMA = ToolForm("llama", "<|python_tag|>", "", "parameters")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call.

    markers  control tokens that belong to the form, with their text: control tokens are otherwise no text at all
    """

    form: ToolForm
    names: frozenset[str]
    markers: Mapping[int, bytes] = field(default_factory=dict)
