"""The language of answers that call tools, for requests that insist on it.

Each call is written as the model's own form has it, with one of the tools' names and arguments that obey its schema.
The grammar is llguidance's Lark, in which a JSON schema stands as it is, with its own references.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from backends.grammar import WHITESPACE
from capabilities.tool_form import ToolUse

_CALLS_MAX: Final = 16  # of a request that only says that some tool must be called: a model may find no end by itself


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], use: ToolUse, only: str | None = None, schema: str | None = None
) -> str:
    """A Lark grammar of one or more calls, or, with a schema, of either calls or JSON that obeys it.

    only: the one tool to call, once.
    """
    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        if only is None or function["name"] == only:
            head = json.dumps({"name": function["name"]})[:-1] + f', "{use.form.arguments}": '
            rules.append((f"call_{number}", f"{_literal(head)} arguments_{number} {_literal('}')}"))
            rules.append((f"arguments_{number}", f"%json {_json(function.get('parameters') or {'type': 'object'})}"))
    calls = " | ".join(name for name, _ in rules if name.startswith("call_"))
    begin, end = _mark(use.form.begin, use), _mark(use.form.end, use)
    match use.form.name:
        case "hermes":
            line = _literal("\n")
            rules.append(("tagged", f"{begin} {line} call {line} {end}"))
            rules.append(("calls", "tagged" + _more(f"{line} tagged", only)))
        case "mistral":
            more = _more(f"{_literal(', ')} call", only)
            rules.append(("calls", f"{begin} {_literal('[')} call{more} {_literal(']')}"))
        case "llama":  # its templates take one call a message
            rules.append(("calls", "call"))
    rules.append(("call", calls))
    if schema is None:
        rules.append(("start", "calls"))
    else:
        rules += [("start", "calls | answer"), ("answer", f"%json {_json(json.loads(schema))}")]
    return "".join(f"{name}: {body}\n" for name, body in rules)


def _more(each: str, only: str | None) -> str:
    return f" ({each}){{0,{_CALLS_MAX - 1}}}" if only is None else ""


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps(schema)


def _literal(text: str) -> str:
    return json.dumps(text)


def _mark(text: str, use: ToolUse) -> str:
    """A mark as the model writes it: its control token, if it has one, or text."""
    token = next((token for token, shown in use.markers.items() if shown == text.encode()), None)
    return _literal(text) if token is None else f"<[{token}]>"
