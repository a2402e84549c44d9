"""The text that models are compared on: openings of books and a speech that have long been in the public domain.

Austen, Pride and Prejudice (1813); Melville, Moby-Dick (1851); Lincoln, the Gettysburg Address (1863); Dickens, A Tale
of Two Cities (1859); Carroll, Alice's Adventures in Wonderland (1865). About 1,900 words: a text for comparing two
models with each other, token by token, and too short for a perplexity that would mean anything by itself.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

FILE: Final = "public_domain.txt"


def bundled_text() -> str:
    return files("swarmnode.equivalence").joinpath(FILE).read_text(encoding="utf-8")
