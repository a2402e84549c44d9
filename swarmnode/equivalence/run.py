"""`swarmctl equivalence A B`: all six levels of two targets, or those that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.llama import start_library
from capabilities.equivalence import LEVELS
from swarmnode.equivalence.answers import generation
from swarmnode.equivalence.ops import Sizes, op_level
from swarmnode.equivalence.passes import LEVELS as LEVELS_OF_PASSES
from swarmnode.equivalence.passes import pass_through
from swarmnode.equivalence.splits import sizes_of, split_model
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.task import task
from swarmnode.equivalence.text import bundled_text

Progress = Callable[[str, int, int], None]


def run_equivalence(
    a: str,
    b: str,
    *,
    levels: Sequence[str] = LEVELS,
    model: Callable[[], Path],
    own_model: bool,
    tokens: int,
    prompts: int,
    answer_tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Compare; the result is what `--json` prints.

    model: makes or finds the model's file, and is called only if a level needs one. own_model: whether the level op
    takes its weight types and lengths from it, too.

    Raises:
        SwarmError: a target or the model cannot be used.
    """
    start_library()
    one, other = find_target(a), find_target(b)
    of_model = [level for level in LEVELS if level in levels and level != "op"]
    file = model() if of_model or own_model else None
    found: list[dict[str, Any]] = []
    if "op" in levels:
        sizes = sizes_of(file) if file is not None and own_model else Sizes()
        found.append(op_level(one, other, sizes, progress))
    if of_model and file is not None:
        text = bundled_text()
        with split_model(file, one, other, progress) as split:
            if wanted := [level for level in of_model if level in LEVELS_OF_PASSES]:
                found += pass_through(split, text, tokens, progress).levels(wanted)
            if "generation" in of_model:
                found.append(generation(split, text, prompts, answer_tokens, progress))
            if "task" in of_model:
                found.append(task(split, text, tokens, progress))
    found.sort(key=lambda level: LEVELS.index(level["level"]))
    return {
        "a": a,
        "b": b,
        "model": None if file is None else file.name,
        "pass": all(level["pass"] for level in found),
        "levels": found,
    }
