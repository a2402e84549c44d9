"""Audits of live work, with real kernels: who cheats is found and moved away, and who does not never is.

A model in llama.cpp, a leader and workers in one process; who cheats is a backend, as a daemon's would be.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.device import Device
from backends.experts import F32, I32, ExpertBackend, GgmlExperts, ReadSlice
from backends.gguf_types import GGML_TYPES
from backends.manifest import LayerExperts
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram
from capabilities.verdict import MemoryBoard
from scheduler.audit_choice import AGREED_FIRST
from scheduler.audits import Audits
from scheduler.placement_record import PlacementRecord
from swarmnode.leader.members import Member
from swarmnode.prompt_messages import Done
from tests.leading_swarm import Hand, Heard, LeadingSwarm, ask, leading_swarm
from tests.net_tools import eventually

SETTINGS = """
[leader]
context_tokens = 256
batch_tokens = 64
parallel = 2

[swarm]
workers_expected = 2
replicas = 1
"""


class Switch:
    """What the backends of a worker do: ggml's kernels, as measured and probed, or `kind`."""

    kind = ""
    pause_s = 0.0  # before each answer
    one_of = 1  # so many answers are odd ("random" alone)


class Odd:
    """A backend in the hands of a switch."""

    def __init__(self, switch: Switch) -> None:
        self.name = "odd"
        self._switch = switch
        self._right = GgmlExperts(Device("CPU"))
        self._loaded: dict[int, tuple[LayerExperts, ExpertProgram, tuple[int, ...], ReadSlice]] = {}
        self._kept: dict[tuple[str, int], ExpertBackend] = {}
        self._random = np.random.default_rng(1)
        self._last = np.ones((1, 1), np.float32)
        self._computed = 0

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self._right.load_layer(layer, program, experts, read)
        slices = {(e, t): bytes(read(e, t)) for e in experts for t in range(len(layer.tensors))}
        self._loaded[layer.layer] = layer, program, tuple(experts), lambda expert, tensor: slices[expert, tensor]

    def _as(self, kind: str, number: int) -> ExpertBackend:
        """A layer as it should not be."""
        layer, program, experts, read = self._loaded[number]

        def other(expert: int, tensor: int) -> memoryview | bytes:
            return read(experts[(experts.index(expert) + 1) % len(experts)], tensor)

        def bits(expert: int, tensor: int) -> bytes:
            """One weight of fifty is a tenth too large."""
            values = np.frombuffer(read(expert, tensor), np.float32).copy()  # the model's type
            values[::50] *= np.float32(1.1)
            return values.tobytes()

        makes: dict[str, tuple[Callable[[], ExpertBackend], ReadSlice]] = {
            "another expert": (lambda: GgmlExperts(Device("CPU")), other),
            "wrong weights": (lambda: GgmlExperts(Device("CPU")), bits),
            "half": (lambda: NumpyExperts("float16"), read),
            "single": (lambda: NumpyExperts("float32"), read),
        }
        if kind not in makes:
            return self._right
        if (kind, number) not in self._kept:
            make, source = makes[kind]
            backend = self._kept[kind, number] = make()
            backend.load_layer(layer, program, experts, source)
        return self._kept[kind, number]

    def unload_layer(self, layer: int) -> None:
        self._right.unload_layer(layer)

    def held(self, layer: int) -> frozenset[int]:
        return self._right.held(layer)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        kind = self._switch.kind
        time.sleep(self._switch.pause_s)
        y = self._as(kind, layer).compute(layer, x, tokens, experts, ask_f32=ask_f32)
        last, self._last = self._last, y
        self._computed += 1
        match kind:
            case "random" if self._computed % self._switch.one_of == 0:
                return self._random.standard_normal(y.shape, np.float32) * np.float32(np.abs(y).mean())
            case "stale":
                return np.resize(last, y.shape)
            case "skipped":
                return np.zeros_like(y)
            case "scaled":
                return y * np.float32(1.01)
            case "unsteady":  # as kernels whose threads add in the order in which they end
                return y * (1 + self._random.uniform(-1e-6, 1e-6, y.shape)).astype(np.float32)
        return y

    def close(self) -> None:
        for backend in (self._right, *self._kept.values()):
            backend.close()


CHEATS = ("random", "stale", "skipped", "scaled", "another expert", "wrong weights")


