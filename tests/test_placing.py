"""Placement with replicas: the hard rules always, the soft aims where nothing stands against them, little movement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.errors import NotReady
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, output_ranks
from scheduler.placing import REPLICAS, REPLICAS_MAX, place
from tests.placing_swarms import (
    PLENTY,
    alike,
    broken_rules,
    experts_held,
    gains,
    layer_lists,
    stack,
    used_bytes,
    worker_lists,
)

budgets = st.integers(0, 140)
examples = settings(max_examples=50, deadline=None)


def put(
    layers: list[LayerSpec], workers: list[WorkerSpec], previous: Placement | None = None, replicas: int = REPLICAS
) -> Placement:
    return place(layers, workers, term=3, epoch=7, previous=previous, replicas=replicas)


def put_or_none(
    layers: list[LayerSpec], workers: list[WorkerSpec], previous: Placement | None = None, replicas: int = REPLICAS
) -> Placement | None:
    try:
        return put(layers, workers, previous, replicas)
    except PlacementImpossible:
        return None


# --- The hard rules -----------------------------------------------------------------------------------------------


@examples
@given(layer_lists(), worker_lists(budgets), st.integers(1, 3))
def test_no_swarm_breaks_a_hard_rule(layers: list[LayerSpec], workers: list[WorkerSpec], replicas: int) -> None:
    placement = put_or_none(layers, workers, None, replicas)
    if placement is None:
        able = [worker.budget_bytes for worker in workers if worker.may_hold]
        needed = sum(spec.n_expert * spec.expert_bytes for spec in layers)
        assert needed > sum(able) - len(able) * max(spec.expert_bytes for spec in layers)
    else:
        assert broken_rules(placement, layers, workers, replicas, output_ranks(layers)) == []


@examples
@given(layer_lists(), st.lists(worker_lists(budgets), min_size=2, max_size=4), st.integers(1, 3))
def test_nor_does_a_swarm_that_changes(layers: list[LayerSpec], swarms: list[list[WorkerSpec]], replicas: int) -> None:
    """Everything may change at once: budgets, hosts, verdicts, who is there."""
    previous = None
    for workers in swarms:
        placement = put_or_none(layers, workers, previous, replicas)
        if placement is not None:
            assert broken_rules(placement, layers, workers, replicas, output_ranks(layers)) == []
        previous = placement or previous


@examples
@given(layer_lists(equal_sizes=True), st.lists(worker_lists(budgets), min_size=1, max_size=2))
def test_equal_experts_are_placed_whenever_they_fit_and_right_ones_used_first(
    layers: list[LayerSpec], swarms: list[list[WorkerSpec]]
) -> None:
    size, previous = layers[0].expert_bytes, None
    for workers in swarms:
        rooms = [(w.tier, w.budget_bytes // size) for w in workers if w.may_hold]
        placement = put_or_none(layers, workers, previous)
        assert (placement is not None) == (sum(n for _, n in rooms) >= sum(spec.n_expert for spec in layers))
        previous = placement or previous
        if placement is None:
            continue
        ranks = [spec for spec in layers if spec.layer in output_ranks(layers)]
        if sum(n for tier, n in rooms if tier == 0) >= sum(spec.n_expert for spec in ranks):
            tiers = {w.peer: w.tier for w in workers}
            assert {tiers[p] for spec in ranks for peers in placement.holders[spec.layer] for p in peers} == {0}


@examples
@given(layer_lists(), worker_lists(st.just(PLENTY)), st.integers(1, 3))
def test_with_memory_for_all_every_expert_has_all_its_copies(
    layers: list[LayerSpec], workers: list[WorkerSpec], replicas: int
) -> None:
    placement = put_or_none(layers, workers, None, replicas)
    able = [worker for worker in workers if worker.may_hold]
    assert (placement is None) == (not able)
    for spec in layers if placement is not None else ():
        best = min(w.tier for w in able) if spec.layer in output_ranks(layers) else 3
        hosts = {w.host or w.peer for w in able if w.tier <= best}
        assert placement is not None
        assert {len(peers) for peers in placement.holders[spec.layer]} == {min(replicas, len(hosts))}


def test_output_ranks_are_the_last_quarter_or_those_named() -> None:
    assert output_ranks(stack(30, 1)) == set(range(22, 30))
    assert output_ranks(stack(1, 1)) == {0}
    workers = [replace(worker, accumulates_f32=worker.peer == "w1") for worker in alike(3)]
    placement = put(stack(8, 4), workers)
    assert {len(placement.holders[layer][0]) for layer in range(6)} == {2}
    assert {placement.holders[layer] for layer in (6, 7)} == {(("w1",),) * 4}
    named = place(stack(8, 4), workers, term=1, epoch=1, output=[0])
    assert {layer for layer in range(8) if named.holders[layer] == (("w1",),) * 4} == {0}
    assert all(len(peers) == 2 for peers in named.holders[7])


def test_an_output_rank_moves_others_off_the_only_right_peer_rather_than_degrade() -> None:
    layers = stack(4, 4)
    right = WorkerSpec("right", 80)
    wrong = WorkerSpec("wrong", 120, accumulates_f32=False)
    both = put(layers, [right, WorkerSpec("other", 80)], replicas=1)
    assert any(both.held_by("right").get(layer) for layer in (0, 1, 2))
    after = put(layers, [right, wrong], both, replicas=1)
    assert after.held_by("right")[3] == (0, 1, 2, 3)
    full = WorkerSpec("right", 40)
    assert put(layers, [full, wrong], put(layers, [full, WorkerSpec("other", 120)], replicas=1)).held_by("right") == {
        3: (0, 1, 2, 3)
    }


def test_room_on_right_peers_is_kept_for_the_second_copies_of_output_ranks() -> None:
    right = alike(2, budget_bytes=6_000, rows_per_s=10_000)
    wrong = [WorkerSpec(peer, 20_000, accumulates_f32=False) for peer in ("x", "y")]
    holders = put(stack(4, 400), [*right, *wrong]).holders
    assert {frozenset(peers) for peers in holders[3]} == {frozenset(("w0", "w1"))}
    assert all(len(peers) == 2 for layer in range(3) for peers in holders[layer])


def test_without_a_right_peer_the_best_there_is_serves() -> None:
    workers = [
        replace(alike(1)[0], peer="f16", accumulates_f32=False),
        replace(alike(1)[0], peer="unfit", fitness="unfit"),
        replace(alike(1)[0], peer="both", fitness="unfit", accumulates_f32=False),
    ]
    assert put(stack(4, 2), workers).holders[3] == (("f16",), ("f16",))
    assert put(stack(4, 2), workers[1:]).holders[3] == (("unfit",), ("unfit",))
    assert put(stack(4, 2), workers[2:]).holders[3] == (("both",), ("both",))
    back = put(stack(4, 2), [*workers, *alike(1)], put(stack(4, 2), workers))
    assert back.holders[3] == (("w0",), ("w0",))


def test_one_copy_of_everything_comes_before_a_second_of_anything_and_the_popular_are_second() -> None:
    layers = [LayerSpec(i, 8, 10, (1, 1, 1, 1, 9, 9, 9, 9)) for i in range(4)]
    workers = alike(3, budget_bytes=160)  # room for one and a half copies
    holders = [peers for layer in put(layers, workers).holders.values() for peers in layer]
    assert Counter(map(len, holders)) == {1: 16, 2: 16}
    assert all(len(holders[i]) == 2 for i in range(32) if i % 8 >= 4)


def test_a_second_copy_gives_way_to_a_first() -> None:
    layers, room = stack(4, 4), 90
    before = put(layers, alike(4, budget_bytes=room))
    after = put(layers, alike(2, budget_bytes=room), before)
    assert all(len(peers) >= 1 for holders in after.holders.values() for peers in holders)
    assert broken_rules(after, layers, alike(2, budget_bytes=room), 2, output_ranks(layers)) == []

    left = [
        {peer for peer in peers if peer in ("w0", "w1")} for holders in before.holders.values() for peers in holders
    ]
    now = [set(peers) for holders in after.holders.values() for peers in holders]
    assert all(old & new for old, new in zip(left, now, strict=True) if old)  # but no more than that moves


def test_what_is_held_does_not_stand_in_the_way_of_a_large_expert() -> None:
    layers = [LayerSpec(0, 2, 3), LayerSpec(1, 1, 5)]
    scattered = Placement(1, 1, {0: (("w0",), ("w1",)), 1: ((),)})
    after = put(layers, alike(2, budget_bytes=6), scattered)
    assert [len(after.held_by(w).get(0, ())) for w in ("w0", "w1")] in ([2, 0], [0, 2])


def test_a_tight_fit_on_three_hosts_is_found() -> None:
    """Each host must hold two thirds of everything: dealt one after another, the last copies meet their own host."""
    for n in (3, 6, 9, 12):
        layers = stack(3, n)
        placement = put(layers, alike(3, budget_bytes=3 * n * 10 * 2 // 3))
        assert {len(peers) for holders in placement.holders.values() for peers in holders} == {2}


def test_what_is_missing_is_named() -> None:
    layers = stack(2, 5)
    shut = [WorkerSpec("q", PLENTY, fitness="quarantined"), WorkerSpec("d", PLENTY, draining=True)]
    with pytest.raises(PlacementImpossible, match=r"budgets of the 2 workers .* up to 93: 7 bytes are missing") as e:
        put(layers, [WorkerSpec("a", 50), WorkerSpec("b", 43), *shut])
    assert isinstance(e.value, NotReady)
    assert e.value.hint
    with pytest.raises(PlacementImpossible, match="10 bytes are missing: no budget has room for one more whole expert"):
        put(layers, [WorkerSpec("a", 55), WorkerSpec("b", 49)])
    with pytest.raises(PlacementImpossible, match=r"0 workers .* 100 bytes are missing"):
        put(layers, shut)


def test_nothing_to_place() -> None:
    assert put([], alike(2)).holders == put([], []).holders == {}


@pytest.mark.parametrize("replicas", [0, -1, REPLICAS_MAX + 1])
def test_replicas_have_bounds(replicas: int) -> None:
    with pytest.raises(ValueError, match="replicas"):
        put(stack(1, 1), alike(1), None, replicas)


@pytest.mark.parametrize(
    ("layer", "worker"),
    [
        (LayerSpec(0, 2, 1, (1.0,)), WorkerSpec("a", 9)),
        (LayerSpec(0, 2, 1, (1.0, float("nan"))), WorkerSpec("a", 9)),
        (LayerSpec(0, 2, 1, (1.0, -1.0)), WorkerSpec("a", 9)),
        (LayerSpec(0, 2, 1), WorkerSpec("a", 9, rtt_ms=float("nan"))),
        (LayerSpec(0, 2, 1), WorkerSpec("a", 9, rows_per_s=float("inf"))),
        (LayerSpec(0, 2, 1), WorkerSpec("a", 9, rows_per_s=-1.0)),
        (LayerSpec(0, 0, 1), WorkerSpec("a", 9)),
        (LayerSpec(0, 2, 1), WorkerSpec("a", -9)),
    ],
)
def test_nonsense_is_refused(layer: LayerSpec, worker: WorkerSpec) -> None:
    with pytest.raises(ValueError, match=r"popularity|finite|at least one"):
        put([layer], [worker])


def test_enormous_numbers_do_no_harm() -> None:
    workers = [replace(w, budget_bytes=1 << 80, rows_per_s=1e300, rtt_ms=1e300) for w in alike(3)]
    assert broken_rules(put(stack(4, 4, 1 << 40), workers), stack(4, 4, 1 << 40), workers, 2, frozenset({3})) == []


# --- The same every time ------------------------------------------------------------------------------------------


@examples
@given(layer_lists(), worker_lists(budgets), worker_lists(budgets), st.integers(0, 2**32))
def test_the_order_of_the_input_does_not_matter(
    layers: list[LayerSpec], workers: list[WorkerSpec], before: list[WorkerSpec], seed: int
) -> None:
    previous = put_or_none(layers, before)
    placement = put_or_none(layers, workers, previous)
    random = Random(seed)
    shuffled = put_or_none(
        random.sample(layers, len(layers)), random.sample(workers, len(workers)), put_or_none(layers, before[::-1])
    )
    assert shuffled == placement


@examples
@given(layer_lists(), worker_lists(budgets), worker_lists(budgets), st.integers(1, 3))
def test_placing_again_changes_nothing(
    layers: list[LayerSpec], workers: list[WorkerSpec], before: list[WorkerSpec], replicas: int
) -> None:
    placement = put_or_none(layers, workers, put_or_none(layers, before, None, replicas), replicas)
    if placement is not None:
        assert put(layers, workers, placement, replicas) == placement


# --- Little movement ----------------------------------------------------------------------------------------------


@examples
@given(layer_lists(), worker_lists(st.integers(20, 200)), st.integers(1, 3), st.data())
def test_those_that_leave_move_only_what_they_held(
    layers: list[LayerSpec], workers: list[WorkerSpec], replicas: int, data: st.DataObject
) -> None:
    before = put_or_none(layers, workers, None, replicas)
    gone = data.draw(st.sets(st.sampled_from([w.peer for w in workers]), max_size=2))
    drained = data.draw(st.booleans())  # one that drains is there, but holds nothing any more
    rest = [replace(w, draining=True) if w.peer in gone else w for w in workers if drained or w.peer not in gone]
    try:
        after = place(layers, rest, term=3, epoch=8, previous=before, newcomers=(), replicas=replicas)
    except PlacementImpossible:
        return
    if before is None:
        return
    left = [set(peers) - gone for holders in before.holders.values() for peers in holders]
    now = [set(peers) for holders in after.holders.values() for peers in holders]
    if all(left):  # else a copy may have given way to the first one of another expert
        assert all(old <= new for old, new in zip(left, now, strict=True))
        lost = sum(used_bytes(before, layers)[peer] for peer in gone)
        missing = sum(spec.expert_bytes for spec in layers for p in before.holders[spec.layer] if len(p) < replicas)
        assert sum(gains(before, after, layers).values()) <= lost + replicas * missing


@examples
@given(
    st.integers(1, 12),
    st.integers(1, 40),
    st.lists(st.sampled_from((900.0, 1_000.0, 1_400.0)), min_size=4, max_size=9),
    st.sampled_from(((0.3, 1.0), (20.0, 1.0), (20.0, 50.0))),
    st.integers(1, 2),
)
def test_one_that_joins_moves_no_more_than_its_share(
    n_layers: int, n_expert: int, rates: list[float], kind: tuple[float, float], replicas: int
) -> None:
    layers, (rtt_ms, factor) = stack(n_layers, n_expert), kind
    workers = [WorkerSpec(f"w{i}", PLENTY, rtt_ms=rtt_ms, rows_per_s=rate * factor) for i, rate in enumerate(rates)]
    before = put(layers, workers[1:], None, replicas)
    after = put(layers, workers, before, replicas)
    share = replicas * n_layers * n_expert * 10 * rates[0] / sum(rates)
    gained = gains(before, after, layers)
    assert set(gained) <= {"w0"}
    assert gained["w0"] <= 1.1 * share
    if share >= 20 * 10 * len(rates):
        assert gained["w0"] >= 0.7 * share


def test_a_newcomers_share_is_one_of_rows_where_some_experts_are_popular() -> None:
    layers = [LayerSpec(i, 8, 10, (40, 40, 1, 1, 1, 1, 1, 1)) for i in range(8)]
    share_of = [0.9 * p / 86 + 0.1 / 8 for p in layers[0].popularity or ()]
    after = put(layers, alike(5), put(layers, alike(5)[1:]))
    rows = sum(share_of[expert] for experts in after.held_by("w0").values() for expert in experts)
    assert 1.5 < rows <= 16 / 5


def test_a_newcomer_takes_no_output_rank_that_it_is_wrong_for_and_no_copy_that_its_host_has() -> None:
    layers, old = stack(8, 8), alike(3)
    before = put(layers, old)
    for newcomer in (
        WorkerSpec("new", PLENTY, accumulates_f32=False),
        WorkerSpec("new", PLENTY, fitness="unfit"),
        WorkerSpec("new", PLENTY, host="w1"),
    ):
        after = put(layers, [*old, newcomer], before)
        assert broken_rules(after, layers, [*old, newcomer], 2, output_ranks(layers)) == []
        assert experts_held(after, "new") > 10


def test_room_that_newcomers_make_is_used() -> None:
    full = alike(2, budget_bytes=100)
    twice, once = (("w0", "w1"),) * 4, (("w0",), ("w0",), ("w1",), ("w1",))
    before = Placement(1, 1, {0: twice, 1: once, 2: once, 3: once})
    newcomers = [WorkerSpec(peer, PLENTY, accumulates_f32=False, rows_per_s=9_000) for peer in ("x", "y")]
    after = put(stack(4, 4), [*full, *newcomers], before)
    assert {frozenset(peers) for peers in after.holders[3]} == {frozenset(("w0", "w1"))}


def test_only_newcomers_move_what_is_loaded_however_uneven_it_is() -> None:
    layers = stack(4, 8)
    uneven = Placement(1, 1, dict.fromkeys(range(4), (("w0", "w1"),) * 7 + (("w2", "w1"),)))
    assert put(layers, alike(3), uneven).holders == uneven.holders
    assert set(gains(uneven, put(layers, alike(4), uneven), layers)) == {"w3"}
    idle = place(layers, alike(4), term=1, epoch=2, previous=uneven, newcomers=())
    assert idle.holders == uneven.holders


def test_a_newcomer_with_memory_brings_the_second_copies() -> None:
    layers = stack(4, 8)
    small = alike(2, budget_bytes=170)
    before = put(layers, small)
    assert sum(len(peers) for h in before.holders.values() for peers in h) == 34
    after = put(layers, [*small, WorkerSpec("big", PLENTY)], before)
    assert {len(peers) for holders in after.holders.values() for peers in holders} == {2}
    assert set(gains(before, after, layers)) == {"big"}


# --- The soft aims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rtt_ms", "factor"), [(0.3, 1.0), (20.0, 1.0), (20.0, 50.0)])
@pytest.mark.parametrize("rates", [(1_000.0,) * 5, (1_000.0, 1_000.0, 2_000.0, 3_000.0, 500.0)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_load_follows_the_rate(rtt_ms: float, factor: float, rates: tuple[float, ...], replicas: int) -> None:
    workers = [WorkerSpec(f"w{i}", PLENTY, rtt_ms=rtt_ms, rows_per_s=factor * r) for i, r in enumerate(rates)]
    placement = put(stack(30, 16), workers, None, replicas)
    for worker, rate in zip(workers, rates, strict=True):
        share = 480 * replicas * rate / sum(rates)
        assert experts_held(placement, worker.peer) == pytest.approx(share, rel=0.1, abs=1)


def test_popular_experts_weigh_more() -> None:
    layers = [LayerSpec(i, 16, 10, (30,) + (1,) * 15) for i in range(12)]
    placement = put(layers, alike(4, rtt_ms=0.3), None, 1)
    share = [0.9 * p / 45 + 0.1 / 16 for p in layers[0].popularity or ()]
    rows = [sum(share[expert] for h in placement.held_by(w.peer).values() for expert in h) for w in alike(4)]
    assert max(rows) - min(rows) < 1.0  # of three layers' worth each: a popular expert is two thirds of one


@pytest.mark.parametrize(
    ("rtt_ms", "rows_per_s", "fan_out"), [(0.3, 1_000.0, (6, 6)), (20.0, 3_000.0, (2, 5)), (20.0, 100_000.0, (1, 1.5))]
)
def test_slow_links_keep_layers_whole(rtt_ms: float, rows_per_s: float, fan_out: tuple[float, float]) -> None:
    placement = put(stack(24, 16), alike(6, rtt_ms=rtt_ms, rows_per_s=rows_per_s))
    widths = [len({peers[0] for peers in holders}) for holders in placement.holders.values()]
    assert fan_out[0] <= sum(widths) / len(widths) <= fan_out[1]


def test_a_distant_worker_holds_second_copies_if_near_ones_hold_everything() -> None:
    workers = [WorkerSpec("near", PLENTY, rtt_ms=1), *(replace(w, rtt_ms=200) for w in alike(3))]
    placement = put(stack(12, 16), workers)
    assert {peers[0] for holders in placement.holders.values() for peers in holders} == {"near"}
    assert [experts_held(placement, w.peer) for w in alike(3)] == [64, 64, 64]
    joined = put(stack(12, 16), [*workers, WorkerSpec("near2", PLENTY, rtt_ms=1)], placement)
    assert 70 <= experts_held(joined, "near2") <= 96
    small = [replace(workers[0], budget_bytes=960), *workers[1:]]
    assert {peers[0] for h in put(stack(12, 16), small).holders.values() for peers in h} > {"near"}


def test_a_distant_newcomer_takes_second_copies_over() -> None:
    near = alike(2)
    before = put(stack(12, 16), near)
    after = put(stack(12, 16), [*near, WorkerSpec("far", PLENTY, rtt_ms=200)], before)
    assert experts_held(after, "far") > 100
    assert {peers[0] for holders in after.holders.values() for peers in holders} == {"w0", "w1"}


def test_copies_are_of_one_class_where_hosts_allow() -> None:
    workers = [replace(w, numeric_class=name) for w, name in zip(alike(6), "aabbbb", strict=True)]
    placement = put(stack(12, 16), workers)
    kinds = {w.peer: w.numeric_class for w in workers}
    mixed = [peers for h in placement.holders.values() for peers in h if len({kinds[p] for p in peers}) > 1]
    assert len(mixed) < 0.05 * 12 * 16


def test_a_layer_is_one_run_of_experts_on_each_of_its_first_holders() -> None:
    for holders in put(stack(8, 16), alike(4)).holders.values():
        firsts = [peers[0] for peers in holders]
        assert sum(a != b for a, b in pairwise(firsts)) == len(set(firsts)) - 1
