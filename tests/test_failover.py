"""Workers fail in the middle of an answer, which goes on token for token as llama.cpp alone would give it.

Real llama.cpp and real workers with a tiny model, on a network in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from capabilities.errors import Internal
from swarmnode.prompt_messages import Done
from tests.leading_swarm import Hand, Heard, LeadingSwarm, ask, leading_swarm
from tests.net_tools import eventually
from tests.patience import LOADED, PATIENCE_S

LONG = 150


class Moody(GgmlExperts):
    """Computes right until it is told to do otherwise."""

    def __init__(self) -> None:
        super().__init__(Device("CPU"))
        self.mood: Callable[[F32], F32] | None = None
        self.spoilt = 0

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        y = super().compute(layer, x, tokens, experts, ask_f32=ask_f32)
        if self.mood is None:
            return y
        self.spoilt += 1
        return self.mood(y)


def settings(workers: int, *, replicas: int = 2, own_copy: bool = False, park_s: float = 30.0) -> str:
    return f"""
[swarm]
workers_expected = {workers}
replicas = {replicas}
settle_s = 0.2
[leader]
context_tokens = 256
parallel = 2
own_copy = {str(own_copy).lower()}
park_s = {park_s}
"""


@asynccontextmanager
async def serving(folder: Path, workers: int = 2, **more: Any) -> AsyncIterator[LeadingSwarm]:
    """A swarm that is ready, with all the copies that it should have."""
    async with leading_swarm(folder, settings(workers, **more), workers=0) as swarm:
        swarm.moody = [Moody() for _ in range(workers)]  # type: ignore[attr-defined]
        for backend in swarm.moody:  # type: ignore[attr-defined]
            swarm.add_worker(lambda backend=backend: backend)
        async with swarm.led(1) as leader:
            await swarm.until_ready()

            def complete() -> bool:
                assert leader.active is not None
                return leader.active.placer.coverage.copies()[0] == more.get("replicas", 2)

            await eventually(complete)
            yield swarm


async def interrupted(swarm: LeadingSwarm, fault: Callable[[], Any], name: str = "req-1") -> Heard:
    """An answer in whose middle something breaks, whole."""
    heard = Heard()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.hear, ask(name, max_tokens=LONG), heard)
            await eventually(lambda: len(heard.tokens) > 10)
            fault()
    return heard


def check(swarm: LeadingSwarm, heard: Heard) -> None:
    assert isinstance(heard.end, Done), heard.error.message
    assert heard.tokens == swarm.expected(ask("expected", max_tokens=LONG))


def nonsense(y: F32) -> F32:
    return np.full_like(y, np.nan)


def too_few(y: F32) -> F32:
    return y[:-1]


def refuses(y: F32) -> F32:
    raise Internal("not today")


def cut(hand: Hand) -> None:
    hand.swarm.hub.cut(hand.network.peer_id, hand.swarm.network.peer_id)


def silent(hand: Hand) -> None:
    hand.swarm.hub.set_delay(hand.network.peer_id, hand.swarm.network.peer_id, float("inf"))


@pytest.mark.parametrize("fault", [cut, silent, nonsense, too_few, refuses], ids=lambda fault: fault.__name__)
async def test_another_holder_goes_on_with_the_same_tokens(tmp_path: Path, fault: Callable[..., Any]) -> None:
    async with serving(tmp_path) as swarm:
        leader = swarm.leading
        assert leader.active is not None
        remote = leader.active.remote
        links = [leader.members.by_peer[hand.network.peer_id].link for hand in swarm.hands]
        felt: list[Callable[[], int]] = []  # how often the fault can have been felt

        def strike() -> None:
            used = [link.statistics.dispatches for link in links if link is not None]
            busy = used.index(max(used))  # the one that answers, of two that hold everything
            if fault in (cut, silent):
                fault(swarm.hands[busy])
                felt.append(lambda: links[busy].statistics.dispatches - used[busy])  # type: ignore[union-attr]
            else:
                felt.append(lambda: swarm.moody[busy].spoilt)  # type: ignore[attr-defined]
                swarm.moody[busy].mood = fault  # type: ignore[attr-defined]

        heard = await interrupted(swarm, strike)
        check(swarm, heard)
        # A cut may come between two layers: then the next one goes elsewhere from the start. So may any layer on a busy
        # machine, where the other one seems faster by then.
        if fault is not cut and felt[0]():
            not_finite = sum(link.statistics.not_finite for link in links if link is not None)  # of these rows
            assert remote.failover.failures + remote.failover.hedges + not_finite >= 1
        assert (remote.failover.own_rows, remote.failover.mixed_steps) == (0, 0)


async def test_the_leaders_own_copy_goes_on_when_both_holders_are_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, own_copy=True) as swarm:
        heard = await interrupted(swarm, lambda: [hand.away() for hand in swarm.hands])
        check(swarm, heard)
        assert swarm.leading.active is not None
        assert swarm.leading.active.remote.failover.own_rows > 0
        assert not swarm.leading.active.remote.failover.mixed_steps  # the probe found the same bits
        assert swarm.leading.covers


async def test_an_answer_waits_for_a_worker_that_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1) as swarm:
        first, heard = swarm.hands[0], Heard()
        assert swarm.leading.active is not None
        engine = swarm.leading.active.engine
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(swarm.hear, ask("req-1", max_tokens=LONG), heard)
                await eventually(lambda: len(heard.tokens) > 10)
                first.away()
                await eventually(lambda: engine.statistics().batcher.parked == 1)
                await eventually(lambda: not swarm.leading.covers)
                await trio.sleep(0.3)  # what was under way arrives
                said = len(heard.tokens)
                await trio.sleep(1.0)
                assert (len(heard.tokens), heard.end) == (said, None)
                first.back()
        check(swarm, heard)
        assert swarm.leading.covers


async def test_an_answer_ends_with_the_typed_error_when_nobody_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1, park_s=1.5) as swarm:
        first, started = swarm.hands[0], 0.0

        def strike() -> None:
            nonlocal started
            first.away()
            started = trio.current_time()

        heard = await interrupted(swarm, strike)
        assert 1.4 < trio.current_time() - started < LOADED * 5
        assert heard.error.type == "experts_unavailable"
        assert heard.error.details["peer"] == first.name
        assert heard.error.details["experts"]
        assert heard.error.details["layer"] in range(3)
        assert heard.tokens == swarm.expected(ask("expected", max_tokens=LONG))[: len(heard.tokens)]


async def test_coverage_that_is_lost_and_found_is_told(tmp_path: Path) -> None:
    told: list[bool] = []
    async with leading_swarm(tmp_path, settings(1, replicas=1), workers=1) as swarm:
        async with swarm.led(1, on_covers=told.append):
            await swarm.until_ready()
            swarm.hands[0].away()
            await eventually(lambda: told == [True, False])
            swarm.hands[0].back()
            await eventually(lambda: told == [True, False, True])
        assert told == [True, False, True, False]
