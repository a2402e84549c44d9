"""The judge in a process of its own: the same verdicts, and whatever happens to it, the leader goes on."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from backends.add_model import add_model
from backends.device import Device
from backends.experts import GgmlExperts
from backends.manifest import LayerExperts
from capabilities.errors import ExpertsUnavailable, KernelFailed
from capabilities.row_grades import Grade
from scheduler.audit_choice import AGREED_FIRST
from scheduler.combine import weighted_sums
from swarmnode.leader import auditing, judge_process
from swarmnode.leader.judge import Judge
from swarmnode.leader.judge_process import JudgeProcess
from swarmnode.leader.probe import at_hand
from swarmnode.leader.recomputing import Judged, Sample
from swarmnode.local_experts import load_layer
from swarmnode.models import Models, OpenModel
from swarmnode.net.interface import PeerId
from swarmnode.shards.files import shard_path
from tests.expert_models import quiet, tiny_file
from tests.leading_swarm import leading_swarm
from tests.net_tools import eventually
from tests.patience import PATIENCE_S
from tests.test_auditing import SETTINGS, Swarm, Switch
from tests.test_auditing import MemoryBoard as Board


@pytest.fixture
def model(tmp_path: Path) -> Iterator[OpenModel]:
    add_model(tiny_file("olmoe", "q4_0"), tmp_path / "models" / "tiny", "tiny", quiet)
    opened = Models(tmp_path / "models").open("tiny")
    yield opened
    opened.close()


def sample_of(model: OpenModel, *, factor: float = 1.0, weights: bool = False) -> Sample:
    """Three tokens, each by two experts."""
    layer = model.manifest.layers[0]
    random = np.random.default_rng(5)
    x = random.standard_normal((3, layer.n_in), np.float32)
    tokens = np.repeat(np.arange(3, dtype=np.int32), 2)
    experts = np.array([0, 1, 2, 0, 1, 3], np.int32)
    backend = GgmlExperts(Device("CPU"))
    load_layer(backend, model.manifest, layer.layer, range(layer.n_expert), model.served.source)
    answer = backend.compute(layer.layer, x, tokens, experts) * np.float32(factor)
    backend.close()
    by = random.random(6, np.float32) if weights else None
    if by is not None:
        answer = weighted_sums(answer, by, tokens)
    return Sample("peer", layer, x, tokens, experts, by, answer, rounded=False, ask_f32=False, whole=True)


def process_of(model: OpenModel, *command: str) -> JudgeProcess:
    return JudgeProcess(model.manifest, model.lies_at, at_hand, *([command] if command else []))


def same(one: Judged, other: Judged) -> None:
    for a, b in (
        (one.graded.grade, other.graded.grade),
        (one.graded.distance, other.graded.distance),
        (one.graded.ratio, other.graded.ratio),
        (one.experts, other.experts),
    ):
        np.testing.assert_array_equal(a, b)
    assert one.telling == other.telling


@pytest.mark.parametrize("weights", [False, True])
async def test_its_verdicts_are_those_of_a_judge_in_a_thread(model: OpenModel, weights: bool) -> None:
    apart = process_of(model)
    here = Judge(model.manifest, model.served.source, partial(Device, threads=1), at_hand)
    async with apart.at_work() as judge_apart, here.at_work() as judge_here:
        found = {}
        for factor in (1.0, 1.05, -1.0):  # right, to be explained, plainly wrong
            sample = sample_of(model, factor=factor, weights=weights)
            found[factor] = await judge_apart(sample)
            same(found[factor], await judge_here(sample))
            assert found[factor].cpu_s > 0
        assert found[1.0].graded.count(Grade.SAME) == len(found[1.0].experts)
        assert found[1.05].graded.count(Grade.WRONG) > 0
        assert found[-1.0].graded.count(Grade.WRONG) == len(found[-1.0].experts)
        assert apart.started == 1
        pid = apart.pid
    assert apart.pid is None
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Lending:
    """Obtain into a folder like the expert cache's."""

    def __init__(self, model: OpenModel, root: Path) -> None:
        self.model = model
        self.root = root
        self.asked: list[list[int]] = []
        self.damage = False
        root.mkdir()

    @asynccontextmanager
    async def obtain(self, layer: LayerExperts, experts: Sequence[int], holder: PeerId) -> AsyncIterator[None]:
        assert holder == "peer"
        self.asked.append(list(experts))
        paths = [shard_path(self.root, layer.hashes[expert]) for expert in experts]
        for expert, path in zip(experts, paths, strict=True):
            data = bytearray(self.model.served.source.read(layer.layer, expert, 0, layer.expert_bytes))
            data[7] ^= self.damage
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        yield
        for path in paths:
            path.unlink()


