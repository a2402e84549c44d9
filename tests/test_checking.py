"""How precisely workers add, among fake workers: what is found of them, and what that does to the placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.device import Device
from backends.experts import F32, ExpertBackend, GgmlExperts
from backends.known_roundings import ROUNDINGS
from backends.numpy_reference import NumpyExperts
from capabilities.precision import Precision
from capabilities.verdict import MemoryBoard
from scheduler.placement_record import PlacementRecord
from scheduler.service_checks import EVERY_S, STRIKES
from scheduler.settling import MEASURING_S
from swarmnode.expert_messages import DispatchHead, encode_reply
from swarmnode.leader.probe import ProbeReference
from swarmnode.leader.report import placement_json
from swarmnode.net.interface import PeerId
from tests.expert_models import take_apart
from tests.fault_tools import honest
from tests.kernel_models import Rounds
from tests.memory_swarm import LAYERS, MODEL, Lab, Stay, leader_lab

OUTPUT = max(LAYERS)  # of two layers, the last


def coarse(head: DispatchHead, y: F32) -> bytes:
    """Out of tolerance, and the same function."""
    return encode_reply(head.sequence, 1, y * np.float32(1 + 2**-9))


def holders(lab: Lab, layer: int) -> set[str]:
    placement = lab.placer.coverage.current
    assert placement is not None
    return {lab.placer.coverage.name(peer) for peers in placement.holders[layer] for peer in peers}


async def settled(seconds: float = 0.0) -> None:
    await trio.sleep(seconds)
    await trio.testing.wait_all_tasks_blocked()


async def joined(lab: Lab, *names: str, **fields: Any) -> list[Stay]:
    return [await lab.join(name, **fields) for name in names]


def work(lab: Lab) -> None:
    """A request runs from now on; its activations are always there."""

    async def sample(layer: int, rows: int) -> F32:
        await trio.sleep(0.25)
        width = MODEL.manifest.experts_of(layer).n_in
        return np.random.default_rng(layer).standard_normal((rows, width), np.float32)

    lab.remote.sample = sample  # type: ignore[method-assign]
    lab.engine.running = 1


# -- before anything is placed -----------------------------------------------------------------------------------------


async def test_the_first_placement_waits_for_what_is_being_measured(autojump_clock: MockClock) -> None:
    """And puts the output ranks right at once: nothing moves when the measurement comes."""
    async with leader_lab(expected=3, replicas=2) as lab:
        await joined(lab, "one", "two")
        late = await lab.join("late", accumulates_f32=False, measuring=True)
        await settled(MEASURING_S / 2)
        assert "1 of 3 workers to be measured" in lab.placer.coverage.waiting_for
        await late.fake.measured(accumulates_f32=True)
        await settled(1)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 1)
        assert holders(lab, OUTPUT) == {"one", "two", "late"}
        await settled(MEASURING_S)
        assert lab.placer.coverage.epoch == 1


async def test_a_measurement_that_does_not_come_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=3, replicas=2) as lab:
        await joined(lab, "one", "two")
        late = await lab.join("late", accumulates_f32=False, measuring=True)
        await settled(MEASURING_S + 1)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 1)
        assert holders(lab, OUTPUT) == {"one", "two"}  # what is not known to be good gets no output rank
        assert "late" in holders(lab, min(LAYERS))
        assert lab.placer.wrong_outputs() == ()
        (row,) = [row for row in placement_json(lab.placer, None)["peers"] if row["name"] == "late"]
        assert "not seen to accumulate in F32" in row["why_no_output_rank"]
        await late.fake.measured(accumulates_f32=True)
        await settled(5)
        assert lab.placer.coverage.epoch == 1  # that is no reason to move anything


async def test_without_a_right_worker_output_ranks_are_on_the_best_and_this_is_said(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, replicas=2) as lab:
        await joined(lab, "one", "two", accumulates_f32=False)
        await settled(1)
        assert lab.ready
        assert len(lab.placer.wrong_outputs()) == 2
        assert f"output rank {OUTPUT}" in lab.placer.wrong_outputs()[0]


# -- crafted rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantisation", ["f32", "q4_0", "f16"])
@pytest.mark.parametrize("rounded", [False, True])
async def test_the_reference_judges_real_backends(quantisation: str, rounded: bool) -> None:
    """Sums in F32 are never accused, whatever they do to activations; another expert is nothing that is known."""
    model = take_apart("olmoe", quantisation)
    reference = ProbeReference(model.manifest, model.source, Device("CPU", threads=1))
    layer, expert = model.layer, 3
    ordinary = np.random.default_rng(1).standard_normal((16, layer.n_in), np.float32)
    crafted = await reference.crafted(layer, expert, PeerId("somebody"), ordinary, 5, rounded=rounded)
    if rounded:
        assert np.array_equal(dequantize_q8_0(quantize_q8_0(crafted.x)), crafted.x)
    rows = np.arange(16, dtype=np.int32)

    async def verdict(backend: ExpertBackend, of: int = expert) -> Precision:
        model.load(backend)
        return await crafted.judge(backend.compute(layer.layer, crafted.x, rows, rows * 0 + of))

    assert await verdict(GgmlExperts(Device("CPU", threads=1))) is Precision.F32
    assert await verdict(GgmlExperts(Device("CPU", threads=1), repack=False)) is Precision.F32
    assert await verdict(NumpyExperts("float32")) is Precision.F32
    assert await verdict(NumpyExperts("float32"), of=4) is Precision.UNKNOWN


@pytest.mark.parametrize("name", ["e5m2", "codes by row", "bf16 cut off", "mxfp4"])
async def test_rows_of_coarse_activations_are_known_for_it_and_others_are_not(name: str) -> None:
    """Of every expert that the probe names, and of crafted ones."""
    model = take_apart("olmoe", "q4_0")
    reference = ProbeReference(model.manifest, model.source, Device("CPU", threads=1))
    layer, held, somebody = model.layer, [0, 1, 2, 3, 5, 6], PeerId("somebody")
    backend = Rounds([ROUNDINGS[name]])
    model.load(backend)
    x = reference.activations(layer)
    rows = backend.compute(layer.layer, x, np.zeros(len(held), np.int32), np.array(held, np.int32))
    assert await reference.explains(layer, held, rows, somebody)
    assert not await reference.explains(layer, held, np.roll(rows, 1, axis=0), somebody)
    one_wrong = rows.copy()
    one_wrong[4] *= np.float32(1.2)
    assert not await reference.explains(layer, held, one_wrong, somebody)

    ordinary = np.random.default_rng(1).standard_normal((16, layer.n_in), np.float32)
    crafted = await reference.crafted(layer, 3, somebody, ordinary, 5, rounded=False)
    tokens = np.arange(16, dtype=np.int32)
    answer = backend.compute(layer.layer, crafted.x, tokens, np.full(16, 3, np.int32))
    assert await crafted.explains(answer)
    assert not await crafted.explains(answer * np.float32(1.2))


# -- before a worker serves --------------------------------------------------------------------------------------------


async def test_who_is_out_of_tolerance_serves_and_gets_no_output_rank(autojump_clock: MockClock) -> None:
    left: list[bytes] = []
    async with leader_lab(expected=3, replicas=2, on_record=left.append) as lab:
        await joined(lab, "one", "two")
        bad = await lab.join("bad", spoil=coarse)
        await settled(5)
        assert lab.ready
        assert (bad.state, bad.member.fitness) == ("ready", "unfit")
        assert bad.member.unfit is not None
        assert "adds in half precision" in bad.member.unfit.message
        assert holders(lab, OUTPUT) == {"one", "two"}
        assert "bad" in holders(lab, min(LAYERS))
        assert lab.placer.wrong_outputs() == ()
    assert PlacementRecord.from_bytes(left[-1]).unfit == {str(bad.peer)}


async def test_who_only_rounds_otherwise_is_fit(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's rows are out of tolerance, the sums of the crafted ones are right."""

    def other_rounding(head: DispatchHead, y: F32) -> bytes:
        off = 1 + 2e-3 * np.resize([1.0, -1.0], np.shape(y))  # one value up, the next down
        return honest(head, (y * off).astype(np.float32)) if len(set(np.asarray(y)[:, 0])) <= 8 else honest(head, y)

    async with leader_lab(expected=1, replicas=1) as lab:
        one = await lab.join("one", spoil=other_rounding)
        await settled(2)
        assert (lab.ready, one.member.fitness) == (True, "fit")
        assert one.member.agreement is not None
        assert not one.member.agreement.bit_identical


