"""Reading the documents: their prose, code blocks, words in backquotes, sections and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent


class Document(NamedTuple):
    """`blocks`: its code blocks. `spans`: words in backquotes, each on one line. `prose`: all but the blocks."""

    path: Path
    text: str
    prose: str
    blocks: list[str]
    spans: list[str]


def read(path: Path) -> Document:
    text = path.read_text()
    prose: list[str] = []
    blocks: list[list[str]] = []
    inside = fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            inside, fenced = False, not fenced
        # Four spaces also continue an item of a list: an indented block follows an empty line.
        elif fenced or (line.startswith("    ") and (inside or not prose or not prose[-1])):
            if not inside:
                blocks.append([])
            inside = True
            blocks[-1].append(line if fenced else line[4:])
        else:
            inside = False
            prose.append(line)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(prose))]
    return Document(path, text, "\n".join(prose), ["\n".join(block) for block in blocks], spans)


DOCUMENTS: Final = {path.name: read(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def section(name: str, heading: str) -> str:
    """A document's text under one heading, up to the next one of its level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", DOCUMENTS[name].text, re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no section {heading}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in `text`."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def first_codes(text: str) -> list[str]:
    """What stands in backquotes in the first column of the tables in `text`."""
    return [code for cells in rows(text) for code in re.findall(r"^`([^`]+)`$", cells[0])]
