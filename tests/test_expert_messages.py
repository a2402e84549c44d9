"""The experts protocol's messages: golden bytes, exact sizes, and every way in which a peer may lie about them."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable, PeerMistake
from swarmnode import limits
from swarmnode.expert_messages import (
    Dispatch,
    Expected,
    Failure,
    HeldLayer,
    Notice,
    Reply,
    check_answer,
    check_dispatch,
    decode_answer,
    decode_dispatch,
    dispatch_rows_max,
    dispatch_tokens_max,
    encode_dispatch,
    encode_failure,
    encode_notice,
    encode_reply,
    request_head,
)
from swarmnode.wire import Frame, encode_frame, split_frame

LAYER = HeldLayer(n_in=32, n_out=3, held=np.array([True, True, False, True]))
X = np.arange(64, dtype="<f4").reshape(2, 32)
PENDING = {9: Expected(n_rows=2, n_out=3)}
ONES = np.ones(3, "<f4")


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def dispatch(x: NDArray[Any], tokens: Sequence[int], experts: Sequence[int], **other: Any) -> bytes:
    fields = {"term": 7, "epoch": 2, "sequence": 9, "layer": 5, **other}
    return encode_dispatch(x=x, tokens=ids(*tokens), experts=ids(*experts), **fields)


def receive(data: bytes, layer: HeldLayer = LAYER) -> Dispatch | Notice:
    """What a worker does with a frame."""
    frame, end = split_frame(data, limits.EXPERTS_REQUEST)
    assert end == len(data)
    head = request_head(frame.header)
    return head if isinstance(head, Notice) else decode_dispatch(head, frame.payload, layer)


def answer(data: bytes) -> Reply | Failure:
    """What a leader does with a frame."""
    return decode_answer(split_frame(data, limits.EXPERTS_REPLY)[0], PENDING)


def test_golden_dispatch_of_one_token() -> None:
    frame = dispatch(X[:1, :], [0, 0], [3, 1])
    header = bytes.fromhex("99 01 07 02 09 05 01 02 00 00")
    assert frame == struct.pack("<II", 10, 132) + header + X[0].tobytes() + bytes.fromhex("0300 0100")


def test_golden_dispatch_of_two_tokens() -> None:
    frame = dispatch(X, [1, 0, 1], [0, 1, 3], term=300, f32_accumulation=True)
    header = bytes.fromhex("99 01 cd012c 02 09 05 02 03 00 01")
    assert frame == struct.pack("<II", 12, 268) + header + X.tobytes() + bytes.fromhex("010000000100 000001000300")
    got = receive(frame)
    assert isinstance(got, Dispatch)
    assert got.head[:7] == (300, 2, 9, 5, 2, 3, 0)
    assert got.f32_accumulation
    assert np.array_equal(got.x, X)
    assert got.tokens.tolist() == [1, 0, 1]
    assert got.experts.tolist() == [0, 1, 3]
    assert (got.tokens.dtype, got.experts.dtype) == (np.int32, np.int32)


def test_golden_dispatch_for_partial_sums() -> None:
    frame = dispatch(X, [0, 0, 1], [3, 1, 0], weights=np.array([0.5, 0.25, 1.0], np.float32))
    header = bytes.fromhex("99 01 07 02 09 05 02 03 00 02")
    ids_and_weights = bytes.fromhex("000000000100 030001000000 0000003f 0000803e 0000803f")
    assert frame == struct.pack("<II", 10, 280) + header + X.tobytes() + ids_and_weights
    got = receive(frame)
    assert isinstance(got, Dispatch)
    assert got.weights is not None
    assert (got.weights.dtype, got.weights.tolist()) == (np.float32, [0.5, 0.25, 1.0])
    assert (got.tokens.tolist(), got.experts.tolist()) == ([0, 0, 1], [3, 1, 0])
    assert not got.f32_accumulation


def test_both_flags_go_together_and_no_flag_means_no_weights() -> None:
    weights = np.array([0.5], np.float32)
    got = receive(dispatch(X[:1], [0], [3], weights=weights, f32_accumulation=True))
    assert isinstance(got, Dispatch)
    assert (got.head.flags, got.f32_accumulation, got.weights) == (3, True, weights)
    plain = receive(dispatch(X[:1], [0], [3]))
    assert isinstance(plain, Dispatch)
    assert (plain.head.flags, plain.weights) == (0, None)


def test_golden_answers_and_notices() -> None:
    y = np.array([[1, 2, 3], [4, 5, 6]], "<f4")
    frame = encode_reply(9, 250, y)
    assert frame == struct.pack("<II", 6, 24) + bytes.fromhex("94 04 09 02 ccfa") + y.tobytes()
    reply = answer(frame)
    assert isinstance(reply, Reply)
    assert (reply.sequence, reply.compute_us) == (9, 250)
    assert np.array_equal(reply.y, y)

    assert encode_notice(7, "r-1", begins=True) == struct.pack("<II", 7, 0) + b"\x93\x02\x07\xa3r-1"
    assert receive(encode_notice(7, "r-1", begins=True)) == Notice(True, 7, "r-1")
    assert receive(encode_notice(7, "r-1", begins=False)) == Notice(False, 7, "r-1")

    failure = answer(encode_failure(9, ExpertsUnavailable("stale", layer=5, experts=[1], cause="refused")))
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, ExpertsUnavailable)
    assert failure.error.details == {"layer": 5, "experts": [1], "cause": "refused"}


def test_q8_0_rows_arrive_as_they_were_sent() -> None:
    blocks = np.zeros((2, 34), np.uint8)
    blocks[:, 2:] = np.arange(64).reshape(2, 32)
    got = receive(dispatch(blocks, [0, 1], [0, 0]))
    assert isinstance(got, Dispatch)
    assert got.x.dtype == np.uint8
    assert np.array_equal(got.x, blocks)


def test_bytes_stay_within_the_budget_with_the_largest_numbers() -> None:
    largest = {"term": 2**64 - 1, "epoch": 2**64 - 1, "sequence": 2**64 - 1, "layer": limits.LAYER_MAX}
    for n_tokens, n_used in ((1, 1), (1, 8), (64, 8), (512, 32)):
        x = np.zeros((n_tokens, 2048), np.float32)
        tokens = np.repeat(np.arange(n_tokens), n_used)
        experts = np.tile(np.arange(n_used), n_tokens)
        frame = dispatch(x, tokens.tolist(), experts.tolist(), **largest, f32_accumulation=True)
        assert len(frame) <= 4 * 2048 * n_tokens + 4 * n_used * n_tokens + 60
        weights = np.ones(n_tokens * n_used, np.float32)
        frame = dispatch(x, tokens.tolist(), experts.tolist(), **largest, weights=weights)
        assert len(frame) <= 4 * 2048 * n_tokens + 8 * n_used * n_tokens + 60
        reply = encode_reply(2**64 - 1, 2**40, np.zeros((n_tokens * n_used, 2), np.float32))
        assert len(reply) <= 8 * n_tokens * n_used + 29


BAD_DISPATCHES: dict[str, Callable[[], bytes]] = {
    "expert not held": lambda: dispatch(X, [0, 1], [0, 2]),
    "expert out of range": lambda: dispatch(X, [0, 1], [0, 4]),
    "expert far out of range": lambda: dispatch(X[:1], [0], [65_535]),
    "token out of range": lambda: dispatch(X, [0, 2], [0, 1]),
    "the same pair twice": lambda: dispatch(X, [1, 0, 1], [3, 0, 3]),
    "the same expert twice for the only token": lambda: dispatch(X[:1], [0, 0], [3, 3]),
    "not finite": lambda: dispatch(np.where(X == 40, np.float32(np.nan), X), [0, 1], [0, 1]),
    "wrong width": lambda: dispatch(X[:, :16].copy(), [0, 1], [0, 1]),
    "a row too many": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 0], X, ids(0).astype("<u2")),
    "ids cut short": lambda: encode_frame([1, 7, 2, 9, 5, 1, 2, 0, 0], X[:1], ids(0).astype("<u2")),
    "bytes left over": lambda: (
        dispatch(X, [0, 1], [0, 1]).replace(struct.pack("<I", 264), struct.pack("<I", 265)) + b"x"
    ),
    "no tokens": lambda: encode_frame([1, 7, 2, 9, 5, 0, 1, 0, 0], ids(0).astype("<u2")),
    "no rows": lambda: encode_frame([1, 7, 2, 9, 5, 1, 0, 0, 0], X[:1]),
    "unknown dtype": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 2, 0], X[:1], ids(0).astype("<u2")),
    "unknown flag": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 4], X[:1], ids(0).astype("<u2")),
    "a known flag with an unknown one": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 5], X[:1], ids(0).astype("<u2")),
    "sums without weights": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 2], X[:1], ids(0).astype("<u2")),
    "weights without sums": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 0], X[:1], ids(0).astype("<u2"), ONES[:1]),
    "a weight too many": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0, 2], X[:1], ids(0).astype("<u2"), ONES[:2]),
    "a weight that is not finite": lambda: dispatch(X, [0, 1], [0, 1], weights=np.array([1, np.inf], np.float32)),
    "a weight that is no number": lambda: dispatch(X[:1], [0, 0], [0, 1], weights=np.array([np.nan, 1], np.float32)),
    "sums with the last token left out": lambda: dispatch(X, [0, 0], [0, 1], weights=ONES[:2]),
    "sums with the first token left out": lambda: dispatch(X, [1, 1], [0, 1], weights=ONES[:2]),
    "sums with a token in between left out": lambda: dispatch(X[[0, 1, 1]], [0, 0, 2], [0, 1, 1], weights=ONES[:3]),
    "sums out of order": lambda: dispatch(X, [1, 0], [0, 1], weights=ONES[:2]),
    "sums of a token in two places": lambda: dispatch(X, [0, 1, 0], [0, 1, 1], weights=ONES[:3]),
    "fewer rows than tokens": lambda: dispatch(X, [0], [0], weights=ONES[:1]),
    "a field missing": lambda: encode_frame([1, 7, 2, 9, 5, 1, 1, 0], X[:1], ids(0).astype("<u2")),
    "a negative term": lambda: encode_frame([1, -7, 2, 9, 5, 1, 1, 0, 0], X[:1], ids(0).astype("<u2")),
    "a bool for a number": lambda: encode_frame([1, 7, 2, 9, 5, True, 1, 0, 0], X[:1], ids(0).astype("<u2")),
    "an answer": lambda: encode_reply(9, 1, np.zeros((2, 3), np.float32)),
    "a map": lambda: encode_frame({}),
    "a request id to break a log": lambda: encode_frame([2, 7, "a\nb"]),
    "an empty request id": lambda: encode_frame([2, 7, ""]),
    "too long a request id": lambda: encode_frame([2, 7, "a" * 65]),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_a_worker_refuses(name: str) -> None:
    with pytest.raises(PeerMistake):
        receive(BAD_DISPATCHES[name]())


def test_a_refusal_names_layer_and_experts() -> None:
    with pytest.raises(PeerMistake) as caught:
        receive(dispatch(X, [0, 1], [0, 2]))
    assert caught.value.details == {"layer": 5, "experts": [2]}


def test_limits_on_fields_do_not_replace_the_one_on_their_product() -> None:
    wide = HeldLayer(n_in=32, n_out=16_384, held=np.ones(64, np.bool_))
    rows = dispatch_rows_max(wide.n_out)
    assert rows * wide.n_out * 4 <= limits.REPLY_PAYLOAD_BYTES_MAX < (rows + 1) * wide.n_out * 4
    for n_rows, fits in ((rows, True), (rows + 1, False)):
        head = request_head([1, 7, 2, 9, 5, 1, n_rows, 0, 0])
        assert not isinstance(head, Notice)
        with contextlib.nullcontext() if fits else pytest.raises(PeerMistake, match="do not fit a reply"):
            check_dispatch(head, 128 + 2 * n_rows, wide)


def test_what_the_sender_may_send_at_most_fits_a_frame() -> None:
    assert dispatch_tokens_max(64) == limits.DISPATCH_TOKENS_MAX
    tokens = dispatch_tokens_max(16_384)
    assert 4 * 16_384 * tokens + 4 * limits.DISPATCH_ROWS_MAX <= limits.DISPATCH_PAYLOAD_BYTES_MAX
    with pytest.raises(ValueError, match="over the limits"):
        dispatch(np.zeros((limits.DISPATCH_TOKENS_MAX + 1, 1), np.float32), [0], [0])
    with pytest.raises(ValueError, match="no request id"):
        encode_notice(1, "two words", begins=True)


BAD_ANSWERS: dict[str, Callable[[], bytes]] = {
    "a sequence that nobody waits for": lambda: encode_reply(8, 1, np.zeros((2, 3), np.float32)),
    "too few rows": lambda: encode_reply(9, 1, np.zeros((1, 3), np.float32)),
    "too many rows": lambda: encode_reply(9, 1, np.zeros((3, 3), np.float32)),
    "the wrong width": lambda: encode_reply(9, 1, np.zeros((2, 4), np.float32)),
    "rows of another shape": lambda: encode_frame([4, 9, 3, 1], np.zeros((2, 3), np.float32)),
    "a negative time": lambda: encode_frame([4, 9, 2, -1], np.zeros((2, 3), np.float32)),
    "a failure with rows": lambda: encode_frame([5, 9, {"type": "internal"}], np.zeros((2, 3), np.float32)),
    "a failure that is no error": lambda: encode_frame([5, 9, "oh"]),
    "a failure with odd keys": lambda: encode_frame([5, 9, {b"type": 1}]),
    "a dispatch": lambda: dispatch(X, [0, 1], [0, 1]),
    "nothing": lambda: encode_frame([]),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_leader_refuses(name: str) -> None:
    with pytest.raises(PeerMistake):
        answer(BAD_ANSWERS[name]())


def test_an_answers_size_is_judged_before_its_payload_is_read() -> None:
    assert check_answer([4, 9, 2, 1], 24, PENDING) == (4, 9)
    with pytest.raises(PeerMistake):
        check_answer([4, 9, 2, 1], 2**26, PENDING)


NUMBER = st.integers(-1, 9) | st.integers(-(2**63), 2**64 - 1) | st.none() | st.text(max_size=3)


@given(st.lists(NUMBER, max_size=10), st.binary(max_size=300))
def test_random_messages_raise_only_peer_mistakes(header: list[Any], payload: bytes) -> None:
    with contextlib.suppress(PeerMistake):
        receive(encode_frame(header, payload))
    with contextlib.suppress(PeerMistake):
        decode_answer(Frame(header, payload), PENDING)


@given(st.sampled_from([1, 2]), st.integers(1, 6), st.sampled_from([0, 1]), st.sampled_from([0, 2]), st.data())
def test_random_payloads_of_the_right_size_raise_only_peer_mistakes(
    n_tokens: int, n_rows: int, dtype: int, flags: int, data: st.DataObject
) -> None:
    size = n_tokens * (34 if dtype else 128) + n_rows * ((2 if n_tokens == 1 else 4) + 2 * flags)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    with contextlib.suppress(PeerMistake):
        got = receive(encode_frame([1, 7, 2, 9, 5, n_tokens, n_rows, dtype, flags], payload))
        assert isinstance(got, Dispatch)
        assert LAYER.held[got.experts].all()
        assert len(set(zip(got.tokens.tolist(), got.experts.tolist(), strict=True))) == n_rows
        assert got.tokens.max() < n_tokens
        if flags:
            assert got.weights is not None
            assert np.isfinite(got.weights).all()
            assert sorted(set(got.tokens.tolist())) == list(range(n_tokens))


@given(st.integers(1, 40), st.data())
def test_what_is_sent_is_what_arrives(n_tokens: int, data: st.DataObject) -> None:
    pairs = st.lists(st.tuples(st.integers(0, n_tokens - 1), st.integers(0, 63)), min_size=1, max_size=80, unique=True)
    tokens, experts = zip(*data.draw(pairs), strict=True)
    layer = HeldLayer(n_in=4, n_out=2, held=np.ones(64, np.bool_))
    x = np.arange(4 * n_tokens, dtype=np.float32).reshape(n_tokens, 4)
    got = receive(dispatch(x, tokens, experts), layer)
    assert isinstance(got, Dispatch)
    assert np.array_equal(got.x, x)
    assert (tuple(got.tokens), tuple(got.experts)) == (tokens, experts)


def test_single_precision_crosses_the_wire_bit_by_bit_both_ways() -> None:
    """Rows, and the router's weights for partial sums: also values that no shorter type could hold."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 32)).astype(np.float32)
    x[0, :4] = [np.float32(2.0**-149), np.finfo(np.float32).max, np.float32(1 + 2.0**-23), -0.0]
    weights = np.array([1 / 3, np.float32(2.0**-40)], np.float32)
    got = receive(dispatch(x, [0, 1], [0, 1], weights=weights))
    assert isinstance(got, Dispatch)
    assert got.weights is not None
    assert (got.x.tobytes(), got.weights.tobytes()) == (x.tobytes(), weights.tobytes())
    y = x[:, :3].copy()
    reply = answer(encode_reply(9, 1, y))
    assert isinstance(reply, Reply)
    assert reply.y.tobytes() == y.tobytes()


def test_a_decode_steps_messages_cost_little() -> None:
    """One token, eight rows, width 2,048: a dispatch encoded and decoded. Measured 18 us; the bound is generous."""
    layer = HeldLayer(n_in=2048, n_out=2048, held=np.ones(64, np.bool_))
    x, y = np.ones((1, 2048), np.float32), np.ones((8, 2048), np.float32)
    tokens, experts = np.zeros(8, np.int32), np.arange(8, dtype=np.int32)
    frame = Frame([1, 7, 2, 9, 5, 1, 8, 0, 0], x.tobytes() + experts.astype("<u2").tobytes())

    def step() -> None:
        encode_dispatch(term=7, epoch=2, sequence=9, layer=5, x=x, tokens=tokens, experts=experts)
        head = request_head(frame.header)
        assert not isinstance(head, Notice)
        decode_dispatch(head, frame.payload, layer)

    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            step()
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 200e-6
    assert encode_reply(1, 2, y)
