"""What a difference is said to come from: the switch that made it, none where none did, and no more than it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends.experts import F32
from backends.numpy_reference import NumpyExperts
from backends.sum_orders import ORDERS, SumOrder
from backends.switched import Elements, Product, Setting
from capabilities.equivalence import difference
from swarmnode.equivalence.causes import (
    ACCUMULATION,
    DEQUANTISATION,
    FUSED,
    ORDER,
    ROUNDING,
    TRANSCENDENTAL,
    attribute,
)
from swarmnode.equivalence.recipes import Recipe, compute, experts_of, type_of
from swarmnode.equivalence.targets import find_target

WIDTHS = (1, 200)  # in so many rows the two ways to round differ, in one code
ROUNDED = Setting("with vectors")
KERNEL = replace(ROUNDED, sums="float32", order="8 lanes of 4", fused=True)


def recipe_of(kind: str) -> Recipe:
    return Recipe("matmul", kind, 512, WIDTHS)


def results(kind: str, setting: Setting) -> list[F32]:
    """What a kernel of this setting gives for a whole recipe."""
    recipe = recipe_of(kind)
    probe, x = recipe.probe, recipe.inputs()
    weights = [np.frombuffer(probe.read(e, 0), np.uint8).reshape(probe.layer.n_out, -1) for e in probe.experts]

    def at(width: int) -> F32:
        chosen = experts_of(width).tolist()
        return Product(x[: len(chosen)], chosen, weights, GGMLQuantizationType(type_of(kind))).compute(setting)

    return [at(width) for width in WIDTHS]


@pytest.mark.parametrize(
    ("kind", "one", "other", "causes"),
    [
        ("q8_0", ROUNDED, Setting(), [ROUNDING]),
        ("q8_0", KERNEL, Setting(), [ROUNDING]),  # the rest of it takes next to nothing away
        ("q8_0", KERNEL, ROUNDED, [ACCUMULATION, ORDER, FUSED]),
        ("q8_0", KERNEL, replace(KERNEL, fused=False), [FUSED]),
        ("q8_0", KERNEL, replace(KERNEL, order="16 lanes"), [ORDER]),
        ("q8_0", Setting("plainly"), ROUNDED, [ROUNDING]),
        ("f32", Setting(sums="float32", order="one after the other"), Setting(), [ORDER]),  # NumPy's own adds well
        ("f16", Setting(sums="float16"), Setting(), [ACCUMULATION]),
        ("q4_1", replace(ROUNDED, halved="block sums"), ROUNDED, [DEQUANTISATION]),
        ("q8_0", replace(ROUNDED, halved="weights"), ROUNDED, [DEQUANTISATION]),
    ],
)
def test_the_switch_that_made_a_difference_is_named(
    kind: str, one: Setting, other: Setting, causes: list[str]
) -> None:
    found = attribute(recipe_of(kind), results(kind, one), results(kind, other))
    assert found["causes"] == causes
    assert found["cause"] == ", ".join(causes)
    assert found["left"] < 1e-3
    assert found["nearest"]["a"] == {"setting": one.words, "left": 0.0}


def test_what_no_switch_explains_is_said_to_be_so() -> None:
    exact = results("q8_0", Setting())
    found = attribute(recipe_of("q8_0"), exact, [result * np.float32(1.001) for result in exact])
    assert (found["cause"], found["causes"], found["left"]) == (None, [], None)
    assert found["nearest"]["a"]["left"] == 0
    assert found["nearest"]["b"]["left"] > 5e-4


def test_equal_bits_have_no_cause() -> None:
    exact = results("q8_0", Setting())
    nearest = attribute(recipe_of("q8_0"), exact, exact)["nearest"]
    assert nearest["a"] == nearest["b"] == {"setting": None, "left": None}


def test_what_a_backend_does_in_wide_batches_alone_is_seen_there() -> None:
    narrow, wide = results("q8_0", Setting()), results("q8_0", Setting(sums="float16"))
    found = attribute(recipe_of("q8_0"), narrow, [narrow[0], wide[1]])
    assert found["causes"] == [ACCUMULATION]


def test_exp_in_single_precision_is_told_from_the_rest() -> None:
    recipe = Recipe("softmax", "", 256, WIDTHS)
    one, other = (
        [Elements("softmax", recipe.inputs()[: len(experts_of(w))]).compute(setting) for w in WIDTHS]
        for setting in (Setting(powers="float32"), Setting())
    )
    assert attribute(recipe, one, other)["causes"] == [TRANSCENDENTAL]


@pytest.mark.parametrize("kind", ["f32", "f16", "q4_1", "q8_0", "q6_K"])
def test_the_switched_reference_is_the_reference(kind: str) -> None:
    recipe = recipe_of(kind)
    for rounds, setting in ((False, Setting()), (True, ROUNDED), (False, Setting(sums="float16"))):
        accumulate = "float16" if setting.sums == "float16" else "float64"

        def make(accumulate: str = accumulate, rounds: bool = rounds) -> NumpyExperts:
            return NumpyExperts(accumulate, quantize_activations=rounds)  # type: ignore[arg-type]

        for a, b in zip(compute(recipe, make, None), results(kind, setting), strict=True):
            limit = 1e-4 if accumulate == "float16" else 1e-6  # a sum that falls on the other side of a half's tie
            assert difference(a, b).relative_l2 < limit


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_every_order_adds_everything(order: SumOrder) -> None:
    rng = np.random.default_rng(3)
    a, weight = rng.standard_normal((3, 100)), rng.standard_normal((5, 100))  # of no order's length
    exact = a @ weight.T
    for fused in (False, True):
        found = order.multiply(a, weight, fused=fused)
        assert 0 < np.abs(found - exact).max() < 1e-5


def test_orders_differ_in_their_bits() -> None:
    rng = np.random.default_rng(3)
    a, weight = rng.standard_normal((3, 2048)), rng.standard_normal((5, 2048))
    seen = {order.multiply(a, weight, fused=fused).tobytes() for order in ORDERS for fused in (False, True)}
    assert len(seen) == 2 * len(ORDERS)


def test_this_machines_kernels_are_explained_by_their_rounding() -> None:
    recipe = recipe_of("q8_0")
    a, b = (find_target(name).outputs(recipe) for name in ("ggml-cpu", "reference"))
    found = attribute(recipe, a, b)
    assert found["causes"] == [ROUNDING]
    assert found["nearest"]["a"]["left"] < 1e-6
    assert found["nearest"]["b"] == {"setting": Setting().words, "left": 0.0}


def test_block_sums_in_halves_are_what_sets_q4_1_apart() -> None:
    recipe = recipe_of("q4_1")
    a, b = (find_target(name).outputs(recipe) for name in ("ggml-cpu", "reference:q8"))
    found = attribute(recipe, a, b)
    assert found["causes"] == [DEQUANTISATION]
    assert found["nearest"]["a"]["left"] < 1e-6
