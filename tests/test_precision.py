"""Measured precision: the probe against real backends, against models of kernels, and its verdicts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends.device import Device
from backends.experts import F32, GgmlExperts
from backends.ggml import library
from backends.gguf_types import GGML_TYPES
from backends.measure import measure_precision
from backends.numpy_functions import round_activations
from backends.numpy_reference import NumpyExperts
from backends.probe_weights import WEIGHT_TYPES
from capabilities import precision
from capabilities.errors import PeerMistake
from capabilities.precision import (
    BATCH_WIDTHS,
    MeasuredPrecision,
    Precision,
    Verdict,
    effective,
    judge,
    kept,
    probe_rows,
    worst,
)
from tests.kernel_models import ChangesWithWidth, Interleaved, RoundsInBlocks, rounded_in_blocks
from tests.patience import PATIENCE_S

KINDS = {known.name: kind for kind, known in GGML_TYPES.items()}
FEW_KINDS = ("f32", "f16", "bf16", "q4_0", "q8_0", "q4_K")
FEW_WIDTHS = (1, 2, 9, 33)
F32_, F16, BF16, Q8, UNKNOWN = Precision.F32, Precision.F16, Precision.BF16, Precision.Q8, Precision.UNKNOWN


@cache
def cpu() -> Device:
    return Device("CPU")


def cpu_source(name: str) -> Precision:
    """What ggml's CPU kernels convert activations to."""
    return {"f32": F32_, "f16": F16, "bf16": BF16}.get(name, Q8)


# -- real backends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW_KINDS)
@pytest.mark.parametrize("width", FEW_WIDTHS)
def test_sums_in_halves_are_caught_at_any_width(name: str, width: int) -> None:
    for ask_f32 in (False, True):
        verdict = measure_precision(NumpyExperts("float16"), KINDS[name], (width,), ask_f32=ask_f32)
        assert verdict == Verdict(F16, F16)


@pytest.mark.parametrize("name", FEW_KINDS)
@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_exact_sums_are_not_accused(name: str, accumulate: str) -> None:
    plain = NumpyExperts("float32" if accumulate == "float32" else "float64")
    assert measure_precision(plain, KINDS[name], FEW_WIDTHS) == Verdict(F32_, F32_)
    as_kernels = NumpyExperts("float32" if accumulate == "float32" else "float64", quantize_activations=True)
    assert measure_precision(as_kernels, KINDS[name], FEW_WIDTHS) == Verdict(F32_, cpu_source(name))


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: GGML_TYPES[kind].name)
def test_ggmls_cpu_kernels(kind: int, repack: bool) -> None:
    name = GGML_TYPES[kind].name
    backend = GgmlExperts(cpu(), repack=repack)
    widths = BATCH_WIDTHS if name in ("f16", "q4_0", "q4_K") else FEW_WIDTHS
    for ask_f32 in (False, True):
        verdict = measure_precision(backend, kind, widths, ask_f32=ask_f32)
        assert verdict.source is cpu_source(name)
        if name == "f16" and platform.machine() not in ("x86_64", "AMD64"):
            assert verdict.accumulation in (F32_, F16)  # ARM's kernels with half-precision arithmetic add in it
        else:
            assert verdict.accumulation is F32_
    assert backend.held(1 << 20) == frozenset()


_VULKAN_CHILD = """
import ctypes, json
ctypes.CDLL("libvulkan.so.1")
from backends.device import Device, list_devices
from backends.gguf_types import GGML_TYPES
from backends.measure import Request, measure_device
name = next((info.name for info in list_devices() if info.backend == "Vulkan"), None)
kinds = tuple(kind for kind, known in GGML_TYPES.items() if known.name in ("f16", "q4_0", "q8_0"))
print(json.dumps(None if name is None else measure_device(Device(name), Request(kinds, 512, 256)).to_json()))
"""


