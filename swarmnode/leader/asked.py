"""What a request means for the model that is served: its text as tokens, and what its answer must look like."""

from __future__ import annotations

from typing import Final

import trio

from backends.grammar import Grammar, Grammars
from backends.tool_grammar import tool_grammar
from backends.vocabulary import Vocabulary
from capabilities.errors import UsageError, about
from capabilities.tool_form import ToolUse
from scheduler.requests import Request
from swarmnode.chat_messages import Tool, chosen_tool, json_bytes
from swarmnode.prompt_messages import Ask

_INLINE_CHARS: Final = 4096  # of text: rendering and tokenising more goes to a thread


class Reader:
    """Turns asks into requests. deadline_s: the longest that a request may take."""

    def __init__(self, vocabulary: Vocabulary, context_tokens: int, deadline_s: float) -> None:
        self._vocabulary = vocabulary
        self._context_tokens = context_tokens
        self._deadline_s = deadline_s
        self._grammars = Grammars(vocabulary)
        self._tokenizing = trio.CapacityLimiter(1)
        self._making_grammars = trio.CapacityLimiter(1)

    async def request(self, ask: Ask, name: str) -> Request:
        """As `read`, in a thread where it takes a while: a long text, a grammar, an answer so far in its language."""
        if ask.grammar is not None or ask.json_schema is not None or ask.tools:
            return await trio.to_thread.run_sync(self.read, ask, name, limiter=self._making_grammars)
        if _size(ask) > _INLINE_CHARS:
            return await trio.to_thread.run_sync(self.read, ask, name, limiter=self._tokenizing)
        return self.read(ask, name)

    def read(self, ask: Ask, name: str) -> Request:
        """The request, by that name. UsageError where its text or its form cannot be served."""
        tools = () if ask.tool_choice == "none" else ask.tools
        with about("prompt"):
            tokens = self._tokens(ask, tools)
            if not tokens:
                raise UsageError("the prompt is empty", hint="Give at least one word.")
        use = self._tool_use(tools)
        room = max(0, self._context_tokens - len(tokens))
        return Request(
            id=name,
            prompt_tokens=tuple(tokens),
            params=ask.params,
            max_tokens=room if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
            stop_at_end=not ask.ignore_eos,
            deadline_s=min(self._deadline_s, ask.deadline_s or self._deadline_s),
            generated=ask.generated,
            choice=ask.choice,
            logprobs=ask.logprobs,
            constraint=self._constraint(ask, use),
            tools=use,
        )

    def _tokens(self, ask: Ask, tools: tuple[Tool, ...]) -> list[int]:
        v = self._vocabulary
        return v.tokenize(ask.prompt if ask.prompt is not None else v.render_chat(ask.messages, tools))

    def _tool_use(self, tools: tuple[Tool, ...]) -> ToolUse | None:
        form = self._vocabulary.tool_form if tools else None
        if form is None:
            return None
        marks = {mark: self._vocabulary.control_token(mark) for mark in (form.begin, form.end, *form.inner)}
        markers = {token: mark.encode() for mark, token in marks.items() if token is not None}
        return ToolUse(form, frozenset(tool["function"]["name"] for tool in tools), markers)

    def _constraint(self, ask: Ask, use: ToolUse | None) -> Grammar | None:
        """What narrows the answer down."""
        named = chosen_tool(ask.tool_choice)
        if use is not None and ask.grammar is not None:
            raise UsageError("an answer has tools or a grammar, not both", parameter="grammar")
        if use is not None and (named is not None or ask.tool_choice == "required"):
            with about("tools"):
                return self._grammars.of_lark(tool_grammar(ask.tools, use, named), ask.generated)
        if ask.grammar is not None:
            with about("grammar"):
                return self._grammars.of_gbnf(ask.grammar, ask.generated)
        if ask.json_schema is None:
            return None
        with about("json_schema"):
            if use is not None:
                grammar = tool_grammar(ask.tools, use, schema=ask.json_schema)
                return self._grammars.of_lark(grammar, ask.generated)
            return self._grammars.of_schema(ask.json_schema, ask.generated)


def _size(ask: Ask) -> int:
    """Roughly how much text there is."""
    return len(ask.prompt or "") + json_bytes(ask.messages)