# -- while it serves ---------------------------------------------------------------------------------------------------


class Turncoat:
    """Right until it is told otherwise; counts what it is sent."""

    def __init__(self) -> None:
        self.bad = False
        self.heads: list[DispatchHead] = []

    def spoil(self, head: DispatchHead, y: F32) -> bytes:
        self.heads.append(head)
        return coarse(head, y) if self.bad else honest(head, y)


async def test_who_adds_worse_in_service_is_found_and_moved_away_from_output_ranks(
    autojump_clock: MockClock,
) -> None:
    turncoat, left = Turncoat(), list[bytes]()
    async with leader_lab(expected=3, replicas=2, on_record=left.append) as lab:
        await joined(lab, "one", "two")
        bad = await lab.join("bad", spoil=turncoat.spoil)
        await settled(1)
        assert bad.member.fitness == "fit"
        assert "bad" in holders(lab, OUTPUT)
        turncoat.bad = True
        await settled(3 * EVERY_S)
        assert bad.member.fitness == "fit"  # nobody asked anything, so nothing was checked
        work(lab)
        turncoat.heads.clear()
        await settled(2 * EVERY_S + 20)
        assert bad.member.fitness == "unfit"
        assert bad.member.unfit is not None
        assert f"{STRIKES} times in a row" in bad.member.unfit.message
        assert {head.layer for head in turncoat.heads if head.epoch == 1} == {OUTPUT}
        assert (lab.ready, bad.state) == (True, "ready")
        assert holders(lab, OUTPUT) == {"one", "two"}
        assert "bad" in holders(lab, min(LAYERS))
        others = [stay for stay in lab.members.present() if stay is not bad.member]
        assert [other.fitness for other in others] == ["fit", "fit"]
    assert PlacementRecord.from_bytes(left[-1]).unfit == {str(bad.peer)}


