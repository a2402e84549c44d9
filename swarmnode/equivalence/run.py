"""`swarmctl equivalence A B`: all six levels of two targets, or those that were asked for.

Where a side is a peer, a level may not be to be had: the peer holds no experts, is busy, or there is no model here. The
report then says so and passes no judgement (`pass` is None), and the other levels go on. So they do where kernels fail
again and again, which is a failure of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.llama import start_library
from capabilities.equivalence import LEVELS
from capabilities.errors import KernelFailed, NoDaemon, PeerMistake, SwarmError, UsageError
from swarmnode.equivalence.answers import generation
from swarmnode.equivalence.divergence import add_divergence
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.passes import LEVELS as LEVELS_OF_PASSES
from swarmnode.equivalence.passes import pass_through
from swarmnode.equivalence.peers import Swarm, no_swarm
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.splits import Split, sizes_of, split_model
from swarmnode.equivalence.targets import Target, find_target
from swarmnode.equivalence.task import task
from swarmnode.equivalence.text import bundled_passages, bundled_text

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is compared. tokens: of the text; prompts, answer_tokens: of the level generation."""

    tokens: int
    prompts: int
    answer_tokens: int


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
    swarm: Callable[[], Swarm] = no_swarm,
) -> dict[str, Any]:
    """Compare; the result is what `--json` prints.

    model: makes or finds the model's file, and is called only if a level needs one. own_model: whether the level op
    takes its weight types and lengths from it, too. swarm: who is asked for peers.

    Raises:
        SwarmError: a target or the model cannot be used.
    """
    start_library()
    known = sizes_of(model()) if own_model and "op" in levels else Sizes()
    one, other = find_target(a, swarm, known), find_target(b, swarm, known)
    effort = Effort(tokens, prompts, answer_tokens)
    found: list[dict[str, Any]] = []
    if "op" in levels:
        found += levels_of_pair(one, other, ("op",), lambda: [op_level(one, other, known, progress)])
    of_models = compare_models(one, other, levels, model, effort, progress)
    found += of_models.levels
    file = model() if own_model else of_models.file
    return {
        "a": a,
        "b": b,
        "model": None if file is None else file.name,
        "pass": verdict_of(level["pass"] for level in found),
        "fitness": {"a": fitness_of(one), "b": fitness_of(other)},
        "experts": of_models.shares,
        "restarts": {"a": one.restarts.reasons, "b": other.restarts.reasons},
        "levels": sorted(found, key=lambda level: LEVELS.index(level["level"])),
    }


def fitness_of(target: Target) -> str | None:
    """What the leader holds of a peer's work. None of what is no peer, or not known."""
    return None if target.afar is None else target.afar.row.fitness


def verdict_of(passes: Iterable[bool | None]) -> bool | None:
    """False if anything failed, else True if anything passed; None if nothing was judged."""
    seen = set(passes)
    return False if False in seen else True if True in seen else None


def levels_of_pair(
    a: Target, b: Target, names: Sequence[str], compute: Callable[[], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What `compute` gives, or levels that say why they are missing, where a peer or kernels are the reason."""
    found: list[dict[str, Any]] = []
    try:
        found.extend(compute())  # what came before an error stays
    except (UsageError, NoDaemon):
        raise
    except SwarmError as error:
        here = a.afar is None and b.afar is None
        if here and not isinstance(error, KernelFailed):
            raise
        # Kernels that end, and bytes that are no answer, are a side's fault; all else says nothing of its numbers.
        passed = False if here or isinstance(error, PeerMistake) else None
        known = [level["level"] for level in found]
        missing = [name for name in names if name not in known]
        found += [{"level": name, "pass": passed, "reason": error.message, "tolerance": None} for name in missing]
    return found


@dataclass(eq=False)
class OfModels:
    """The levels of whole models, the file that they were compared on, and what peers computed of it."""

    levels: list[dict[str, Any]]
    file: Path | None
    shares: dict[str, Any]


def compare_models(
    a: Target,
    b: Target,
    levels: Sequence[str],
    model: Callable[[], Path],
    effort: Effort,
    progress: Progress,
) -> OfModels:
    """All wanted levels but op, on one model.

    Raises:
        SwarmError: see `run_equivalence`; not for what a peer cannot do.
    """
    wanted = [level for level in LEVELS if level in levels and level != "op"]
    found = OfModels([], None, _no_shares())

    def compute() -> Iterator[dict[str, Any]]:
        found.file = model()
        with split_model(found.file, a, b, progress) as split:
            try:
                yield from _levels(split, wanted, effort, progress)
            finally:
                for side, share in zip("ab", split.shares, strict=True):
                    found.shares[side] = None if share is None else share.figures()

    if wanted:
        found.levels = levels_of_pair(a, b, wanted, compute)
    return found


def _levels(split: Split, wanted: Sequence[str], effort: Effort, progress: Progress) -> Iterator[dict[str, Any]]:
    text = bundled_text()
    if of_text := [level for level in wanted if level in LEVELS_OF_PASSES]:
        for level in pass_through(split, text, effort.tokens, progress).levels(of_text):
            yield add_divergence(level, split, text) if level["level"] == "layer" else level
    if "generation" in wanted:
        yield generation(split, bundled_passages(), effort.prompts, effort.answer_tokens, progress)
    if "task" in wanted:
        yield task(split, text, effort.tokens, progress)


def _no_shares() -> dict[str, Any]:
    return {"a": None, "b": None}
