"""Answers on their way to the judge: what of them is kept, what is dropped, and who used them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from capabilities.errors import SwarmError
from capabilities.verdict import Evidence
from scheduler.audit_choice import SOME_ROWS
from scheduler.audit_queue import WAITING_OF_A_PEER_MAX
from scheduler.audit_tests import Change
from scheduler.audits import Audits
from scheduler.combine import weighted_sums
from scheduler.dispatch import PeerRows
from swarmnode.leader.audit_evidence import KeptEvidence
from swarmnode.leader.audit_tap import SHOWN_BYTES_MAX, AuditTap
from swarmnode.leader.recomputing import Sample
from tests.memory_swarm import MODEL, rows_of

LAYER = MODEL.manifest.layers[0]
TOKENS, CHOICES = 40, 2


def made(tap: AuditTap, peer: str = "a", tokens: int = TOKENS, weights: bool = False) -> None:
    """An answer that is right to the last bit, to every second token of a larger batch."""
    random = np.random.default_rng(tokens)
    x = random.standard_normal((2 * tokens, LAYER.n_in), np.float32)
    of_token = np.repeat(np.arange(tokens, dtype=np.int32), CHOICES)
    experts = random.integers(0, LAYER.n_expert, len(of_token)).astype(np.int32)
    part = PeerRows(peer, np.arange(0, 2 * tokens, 2, dtype=np.int32), of_token, experts, np.arange(len(of_token)))
    answer = rows_of(LAYER.layer, x[part.rows], of_token, experts, LAYER.n_out)
    by = random.random(len(of_token), np.float32) if weights else None
    if by is not None:
        answer = weighted_sums(answer, by, of_token)
    tap.answered(peer, LAYER, x, part, by, answer, rounded=False, ask_f32=True)


def taken(tap: AuditTap) -> Iterator[Sample]:
    while (waiting := tap.take()) is not None:
        yield waiting[1]


@pytest.fixture
def tap() -> AuditTap:
    tap = AuditTap(Audits(bytes(32)), lambda: None)
    tap.open = True
    return tap


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, TOKENS])
def test_what_is_kept_can_be_computed_again(tap: AuditTap, tokens: int, weights: bool) -> None:
    made(tap, tokens=tokens, weights=weights)
    (sample,) = taken(tap)
    rows = rows_of(LAYER.layer, sample.sent(), sample.tokens, sample.experts, LAYER.n_out)
    again = rows if sample.weights is None else weighted_sums(rows, sample.weights, sample.tokens)
    assert np.array_equal(again, sample.answer)
    assert len(sample.experts) == min(CHOICES * tokens, SOME_ROWS)
    assert sorted(set(sample.units.tolist())) == list(range(len(sample.answer)))


def test_what_finds_no_room_is_dropped_and_counted(tap: AuditTap) -> None:
    for _ in range(WAITING_OF_A_PEER_MAX + 5):
        made(tap, tokens=2)
    made(tap, "b", tokens=2)
    tap.look()
    assert tap.audits.counts("a").dropped == 5
    assert tap.audits.counts("b").dropped == 0  # another peer's are not crowded out
    assert len(list(taken(tap))) == WAITING_OF_A_PEER_MAX + 1
    made(tap, tokens=2)
    assert len(list(taken(tap))) == 1


def test_who_judges_is_woken_once_after_falling_asleep() -> None:
    calls: list[int] = []
    tap = AuditTap(Audits(bytes(32)), lambda: calls.append(1))
    tap.open = True
    made(tap)
    assert not tap.sleep()  # something was shown
    tap.look()
    assert not tap.sleep()  # something waits
    assert len(list(taken(tap))) == 1
    assert tap.sleep()
    assert calls == []
    for _ in range(3):
        made(tap)
    assert calls == [1]


def test_what_is_shown_and_not_looked_at_is_bounded(tap: AuditTap) -> None:
    for _ in range(2 * SHOWN_BYTES_MAX // (8 * TOKENS * LAYER.n_in) + 1):
        made(tap)
        assert tap._shown_bytes < SHOWN_BYTES_MAX
    assert tap.audits.number("a") > 0


def test_nothing_is_chosen_before_anybody_looks(tap: AuditTap) -> None:
    tap.open = False
    made(tap)
    assert list(taken(tap)) == []


def test_who_used_a_peer_since_when_is_remembered(tap: AuditTap) -> None:
    for requests in (("one",), ("one", "two"), ("three",)):
        tap.begin_step(requests)
        made(tap, tokens=1)
    tap.begin_step(("four",))
    made(tap, "b", tokens=1)
    assert sorted(tap.used_since("a", 0)) == ["one", "three", "two"]
    assert sorted(tap.used_since("a", 1)) == ["one", "three", "two"]
    assert tap.used_since("a", 2) == ["three"]
    assert tap.used_since("a", 3) == []
    assert tap.used_since("b", 0) == ["four"]


def test_what_is_known_later_is_added_to_the_newest_of_pieces_that_are_alike() -> None:
    kept = KeptEvidence()
    pieces = [kept.add("a", Evidence("audit", "wrong", at_s=7)) for _ in range(2)]
    kept.amend("a", pieces[1], "again")
    assert [each.text for each in kept.of("a")] == ["wrong", "wrong; again"]
    kept.amend("a", Evidence("audit", "another"), "again")
    kept.amend("b", pieces[0], "again")
    assert ([len(kept.of(peer)) for peer in "ab"], kept.of("a")[0].text) == ([2, 0], "wrong")


def test_who_was_refused_too_often_is_told_once_and_wakes(tap: AuditTap) -> None:
    error = SwarmError("not finite")
    for _ in range(8):
        tap.refused("a", error)
    assert tap.convicted() is None
    assert tap.sleep()
    tap.refused("a", error)
    assert not tap.sleep()
    tap.refused("a", error)
    assert tap.convicted() == ("a", (Change.QUARANTINED,), error)
    assert tap.convicted() is None
