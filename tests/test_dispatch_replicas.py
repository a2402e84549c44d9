"""Replicas at dispatch: who answers, failing over within a layer, and the same output whoever computed it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable
from scheduler.combine import add_partials, sum_rows, weighted_sums
from scheduler.dispatch import LayerRouting, PeerRows, gather, plan, retry, write_rows
from scheduler.layer_cost import PeerSpeed

N_OUT = 3
LAN = PeerSpeed(0.0003, 5_000.0, numeric_class="a")
FAR = replace(LAN, rtt_s=0.02)


def ids(*tokens: list[int]) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def expert(number: int, x: float) -> NDArray[np.float32]:
    """A stand-in for an expert, whose last bits tell which one it was: float32 [N_OUT]."""
    return np.array([number + x / 3, x / (number + 1), number * x], dtype=np.float32)


def answer(part: PeerRows, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What any holder answers, from the rows that it was sent: float32 [R, N_OUT]."""
    sent = x[part.rows]
    rows = [expert(int(e), float(sent[t])) for t, e in zip(part.tokens, part.experts, strict=True)]
    return np.array(rows, dtype=np.float32).reshape(len(rows), N_OUT)


def answering(holders: list[str], speeds: dict[str, PeerSpeed], chosen: NDArray[np.int32], **more: object) -> list[str]:
    routing = LayerRouting(0, [tuple(peers) for peers in holders], speeds=speeds, **more)  # type: ignore[arg-type]
    return [part.peer for part in plan(chosen, routing).parts]