class Swarm:
    """A leader, an honest worker, and one in the hands of a switch."""

    def __init__(self, swarm: LeadingSwarm, odd: Hand, board: MemoryBoard, switch: Switch) -> None:
        self.swarm = swarm
        self.odd = odd
        self.board = board
        self.switch = switch

    @property
    def active(self) -> Any:
        assert self.swarm.leading.active is not None
        return self.swarm.leading.active

    @property
    def member(self) -> Member:
        found: Member = self.active.placer.members.by_peer[self.odd.network.peer_id]
        return found

    def audits(self, hand: Hand | None = None) -> dict[str, Any]:
        found: dict[str, Any] = self.active.placer.auditing.statistics(str((hand or self.odd).network.peer_id))
        return found

    @property
    def serving(self) -> set[str]:
        return set(self.active.placer.coverage.answering)

    async def hear(self, request: str, tokens: int = 40, prompt: str = "A story:") -> Heard:
        heard = Heard()
        await self.swarm.hear(ask(request, prompt, tokens), heard)
        return heard

    async def work_until(self, condition: Callable[[], bool], answers: int = 100, tokens: int = 40) -> None:
        for number in range(answers):
            if condition():
                return
            await self.hear(f"work-{number}", tokens, f"{number} stories:")
            await eventually(lambda: not self.active.placer.auditing.tap._waiting)  # as slow as its thread may be here
        assert condition()


@asynccontextmanager
async def audited(folder: Path) -> AsyncIterator[Swarm]:
    board, switch = MemoryBoard(), Switch()
    async with leading_swarm(folder, SETTINGS, workers=1) as swarm:
        odd = swarm.add_worker(lambda: Odd(switch))
        async with swarm.led(1, board=board):
            await swarm.until_ready()
            made = Swarm(swarm, odd, board, switch)
            await eventually(lambda: len(made.serving) == 2)
            yield made


@pytest.mark.parametrize("kind", CHEATS)
async def test_whoever_begins_to_cheat_is_quarantined_and_its_work_goes_to_others(tmp_path: Path, kind: str) -> None:
    async with audited(tmp_path) as swarm:
        await swarm.work_until(lambda: swarm.audits()["agreed"] >= AGREED_FIRST)
        swarm.switch.kind = kind
        await swarm.work_until(lambda: swarm.member.fitness == "quarantined")
        assert swarm.odd.name not in swarm.serving
        verdict = swarm.board.verdict_of(swarm.odd.name)
        assert verdict is not None
        assert (verdict.fitness, verdict.evidence[-1].kind) == ("quarantined", "audit")
        assert "convicted, as audit after audit had" in verdict.evidence[-1].text
        weights = {GGML_TYPES[tensor.type].name for layer in swarm.active.manifest.layers for tensor in layer.tensors}
        assert set(verdict.evidence[-1].weight_type.split(",")) <= weights
        assert verdict.audits_differed >= 6  # one mismatch convicts nobody
        await eventually(lambda: swarm.odd.name not in swarm.active.placer.coverage.current.peers())
        assert swarm.swarm.ready
        await swarm.swarm.check(ask("after", "A right one:"))
        honest = swarm.swarm.hands[0]
        assert swarm.active.placer.members.by_peer[honest.network.peer_id].fitness == "fit"
        assert swarm.audits(honest)["differed"] == 0
        swarm.board.release(swarm.odd.name)
        assert (swarm.audits()["share"], swarm.member.quarantined) == (1.0, None)