async def test_a_leader_without_the_file_is_asked_for_experts_that_are_not_held(
    model: OpenModel, tmp_path: Path
) -> None:
    lending = Lending(model, tmp_path / "cache")
    judge = JudgeProcess(model.manifest, lending.root, lending.obtain)
    async with judge.at_work() as judge_one:
        lending.damage = True
        with pytest.raises(ExpertsUnavailable, match="damaged"):
            await judge_one(sample_of(model))
        lending.damage = False
        right = await judge_one(sample_of(model))
        assert right.graded.count(Grade.SAME) == 6
        assert lending.asked == [[0, 1, 2, 3]] * 2
        wrong = await judge_one(sample_of(model, factor=1.05))
        assert wrong.graded.count(Grade.WRONG) > 0
        assert len(lending.asked) == 3  # what is held must be read again to be explained
        assert set(lending.asked[2]) < {0, 1, 2, 3}
        assert judge.started == 1


async def test_one_that_dies_is_replaced_after_a_pause(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "PAUSE_S", 2 * PATIENCE_S)
    judge = process_of(model)
    async with judge.at_work() as judge_one:
        await judge_one(sample_of(model))
        assert judge.pid is not None
        os.kill(judge.pid, 9)
        with pytest.raises(KernelFailed):
            await judge_one(sample_of(model))
        with pytest.raises(KernelFailed, match="another"):
            await judge_one(sample_of(model))
        assert judge.started == 1
        monkeypatch.setattr(judge, "_not_before_s", 0.0)
        await judge_one(sample_of(model))
        assert judge.started == 2


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("import time; time.sleep(1000)", "did not answer"),
        ("raise SystemExit(3)", "ended"),
        ("import socket; socket.socket(fileno=0).sendall(b'x' * 100); input()", "nonsense"),
    ],
)
async def test_one_that_cannot_start_is_an_error_and_is_ended(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch, does: str, says: str
) -> None:
    monkeypatch.setattr(judge_process, "START_S", 1.0 if says == "did not answer" else PATIENCE_S)
    judge = process_of(model, sys.executable, "-c", does)
    async with judge.at_work() as judge_one:
        with pytest.raises(KernelFailed, match=says):
            await judge_one(sample_of(model))
        assert judge.pid is None


async def test_it_takes_no_memory_while_there_is_nothing_to_judge(model: OpenModel) -> None:
    judge = process_of(model)
    async with judge.at_work() as judge_one:
        assert judge.pid is None
        await judge_one(sample_of(model))
        await judge.rest()
        assert judge.pid is None
        await judge_one(sample_of(model))
        assert judge.started == 2


async def test_cancelling_ends_it(model: OpenModel) -> None:
    judge = process_of(model, sys.executable, "-c", "import time; time.sleep(1000)")
    with trio.move_on_after(0.5):
        async with judge.at_work() as judge_one:
            await judge_one(sample_of(model))
    assert judge.pid is None


async def test_a_leader_audits_with_it_and_lets_it_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "_IDLE_S", 0.1)
    made: list[JudgeProcess] = []

    def make(opened: OpenModel, obtain: judge_process.Obtain) -> JudgeProcess:
        made.append(JudgeProcess(opened.manifest, opened.lies_at, obtain))
        return made[-1]

    async with leading_swarm(tmp_path, SETTINGS, workers=2) as swarm, swarm.led(1, make_judge=make):
        await swarm.until_ready()
        of = Swarm(swarm, swarm.hands[0], Board(), Switch())
        await eventually(lambda: made[0].started > 0)  # newcomers are expected, and have not answered yet
        assert of.audits()["answers"] == 0
        with trio.fail_after(PATIENCE_S):
            for number in itertools.count():
                if of.audits()["agreed"] >= AGREED_FIRST:
                    break
                await of.hear(f"work-{number}")
        assert of.audits()["differed"] == 0
        await eventually(lambda: made[0].pid is None)
