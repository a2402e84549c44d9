"""Every kernel against every other on the same products: `swarmctl kernels compare`.

Each target computes each product once, at several batch widths; the worst width of a pair counts. Two targets whose
results have the same bits at every width do the same arithmetic, as far as this product tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, Final

from backends.experts import F32
from backends.gguf_types import GGML_TYPES
from backends.llama import start_library
from backends.probe_weights import WEIGHT_TYPES
from backends.variants import VARIANTS
from capabilities.equivalence import difference, worst
from capabilities.errors import KernelFailed, UnsupportedModel, UsageError
from swarmnode.equivalence.figures import short
from swarmnode.equivalence.recipes import TYPES, Operator, Recipe, compute
from swarmnode.equivalence.targets import EXACT, ROUNDED, Target, find_target
from swarmnode.kernels.store import is_built

_KNOWN: Final = tuple(GGML_TYPES[kind].name for kind in WEIGHT_TYPES)

Progress = Callable[[str, int, int], None]

INSTALLED: Final = "ggml-cpu"
LENGTH: Final = 2048  # of sums: a usual model's width
WIDTHS: Final = (1, 33, 128)  # one row, and on both sides of the limits at which GPUs change kernels
_UNTYPED: Final[tuple[tuple[Operator, int], ...]] = (("swiglu", 256), ("softmax", 4096), ("rms_norm", 4096))


def usual_targets() -> list[str]:
    """The installed kernels, every built one that runs here, and both references."""
    here = [variant for variant in VARIANTS if is_built(variant) and not variant.missing()]
    asked = [f"{variant.target}:f32" for variant in here if not variant.is_cpu]
    return [INSTALLED, *(variant.target for variant in here), *asked, ROUNDED, EXACT]


def compare_all(names: Sequence[str], types: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Compare all pairs; the result is what `--json` prints. `types`: of weights, by ggml's names; empty: the usual.

    Raises:
        UsageError: a target is not there, there is only one, or no such type of weights.
    """
    if len(set(names)) < 2:
        raise UsageError("kernels are compared with each other: name two targets or more, or none for all")
    if unknown := [kind for kind in types if kind not in _KNOWN]:
        raise UsageError(f"there are no weights of type {unknown[0]!r}", hint=f"Choose from: {', '.join(_KNOWN)}.")
    start_library()
    recipes = [Recipe("matmul", kind, LENGTH, WIDTHS) for kind in types or TYPES]
    if not types:
        recipes += [Recipe(op, "", length, WIDTHS) for op, length in _UNTYPED]
    targets = [find_target(name) for name in names]
    results: dict[str, dict[str, list[F32]]] = {name_of(recipe): {} for recipe in recipes}
    failed: list[dict[str, str]] = []
    for done, target in enumerate(targets):
        progress(target.name, done, len(targets))
        for recipe in recipes:
            try:
                found = _computed(target, recipe)
            except KernelFailed as error:  # a driver that dies over one operator may know the others
                failed.append({"target": target.name, "operator": name_of(recipe), "reason": error.message})
                continue
            if found is not None:
                results[name_of(recipe)][target.name] = found
    return {
        "targets": list(names),
        "failed": failed,
        "operators": [
            {"op": recipe.op, "type": recipe.type or None, "length": recipe.length, "pairs": _pairs(results[name])}
            for recipe, name in ((recipe, name_of(recipe)) for recipe in recipes)
        ],
    }


def name_of(recipe: Recipe) -> str:
    return recipe.type or recipe.op


def _computed(target: Target, recipe: Recipe) -> list[F32] | None:
    """None where the target does not know the weights' type, or no such operator."""
    if recipe.op in ("softmax", "rms_norm") and target.rows is None:
        return None
    try:
        return compute(recipe, target.make, target.rows)
    except UnsupportedModel:
        return None


def _pairs(results: Mapping[str, Sequence[F32]]) -> list[dict[str, Any]]:
    """Of each pair how far `a` is from `b`: the references come last, so they are what others are measured by."""
    return [
        {
            "a": a,
            "b": b,
            **asdict(worst([difference(base, other) for base, other in zip(results[b], results[a], strict=True)])),
        }
        for a, b in combinations(results, 2)
    ]


def tables(result: Mapping[str, Any], base: str) -> str:
    """The result in Markdown: everybody's distance to `base`, and a matrix of pairs for each operator."""
    operators = result["operators"]
    heads = [operator["type"] or operator["op"] for operator in operators]
    lines = [f"Against {base}: largest difference / relative L2 / smallest cosine of a row", ""]
    lines += [_row(["", *heads]), _row(["---"] * (len(heads) + 1))]
    for name in result["targets"]:
        if name != base:
            lines.append(_row([name, *(_cell(operator, name, base) for operator in operators)]))
    lines += [f"\n{each['target']} failed over {each['operator']}: {each['reason']}" for each in result["failed"]]
    for head, operator in zip(heads, operators, strict=True):
        classes = _classes(operator, result["targets"])
        alike = "; ".join(f"{first} stands for {', '.join(others)}" for first, *others in classes if others)
        names = [first for first, *_ in classes]
        lines += ["", f"{head}: relative L2 of each pair{f' ({alike}: the same bits)' * bool(alike)}", ""]
        lines += [_row(["", *names]), _row(["---"] * (len(names) + 1))]
        lines += [_row([a, *(_short(_pair(operator, a, b)) if a != b else "" for b in names)]) for a in names]
    return "\n".join(lines)


def _classes(operator: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    """Targets that gave the same bits, in the order of `names`."""
    classes: list[list[str]] = []
    for name in names:
        for known in classes:
            pair = _pair(operator, known[0], name)
            if pair is not None and pair["bit_identical"]:
                known.append(name)
                break
        else:
            classes.append([name])
    return classes


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(operator: Mapping[str, Any], a: str, b: str) -> Mapping[str, Any] | None:
    return next((pair for pair in operator["pairs"] if {pair["a"], pair["b"]} == {a, b}), None)


def _short(pair: Mapping[str, Any] | None) -> str:
    if pair is None:
        return "-"
    return "same" if pair["bit_identical"] else short(pair["relative_l2"])


def _cell(operator: Mapping[str, Any], a: str, b: str) -> str:
    pair = _pair(operator, a, b)
    if pair is None or pair["bit_identical"]:
        return _short(pair)
    return f"{short(pair['max_abs_diff'])} / {short(pair['relative_l2'])} / {pair['min_cosine']:.7f}"
