"""`swarmctl verify`: an answer that was kept, beside the same request answered again and by llama.cpp undivided.

A request draws the same random numbers each time (its seed was kept), so the same model gives the same tokens. Equal
tokens from llama.cpp on the whole model, on this machine, prove an answer: nobody else had a part in them. Equal tokens
from the swarm alone only say that it repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from capabilities.errors import SwarmError
from capabilities.numeric_class import TRUNK_KERNELS, shown_different
from swarmnode.kept_requests import KeptRequest, token_hash

_CONTEXT_STEP: Final = 256  # llama.cpp rounds a context up to this
HEADROOM: Final = 1.1  # a model's file, and what llama.cpp needs beside it

Json = dict[str, Any]


def compared(kept: KeptRequest, tokens: Sequence[int] | None, reason: str | None) -> Json:
    """One side beside what was kept. `reason`: why there are no tokens."""
    if tokens is None:
        return {"completion_tokens": None, "token_hash": None, "first_difference": None, "reason": reason}
    return {
        "completion_tokens": len(tokens),
        "token_hash": token_hash(tokens),
        "first_difference": first_difference(kept.tokens, tokens),
        "reason": None,
    }


def first_difference(kept: Sequence[int], other: Sequence[int]) -> Json | None:
    """The first index at which two answers part, with both tokens; None where one of them has ended already."""
    if tuple(kept) == tuple(other):
        return None
    pairs = zip(kept, other, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(kept), len(other)))
    return {
        "index": index,
        "kept": kept[index] if index < len(kept) else None,
        "other": other[index] if index < len(other) else None,
    }


def kernels_differ(status: Mapping[str, Any], leader: str) -> bool:
    """Whether this machine's llama.cpp is known to have other bits than the leader's: their classes were measured, and
    are two. `status`: this node's."""
    own, its = (
        next((row["backends"][0] for row in status["peers"] if row["peer_id"] == peer and row["backends"]), None)
        for peer in (status["self"], leader)
    )
    if own is None or its is None or {own["name"], its["name"]} != {TRUNK_KERNELS}:
        return False  # what computes experts there is not what runs the trunk
    return shown_different(own["numeric_class"], its["numeric_class"])


def verdict(kept: KeptRequest, swarm: Json, undivided: Json, *, other_kernels: bool = False) -> Json:
    """The report. `verified` is true or false as llama.cpp alone says; where it could not be asked, false if the swarm
    does not repeat itself, else null. other_kernels: as `kernels_differ` says."""
    deciding = undivided if undivided["token_hash"] is not None else swarm
    differs = deciding["first_difference"] is not None
    return {
        **kept.summary(),
        "verified": False if differs else True if deciding is undivided else None,
        "swarm": swarm,
        "undivided": undivided,
        "reason": _reason(kept, swarm, undivided, other_kernels),
    }


def _reason(kept: KeptRequest, swarm: Json, undivided: Json, other_kernels: bool) -> str:
    again = swarm["first_difference"]
    if undivided["token_hash"] is None:
        if again is None:
            return f"llama.cpp was not asked: {undivided['reason']}"
        why = f"the swarm, asked again, gives another token at index {again['index']}"
        return f"{why}{_why_others(kept)}; llama.cpp was not asked: {undivided['reason']}"
    if (at := undivided["first_difference"]) is not None:
        why = f"llama.cpp on the undivided model gives another token at index {at['index']}{_why_others(kept)}"
        return f"{why}; this machine's kernels are of another numeric class than the leader's" if other_kernels else why
    proven = f"all {len(kept.tokens)} tokens are llama.cpp's own on the undivided model"
    return proven if again is None else f"{proven}; the swarm, asked again, gives another one at index {again['index']}"


def _why_others(kept: KeptRequest) -> str:
    """What is known of an answer whose tokens are not those of another computation."""
    why = ""
    if kept.mixed:
        why += "; peers of another numeric class than the leader's had computed a part of the answer"
    if kept.tainted:
        why += "; a peer that computed something else, and was found out, had a part in the answer"
    return why


def why_not_here(file: Path) -> str | None:
    """Why this machine cannot hold a model; None if it can. `file`: the first of a model in several files."""
    try:
        first = file.stat().st_size
    except OSError as error:
        return f"{file}: {error.strerror}"
    nbytes = sum(part.stat().st_size for part in _parts(file)) or first
    free = psutil.virtual_memory().available
    if nbytes * HEADROOM > free:
        return f"the model has {nbytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this machine's memory are free"
    return None


def _parts(file: Path) -> list[Path]:
    stem, of, count = file.stem.rpartition("-of-")
    if not of or not stem[-5:].isdigit():
        return [file]
    return list(file.parent.glob(f"{stem[:-5]}*-of-{count}{file.suffix}"))


def undivided_tokens(kept: KeptRequest, file: Path, prompt_tokens: int) -> tuple[int, ...]:
    """What llama.cpp alone answers, as far as the kept answer goes. Takes as long as the answer took on one thread.

    Raises:
        SwarmError: what the request or llama.cpp runs into.
    """
    from swarmnode.undivided import Undivided

    ask, count = kept.ask, len(kept.tokens)
    if kept.finish_reason in ("length", "error"):  # it was cut off where it stands
        ask = replace(ask, max_tokens=count)
    needed = prompt_tokens + count + 1
    context = -(-needed // _CONTEXT_STEP) * _CONTEXT_STEP
    undivided = Undivided(file, context_tokens=context)
    try:
        return undivided.answer(ask).tokens
    finally:
        undivided.close()


def asked_undivided(kept: KeptRequest, file: Path | None, reason: str | None, prompt_tokens: int) -> Json:
    """llama.cpp's side of the report."""
    if file is None or (reason := why_not_here(file)) is not None:
        return compared(kept, None, reason)
    try:
        return compared(kept, undivided_tokens(kept, file, prompt_tokens), None)
    except SwarmError as error:
        return compared(kept, None, error.message)
