"""Activations rounded coarsely: what the formats can hold, and rows that are coarse whoever computes them so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.known_roundings import ROUNDINGS, to_codes, to_codes_with_offset, to_float
from backends.numpy_functions import round_activations
from backends.numpy_reference import NumpyExperts
from capabilities.row_grades import Grade
from scheduler.audit_tests import ODD
from tests.kernel_models import Rounds, RoundsInBlocks
from tests.test_row_grades import IDS, PROGRAM, ROWS, TOKENS, Expert, expert

Rounding = Callable[[F32], F32]


def activations(rows: int = 6, width: int = 96) -> F32:
    """Numbers of every size, and some that outweigh the others."""
    random = np.random.default_rng(2)
    x = random.standard_normal((rows, width), np.float32)
    x[:, 3] *= 30
    x[0] *= 1e-6
    x[1, 32:64] = 0
    return x


# -- formats -----------------------------------------------------------------------------------------------------------


def test_8_and_4_bit_floats_are_those_that_their_bits_can_say() -> None:
    def every(exponent_bits: int, bits: int, bias: int, largest: float) -> set[float]:
        numbers = {0.0}
        for exponent in range(2**exponent_bits):
            for mantissa in range(2**bits):
                share = mantissa / 2**bits
                scale = 2.0 ** (max(exponent, 1) - bias)
                numbers.add(scale * (share + (exponent > 0)))
        return {number for number in numbers if number <= largest}

    x = np.random.default_rng(1).standard_normal(20_000).astype(np.float32) * np.float32(40)
    for form, known in (
        ((3, -6, 448.0), every(4, 3, 7, 448.0)),
        ((2, -14, 57344.0), every(5, 2, 15, 57344.0)),
        ((1, 0, 6.0), every(2, 1, 1, 6.0)),
    ):
        ordered = np.array(sorted(known))
        nearest = ordered[np.abs(np.abs(x)[:, None] - ordered).argmin(axis=1)]
        got = np.abs(to_float(x[None], *form)[0])
        assert set(got.tolist()) <= known
        apart = np.abs(np.abs(x) - nearest)
        assert np.allclose(np.abs(np.abs(x) - got), apart), "the nearest number, but for ties"


def test_half_and_bfloat16_are_numpys_and_ggmls() -> None:
    x = activations()
    assert np.array_equal(ROUNDINGS["f16"](x), x.astype(np.float16).astype(np.float32))
    assert np.array_equal(ROUNDINGS["bf16"](x), round_activations(x, GGMLQuantizationType.BF16))
    cut = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert np.array_equal(ROUNDINGS["bf16 cut off"](x), cut)


def test_codes_are_256_at_most_and_offsets_keep_zero() -> None:
    x = activations() + np.float32(3)
    for rounding in (partial(to_codes, block=0), partial(to_codes_with_offset, block=0)):
        rounded = rounding(x)
        assert all(len(set(row.tolist())) <= 256 for row in rounded)
        assert (np.abs(rounded - x).max(axis=1) <= 1.02 * np.abs(x).max(axis=1) / 127).all()
    x[2, 5] = 0
    assert to_codes_with_offset(x, 0)[2, 5] == 0


@pytest.mark.parametrize("name", ROUNDINGS)
def test_each_rounds_rows_by_themselves_and_keeps_zeros(name: str) -> None:
    x, rounding = activations(), ROUNDINGS[name]
    rounded = rounding(x)
    assert rounded.dtype == np.float32
    assert rounded.shape == x.shape
    assert np.isfinite(rounded).all()
    assert 1e-5 < np.linalg.norm(rounded - x) / np.linalg.norm(x) < 0.3
    assert np.array_equal(rounding(np.zeros_like(x)), np.zeros_like(x))
    if "batch" not in name:
        assert np.array_equal(rounding(x[2:4]), rounded[2:4])


# -- rows --------------------------------------------------------------------------------------------------------------


def is_honest(made: Expert, rows: F32) -> None:
    graded = made.grade(rows)
    assert graded.count(Grade.WRONG) == 0
    assert graded.odd.mean() <= ODD[0]


@pytest.mark.parametrize(("number", "name"), list(enumerate(ROUNDINGS)))
def test_rows_of_coarse_activations_are_not_wrong(number: int, name: str) -> None:
    """Of each, one place where it may round, with kernels that round once more or not: what each has, others have."""
    made, each = expert("q4_0"), ROUNDINGS[name]
    roundings = ([each], [each, each, None], [None, None, each])[number % 3]
    is_honest(made, made.rows(Rounds(roundings, as_kernels=number % 2 == 1)))


@pytest.mark.parametrize("block", [16, 64, 128, 0])
def test_nor_are_those_that_somebody_else_rounds(block: int) -> None:
    for kind in ("q4_0", "q8_0", "f16"):
        is_honest(expert(kind), expert(kind).rows(RoundsInBlocks(block)))


def test_nor_those_of_this_machines_kernels_over_a_rounded_input() -> None:
    made = expert("q4_0")
    for name in ("codes by row", "e4m3", "e5m2 by 32", "nvfp4"):
        kernels = GgmlExperts(Device("CPU"))
        kernels.load_layer(made.layer, PROGRAM, [0], made.read)
        is_honest(made, kernels.compute(0, ROUNDINGS[name](made.x), TOKENS, IDS))
        kernels.close()


def test_coarse_rows_are_no_hiding_place() -> None:
    """Subtly wrong weights, and rows that are too large, are found however their peer rounds."""
    made = expert("q4_0")

    def read(number: int, tensor: int) -> bytes:
        raw = np.frombuffer(made.read(number, tensor), np.uint8).copy()
        raw[np.random.default_rng(tensor).integers(0, len(raw), len(raw) // 100)] ^= 8
        return raw.tobytes()

    for name in ("codes by row", "e4m3 by row", "codes by 64"):
        backend = Rounds([ROUNDINGS[name]])
        graded = made.grade(made.rows(backend, read))
        assert graded.odd.mean() > ODD[1]
        assert made.grade(made.rows(backend) * np.float32(1.05)).odd.mean() > ODD[1]


def test_nobody_computes_them_for_a_row_that_is_right_or_merely_coarse() -> None:
    made, asked = Expert("q4_0"), []
    refer = made.refer

    def counting(rows: I32) -> object:
        references = refer(rows)
        coarse = references.coarse

        def ask(some: I32, ways: object) -> object:
            asked.append(len(some))
            return coarse(some, ways)

        object.__setattr__(references, "coarse", ask)
        return references

    made.refer = counting  # type: ignore[assignment, method-assign]
    for backend in (NumpyExperts("float64"), NumpyExperts("float16")):
        made.grade(made.rows(backend))
    assert asked == []
    made.grade(made.rows(RoundsInBlocks(0)))
    assert asked == [4, ROWS - 4]
