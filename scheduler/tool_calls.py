"""Calls of tools in an answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an answer makes: a name for it, the function's, and the arguments as JSON text."""

    id: str
    name: str
    arguments: str = field(repr=False)
