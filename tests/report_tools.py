"""What tests look for in a report: the keys of its JSON, and what its page holds."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any


def keys_of(value: Any, name: str = "") -> set[str]:
    if isinstance(value, Mapping):
        return set().union(*(keys_of(item, f"{name}.{key}" if name else key) for key, item in value.items()))
    if isinstance(value, list):
        return set().union({f"{name}[]"} if not value else set(), *(keys_of(item, f"{name}[]") for item in value))
    return {name}


class Tags(HTMLParser):
    """What a page holds, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