async def test_whose_answers_overflow_again_and_again_is_moved_away_from_output_ranks(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=3, replicas=2) as lab:
        _, _, bad = await joined(lab, "one", "two", "bad")
        await settled(5)
        assert bad.member.link is not None
        bad.member.link.statistics.not_finite = STRIKES - 1
        await settled(5)
        assert bad.member.fitness == "fit"
        bad.member.link.statistics.not_finite = STRIKES
        await settled(30)
        assert bad.member.fitness == "unfit"
        assert bad.member.unfit is not None
        assert "not finite" in bad.member.unfit.message
        assert holders(lab, OUTPUT) == {"one", "two"}


async def test_who_is_right_again_for_long_enough_is_fit_again(autojump_clock: MockClock) -> None:
    turncoat, board = Turncoat(), MemoryBoard()
    async with leader_lab(expected=3, replicas=2, board=board) as lab:
        await joined(lab, "one", "two")
        turncoat.bad = True
        bad = await lab.join("bad", spoil=turncoat.spoil)
        await settled(1)
        assert (bad.member.fitness, board.verdict_of(str(bad.peer)).fitness) == ("unfit", "unfit")  # type: ignore[union-attr]
        turncoat.bad = False
        work(lab)
        await settled(EVERY_S)
        assert bad.member.fitness == "unfit"
        await settled(5 * EVERY_S)
        assert (bad.member.fitness, board.verdict_of(str(bad.peer)).fitness) == ("fit", "fit")  # type: ignore[union-attr]
        assert lab.placer.without(str(bad.peer)) is not None
        await settled(5)
        (row,) = [row for row in placement_json(lab.placer, None)["peers"] if row["name"] == "bad"]
        assert "unfit" not in (row["why_no_output_rank"] or "")


async def test_one_bad_answer_convicts_nobody(autojump_clock: MockClock) -> None:
    once: list[int] = []

    def slips(working: Callable[[], bool], head: DispatchHead, y: F32) -> bytes:
        if working() and head.n_rows > 1 and not once:
            once.append(head.sequence)
            return coarse(head, y)
        return honest(head, y)

    async with leader_lab(expected=2, replicas=2) as lab:
        await lab.join("one")
        bad = await lab.join("bad", spoil=partial(slips, lambda: bool(lab.engine.running)))
        await settled(1)
        work(lab)
        await settled(6 * EVERY_S)
        assert once
        assert bad.member.fitness == "fit"
        assert lab.placer.coverage.epoch == 1


@pytest.mark.parametrize("partial_sums", [False, True])
async def test_a_check_has_the_shape_of_work(autojump_clock: MockClock, partial_sums: bool) -> None:
    seen = Turncoat()
    async with leader_lab(expected=1, partial_sums=partial_sums) as lab:
        one = await lab.join("one", spoil=seen.spoil)
        await settled(1)
        work(lab)
        seen.heads.clear()
        await settled(10 * EVERY_S)
        assert {(head.layer, head.epoch) for head in seen.heads} == {(OUTPUT, 1)}
        assert {head.n_tokens for head in seen.heads} == {1, 32}
        assert all(head.n_rows == head.n_tokens for head in seen.heads)
        assert one.member.fitness == "fit"
        seen.bad = True
        await settled(2 * EVERY_S + 20)
        assert one.member.fitness == "unfit"  # its answers were understood


async def test_a_successor_knows_who_was_unfit(autojump_clock: MockClock) -> None:
    left: list[bytes] = []
    async with leader_lab(expected=2, replicas=1, on_record=left.append) as lab:
        await lab.join("one")
        await lab.join("bad", spoil=coarse)
        await settled(5)
        record = PlacementRecord.from_bytes(left[-1])
        peers = {str(m.peer): m.name for m in lab.members.present()}
    async with leader_lab(term=5, replicas=1, inherited=record) as lab:
        lab.engine.running = 1
        for _ in range(2):  # the network in memory names them as before
            network = lab.hub.join()
            name = peers[str(network.peer_id)]
            stay = await lab.join(name, network=network, holding=(record.name,))
            if name == "bad":
                bad = stay
        await settled(1)
        assert lab.ready
        assert bad.member.fitness == "unfit"
