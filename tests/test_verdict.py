"""capabilities/verdict.py: one form of bytes, within bounds, whatever comes from outside; the board in memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import PeerMistake
from capabilities.packing import INTEGER_MAX, PEER_ID_CHARS_MAX, pack
from capabilities.verdict import (
    EVIDENCE_MAX,
    TEXT_BYTES_MAX,
    TYPE_CHARS_MAX,
    VERDICT_BYTES_MAX,
    Evidence,
    MemoryBoard,
    Verdict,
)

PEER = "12D3KooWPeer"
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
EVIDENCE = st.builds(
    Evidence,
    kind=st.sampled_from(["audit", "probe", "service", "class", "release"]),
    text=st.text(max_size=300),
    layer=st.integers(-5, 70_000),
    expert=st.integers(-5, 70_000),
    weight_type=st.text("abcq4_0K", max_size=20),
    median_relative_l2=FLOATS,
    extreme_relative_l2=FLOATS,
    limit=FLOATS,
    count=st.integers(-1, 2**70),
    at_s=st.integers(-1, 2**70),
)


def verdict(**changes: object) -> Verdict:
    fields = {
        "subject": PEER,
        "fitness": "quarantined",
        "evidence": (Evidence("audit", "rows of another function", 3, 7, "q4_K", 0.5, 0.9, 0.02, 2, 1_700_000_000),),
        "audits_agreed": 11,
        "audits_differed": 3,
        "term": 4,
        "sequence": 9,
        "released": 1,
    }
    return Verdict(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.lists(EVIDENCE, max_size=EVIDENCE_MAX))
def test_what_is_bounded_has_one_form(evidence: list[Evidence]) -> None:
    given_ = verdict(evidence=tuple(each.bounded() for each in evidence))
    data = given_.to_bytes()
    assert Verdict.from_bytes(data) == given_
    assert len(data) <= VERDICT_BYTES_MAX


def test_the_largest_fits() -> None:
    worst = Evidence("release", "x" * TEXT_BYTES_MAX, 9, 9, "t" * TYPE_CHARS_MAX, 1, 1, 1, INTEGER_MAX, INTEGER_MAX)
    full = verdict(subject="1" * PEER_ID_CHARS_MAX, evidence=(worst,) * EVIDENCE_MAX, sequence=INTEGER_MAX)
    assert len(full.to_bytes()) <= VERDICT_BYTES_MAX
    assert Verdict.from_bytes(full.to_bytes()) == full


@given(st.binary(max_size=200))
def test_bytes_of_strangers_are_mistakes(data: bytes) -> None:
    with pytest.raises(PeerMistake):
        Verdict.from_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"fitness": "wonderful"},
        {"subject": "not base58: 0OIl"},
        {"term": -1},
        {"evidence": (Evidence("audit", "x"),) * (EVIDENCE_MAX + 1)},
        {"evidence": (Evidence("hearsay", "x"),)},  # type: ignore[arg-type]
        {"evidence": (Evidence("audit", "x" * (TEXT_BYTES_MAX + 1)),)},
        {"evidence": (Evidence("audit", "two\nlines"),)},
        {"evidence": (Evidence("audit", "x", limit=math.nan),)},
        {"evidence": (Evidence("audit", "x", limit=math.inf),)},
        {"evidence": (Evidence("audit", "x", median_relative_l2=-1.0),)},
    ],
)
def test_what_is_out_of_bounds_is_a_mistake(changes: dict[str, object]) -> None:
    with pytest.raises(PeerMistake):
        Verdict.from_bytes(verdict(**changes).to_bytes())


def test_an_oversized_one_is_not_even_read() -> None:
    with pytest.raises(PeerMistake, match="bytes"):
        Verdict.from_bytes(pack((1, "x" * VERDICT_BYTES_MAX)))


def test_a_board_in_memory_keeps_the_newest_until_it_is_released() -> None:
    board, told = MemoryBoard(), []
    with board.on_change(told.append):
        assert board.verdict_of(PEER) is None
        board.publish(PEER, "fit", [], 10, 0)
        board.publish(PEER, "quarantined", [Evidence("audit", str(n)) for n in range(12)], 10, 2)
        found = board.verdict_of(PEER)
        assert found is not None
        assert (found.fitness, found.audits_agreed, found.audits_differed) == ("quarantined", 10, 2)
        assert [each.text for each in found.evidence] == [str(n) for n in range(4, 12)]
        assert board.release(PEER) == board.released(PEER) == 1
        assert board.verdict_of(PEER) is None
    board.publish(PEER, "fit", [], 10, 0)  # which nobody hears of any more
    assert told == [PEER] * 3
