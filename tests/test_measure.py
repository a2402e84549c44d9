"""Measuring backends: classes, invariance, rates, deadlines, and measurements that are kept."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends import measure, numeric_class, probe_weights
from backends.class_inputs import product_rows, rows_on_ties, unit_values
from backends.device import Device
from backends.experts import F32, GgmlExperts
from backends.gguf_types import GGML_TYPES
from backends.measure import Request, measure_backend, measure_device
from backends.numpy_reference import NumpyExperts
from backends.probe_weights import WEIGHT_TYPES, even_layer, noise
from backends.program import Node
from capabilities.errors import Internal
from capabilities.measurement import TypeMeasurement
from capabilities.precision import MeasuredPrecision, Precision
from tests.expert_models import take_apart
from tests.patience import LOADED

KINDS = {known.name: kind for kind, known in GGML_TYPES.items()}
F16, Q4_0, Q4_K = KINDS["f16"], KINDS["q4_0"], KINDS["q4_K"]
SMALL = Request((F16, Q4_0), 256, 256)


@cache
def cpu() -> Device:
    return Device("CPU")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less work: fewer widths, shorter rates."""
    monkeypatch.setattr(measure, "BATCH_WIDTHS", (1, 2, 9, 33))
    monkeypatch.setattr(numeric_class, "WIDTHS", (1, 2, 5, 9))
    monkeypatch.setattr(measure, "RATE_S", 0.002)
    monkeypatch.setattr(measure, "RATE_BYTES", 1 << 20)


# -- weights ----------------------------------------------------------------------------------------------------------


def dequantised(kind: int, data: bytes) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = gguf.dequantize(np.frombuffer(data, np.uint8)[None], GGMLQuantizationType(kind))
    return values[0]


@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: GGML_TYPES[kind].name)
def test_even_weights_are_exactly_even(kind: int) -> None:
    probe, value = even_layer(kind, 256, 2, 2)
    data = bytes(probe.read(0, 0))
    assert len(data) == probe.layer.tensors[0].nbytes
    if kind in (KINDS["q1_0"], KINDS["q2_0"]):  # gguf cannot dequantise these; ggml itself is asked below
        backend = GgmlExperts(cpu())
        backend.load_layer(probe.layer, probe.program, [0, 1], probe.read)
        one, first = np.zeros((1, 256), np.float32), np.zeros(1, np.int32)
        one[0, 3] = 127.0  # what 8-bit blocks hold exactly
        assert backend.compute(probe.layer.layer, one, first, first)[0].tolist() == [127 * value, 127 * value]
    else:
        assert set(dequantised(kind, data).tolist()) == {value}


@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: GGML_TYPES[kind].name)
def test_noise_has_a_size_that_kernels_meet(kind: int) -> None:
    """Of about 1 / sqrt(width): else SwiGLU would saturate and hide how a kernel computes it."""
    data = noise(kind, 1024, 8, "test")
    assert data == noise(kind, 1024, 8, "test")
    assert data != noise(kind, 1024, 8, "other")
    if kind not in (KINDS["q1_0"], KINDS["q2_0"]):
        values = dequantised(kind, data)
        assert np.isfinite(values).all()
        assert 1 / 128 < np.sqrt(np.mean(values**2)) < 1 / 8
        assert len(np.unique(values)) > 2


def test_what_is_fingerprinted_is_the_same_on_every_machine() -> None:
    """Classes of two peers mean something only if these bytes never change: else raise class_inputs.VERSION."""
    known = {
        "f32": "eda45aa4",
        "f16": "112bbe1c",
        "bf16": "cc6546cb",
        "q4_0": "70bc7052",
        "q4_1": "2be4ceee",
        "q4_K": "b73aa178",
        "q6_K": "65ee251c",
        "iq1_m": "5220edc8",
        "mxfp4": "a0613c36",
    }
    found = {name: hashlib.sha256(noise(KINDS[name], 256, 64, "fixed")).hexdigest()[:8] for name in known}
    assert found == known
    rows = [rows_on_ties(8, 256), product_rows(16, 256), unit_values()]
    assert [hashlib.sha256(values.tobytes()).hexdigest()[:8] for values in rows] == ["e9e314c1", "3190fe62", "b7c73b7b"]


def test_a_matrix_larger_than_the_noise_does_not_repeat_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_weights, "_POOL_BYTES", 4096)
    values = np.frombuffer(noise(KINDS["q8_0"], 1024, 16, "test"), np.uint8).reshape(16, -1)
    assert len(np.unique(values, axis=0)) == 16


def test_unknown_types_are_refused() -> None:
    for kind in (KINDS["i32"], KINDS["q8_K"], 999):
        with pytest.raises(ValueError, match="no type of weights"):
            even_layer(kind, 256, 2, 2)


# -- a whole measurement ----------------------------------------------------------------------------------------------


