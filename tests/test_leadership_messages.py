"""What is said of the leadership: golden bytes, every message through the wire and back, PeerMistake for junk."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.backbone.leadership_messages import (
    FromBackbone,
    FromMember,
    Knows,
    Proof,
    RecordPart,
    Still,
    Word,
    decode_from_backbone,
    decode_from_member,
    encode,
)
from swarmnode.wire import Frame, encode_frame, split_frame
from tests.election_tools import backbone_of, certificate_of

LEADER = "12D3KooWMemory00000000000000000000000000000000000001".replace("0", "1")
ADDRESS = f"/ip4/192.0.2.7/tcp/11436/p2p/{LEADER}"
WORD = Word(7, LEADER, True, "", "ab" * 32, bytes(16), (ADDRESS,))


def mandate() -> Mandate:
    peers = [LEADER]
    return Mandate(certificate_of(LEADER, peers, term=7), backbone_of(peers))


def frame_of(data: bytes) -> Frame:
    frame, end = split_frame(data, limits.LEADERSHIP_FRAME)
    assert end == len(data)
    return frame


@pytest.mark.parametrize(
    "message", [Knows(7, b"n" * 16, b""), Knows(0, bytes(16), b"r" * 16), Proof(mandate(), ()), Proof(None, (b"b1",))]
)
def test_what_members_say_arrives(message: FromMember) -> None:
    assert decode_from_member(frame_of(encode(message))) == message


@pytest.mark.parametrize(
    "message", [WORD, Still(), Proof(mandate(), (b"k2", b"b1")), RecordPart(7, 10, 4, b"middle"[:4])]
)
def test_what_backbone_peers_say_arrives(message: FromBackbone) -> None:
    assert decode_from_backbone(frame_of(encode(message))) == message


def test_golden_bytes() -> None:
    assert encode(Still()).hex() == "0c00000000000000" + "81a46b696e64a57374696c6c"
    assert encode(Knows(7, bytes(16), b"")).hex() == (
        "320000000000000084a46b696e64a56b6e6f7773a47465726d07a46e657773c410" + "00" * 16 + "a67265636f7264c400"
    )


def test_a_words_texts_are_cut_to_what_fits() -> None:
    long = Word(2**62, LEADER, False, "why" * 1_000, "", bytes(16), tuple(ADDRESS for _ in range(20)))
    decoded = decode_from_backbone(frame_of(encode(long)))
    assert isinstance(decoded, Word)
    assert (len(decoded.why), len(decoded.addresses)) == (300, limits.SWARM_ADDRESSES_PER_PEER_MAX)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("term", -1),
        ("term", 2**63),
        ("leader", "x" * 65),
        ("why", "x" * 301),
        ("model", "no hex"),
        ("news", b"short"),
        ("addresses", ["no address"]),
        ("addresses", [ADDRESS] * 5),
        ("addresses", "text"),
        ("eligible", 1),
    ],
)
def test_a_word_beyond_its_bounds_is_a_mistake(field: str, value: object) -> None:
    header: dict[str, Any] = dict(frame_of(encode(WORD)).header)
    with pytest.raises(PeerMistake):
        decode_from_backbone(frame_of(encode_frame(header | {field: value})))


@pytest.mark.parametrize(
    ("total", "offset", "data"),
    [(4, 0, b"12345"), (4, 4, b"1"), (4, 2, b"123"), (4, 0, b""), (limits.LEADER_RECORD_BYTES_MAX + 1, 0, b"1")],
)
def test_a_piece_of_a_record_stays_within_it(total: int, offset: int, data: bytes) -> None:
    with pytest.raises(PeerMistake):
        decode_from_backbone(frame_of(encode(RecordPart(1, total, offset, data))))


def test_either_side_says_only_what_is_its_own() -> None:
    with pytest.raises(PeerMistake):
        decode_from_member(frame_of(encode(WORD)))
    with pytest.raises(PeerMistake):
        decode_from_backbone(frame_of(encode(Knows(1, bytes(16), b""))))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
kinds = st.sampled_from(["word", "still", "proof", "record", "knows", "x"])


headers = st.builds(lambda kind, rest: {**rest, "kind": kind}, kinds, st.dictionaries(st.text(), plain))


@given(plain | headers, st.binary())
def test_only_peer_mistakes_come_out(header: object, payload: bytes) -> None:
    for decode in (decode_from_member, decode_from_backbone):
        with suppress(PeerMistake):
            decode(Frame(header, payload))
