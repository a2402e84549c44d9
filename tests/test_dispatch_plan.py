"""The dispatch of a layer: every slot to one peer, every activation sent once, the same result in any order."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable, PeerMistake
from scheduler.dispatch import (
    DEADLINE_S_MIN,
    DECODE_DEADLINE_S_MAX,
    DECODE_ROWS_MAX,
    PREFILL_DEADLINE_S_MAX,
    LayerRouting,
    PeerRows,
    RowRate,
    check_reply,
    deadline_s,
    gather,
    plan,
)

N_OUT = 3


def routing(*owners: str) -> LayerRouting:
    """One holder an expert, named by a letter."""
    return LayerRouting(5, [tuple(owner) for owner in owners])


def ids(*tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def expert(number: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """A stand-in for an expert: [N_OUT] that depends on both."""
    return np.array([number, x[0], number * x[0]], dtype=np.float32)


def answer(part: PeerRows, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the peer answers, which sees only the rows that it was sent."""
    sent = x[part.rows]
    rows = [expert(int(e), sent[t]) for t, e in zip(part.tokens, part.experts, strict=True)]
    return np.array(rows, dtype=np.float32).reshape(len(rows), N_OUT)


def test_one_token_over_two_peers() -> None:
    split = plan(ids([3, 0, 2, 1]), routing("a", "b", "a", "b"))
    assert (split.layer, split.n_tokens, split.n_used) == (5, 1, 4)
    a, b = split.parts
    assert (a.peer, a.rows.tolist(), a.tokens.tolist()) == ("a", [0], [0, 0])
    assert (a.experts.tolist(), a.slots.tolist()) == ([0, 2], [1, 2])
    assert (b.peer, b.experts.tolist(), b.slots.tolist()) == ("b", [3, 1], [0, 3])
    assert (a.rows.dtype, a.tokens.dtype, a.experts.dtype, a.slots.dtype) == (np.int32, np.int32, np.int32, np.int64)


def test_a_tokens_row_is_sent_once_and_only_where_it_is_needed() -> None:
    split = plan(ids([0, 1], [2, 2], [1, 0], [0, 2]), routing("a", "a", "b"))
    a, b = split.parts
    assert (a.rows.tolist(), a.tokens.tolist(), a.slots.tolist()) == ([0, 2, 3], [0, 0, 1, 1, 2], [0, 1, 4, 5, 6])
    assert (b.rows.tolist(), b.tokens.tolist(), b.slots.tolist()) == ([1, 3], [0, 0, 1], [2, 3, 7])


def test_no_tokens_are_no_dispatch() -> None:
    split = plan(np.empty((0, 8), dtype=np.int32), routing("a", "b"))
    assert split.parts == ()
    gather(split, {}, np.empty((0, 8, N_OUT), dtype=np.float32))


def test_a_peer_without_a_chosen_expert_gets_nothing() -> None:
    assert [part.peer for part in plan(ids([2, 2]), routing("a", "b", "c")).parts] == ["c"]


def test_strided_ids_are_read_right() -> None:
    wide = ids([1, 0, 9, 9], [1, 0, 9, 9])
    for strided in (wide[:, :2], np.asfortranarray(wide[:, :2])):
        (a, b) = plan(strided, routing("a", "b")).parts
        assert (a.slots.tolist(), b.slots.tolist()) == ([1, 3], [0, 2])


def test_the_first_holder_that_can_be_reached_answers() -> None:
    holders = [("a", "b"), ("b", "a"), ("c",)]
    assert [p.peer for p in plan(ids([0, 1, 2]), LayerRouting(0, holders)).parts] == ["a", "b", "c"]
    (b,) = plan(ids([0, 1]), LayerRouting(0, holders, {"a"})).parts
    assert (b.peer, b.slots.tolist()) == ("b", [0, 1])


def test_an_expert_without_a_peer_is_named_if_it_was_chosen() -> None:
    lost = LayerRouting(5, [("a",), ("b",), ("b",), ()], {"b"})
    assert [part.peer for part in plan(ids([0, 0]), lost).parts] == ["a"]
    with pytest.raises(ExpertsUnavailable, match=r"experts 1, 2 of layer 5: b held them") as caught:
        plan(ids([2, 0], [1, 2]), lost)
    assert caught.value.details == {"layer": 5, "experts": [1, 2], "peer": "b", "cause": "disconnected"}
    with pytest.raises(ExpertsUnavailable, match="no peer held them"):
        plan(ids([3, 0]), lost)


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        plan(ids([0, wrong]), routing("a", "b", "a", "b"))


