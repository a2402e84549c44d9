"""Measurements as values, and measurements that are kept between starts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from backends import measurement_cache
from backends.device import Device
from backends.measure import Request
from backends.measurement_cache import cached_measurement, measurement_key
from capabilities.errors import PeerMistake
from capabilities.measurement import BackendMeasurement, TypeMeasurement
from capabilities.precision import MeasuredPrecision

F16, Q4_0 = 1, 2
SMALL = Request((F16, Q4_0), 256, 256)


@cache
def cpu() -> Device:
    return Device("CPU")


# -- measurements as values -------------------------------------------------------------------------------------------

MEASURED = BackendMeasurement(
    "ggml-cpu", "A processor", 2048, 1024, 1 << 33,
    {"q4_0": TypeMeasurement(MeasuredPrecision(), MeasuredPrecision(), "0123456789abcdef" * 2, True, True, 3.5, 90.0)},
)  # fmt: skip


def test_measurements_travel() -> None:
    assert BackendMeasurement.from_json(json.loads(json.dumps(MEASURED.to_json()))) == MEASURED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", 2), ("v", None), ("name", "x" * 65), ("name", None), ("device", 3), ("n_in", -1), ("n_in", 1 << 21),
        ("n_ff", 1.5), ("n_ff", True), ("memory_bytes", 1 << 51), ("types", []), ("types", {"": {}}), ("complete", 1),
        ("types", {"x" * 17: {}}), ("types", {str(i): {} for i in range(65)}), ("types", {3: {}}),
    ],
)  # fmt: skip
def test_what_is_no_measurement(field: str, value: object) -> None:
    whole = MEASURED.to_json()
    with pytest.raises(PeerMistake):
        BackendMeasurement.from_json(whole | {field: value})
    with pytest.raises(PeerMistake):
        BackendMeasurement.from_json({name: value for name, value in whole.items() if name != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("numeric_class", "xyz"), ("numeric_class", "0" * 31), ("numeric_class", "A" * 32), ("repeatable", "yes"),
        ("batch_invariant", None), ("rows_per_s", -1), ("rows_per_s", float("nan")), ("rows_per_s", 1e13),
        ("batch_rows_per_s", "fast"), ("rows_per_s", True), ("accumulation", "f32"), ("source", {}),
    ],
)  # fmt: skip
def test_what_is_no_measurement_of_a_type(field: str, value: object) -> None:
    whole = TypeMeasurement().to_json()
    assert TypeMeasurement.from_json(whole) == TypeMeasurement()
    with pytest.raises(PeerMistake):
        TypeMeasurement.from_json(whole | {field: value})
    with pytest.raises(PeerMistake):
        TypeMeasurement.from_json([])


# -- kept measurements ------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that were really measured."""
    done: list[Request] = []

    def counting(device: Device, request: Request, **options: Any) -> BackendMeasurement:
        done.append(request)
        return replace(MEASURED, complete=options["deadline_s"] > 0)

    monkeypatch.setattr(measurement_cache, "measure_device", counting)
    return done


def test_a_measurement_is_made_once(tmp_path: Path, counted: list[Request]) -> None:
    folder = tmp_path / "not" / "yet"
    first = cached_measurement(folder, cpu(), SMALL)
    second = cached_measurement(folder, cpu(), SMALL)
    assert len(counted) == 1
    assert replace(second, memory_bytes=0) == replace(first, memory_bytes=0)
    assert second.memory_bytes != MEASURED.memory_bytes  # looked up anew
    cached_measurement(folder, cpu(), replace(SMALL, kinds=(Q4_0,)))
    cached_measurement(folder, cpu(), replace(SMALL, n_ff=512))
    cached_measurement(folder, cpu(), SMALL, threads=2)
    assert len(counted) == 4


def test_what_computes_otherwise_is_measured_anew(
    tmp_path: Path, counted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_measurement(tmp_path, cpu(), SMALL)
    monkeypatch.setenv("GGML_SOMETHING", "1")
    cached_measurement(tmp_path, cpu(), SMALL)
    monkeypatch.delenv("GGML_SOMETHING")
    cached_measurement(tmp_path, cpu(), SMALL)
    assert len(counted) == 2
    monkeypatch.setattr(measurement_cache, "_libraries", lambda: {"libggml-cpu.so": "another"})
    cached_measurement(tmp_path, cpu(), SMALL)
    monkeypatch.undo()


def test_the_key_names_what_computes() -> None:
    key = measurement_key(cpu(), SMALL, 1)
    assert any("ggml-cpu" in name or "ggml-base" in name for name in key["libraries"])
    assert key["flags"]["GGML_CPU_TILED_MM"] == "0"
    assert json.loads(json.dumps(key)) == key


def test_unfinished_measurements_are_not_kept(tmp_path: Path, counted: list[Request]) -> None:
    for _ in range(2):
        assert not cached_measurement(tmp_path, cpu(), SMALL, deadline_s=0).complete
    assert len(counted) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "other json", "deep", "huge", "old", "future", "another key", "folder"]
)
def test_damaged_files_are_measured_again(tmp_path: Path, counted: list[Request], damage: str) -> None:
    cached_measurement(tmp_path, cpu(), SMALL)
    (path,) = tmp_path.glob("measurement-*.json")
    text = path.read_text()
    stored = json.loads(text)
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text(
            {
                "empty": "",
                "cut": text[: len(text) // 2],
                "other json": "[1, 2]",
                "deep": "[" * 100_000,
                "huge": text + " " * measurement_cache.FILE_BYTES_MAX,
                "old": json.dumps(stored | {"at": time.time() - measurement_cache.AGE_S_MAX - 1}),
                "future": json.dumps(stored | {"at": time.time() + 3600}),
                "another key": json.dumps(stored | {"key": {}}),
            }[damage]
        )
    measured = cached_measurement(tmp_path, cpu(), SMALL)
    assert len(counted) == 2
    assert measured.types == MEASURED.types


def test_few_files_are_kept(tmp_path: Path, counted: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_cache, "FILES_MAX", 3)
    (tmp_path / "other.json").write_text("somebody else's")
    for threads in range(1, 7):
        cached_measurement(tmp_path, cpu(), SMALL, threads=threads)
    assert len(list(tmp_path.glob("measurement-*.json"))) == 3
    assert (tmp_path / "other.json").exists()
    assert len(counted) == 6


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path, counted: list[Request]) -> None:
    (tmp_path / "file").write_text("")
    assert cached_measurement(tmp_path / "file", cpu(), SMALL).types == MEASURED.types
    assert len(counted) == 1
