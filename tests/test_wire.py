"""Frames: their bytes, their limits, and what hostile bytes may cause (a PeerMistake, never anything else)."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import ExpertsUnavailable, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.limits import FrameLimits
from swarmnode.wire import (
    F32,
    Q8_0,
    Fields,
    bounded_error,
    decode_header,
    decode_rows,
    encode_frame,
    read_frame,
    row_bytes,
    split_frame,
)

SMALL = FrameLimits(header_bytes=256, payload_bytes=1_000, items=8, text_bytes=32)
LARGE = FrameLimits(header_bytes=256, payload_bytes=1_000_000, items=8, text_bytes=32)


class Recorded:
    """A stream that has sent all it ever will. Remembers what it was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[int] = []

    async def receive_exactly(self, n: int) -> bytes:
        self.asked.append(n)
        if n > len(self.data):
            raise EOFError
        taken, self.data = self.data[:n], self.data[n:]
        return taken


def test_golden_frame() -> None:
    frame = encode_frame({"a": 1}, b"xy", np.array([1.0], "<f4"))
    assert frame == bytes.fromhex("04000000 06000000 81a16101 7879 0000803f")


async def test_frames_come_back_one_after_the_other() -> None:
    tensor = np.arange(30_000, dtype="<f4")
    stream = Recorded(encode_frame([1, "two"], b"three") + encode_frame({}) + encode_frame([], tensor))
    assert await read_frame(stream, LARGE) == ([1, "two"], b"three")
    assert await read_frame(stream, LARGE) == ({}, b"")
    header, payload = await read_frame(stream, LARGE)
    assert header == []
    assert np.array_equal(np.frombuffer(payload, "<f4"), tensor)
    with pytest.raises(EOFError):
        await read_frame(stream, LARGE)


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ((0, 0), "header of 0"),
        ((257, 0), "header of 257"),
        ((1, 1_001), "1001 bytes of payload"),
        ((2**32 - 1,) * 2, "header"),
    ],
)
async def test_lying_lengths_are_refused_before_anything_is_read(lengths: tuple[int, int], reason: str) -> None:
    stream = Recorded(struct.pack("<II", *lengths) + bytes(100))
    with pytest.raises(PeerMistake, match=reason):
        await read_frame(stream, SMALL)
    assert stream.asked == [8]


async def test_a_large_payload_is_judged_by_its_header_first() -> None:
    def check(header: Any, payload_bytes: int) -> None:
        if header != [payload_bytes]:
            raise PeerMistake("not what was asked for")

    honest, false = encode_frame([100_000], bytes(100_000)), encode_frame([7], bytes(100_000))
    assert len((await read_frame(Recorded(honest), LARGE, check)).payload) == 100_000
    stream = Recorded(false)
    with pytest.raises(PeerMistake, match="not what"):
        await read_frame(stream, LARGE, check)
    assert max(stream.asked) < 256


@pytest.mark.parametrize(
    "header",
    [
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb(msgpack.ExtType(5, b"abc")),
        msgpack.packb(list(range(9))),
        msgpack.packb({str(i): i for i in range(9)}),
        msgpack.packb("x" * 33),
        msgpack.packb(b"x" * 33),
        msgpack.packb([[[[[1]]]]]),
        msgpack.packb({"a": {"b": {"c": {"d": {}}}}}),
        b"\x81\x01\x01",  # an integer as key
        b"\x81\x90\x01",  # a list as key
        b"\xa2\xff\xff",  # no UTF-8
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32-1 items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 200,
        b"\x01\x02",  # two values
        b"\xc1",
        b"",
    ],
)
def test_headers_outside_the_limits(header: bytes) -> None:
    with pytest.raises(PeerMistake):
        decode_header(header, SMALL)


def test_a_header_that_promises_arrays_costs_little_memory() -> None:
    bomb = b"\xdc\x01\x00" * 2_700  # 256 items a level, as deep as the header is long
    tracemalloc.start()
    with pytest.raises(PeerMistake):
        decode_header(bomb, limits.EXPERTS_REPLY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * limits.MIB


@given(st.binary(max_size=300))
def test_random_headers_raise_nothing_but_peer_mistakes(data: bytes) -> None:
    with contextlib.suppress(PeerMistake):
        decode_header(data, SMALL)


@given(st.binary(max_size=60), st.integers(0, 300), st.integers(0, 2_000))
async def test_random_frames_raise_only_peer_mistakes(data: bytes, header_bytes: int, payload_bytes: int) -> None:
    frame = struct.pack("<II", header_bytes, payload_bytes) + data
    with contextlib.suppress(PeerMistake, EOFError):
        await read_frame(Recorded(frame), SMALL)
    with contextlib.suppress(PeerMistake):
        split_frame(frame, SMALL)


def test_split_frame() -> None:
    data = encode_frame([1], b"ab") + b"rest"
    frame, end = split_frame(data, SMALL)
    assert (frame, data[end:]) == (([1], b"ab"), b"rest")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from("abc"), JUNK, max_size=3) | st.lists(JUNK, max_size=3) | JUNK)