@given(st.data())
def test_every_slot_gets_its_own_experts_answer_in_any_order_of_arrival(data: st.DataObject) -> None:
    n_expert = data.draw(st.integers(1, 12))
    owners = data.draw(st.lists(st.sampled_from("abcd"), min_size=n_expert, max_size=n_expert))
    n_tokens, n_used = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5))
    chosen = data.draw(st.lists(st.integers(0, n_expert - 1), min_size=n_tokens * n_used, max_size=n_tokens * n_used))
    choice = np.array(chosen, dtype=np.int32).reshape(n_tokens, n_used)
    x = np.arange(n_tokens, dtype=np.float32).reshape(-1, 1) + np.float32(0.5)
    split = plan(choice, routing(*owners))
    assert sorted(itertools.chain(*(part.slots.tolist() for part in split.parts))) == list(range(n_tokens * n_used))
    for part in split.parts:
        assert {owners[e] for e in part.experts.tolist()} == {part.peer}
        assert part.rows.tolist() == sorted(set((part.slots // n_used).tolist()))
    arrivals = data.draw(st.permutations(split.parts))
    out = np.full((n_tokens, n_used, N_OUT), np.nan, dtype=np.float32)
    gather(split, {part.peer: answer(part, x) for part in arrivals}, out)
    for t, k in itertools.product(range(n_tokens), range(n_used)):
        assert out[t, k].tolist() == expert(int(choice[t, k]), x[t]).tolist()


def test_gather_writes_into_the_callers_memory_or_refuses() -> None:
    split = plan(ids([0, 1]), routing("a", "b"))
    replies = {"a": np.ones((1, N_OUT), dtype=np.float32), "b": np.zeros((1, N_OUT), dtype=np.float32)}
    memory = np.empty(2 * N_OUT, dtype=np.float32)
    gather(split, replies, memory.reshape(1, 2, N_OUT))
    assert memory.tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="contiguous"):
        gather(split, replies, np.empty((1, 2, 2 * N_OUT), dtype=np.float32)[:, :, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        gather(split, replies, np.empty((2, 1, N_OUT), dtype=np.float32))


def reply(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, dtype=np.float32)


def test_replies_are_checked_and_the_peer_named() -> None:
    part = plan(ids([0, 1], [1, 0]), routing("a", "a")).parts[0]
    check_reply(reply(4, N_OUT), part, 5, N_OUT)
    for wrong in (reply(3, N_OUT), reply(4, N_OUT + 1), reply(4 * N_OUT), np.ones((4, N_OUT), dtype=np.float64)):
        with pytest.raises(PeerMistake, match=r"peer a answered .* for layer 5") as caught:
            check_reply(wrong, part, 5, N_OUT)  # type: ignore[arg-type]
        assert caught.value.details == {"peer": "a", "layer": 5}


@pytest.mark.parametrize("poison", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]])
def test_values_that_are_not_finite_are_refused(poison: list[float]) -> None:
    part = plan(ids([0, 1]), routing("a", "a")).parts[0]
    values = reply(2, 1_000)
    values[1, : len(poison)] = poison
    with pytest.raises(PeerMistake, match=f"{len(poison)} values that are NaN or infinite"):
        check_reply(values, part, 5, 1_000)


def test_large_finite_values_are_no_mistake() -> None:
    part = plan(ids([0, 1]), routing("a", "a")).parts[0]
    check_reply(np.full((2, 1_000), 3e38, dtype=np.float32), part, 5, 1_000)  # their sum overflows


def test_deadlines_scale_between_their_bounds() -> None:
    assert deadline_s(8, 100_000, 5_000.0) == DEADLINE_S_MIN
    assert deadline_s(DECODE_ROWS_MAX, 10**9, 0.001) == DECODE_DEADLINE_S_MAX < 5
    assert deadline_s(DECODE_ROWS_MAX, 0, None) <= DECODE_DEADLINE_S_MAX
    assert deadline_s(4_096, 0, 1_000.0) == pytest.approx(4 * 4.096)
    assert deadline_s(4_096, 1_000_000, 1_000.0) == pytest.approx(4 * 4.096 + 4)
    assert deadline_s(10**9, 10**12, None) == PREFILL_DEADLINE_S_MAX


def test_the_rate_follows_the_last_measurements() -> None:
    rate = RowRate()
    assert rate.rows_per_s is None
    rate.observe(100, 0.1)
    assert rate.rows_per_s == pytest.approx(1_000)
    for _ in range(30):
        rate.observe(100, 0.2)
    assert rate.rows_per_s == pytest.approx(500, rel=0.05)
    still = RowRate()
    still.observe(1, 0.0)  # a clock that did not move
    assert still.rows_per_s == pytest.approx(1e6)


def test_a_plan_is_quick() -> None:
    table = LayerRouting(0, [(f"peer{e % 3}",) for e in range(64)])
    rng = np.random.default_rng(1)
    for n_tokens, limit_s in ((1, 100e-6), (512, 1e-3)):  # measured: 16 us and 80 us; the rest is for busy machines
        choice = np.array([rng.choice(64, 8, replace=False) for _ in range(n_tokens)], dtype=np.int32)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            plan(choice, table)
            times.append(time.perf_counter() - start)
        assert min(times) < limit_s
