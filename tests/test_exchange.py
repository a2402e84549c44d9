"""A layer under way: in any order of answers, failures, delays and hedges the output is what it would have been."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable
from scheduler.combine import add_partials, weighted_sums
from scheduler.dispatch import LayerRouting, PeerRows, gather, plan
from scheduler.exchange import Asked, Exchange
from scheduler.layer_cost import PeerSpeed

N_OUT = 3
F32 = NDArray[np.float32]
SAME = dict.fromkeys("abcd", "one class")


def row(expert: int, token: int, peer: str, classes: Mapping[str, str]) -> F32:
    """What a peer answers: its numeric class, or its own arithmetic if that is not known, is in the bits."""
    kind = sum(map(ord, classes.get(peer, peer)))
    return np.array([expert + token / 3, token / (expert + 1), kind], dtype=np.float32)


def values_of(asked: Asked, classes: Mapping[str, str]) -> F32:
    part = asked.part
    tokens = part.rows[part.tokens]
    pairs = zip(part.experts.tolist(), tokens.tolist(), strict=True)
    rows = np.array([row(e, t, part.peer, classes) for e, t in pairs], np.float32)
    return rows if asked.weights is None else weighted_sums(rows, asked.weights, part.tokens)


def exchange_of(
    holders: list[str],
    ids: list[list[int]],
    *,
    classes: Mapping[str, str] = SAME,
    weights: F32 | None = None,
    fallback: str | None = None,
    away: str = "",
) -> tuple[Exchange, Asked]:
    """An exchange of one chunk, and the first peer that is asked."""
    speeds = {peer: PeerSpeed(0.001, 1_000.0, numeric_class=kind) for peer, kind in classes.items()}
    routing = LayerRouting(5, holders, away, speeds=speeds, shares_load=False, fallback=fallback)
    split = plan(np.array(ids, np.int32), routing)
    exchange = Exchange(5, N_OUT, routing, classes, [split], None if weights is None else [weights])
    return exchange, exchange.asked()[0]


def failure(peer: str) -> ExpertsUnavailable:
    return ExpertsUnavailable(f"{peer} failed", peer=peer, cause="disconnected")


def names(asked: list[Asked]) -> list[str]:
    return [each.part.peer for each in asked]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_order_of_answers_failures_and_hedges_gives_the_same_output(data: st.DataObject) -> None:
    n_expert = data.draw(st.integers(1, 6))
    sets = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    holders = data.draw(st.lists(sets, min_size=n_expert, max_size=n_expert))
    n_tokens, n_used = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    flat = data.draw(st.lists(st.integers(0, n_expert - 1), min_size=n_tokens * n_used, max_size=n_tokens * n_used))
    ids = np.array(flat, dtype=np.int32).reshape(n_tokens, n_used)
    classes = data.draw(st.sampled_from((SAME, {}, {**dict.fromkeys("ab", "x"), **dict.fromkeys("cd", "y")})))
    by_sums = data.draw(st.booleans())
    weights = np.linspace(0.1, 0.9, ids.size, dtype=np.float32)
    speeds = {peer: PeerSpeed(0.001, 1_000.0, numeric_class=kind) for peer, kind in classes.items()}
    routing = LayerRouting(5, holders, speeds=speeds, shares_load=False, fallback="own")
    split = plan(ids, routing)
    exchange = Exchange(5, N_OUT, routing, classes, [split], [weights] if by_sums else None)
    waiting, dead, now, hedged = exchange.asked(), set[str](), 0.0, 0
    for each in waiting:
        each.hedge_at = 1.0
    while not exchange.complete:
        asked = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        peer = asked.part.peer
        what = data.draw(st.sampled_from(("answer", "answer", "fail", "slow")))
        if peer in dead or (what == "fail" and peer != "own"):
            dead.add(peer)
            others = exchange.failed(asked, failure(peer))
            assert not set(names(others)) & dead
            waiting += others
        elif what == "slow":
            now = 1.0
            more = exchange.hedge(now)
            hedged += len({each.share.part.peer for each in more})
            for each in more:
                assert each.part.peer not in {other.part.peer for other in each.share.asked}
                assert classes[each.part.peer] == classes[each.share.part.peer]
            waiting += [*more, asked]
        else:
            exchange.answered(asked, values_of(asked, classes))
    assert hedged <= len(split.parts)
    replies = {share.part.peer: share.values for share in exchange.shares}
    for share in exchange.shares:
        planned = values_of(Asked(share, share.part, share.weights), classes)
        assert share.values is not None
        if not exchange.mixed:
            assert share.values.tobytes() == planned.tobytes()
        elif share.weights is None:
            assert share.values[:, :2].tobytes() == planned[:, :2].tobytes()  # the same but for the class
    if not by_sums and not exchange.mixed:
        out = np.full((n_tokens, n_used, N_OUT), np.nan, np.float32)
        gather(split, replies, out)  # type: ignore[arg-type]
        for (t, k), peer in zip(itertools.product(range(n_tokens), range(n_used)), holders_of(split, ids), strict=True):
            assert out[t, k].tobytes() == row(int(ids[t, k]), t, peer, classes).tobytes()
    elif not exchange.mixed:
        add_partials(split, replies, N_OUT)  # type: ignore[arg-type]


def holders_of(split: object, ids: NDArray[np.int32]) -> list[str]:
    """The planned peer of each slot."""
    parts: tuple[PeerRows, ...] = split.parts  # type: ignore[attr-defined]
    by_slot = {slot: part.peer for part in parts for slot in part.slots.tolist()}
    return [by_slot[slot] for slot in range(ids.size)]


def test_a_failed_peer_is_replaced_by_the_next_holder_and_at_last_by_the_own_copy() -> None:
    exchange, a = exchange_of(["ab", "ab"], [[0, 1]], fallback="own")
    (b,) = exchange.failed(a, failure("a"))
    (own,) = exchange.failed(b, failure("b"))
    assert (names([a, b, own]), own.part.slots.tolist()) == (["a", "b", "own"], [0, 1])
    exchange.answered(own, values_of(own, SAME))
    assert exchange.complete
    assert exchange.mixed  # nobody said that the own copy is of their class


def test_when_nobody_is_left_the_first_failure_is_the_error() -> None:
    exchange, a = exchange_of(["ab"], [[0]])
    (b,) = exchange.failed(a, failure("a"))
    with pytest.raises(ExpertsUnavailable, match="a failed"):
        exchange.failed(b, failure("b"))


def test_a_hedge_counts_only_when_it_has_everything() -> None:
    exchange, a = exchange_of(["ab", "ac"], [[0, 1]])
    a.hedge_at = 2.0
    assert exchange.hedge(1.9) == []
    b, c = exchange.hedge(2.0)
    assert (names([b, c]), b.part.slots.tolist(), c.part.slots.tolist()) == (["b", "c"], [0], [1])
    assert exchange.hedge(3.0) == []  # once
    exchange.answered(b, values_of(b, SAME))
    assert not exchange.complete
    right = values_of(a, SAME)
    exchange.answered(a, right)
    assert exchange.complete
    assert exchange.shares[0].values is right
    exchange.answered(c, values_of(c, SAME) + 1)  # too late to matter
    assert exchange.shares[0].values is right


def test_a_hedge_takes_over_from_a_peer_that_fails_then() -> None:
    exchange, a = exchange_of(["ab"], [[0]])
    a.hedge_at = 0.0
    (b,) = exchange.hedge(0.0)
    assert exchange.failed(a, failure("a")) == []
    exchange.answered(b, values_of(b, SAME))
    assert exchange.complete
    assert not exchange.mixed


def test_a_hedge_that_fails_leaves_the_slow_peer_to_answer() -> None:
    exchange, a = exchange_of(["abc", "abc"], [[0, 1]])
    a.hedge_at = 0.0
    (b,) = exchange.hedge(0.0)
    assert exchange.failed(b, failure("b")) == []
    (c,) = exchange.failed(a, failure("a"))
    assert names([b, c]) == ["b", "c"]


@pytest.mark.parametrize("classes", [{}, {"a": "x", "b": "y"}, {"b": "x"}])
def test_only_one_class_is_hedged_within(classes: dict[str, str]) -> None:
    exchange, a = exchange_of(["ab"], [[0]], classes=classes, fallback="own")
    a.hedge_at = 0.0
    assert exchange.hedge(1.0) == []
    (b,) = exchange.failed(a, failure("a"))
    exchange.answered(b, values_of(b, classes))
    assert exchange.mixed


def test_who_stands_in_from_the_start_counts_too() -> None:
    other = {"a": "x", "b": "y"}
    assert exchange_of(["ab"], [[0]], classes=other, away="a")[0].mixed
    assert not exchange_of(["ab"], [[0]], classes=other)[0].mixed
    assert not exchange_of(["ab"], [[0]], away="a")[0].mixed


def test_a_whole_group_is_taken_over_as_a_sum_and_parts_of_it_row_by_row() -> None:
    weights = np.array([0.3, 0.7], np.float32)
    for holders, rows in ((["ab", "ab"], False), (["ab", "ac"], True)):
        exchange, a = exchange_of(holders, [[0, 1]], weights=weights)
        others = exchange.failed(a, failure("a"))
        assert all((each.weights is None) == rows for each in others)
        for each in others:
            exchange.answered(each, values_of(each, SAME))
        assert exchange.complete
        value = exchange.shares[0].values
        assert value is not None
        assert value.tobytes() == values_of(a, SAME).tobytes()


def test_nonsense_is_a_failure_and_is_named() -> None:
    exchange, a = exchange_of(["ab", "ab"], [[0, 1]])
    for wrong in (np.zeros((1, N_OUT), np.float32), np.full((2, N_OUT), np.nan, np.float32)):
        fault = exchange.fault(a, wrong)
        assert fault is not None
        assert (fault.details["peer"], fault.details["experts"], fault.details["cause"]) == ("a", [0, 1], "bad_reply")
    assert exchange.fault(a, values_of(a, SAME)) is None


def test_the_next_instant_is_the_first_that_matters() -> None:
    exchange, a = exchange_of(["ab"], [[0]])
    a.overdue_at, a.hedge_at = 5.0, 2.0
    assert exchange.next_instant() == 2.0
    assert exchange.overdue(4.9) == []
    assert names(exchange.hedge(2.0)) == ["b"]
    assert exchange.next_instant() == 5.0
    assert names(exchange.overdue(5.0)) == ["a"]
