"""What models are asked to read: a text of 100,000 tokens, and questions with one right answer of four.

The text is in the public domain everywhere: openings of books and a speech (Austen, Pride and Prejudice, 1813;
Melville, Moby-Dick, 1851; Lincoln, the Gettysburg Address, 1863; Dickens, A Tale of Two Cities, 1859; Carroll, Alice's
Adventures in Wonderland, 1865), and after them all of Austen's Persuasion (1817). The novel's text was taken from
Debian's package r-cran-janeaustenr, version 1.0.0-1, whose title page and closing word are left out and whose lines are
joined to paragraphs. The questions were written for this program.
"""

from __future__ import annotations

import lzma
from importlib.resources import files
from typing import Final

PASSAGES: Final = "public_domain.txt"
NOVEL: Final = "persuasion.txt.xz"
QUESTIONS: Final = "questions.txt"  # in each line a question, the right answer, and three that are wrong


def bundled_text() -> str:
    """The passages, then the novel."""
    novel = lzma.decompress(files("swarmnode.equivalence").joinpath(NOVEL).read_bytes()).decode("utf-8")
    return f"{bundled_passages()}\n{novel}"


def bundled_passages() -> str:
    """Of several books, for prompts: about 1,900 words."""
    return files("swarmnode.equivalence").joinpath(PASSAGES).read_text(encoding="utf-8")


def bundled_questions() -> list[tuple[str, tuple[str, ...]]]:
    """Questions and their four answers each, the right one first."""
    lines = files("swarmnode.equivalence").joinpath(QUESTIONS).read_text(encoding="utf-8").splitlines()
    parted = [[part.strip() for part in line.split("|")] for line in lines]
    return [(question, tuple(answers)) for question, *answers in parted]