def test_ggmls_vulkan_on_mesas_software_driver() -> None:
    """A real backend that adds in halves above a width, and in F32 when asked. Only where it is built."""
    if not any(library().folder.glob("*ggml-vulkan*")):
        pytest.skip("llama-cpp-python is built without Vulkan: libggml-vulkan is missing")
    if not any(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")):
        pytest.skip("Mesa's software driver is not installed: lvp_icd.json (mesa-vulkan-drivers) is missing")
    done = subprocess.run(
        [sys.executable, "-c", _VULKAN_CHILD],
        cwd=Path(__file__).parents[1], env={**os.environ, "GGML_VK_VISIBLE_DEVICES": "0"},
        capture_output=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured is not None, "ggml found no Vulkan device"
    for name, of_type in measured["types"].items():
        accumulation = MeasuredPrecision.from_json(of_type["accumulation"])
        assert (accumulation.measured, accumulation.measured_when_asked) == (F16, F32_), name


# -- what a wrong probe would miss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 5, 8, 9, 17, 33])
def test_a_backend_that_changes_above_a_width_is_caught(at: int) -> None:
    backend = ChangesWithWidth(NumpyExperts("float32"), NumpyExperts("float16"), at)
    widths = tuple(width for width in BATCH_WIDTHS if width <= 64)  # for speed
    assert measure_precision(backend, KINDS["q4_0"], widths) == Verdict(F16, F16)
    # The probe of one row alone would believe it, and so would one that stopped before the limit.
    assert measure_precision(backend, KINDS["q4_0"], (1,)) == Verdict(F32_, F32_)
    below = tuple(width for width in BATCH_WIDTHS if width < at)
    assert measure_precision(backend, KINDS["q4_0"], below) == Verdict(F32_, F32_)


def test_f32_when_asked_is_seen_apart() -> None:
    for honours, expected in ((True, F32_), (False, F16)):
        backend = ChangesWithWidth(NumpyExperts("float32"), NumpyExperts("float16"), 8, honours=honours)
        assert measure_precision(backend, KINDS["f16"], FEW_WIDTHS, ask_f32=True).accumulation is expected
        assert measure_precision(backend, KINDS["f16"], FEW_WIDTHS).accumulation is F16


def test_no_width_at_all_is_no_verdict() -> None:
    assert measure_precision(NumpyExperts("float32"), KINDS["f16"], ()) == Verdict()


# -- why the verdict is right: sums in any order ----------------------------------------------------------------------


def sums(x: F32, weight: float, *, half: bool, lanes: int, run: int, parts: int) -> F32:
    """Products of rows x [n, width] with a constant: `parts` of the row, each `lanes` sums over runs of `run` products.

    A sum is rounded after each run, to half precision or to single. The parts are added in single precision.
    """
    kind = np.float16 if half else np.float32
    terms = (x.astype(np.float64) * weight).reshape(len(x), parts, -1, lanes, run).sum(axis=-1)
    total = np.zeros((len(x), parts, lanes), kind)
    for step in range(terms.shape[2]):
        total = (total.astype(np.float64) + terms[:, :, step]).astype(kind)
    while total.shape[2] > 1:
        total = total[:, :, ::2] + total[:, :, 1::2]
    return total[:, :, 0].sum(axis=1, dtype=np.float32)


# Beyond 128 values at once, the more parts there are, the less is lost by any of them.
ORDERS = [
    (lanes, run, parts)
    for lanes in (1, 4, 32, 128, 256, 512)
    for run in (1, 4, 16, 64)
    for parts in (1, 2, 4, 8)
    if lanes * run <= (512 if parts == 1 else 128)
]


@pytest.mark.parametrize("weight", [0.5, 0.5625])  # those of the templates
@pytest.mark.parametrize(("lanes", "run", "parts"), ORDERS)
def test_sums_in_any_order(lanes: int, run: int, parts: int, weight: float) -> None:
    rows = probe_rows()
    x = np.stack([row.x for row in rows])

    def shares(half: bool) -> dict[str, float]:
        y = sums(x, weight, half=half, lanes=lanes, run=run, parts=parts)
        return {row.name: kept(row, y[i], weight) for i, row in enumerate(rows)}

    single, half = shares(half=False), shares(half=True)
    assert judge(single) == Verdict(F32_, F32_)
    assert judge(half).accumulation is F16
    if parts <= 4:  # with 8-bit activations the row of short sums says nothing; an eighth is shorter than a cycle
        eight_bits = {precision.PARTS: 0.0, precision.ELEVEN_BITS: 0.0, precision.MORE_BITS: 0.0}
        assert judge(single | eight_bits) == Verdict(F32_, Q8)
        assert judge(half | eight_bits) == Verdict(F16, Q8)


@pytest.mark.parametrize("lanes", [1, 32])
def test_other_half_precision_kernels(lanes: int) -> None:
    assert measure_precision(Interleaved(lanes), KINDS["q4_0"], (1, 9)).accumulation is F16


def test_bits_of_single_precision_are_far_from_the_limit() -> None:
    """The docstring's 0.13 is a bound; every order that was tried stays within a tenth of it."""
    rows = probe_rows()
    x = np.stack([row.x for row in rows])
    for lanes, run, parts in ORDERS:
        y = sums(x, 0.5, half=False, lanes=lanes, run=run, parts=parts)
        shares = [kept(row, y[i], 0.5) for i, row in enumerate(rows)]
        assert max(abs(share - 1) for share in shares) < 0.013


# -- why the verdict is right: activations ----------------------------------------------------------------------------


def judged(rounded: Callable[[F32], F32]) -> Verdict:
    """The verdict on exact sums of activations that went through a rounding."""
    rows = probe_rows()
    return judge({row.name: kept(row, rounded(row.x[None]).sum(dtype=np.float64)[None], 1.0) for row in rows})


def significant(bits: int) -> Callable[[F32], F32]:
    """Rounding to a number of significant bits, with any exponent."""

    def rounded(x: F32) -> F32:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)

    return rounded


@pytest.mark.parametrize(
    ("bits", "expected"), [(24, F32_), (15, F32_), (11, F16), (8, BF16), (4, UNKNOWN), (2, UNKNOWN)]
)
def test_floating_point_activations(bits: int, expected: Precision) -> None:
    """24: single; 11: half and TF32; 8: bfloat16; 4 and 2: 8-bit and 4-bit floating point."""
    verdict = judged(significant(bits))
    assert verdict.source is expected
    assert verdict.accumulation is (UNKNOWN if expected is UNKNOWN else F32_)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_activations_in_8_bit_blocks(block: int) -> None:
    assert judged(lambda x: rounded_in_blocks(x, block)) == Verdict(F32_, Q8)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "BF16", "F16"])
