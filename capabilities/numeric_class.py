"""The words for numeric classes: what was measured with, and what came of it, in one word that peers compare.

A class is a hash, of which the last characters tell what was computed: weight types, widths, versions. Two classes of
different work say nothing about each other. Where the work is the same, equal words mean equal bits, until shown
otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

CLASS_CHARS: Final = 32  # in hex: 96 bits of a hash, and those of the work
TRUNK_KERNELS: Final = "ggml-cpu"  # the backend whose kernels run trunks, a leader's probes and llama.cpp undivided
WORK_CHARS: Final = 8  # of what was computed: a few kinds of work meet in one swarm, so 32 bits do


def named(work: str, digest: str) -> str:
    """The word for a fingerprint, `digest` in hex, that was taken of this work."""
    return digest[: CLASS_CHARS - WORK_CHARS] + hashlib.sha256(work.encode()).hexdigest()[:WORK_CHARS]


def joined(classes: Iterable[tuple[str, str]]) -> str:
    """One word for (weight type, class) of several types, whatever their order; "" for none, or if one has no class."""
    each = sorted(classes)
    if not each or not all(word for _, word in each):
        return ""
    work = repr([(weight, word[-WORK_CHARS:]) for weight, word in each])
    return named(work, hashlib.sha256(repr(each).encode()).hexdigest())


def shown_different(one: str | None, other: str | None) -> bool:
    """Whether two classes are of the same work, and not equal. False where nothing is known, and where that differs."""
    if not one or not other:
        return False
    return one != other and work_of(one) == work_of(other)


def work_of(word: str) -> str:
    """What a class was measured with, in a word."""
    return word[-WORK_CHARS:]
