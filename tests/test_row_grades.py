"""Rows of live work graded, over kernels as they are and as they might be, and over answers that are wrong."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.crafted_rows import references
from backends.device import Device
from backends.experts import F32, ExpertBackend, GgmlExperts, ReadSlice
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram, Node
from capabilities.row_check import RowReferences
from capabilities.row_grades import Grade, Graded, grade_rows
from scheduler.audit_tests import ODD
from tests.expert_models import made_up_layer
from tests.kernel_models import Interleaved

ROWS, WIDTH, HIDDEN = 48, 256, 128
IDS, TOKENS = np.zeros(ROWS, np.int32), np.arange(ROWS, dtype=np.int32)
GATE, UP, DOWN = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
PROGRAM = ExpertProgram(
    (
        Node("x"),
        Node("mul_mat_id", (0,), GATE, (0.0, 0.0)),
        Node("mul_mat_id", (0,), UP, (0.0, 0.0)),
        Node("glu", (1, 2), "SWIGLU", (0.0, 0.0, 0.0)),
        Node("mul_mat_id", (3,), DOWN, (0.0, 0.0)),
    )
)
TYPES = ("f32", "f16", "q4_0", "q8_0")


class Expert:
    """One expert of a made-up layer, rows for it, and what every known arithmetic gives."""

    def __init__(self, kind: str) -> None:
        random = np.random.default_rng(3)
        shapes = {GATE: (HIDDEN, WIDTH), UP: (HIDDEN, WIDTH), DOWN: (WIDTH, HIDDEN)}
        weights = {n: random.standard_normal((1, *s), np.float32) / np.float32(s[1] ** 0.5) for n, s in shapes.items()}
        self.layer, self.read = made_up_layer(weights, WIDTH, WIDTH, kind)
        self.x = random.standard_normal((ROWS, WIDTH), np.float32)
        self.own = self.rows(GgmlExperts(Device("CPU")))
        self._known = references(self.layer, PROGRAM, 0, self.read, self.x)

    def rows(self, backend: ExpertBackend, read: ReadSlice | None = None) -> F32:
        backend.load_layer(self.layer, PROGRAM, [0], read or self.read)
        return backend.compute(0, self.x, TOKENS, IDS)

    def refer(self, rows: NDArray[np.intp]) -> RowReferences:
        known = self._known
        rounded = tuple(r[rows] for r in known.rounded)
        return RowReferences(
            known.exact[rows],
            rounded,
            known.halves[rows],
            lambda some: known.half_sums(rows[some]),
            lambda some, ways: known.coarse(rows[some], ways),
        )

    def grade(self, answer: F32) -> Graded:
        return grade_rows(answer, self.own, self.refer, HIDDEN)


@cache
def expert(kind: str) -> Expert:
    return Expert(kind)


@pytest.mark.parametrize("kind", TYPES)
def test_this_machines_kernels_give_the_same_bits_one_row_or_many(kind: str) -> None:
    made = expert(kind)
    alone = GgmlExperts(Device("CPU"))
    alone.load_layer(made.layer, PROGRAM, [0], made.read)
    one_by_one = np.concatenate([alone.compute(0, made.x[[i]], TOKENS[:1], IDS[:1]) for i in range(ROWS)])
    assert made.grade(one_by_one).count(Grade.SAME) == ROWS


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("rounds", [False, True])
def test_sums_in_f32_are_within_tolerance_however_activations_are_rounded(
    kind: str, precision: str, rounds: bool
) -> None:
    made = expert(kind)
    graded = made.grade(made.rows(NumpyExperts(precision, quantize_activations=rounds)))  # type: ignore[arg-type]
    assert graded.count(Grade.SAME) + graded.count(Grade.WITHIN) == ROWS


@pytest.mark.parametrize("kind", TYPES)
def test_sums_in_half_precision_are_coarse_seldom_odd_and_never_wrong(kind: str) -> None:
    made = expert(kind)
    for backend in (NumpyExperts("float16"), Interleaved(8), Interleaved(1)):
        graded = made.grade(made.rows(backend))
        assert graded.count(Grade.WRONG) == 0
        assert graded.count(Grade.COARSE) > 0.95 * ROWS
        assert 0.4 < np.median(graded.ratio) < 4
        assert graded.odd.mean() <= ODD[0]


@pytest.mark.parametrize("kind", TYPES)
def test_another_function_is_wrong(kind: str) -> None:
    made = expert(kind)
    own = made.own
    for answer in (np.roll(own, 1, 0), 0 * own, -own, own * np.float32(1.05), np.full_like(own, np.nan)):
        assert made.grade(answer).count(Grade.WRONG) > 0.9 * ROWS


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_so_are_subtly_wrong_weights(kind: str) -> None:
    """One bit in every hundred bytes."""
    made = expert(kind)

    def read(number: int, tensor: int) -> bytes:
        raw = np.frombuffer(made.read(number, tensor), np.uint8).copy()
        raw[np.random.default_rng(tensor).integers(0, len(raw), len(raw) // 100)] ^= 1
        return raw.tobytes()

    assert made.grade(made.rows(GgmlExperts(Device("CPU")), read)).count(Grade.WRONG) > 0.9 * ROWS


@pytest.mark.parametrize("factor", [1.005, 0.995, 1.01])
def test_a_wrong_length_is_odd_and_no_rounding(factor: float) -> None:
    graded = expert("q4_0").grade(expert("q4_0").own * np.float32(factor))
    assert graded.odd.mean() > 0.75
    assert graded.count(Grade.COARSE) + graded.count(Grade.WRONG) == ROWS


def test_a_small_error_in_all_directions_may_be_coarse_and_its_ratio_tells() -> None:
    made = expert("q4_0")
    noise = np.random.default_rng(1).standard_normal(made.own.shape)
    graded = made.grade((made.own * (1 + 8e-3 * noise)).astype(np.float32))
    assert graded.count(Grade.WITHIN) == 0
    assert np.median(graded.ratio) > 4.5
    assert graded.odd.mean() > 0.75


def test_without_references_the_size_decides() -> None:
    made = expert("q4_0")

    def off(by: float) -> Graded:
        signs = np.resize([1.0, -1.0], made.own.shape)
        answer = (made.own * (1 + by * signs)).astype(np.float32)
        return grade_rows(answer, made.own, lambda _: None, HIDDEN)

    assert off(1e-3).count(Grade.WITHIN) == ROWS
    assert off(5e-2).count(Grade.COARSE) == ROWS
    assert off(2e-1).count(Grade.WRONG) == ROWS


def test_a_row_of_zeros_agrees_with_zeros_alone() -> None:
    zeros = np.zeros((2, 8), np.float32)
    assert grade_rows(zeros, zeros, lambda _: None, 8).count(Grade.SAME) == 2
    assert grade_rows(zeros + 1, zeros, lambda _: None, 8).count(Grade.WRONG) == 2


def test_a_single_row_may_be_off_by_a_code_at_a_tie_and_not_all_of_them() -> None:
    expert = Expert("q4_0")
    references_ = expert.refer(np.arange(ROWS))
    rounding = np.linalg.norm(references_.rounded[1] - references_.exact, axis=1) / np.linalg.norm(
        references_.exact, axis=1
    )
    longer = (expert.own * (1 + rounding[:, None])).astype(np.float32)
    one, most = expert.own.copy(), expert.own.copy()
    one[7] = longer[7]
    most[: ROWS * 2 // 3] = longer[: ROWS * 2 // 3]
    assert expert.grade(one).count(Grade.COARSE) == 1
    assert expert.grade(one).odd.sum() == 1
    assert expert.grade(one).count(Grade.WRONG) == 0
    assert expert.grade(most).count(Grade.WRONG) > ROWS // 4
    assert expert.grade(longer).count(Grade.WRONG) > 0.7 * ROWS
    one[7] = expert.own[7] * (1 + 3 * rounding[7])
    assert expert.grade(one).count(Grade.WRONG) == 1
