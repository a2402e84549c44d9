"""A model's chat template: from a conversation, and the tools that it may call, to a prompt.

A template is a program of the model's author, in Jinja, run in a sandbox. What reaches it is put into the shape that
templates expect (Transformers' conventions, which differ from OpenAI's in details).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from capabilities.errors import UsageError
from capabilities.tool_form import HERMES, LLAMA, MISTRAL, ToolForm

Message = Mapping[str, Any]


class ChatTemplate:
    """One template. `bos`, `eos`: the text of the model's start and end tokens."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source = source
        self._bos, self._eos = bos, eos
        self._formatter: Jinja2ChatFormatter | None = None

    @property
    def tool_form(self) -> ToolForm | None:
        """How it teaches the model to call tools; None: not at all, or in a way that is not known here."""
        source = self._source
        if "tools" not in source:
            return None
        if MISTRAL.begin in source:
            return MISTRAL
        if HERMES.begin in source:
            # The same tag may stand around other things than JSON.
            others = ("<function=", "<arg_key>", "<parameter", "<|tool_call>", "<invoke")
            return None if any(mark in source for mark in others) else HERMES
        if '"parameters": ' in source and ("ipython" in source or LLAMA.begin in source):
            return LLAMA
        return None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt, up to where the answer begins.

        Raises:
            UsageError: the template refuses the conversation, or knows nothing of tools.
        """
        shaped = [self._shaped(message) for message in messages]
        prompt = self._run(shaped, [_shaped_tool(tool) for tool in tools])
        if tools and (self.tool_form is None or prompt == self._without_tools(shaped)):
            raise UsageError(
                "this model's chat template has no tools, or a form of calls that is not known here",
                hint="Ask without tools, or serve a model whose template has them.",
                parameter="tools",
            )
        return prompt

    def _run(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            if self._formatter is None:
                self._formatter = Jinja2ChatFormatter(self._source, eos_token=self._eos, bos_token=self._bos)
            return str(self._formatter(messages=messages, tools=list(tools) or None).prompt)
        except Exception as error:  # the author's program may fail in any way
            message = f"the model's chat template refuses this conversation: {error}"
            raise UsageError(message, parameter="messages") from None

    def _without_tools(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._run(messages, ())
        except UsageError:  # a template for tools alone
            return None

    def _shaped(self, message: Message) -> dict[str, Any]:
        shaped: dict[str, Any] = {**message, "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            shaped["tool_calls"] = [self._shaped_call(call) for call in calls]
        if "tool_call_id" in message:
            shaped["tool_call_id"] = self._shaped_id(message["tool_call_id"])
        return shaped

    def _shaped_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        shaped = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        return {"id": self._shaped_id(call.get("id", "")), **shaped}

    def _shaped_id(self, call_id: str) -> str:
        """Mistral's templates take ids of nine letters and digits alone."""
        if self.tool_form is not MISTRAL or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        return blake2b(call_id.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _shaped_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With what OpenAI's API leaves out and templates read without a look."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {**tool, "function": {"name": "", "description": "", **function, "parameters": parameters}}
