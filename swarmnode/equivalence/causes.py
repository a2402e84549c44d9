"""Why two results differ: which switches of the reference bring it from one side to the other.

For each side the reference is switched, one thing after another, to what is nearest to the side's numbers. Between the
two settings the smallest set of switches is named that takes more than half of the difference away. Where no setting is
near enough to a side there is nothing to name: it computes in a way that is none of the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType

from backends.experts import F32
from backends.switched import Elements, Product, Setting, settings_of
from swarmnode.equivalence.recipes import Recipe, experts_of, type_of

CAUSE_SHARE: Final = 0.5  # a switch is a cause if it leaves less than this of the difference
ROWS: Final = 4  # that are looked at, those that differ most
COLUMNS: Final = 16  # of them, where it is a product: enough to tell settings apart
RESULTS_KEPT: Final = 512  # of the switched reference, a few KB each: all settings for a few recipes

ROUNDING: Final = "activation rounding"
ACCUMULATION: Final = "accumulation"
ORDER: Final = "reduction order"
FUSED: Final = "fused multiply-add"
TRANSCENDENTAL: Final = "transcendental"
DEQUANTISATION: Final = "dequantisation"
CAUSES: Final = {
    "rounded": ROUNDING,
    "halved": DEQUANTISATION,
    "sums": ACCUMULATION,
    "order": ORDER,
    "fused": FUSED,
    "powers": TRANSCENDENTAL,
}
_DEFAULT: Final = Setting()


@dataclass(frozen=True, slots=True)
class Witness:
    """Some rows of one recipe at one batch width, which the switched reference computes, too."""

    recipe: Recipe
    width: int
    rows: tuple[int, ...]

    def part(self, result: F32) -> F32:
        """These rows of a side's result, and the columns that are looked at."""
        rows = result[list(self.rows)]
        return rows[:, :COLUMNS] if self.recipe.op == "matmul" else rows

    def compute(self, setting: Setting) -> F32:
        return _computed(self, setting)

    def apart(self, setting: Setting, rows: F32) -> float:
        """Relative L2 of the reference with this setting from a side's rows."""
        return _apart(rows, self.compute(setting))


@lru_cache(maxsize=RESULTS_KEPT)
def _computed(witness: Witness, setting: Setting) -> F32:
    return _operator(witness).compute(setting)


@lru_cache(maxsize=4)
def _operator(witness: Witness) -> Product | Elements:
    recipe = witness.recipe
    x = recipe.inputs()[list(witness.rows)]
    if recipe.op != "matmul":
        return Elements(recipe.op, x)
    probe = recipe.probe
    stored = [np.frombuffer(probe.read(expert, 0), np.uint8) for expert in probe.experts]
    weights = [raw.reshape(probe.layer.n_out, -1)[:COLUMNS] for raw in stored]
    chosen = experts_of(witness.width)[list(witness.rows)].tolist()
    return Product(x, chosen, weights, GGMLQuantizationType(type_of(recipe.type)))


def _apart(a: F32, b: F32) -> float:
    wide = a.astype(np.float64)
    size = float(np.linalg.norm(wide))
    return float(np.linalg.norm(b - wide)) / size if size else 0.0


@dataclass(frozen=True, slots=True)
class Nearest:
    """The reference's setting that is nearest to a side, and how far it still is."""

    setting: Setting
    left: float

    def to_json(self) -> dict[str, Any]:
        return {"setting": self.setting.words, "left": self.left}


def nearest_to(rows: F32, witness: Witness) -> Nearest:
    """Switch one thing after another, as long as what is left is halved each time."""
    recipe = witness.recipe
    kind = GGMLQuantizationType(type_of(recipe.type)) if recipe.op == "matmul" else None
    found = Nearest(_DEFAULT, witness.apart(_DEFAULT, rows))
    for step in settings_of(kind):
        tried = [_on_top(found.setting, option) for option in step]
        lefts = [Nearest(setting, witness.apart(setting, rows)) for setting in tried]
        best = min(lefts, key=lambda each: each.left, default=found)
        if best.left < CAUSE_SHARE * found.left:
            found = best
    return found


def _on_top(setting: Setting, option: Setting) -> Setting:
    changed = {name: getattr(option, name) for name in CAUSES if getattr(option, name) != getattr(_DEFAULT, name)}
    return replace(setting, **changed)


def attribute(
    recipe: Recipe,
    of_a: Sequence[F32],
    of_b: Sequence[F32],
    known: tuple[Setting | None, Setting | None] = (None, None),
) -> dict[str, Any]:
    """What stands in a report's row: `cause` and `causes`, what they leave, and what is nearest to each side.

    of_a, of_b: one result for each batch width. known: settings of sides that are references themselves.
    """
    witness = _witness(recipe, of_a, of_b)
    at = recipe.widths.index(witness.width)
    rows = witness.part(of_a[at]), witness.part(of_b[at])
    before = _apart(rows[0], rows[1])
    if not 0 < before < np.inf:
        none = {"setting": None, "left": None}
        return {"cause": None, "causes": [], "left": None, "nearest": {"a": none, "b": none}}
    one, other = (
        nearest_to(each, witness) if setting is None or recipe.op != "matmul" else Nearest(setting, 0.0)
        for each, setting in zip(rows, known, strict=True)
    )
    causes, left = _between(witness, rows, (one, other), before)
    return {
        "cause": ", ".join(causes) or None,
        "causes": causes,
        "left": left,
        "nearest": {"a": one.to_json(), "b": other.to_json()},
    }


def _witness(recipe: Recipe, of_a: Sequence[F32], of_b: Sequence[F32]) -> Witness:
    """The rows that differ most, at the batch width where one does."""
    apart = [np.linalg.norm(a.astype(np.float64) - b, axis=1) for a, b in zip(of_a, of_b, strict=True)]
    at = int(np.argmax([each.max() for each in apart]))
    rows = np.argsort(-apart[at], kind="stable")[:ROWS]
    return Witness(recipe, recipe.widths[at], tuple(sorted(rows.tolist())))


def _between(
    witness: Witness, rows: tuple[F32, F32], nearest: tuple[Nearest, Nearest], before: float
) -> tuple[list[str], float | None]:
    """The fewest switches that bring one side's setting to the other side's rows, and what they leave."""
    one, other = (each.setting for each in nearest)
    if max(each.left for each in nearest) >= CAUSE_SHARE * before:
        return [], None
    names = [name for name in CAUSES if getattr(one, name) != getattr(other, name)]
    for count in range(1, len(names) + 1):
        found = {}
        for some in combinations(names, count):
            for start, end, target in ((other, one, rows[0]), (one, other, rows[1])):
                setting = replace(start, **{name: getattr(end, name) for name in some})
                if setting.is_possible:
                    found[witness.apart(setting, target)] = some
        best = min(found, default=before)
        if best < CAUSE_SHARE * before:
            return [CAUSES[name] for name in found[best]], best
    return [], None
