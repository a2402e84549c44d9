"""The record that a leader leaves: whole and back, small, and no other bytes are taken for one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.agreement import Agreement
from capabilities.errors import PeerMistake
from capabilities.packing import pack
from scheduler.audit_tests import PeerAudits
from scheduler.placement import Placement
from scheduler.placement_record import PlacementRecord

PEERS = ["12D3KooWa", "12D3KooWb", "12D3KooWc"]
held_by = st.lists(st.sampled_from(PEERS), min_size=1, max_size=3, unique=True).map(tuple)
layers = st.dictionaries(
    st.integers(0, 60), st.lists(held_by, min_size=1, max_size=5).map(tuple), min_size=1, max_size=3
)
numbers = st.floats(0, 1)
verdicts = st.builds(Agreement, st.booleans(), numbers, numbers, numbers, numbers)
counts, scores = st.integers(0, 2**32 - 1), st.floats(0, 1e3)
audited = st.builds(
    PeerAudits, counts, counts, counts, scores, scores, st.booleans(), st.integers(0, 2**16 - 1), st.booleans(), counts
)


def record(holders: dict[int, tuple[tuple[str, ...], ...]], **proven: Agreement) -> PlacementRecord:
    return PlacementRecord("0f" * 32, Placement(3, 7, holders), {f"12D3KooW{name}": a for name, a in proven.items()})


EXAMPLE = record({0: (("12D3KooWa", "12D3KooWb"), ("12D3KooWb",))}, a=Agreement(True, 0.0, 0.0, 0.0, 1.0))


@settings(max_examples=100)
@given(layers, st.dictionaries(st.sampled_from("abc"), verdicts))
def test_it_comes_back_whole(holders: dict[int, tuple[tuple[str, ...], ...]], proven: dict[str, Agreement]) -> None:
    whole = record(holders, **proven)
    back = PlacementRecord.from_bytes(whole.to_bytes())
    assert (back.manifest, back.placement) == (whole.manifest, whole.placement)
    there = {peer: verdict for peer, verdict in whole.proven.items() if peer in whole.placement.peers()}
    assert back.proven == there
    assert back.name == (3, 7)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([*PEERS, "12D3KooWgone"]), audited))
def test_so_do_the_audits_of_those_too_that_hold_nothing(audits: dict[str, PeerAudits]) -> None:
    whole = dataclasses.replace(EXAMPLE, audits=audits)
    assert PlacementRecord.from_bytes(whole.to_bytes()).audits == audits


def test_a_score_that_is_none_is_refused() -> None:
    for score in (float("nan"), float("inf"), -1.0):
        bad = dataclasses.replace(EXAMPLE, audits={"12D3KooWa": PeerAudits(wrong_score=score)}).to_bytes()
        with pytest.raises(PeerMistake, match="score"):
            PlacementRecord.from_bytes(bad)


def test_a_large_one_is_small_enough_to_be_told_often() -> None:
    peers = [f"12D3KooW{i:044d}".replace("0", "1") for i in range(40)]
    holders = {layer: tuple((peers[e % 40], peers[(e + 7) % 40]) for e in range(256)) for layer in range(48)}
    assert len(record(holders).to_bytes()) < 64 << 10


def test_other_bytes_are_refused() -> None:
    good = dataclasses.replace(EXAMPLE, audits={"12D3KooWa": PeerAudits(3)}).to_bytes()
    wrong: list[object] = [b"", good[:-1], good + b"x", good[:40] + b"\xff" + good[41:], "text", None, pack((1, 2))]
    for field in range(10):
        for bad in (b"", b"\xff" * 5, 2**62, ()):
            values = list(_fields(good))
            if values[field] != bad:
                values[field] = bad
                wrong.append(pack(tuple(values)))  # type: ignore[arg-type]
    for data in wrong:
        try:
            taken = PlacementRecord.from_bytes(data)
        except PeerMistake:
            continue
        assert taken.to_bytes() == data  # another term, epoch or no verdicts: a record all the same
        assert taken.placement.peers() in ((), EXAMPLE.placement.peers())


def _fields(data: bytes) -> tuple[object, ...]:
    import msgpack

    fields: tuple[object, ...] = msgpack.unpackb(data, use_list=False)
    return fields


def test_a_verdict_of_nobody_is_refused() -> None:
    values = list(_fields(EXAMPLE.to_bytes()))
    values[7] = b"\x09\x00" + bytes(33)
    with pytest.raises(PeerMistake, match="placement record"):
        PlacementRecord.from_bytes(pack(tuple(values)))  # type: ignore[arg-type]


def test_the_newest_is_the_greatest() -> None:
    older = dataclasses.replace(EXAMPLE, placement=Placement(2, 99, {}))
    assert older.name < EXAMPLE.name