async def test_without_audits_nobody_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above rests on."""
    monkeypatch.setattr(Audits, "answered", lambda self, peer, rows: None)
    async with audited(tmp_path) as swarm:
        swarm.switch.kind = "scaled"
        for number in range(8):
            await swarm.hear(f"work-{number}")
        assert swarm.member.fitness == "fit"


async def test_honest_workers_agree_bit_for_bit_and_are_audited_ever_less(tmp_path: Path) -> None:
    async with audited(tmp_path) as swarm:
        await swarm.work_until(lambda: all(swarm.audits(h)["agreed"] > AGREED_FIRST + 2 for h in swarm.swarm.hands))
        for hand in swarm.swarm.hands:
            counts = swarm.audits(hand)
            assert (counts["differed"], counts["share"]) == (0, AGREED_FIRST / counts["agreed"])
        totals = swarm.active.statistics()["audits"]
        assert totals["audited"] == totals["agreed"]
        assert swarm.board.verdicts == {}


async def test_sums_in_half_precision_make_a_worker_unfit_and_its_output_ranks_move(tmp_path: Path) -> None:
    async with audited(tmp_path) as swarm:
        await swarm.hear("before")
        swarm.switch.kind = "half"
        await swarm.work_until(lambda: swarm.member.fitness == "unfit")
        verdict = swarm.board.verdict_of(swarm.odd.name)
        assert verdict is not None
        assert verdict.fitness == "unfit"
        assert verdict.evidence[-1].extreme_relative_l2 > verdict.evidence[-1].limit > 0
        last = max(spec.layer for spec in swarm.active.manifest.layers)

        def outputs() -> set[str]:
            holders = swarm.active.placer.coverage.current.holders[last]
            return {peer for peers in holders for peer in peers}

        await eventually(lambda: swarm.odd.name not in outputs())
        await eventually(lambda: swarm.odd.name in swarm.serving)


async def test_single_precision_of_another_make_is_fit_and_of_another_class(tmp_path: Path) -> None:
    """And an answer says so, once that is known."""
    async with audited(tmp_path) as swarm:
        before = await swarm.hear("before")
        assert swarm.member.agreement is not None
        assert swarm.member.agreement.bit_identical
        swarm.switch.kind = "single"
        await swarm.work_until(lambda: not swarm.member.agreement.bit_identical, tokens=180)  # type: ignore[union-attr]
        assert (swarm.member.fitness, swarm.audits()["differed"]) == ("fit", 0)
        after = await swarm.hear("after")
        assert [heard.end.mixed for heard in (before, after)] == [False, True]  # type: ignore[union-attr]


async def test_who_differs_from_itself_within_tolerance_is_measured_and_not_accused(tmp_path: Path) -> None:
    async with audited(tmp_path) as swarm:
        await swarm.work_until(lambda: swarm.audits()["agreed"] >= AGREED_FIRST)
        swarm.switch.kind = "unsteady"
        await swarm.work_until(lambda: swarm.audits()["self_differed"] >= 3)
        assert (swarm.member.fitness, swarm.audits()["differed"]) == ("fit", 0)
        assert swarm.member.agreement is not None
        assert swarm.member.agreement.bit_identical  # of the class that it was probed to be
        assert swarm.board.verdicts == {}
        assert swarm.audits(swarm.swarm.hands[0])["self_differed"] == 0


async def test_wrong_rows_of_one_that_differs_from_itself_convict_it(tmp_path: Path) -> None:
    async with audited(tmp_path) as swarm:
        swarm.switch.kind = "unsteady"
        await swarm.work_until(lambda: swarm.audits()["self_differed"] >= 1)
        swarm.switch.kind = "random"
        await swarm.work_until(lambda: swarm.member.fitness == "quarantined")


async def test_who_adds_in_half_precision_from_the_start_is_unfit_and_never_quarantined(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, SETTINGS, workers=1) as swarm:
        odd = swarm.add_worker(lambda: NumpyExperts("float16"))
        async with swarm.led(1):
            await swarm.until_ready()
            made = Swarm(swarm, odd, MemoryBoard(), Switch())
            await made.work_until(lambda: made.audits()["audited"] > AGREED_FIRST)
            assert made.member.fitness == "unfit"


async def test_answers_that_a_cheat_had_a_part_in_end_as_tainted_and_those_to_come_do_not(tmp_path: Path) -> None:
    async with audited(tmp_path) as swarm:
        await swarm.hear("before")
        swarm.switch.kind, swarm.switch.pause_s = "random", 0.02  # so that it is found out in the middle of an answer
        ends = []
        while swarm.member.fitness != "quarantined":
            assert len(ends) < 10
            ends.append((await swarm.hear(f"used-it-{len(ends)}", 180)).end)
        tainted = [end.tainted for end in ends if isinstance(end, Done)].count(True)
        assert tainted >= 1
        after = await swarm.hear("after")
        assert isinstance(after.end, Done)
        assert not after.end.tainted
        assert swarm.swarm.leading.statistics()["tainted"] == tainted


@pytest.mark.parametrize("one_of", [1, 3])
async def test_no_short_answer_ends_before_what_was_wrong_in_it_is_known(tmp_path: Path, one_of: int) -> None:
    """Shorter than judging takes; and where few rows are wrong, nobody is convicted for long."""
    async with audited(tmp_path) as swarm:
        await swarm.hear("before", 1)
        swarm.switch.kind, swarm.switch.one_of = "random", one_of
        wrong = 0
        for number in range(40):
            request = ask(f"short-{number}", f"{number}:", 3)
            heard = Heard()
            await swarm.swarm.hear(request, heard)
            assert isinstance(heard.end, Done)
            if heard.tokens != swarm.swarm.expected(request):
                assert heard.end.tainted
                wrong += 1
            if swarm.member.fitness == "quarantined":
                break
        assert wrong
        assert swarm.member.fitness == "quarantined"


async def test_a_successor_goes_on_with_what_was_found(tmp_path: Path) -> None:
    records, switch = list[bytes](), Switch()
    async with leading_swarm(tmp_path, SETTINGS, workers=1) as swarm:
        odd = swarm.add_worker(lambda: Odd(switch))
        async with swarm.led(1, on_record=records.append):
            await swarm.until_ready()
            one = Swarm(swarm, odd, MemoryBoard(), switch)
            await one.work_until(lambda: one.audits(swarm.hands[0])["agreed"] >= AGREED_FIRST)
            switch.kind = "random"
            await one.work_until(lambda: one.member.fitness == "quarantined")
        record = PlacementRecord.from_bytes(records[-1])
        assert record.audits[odd.name].quarantined
        assert record.audits[swarm.hands[0].name].agreed >= AGREED_FIRST
        async with swarm.led(2, inherited=record):
            await eventually(lambda: len(swarm.leading.members.present()) == 2)
            await swarm.until_ready()
            two = Swarm(swarm, odd, MemoryBoard(), switch)
            assert two.member.fitness == "quarantined"
            assert two.odd.name not in two.serving
            await swarm.check(ask("after"))