def test_ggmls_cpu_measured() -> None:
    started, steps = time.monotonic(), []
    request = replace(SMALL, kinds=(F16, Q4_0, Q4_K), accumulation=Precision.F32, source=Precision.F32)
    measured = measure_device(cpu(), request, progress=lambda done, total, what: steps.append((done, total, what)))
    assert time.monotonic() - started < LOADED * 10
    assert measured.complete
    assert (measured.name, measured.device) == ("ggml-cpu", cpu().info.description[:64])
    assert measured.memory_bytes > 1 << 20
    assert list(measured.types) == ["f16", "q4_0", "q4_K"]
    assert measured.accumulation == MeasuredPrecision(Precision.F32, Precision.F32, Precision.F32)
    assert measured.source == MeasuredPrecision(Precision.F32, Precision.Q8, Precision.Q8)
    assert measured.types["f16"].source.measured is Precision.F16
    assert measured.batch_invariant
    assert measured.repeatable
    for of_type in measured.types.values():
        assert 0 < of_type.rows_per_s < 1e7
        assert of_type.batch_rows_per_s > 0
    assert steps[0] == (0, 9, "precision of f16")
    assert steps[-1] == (9, 9, "done")
    again = measure_device(cpu(), replace(SMALL, kinds=(Q4_0,)))
    assert again.types["q4_0"].numeric_class == measured.types["q4_0"].numeric_class


@pytest.mark.usefixtures("quick")
def test_a_contradicted_claim() -> None:
    measured = measure_backend(NumpyExperts("float16"), replace(SMALL, kinds=(Q4_0,), accumulation=Precision.F32))
    assert measured.accumulation == MeasuredPrecision(Precision.F32, Precision.F16, Precision.F16)
    assert measured.accumulation.when_asked is Precision.F16


@pytest.mark.usefixtures("quick")
def test_types_that_a_backend_does_not_know_are_left_out() -> None:
    measured = measure_backend(NumpyExperts("float64"), replace(SMALL, kinds=(KINDS["q1_0"], F16, KINDS["i32"], F16)))
    assert list(measured.types) == ["f16"]
    assert measured.complete
    nothing = measure_backend(NumpyExperts("float64"), replace(SMALL, kinds=()))
    assert (nothing.types, nothing.batch_invariant, nothing.repeatable) == ({}, False, False)
    assert nothing.accumulation == MeasuredPrecision()


def test_a_device_that_fails_is_no_measurement() -> None:
    class Broken(NumpyExperts):
        def compute(self, *args: object, **options: object) -> F32:
            raise Internal("the device fell off the bus")

    backend = Broken("float64")
    with pytest.raises(Internal, match="fell off the bus"):
        measure_backend(backend, SMALL)
    assert backend.held(1 << 20) == frozenset()


class _Slow(NumpyExperts):
    """Counts its calls as seconds."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.seconds = 0.0

    def compute(self, *args: Any, **options: Any) -> F32:
        self.seconds += 1
        return super().compute(*args, **options)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("deadline_s", [0, 5, 20, 60, 120])
def test_what_the_deadline_cuts_off_is_not_called_good(deadline_s: int) -> None:
    backend = _Slow()
    measured = measure_backend(backend, SMALL, deadline_s=deadline_s, now=lambda: backend.seconds)
    assert not measured.complete
    assert backend.seconds <= deadline_s + 10  # one more width
    assert set(measured.types) == {"f16", "q4_0"}
    first, last = measured.types["f16"], measured.types["q4_0"]
    if deadline_s < 14:  # some widths of the first type
        assert first == last == TypeMeasurement()
    elif deadline_s < 28:  # the first type by default
        assert first.accumulation == MeasuredPrecision(measured=Precision.F32)
        assert first.source.measured is Precision.F32
        assert last == TypeMeasurement()
    else:
        assert measured.accumulation.measured_when_asked is Precision.F32
        assert (first.numeric_class != "", last.numeric_class) == (deadline_s == 120, "")
        assert not last.batch_invariant


def test_half_precision_seen_before_the_deadline_is_told() -> None:
    class SlowHalves(_Slow):
        def __init__(self) -> None:
            NumpyExperts.__init__(self, "float16")
            self.seconds = 0.0

    backend = SlowHalves()
    measured = measure_backend(backend, SMALL, deadline_s=9, now=lambda: backend.seconds)
    assert measured.types["f16"].accumulation.measured is Precision.F16
    assert measured.types["f16"].accumulation.measured_when_asked is Precision.UNKNOWN


def test_a_request_for_a_model() -> None:
    model = take_apart("qwen3moe", "q4_0").manifest
    request = Request.of_model(model)
    layer = model.layers[0]
    down = next(t for t in layer.tensors if t.name.startswith("ffn_down"))
    assert (request.kinds, request.n_in, request.n_ff) == ((Q4_0,), layer.n_in, down.shape[0])
    assert request.units == (Node("glu", (), "SWIGLU", (0.0, 0.0, 0.0)),)
    assert Request.of_model(replace(model, layers=(), programs=(b"no program",))) == Request(())


def test_wide_experts_are_fingerprinted_narrower() -> None:
    wide = Request((KINDS["f32"],), 7168, 2048)
    assert measure._narrowed(KINDS["f32"], wide) == 256
    assert measure._narrowed(Q4_0, wide) == 2048
    assert measure._narrowed(Q4_0, Request((Q4_0,), 2048, 1024)) == 1024


def test_room_in_a_cgroup(tmp_path: Path) -> None:
    assert measure._cgroup_room(tmp_path) == float("inf")
    (tmp_path / "memory.current").write_text("600\n")
    for limit, room in (("max\n", float("inf")), ("1000\n", 400), ("100\n", 0), ("many", float("inf"))):
        (tmp_path / "memory.max").write_text(limit)
        assert measure._cgroup_room(tmp_path) == room
