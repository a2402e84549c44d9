"""Adverts and heartbeats as bytes: one form each, bounded, and hostile bytes are a peer's mistake and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.advert import ADVERT_BYTES_MAX, HEARTBEAT_BYTES_MAX, Advert, Heartbeat, swarm_prefix
from capabilities.advert_content import AdvertContent, Phase, Policy, Role
from capabilities.errors import PeerMistake
from capabilities.held_experts import EXPERTS_MAX, LAYERS_MAX, HeldExperts
from tests.advert_tools import MODEL, SWARM, Speaking, usual_content, verify

PEER = "12D3KooWDtLgRHdCpFmP2UcdWrLqcWPfz8VFDvhDcUHiTJgpE7Ax"


def advert() -> Advert:
    return Speaking(PEER).make(1_764_434_000)


def heartbeat() -> Heartbeat:
    return Heartbeat.from_bytes(Speaking(PEER, sequence=1_764_434_000).heartbeat(load=700)[2:])


def test_an_advert_comes_back_and_is_of_the_size_that_the_budget_counts_on() -> None:
    data = advert().to_bytes()
    assert Advert.from_bytes(data) == advert()
    assert len(data) < 1_200


def test_a_heartbeat_takes_150_bytes() -> None:
    data = heartbeat().to_bytes()
    assert Heartbeat.from_bytes(data) == heartbeat()
    assert 140 <= len(data) <= 156 < HEARTBEAT_BYTES_MAX


def test_signatures_are_of_the_peer_and_cover_everything() -> None:
    advert().verify(verify)
    heartbeat().verify(verify)
    for change in (
        {"sequence": 5},
        {"instance": b"abcd"},
        {"lifetime_s": 200},
        {"content": usual_content(name="other")},
        {"peer": "12D3KooWEEjDoezxpDxmLCHAyu7Sw8AChfWdKrs9pdQQJxCV4Bvx"},
    ):
        with pytest.raises(PeerMistake, match="not signed by"):
            replace(advert(), **change).verify(verify)  # type: ignore[arg-type]
    for name, value in (("counter", 9), ("leaving", True), ("load", 1), ("phase", Phase.LOADING)):
        with pytest.raises(PeerMistake, match="not signed by"):
            replace(heartbeat(), **{name: value}).verify(verify)  # type: ignore[arg-type]


def test_an_advert_and_a_heartbeat_never_share_a_signature() -> None:
    assert advert().payload[:30] != heartbeat().payload()[:30]


@given(st.integers(0, 400), st.integers(0, 255))
def test_no_changed_byte_of_a_heartbeat_goes_unnoticed(at: int, byte: int) -> None:
    data = bytearray(heartbeat().to_bytes())
    at %= len(data)
    if data[at] == byte:
        return
    data[at] = byte
    with pytest.raises(PeerMistake):
        Heartbeat.from_bytes(bytes(data)).verify(verify)


@given(st.integers(0, 4_000), st.integers(0, 255))
def test_no_changed_byte_of_an_advert_goes_unnoticed(at: int, byte: int) -> None:
    data = bytearray(advert().to_bytes())
    at %= len(data)
    if data[at] == byte:
        return
    data[at] = byte
    with pytest.raises(PeerMistake):
        Advert.from_bytes(bytes(data)).verify(verify)


@given(st.binary(max_size=300))
def test_junk_is_a_peers_mistake(data: bytes) -> None:
    for read in (Advert.from_bytes, Heartbeat.from_bytes):
        with pytest.raises(PeerMistake):
            read(data)
        with pytest.raises(PeerMistake):
            read(advert().to_bytes()[: len(data)])


def with_field(position: int, value: object) -> bytes:
    fields = msgpack.unpackb(advert().to_bytes())
    fields[position] = value
    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 2),  # format
        (1, "xyz"),  # swarm
        (2, "O0l"),  # peer
        (3, b"abc"),  # instance
        (4, 0),  # sequence
        (4, 2**60),
        (6, 10),  # lifetime
        (6, 10_000),
        (7, "n" * 65),  # name
        (8, ["worker", "backbone"]),  # roles: unsorted
        (8, ["worker", "worker"]),
        (8, ["king"]),
        (11, 3),  # phase
        (12, 8),  # policy
        (13, ["a"] * 9),  # addresses
        (13, ["a" * 257]),
        (14, [["cpu"]]),  # backends
        (14, [["cpu", "x", ["f32", "f99", "f32"], ["f32", "f32", "f32"], True, True, []]]),
        (15, -1),  # memory
        (17, [[MODEL, b"\x00"]]),  # held
        (18, ["B", "A"]),  # not reached
        (19, "h" * 65),  # host
        (20, b"m" * 400),  # membership
        (21, b"s" * 63),  # signature
    ],
)
def test_fields_out_of_bounds_are_refused(position: int, value: object) -> None:
    with pytest.raises(PeerMistake):
        Advert.from_bytes(with_field(position, value))


def test_there_is_no_second_way_to_write_an_advert() -> None:
    long_form = msgpack.packb(msgpack.unpackb(advert().to_bytes()), use_single_float=True)
    assert long_form == advert().to_bytes()
    data = advert().to_bytes()
    sequence = data.index(b"\xce\x69")  # a 32-bit number; the same one in 64 bits
    longer = data[:sequence] + b"\xcf\0\0\0\0" + data[sequence + 1 :]
    assert msgpack.unpackb(longer) == msgpack.unpackb(data)
    with pytest.raises(PeerMistake, match="canonical"):
        Advert.from_bytes(longer)


def test_an_advert_that_would_be_too_long_leaves_out_what_is_held() -> None:
    scattered = random.Random(1)
    held = {layer: scattered.sample(range(4_096), 500) for layer in range(20)}
    made = Speaking(PEER).make(1, held=(HeldExperts.of(MODEL, held),))
    assert made.content.held == ()
    assert made.content.name == "laptop-of-ann"
    with pytest.raises(PeerMistake):
        Advert.from_bytes(made.to_bytes() + b"\0" * ADVERT_BYTES_MAX)


def test_what_no_advert_may_say_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="name"):
        Speaking(PEER).make(1, name="n" * 100)
    with pytest.raises(ValueError, match="unsorted"):
        Speaking(PEER).make(1, roles=(Role.WORKER, Role.BACKBONE))


def test_any_content_can_be_brought_within_the_limits() -> None:
    good = usual_content()
    (backend,) = good.backends
    devices = tuple(replace(backend, device=f"{index:02d}" + "d" * 90, name="b" * 40) for index in reversed(range(20)))
    wild = replace(
        good,
        name="n" * 100,
        host="h" * 100,
        version="v" * 100,
        roles=(Role.WORKER, Role.BACKBONE, Role.WORKER),
        addresses=("a", "b" * 300, "a", *map(str, range(20))),
        backends=(*devices, *devices),
        held=tuple(HeldExperts.of(model * 32, {0: [0]}) for model in ("ff", "aa", "bb", "bb", "cc", "dd")),
        not_reached=tuple(f"Peer{index}" for index in "987654321"),
    )
    with pytest.raises(ValueError, match="advert"):
        Speaking(PEER, content=wild).make(1)
    made = Speaking(PEER, content=wild.bounded()).make(1).content
    assert made == wild.bounded() == wild.bounded().bounded()
    assert made.addresses[:2] == ("a", "0")
    assert made.roles == (Role.BACKBONE, Role.WORKER)
    assert len(made.backends) == 8
    assert good.bounded() == good


def test_the_emptiest_advert_is_one() -> None:
    made = Speaking(PEER, content=AdvertContent()).make(1)
    assert Advert.from_bytes(made.to_bytes()).content == AdvertContent()


@given(st.booleans(), st.booleans(), st.booleans())
def test_policies_come_back(draining: bool, battery: bool, metered: bool) -> None:
    policy = Policy(draining, battery, metered)
    assert Policy.from_flags(policy.to_flags()) == policy


def test_a_swarms_prefix_needs_a_swarms_id() -> None:
    assert swarm_prefix(SWARM) == bytes.fromhex(SWARM)[:8]
    with pytest.raises(ValueError, match="64 digits"):
        swarm_prefix("5a")


# -- held experts ------------------------------------------------------------------------------------------------------

layers = st.integers(0, 200)
experts = st.frozensets(st.integers(0, 300), max_size=40)


@given(st.dictionaries(layers, experts, max_size=12))
def test_held_experts_come_back(held: dict[int, frozenset[int]]) -> None:
    made = HeldExperts.of(MODEL, held)
    again = HeldExperts.from_blob(MODEL, made.to_blob())
    assert again == made
    assert again.layers == tuple(sorted(layer for layer in held if held[layer]))
    assert again.count == sum(map(len, held.values()))
    for layer in range(0, 201, 7):
        assert again.experts_of(layer) == tuple(sorted(held.get(layer, ())))


@given(st.binary(max_size=60))
def test_junk_is_no_held_experts(blob: bytes) -> None:
    try:
        held = HeldExperts.from_blob(MODEL, blob)
    except PeerMistake:
        return
    assert held.to_blob() == blob
    assert all(0 <= layer < LAYERS_MAX for layer in held.layers)


def test_sizes_of_held_experts() -> None:
    assert len(HeldExperts.of(MODEL, dict.fromkeys(range(48), range(10, 42))).to_blob()) == 10
    scattered = random.Random(1)
    many = {layer: scattered.sample(range(256), 128) for layer in range(94)}
    assert len(HeldExperts.of(MODEL, many).to_blob()) <= 94 * 40


@pytest.mark.parametrize("held", [{0: [EXPERTS_MAX]}, {0: [-1]}, {LAYERS_MAX: [0]}, {-1: [0]}])
def test_experts_out_of_range_are_an_error_of_ours(held: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="not in"):
        HeldExperts.of(MODEL, held)


@pytest.mark.parametrize(
    "blob",
    [
        b"\0\0\1\0\0\0\0\0\1\0\1\0\1\0\0\0\0\0\1\0",  # two entries that should be one
        b"\1\0\1\0\0\0\0\0\1\0\0\0\1\0\0\0\0\0\1\0",  # out of order
        b"\0\0\1\0\0\0\0\0\0\0",  # an empty run
        b"\0\0\0\0\0\0\0\0\1\0",  # no layer
        b"\0\0\1\0\0\0\1\0\3",  # a run, written as a mask
        b"\0\0\1\0\0\0\2\0\5\0",  # a mask with an empty byte
        b"\0\0\1\0\0\0\1\0\2",  # a mask that does not begin with the lowest
        b"\xff\xff\1\0\0\0\0\0\1\0",  # a layer out of range
    ],
)
def test_other_forms_of_held_experts_are_refused(blob: bytes) -> None:
    with pytest.raises(PeerMistake):
        HeldExperts.from_blob(MODEL, blob)
