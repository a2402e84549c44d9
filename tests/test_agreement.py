"""How agreement is measured, and that the limits tell rounding from another function."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.device import Device
from backends.experts import GgmlExperts
from backends.numpy_reference import NumpyExperts
from capabilities.agreement import (
    F32,
    MEDIAN_LIMIT,
    WORST_LIMIT,
    Agreement,
    compare,
    one_sided,
    same_function,
    within_tolerance,
)
from tests.expert_models import take_apart

Q4_0, F16, BF16 = 2, 1, 30
QUANTISED = frozenset({Q4_0, 0})


def rows(n: int = 100, width: int = 64) -> F32:
    return np.random.default_rng(0).standard_normal((n, width), dtype=np.float32)


def off_by(relative: float, n: int = 100, of: int = 100) -> Agreement:
    """The agreement of rows of which the first `n` of `of` are off by a relative L2 error."""
    expected = rows(of)
    noise = np.random.default_rng(1).standard_normal(expected.shape)
    noise *= relative * np.linalg.norm(expected, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    noise[n:] = 0
    return compare((expected + noise).astype(np.float32), expected)


def test_equal_bits_are_equal() -> None:
    x = rows()
    assert compare(x.copy(), x) == Agreement(True, 0.0, 0.0, 0.0, 1.0)
    assert compare(x[:0], x[:0]).bit_identical


def test_errors_are_measured_by_row() -> None:
    expected = np.array([[3, 4], [6, 8], [1, 0]], np.float32)
    actual = np.array([[3, 4], [6, 8.5], [0, 1]], np.float32)
    agreement = compare(actual, expected)
    assert not agreement.bit_identical
    assert agreement.max_abs_diff == 1.0
    assert agreement.median_relative_l2 == pytest.approx(0.05)
    assert agreement.worst_relative_l2 == pytest.approx(2**0.5)
    assert agreement.min_cosine == pytest.approx(0.0)


def test_a_row_of_zeros_agrees_with_zeros_alone() -> None:
    zeros = np.zeros((2, 4), np.float32)
    other = zeros.copy()
    other[1, 2] = 1e-20
    assert compare(other, zeros).worst_relative_l2 == np.inf
    assert compare(zeros, other).worst_relative_l2 == 1.0
    assert compare(other, zeros).min_cosine == 0.0
    assert not within_tolerance(compare(other, zeros), QUANTISED)


def test_minus_zero_is_zero() -> None:
    assert compare(np.full((1, 4), -0.0, np.float32), np.zeros((1, 4), np.float32)).bit_identical


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_never_agree(value: float) -> None:
    actual = rows(3)
    actual[1, 5] = value
    for pair in ((actual, rows(3)), (rows(3), actual)):
        assert not within_tolerance(compare(*pair), QUANTISED)
        assert not within_tolerance(compare(*pair), frozenset({F16}))


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match="shapes"):
        compare(rows(3), rows(4))


@given(st.floats(1e-30, 1e30), st.integers(1, 20))
def test_the_measure_does_not_depend_on_scale(scale: float, n: int) -> None:
    expected = rows(n).astype(np.float64)
    actual = expected * (1 + 1e-3)
    small, large = (compare((a * scale).astype(np.float32), (e * scale).astype(np.float32)).median_relative_l2
                    for a, e in ((actual, expected), (actual, expected)))  # fmt: skip
    assert small == large == pytest.approx(1e-3, rel=1e-3)


def test_the_limits() -> None:
    assert within_tolerance(off_by(MEDIAN_LIMIT / 2), QUANTISED)
    assert not within_tolerance(off_by(MEDIAN_LIMIT * 2), QUANTISED)
    # Ties that fell the other way: up to a percent, in fewer than half of the rows.
    assert within_tolerance(off_by(WORST_LIMIT / 2, n=40), QUANTISED)
    assert not within_tolerance(off_by(WORST_LIMIT / 2, n=60), QUANTISED)
    assert not within_tolerance(off_by(WORST_LIMIT * 2, n=1), QUANTISED)
    # Products of halves may be added in half precision, in every row.
    for kind in (F16, BF16):
        assert within_tolerance(off_by(1e-2), frozenset({kind, 0}))
        assert not within_tolerance(off_by(2.5e-2), frozenset({kind, 0}))


def experts_rows(quantisation: str) -> tuple[F32, F32, F32]:
    """(the kernels', the kernels' in the other layout, the reference's that rounds as they do) of 100 rows."""
    model = take_apart("qwen3moe", quantisation)
    results = []
    for backend in (
        GgmlExperts(Device("CPU")),
        GgmlExperts(Device("CPU"), repack=False),
        NumpyExperts("float64", quantize_activations=True),
    ):
        layer = model.load(backend)
        ids = np.arange(100, dtype=np.int32)
        results.append(backend.compute(layer.layer, rows(100, layer.n_in), ids, ids % 8))
    return results[0], results[1], results[2]


@pytest.mark.parametrize("quantisation", ["q4_0", "q8_0", "q4_k", "f16", "bf16"])
def test_real_backends_are_within_tolerance_and_other_functions_are_not(quantisation: str) -> None:
    model = take_apart("qwen3moe", quantisation)
    types = frozenset(t.type for t in model.layer.tensors)
    kernels, plain, reference = experts_rows(quantisation)
    for other in (plain, reference):
        assert within_tolerance(compare(other, kernels), types)
    assert not within_tolerance(compare(np.roll(kernels, 1, axis=0), kernels), types)  # other experts
    assert not within_tolerance(compare(kernels * np.float32(1.05), kernels), types)  # a missing scale
    one_wrong = kernels.copy()
    one_wrong[7] = kernels[8]
    assert not within_tolerance(compare(one_wrong, kernels), types)
    for wrong in (np.roll(kernels, 1, axis=0), kernels * np.float32(1.05), one_wrong, kernels * np.float32(np.nan)):
        assert not same_function(compare(wrong, kernels))


@pytest.mark.parametrize("quantisation", ["f32", "q4_0", "q8_0", "q4_k", "f16"])
@pytest.mark.parametrize("accumulate", ["float16", "float32"])
def test_other_roundings_are_the_same_function(quantisation: str, accumulate: Literal["float16", "float32"]) -> None:
    model = take_apart("qwen3moe", quantisation)
    ids = np.arange(100, dtype=np.int32)
    results = []
    for backend in (GgmlExperts(Device("CPU")), NumpyExperts(accumulate)):
        layer = model.load(backend)
        results.append(backend.compute(layer.layer, rows(100, layer.n_in), ids, ids % 8))
    assert same_function(compare(results[1], results[0]))


@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1.8e-2])
def test_a_wrong_scale_is_told_from_rounding(relative: float) -> None:
    """Rounding goes either way. The same distance all in one direction is another function."""
    random = np.random.default_rng(5)
    expected = random.standard_normal((8, 64), np.float32)
    rounded = expected * (1 + np.float32(relative) * random.standard_normal((8, 64), np.float32))
    assert not one_sided(compare(rounded, expected))
    for scale in (1 + max(relative, 1e-3), 1 - max(relative, 1e-3)):
        assert one_sided(compare(expected * np.float32(scale), expected))
