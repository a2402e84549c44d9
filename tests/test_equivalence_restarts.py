"""Kernels whose process ends in the middle of a comparison: started anew a few times, and told in the report."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.variant_process import KernelProcess
from capabilities.errors import KernelFailed
from swarmnode.cli.render_equivalence import print_equivalence
from swarmnode.equivalence import run
from swarmnode.equivalence.page import page_of
from swarmnode.equivalence.recipes import Recipe, Sizes, compute
from swarmnode.equivalence.restarts import IN_A_ROW_MAX, IN_ALL_MAX, RestartedExperts, RestartedRows, Restarts
from swarmnode.equivalence.run import run_equivalence
from swarmnode.equivalence.targets import Target, find_target
from tests.expert_models import DOWN_ONLY, made_up_layer
from tests.kernel_processes import installed_kernels

X, ROWS = np.random.default_rng(0).standard_normal((3, 32), np.float32), np.arange(3, dtype=np.int32)


def load(experts: RestartedExperts | GgmlExperts, number: int) -> None:
    layer, read = made_up_layer({"ffn_down_exps.weight": np.full((4, 32, 32), 1 + number, np.float32)}, 32, 32, "q4_0")
    experts.load_layer(replace(layer, layer=number), DOWN_ONLY, [0, 1], read)


@pytest.fixture
def process() -> Iterator[KernelProcess]:
    made = KernelProcess(installed_kernels(call_s=20))
    yield made
    made.close()


def test_a_process_that_is_killed_is_started_anew_with_all_that_it_held(process: KernelProcess) -> None:
    restarts = Restarts()
    experts, here = RestartedExperts(process.experts(), restarts), GgmlExperts(Device("CPU"))
    for number in (0, 1):
        load(experts, number)
        load(here, number)
    for number in (1, 0):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        y = experts.compute(number, X, ROWS, ROWS % 2)
        assert np.array_equal(y, here.compute(number, X, ROWS, ROWS % 2))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert RestartedRows(process, restarts).softmax(X).shape == X.shape
    assert len(restarts.reasons) == 3
    assert "-9" in restarts.reasons[0] or "ended" in restarts.reasons[0]
    here.close()


def test_one_that_ends_over_the_same_call_every_time_has_failed() -> None:
    restarts, calls = Restarts(), []

    def work() -> None:
        calls.append(1)
        raise KernelFailed("a shader")

    with pytest.raises(KernelFailed, match="a shader"):
        restarts.call(work)
    assert len(calls) == IN_A_ROW_MAX + 1
    for _ in range(IN_ALL_MAX):
        with pytest.raises(KernelFailed):
            restarts.call(work)
    assert len(restarts.reasons) == IN_ALL_MAX, "and not for ever"


class DyingNow(GgmlExperts):
    """The installed kernels, whose process ends at every `every`th call of `compute`."""

    def __init__(self, every: int) -> None:
        super().__init__(Device("CPU", threads=1))
        self.every, self.calls = every, 0

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        self.calls += 1
        if self.calls % self.every == 0:
            raise KernelFailed("the process ended")
        return super().compute(layer, x, tokens, experts, ask_f32=ask_f32)


def dying(every: int) -> Target:
    restarts = Restarts()
    rows = find_target("ggml-cpu").rows
    return Target("dying", lambda: RestartedExperts(DyingNow(every), restarts), rows, restarts=restarts)


def compared(every: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    small = Sizes(("q8_0",), (256,), (1, 512))
    monkeypatch.setattr(run, "Sizes", lambda: small)
    monkeypatch.setattr(run, "find_target", lambda name, *_: dying(every) if name == "dying" else find_target(name))

    def no_model() -> Path:
        raise AssertionError

    return run_equivalence(
        "ggml-cpu", "dying", levels=("op",), model=no_model, own_model=False, tokens=64, prompts=1, answer_tokens=1,
        progress=lambda *_: None,
    )  # fmt: skip


def test_a_comparison_goes_on_and_says_that_kernels_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe("matmul", "q8_0", 256, (1, 512))
    for one, other in zip(compute(recipe, dying(20).make, None), find_target("ggml-cpu").outputs(recipe), strict=True):
        assert np.array_equal(one, other)
    result = compared(20, monkeypatch)
    assert result["pass"]
    assert result["restarts"]["a"] == []
    assert set(result["restarts"]["b"]) == {"the process ended"}
    print_equivalence(result)
    words = f"started anew {len(result['restarts']['b'])} times"
    assert words.replace("1 times", "once") in capfd.readouterr().out
    assert words.replace("1 times", "once") in page_of(result)


def test_kernels_that_end_every_time_fail_the_level_and_not_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared(1, monkeypatch)
    assert result["pass"] is False
    (level,) = result["levels"]
    assert level["pass"] is False
    assert level["reason"] == "the process ended"
    assert level["tolerance"] is None
