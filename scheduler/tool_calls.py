"""Calls of tools in the text of an answer, in the forms of capabilities/tool_form.py.

Text is shown until a call may begin; from there on it is held back, and at the end it is either calls, all of them
well-formed and of tools that there are, or text after all. The result depends on the text alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from capabilities.tool_form import LLAMA, ToolUse

CALLS_MAX = 128  # of one answer; more are text
_DECODER = json.JSONDecoder()
_MISTRAL_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?\s*")
_BETWEEN = re.compile(r"[\s;]*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an answer makes: a name for it, the function's, and the arguments as JSON text."""

    id: str
    name: str
    arguments: str = field(repr=False)


def call_id(request_id: str, choice: int, number: int) -> str:
    """A name for an answer's call: nine letters and digits, as Mistral's templates want it."""
    return blake2b(f"{request_id} {choice} {number}".encode(), digest_size=5).hexdigest()[:9]


class ToolCallReader:
    """Follows one answer's text."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._form = use.form
        self._held = ""
        self._inside = False  # what is held may be calls
        self._shown = False  # something but blanks was shown

    def feed(self, text: str) -> str:
        """Take more text, give what may be shown."""
        self._held += text
        if self._inside:
            return ""
        begin = self._begin()
        if begin is None:
            begin = len(self._held) - self._half_a_mark()
            if self._form is LLAMA and not self._shown and not self._held.strip():
                begin = 0
        else:
            self._inside = True
        shown, self._held = self._held[:begin], self._held[begin:]
        self._shown = self._shown or bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[tuple[str, str]]]:
        """The end: the rest of the text, and the calls as (name, arguments)."""
        held, self._held = self._held, ""
        if self._inside:
            try:
                read = self._read(held)
            except (ValueError, RecursionError, KeyError, TypeError):
                read = None
            if read is not None and 0 < len(read[1]) <= CALLS_MAX:
                return read
        return held, []

    def _begin(self) -> int | None:
        """Where in the held text calls begin, if they do."""
        if self._form is LLAMA and not self._shown and self._held.lstrip().startswith("{"):
            return 0
        at = self._held.find(self._form.begin)
        return at if at >= 0 else None

    def _half_a_mark(self) -> int:
        """How many of the last characters may be the beginning of a mark."""
        mark = self._form.begin
        return next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)

    # Each takes the held text whole; ValueError, KeyError or TypeError: it is none of the form.

    def _read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        match self._form.name:
            case "hermes":
                return self._tagged(text)
            case "mistral":
                return "", self._listed(text)
            case "llama":
                return "", self._bare(text.strip().removeprefix(self._form.begin))

    def _tagged(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        calls: list[tuple[str, str]] = []
        between = ""
        at = 0
        while (begin := text.find(self._form.begin, at)) >= 0:
            between += text[at:begin]
            value, at = _value(text, begin + len(self._form.begin))
            calls.append(self._call(value))
            at = _skip(text, at)
            if text.startswith(self._form.end, at):
                at += len(self._form.end)
            elif self._form.end.startswith(text[at:]):  # the answer's end came before it, or in the midst of it
                at = len(text)
        between += text[at:]
        return between.strip(), calls

    def _listed(self, text: str) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []
        for part in text.split(self._form.begin)[1:]:
            named = _MISTRAL_NAME.match(part)
            value, end = _value(part, named.end() if named else 0)
            if part[end:].strip():
                raise ValueError("text after the calls")
            if named:
                calls.append(self._call({"name": named[1], "arguments": value}))
            else:
                calls += [self._call(each) for each in value]
        return calls

    def _bare(self, text: str) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []
        at = 0
        while (at := _skip(text, at)) < len(text):
            value, at = _value(text, at)
            calls.append(self._call(value))
        return calls

    def _call(self, value: Any) -> tuple[str, str]:
        name, arguments = value["name"], value.get(self._form.arguments, {})
        if name not in self._use.names:
            raise ValueError("no such tool")
        if isinstance(arguments, str):  # some write the arguments as a text that holds JSON
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("arguments that are no object")
        return name, json.dumps(arguments, ensure_ascii=False)


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place of a text, and where it ends."""
    value, end = _DECODER.raw_decode(text, _skip(text, at))
    return value, int(end)


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()
