"""The configuration: one TOML file, read once at start-up.

Each knob is declared once, in config_sections.py: its type, range, default and what a person needs to decide it
(formula, trade-off, why this default). `default_text()` prints the file from these declarations, so it cannot fall
behind. A key that is not known is an error that names the nearest one: a misspelt knob that silently does nothing is
worse than no knob.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from capabilities.errors import UsageError
from swarmnode.config_sections import (
    MIB,
    ApiConfig,
    ComputeConfig,
    LeaderConfig,
    LimitsConfig,
    LogConfig,
    NodeConfig,
    RequestsConfig,
    Section,
    SwarmConfig,
)

CONFIG_BYTES_MAX = 1 << 20
COMMENT_COLUMNS = 110
_INPUT_CHARS_MAX = 60


class Config(Section):
    """The whole file. Every section and key may be left out."""

    node: NodeConfig = NodeConfig()
    swarm: SwarmConfig = SwarmConfig()
    leader: LeaderConfig = LeaderConfig()
    compute: ComputeConfig = ComputeConfig()
    limits: LimitsConfig = LimitsConfig()
    requests: RequestsConfig = RequestsConfig()
    api: ApiConfig = ApiConfig()
    log: LogConfig = LogConfig()


def load_config(file: Path | None) -> Config:
    """Read a file; None gives the defaults. Raises UsageError: one line that names file, section, key and fault."""
    if file is None:
        return Config()
    try:
        with file.open("rb") as stream:
            data = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", hint=_HINT, path=str(file)) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise UsageError(f"{file}: over {CONFIG_BYTES_MAX // MIB} MiB, so it is no configuration", hint=_HINT)
    try:
        return parse_config(data.decode())
    except (UsageError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}", hint=_HINT, path=str(file)) from error


def parse_config(text: str) -> Config:
    """A configuration from TOML text. Raises UsageError naming section, key and fault."""
    try:
        return Config.model_validate(_with_other_names(tomllib.loads(text)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"not valid TOML: {error}", hint=_HINT) from error
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise UsageError(_fault(first) + more, hint=_HINT) from error


def _with_other_names(tables: dict[str, Any]) -> dict[str, Any]:
    """`[backend] factory` is another name of `[compute] factory`."""
    match tables:
        case {"backend": {"factory": factory, **others}} if not others:
            compute = tables.get("compute", {})
            if not isinstance(compute, dict):
                return tables
            if compute.setdefault("factory", factory) != factory:
                raise UsageError("[backend] factory is another name of [compute] factory, which differs; keep one")
            return {name: table for name, table in tables.items() if name != "backend"} | {"compute": compute}
    return tables


_PLAIN_WORDS = {
    "Input should": "must",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid ": "a ",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
}
_SAY_THE_VALUE = ("hours",)  # in their own words
_SECRETS = ("keys",)
_HINT = "`swarmnode config --default` prints every key with its meaning."


def _fault(error: Any) -> str:
    section, *rest = (str(part) for part in error["loc"])
    known = Config.model_fields
    if error["type"] == "extra_forbidden":
        if not rest:
            return f"[{section}] is no known section{_nearest(section, known)}"
        table = type(getattr(Config(), section)).model_fields
        return f"[{section}] {rest[0]} is no known key{_nearest(rest[0], table)}"
    reason = error["msg"].removeprefix("Value error, ")
    for theirs, ours in _PLAIN_WORDS.items():
        reason = reason.replace(theirs, ours)
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"[{section}] must be a table of keys"
    if not rest:
        return f"[{section}] {reason}"
    if rest[0] in _SECRETS + _SAY_THE_VALUE:
        return f"[{section}] {rest[0]} {reason}"
    return f"[{section}] {rest[0]} {reason}, not {repr(error['input'])[:_INPUT_CHARS_MAX]}"


def _nearest(name: str, known: Any) -> str:
    (match,) = difflib.get_close_matches(name, known, n=1) or ("",)
    return f"; did you mean {match}?" if match else f"; known are {', '.join(known)}"


def default_text() -> str:
    """The default configuration as TOML, each key under a comment that says what it means."""
    config = Config()
    lines = _comment("swarmnode's configuration. Every value here is the default; leave out what you do not change.")
    for section in type(config).model_fields:
        table = getattr(config, section)
        lines += ["", "", *_comment(table.__doc__), f"[{section}]"]
        for key, field in type(table).model_fields.items():
            lines += ["", *_comment(str(field.description)), f"{key} = {_toml(getattr(table, key))}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _toml(value: object) -> str:
    # JSON's strings, numbers and booleans are TOML's too, and so are arrays of them.
    return json.dumps(list(value) if isinstance(value, tuple) else value)
