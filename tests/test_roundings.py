"""What limits follow from: how a side's own rows show that it rounds, width by width, whatever it says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capabilities.precision import Precision, Verdict
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.recipes import Recipe, Sizes
from swarmnode.equivalence.roundings import shown_by
from swarmnode.equivalence.targets import Target, find_target
from tests.expert_models import quiet

OWN = "tests.equivalence_backends:"
WIDTHS = (1, 40)


class Boasting(Target):
    """What it measured of itself is whatever buys most."""

    def precision(self, kind: str) -> Verdict:
        return Verdict(Precision.F32, Precision.Q8)


def products(a: Target, b: Target, kind: str, length: int = 256) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The only product's row, and its limits."""
    level = op_level(a, b, Sizes((kind,), (length,), WIDTHS), quiet)
    (row,) = (row for row in level["ops"] if row["op"] == "matmul")
    return row, [limits for limits in level["tolerance"]["limits"] if limits["op"] == "matmul"]


@pytest.mark.parametrize("kind", ["f32", "q4_0", "q4_K"])
@pytest.mark.parametrize("other", ["reference", "ggml-cpu"])
def test_what_a_side_says_of_its_precision_buys_nothing(kind: str, other: str) -> None:
    honest = find_target("reference:f16")
    lying = Boasting("peer:liar", honest.make, honest.rows, results=honest.results)
    row, limits = products(lying, find_target(other), kind)
    assert row["measured"]["a"] == {"accumulation": "f32", "source": "q8"}
    assert not row["pass"]
    assert [each["source"]["a"] for each in limits] == ["f32"]  # sums in halves are no activations in halves
    told, same = products(honest, find_target(other), kind)
    assert same == limits
    assert {**told, "measured": None} == {**row, "measured": None}


def test_rows_show_what_the_references_round_to() -> None:
    for kind, source in (("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8"), ("q4_K", "q8"), ("f32", "f32")):
        row, (limits,) = products(find_target("reference"), find_target("reference:q8"), kind)
        assert row["pass"]
        assert limits["source"] == {"a": "f32", "b": source}
        assert limits["widths"] == list(WIDTHS)


def test_each_width_has_its_own_limit_where_kernels_change_with_it() -> None:
    row, limits = products(find_target("reference"), find_target(f"{OWN}RoundsWhenWide"), "q8_0")
    assert row["pass"], row["reason"]
    assert [(each["widths"], each["source"]["b"]) for each in limits] == [([1], "f32"), ([40], "f16")]
    assert limits[0]["median_relative_l2"] < 0.05 * limits[1]["median_relative_l2"]
    assert row["worst_width"] == 40
    assert row["cause"] == "activation rounding"


def test_eight_bits_in_other_blocks_are_eight_bits_and_not_the_same_ones() -> None:
    for other, alike in (("reference", False), ("ggml-cpu", False), (f"{OWN}BlocksOf32", True)):
        row, (limits,) = products(find_target(other), find_target(f"{OWN}BlocksOf32"), "q4_K")
        assert row["pass"], row["reason"]
        assert limits["source"]["b"] == "q8"
        assert (limits["median_relative_l2"] < 1e-5) == alike


def test_a_rounding_explains_no_sums_in_halves() -> None:
    """Where activations have eight bits most of the distance is theirs, and the rest is still too much."""
    recipe = Recipe("matmul", "q8_0", 2048, (32,))
    (rounded,), (halves,), (exact,) = (
        find_target(name).outputs(recipe) for name in ("reference:q8", "reference:f16", "reference")
    )
    both = rounded + (halves - exact)
    assert shown_by(recipe, rounded, 0).fits
    shown = shown_by(recipe, both, 0)
    assert shown.rounding.source == Precision.Q8
    assert not shown.fits


def test_what_rounds_in_no_known_way_counts_as_exact() -> None:
    recipe = Recipe("matmul", "q8_0", 256, (32,))
    (exact,) = find_target("reference").outputs(recipe)
    shown = shown_by(recipe, exact * 1.001, 0)
    assert (shown.rounding.source, shown.fits) == (Precision.F32, False)
    assert not shown_by(recipe, exact * float("nan"), 0).fits
    assert replace(shown, fits=True).left.median_relative_l2 == pytest.approx(1e-3, rel=1e-3)


def test_a_gated_unit_between_products_in_halves_is_no_unit_in_halves() -> None:
    """Its values pass F32 products, which round where the side's own F32 products show it."""

    def gated(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        level = op_level(find_target("reference"), find_target(name), Sizes(("f32",), (256,), WIDTHS), quiet)
        (row,) = (row for row in level["ops"] if row["op"] == "swiglu")
        return row, [limits for limits in level["tolerance"]["limits"] if limits["op"] == "swiglu"]

    row, limits = gated(f"{OWN}RoundsWhenWide")
    assert row["pass"], row["reason"]
    assert row["relative_l2"] > 1e-4
    assert [(each["widths"], each["source"]["b"]) for each in limits] == [([1], "f32"), ([40], "f16")]
    assert limits[0]["median_relative_l2"] < 0.01 * limits[1]["median_relative_l2"]
    row, limits = gated("reference:f16")
    assert not row["pass"]
    assert [each["source"]["b"] for each in limits] == ["f32"]