def test_fields_of_any_header(header: Any) -> None:
    for shape, key in ((dict, "a"), (list, 1)):
        for read in (
            lambda fields, key: fields.integer(key, 0, 10),
            lambda fields, key: fields.number(key, 0.0, 10.0),
            lambda fields, key: fields.flag(key),
            lambda fields, key: fields.text(key, 3),
            lambda fields, key: fields.binary(key, 3),
            lambda fields, key: fields.integers(key, 3, 0, 10),
            lambda fields, key: fields.error(key),
        ):
            try:
                value = read(Fields(header, "junk", shape), key)
            except PeerMistake:
                continue
            assert isinstance(value, (int, float, str, bytes, list, SwarmError))


def test_fields_read_what_they_promise() -> None:
    fields = Fields({"i": 3, "n": 0.5, "t": "x", "b": b"y", "f": True, "l": [1, 2], "none": None}, "a message")
    assert (fields.integer("i", 0, 3), fields.number("n", 0, 1)) == (3, 0.5)
    assert (fields.text("t", 1), fields.binary("b", 1)) == ("x", b"y")
    assert fields.flag("f")
    assert fields.integers("l", 2, 1, 2) == [1, 2]
    assert fields.has("i")
    assert not fields.has("none")
    assert not fields.has("missing")
    for wrong in (
        lambda: fields.integer("i", 0, 2),
        lambda: fields.integer("f", 0, 3),
        lambda: fields.integers("l", 1, 1, 2),
        lambda: fields.integers("l", 2, 2, 2),
        lambda: fields.text("t", 5, chars_min=2),
        lambda: fields.integer("missing", 0, 1),
        lambda: Fields({"n": float("nan")}, "m").number("n", 0, 1),
        lambda: Fields([1], "m"),
    ):
        with pytest.raises(PeerMistake):
            wrong()


def test_an_error_crosses_the_wire_and_stays_small() -> None:
    error = ExpertsUnavailable("worker lost", layer=3, experts=[1, 2], peer="12D3", cause="timeout")
    header = {"error": decode_header(msgpack.packb(bounded_error(error)), limits.EXPERTS_REPLY)}
    back = Fields(header, "m").error("error")
    assert (type(back), back.message, back.details) == (ExpertsUnavailable, error.message, error.details)

    huge = SwarmError(
        "\N{SNOWMAN}" * 9_000, hint="\ud800" * 9_000, layer=2**62, experts=["x", *range(3_000)], peer="p" * 999,
        cause="c" * 999, request_id="r" * 999, path="/" * 999, retry_after_s=1.5, term=2**62,
    )  # fmt: skip
    packed = msgpack.packb(bounded_error(huge))
    assert len(packed) < 4 * limits.KIB
    decode_header(packed, limits.EXPERTS_REPLY)


def test_rows_of_both_types() -> None:
    x = np.arange(64, dtype="<f4").reshape(2, 32)
    assert np.array_equal(decode_rows(b"\0\0" + x.tobytes(), F32, 2, 32, offset=2), x)
    blocks = np.zeros((2, 68), np.uint8)
    assert decode_rows(blocks, Q8_0, 2, 64).shape == (2, 68)
    assert (row_bytes(F32, 33), row_bytes(Q8_0, 64)) == (132, 68)
    for dtype, width in ((Q8_0, 33), (2, 32), (-1, 32)):
        with pytest.raises(PeerMistake):
            row_bytes(dtype, width)
    with pytest.raises(PeerMistake, match="do not fit"):
        decode_rows(x.tobytes()[:-1], F32, 2, 32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(bad: float) -> None:
    x = np.zeros((2, 32), "<f4")
    x[1, 31] = bad
    with pytest.raises(PeerMistake, match="finite"):
        decode_rows(x, F32, 2, 32)
    blocks = np.zeros((2, 68), np.uint8)
    blocks[1, 34:36] = np.array([bad], "<f2").view(np.uint8)
    with pytest.raises(PeerMistake, match="finite"):
        decode_rows(blocks, Q8_0, 2, 64)
