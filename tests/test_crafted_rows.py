"""The check in service: crafted rows tell how a worker adds, and the verdict is unknown where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.crafted_rows import HOT_SHARE, crafted_rows, references
from backends.device import Device
from backends.experts import F32, ExpertBackend, GgmlExperts, ReadSlice
from backends.manifest import LayerExperts
from backends.numpy_reference import NumpyExperts
from backends.probe_weights import SWIGLU
from backends.program import ExpertProgram, Node
from capabilities.errors import UnsupportedModel
from capabilities.precision import Precision
from capabilities.row_check import ROWS_MIN, RowReferences, distance, stretch
from tests.expert_models import TakenApart, made_up_layer, take_apart
from tests.kernel_models import ChangesWithWidth, Interleaved, RoundsInBlocks

N_IN, N_FF, ROWS, EXPERT = 1024, 256, 16, 1
MERGED = ExpertProgram(
    (
        Node("x"),
        Node("mul_mat_id", (0,), "ffn_gate_up_exps.weight", (0.0, 0.0)),
        Node("glu", (1,), "SWIGLU", (0.0, 0.0, 0.0)),
        Node("mul_mat_id", (2,), "ffn_down_exps.weight", (0.0, 0.0)),
    )
)


@dataclass(frozen=True, eq=False)
class Check:
    """A layer of two experts and a check of the second."""

    layer: LayerExperts
    program: ExpertProgram
    read: ReadSlice
    x: F32
    references: RowReferences

    def answer(self, backend: ExpertBackend, x: F32 | None = None, experts: Sequence[int] = (0, 1)) -> F32:
        backend.load_layer(self.layer, self.program, experts, self.read)
        rows = np.arange(ROWS, dtype=np.int32)
        try:
            return backend.compute(self.layer.layer, self.x if x is None else x, rows, rows * 0 + EXPERT)
        finally:
            backend.unload_layer(self.layer.layer)

    def judge(self, backend: ExpertBackend) -> Precision:
        return self.references.judge(self.answer(backend))


def ordinary_rows() -> F32:
    """Of different lengths, as tokens' are."""
    random = np.random.default_rng(7)
    return random.standard_normal((ROWS, N_IN), np.float32) * random.uniform(0.5, 2, (ROWS, 1)).astype(np.float32)


@cache
def check(quantisation: str, *, merged: bool = False, sent_as_q8_0: bool = False) -> Check:
    random = np.random.default_rng(3)

    def weights(rows: int, width: int) -> F32:
        return random.standard_normal((2, rows, width), np.float32) / np.float32(np.sqrt(width))

    gate, up, down = 1.5 * weights(N_FF, N_IN), weights(N_FF, N_IN), weights(N_IN, N_FF)
    if merged:
        tensors = {"ffn_gate_up_exps.weight": np.concatenate([gate, up], axis=1), "ffn_down_exps.weight": down}
    else:
        tensors = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up, "ffn_down_exps.weight": down}
    layer, read = made_up_layer(tensors, N_IN, N_IN, quantisation)
    program = MERGED if merged else SWIGLU

    def through_q8_0(x: F32) -> F32:
        return dequantize_q8_0(quantize_q8_0(x))

    rounding: Callable[[F32], F32] = through_q8_0 if sent_as_q8_0 else lambda x: x
    x = crafted_rows(layer, program, EXPERT, read, ordinary_rows(), seed=11, round_row=rounding)
    return Check(layer, program, read, x, references(layer, program, EXPERT, read, x))


CHECKS = {
    "f16": lambda: check("f16"),
    "q4_0": lambda: check("q4_0"),
    "q4_0 sent as Q8_0": lambda: check("q4_0", sent_as_q8_0=True),
    "q4_K": lambda: check("q4_k"),
    "q8_0 merged": lambda: check("q8_0", merged=True),
}


@pytest.fixture(params=CHECKS)
def checked(request: pytest.FixtureRequest) -> Check:
    return CHECKS[request.param]()


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_sums_in_halves_are_caught(checked: Check) -> None:
    assert checked.judge(NumpyExperts("float16")) is Precision.F16
    assert checked.judge(Interleaved(1)) is Precision.F16


def test_sums_in_single_precision_are_not_accused(checked: Check) -> None:
    assert checked.judge(NumpyExperts("float64")) is Precision.F32
    assert checked.judge(NumpyExperts("float32")) is Precision.F32
    assert checked.judge(NumpyExperts("float32", quantize_activations=True)) is Precision.F32


