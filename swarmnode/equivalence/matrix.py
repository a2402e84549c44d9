"""`swarmctl equivalence --all`: every pair of the swarm's peers, in groups of one numeric class each.

A peer's operators are asked for once, several peers at a time, and every pair is compared by the same numbers. Levels
of whole models are compared pair by pair, since each pair computes its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from backends.llama import start_library
from capabilities.errors import SwarmError, UsageError
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.peers import PeerRow, Swarm
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.run import Effort, compare_models, levels_of_pair, verdict_of
from swarmnode.equivalence.splits import sizes_of
from swarmnode.equivalence.targets import Target, peer_target

Progress = Callable[[str, int, int], None]

PEERS_MIN: Final = 2
PEERS_MAX: Final = 32  # 496 pairs, and 8 MB of results a peer: more make no matrix that anybody reads
TOGETHER: Final = 4  # peers that are asked at a time, as many as a backbone peer passes requests on for


def run_matrix(
    swarm: Swarm,
    *,
    levels: Sequence[str],
    model: Callable[[], Path],
    own_model: bool,
    effort: Effort,
    progress: Progress,
) -> dict[str, Any]:
    """Compare all peers that are there with each other; the result is what `--all --json` prints.

    Raises:
        UsageError: there are too few peers, or too many.
        SwarmError: the model cannot be used.
    """
    start_library()
    there = sorted((row for row in swarm.peers if row.is_there), key=_by_class)
    if not PEERS_MIN <= len(there) <= PEERS_MAX:
        raise UsageError(f"{len(there)} peers are there, and {PEERS_MIN} to {PEERS_MAX} can be compared")
    sizes = sizes_of(model()) if own_model else Sizes()
    targets = [peer_target(swarm, row, sizes) for row in there]
    if "op" in levels:
        _ask_all(targets, sizes, progress)
    pairs = list(_pairs(targets, sizes, levels, model, effort, progress))
    return {
        "pass": verdict_of(pair["pass"] for pair in pairs),
        "peers": [_peer(row) for row in there],
        "absent": [row.name for row in swarm.peers if not row.is_there],
        "groups": list(_groups(there)),
        "model": next((pair["model"] for pair in pairs if pair["model"]), None),
        "pairs": pairs,
    }


def _by_class(row: PeerRow) -> tuple[bool, str, str]:
    return row.numeric_class is None, row.numeric_class or "", row.name


def _peer(row: PeerRow) -> dict[str, Any]:
    return {"name": row.name, "peer_id": row.peer_id, "numeric_class": row.numeric_class, "fitness": row.fitness}


def _groups(rows: Sequence[PeerRow]) -> Iterator[dict[str, Any]]:
    """Peers of one class; those whose class is not known are a group of their own."""
    for name in dict.fromkeys(row.numeric_class for row in rows):
        yield {"numeric_class": name, "peers": [row.peer_id for row in rows if row.numeric_class == name]}


def _ask_all(targets: Sequence[Target], sizes: Sizes, progress: Progress) -> None:
    """Have every peer compute its operators. What it refuses is remembered, and told for each pair."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        asked = [pool.submit(_ask, target, sizes) for target in targets]
        for done, each in enumerate(asked):
            progress("operators of all peers", done, len(asked))
            each.result()


def _ask(target: Target, sizes: Sizes) -> None:
    assert target.afar is not None
    for kind in ("", *sizes.types):
        with suppress(SwarmError):  # whoever compares by it hears it again
            target.afar.fetch(kind)


def _pairs(
    targets: Sequence[Target],
    sizes: Sizes,
    levels: Sequence[str],
    model: Callable[[], Path],
    effort: Effort,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    every = list(combinations(targets, 2))
    for done, (a, b) in enumerate(every):

        def op_of_pair(a: Target = a, b: Target = b) -> list[dict[str, Any]]:
            return [op_level(a, b, sizes, _quiet)]

        progress("pairs", done, len(every))
        found = levels_of_pair(a, b, ("op",), op_of_pair) if "op" in levels else []
        of_models = compare_models(a, b, levels, model, effort, progress)
        found += of_models.levels
        yield {
            "a": _id(a),
            "b": _id(b),
            "pass": verdict_of(level["pass"] for level in found),
            "model": None if of_models.file is None else of_models.file.name,
            "experts": of_models.shares,
            "in_class": _in_class(_row(a), _row(b), found),
            "levels": found,
        }


def _in_class(a: PeerRow, b: PeerRow, levels: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far a pair is apart in what numeric classes are of: products over their weight types, and the gated unit.

    None where one has no class, they are of different types, or one of these was not compared.
    """
    ops: list[dict[str, Any]] = next((level["ops"] for level in levels if level.get("ops")), [])
    rows = [row for row in ops if row["op"] == "swiglu" or (row["op"] == "matmul" and row["type"] in a.types)]
    known = a.numeric_class and b.numeric_class and a.types and set(a.types) == set(b.types)
    if not known or {row["type"] for row in rows if row["type"]} != set(a.types):
        return None
    same = all(row["bit_identical"] for row in rows)
    return {
        "types": sorted(a.types),
        "bit_identical": same,
        "relative_l2": max(row["relative_l2"] for row in rows),
        "contradicted": a.numeric_class == b.numeric_class and not same,
    }


def _id(target: Target) -> str:
    return _row(target).peer_id


def _row(target: Target) -> PeerRow:
    assert target.afar is not None
    return target.afar.row


def _quiet(_step: str, _done: int, _total: int) -> None:
    pass
