"""What the report says of a placement, against placements written out by hand and drawn ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, output_ranks
from scheduler.placement_report import bytes_to_load, describe, runs, without
from scheduler.placing import place
from tests.placing_swarms import PLENTY, alike, gains, layer_lists, stack, used_bytes, worker_lists

LAYERS = stack(4, 3)
NEAR = [WorkerSpec(peer, PLENTY, numeric_class="k") for peer in "abc"]


def by_hand(*layers: str) -> Placement:
    """Layers like "ab ab a": each expert's holders."""
    return Placement(1, 2, {i: tuple(tuple(peers) for peers in layer.split()) for i, layer in enumerate(layers)})


FULL = by_hand("ab bc ca", "ab bc ca", "ab bc ca", "ab bc ca")


def test_a_full_placement_has_nothing_to_complain_of() -> None:
    report = describe(FULL, LAYERS, NEAR)
    assert (report.coverage.min_copies, report.coverage.missing, report.copies) == (2, (), {2: 12})
    assert report.degraded == report.single_points == ()
    assert report.mixed == 0
    assert [(p.peer, p.experts, p.nbytes, p.budget_bytes, p.why_no_output) for p in report.peers] == [
        (peer, 8, 80, PLENTY, "") for peer in "abc"
    ]
    assert report.peers[0].held == dict.fromkeys(range(4), (0, 2))
    assert 4 < report.token_ms < 1_000


def test_single_points_of_failure_are_sentences() -> None:
    placement = by_hand("ab ab ab", "a a b", "ab c ab", "ab ab ab")
    report = describe(placement, LAYERS, NEAR, names={"a": "attic"})
    assert report.single_points == (
        "experts 0-1 of layer 1 have one copy, on attic",
        "expert 2 of layer 1 has one copy, on b",
        "expert 1 of layer 2 has one copy, on c",
    )
    assert report.degraded == (
        "4 of 12 experts have fewer than 2 copies: memory on machines that are right for them is short",
    )
    assert report.copies == {1: 4, 2: 8}
    one_host = [replace(worker, host="h") for worker in NEAR]
    assert describe(placement, LAYERS, one_host).degraded == (
        "4 of 12 experts have fewer than 2 copies: workers are on 1 machine",
        "all 3 workers are on one machine: an expert's copies are lost together with it",
    )


def test_holders_that_are_gone_or_barred_are_no_copies() -> None:
    report = describe(FULL, LAYERS, [NEAR[0], replace(NEAR[1], draining=True)])
    assert report.coverage.min_copies == 0
    assert report.coverage.missing == tuple((layer, 1) for layer in range(4))
    assert report.copies == {0: 4, 1: 8}
    assert len(report.single_points) == 4
    assert describe(FULL, stack(5, 3), NEAR).coverage.missing == ((4, 0), (4, 1), (4, 2))
    assert describe(FULL, stack(4, 2), NEAR).coverage.min_copies == 0  # of another model


def test_output_ranks_on_wrong_peers_are_named_with_the_reason() -> None:
    workers = [
        replace(NEAR[0], accumulates_f32=False),
        replace(NEAR[1], fitness="unfit"),
        replace(NEAR[2], fitness="unfit", accumulates_f32=False),
    ]
    assert describe(by_hand("ab", "ab", "ab", "abc"), stack(4, 1), workers).degraded == (
        "output rank 3: expert 0 of layer 3 is on a, which was not seen to accumulate in F32, even when asked; no"
        " fit worker that does has the room",
        "output rank 3: expert 0 of layer 3 is on b, which is unfit: its numbers are out of tolerance; no fit worker"
        " that does has the room",
        "output rank 3: expert 0 of layer 3 is on c, which is unfit and was not seen to accumulate in F32, even when"
        " asked; no fit worker that does has the room",
    )
    assert describe(by_hand("ab", "ab", "ab", "abc"), stack(4, 1), workers, output=()).degraded == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fitness": "quarantined"}, "it is quarantined and holds nothing"),
        ({"draining": True}, "it is draining and holds nothing"),
        ({"accumulates_f32": False}, "it was not seen to accumulate in F32, even when asked"),
        ({"fitness": "unfit"}, "it is unfit: its numbers are out of tolerance"),
        ({"budget_bytes": 9}, "its budget of 9 bytes has no room for one of their experts (10 bytes)"),
        ({"budget_bytes": 15}, "its memory is full of other layers"),
        ({}, "others hold them: by its speed and distance its share is elsewhere"),
    ],
)
def test_why_a_peer_has_no_output_rank(change: dict[str, object], why: str) -> None:
    workers = [*NEAR[:2], replace(NEAR[2], **change)]  # type: ignore[arg-type]
    report = describe(by_hand("abc", "ab", "ab", "ab"), stack(4, 1), workers)
    assert [share.why_no_output for share in report.peers] == ["", "", why]