def test_kernels_of_gpus_are_not_accused() -> None:
    """8-bit blocks of 32 where CPUs take 256, with scales in single precision; and both factors in halves."""
    checked = check("q4_k")
    assert checked.judge(RoundsInBlocks(32)) is Precision.F32
    halves = checked.x.astype(np.float16).astype(np.float32)
    assert checked.references.judge(checked.answer(NumpyExperts("float32"), halves)) is Precision.F32


@pytest.mark.parametrize("repack", [True, False])
def test_ggmls_cpu_kernels_are_not_accused(checked: Check, repack: bool) -> None:
    assert checked.judge(GgmlExperts(Device("CPU"), repack=repack)) is Precision.F32


def test_a_kernel_that_changes_with_width_is_caught_in_a_batch(checked: Check) -> None:
    backend = ChangesWithWidth(NumpyExperts("float32"), NumpyExperts("float16"), ROWS)
    assert checked.judge(backend) is Precision.F16
    backend.load_layer(checked.layer, checked.program, [EXPERT], checked.read)
    first = np.zeros(1, np.int32)
    one_by_one = [backend.compute(0, checked.x[row : row + 1], first, first + EXPERT) for row in range(ROWS)]
    assert checked.references.judge(np.concatenate(one_by_one)) is Precision.F32


def test_margins(checked: Check) -> None:
    """Both verdicts are far from their limits."""
    exact, halves = checked.references.exact, checked.references.halves
    kernels = checked.answer(GgmlExperts(Device("CPU")))
    nearest = min(distance(kernels, reference) for reference in (exact, *checked.references.rounded))
    assert nearest < 0.05 * distance(halves, exact)
    sequential = checked.answer(Interleaved(1))
    assert stretch(sequential, exact) > 1.5 * stretch(halves, exact)
    assert stretch(checked.references.rounded[0], exact) > 5e-5  # of activations in halves
    assert stretch(halves, exact) > 3.5 * stretch(checked.references.rounded[0], exact)


def test_an_unknown_rounding_is_unknown(checked: Check) -> None:
    """Activations in blocks that nobody described, sums in F32: farther from exact than half-precision sums."""
    exact, halves = checked.references.exact, checked.references.halves
    for block in (16, 0):
        answer = checked.answer(RoundsInBlocks(block))
        assert distance(answer, exact) > distance(halves, exact)
        assert checked.references.judge(answer) is Precision.UNKNOWN


def test_another_expert_or_function_is_unknown(checked: Check) -> None:
    answer = checked.answer(NumpyExperts("float64"))
    rows = np.arange(ROWS, dtype=np.int32)
    backend = NumpyExperts("float64")
    backend.load_layer(checked.layer, checked.program, [0], checked.read)
    other = backend.compute(checked.layer.layer, checked.x, rows, rows * 0)
    for wrong in (other, answer * 2, -answer, answer * 0, np.roll(answer, 1, axis=0), answer[:, ::-1]):
        assert checked.references.judge(wrong) is Precision.UNKNOWN


def test_answers_that_cannot_be_judged(checked: Check) -> None:
    answer = checked.answer(NumpyExperts("float64"))
    poisoned = answer.copy()
    poisoned[3, 5] = np.nan
    infinite = answer.copy()
    infinite[0, 0] = np.inf
    for wrong in (poisoned, infinite, answer[:-1], answer[:, :-1], np.empty((0, N_IN), np.float32)):
        assert checked.references.judge(wrong) is Precision.UNKNOWN
    few = slice(ROWS_MIN - 1)
    exact, rounded, halves = checked.references.exact, checked.references.rounded, checked.references.halves
    short = RowReferences(exact[few], tuple(r[few] for r in rounded), halves[few])
    assert short.judge(answer[few]) is Precision.UNKNOWN


def test_rows_that_do_not_separate_are_no_evidence() -> None:
    """Where half-precision activations stretch rows nearly as much as half-precision sums, nobody is accused."""
    exact = np.random.default_rng(0).standard_normal((ROWS, 32))
    for of_halves, expected in ((2e-3, Precision.UNKNOWN), (4e-3, Precision.F16)):
        known = RowReferences(exact, (exact * (1 + 1e-3),), exact * (1 + of_halves))
        assert known.judge(exact * (1 + of_halves)) is expected
        assert known.judge(exact * (1 + 1e-3)) is Precision.F32


