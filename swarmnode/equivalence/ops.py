"""The level op: single operators on the same rows and weights, the worst over batch widths.

A product is compared for every weight type and several lengths of its sums. Beside the pair's own difference stands how
far each side is from the exact product and from one whose activations were rounded as ggml's CPU kernels round them:
most of a CPU's distance to exact arithmetic is those eight bits. Each side must be near a reference by itself, so that
the rounding of one side hides nothing of the other; how each one rounds is read off its rows (roundings.py). What the
difference comes from is told in causes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from backends.experts import F32
from backends.gguf_types import GGML_TYPES
from backends.probe_weights import WEIGHT_TYPES
from capabilities.equivalence import Difference, difference, number, worst
from capabilities.errors import UnsupportedModel
from capabilities.precision import Precision
from capabilities.tolerances import RowLimits, gated_limits, row_limits
from swarmnode.equivalence.causes import attribute
from swarmnode.equivalence.recipes import AFAR_WIDTHS, GATED_LENGTH, ROW_LENGTHS, ROW_OPERATORS, Recipe, Sizes
from swarmnode.equivalence.roundings import Shown, limits_of, shown_by
from swarmnode.equivalence.targets import EXACT, ROUNDED, Target, find_target

Progress = Callable[[str, int, int], None]

TOLERANCE: Final = (
    "on the relative L2 of the median row and of the worst: it grows with the length of the sums, and with what both "
    "sides' own rows show that activations are rounded to"
)


def op_level(a: Target, b: Target, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Compare two targets. `ops` of the result has a row for each operator; what a side cannot do is in `skipped`.

    Raises:
        UnsupportedModel: no weight type is known to both.
    """
    numbers = [kind for kind in WEIGHT_TYPES if GGML_TYPES[kind].name in sizes.types]
    found: list[_Found] = []
    skipped: list[str] = []
    for done, kind in enumerate(numbers):
        progress(f"op: products of {GGML_TYPES[kind].name}", done, len(numbers) + 1)
        try:
            found += _products(a, b, GGML_TYPES[kind].name, sizes)
        except UnsupportedModel as error:
            skipped.append(f"matmul {GGML_TYPES[kind].name}: {error.message}")
    if not found:
        raise UnsupportedModel(f"{a.name} and {b.name} share no weight type: {'; '.join(skipped)}")
    progress("op: single values and rows", len(numbers), len(numbers) + 1)
    found.append(_gated(a, b, sizes, found))
    if a.computes_rows and b.computes_rows:
        found += _rows(a, b, sizes)
    else:
        skipped.append("softmax, rms_norm: a backend of experts alone computes neither")
    skipped += [f"matmul {name}: weights of this type cannot be made up" for name in sizes.types if not _is_known(name)]
    rows = [each.row for each in found]
    failed = [row for row in rows if not row["pass"]]
    return {
        "level": "op",
        "pass": not failed,
        "tolerance": {"text": TOLERANCE, "limits": [limits for each in found for limits in each.limits]},
        "reason": f"{len(failed)} of {len(rows)} operators, first {failed[0]['reason']}" if failed else _within(rows),
        "widths": list(sizes.widths),
        "references_apart": max((row["references_apart"] for row in rows if "references_apart" in row), default=None),
        "ops": rows,
        "skipped": skipped,
    }


def _is_known(name: str) -> bool:
    return name in {GGML_TYPES[kind].name for kind in WEIGHT_TYPES}