def test_mixed_classes_are_counted() -> None:
    kinds = ("k", "l", None)
    workers = [replace(worker, numeric_class=kind) for worker, kind in zip(NEAR, kinds, strict=True)]
    assert describe(by_hand("ab", "c", "ca", "aa"), stack(4, 1), workers).mixed == 2


def test_what_a_loss_costs() -> None:
    placement = by_hand("ab ab a", "ab b bc", "ca ca ca", "abc ab ab")
    loss = without(placement, LAYERS, NEAR, "a")
    assert loss.no_copy == {0: (2,)}
    assert loss.one_copy == {0: (0, 1), 1: (0,), 2: (0, 1, 2), 3: (1, 2)}
    assert (loss.bytes_to_move, loss.impossible) == (2 * 10 + 10 * 8 + 10, "")  # also what had one copy before
    assert loss.token_ms_after is not None
    assert loss.slowdown == loss.token_ms_after / loss.token_ms_before
    assert without(placement, LAYERS, NEAR, "nobody").one_copy == {}


def test_a_loss_that_cannot_be_made_good_says_what_is_missing() -> None:
    loss = without(FULL, LAYERS, [replace(worker, budget_bytes=100) for worker in NEAR[:2]] + NEAR[2:], "c")
    assert (loss.bytes_to_move, loss.impossible) == (40, "")  # as far as memory allows
    loss = without(FULL, LAYERS, [replace(worker, budget_bytes=50) for worker in NEAR], "c")
    assert (loss.bytes_to_move, loss.token_ms_after, loss.slowdown) == (None, None, None)
    assert "20 bytes are missing" in loss.impossible


def test_fewer_workers_are_slower() -> None:
    workers = alike(4, rtt_ms=0.3, rows_per_s=500.0)
    placement = place(stack(12, 16), workers, term=1, epoch=1)
    loss = without(placement, stack(12, 16), workers, "w0")
    assert loss.slowdown is not None
    assert 1.2 < loss.slowdown < 1.4


@settings(max_examples=60, deadline=None)
@given(layer_lists(), worker_lists(st.integers(20, 200)), worker_lists(st.integers(20, 200)))
def test_the_report_agrees_with_the_placement(
    layers: list[LayerSpec], before: list[WorkerSpec], workers: list[WorkerSpec]
) -> None:
    try:
        old, new = (place(layers, some, term=1, epoch=1) for some in (before, workers))
    except PlacementImpossible:
        return
    report = describe(new, layers, workers)
    used = used_bytes(new, layers)
    assert {share.peer: share.nbytes for share in report.peers if share.nbytes} == used
    assert all(share.held == new.held_by(share.peer) for share in report.peers)
    assert all(bool(share.why_no_output) != bool(share.held.keys() & output_ranks(layers)) for share in report.peers)
    assert report.coverage.missing == ()
    assert report.coverage.min_copies == min(len(p) for holders in new.holders.values() for p in holders)
    assert (report.coverage.min_copies == 1) == bool(report.single_points)
    assert bytes_to_load(old, new, layers) == gains(old, new, layers)
    assert bytes_to_load(None, new, layers) == used


def test_runs_of_numbers() -> None:
    assert runs([]) == ""
    assert runs([3]) == "3"
    assert runs([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