def test_ordinary_rows_do_not_tell() -> None:
    """Why rows are crafted: on ordinary ones errors of half-precision sums point anywhere, as those of roundings do."""
    checked = check("q4_0")
    x = ordinary_rows()
    ordinary = references(checked.layer, checked.program, EXPERT, checked.read, x)
    assert ordinary.judge(checked.answer(NumpyExperts("float16"), x)) is Precision.UNKNOWN
    along = stretch(ordinary.halves, ordinary.exact) / distance(ordinary.halves, ordinary.exact)
    crafted = checked.references
    assert stretch(crafted.halves, crafted.exact) / distance(crafted.halves, crafted.exact) > 2 * along


# -- rows that look like others ---------------------------------------------------------------------------------------


def test_crafted_rows_look_ordinary(checked: Check) -> None:
    ordinary = ordinary_rows()
    assert checked.x.shape == ordinary.shape
    assert checked.x.dtype == np.float32
    lengths = np.linalg.norm(checked.x, axis=1) / np.linalg.norm(ordinary, axis=1)
    assert lengths == pytest.approx(np.ones(ROWS), rel=1e-2)
    # The spread of values within a row: largest over mean, and the share of small ones.
    peaks = [np.abs(x).max(axis=1) / np.sqrt((x**2).mean(axis=1)) for x in (checked.x, ordinary)]
    assert 0.7 < np.median(peaks[0]) / np.median(peaks[1]) < 1.4
    small = [np.mean(np.abs(x) < 0.5 * np.sqrt((x**2).mean(axis=1, keepdims=True))) for x in (checked.x, ordinary)]
    assert small[0] == pytest.approx(small[1], rel=0.15)
    # Every row differs, and is turned no further than it says.
    cosines = (checked.x * ordinary).sum(axis=1) / (lengths * np.linalg.norm(ordinary, axis=1) ** 2)
    assert cosines.min() > np.sqrt(1 - HOT_SHARE**2) - 0.1


def test_rows_are_chosen_by_the_seed() -> None:
    checked = check("q4_0")
    rows = [crafted_rows(checked.layer, SWIGLU, EXPERT, checked.read, ordinary_rows(), seed) for seed in (11, 11, 12)]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], checked.x)
    assert not np.array_equal(rows[0], rows[2])


def test_rows_as_they_are_sent() -> None:
    checked = check("q4_0", sent_as_q8_0=True)
    assert np.array_equal(checked.x, dequantize_q8_0(quantize_q8_0(checked.x)))


def test_a_tiny_expert_tells_nothing_bad_of_good_sums() -> None:
    """Short sums hardly suffer from halves: the verdict may be unknown, but never wrong."""
    for kind, quantisation in (("qwen3moe", "q4_0"), ("gpt-oss", "q4_0"), ("deepseek2-merged", "f32")):
        model = take_apart(kind, quantisation)
        layer, program = model.layer, model.program

        def read(expert: int, tensor: int, model: TakenApart = model) -> memoryview | bytes:
            spec = model.layer
            return model.source.read(spec.layer, expert, spec.offsets[tensor], spec.tensors[tensor].nbytes)

        random = np.random.default_rng(0)
        x = crafted_rows(layer, program, 0, read, random.standard_normal((64, layer.n_in), np.float32), 0)
        known = references(layer, program, 0, read, x)
        verdicts = []
        for backend in (GgmlExperts(Device("CPU")), NumpyExperts("float32"), NumpyExperts("float16")):
            backend.load_layer(layer, program, [0], read)
            rows = np.arange(len(x), dtype=np.int32)
            verdicts.append(known.judge(backend.compute(layer.layer, x, rows, rows * 0)))
        assert verdicts[0] in (Precision.F32, Precision.UNKNOWN)
        assert verdicts[1] is Precision.F32
        assert verdicts[2] in (Precision.F16, Precision.UNKNOWN)


def test_weights_that_cannot_be_dequantised_are_refused() -> None:
    checked = check("q4_0")
    tensors = tuple(type(t)(t.name, 41, t.shape, t.nbytes) for t in checked.layer.tensors)
    layer = LayerExperts(0, 2, 2, N_IN, N_IN, 0, tensors, checked.layer.hashes)
    with pytest.raises(UnsupportedModel, match="cannot be dequantised"):
        crafted_rows(layer, SWIGLU, EXPERT, checked.read, ordinary_rows(), 0)
    without = ExpertProgram((Node("x"), Node("sqr", (0,))))
    with pytest.raises(UnsupportedModel, match="no matrix"):
        crafted_rows(checked.layer, without, EXPERT, checked.read, ordinary_rows(), 0)
