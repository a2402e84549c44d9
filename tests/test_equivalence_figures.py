"""The pure part of equivalence: figures of known differences, and verdicts on both sides of their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from capabilities.equivalence import (
    LogitRows,
    decisions_level,
    difference,
    growth_exponent,
    layer_level,
    logit_rows,
    logits_level,
    margin_histogram,
    predicted_flips,
    routing_change,
    routing_figures,
    worst,
)
from capabilities.generation_level import Fork, Generated, generation_level
from capabilities.precision import Precision
from capabilities.task_level import task_level
from capabilities.tolerances import (
    FLIP_ERROR,
    FLIP_NOISE_TIMES,
    KL_MEAN_LIMIT,
    NOISE_TIMES,
    RowLimits,
    above_noise,
    flips_beside_noise,
    flips_limit,
    product_limits,
    residual_limit,
    row_limits,
    sum_limit,
)

RANDOM = np.random.default_rng(1)


def noise(*shape: int) -> np.ndarray:  # type: ignore[type-arg]
    return RANDOM.standard_normal(shape).astype(np.float32)


def logits(rows: int = 400, width: int = 50) -> np.ndarray:  # type: ignore[type-arg]
    return 3 * noise(rows, width)


def test_figures_are_those_of_a_known_difference() -> None:
    a = np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)
    b = np.array([[3.0, 4.0], [1.0, 0.5]], np.float32)
    found = difference(a, b)
    assert not found.bit_identical
    assert found.max_abs_diff == 0.5
    assert found.worst_relative_l2 == pytest.approx(0.5)
    assert found.median_relative_l2 == pytest.approx(0.25)
    assert found.relative_l2 == pytest.approx(0.5 / 26**0.5)
    assert found.min_cosine == pytest.approx(1 / 1.25**0.5)
    assert difference(a, a) == worst([difference(a, a)])
    assert difference(a, a).max_abs_diff == 0
    assert worst([found, difference(a, a)]) == found


def test_what_is_not_finite_is_far_from_everything_but_itself() -> None:
    a = np.array([[1.0, np.nan]], np.float32)
    assert difference(a, a).bit_identical
    assert not difference(a, np.ones((1, 2), np.float32)).within(RowLimits(1e9, 1e9))


def test_limits_of_products_grow_with_their_sums_and_with_measured_rounding() -> None:
    exact, q8, f16, unknown = Precision.F32, Precision.Q8, Precision.F16, Precision.UNKNOWN
    assert sum_limit(4096) == 2 * sum_limit(1024)
    median = product_limits("q4_0", 32, 2048, exact, q8).median_relative_l2
    assert median > product_limits("f16", 1, 2048, exact, f16).median_relative_l2 > 10 * sum_limit(2048)
    assert median < product_limits("q4_K", 256, 2048, exact, q8).median_relative_l2
    assert product_limits("q4_0", 32, 2048, q8, q8).median_relative_l2 == sum_limit(2048)
    assert product_limits("q4_0", 32, 2048, exact, unknown) == product_limits("q4_0", 32, 2048, exact, exact)
    assert product_limits("q4_1", 32, 2048, q8, q8).median_relative_l2 > sum_limit(2048)
    flips = [product_limits("q4_0", 32, n, q8, q8).worst_relative_l2 for n in (64, 1024)]
    assert flips[0] > 3 * flips[1]
    assert row_limits(4096).median_relative_l2 < 1e-4
    otherwise = product_limits("q4_K", 256, 2048, q8, q8, alike=False)
    assert otherwise.median_relative_l2 > 1.2 * product_limits("q4_K", 256, 2048, exact, q8).median_relative_l2


# -- beside llama.cpp's own noise -------------------------------------------------------------------------------------


def of_layers(times: float) -> dict[str, Any]:
    return layer_level([0.1 * times] * 3, [0.1] * 3, (0, 1, 2))


def of_logits(times: float) -> dict[str, Any]:
    a = logits()
    floor = logit_rows(a, a + noise(*a.shape))
    moved = LogitRows.join([floor])
    moved.kl[:] = times * floor.kl
    return logits_level(moved, floor)


def of_agreement(times: float) -> dict[str, Any]:
    """Through no gate, and no more than predicted."""
    shares = 0.1, 0.1 * times
    floor, moved = (LogitRows(*rows_that_flip(int(1000 * share))) for share in shares)
    return decisions_level(moved, (), floor, ())


def rows_that_flip(flips: int) -> tuple[Any, ...]:
    ones, top = np.ones(1000), np.zeros(1000, np.int32)
    other = top.copy()
    other[:flips] = 1
    return ones, ones, ones, 0 * ones, ones, top, other


def of_text(times: float) -> dict[str, Any]:
    nll, options = np.full(100, 2.0), np.zeros((9, 4))
    return task_level((nll, nll + 0.1 * times), (nll, nll + 0.1), (options, options), (options, options))


def of_options(times: float) -> dict[str, Any]:
    nll, options = np.full(100, 2.0), np.tile([9.0, 0.0, 0.0, 0.0], (50, 1))
    moved = np.tile([0.5, -0.5, 0.0, 0.0], (50, 1))
    return task_level((nll, nll), (nll, nll), (options, options + times * moved), (options, options + moved))


@pytest.mark.parametrize("level", [of_layers, of_logits, of_text, of_options])
def test_three_times_the_noise_is_as_far_as_the_band_goes(level: Callable[[float], dict[str, Any]]) -> None:
    assert NOISE_TIMES == 3
    assert level(2.9)["pass"], level(2.9)["reason"]
    for times in (3.1, 5.0):
        assert not level(times)["pass"]


def test_tokens_agree_but_for_three_times_what_the_noise_turns() -> None:
    assert of_agreement(1.0)["tolerance"]["top1_agreement"] == pytest.approx(0.7)
    assert of_agreement(1.0)["pass"]
    assert not of_agreement(3.1)["pass"]


def test_flips_beside_the_noise_have_the_error_that_is_stated() -> None:
    """Of pairs for which as many are due as may be one in a thousand fails. The noise is counted anew each time."""
    counted = np.random.default_rng(7).binomial(512, (0.05, FLIP_NOISE_TIMES * 0.05), (20_000, 2))
    limits = {int(flips): flips_beside_noise(512, int(flips), 512) for flips in np.unique(counted[:, 0])}
    failed = sum(ours > limits[of_noise] for of_noise, ours in counted.tolist())
    assert 0 < failed <= 2 * FLIP_ERROR * len(counted)
    twice = np.random.default_rng(8).binomial(512, 5 * 0.05, 1000)
    assert (twice > limits[26]).mean() > 0.99


def test_flips_beside_no_noise_are_a_twentieth_and_what_chance_adds() -> None:
    assert flips_beside_noise(10_000, 0, 10_000) == pytest.approx(500, abs=80)
    assert flips_beside_noise(10_000, 0, 10_000) > 500
    assert flips_beside_noise(5, 5, 5) == 5
    assert flips_beside_noise(50_000, 2_500, 50_000) == pytest.approx(3_750, rel=0.1)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_exponent_is_found(power: float) -> None:
    depth = np.arange(1, 50)
    assert growth_exponent((1e-3 * depth**power).tolist()) == pytest.approx(power)
    steps = noise(49, 4096) if power == 0.5 else np.tile(noise(1, 4096), (49, 1))
    drift = np.linalg.norm(np.cumsum(steps, axis=0), axis=1)
    assert growth_exponent(drift.tolist()) == pytest.approx(power, abs=0.05)


def test_no_exponent_without_drift() -> None:
    assert growth_exponent([0.0] * 20) is None


def test_the_first_layer_beyond_its_limit_is_named() -> None:
    fine = [residual_limit(depth) for depth in (1, 2, 3)]
    assert layer_level(fine, [0.0] * 3, (4, 5, 6))["pass"]
    assert fine[2] == pytest.approx(3**0.5 * fine[0])
    found = layer_level([fine[0], 1.01 * fine[1], 2 * fine[2]], [0.0] * 3, (4, 5, 6))
    assert not found["pass"]
    assert "layer 5" in found["reason"]
    assert layer_level([0.5, 0.5, 0.5], [0.4] * 3, (4, 5, 6))["pass"]
    assert not layer_level([float("nan")] * 3, [0.0] * 3, (4, 5, 6))["pass"]


def test_a_shift_of_all_logits_is_no_difference() -> None:
    a = logits()
    rows = logit_rows(a, a + np.float32(2))
    assert rows.l_infinity.max() < 1e-5
    assert rows.kl.max() < 1e-6
    assert not rows.flips.any()


def test_kl_is_that_of_the_definition() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    rows = logit_rows(np.log(p)[None].astype(np.float32), np.log(q)[None].astype(np.float32))
    assert rows.kl[0] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-6)
    assert rows.margins[0] == pytest.approx(np.log(2), abs=1e-6)
    assert rows.flips[0]


def test_logits_are_judged_against_the_limit_and_the_noise() -> None:
    a = logits()
    near, far = logit_rows(a, a + 1e-3 * noise(*a.shape)), logit_rows(a, a + noise(*a.shape))
    assert logits_level(near, near)["pass"]
    assert far.kl.mean() > KL_MEAN_LIMIT
    assert not logits_level(far, near)["pass"]
    assert logits_level(far, far)["pass"]
    assert above_noise(1.0, 1.0) == NOISE_TIMES
    broken = LogitRows.join([far])
    broken.kl[0] = np.nan
    assert not logits_level(broken, near)["pass"]


@pytest.mark.parametrize("size", [0.03, 0.3])
def test_flips_happen_as_often_as_predicted(size: float) -> None:
    a = logits(4000)
    rows = logit_rows(a, a + np.float32(size) * noise(*a.shape))
    predicted = predicted_flips(rows.margins, rows.deviations)
    assert 20 < predicted < 2000
    assert rows.flips.sum() == pytest.approx(predicted, rel=0.25)
    assert not (rows.flips & (rows.margins > 2 * rows.l_infinity)).any()


def test_the_histogram_holds_every_position_and_every_flip() -> None:
    a = logits()
    rows = logit_rows(a, a + np.float32(0.1) * noise(*a.shape))
    found = margin_histogram(rows)
    assert sum(found["counts"]) == len(a)
    assert sum(found["flipped"]) == rows.flips.sum() > 0
    assert len(found["edges"]) == len(found["counts"]) + 1
    assert found["flipped"][0] / found["counts"][0] > 0.1
    assert found["flipped"][-1] == 0
    assert sum(margin_histogram(logit_rows(np.zeros_like(a), np.zeros_like(a)))["counts"]) == len(a)


def test_more_flips_than_the_movement_explains_fail() -> None:
    a = logits()
    small = logit_rows(a, a + np.float32(0.01) * noise(*a.shape))
    assert decisions_level(small, (), small, ())["pass"]
    moved = LogitRows.join([small])
    moved.top_b[:30] = (moved.top_a[:30] + 1) % 50  # without any movement that could do it
    found = decisions_level(moved, (), small, ())
    assert not found["pass"]
    assert found["flips_through_the_gate"] > 0


def test_routing_counts_sets_and_experts_and_names_the_first() -> None:
    a = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 0]], np.int32)
    b = np.array([[1, 0, 2], [3, 4, 7], [6, 7, 0]], np.int32)
    found = routing_figures([routing_change(2, a, a), routing_change(3, a, b)])
    assert found["choices"] == 6
    assert found["sets_changed"] == pytest.approx(1 / 6)
    assert found["experts_changed"] == pytest.approx(1 / 18)
    assert found["top1_changed"] == pytest.approx(1 / 6)
    assert found["first"] == {"layer": 3, "token": 1, "experts_a": [3, 4, 5], "experts_b": [3, 4, 7]}
    assert routing_figures([routing_change(2, a, a)])["first"] is None


def test_forks_are_counted_and_must_have_been_likely() -> None:
    fork = Fork(3, 0.1, 0.2)
    quiet = Generated(8, (None,) * 4, 0.0)
    found = generation_level(Generated(8, (None, fork, Fork(1, 0.1, 0.2), None), 1.0), quiet)
    assert found["pass"]
    assert (found["identical"], found["first_differences"]) == (2, [1, 3])
    assert not generation_level(Generated(8, (None, Fork(3, 0.5, 0.2)), 1.0), quiet)["pass"]
    assert not generation_level(Generated(8, (fork,) * 20, 1.0), quiet)["pass"]


def test_answers_of_another_model_fail_though_it_predicts_that_they_part() -> None:
    """The further a pair is apart, the more partings its own margins predict; llama.cpp's own noise does not grow."""
    floor = Generated(8, (*(Fork(index, 0.1, 0.2) for index in (0, 2, 4, 6) * 4), *(None,) * 24), 15.5)
    far = Generated(8, (*(Fork(index, 0.1, 9.0) for index in (0, 1, 2, 4) * 9), *(None,) * 4), 33.0)
    found = generation_level(far, floor)
    assert found["positions"] == 9 * (1 + 2 + 3 + 5) + 4 * 8
    assert len(far.parted) < flips_limit(33.0)
    assert not found["pass"]
    assert found["tolerance"]["forks"] == found["tolerance"]["forks_beside_noise"] < 36
    assert generation_level(floor, floor)["pass"]
    half_as_many_again = Generated(8, (*(Fork(index, 0.1, 0.2) for index in (0, 2, 4, 6) * 6), *(None,) * 16), 15.5)
    assert generation_level(half_as_many_again, floor)["pass"]


def test_tokens_that_flip_far_more_often_than_by_noise_fail_though_it_is_predicted() -> None:
    a = logits(600)
    near, far = (logit_rows(a, a + np.float32(size) * noise(*a.shape)) for size in (0.1, 0.6))
    found = decisions_level(far, (), near, ())
    assert found["flips"] < flips_limit(found["flips_predicted"])
    assert found["flips"] > found["tolerance"]["flips"] == found["tolerance"]["flips_beside_noise"]
    assert not found["pass"]
    assert decisions_level(near, (), near, ())["pass"]
