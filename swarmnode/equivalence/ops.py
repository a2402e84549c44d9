"""The level op: single operators on the same rows and weights, the worst over batch widths.

A product is compared for every weight type and several lengths of its sums. Beside the pair's own difference stands how
far each side is from the exact product and from one whose activations were rounded as ggml's CPU kernels round them:
most of a CPU's distance to exact arithmetic is those eight bits. Each side must be near one of the two by itself, so
that the rounding of one side hides nothing of the other. What the difference comes from is told in causes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from backends.experts import F32
from backends.gguf_types import GGML_TYPES
from backends.probe_weights import WEIGHT_TYPES
from capabilities.equivalence import Difference, difference, worst
from capabilities.errors import UnsupportedModel
from capabilities.precision import Precision
from capabilities.tolerances import RowLimits, element_limits, product_limits, row_limits
from swarmnode.equivalence.causes import attribute
from swarmnode.equivalence.recipes import AFAR_WIDTHS, GATED_LENGTH, ROW_LENGTHS, ROW_OPERATORS, Recipe, Sizes
from swarmnode.equivalence.targets import EXACT, ROUNDED, Target, find_target

Progress = Callable[[str, int, int], None]


def op_level(a: Target, b: Target, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Compare two targets. `ops` of the result has a row for each operator; what a side cannot do is in `skipped`.

    Raises:
        UnsupportedModel: no weight type is known to both.
    """
    numbers = [kind for kind in WEIGHT_TYPES if GGML_TYPES[kind].name in sizes.types]
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for done, kind in enumerate(numbers):
        progress(f"op: products of {GGML_TYPES[kind].name}", done, len(numbers) + 1)
        try:
            rows += _products(a, b, kind, sizes)
        except UnsupportedModel as error:
            skipped.append(f"matmul {GGML_TYPES[kind].name}: {error.message}")
    if not rows:
        raise UnsupportedModel(f"{a.name} and {b.name} share no weight type: {'; '.join(skipped)}")
    progress("op: single values and rows", len(numbers), len(numbers) + 1)
    rows.append(_gated(a, b, sizes))
    if a.computes_rows and b.computes_rows:
        rows += _rows(a, b, sizes)
    else:
        skipped.append("softmax, rms_norm: a backend of experts alone computes neither")
    skipped += [f"matmul {name}: weights of this type cannot be made up" for name in sizes.types if not _is_known(name)]
    failed = [row for row in rows if not row["pass"]]
    return {
        "level": "op",
        "pass": not failed,
        "tolerance": "in each row: it grows with the length of the sums and with what activations are rounded to",
        "reason": f"{len(failed)} of {len(rows)} operators, first {_reason(failed[0])}" if failed else _within(rows),
        "widths": list(sizes.widths),
        "references_apart": max((row["references_apart"] for row in rows if "references_apart" in row), default=None),
        "ops": rows,
        "skipped": skipped,
    }


def _is_known(name: str) -> bool:
    return name in {GGML_TYPES[kind].name for kind in WEIGHT_TYPES}


def _within(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where nothing failed: how near it was."""
    shares = [
        max(row[f"{which}_relative_l2"] / row["tolerance"][f"{which}_relative_l2"] for which in ("median", "worst"))
        for row in rows
    ]
    nearest = max(range(len(rows)), key=shares.__getitem__)
    what = f"nearest {_what(rows[nearest])}, at {shares[nearest]:.0%}"
    return f"all {len(rows)} operators are within their limits, {what}"


def _what(row: Mapping[str, Any]) -> str:
    return f"{' '.join(str(row[key]) for key in ('op', 'type') if row[key])} over {row['length']} values"


def _reason(row: Mapping[str, Any]) -> str:
    what = _what(row)
    for which in ("median", "worst"):
        found, limit = row[f"{which}_relative_l2"], row["tolerance"][f"{which}_relative_l2"]
        if found > limit:
            return f"{what}: the {which} row is off by {found:.2g}, with a limit of {limit:.2g}"
    alone = next(side for side, fine in row["alone"].items() if not fine)
    nearest = min(row["to_exact"][alone], row["to_rounded"][alone])
    return f"{what}: {alone.upper()} is {nearest:.2g} away from the nearest reference, more than its rounding explains"


# -- products ---------------------------------------------------------------------------------------------------------


def _products(a: Target, b: Target, kind: int, sizes: Sizes) -> Iterator[dict[str, Any]]:
    sides = [("a", a), ("b", b)]
    weights = GGML_TYPES[kind]
    measured = {side: target.precision(weights.name) for side, target in sides}
    for length in sizes.lengths:
        recipe = Recipe("matmul", weights.name, length, sizes.widths)
        terms = recipe.values
        of_a, of_b = a.outputs(recipe), b.outputs(recipe)
        exact, rounded = (find_target(name).outputs(recipe) for name in (EXACT, ROUNDED))
        limits = product_limits(weights.name, weights.block, terms, measured["a"].source, measured["b"].source)
        row = _row(recipe, terms, of_a, of_b, limits)
        row["measured"] = {side: asdict(verdict) for side, verdict in measured.items()}
        row |= {"to_exact": {}, "to_rounded": {}, "alone": {}}
        row["references_apart"] = _difference(exact, rounded).relative_l2
        for side, outputs in (("a", of_a), ("b", of_b)):
            source = measured[side].source
            to_exact, to_rounded = _difference(exact, outputs), _difference(rounded, outputs)
            row["to_exact"][side], row["to_rounded"][side] = to_exact.relative_l2, to_rounded.relative_l2
            row["alone"][side] = to_rounded.within(
                product_limits(weights.name, weights.block, terms, source, source)
            ) or to_exact.within(product_limits(weights.name, weights.block, terms, source, Precision.F32))
        row["pass"] = row["pass"] and all(row["alone"].values())
        yield row | attribute(recipe, of_a, of_b, (a.setting, b.setting))


def _difference(a: Sequence[F32], b: Sequence[F32]) -> Difference:
    return worst([difference(one, other) for one, other in zip(a, b, strict=True)])


def _row(recipe: Recipe, length: int, of_a: Sequence[F32], of_b: Sequence[F32], limits: RowLimits) -> dict[str, Any]:
    at_width = [difference(one, other) for one, other in zip(of_a, of_b, strict=True)]
    found = worst(at_width)
    return {
        "op": recipe.op,
        "type": recipe.type or None,
        "length": length,
        "worst_width": recipe.widths[max(range(len(at_width)), key=lambda at: at_width[at].relative_l2)],
        "pass": found.within(limits),
        "tolerance": asdict(limits),
        **asdict(found),
    }


# -- what has no weights ----------------------------------------------------------------------------------------------


def _gated(a: Target, b: Target, sizes: Sizes) -> dict[str, Any]:
    recipe = Recipe("swiglu", "", GATED_LENGTH, sizes.widths)
    return _without_weights(a, b, recipe, element_limits())


def _rows(a: Target, b: Target, sizes: Sizes) -> Iterator[dict[str, Any]]:
    widths = sizes.widths if a.afar is None and b.afar is None else AFAR_WIDTHS
    for width in ROW_LENGTHS:
        for op in ROW_OPERATORS:
            recipe = Recipe(op, "", width, widths)
            yield _without_weights(a, b, recipe, row_limits(width))


def _without_weights(a: Target, b: Target, recipe: Recipe, limits: RowLimits) -> dict[str, Any]:
    of_a, of_b = a.outputs(recipe), b.outputs(recipe)
    row = _row(recipe, recipe.length, of_a, of_b, limits)
    return row | attribute(recipe, of_a, of_b, (a.setting, b.setting))