def _within(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where nothing failed: how near it was."""
    nearest = max(rows, key=lambda row: row["limit_share"])
    what = f"nearest {what_of(nearest)}, at {nearest['limit_share']:.0%}"
    return f"all {len(rows)} operators are within their limits, {what}"


def what_of(row: Mapping[str, Any]) -> str:
    """An operator in words."""
    return f"{' '.join(str(row[key]) for key in ('op', 'type') if row[key])} over {row['length']} values"


@dataclass(frozen=True, slots=True)
class _Found:
    """One operator. row: of the report; limits: of its tolerance, one for batch widths that share one."""

    row: dict[str, Any]
    limits: list[dict[str, Any]]


# -- products ---------------------------------------------------------------------------------------------------------


def _products(a: Target, b: Target, kind: str, sizes: Sizes) -> Iterator[_Found]:
    said = {side: asdict(target.precision(kind)) for side, target in (("a", a), ("b", b))}
    for length in sizes.lengths:
        recipe = Recipe("matmul", kind, length, sizes.widths)
        outputs = {"a": a.outputs(recipe), "b": b.outputs(recipe)}
        exact, rounded = (find_target(name).outputs(recipe) for name in (EXACT, ROUNDED))
        shown = {
            side: [shown_by(recipe, each, at) for at, each in enumerate(results)] for side, results in outputs.items()
        }
        pairs = list(zip(shown["a"], shown["b"], strict=True))
        limits = [limits_of(recipe, *pair) for pair in pairs]
        sources = [{side: each.rounding.source.value for side, each in zip("ab", pair, strict=True)} for pair in pairs]
        found = _compared(recipe, recipe.values, (outputs["a"], outputs["b"]), limits, sources)
        row = found.row
        row["measured"] = said
        row["references_apart"] = _difference(exact, rounded).relative_l2
        row["to_exact"] = {side: _difference(exact, results).relative_l2 for side, results in outputs.items()}
        row["to_rounded"] = {side: _difference(rounded, results).relative_l2 for side, results in outputs.items()}
        row["alone"] = {side: all(each.fits for each in of_side) for side, of_side in shown.items()}
        row["pass"] = row["pass"] and all(row["alone"].values())
        row["reason"] = row["reason"] or _alone(recipe, row, shown)
        yield _Found(row | attribute(recipe, outputs["a"], outputs["b"], (a.setting, b.setting)), found.limits)


def _alone(recipe: Recipe, row: Mapping[str, Any], shown: Mapping[str, Sequence[Shown]]) -> str | None:
    """Why a side fails by itself."""
    for side, of_side in shown.items():
        for width, each in zip(recipe.widths, of_side, strict=True):
            if not each.fits:
                left = each.left.median_relative_l2
                return (
                    f"{what_of(row)}: {side.upper()} is {left:.2g} away from the nearest reference in batches of "
                    f"{width} rows, more than its rounding explains"
                )
    return None


def _difference(a: Sequence[F32], b: Sequence[F32]) -> Difference:
    return worst([difference(one, other) for one, other in zip(a, b, strict=True)])


def _compared(
    recipe: Recipe,
    length: int,
    results: tuple[Sequence[F32], Sequence[F32]],
    limits: Sequence[RowLimits],
    sources: Sequence[Mapping[str, str]] | None = None,
) -> _Found:
    """A and B at each batch width within that width's limits. sources: what both sides round to there."""
    at_width = [difference(one, other) for one, other in zip(*results, strict=True)]
    shares = [max(shares_of(found, limit)) for found, limit in zip(at_width, limits, strict=True)]
    nearest = max(range(len(shares)), key=shares.__getitem__)
    row = {"op": recipe.op, "type": recipe.type or None, "length": length}
    fits = all(found.within(limit) for found, limit in zip(at_width, limits, strict=True))
    reason = None if fits else _over(row, recipe.widths[nearest], at_width[nearest], limits[nearest])
    groups: dict[str, dict[str, Any]] = {}
    for at, (width, limit) in enumerate(zip(recipe.widths, limits, strict=True)):
        source = {"a": None, "b": None} if sources is None else sources[at]
        group = {**row, "widths": [], "source": source, **asdict(limit)}
        groups.setdefault(repr(group), group)["widths"].append(width)
    found = {
        **row,
        "worst_width": recipe.widths[nearest],
        "pass": fits,
        "reason": reason,
        "limit_share": number(shares[nearest]),
        "tolerance": asdict(limits[nearest]),
        **asdict(worst(at_width)),
    }
    return _Found(found, list(groups.values()))


def shares_of(found: Difference, limits: RowLimits) -> tuple[float, float]:
    """Of its limit that each figure takes: the median row's, and the worst one's."""
    return found.median_relative_l2 / limits.median_relative_l2, found.worst_relative_l2 / limits.worst_relative_l2


def _over(row: Mapping[str, Any], width: int, found: Difference, limits: RowLimits) -> str:
    median, worst_row = shares_of(found, limits)
    which, off, limit = (
        ("median", found.median_relative_l2, limits.median_relative_l2)
        if median > 1 or median > worst_row
        else ("worst", found.worst_relative_l2, limits.worst_relative_l2)
    )
    batches = f"in batches of {width} rows"
    return f"{what_of(row)}: the {which} row is off by {off:.2g} {batches}, with a limit of {limit:.2g}"


# -- what has no weights ----------------------------------------------------------------------------------------------


def _gated(a: Target, b: Target, sizes: Sizes, products: Sequence[_Found]) -> _Found:
    """What a backend of experts computes value by value lies between products with F32 weights of one."""
    recipe = Recipe("swiglu", "", GATED_LENGTH, sizes.widths)
    sources = {
        width: limits["source"]
        for found in products
        for limits in found.limits
        if limits["type"] == "f32"
        for width in limits["widths"]
    }
    exact = {"a": Precision.F32.value, "b": Precision.F32.value}
    at_width = [sources.get(width, exact) for width in recipe.widths]
    limits = [gated_limits(Precision(each["a"]), Precision(each["b"])) for each in at_width]
    return _without_weights(a, b, recipe, limits, at_width)


def _rows(a: Target, b: Target, sizes: Sizes) -> Iterator[_Found]:
    widths = sizes.widths if a.afar is None and b.afar is None else AFAR_WIDTHS
    for width in ROW_LENGTHS:
        for op in ROW_OPERATORS:
            recipe = Recipe(op, "", width, widths)
            yield _without_weights(a, b, recipe, [row_limits(width)] * len(recipe.widths))


def _without_weights(
    a: Target,
    b: Target,
    recipe: Recipe,
    limits: Sequence[RowLimits],
    sources: Sequence[Mapping[str, str]] | None = None,
) -> _Found:
    of_a, of_b = a.outputs(recipe), b.outputs(recipe)
    found = _compared(recipe, recipe.length, (of_a, of_b), limits, sources)
    return _Found(found.row | attribute(recipe, of_a, of_b, (a.setting, b.setting)), found.limits)
