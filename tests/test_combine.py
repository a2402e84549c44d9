"""Partial sums: which rows are added in which order, and that nothing else has a say in a token's bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler.combine import F32, add_partials, sum_rows, weighted_sums
from scheduler.dispatch import LayerRouting, Plan, check_reply, plan

N_EXPERT, N_USED, N_OUT = 16, 6, 33
HOLDERS = [("abc"[e % 3],) for e in range(N_EXPERT)]


class Layer:
    """Some tokens' choice, weights and every expert's row for them."""

    def __init__(self, n_tokens: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        chosen = [random.choice(N_EXPERT, N_USED, replace=False) for _ in range(n_tokens)]
        self.ids = np.array(chosen, np.int32).reshape(n_tokens, N_USED)
        self.weights = random.random((n_tokens, N_USED), np.float32)
        self.rows = random.standard_normal((n_tokens, N_USED, N_OUT), np.float32)

    def partials(self, split: Plan) -> dict[str, F32]:
        """What each peer answers: it sees its own rows and nothing else."""
        y, w = self.rows.reshape(-1, N_OUT), self.weights.reshape(-1)
        return {part.peer: weighted_sums(y[part.slots], w[part.slots], part.tokens) for part in split.parts}

    def totals(self) -> F32:
        split = plan(self.ids, LayerRouting(0, HOLDERS))
        return add_partials(split, self.partials(split), N_OUT)


def by_hand(y: F32, weights: F32) -> F32:
    """((w1 * y1) + w2 * y2) + ..., one number at a time."""
    out = np.empty(y.shape[1], np.float32)
    for column in range(y.shape[1]):
        total = np.float32(weights[0] * y[0, column])
        for row in range(1, len(y)):
            total = np.float32(total + np.float32(weights[row] * y[row, column]))
        out[column] = total
    return out


def tokens_of(*counts: int) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


@pytest.mark.parametrize("counts", [(1,), (5,), (1, 1), (3, 1, 6), (2, 2, 2, 2), (1, 8, 1)])
def test_rows_are_added_in_their_order(counts: tuple[int, ...]) -> None:
    random = np.random.default_rng(sum(counts))
    y, weights = random.standard_normal((sum(counts), 7), np.float32), random.random(sum(counts), np.float32)
    sums = weighted_sums(y, weights, tokens_of(*counts))
    assert (sums.dtype, sums.shape) == (np.float32, (len(counts), 7))
    ends = np.cumsum(counts)
    for row, start, end in zip(sums, ends - counts, ends, strict=True):
        assert np.array_equal(row, by_hand(y[start:end], weights[start:end]))


def test_another_order_would_be_other_bits() -> None:
    """Else none of these tests could fail."""
    y, weights = Layer(1).rows[0], Layer(1).weights[0]
    turned = weighted_sums(y[::-1], weights[::-1], tokens_of(N_USED))
    assert not np.array_equal(turned, weighted_sums(y, weights, tokens_of(N_USED)))


@given(st.data())
def test_a_tokens_sum_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    layer = Layer(9, data.draw(st.integers(0, 99)))
    some = sorted(data.draw(st.sets(st.integers(0, 8), min_size=1)))
    whole, part = layer.totals(), Layer(9)
    part.ids, part.weights, part.rows = layer.ids[some], layer.weights[some], layer.rows[some]
    assert np.array_equal(part.totals(), whole[some])


def test_every_order_of_arrival_gives_the_same_bits() -> None:
    layer = Layer(5)
    split = plan(layer.ids, LayerRouting(0, HOLDERS))
    partials = layer.partials(split)
    totals = [add_partials(split, dict(order), N_OUT) for order in itertools.permutations(partials.items())]
    assert len(totals) == 6
    assert all(np.array_equal(total, totals[0]) for total in totals)


def test_groups_are_added_in_the_order_of_their_holders_names() -> None:
    layer = Layer(4)
    split = plan(layer.ids, LayerRouting(0, HOLDERS))
    assert [part.peer for part in split.parts] == ["a", "b", "c"]
    partials = layer.partials(split)
    for token, total in enumerate(layer.totals()):
        owed = [partials[part.peer][part.rows.tolist().index(token)] for part in split.parts if token in part.rows]
        assert np.array_equal(total, by_hand(np.stack(owed), np.ones(len(owed), np.float32)))


def test_totals_are_near_the_exact_ones() -> None:
    layer = Layer(64)
    exact = np.einsum("tk,tkn->tn", layer.weights.astype(np.float64), layer.rows.astype(np.float64))
    errors = np.linalg.norm(layer.totals() - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 1e-6
    assert errors.max() > 0  # F32 it is


def test_a_holder_that_is_replaced_changes_no_bit() -> None:
    """Whoever answers in its place answers row by row, and the rows are added in its group."""
    layer = Layer(6)
    holders = [(peer[0], "abc"[("abc".index(peer[0]) + 1) % 3]) for peer in HOLDERS]
    assert LayerRouting(0, holders).groups is None
    routing = LayerRouting(0, holders, {"b"})
    assert [part.peer for part in plan(layer.ids, routing).parts] == ["a", "c"]
    assert routing.groups is not None
    assert np.array_equal(sum_rows(plan(layer.ids, routing.groups), layer.rows, layer.weights), layer.totals())


def test_what_overflows_is_refused_by_whoever_gets_it() -> None:
    y = np.full((4, 2), 3e38, np.float32)
    assert np.isinf(weighted_sums(y, np.ones(4, np.float32), tokens_of(2, 2))).all()
    assert np.isinf(weighted_sums(y, np.ones(4, np.float32), tokens_of(4))).all()


def test_a_reply_of_sums_has_a_row_a_token() -> None:
    (part,) = plan(np.array([[0, 1], [1, 0], [0, 1]], np.int32), LayerRouting(5, [("a",), ("a",)])).parts
    check_reply(np.ones((3, N_OUT), np.float32), part, 5, N_OUT, partial_sums=True)
    with pytest.raises(Exception, match=r"answered float32 \(6, 33\) instead of float32 \(3, 33\)"):
        check_reply(np.ones((6, N_OUT), np.float32), part, 5, N_OUT, partial_sums=True)
