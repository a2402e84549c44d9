"""What a side rounds activations to before it multiplies, as its products show. What it says of itself counts nothing.

A side's rows are set beside references that round in one way each. The nearest is taken if it leaves less than half of
the distance to the exact one: then the rounding, and not the sums, is what the side is off by. What is off in any other
way counts as exact, which buys no tolerance. Kernels change with the batch, so each width is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType

from backends.experts import F32
from backends.gguf_types import GGML_TYPES
from backends.switched import Product, Setting
from capabilities.equivalence import Difference, difference
from capabilities.precision import Precision
from capabilities.tolerances import RowLimits, product_limits
from swarmnode.equivalence.recipes import Recipe, experts_of, rows_at, type_of
from swarmnode.equivalence.targets import EXACT, ROUNDED, find_target

SHARE: Final = 0.5  # of the distance to exact products that a rounding may leave
RESULTS_KEPT: Final = (
    64  # of references, 200 KB each: what one weight type asks for at every length, several times over
)
_SUPER_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Rounding:
    """One way to round, and how the references' switches name it."""

    source: Precision
    setting: Setting


@dataclass(frozen=True, slots=True)
class Shown:
    """What rows of one batch width show. left: how far they are from the reference that rounds so."""

    rounding: Rounding
    left: Difference
    fits: bool


EXACTLY: Final = Rounding(Precision.F32, Setting())
_IN_HALVES: Final = (
    Rounding(Precision.F16, Setting(rounded="in halves")),
    Rounding(Precision.F16, Setting(rounded="in halves", halved="weights")),
)
_OTHERS: Final = (*_IN_HALVES, Rounding(Precision.BF16, Setting(rounded="in bfloat16")))
_IN_BLOCKS_OF_32: Final = Rounding(Precision.Q8, Setting(rounded="in blocks of 32"))
_BY_TYPE: Final = {"f32": Precision.F32, "f16": Precision.F16, "bf16": Precision.BF16}  # 8 bits for all others


def shown_by(recipe: Recipe, outputs: F32, at: int) -> Shown:
    """What a side's product at the recipe's batch width number `at` shows."""
    as_kernels = Rounding(_BY_TYPE.get(recipe.type, Precision.Q8), Setting(rounded="with vectors"))
    exact = difference(find_target(EXACT).outputs(recipe)[at], outputs)
    tried = [(EXACTLY, exact), (as_kernels, difference(find_target(ROUNDED).outputs(recipe)[at], outputs))]
    for rounding, left in tried:
        if left.within(_own_limits(recipe, rounding)):
            return Shown(rounding, left, True)
    tried += [(each, difference(_outputs(recipe, each.setting)[at], outputs)) for each in _others(recipe)]
    rounding, left = min(tried, key=lambda each: each[1].median_relative_l2)
    if not left.median_relative_l2 < SHARE * exact.median_relative_l2:
        return Shown(EXACTLY, exact, False)
    weights = GGML_TYPES[type_of(recipe.type)]
    stepwise = product_limits(weights.name, weights.block, recipe.values, Precision.F16, Precision.F32)
    return Shown(rounding, left, left.within(_own_limits(recipe, rounding)) or left.within(stepwise))


def limits_of(recipe: Recipe, a: Shown, b: Shown) -> RowLimits:
    """Between two sides' rows."""
    weights = GGML_TYPES[type_of(recipe.type)]
    alike = a.rounding == b.rounding
    return product_limits(weights.name, weights.block, recipe.values, a.rounding.source, b.rounding.source, alike=alike)


def _own_limits(recipe: Recipe, rounding: Rounding) -> RowLimits:
    """Between a side and the reference that rounds as it does."""
    weights = GGML_TYPES[type_of(recipe.type)]
    return product_limits(weights.name, weights.block, recipe.values, rounding.source, rounding.source)


def _others(recipe: Recipe) -> Iterator[Rounding]:
    """Roundings of other kernels than ggml's for CPUs."""
    yield from _OTHERS
    if GGML_TYPES[type_of(recipe.type)].block == _SUPER_BLOCK:
        yield _IN_BLOCKS_OF_32


@lru_cache(maxsize=RESULTS_KEPT)
def _outputs(recipe: Recipe, setting: Setting) -> list[F32]:
    """The reference with this setting, one result for each batch width."""
    probe, x = recipe.probe, recipe.inputs()
    stored = [np.frombuffer(probe.read(expert, 0), np.uint8) for expert in probe.experts]
    weights = [raw.reshape(probe.layer.n_out, -1) for raw in stored]
    kind = GGMLQuantizationType(type_of(recipe.type))
    of_experts = np.stack([
        Product(x, [expert] * len(x), weights, kind).compute(setting) for expert in range(len(weights))
    ])  # fmt: skip
    return [of_experts[experts_of(width), np.arange(rows_at(width))] for width in recipe.widths]
