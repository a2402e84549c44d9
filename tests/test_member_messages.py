"""Messages of the member protocol: what goes in comes out, and no bytes of a peer raise anything but a PeerMistake."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import Internal, NotReady, PeerMistake
from swarmnode import limits
from swarmnode.member_messages import (
    HOLDING_MAX,
    Arithmetic,
    Assign,
    Begin,
    FromLeader,
    FromWorker,
    Hello,
    Policy,
    Progress,
    Refuse,
    decode_from_leader,
    decode_from_worker,
    encode,
)
from swarmnode.wire import Frame, split_frame

NAMES = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=32)
COUNTER = st.integers(0, 2**63)
BYTES = st.integers(0, 2**50)
HELD = st.dictionaries(
    st.integers(0, 65_535),
    st.frozensets(st.integers(0, 1023), min_size=1, max_size=40).map(lambda ids: tuple(sorted(ids))),
    max_size=5,
)
HELLOS = st.builds(
    Hello, name=NAMES, version=NAMES, wire=st.integers(0, 2**16), backend=NAMES, device=NAMES,
    threads=st.integers(0, 2**16), memory_budget_bytes=BYTES, q8_0=st.booleans(), certificate=st.binary(max_size=352),
    host=NAMES, numeric_class=NAMES, instance=NAMES, accumulates_f32=st.booleans(), measuring=st.booleans(),
    holding=st.lists(st.tuples(COUNTER, COUNTER), max_size=4).map(tuple),
)  # fmt: skip
PHASES = st.sampled_from(["fetching", "loading", "loaded", "failed"])
FROM_WORKER = (
    HELLOS
    | st.builds(Progress, COUNTER, COUNTER, PHASES, BYTES, BYTES, BYTES)
    | st.builds(Policy, st.booleans())
    | st.builds(Arithmetic, NAMES, st.booleans(), st.booleans())
)
FROM_LEADER = st.builds(Begin, COUNTER, COUNTER) | st.builds(
    Assign, COUNTER, COUNTER, NAMES, st.from_regex("[0-9a-f]{64}", fullmatch=True),
    st.lists(st.from_regex("[1-9A-Z]{1,60}", fullmatch=True), min_size=1, max_size=8).map(tuple), HELD,
)  # fmt: skip


def frame(message: FromWorker | FromLeader) -> Frame:
    data = encode(message)
    found, end = split_frame(data, limits.MEMBER_FRAME)
    assert end == len(data)
    return found


@given(FROM_WORKER)
def test_a_workers_message_comes_out_as_it_went_in(message: FromWorker) -> None:
    assert decode_from_worker(frame(message)) == message


@given(FROM_LEADER)
def test_a_leaders_message_comes_out_as_it_went_in(message: FromLeader) -> None:
    assert decode_from_leader(frame(message)) == message


def test_errors_keep_what_they_name() -> None:
    failed = decode_from_worker(frame(Progress(1, 2, "failed", 0, 0, 0, Internal("no memory", layer=3))))
    assert isinstance(failed, Progress)
    assert failed.error is not None
    assert failed.error.to_json()["layer"] == 3
    refused = decode_from_leader(frame(Refuse(NotReady("full"))))
    assert isinstance(refused, Refuse)
    assert (refused.error.type, refused.error.message) == ("not_ready", "full")


def test_names_that_reach_a_terminal_are_printable() -> None:
    header = {**HELLO, "kind": "hello", "name": "\x1b[31mred\n"}
    hello = decode_from_worker(Frame(header, b""))
    assert isinstance(hello, Hello)
    assert hello.name == "?[31mred?"


GOOD = Hello("n", "1", 1, "ggml", "CPU", 1, 2**30, True)
HELLO = {**{name: getattr(GOOD, name) for name in Hello.__slots__}, "holding": []}


def test_the_largest_hello_is_a_report() -> None:
    names = ((2**63, 2**63),) * HOLDING_MAX
    hello = Hello(
        "é" * 64, "v" * 32, 1, "b" * 128, "d" * 128, 1, 2**50, True, b"x" * 352, "h" * 64, "c" * 32, True, True,
        "i" * 32, names,
    )  # fmt: skip
    found, _ = split_frame(encode(hello), limits.MEMBER_REPORT)
    assert decode_from_worker(found) == hello


@pytest.mark.parametrize(
    "wrong",
    [{"holding": [1]}, {"holding": [1] * 10}, {"holding": [-1, 1]}, {"certificate": b"x" * 353}, {"host": "h" * 65},
     {"accumulates_f32": 1}, {"measuring": "no"}],
)  # fmt: skip
def test_hellos_that_are_none(wrong: dict[str, Any]) -> None:
    header = {"kind": "hello", **HELLO, **wrong}
    with pytest.raises(PeerMistake):
        decode_from_worker(Frame(header, b""))


def test_an_older_version_says_less() -> None:
    header = {"kind": "hello", **{name: getattr(GOOD, name) for name in Hello.__slots__[:8]}}
    assert decode_from_worker(Frame(header, b"")) == GOOD


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=70)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["hello", "progress", "policy", "arithmetic", "assign", "begin", "refuse"])
KEYS = (
    *Hello.__slots__, *Progress.__slots__, *Policy.__slots__, "model", "manifest", "sources", "error",
)  # fmt: skip
HEADERS = VALUES | st.fixed_dictionaries({"kind": KINDS | VALUES}, optional=dict.fromkeys(KEYS, VALUES))


@given(HEADERS, st.binary(max_size=60))
def test_no_header_and_no_payload_surprises(header: Any, payload: bytes) -> None:
    hostile = Frame(msgpack.unpackb(msgpack.packb(header), strict_map_key=False), payload)
    for decode in (decode_from_worker, decode_from_leader):
        with contextlib.suppress(PeerMistake):
            decode(hostile)


@given(st.dictionaries(st.sampled_from(Hello.__slots__), VALUES, min_size=1))
def test_a_hello_with_a_wrong_field_is_a_mistake_or_another_hello(wrong: dict[str, Any]) -> None:
    header = {"kind": "hello", **HELLO, **wrong}
    with contextlib.suppress(PeerMistake):
        assert isinstance(decode_from_worker(Frame(header, b"")), Hello)


def assignment(payload: bytes, **fields: Any) -> Frame:
    header = {"kind": "assign", "term": 1, "epoch": 1, "model": "m", "manifest": "0" * 64, "sources": "a", **fields}
    return Frame(header, payload)


def runs(*each: tuple[int, int, int]) -> bytes:
    return np.array(each, "<u2").tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        assignment(b"\x00" * 7),
        assignment(runs((0, 65_535, 2))),
        assignment(runs(*[(layer, 0, 65_535) for layer in range(3)])),
        assignment(b"", sources=",".join("abcdefghi")),
        assignment(b"", sources="a" * 1025),
        assignment(b"", manifest="0" * 63),
        assignment(b"", epoch=-1),
    ],
)
def test_assignments_that_are_none(wrong: Frame) -> None:
    with pytest.raises(PeerMistake):
        decode_from_leader(wrong)


def test_overlapping_runs_name_each_expert_once() -> None:
    found = decode_from_leader(assignment(runs((2, 0, 3), (2, 1, 4), (5, 7, 0))))
    assert isinstance(found, Assign)
    assert found.held == {2: (0, 1, 2, 3, 4)}


def test_the_largest_assignment_fits_a_frame() -> None:
    held = {layer: tuple(range(layer % 2, 1024, 2)) for layer in range(128)}  # no run is longer than one expert
    assign = Assign(2**63, 2**63, "m" * 64, "0" * 64, tuple(["p" * 60] * 8), held)
    assert decode_from_leader(frame(assign)) == assign
