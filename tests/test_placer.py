"""The placer among fake workers: who is assigned what and when, and what each failure costs. Time is a mock clock's."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from capabilities.errors import Internal, UsageError
from capabilities.verdict import MemoryBoard
from scheduler.placement_record import PlacementRecord
from scheduler.settling import REPLACE_AFTER_S, STALLED_S, UNCOVERED_AFTER_S
from swarmnode.expert_messages import DispatchHead, encode_failure, encode_reply
from swarmnode.leader.members import MEMBERS_MAX
from swarmnode.leader.own_experts import OWN_COPY
from swarmnode.leader.report import placement_json
from tests.fault_tools import honest
from tests.memory_swarm import EXPERT_BYTES, LAYERS, N_EXPERT, Lab, Stay, leader_lab

SHARE = len(LAYERS) * N_EXPERT // 2  # of one worker of two


def wrong(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_reply(head.sequence, 1, y * np.float32(2))


def refuses(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_failure(head.sequence, Internal("not today"))


dispatched: list[str] = []


def count(name: str, head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    dispatched.append(name)
    return honest(head, y)


async def settled(lab: Lab, seconds: float = 0.0) -> None:
    await trio.sleep(seconds)
    await trio.testing.wait_all_tasks_blocked()


async def pair(lab: Lab, **fields: Any) -> tuple[Stay, Stay]:
    return await lab.join("one", **fields), await lab.join("two", **fields)


async def test_experts_are_placed_when_all_workers_are_there_and_serve_once_proven(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=2) as lab:
        assert "workers to join" in lab.placer.coverage.refusal().message  # type: ignore[union-attr]
        one = await lab.join("one")
        await settled(lab, 60)
        assert one.fake.assigned == []
        assert "1 of 2 workers to join" in lab.placer.coverage.refusal().message  # type: ignore[union-attr]
        two = await lab.join("two")
        await settled(lab)
        assert lab.ready
        assert [stay.state for stay in (one, two)] == ["ready", "ready"]
        assert lab.placer.coverage.copies() == (1, [])
        for stay in (one, two):
            (assign,) = stay.fake.assigned
            assert (assign.term, assign.epoch, assign.sources) == (1, 1, (str(lab.network.peer_id),))
            assert sum(map(len, assign.held.values())) == lab.placer.coverage.held_now(stay.member) == SHARE
            assert [(begin.term, begin.epoch) for begin in stay.fake.begun][-1] == (1, 1)


async def test_with_no_number_expected_joining_must_settle(autojump_clock: MockClock) -> None:
    async with leader_lab(settle_s=3.0) as lab:
        one = await lab.join("one")
        await settled(lab, 2.0)
        two = await lab.join("two")
        await settled(lab, 2.9)
        assert one.fake.assigned == two.fake.assigned == []
        await settled(lab, 0.2)
        assert lab.ready
        assert len(one.fake.assigned) == len(two.fake.assigned) == 1


async def test_a_worker_that_comes_back_proves_its_share_again_and_nothing_moves(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        one, two = await pair(lab)
        await settled(lab)
        await one.leave()
        assert not lab.ready
        refusal = lab.placer.coverage.refusal()
        assert refusal is not None
        assert "8" not in refusal.message
        assert f"{SHARE} experts wait for one" in refusal.message
        assert len(lab.placer.coverage.copies()[1]) == SHARE
        assert (one.state, two.state) == ("gone", "ready")
        await settled(lab, UNCOVERED_AFTER_S - 1)
        await one.back()
        await settled(lab)
        assert lab.ready
        assert lab.placer.coverage.epoch == 1
        assert [assign.held for assign in one.fake.assigned] == [one.fake.assigned[0].held] * 2
        assert len(two.fake.assigned) == 1


async def test_a_worker_that_stays_away_is_replaced_by_those_who_are_there(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        one, two = await pair(lab)
        await settled(lab)
        await one.leave()
        await settled(lab, UNCOVERED_AFTER_S + 1)
        assert lab.ready
        assert (lab.placer.coverage.epoch, lab.placer.coverage.held_now(two.member)) == (2, 2 * SHARE)
        await one.back()  # a newcomer now
        await settled(lab, 3.1)
        assert lab.ready
        assert (lab.placer.coverage.epoch, lab.placer.coverage.held_now(one.member)) == (3, SHARE)


async def test_the_old_epoch_serves_while_a_newcomer_loads(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        one, two = await pair(lab)
        await settled(lab)
        begun = len(two.fake.begun)
        slow = await lab.join("slow", claims_loaded=False)
        await settled(lab, 1.1)
        assert [assign.epoch for assign in two.fake.assigned] == [1, 2]
        assert (lab.ready, lab.placer.coverage.epoch, slow.state) == (True, 1, "loading")
        assert lab.placer.coverage.held_now(slow.member) == 0
        assert len(two.fake.begun) == begun  # to hear of the old epoch again would end the new one's name
        await slow.fake.report("loaded")
        await settled(lab)
        assert (lab.ready, lab.placer.coverage.epoch, slow.state) == (True, 2, "ready")
        for stay in (one, two, slow):
            assert stay.fake.begun[-1].epoch == 2
        routing = lab.remote._routing
        assert routing is not None
        assert (routing.epoch, set(routing.links)) == (2, {str(stay.peer) for stay in (one, two, slow)})


async def test_a_newcomer_that_never_loads_is_given_up_and_nobody_notices(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        one, _ = await pair(lab)
        await settled(lab)
        lazy = await lab.join("lazy", claims_loaded=False)
        for _ in range(int(STALLED_S + REPLACE_AFTER_S + 10)):
            await settled(lab, 1.0)
            assert lab.ready
        assert lab.placer.coverage.epoch == 3
        assert one.fake.assigned[2].held == one.fake.assigned[0].held
        assert lazy.state == "joining"


async def test_a_newcomer_that_cannot_load_is_given_up_for_ever_longer_until_it_can(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        await pair(lab)
        await settled(lab)
        bad = await lab.join("bad", claims_loaded=False)
        placed: list[tuple[float, int]] = []
        told = 0
        for second in range(400):
            await settled(lab, 1.0)
            assert lab.ready
            if len(bad.fake.assigned) > told:
                told = len(bad.fake.assigned)
                await bad.fake.report("failed", error=Internal("no memory"))
            if not placed or placed[-1][1] != bad.fake.assigned[-1].epoch:
                placed.append((second, bad.fake.assigned[-1].epoch))
        assert "no memory" in bad.member.error.message  # type: ignore[union-attr]
        gaps = [after[0] - before[0] for before, after in itertools.pairwise(placed)]
        assert len(gaps) >= 2
        assert gaps == sorted(gaps)
        assert gaps[0] >= 2 * REPLACE_AFTER_S
        assert len(bad.fake.assigned) < 40
        bad.fake.claims_loaded = True
        await settled(lab, 300)
        assert bad.state == "ready"
        assert lab.placer.coverage.held_now(bad.member) > 0
        assert (bad.member.given_up, bad.member.failures, bad.member.error) == (0, 0, None)


async def test_one_whose_rows_are_wrong_again_and_again_is_quarantined_until_it_is_released(
    autojump_clock: MockClock,
) -> None:
    board = MemoryBoard()
    async with leader_lab(expected=2, settle_s=1.0, board=board) as lab:
        await pair(lab)
        await settled(lab)
        bad = await lab.join("bad", spoil=wrong)
        await settled(lab, 10)
        assert bad.member.quarantined is None  # some wrong answers convict nobody
        await settled(lab, 300)
        assert lab.ready
        assert (bad.member.fitness, bad.state) == ("quarantined", "joining")
        verdict = board.verdict_of(str(bad.peer))
        assert verdict is not None
        assert (verdict.fitness, {each.kind for each in verdict.evidence}) == ("quarantined", {"probe"})
        assert "computes something else" in verdict.evidence[-1].text
        bad.fake.spoil = honest
        await settled(lab, 300)
        assert lab.placer.coverage.held_now(bad.member) == 0
        board.release(str(bad.peer))
        await settled(lab, 10)
        assert (bad.member.fitness, bad.state) == ("fit", "ready")
        assert lab.placer.coverage.held_now(bad.member) > 0


async def test_joining_again_does_not_wipe_the_slate(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        await pair(lab)
        await settled(lab)
        bad = await lab.join("bad", spoil=wrong)
        await settled(lab, REPLACE_AFTER_S + 5)
        assert bad.member.given_up == 1
        epoch, assigned = lab.placer.coverage.epoch, len(bad.fake.assigned)
        await bad.leave()
        await bad.back()
        await settled(lab, 10)
        assert (lab.placer.coverage.epoch, len(bad.fake.assigned)) == (epoch, assigned)


@pytest.mark.parametrize("spoil", [wrong, refuses], ids=lambda spoil: spoil.__name__)
async def test_a_worker_that_fails_the_first_probe_is_asked_again_and_named_meanwhile(
    autojump_clock: MockClock, spoil: Any
) -> None:
    async with leader_lab(expected=2) as lab:
        one, two = await pair(lab, spoil=spoil)
        await settled(lab, 2.0)
        assert not lab.ready
        assert lab.placer.coverage.copies()[0] == 0
        refusal = lab.placer.coverage.refusal()
        assert refusal is not None
        assert "one failed: " in refusal.message
        for stay in (one, two):
            stay.fake.spoil = honest
        await settled(lab, 8.0)
        assert lab.ready
        assert two.member.error is None


async def test_holders_that_are_there_and_fail_are_within_reach_and_absent_ones_are_not(
    autojump_clock: MockClock,
) -> None:
    """A leader that handed over because a holder fails would leave its successor the same, and so on."""
    async with leader_lab(expected=2) as lab:
        assert not lab.placer.coverage.reached
        one, two = await pair(lab, spoil=wrong)
        await settled(lab, 2.0)
        assert not lab.placer.coverage.covers
        assert lab.placer.coverage.reached
        await two.leave()
        await settled(lab)
        assert not lab.placer.coverage.reached
        assert one.member.failures


async def test_a_worker_that_cannot_load_is_assigned_again(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=1) as lab:
        one = await lab.join("one", claims_loaded=False)
        await one.fake.report("failed", error=Internal("no space left"))
        await settled(lab)
        assert (one.state, one.member.error.message) == ("loading", "no space left")  # type: ignore[union-attr]
        await settled(lab, 1.1)
        assert len(one.fake.assigned) == 2
        await one.fake.report("fetching", done=0)
        await one.fake.report("loaded")
        await settled(lab)
        assert lab.ready


async def test_a_flood_of_reports_buys_no_work(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=1) as lab:
        one = await lab.join("one", claims_loaded=False, spoil=wrong)
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(300):
            await one.fake.report("failed", error=Internal("again"))
            await one.fake.report("loaded")
        await settled(lab)
        assert trio.lowlevel.current_statistics().tasks_living - before < 10
        assert len(one.fake.assigned) == 1
        await settled(lab, 10)
        assert len(one.fake.assigned) < 8


async def test_a_worker_without_memory_holds_nothing_and_moves_nothing(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        one, _ = await pair(lab)
        await settled(lab)
        poor = await lab.join("poor", memory_budget_bytes=EXPERT_BYTES - 1)
        await settled(lab, 300)
        assert (lab.ready, poor.state, poor.fake.assigned) == (True, "joining", [])
        assert lab.placer.coverage.epoch <= 2
        assert len(one.fake.assigned) <= 2
        await poor.leave()
        poor.fake.memory_budget_bytes = 1 << 30
        await poor.back()
        await settled(lab, 3)
        assert (lab.ready, poor.state) == (True, "ready")


async def test_too_little_memory_is_said_with_the_missing_bytes(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        one, _ = await pair(lab, memory_budget_bytes=3 * EXPERT_BYTES)
        await settled(lab, 100)
        refusal = lab.placer.coverage.refusal()
        assert refusal is not None
        assert f"{2 * EXPERT_BYTES} bytes are missing" in refusal.message
        await one.leave()
        one.fake.memory_budget_bytes = 5 * EXPERT_BYTES
        await one.back()
        await settled(lab, 5)
        assert lab.ready


async def test_where_both_shares_do_not_fit_the_old_one_goes_when_the_others_are_done(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=2, settle_s=1.0) as lab:
        one, two = await pair(lab, memory_budget_bytes=SHARE * EXPERT_BYTES)
        await settled(lab)
        third = await lab.join("three", memory_budget_bytes=1 << 30, claims_loaded=False)
        await settled(lab, 1.1)
        assert (len(one.fake.assigned), len(two.fake.assigned), len(third.fake.assigned)) == (1, 1, 1)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 1)
        one.fake.claims_loaded = two.fake.claims_loaded = False
        await third.fake.report("loaded")
        await settled(lab)
        routing = lab.remote._routing
        assert routing is not None
        assert routing.epochs == {str(third.peer): 2}  # the newcomer answers already
        assert len(one.fake.assigned) + len(two.fake.assigned) == 3  # one after the other
        assert not lab.ready  # what only that one held is missing for a while
        for stay in sorted((one, two), key=lambda stay: stay.peer):
            await stay.fake.report("loaded")
            await settled(lab)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 2)
        assert lab.remote._routing is not None
        assert lab.remote._routing.epochs == {}


async def test_a_suspended_worker_is_suspect_and_proves_itself_when_it_answers(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        one, two = await pair(lab)
        await settled(lab, 1.0)
        lab.hub.set_delay(lab.network.peer_id, one.peer, float("inf"))
        await settled(lab, 3.0)
        assert (lab.ready, one.state, two.state) == (False, "suspect", "ready")
        assert one.member.link.closed.details["cause"] == "suspended"  # type: ignore[union-attr]
        assert one.member.failures == 0  # sleep is no fault
        lab.hub.set_delay(lab.network.peer_id, one.peer, 0.0)
        await settled(lab, 2.0)
        assert (lab.ready, one.state) == (True, "ready")
        assert len(one.fake.assigned) == 1


async def test_a_link_that_fails_in_service_is_replaced_after_a_probe(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        one, _ = await pair(lab)
        await settled(lab)
        link = one.member.link
        assert link is not None
        link.fail("timeout", "a test")
        await settled(lab)
        assert (lab.ready, one.state) == (False, "loading")
        await settled(lab, 1.5)
        assert lab.ready
        assert one.member.link is not link


async def test_a_share_that_changes_during_its_probe_is_probed_again(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, settle_s=0.1) as lab:
        one, _ = await pair(lab)
        await settled(lab)
        lab.hub.set_delay(lab.network.peer_id, one.peer, 0.2)  # two layers take 0.8 s to probe
        await lab.join("three")
        await settled(lab, 0.6)
        assert (one.member.phase, lab.placer.coverage.wanted.epoch) == ("probing", 2)  # type: ignore[union-attr]
        await lab.join("four")
        await settled(lab, 0.2)
        assert (one.member.phase, lab.placer.coverage.wanted.epoch) == ("loading", 3)  # type: ignore[union-attr]
        await settled(lab, 3.0)
        assert (lab.ready, lab.placer.coverage.wanted, lab.placer.coverage.epoch) == (True, None, 3)
        assert [begin.epoch for begin in one.fake.begun][-1] == 3


async def test_members_who_left_make_room_for_those_who_come(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        await pair(lab)
        await settled(lab)
        for number in range(MEMBERS_MAX + 5):
            passer = await lab.join(f"passer-{number}", memory_budget_bytes=0)
            await passer.leave()
        assert len(lab.members.by_peer) == MEMBERS_MAX
        assert lab.members.refused == 0
        await settled(lab, 700)
        assert lab.ready
        assert len(lab.members.by_peer) == 2


# --- Replicas ---------------------------------------------------------------------------------------------------------

ALL = len(LAYERS) * N_EXPERT


async def test_with_two_copies_one_may_leave_and_the_swarm_stays_ready(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=3, replicas=2) as lab:
        stays = [await lab.join(name) for name in ("one", "two", "three")]
        await settled(lab)
        assert lab.placer.coverage.copies() == (2, [])
        await stays[0].leave()
        await settled(lab, REPLACE_AFTER_S - 1)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 1)
        assert lab.placer.coverage.copies() == (1, [])
        await settled(lab, 2)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 2)
        assert lab.placer.coverage.copies() == (2, [])


async def test_the_first_epoch_begins_with_one_copy_of_each_and_the_others_follow(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, replicas=2) as lab:
        await lab.join("one")
        slow = await lab.join("slow", claims_loaded=False)
        await settled(lab)
        assert (lab.ready, lab.placer.coverage.copies()) == (True, (1, []))
        await slow.fake.report("loaded")
        await settled(lab)
        assert (lab.placer.coverage.copies(), slow.state) == ((2, []), "ready")
        assert slow.fake.begun[-1].epoch == 1


async def test_copies_go_to_different_hosts(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=3, replicas=2) as lab:
        together = {str((await lab.join(name, host="the same")).peer) for name in ("one", "two")}
        await lab.join("three", host="another")
        await settled(lab)
        assert lab.placer.coverage.copies() == (2, [])
        assert lab.placer.coverage.current is not None
        for holders in lab.placer.coverage.current.holders.values():
            assert all(len(together & set(peers)) == 1 for peers in holders)


async def test_where_all_share_a_host_copies_are_on_different_workers_and_this_is_said(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=2, replicas=2) as lab:
        for name in ("one", "two"):
            await lab.join(name, host="the same")
        await settled(lab)
        assert lab.placer.coverage.copies() == (2, [])
        report = lab.placer.describe()
        assert report is not None
        assert report.degraded == ("all 2 workers are on one machine: an expert's copies are lost together with it",)


async def test_a_worker_that_drains_is_relieved_and_serves_until_then(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2, replicas=1) as lab:
        one, two = await pair(lab)
        await settled(lab)
        two.fake.claims_loaded = False
        await one.fake.drain(True)
        await settled(lab, 0.1)
        assert (one.state, lab.ready, lab.placer.coverage.epoch) == ("draining", True, 1)
        assert sum(map(len, two.fake.assigned[-1].held.values())) == ALL
        await two.fake.report("loaded")
        await settled(lab)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 2)
        await one.leave()
        await settled(lab, 60)
        assert (lab.ready, lab.placer.coverage.epoch) == (True, 2)


async def test_nobody_can_take_over_from_a_worker_that_drains(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=1) as lab:
        one = await lab.join("one")
        await settled(lab)
        await one.fake.drain(True)
        await settled(lab, 100)
        assert (lab.ready, len(one.fake.assigned)) == (True, 1)
        await one.fake.drain(False)
        await settled(lab, 1)
        assert one.state == "ready"


async def test_copies_change_hands_without_a_gap_where_no_worker_has_room_for_both(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=4, replicas=2, settle_s=1.0) as lab:
        tight = [await lab.join(f"w{i}", memory_budget_bytes=ALL * EXPERT_BYTES // 2) for i in range(4)]
        await settled(lab)
        assert lab.placer.coverage.copies() == (2, [])
        await tight[0].leave()
        ready = []
        for _ in range(450):
            await settled(lab, 0.1)
            ready.append(lab.ready)
        assert all(ready)
        assert lab.placer.coverage.epoch == 2
        await tight[0].back()
        for _ in range(100):
            await settled(lab, 0.1)
            assert lab.ready
        assert (lab.placer.coverage.epoch, lab.placer.coverage.copies()) == (3, (2, []))


async def test_the_leaders_own_node_holds_experts_only_if_the_others_cannot(autojump_clock: MockClock) -> None:
    async with leader_lab(settle_s=1.0) as lab:
        own = await lab.join("own", network=lab.network, answers_pings=False)
        await settled(lab, 2)
        assert (lab.ready, lab.placer.coverage.held_now(own.member)) == (True, ALL)  # a swarm of one
        other = await lab.join("other")
        await settled(lab, 5)
        assert (lab.ready, own.state, lab.placer.coverage.held_now(other.member)) == (True, "joining", ALL)


async def test_what_the_loss_of_a_worker_would_cost(autojump_clock: MockClock) -> None:
    async with leader_lab(expected=2) as lab:
        assert lab.placer.describe() is None
        one, two = await pair(lab)
        await settled(lab)
        report = placement_json(lab.placer, "one")
        loss = report["without"]
        json.dumps(report)
        assert report["coverage"]["min_copies"] == 1
        assert any("one copy, on two" in text for text in report["single_points"])
        assert {peer["name"] for peer in report["peers"]} == {"one", "two"}
        assert sum(len(layer["experts"]) for layer in loss["no_copy"]) == SHARE
        assert loss["bytes_to_move"] == SHARE * EXPERT_BYTES
        for named in (str(one.peer), str(one.peer)[-8:]):
            assert placement_json(lab.placer, named)["without"] == loss
        with pytest.raises(UsageError, match="no worker is called 'three'"):
            placement_json(lab.placer, "three")
        assert two.state == "ready"


async def test_with_a_copy_of_its_own_the_leader_covers_everything_once_an_epoch_has_begun(
    autojump_clock: MockClock,
) -> None:
    async with leader_lab(expected=1, own_copy=True) as lab:
        assert not lab.placer.coverage.covers
        one = await lab.join("one")
        await settled(lab)
        await one.leave()
        await settled(lab, 1)
        assert lab.placer.coverage.copies()[0] == 0
        assert lab.ready
        assert lab.remote._routing is not None
        assert lab.remote._routing.layers[LAYERS[0]].peers == (OWN_COPY,)


# --- From one leader to the next --------------------------------------------------------------------------------------


async def test_a_successor_serves_at_once_with_those_who_still_hold_what_they_had_proven(
    autojump_clock: MockClock,
) -> None:
    left: list[bytes] = []
    async with leader_lab(expected=2, replicas=2, on_record=left.append) as lab:
        one, two = await pair(lab)
        await settled(lab)
        peers = {str(one.peer): "one", str(two.peer): "two"}
    record = PlacementRecord.from_bytes(left[-1])
    assert (record.name, set(record.proven)) == ((1, 1), set(peers))
    async with leader_lab(term=5, replicas=2, inherited=record) as lab:
        lab.engine.running = 1
        stays = {}
        dispatched.clear()
        for _ in range(2):  # the network in memory names them as before
            network = lab.hub.join()
            name = peers[str(network.peer_id)]
            stays[name] = await lab.join(
                name, network=network, holding=((1, 1),) if name == "one" else (), spoil=partial(count, name)
            )
        await settled(lab)
        assert lab.ready
        assert (lab.placer.coverage.epoch, lab.placer.coverage.copies()) == (1, (2, []))
        assert set(dispatched) == {"two"}  # who does not name its set must prove it
        lab.engine.running = 0
        await settled(lab, 3)
        assert set(dispatched) == {"one", "two"}  # made up for, once nobody waits
        (assign,) = stays["one"].fake.assigned
        assert (assign.term, assign.held) == (5, record.placement.held_by(str(stays["one"].peer)))
        dispatched.clear()
        lab.engine.running = 1
        await stays["one"].leave()
        await stays["one"].back()
        await settled(lab, 1)
        assert set(dispatched) == {"one"}  # believed once


async def test_an_inherited_holder_that_does_not_come_is_replaced(autojump_clock: MockClock) -> None:
    left: list[bytes] = []
    async with leader_lab(expected=2, replicas=1, on_record=left.append) as lab:
        await pair(lab)
        await settled(lab)
    async with leader_lab(term=2, inherited=PlacementRecord.from_bytes(left[-1])) as lab:
        lab.hub.join()
        other = await lab.join("other")
        await settled(lab, UNCOVERED_AFTER_S - 1)
        assert not lab.ready
        await settled(lab, 2)
        assert (lab.ready, lab.placer.coverage.held_now(other.member)) == (True, ALL)


async def test_a_record_of_another_model_is_left_alone(autojump_clock: MockClock) -> None:
    left: list[bytes] = []
    async with leader_lab(expected=1, on_record=left.append) as lab:
        await lab.join("one")
        await settled(lab)
    record = replace(PlacementRecord.from_bytes(left[-1]), manifest="ab" * 32)
    async with leader_lab(term=2, expected=1, inherited=record) as lab:
        assert lab.placer.coverage.current is None