def test_activations_as_ggmls_kernels_round_them(name: str) -> None:
    verdict = judged(lambda x: round_activations(x, GGMLQuantizationType[name]))
    assert verdict == Verdict(F32_, cpu_source(name.lower()))


def test_one_8_bit_scale_a_row_is_no_known_source() -> None:
    """Such a row loses its small values before any sum: nothing can be said of sums, and nothing good of the rest."""
    assert judged(lambda x: rounded_in_blocks(x, 0)) == Verdict()
    assert measure_precision(RoundsInBlocks(0), KINDS["q4_0"], (1,)) == Verdict()


def test_4_bit_blocks_are_no_known_source() -> None:
    assert judged(lambda x: rounded_in_blocks(x, 32, levels=7)) == Verdict()


# -- other functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["zeros", "double", "negative", "nan", "infinite", "shifted"])
def test_another_function_has_no_precision(wrong: str) -> None:
    class Wrong(NumpyExperts):
        def compute(self, *args: object, **options: object) -> F32:
            y: F32 = super().compute(*args, **options)  # type: ignore[arg-type]
            return {
                "zeros": y * 0, "double": 2 * y, "negative": -y, "nan": y + np.nan, "infinite": y + np.inf,
                "shifted": np.roll(y, 1, axis=0),
            }[wrong]  # fmt: skip

    assert measure_precision(Wrong("float32"), KINDS["f32"], (9,)) == Verdict()