speeds_of_peers = st.fixed_dictionaries(
    {},
    optional={
        peer: st.builds(
            PeerSpeed,
            st.sampled_from((0.0003, 0.02, 0.2)),
            st.sampled_from((100.0, 5_000.0)),
            st.sampled_from((0.0, 0.1)),
            st.sampled_from((None, "a", "a", "b")),
        )
        for peer in "abcd"
    },
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_choice_of_replicas_any_failures_and_any_order_give_the_same_output(data: st.DataObject) -> None:
    n_expert = data.draw(st.integers(1, 8))
    sets = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    holders = data.draw(st.lists(sets, min_size=n_expert, max_size=n_expert))
    n_tokens, n_used = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.integers(0, n_expert - 1), min_size=n_tokens * n_used, max_size=n_tokens * n_used))
    chosen = np.array(flat, dtype=np.int32).reshape(n_tokens, n_used)
    x = np.arange(n_tokens, dtype=np.float32) + np.float32(0.1)
    speeds = data.draw(st.none() | speeds_of_peers)
    routing = LayerRouting(
        5, holders, data.draw(st.sets(st.sampled_from("abcd"), max_size=1)), speeds=speeds, fallback="self"
    )
    out = np.full((n_tokens, n_used, N_OUT), np.nan, dtype=np.float32)
    waiting, failed = list(plan(chosen, routing).parts), set[str]()
    while waiting:
        part = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if part.peer != "self" and data.draw(st.booleans()):
            failed.add(part.peer)
            parts = retry(part, routing, failed)
            assert not {again.peer for again in parts} & failed
            assert sorted(itertools.chain(*(p.slots.tolist() for p in parts))) == part.slots.tolist()
            waiting += parts
        else:
            assert part.peer == "self" or all(part.peer in holders[e] for e in part.experts.tolist())
            assert part.rows.tolist() == sorted({slot // n_used for slot in part.slots.tolist()})
            write_rows(part, answer(part, x), out)
    for t, k in itertools.product(range(n_tokens), range(n_used)):
        assert out[t, k].tobytes() == expert(int(chosen[t, k]), float(x[t])).tobytes()


def test_the_same_numbers_give_the_same_choice() -> None:
    speeds = {"a": LAN, "b": replace(LAN, rows_per_s=900.0), "c": FAR, "d": LAN}
    holders = [tuple(p) for p in itertools.permutations("abcd", 2)]
    chosen = ids(*([e, 11 - e] for e in range(12)))
    first = plan(chosen, LayerRouting(0, holders, speeds=speeds))
    again = plan(chosen, LayerRouting(0, holders, speeds=dict(reversed(speeds.items()))))
    assert [(p.peer, p.slots.tolist()) for p in first.parts] == [(p.peer, p.slots.tolist()) for p in again.parts]


def test_the_nearer_and_the_idle_holder_answers() -> None:
    assert answering(["ab"], {"a": FAR, "b": LAN}, ids([0])) == ["b"]
    assert answering(["ab"], {"a": replace(LAN, busy_s=0.05), "b": FAR}, ids([0])) == ["b"]
    assert answering(["ab"], {"a": replace(LAN, rtt_s=0.00031), "b": LAN}, ids([0])) == ["a"]  # not worth a change
    assert answering(["ab"], {"b": FAR}, ids([0])) == ["a"]  # not measured, but preferred: classes are not known equal
    assert LayerRouting(0, ["ab"]).peers == ("a",)


def test_few_rows_keep_to_few_peers_and_many_spread_over_replicas() -> None:
    mirrored = ["ac"] * 8 + ["bd"] * 8
    speeds = dict.fromkeys("abcd", FAR)
    assert answering(mirrored, speeds, ids([0, 4, 8, 12])) == ["a", "b"]
    prompt = np.tile(np.arange(16, dtype=np.int32), (64, 1))
    parts = plan(prompt, LayerRouting(0, mirrored, speeds=speeds)).parts
    assert [(part.peer, len(part.slots)) for part in parts] == [(peer, 256) for peer in "abcd"]
    assert answering(["ab", "ba", "ab", "ba"], speeds, ids([0, 1, 2, 3])) in (["a"], ["b"])


def test_load_is_shared_only_within_the_class_of_the_first_holder() -> None:
    speeds = {"a": FAR, "b": replace(LAN, numeric_class="b"), "c": replace(LAN, numeric_class=None)}
    assert answering(["abc"], speeds, ids([0])) == ["a"]
    assert answering(["ca"], speeds, ids([0])) == ["c"]
    assert answering(["abc"], speeds, ids([0]), unreachable={"a"}) == ["b"]  # better than nobody


def test_the_leaders_own_copy_comes_last() -> None:
    assert answering(["a", "b"], {}, ids([0, 1]), fallback="self", unreachable={"b"}) == ["a", "self"]
    assert answering(["a", "b"], {}, ids([0, 1]), fallback="self") == ["a", "b"]
    routing = LayerRouting(5, ["ab"], fallback="self")
    (part,) = plan(ids([0]), routing).parts
    (again,) = retry(part, routing)
    (last,) = retry(again, routing, {"a"})
    assert (part.peer, again.peer, last.peer) == ("a", "b", "self")
    with pytest.raises(ExpertsUnavailable):
        retry(last, routing, {"a", "b"})


def test_a_part_is_retried_on_several_peers_with_only_the_rows_they_need() -> None:
    routing = LayerRouting(5, ["ab", "ac", "ab", "b"])
    part = plan(ids([0, 3], [1, 3], [3, 2], [1, 0]), routing).parts[0]
    assert (part.peer, part.rows.tolist(), part.slots.tolist()) == ("a", [0, 1, 2, 3], [0, 2, 5, 6, 7])
    b, c = retry(part, routing)
    assert (b.peer, b.rows.tolist(), b.tokens.tolist()) == ("b", [0, 2, 3], [0, 1, 2])
    assert (b.experts.tolist(), b.slots.tolist()) == ([0, 2, 0], [0, 5, 7])
    assert (c.peer, c.rows.tolist(), c.tokens.tolist(), c.slots.tolist()) == ("c", [1, 3], [0, 1], [2, 6])
    assert (b.rows.dtype, b.tokens.dtype, b.experts.dtype, b.slots.dtype) == (np.int32, np.int32, np.int32, np.int64)


def test_a_retry_goes_to_the_nearer_of_those_that_are_left() -> None:
    routing = LayerRouting(0, ["abc"], speeds={"a": LAN, "b": FAR, "c": LAN})
    (part,) = plan(ids([0]), routing).parts
    assert [again.peer for again in retry(part, routing)] == ["c"]


def test_a_retry_names_what_nobody_else_holds() -> None:
    routing = LayerRouting(5, ["ab", "a", "ab"])
    (part,) = plan(ids([0, 1, 2]), routing).parts
    with pytest.raises(ExpertsUnavailable, match="experts 1 of layer 5: a held them") as caught:
        retry(part, routing)
    assert caught.value.details == {"layer": 5, "experts": [1], "peer": "a", "cause": "disconnected"}
    with pytest.raises(ExpertsUnavailable, match="experts 0, 1, 2 of layer 5"):
        retry(part, routing, {"b"})


def test_a_hedge_and_its_original_write_the_same() -> None:
    routing = LayerRouting(0, ["ab", "ab"])
    split = plan(ids([0, 1]), routing)
    (original,), (hedge,) = split.parts, retry(split.parts[0], routing)
    x, out, other = (
        np.ones(1, dtype=np.float32),
        np.empty((1, 2, N_OUT), np.float32),
        np.empty((1, 2, N_OUT), np.float32),
    )
    gather(split, {original.peer: answer(original, x)}, out)
    write_rows(hedge, answer(hedge, x), other)
    assert out.tobytes() == other.tobytes()


def test_partial_sums_are_the_same_whoever_answered_row_by_row() -> None:
    holders = ["ab", "ba", "ab", "ba", "cb", "ac"]
    chosen, weights = ids([0, 1, 4, 5], [5, 3, 2, 1]), np.linspace(0.1, 0.9, 8, dtype=np.float32).reshape(2, 4)
    x = np.array([0.3, 0.7], dtype=np.float32)
    plain = LayerRouting(0, holders)
    assert plain.groups is None
    split = plan(chosen, plain)
    partials = {p.peer: weighted_sums(answer(p, x), weights.reshape(-1)[p.slots], p.tokens) for p in split.parts}
    expected = add_partials(split, partials, N_OUT)
    for routing in (
        LayerRouting(0, holders, {"a"}),
        LayerRouting(0, holders, {"a", "c"}, fallback="self"),
        LayerRouting(0, holders, speeds={"a": FAR, "b": LAN, "c": FAR}),
    ):
        assert routing.groups is not None
        rows = np.empty((2, 4, N_OUT), np.float32)
        for part in plan(chosen, routing).parts:
            write_rows(part, answer(part, x), rows)
        assert sum_rows(plan(chosen, routing.groups), rows, weights).tobytes() == expected.tobytes()
