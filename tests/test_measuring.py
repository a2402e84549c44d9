"""The daemon's own backend, measured in a real child process: results, the cache, claims, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from backends.numpy_reference import NumpyExperts
from capabilities.errors import Internal
from capabilities.measurement import BackendMeasurement, TypeMeasurement
from capabilities.precision import MeasuredPrecision, Precision
from swarmnode import measuring
from swarmnode.compute import Compute, choose_compute
from swarmnode.config_sections import ComputeConfig
from swarmnode.measured import Measured, backends_json, class_of
from swarmnode.measuring import DEADLINES_S, USUAL, Measuring, measure_in_child
from tests.expert_models import take_apart
from tests.patience import PATIENCE_S

Q8_0, F16 = 8, 1
FEW = replace(USUAL, kinds=(Q8_0,), n_in=256, n_ff=256)


class BoastfulHalves(NumpyExperts):
    """Adds in half precision and says otherwise."""

    def __init__(self, *, threads: int) -> None:
        super().__init__("float16")
        self.declares = ("f32", "f32")


class Exits:
    name = "exits"

    def __init__(self, *, threads: int) -> None:
        raise SystemExit(7)


def measured_type(word: str = "ab", asked: str = "f32", rows: float = 100.0) -> TypeMeasurement:
    precision = MeasuredPrecision(Precision.F32, Precision.F16, Precision(asked))
    return TypeMeasurement(precision, precision, word * 16 if word else "", True, True, rows, 2 * rows)


def measurement(**types: TypeMeasurement) -> BackendMeasurement:
    return BackendMeasurement("ggml-cpu", "a processor", 256, 256, 1 << 30, types)


def measuring_of(folder: Path, **config: Any) -> Measuring:
    chosen = ComputeConfig(**config)
    compute = Compute(lambda: NumpyExperts("float32"), chosen.factory or "ggml-cpu", "a device", True)
    made = Measuring(chosen, compute, 1, folder)
    made._request = FEW
    return made


def kept_files(folder: Path) -> list[Path]:
    return list(folder.glob("measurement-*.json"))


async def result_of(made: Measuring) -> Measured:
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            found = await made.wait()
            nursery.cancel_scope.cancel()
    return found


# -- children ----------------------------------------------------------------------------------------------------------


async def test_ggmls_cpu_is_measured_once_and_again_when_asked(tmp_path: Path) -> None:
    made = measuring_of(tmp_path)
    assert made.current.backends_json()[0]["accumulation"]["measured"] == "unknown"
    assert not made.current.adverts()
    found = await result_of(made)
    (told,) = found.backends_json()
    assert told["accumulation"] == {"declared": "f32", "measured": "f32", "measured_when_asked": "f32"}
    assert told["source"] == {"declared": "unknown", "measured": "q8", "measured_when_asked": "q8"}
    assert told["repeatable"]
    assert told["batch_invariant"]
    assert found.rows_per_s > 0
    assert found.accumulates_f32([Q8_0])
    assert not found.accumulates_f32([Q8_0, F16]), "what was not measured is not known to be good"
    (kept,) = kept_files(tmp_path)
    stored = json.loads(kept.read_text())
    stored["measurement"]["types"]["q8_0"]["rows_per_s"] = 1.0
    kept.write_text(json.dumps(stored))
    assert (await result_of(measuring_of(tmp_path))).rows_per_s == 1.0, "it comes from the cache"
    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            nursery.start_soon(made.run)
            assert (await made.remeasure()).rows_per_s != 1.0
        nursery.cancel_scope.cancel()


async def test_a_claim_that_the_probe_contradicts_loses(tmp_path: Path) -> None:
    found = await result_of(measuring_of(tmp_path, factory="tests.test_measuring:BoastfulHalves"))
    (told,) = found.backends_json()
    assert told["accumulation"] == {"declared": "f32", "measured": "f16", "measured_when_asked": "f16"}
    assert not found.accumulates_f32([Q8_0])
    (advert,) = found.adverts()
    assert advert.accumulation.contradicted
    assert not kept_files(tmp_path), "code of unknown make is measured at each start"


async def test_numpy_is_what_it_says(tmp_path: Path) -> None:
    (told,) = (await result_of(measuring_of(tmp_path, backend="numpy"))).backends_json()
    assert set(told["accumulation"].values()) == {"f32"}


@pytest.mark.parametrize("factory", ["tests.test_measuring:Exits", "no.such.module:Class"])
async def test_a_backend_that_cannot_be_measured_is_told_with_its_reason(tmp_path: Path, factory: str) -> None:
    found = await result_of(measuring_of(tmp_path, factory=factory))
    assert not found.complete
    assert found.adverts() == ()
    assert found.backends_json()[0]["error"]


async def test_a_child_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.limits, "MEASURE_EXTRA_SECONDS_MAX", 0.01)
    monkeypatch.setattr(measuring, "DEADLINES_S", (0.0,))
    found = await result_of(measuring_of(tmp_path))
    assert "more than" in found.error


# -- what is wanted ----------------------------------------------------------------------------------------------------


async def test_the_models_own_weights_are_measured_when_it_is_known(tmp_path: Path) -> None:
    orders: list[dict[str, Any]] = []

    async def child(ordered: dict[str, Any]) -> BackendMeasurement:
        orders.append(ordered)
        await trio.sleep(0.01)
        if len(orders) == 2:
            raise Internal("a device that failed")
        return measurement(q4_K=measured_type()) if len(orders) == 1 else measurement(q4_0=measured_type())

    made = Measuring(ComputeConfig(), choose_compute(ComputeConfig(backend="numpy"), 1), 1, tmp_path, run_child=child)
    heard: list[Measured] = []
    manifest = take_apart("qwen3moe", "q4_0").manifest
    async with trio.open_nursery() as nursery:
        with made.on_change(lambda: heard.append(made.current)):
            nursery.start_soon(made.run)
            usual = (await made.wait()).numeric_class()
            assert orders[0]["kinds"] == list(USUAL.kinds)
            made.for_model(manifest)
            made.for_model(manifest)
            assert made.busy
            failed = await made.wait()
            assert "failed" in failed.error
            assert failed.backend is not None, "what was measured before still holds"
        again = await made.remeasure()
        nursery.cancel_scope.cancel()
    assert again.error == ""
    assert made.classes == (usual, again.numeric_class()), "who does not know the model yet is compared by the usual"
    assert [ordered["anew"] for ordered in orders] == [False, False, True]
    assert orders[1]["widths"] == orders[2]["widths"] != orders[0]["widths"]
    assert len(heard) == 2, "the third came after the context"


async def test_a_slow_machine_tells_what_it_found_in_time_and_goes_on(tmp_path: Path) -> None:
    """And what it is at is dropped when something else is wanted."""
    deadlines: list[float] = []
    endless = trio.Event()

    async def child(ordered: dict[str, Any]) -> BackendMeasurement:
        deadlines.append(ordered["deadline_s"])
        if len(deadlines) == 1:
            return replace(measurement(q4_K=measured_type("")), complete=False)
        if len(deadlines) == 2:
            endless.set()
            await trio.sleep_forever()
        return measurement(q4_0=measured_type())

    made = Measuring(ComputeConfig(), choose_compute(ComputeConfig(backend="numpy"), 1), 1, tmp_path, run_child=child)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await endless.wait()
            assert made.busy
            assert made.current.accumulates_f32()
            assert not made.current.numeric_class()
            made.for_model(take_apart("qwen3moe", "q4_0").manifest)
            assert (await made.wait()).numeric_class()
            nursery.cancel_scope.cancel()
    assert deadlines == [DEADLINES_S[0], DEADLINES_S[1], DEADLINES_S[0]]


# -- the value ---------------------------------------------------------------------------------------------------------


def test_a_class_is_over_all_types_and_one_without_makes_none() -> None:
    one = Measured("n", "d", measurement(q8_0=measured_type("ab"), f16=measured_type("cd")))
    other = Measured("n", "d", measurement(q8_0=measured_type("ab"), f16=measured_type("ef")))
    assert one.numeric_class([Q8_0]) == other.numeric_class([Q8_0]) != ""
    assert one.numeric_class() == one.numeric_class([F16, Q8_0]) != other.numeric_class()
    assert Measured("n", "d", measurement(q8_0=measured_type(""))).numeric_class() == ""
    assert one.numeric_class([Q8_0, 14]) == ""
    assert Measured("n", "d").numeric_class() == ""


def test_sums_count_as_f32_where_they_are_so_when_asked() -> None:
    both = Measured("n", "d", measurement(q8_0=measured_type(), f16=measured_type(asked="f16")))
    assert both.accumulates_f32([Q8_0])
    assert not both.accumulates_f32()
    assert not Measured("n", "d").accumulates_f32()


def test_rates_are_of_the_slowest_type_that_was_measured() -> None:
    found = Measured("n", "d", measurement(a=measured_type(rows=7.0), b=measured_type(rows=9.0), c=TypeMeasurement()))
    assert found.rows_per_s == 7.0


def test_other_peers_see_in_the_advert_what_the_status_shows() -> None:
    found = Measured("ggml-cpu", "a processor", measurement(q8_0=measured_type("ab"), f16=measured_type("cd")))
    assert backends_json(found.adverts()) == found.backends_json()
    assert class_of(found.adverts()[0]) == found.numeric_class()
    assert class_of(replace(found.adverts()[0], weights=())) == ""


def test_bfloat16_is_told_as_eight_bits() -> None:
    coarse = TypeMeasurement(source=MeasuredPrecision(Precision.F16, Precision.BF16, Precision.BF16))
    (told,) = Measured("n", "d", measurement(bf16=coarse)).backends_json()
    assert told["source"] == {"declared": "f16", "measured": "q8", "measured_when_asked": "q8"}


async def test_a_child_that_fails_is_an_error_that_says_how() -> None:
    with pytest.raises(Internal, match=r"KeyError.*'compute'"):
        await measure_in_child({"fast": False, "deadline_s": 1.0})