def test_one_wrong_output_is_enough() -> None:
    row = probe_rows()[0]
    y = np.full((3, 4), row.total / 2, np.float32)
    assert kept(row, y, 0.5) == pytest.approx(1)
    y[1, 2] = 0
    assert kept(row, y, 0.5) == 0
    y[1, 2] = np.nan
    assert kept(row, y, 0.5) > 1e300


def test_anything_lost_in_large_sums_is_bad_precision() -> None:
    shares = {row.name: 1.0 for row in probe_rows()}
    assert judge(shares) == Verdict(F32_, F32_)
    for name in (precision.START, precision.CYCLES):
        for share in (float("inf"), 0.7, 1.3, 0.0):
            assert judge(shares | {name: share}) == Verdict(F16, F32_)


def test_inner_sums_count_only_where_activations_can_show_them() -> None:
    shares = {row.name: 1.0 for row in probe_rows()} | {precision.INNER: 0.0}
    assert judge(shares) == Verdict(F16, F32_)
    eight_bits = shares | {precision.PARTS: 0.0, precision.ELEVEN_BITS: 0.0, precision.MORE_BITS: 0.0}
    assert judge(eight_bits) == Verdict(F32_, Q8)


# -- verdicts as values -----------------------------------------------------------------------------------------------


def test_the_worst_counts() -> None:
    assert worst([F32_, F32_]) is F32_
    assert worst([F32_, UNKNOWN]) is UNKNOWN
    assert worst([UNKNOWN, F16, F32_]) is F16
    assert worst([F16, BF16, Q8]) is Q8
    assert worst([]) is UNKNOWN


def test_a_claim_that_the_probe_contradicts_loses() -> None:
    assert effective(F32_, F16) is F16
    assert effective(F16, F32_) is F32_
    assert effective(F32_, F32_) is F32_
    assert effective(UNKNOWN, F32_) is F32_
    # Where nothing was measured, only a modest claim is believed.
    assert effective(F32_, UNKNOWN) is UNKNOWN
    assert effective(F16, UNKNOWN) is F16
    claimed = MeasuredPrecision(F32_, F16, F32_)
    assert (claimed.by_default, claimed.when_asked) == (F16, F32_)


def test_the_worst_of_several_types() -> None:
    several = [MeasuredPrecision(F32_, F32_, F32_), MeasuredPrecision(F32_, F16, F32_)]
    assert MeasuredPrecision.worst(several) == MeasuredPrecision(F32_, F16, F32_)
    assert MeasuredPrecision.worst([]) == MeasuredPrecision()


def test_precisions_travel_as_words() -> None:
    measured = MeasuredPrecision(F32_, F16, UNKNOWN)
    words = measured.to_json()
    assert words == {"declared": "f32", "measured": "f16", "measured_when_asked": "unknown"}
    assert MeasuredPrecision.from_json(words) == measured
    assert MeasuredPrecision.from_json(words | {"declared": "f8"}).declared is UNKNOWN
    for broken in (None, [], {}, "f32", words | {"measured": 1}, {"declared": "f32"}):
        with pytest.raises(PeerMistake):
            MeasuredPrecision.from_json(broken)


def test_probe_rows_are_what_they_say() -> None:
    for row in probe_rows():
        assert row.x.shape == (precision.PROBE_WIDTH,)
        assert row.total == row.x.astype(np.float64).sum()
        assert row.total > 0
        assert not row.x.flags.writeable
    assert [row.name for row in probe_rows()[:3]] == [precision.START, precision.CYCLES, precision.INNER]


@pytest.mark.parametrize(
    ("declared", "measured", "asked", "contradicted"),
    [
        ("f32", "f16", "f32", True),
        ("f32", "f32", "f16", True),
        ("f16", "q8", "unknown", True),
        ("f16", "bf16", "f16", True),
        ("f32", "f32", "f32", False),
        ("f16", "f32", "f32", False),  # better than claimed
        ("f32", "unknown", "unknown", False),  # not shown
        ("unknown", "q8", "q8", False),  # not claimed
    ],
)
def test_claims_that_the_probe_contradicts(declared: str, measured: str, asked: str, contradicted: bool) -> None:
    assert MeasuredPrecision(*map(Precision, (declared, measured, asked))).contradicted is contradicted
