"""Backbone sets, words, enactments, votes and certificates: what counts, what does not, and hostile bytes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.backbone import (
    ENACTMENT_BYTES_MAX,
    MEMBERS_MAX,
    SET_BYTES_MAX,
    STORED_BYTES_MAX,
    BackboneSet,
    Enactment,
    Member,
    Stored,
)
from capabilities.certificates import CERTIFICATE_BYTES_MAX, VOTE_BYTES_MAX, Certificate, Vote
from capabilities.errors import PeerMistake
from capabilities.packing import PEER_ID_CHARS_MAX, pack
from swarmnode.identity import Identity
from swarmnode.identity import verify as verify_ed25519
from tests.election_tools import (
    OWNER,
    SWARM,
    backbone_of,
    certificate_of,
    enactment_of,
    keys_of,
    member,
    sign_as,
    verify,
    verify_owner,
    vote_of,
)

A, B, C, D, E = "A", "B", "C", "D", "E"
THREE = backbone_of((A, B, C))
FOUR = backbone_of((A, B, C, D), THREE)
FIVE = backbone_of((A, B, C, D, E), FOUR)

RECORDS: list[Any] = [
    THREE,
    FOUR,
    Stored.make(FOUR, A, 7, sign_as(A)),
    Enactment.of_first(THREE),
    enactment_of(THREE, FOUR, (A, B, D), floor=300),
    vote_of(A, B, term=70_000),
    certificate_of(B, (A, B), term=2**40),
]


# --- One form ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_survive_their_bytes(record: Any) -> None:
    again = type(record).from_bytes(record.to_bytes())
    assert again == record
    assert again.to_bytes() == record.to_bytes()


def test_golden_bytes() -> None:
    """A change here makes old state files and other versions' votes unreadable."""
    digest = hashlib.sha256(b"".join(record.to_bytes() for record in RECORDS)).hexdigest()
    assert digest == "97c3bd808d9e8a1b7ce749eea871ee5a55bfec209c98a36fefa93caf2b7161e8"
    assert vote_of(A, B).payload() == (b"\x97\xaeswarmnode vote\x01\xd9\x40" + SWARM.encode() + b"\x01\x01\xa1B\xa1A")


def test_every_kind_of_signature_is_of_its_own_kind() -> None:
    payloads = {THREE.payload[:18], RECORDS[2].payload()[:18], vote_of(A, B).payload()[:18]}
    assert len(payloads) == 3


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RECORDS), st.data())
def test_changed_bytes_are_refused_or_mean_something_else(record: Any, data: st.DataObject) -> None:
    raw = bytearray(record.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = type(record).from_bytes(bytes(raw))
    except PeerMistake:
        return
    assert other.to_bytes() == bytes(raw)
    assert (other == record) == (bytes(raw) == record.to_bytes())


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=80) | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=40,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RECORDS), st.binary(max_size=200) | _plain.map(msgpack.packb))
def test_any_bytes_are_refused_with_the_one_error(record: Any, raw: bytes) -> None:
    with pytest.raises(PeerMistake):
        type(record).from_bytes(raw)


def _splice(value: Any, path: list[int], new: Any) -> Any:
    """`value` (nested lists) with the element at `path` replaced."""
    if not path or not isinstance(value, list) or not value:
        return new
    at = path[0] % len(value)
    return [*value[:at], _splice(value[at], path[1:], new), *value[at + 1 :]]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RECORDS), st.lists(st.integers(0, 20), min_size=1, max_size=3), _plain)
def test_a_field_of_any_other_kind_is_refused(record: Any, path: list[int], new: Any) -> None:
    value = _splice(msgpack.unpackb(record.to_bytes()), path, new)
    raw = msgpack.packb(value)
    with contextlib.suppress(PeerMistake):
        assert type(record).from_bytes(raw).to_bytes() == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x91" * 5_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        pack((1, *[0] * 60)),
        THREE.to_bytes() + b"\0",
        b"\x96\xcc\x01" + THREE.to_bytes()[2:],  # the format number in two bytes
        pack((2, SWARM, 1, b"", (("A", bytes(16)),), bytes(64))),
    ],
)
def test_chosen_hostile_bytes(raw: bytes) -> None:
    for kind in (BackboneSet, Stored, Enactment, Vote, Certificate):
        with pytest.raises(PeerMistake):
            kind.from_bytes(raw)


@pytest.mark.parametrize("raw", [None, 5, "text", [], bytearray(THREE.to_bytes())])
def test_what_is_not_bytes_is_refused(raw: object) -> None:
    with pytest.raises(PeerMistake):
        BackboneSet.from_bytes(raw)


def test_the_longest_records_fit() -> None:
    peers = [str(n) + "z" * (PEER_ID_CHARS_MAX - 1) for n in range(1, MEMBERS_MAX + 1)]
    nine = backbone_of(peers)
    eight = backbone_of(peers[:-1])
    term = 2**63 - 1
    sizes = [
        (nine, SET_BYTES_MAX),
        (Stored.make(nine, peers[0], term, sign_as(peers[0])), STORED_BYTES_MAX),
        (
            Enactment(eight, nine, enactment_of(eight, nine, [*peers, "z" * PEER_ID_CHARS_MAX], term).words),
            ENACTMENT_BYTES_MAX,
        ),
        (vote_of(peers[0], peers[1], term, term), VOTE_BYTES_MAX),
        (certificate_of(peers[0], peers, term, term), CERTIFICATE_BYTES_MAX),
    ]
    for record, limit in sizes:
        assert len(record.to_bytes()) <= limit


# --- Who is a member --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (9, 5)])
def test_a_quorum_is_a_majority(members: int, quorum: int) -> None:
    peers = [f"P{n}" for n in range(1, members + 1)]
    backbone = backbone_of(peers)
    assert backbone.quorum == quorum
    assert backbone.is_quorum(peers[:quorum])
    assert not backbone.is_quorum([*peers[: quorum - 1], *peers[: quorum - 1], "stranger"])


@pytest.mark.parametrize(
    "members",
    [[], [member(A), Member(A, bytes(16))], [member(f"P{n}") for n in range(1, 11)], [Member("0Il", bytes(16))]],
)
def test_sets_that_no_owner_makes(members: list[Member]) -> None:
    with pytest.raises(ValueError, match=r"."):
        BackboneSet.make(SWARM, members, sign_as(OWNER))


@pytest.mark.parametrize("peers", [(A, B, C), (A, B), (A, B, C, D, E), (A, B, D)])
def test_one_member_changes_at_a_time(peers: tuple[str, ...]) -> None:
    if abs(len(peers) - 3) == 1:
        backbone_of(peers, THREE).check_follows(THREE)
        return
    with pytest.raises(ValueError, match="more than one member"):
        backbone_of(peers, THREE)


def test_another_vote_file_is_another_member() -> None:
    lost = Member(C, bytes(16))
    with pytest.raises(ValueError, match="more than one member"):
        BackboneSet.make(SWARM, [member(A), member(B), lost], sign_as(OWNER), THREE)
    assert THREE.seats(C, member(C).vote_file)
    assert not THREE.seats(C, lost.vote_file)


def test_versions_are_chained() -> None:
    twin = backbone_of((A, B))
    with pytest.raises(PeerMistake, match="does not follow"):
        backbone_of((A, B, D), twin).check_follows(THREE)
    with pytest.raises(PeerMistake, match="does not follow"):
        FIVE.check_follows(THREE)


@pytest.mark.parametrize("peers", [(A,), (A, B), (A, B, C), (A, B, C, D), (A, B, C, D, E)])
def test_majorities_of_neighbours_meet(peers: tuple[str, ...]) -> None:
    """The fact that changing by one member rests on, by exhaustion."""
    before = backbone_of(peers)
    after = backbone_of((*peers, "Z"), before)
    for some in combinations(before.peers, before.quorum):
        for others in combinations(after.peers, after.quorum):
            assert set(some) & set(others)


def test_only_the_owner_makes_sets() -> None:
    THREE.verify(SWARM, verify_owner)
    for forged in (
        replace(THREE, members=(*THREE.members, member(D))),
        replace(THREE, signature=sign_as(A)(THREE.payload)),
        replace(THREE, version=2),
    ):
        with pytest.raises(PeerMistake, match="not signed by the swarm's owner"):
            forged.verify(SWARM, verify_owner)
    with pytest.raises(PeerMistake, match="owner"):
        THREE.verify("0" * 64, verify_owner)


# --- Which version acts -----------------------------------------------------------------------------------------------


def test_a_version_acts_once_majorities_of_both_have_stored_it() -> None:
    enactment_of(THREE, FOUR, (A, B, D), floor=5).verify(SWARM, verify, verify_owner)
    assert enactment_of(THREE, FOUR, (A, B, D), floor=5).floor == 5
    two = backbone_of((A, B))
    for too_few in (
        enactment_of(THREE, FOUR, (A, B)),  # two of four
        enactment_of(THREE, FOUR, (A, D)),
        enactment_of(two, backbone_of((A, B, C), two), (A, C)),  # two of three, but only one of two
    ):
        with pytest.raises(PeerMistake, match="too few"):
            too_few.verify(SWARM, verify, verify_owner)


def test_words_become_a_proof_when_they_suffice() -> None:
    words = {peer: Stored.make(FOUR, peer, floor, sign_as(peer)) for peer, floor in ((A, 3), (D, 0))}
    assert Enactment.of(THREE, FOUR, words) is None
    words[C] = Stored.make(FOUR, C, 9, sign_as(C))
    proof = Enactment.of(THREE, FOUR, words)
    assert proof is not None
    proof.verify(SWARM, verify, verify_owner)
    assert proof.floor == 9


def test_false_proofs() -> None:
    good = enactment_of(THREE, FOUR, (A, B, D))
    other_four = backbone_of((A, B, C, E), THREE)
    stranger = Stored.make(FOUR, "X", 0, sign_as("X"))
    for false in (
        Enactment(None, FOUR, ()),
        Enactment(None, THREE, (Stored.make(THREE, A, 0, sign_as(A)),)),
        Enactment(THREE, FIVE, good.words),
        replace(good, words=(*good.words[:2], replace(good.words[2], floor=1))),  # the floor is signed
        replace(good, words=(*good.words[:2], Stored.make(other_four, D, 0, sign_as(D)))),
        replace(good, words=(*good.words, stranger)),
        replace(good, words=(good.words[0],) * 3),
        replace(good, current=replace(FOUR, signature=bytes(64))),
        replace(good, previous=replace(THREE, signature=bytes(64))),
    ):
        with pytest.raises(PeerMistake):
            false.verify(SWARM, verify, verify_owner)
    with pytest.raises(PeerMistake):
        good.verify("0" * 64, verify, verify_owner)


# --- Who leads --------------------------------------------------------------------------------------------------------


def test_a_quorums_votes_make_a_certificate() -> None:
    for voters in ((A, B), (B, C), (A, B, C)):
        certificate_of(B, voters).verify(THREE, verify)
    Certificate.from_bytes(certificate_of(B, (C, B)).to_bytes()).verify(THREE, verify)


def _forged(change: Callable[[Certificate], Certificate]) -> Certificate:
    return change(certificate_of(B, (A, B)))


@pytest.mark.parametrize(
    "false",
    [
        certificate_of(B, (B,)),
        certificate_of(B, (B, D)),
        certificate_of(D, (A, B)),  # the leader is no member
        certificate_of(B, (A, B), version=2),
        _forged(lambda good: replace(good, votes=(good.votes[0], good.votes[0]))),
        _forged(lambda good: replace(good, votes=(good.votes[0], replace(good.votes[0], voter=B)))),
        _forged(lambda good: replace(good, votes=(good.votes[0], vote_of(B, A)))),
        _forged(lambda good: replace(good, votes=(good.votes[0], vote_of(B, B, term=2)))),
        _forged(lambda good: replace(good, term=2)),  # a bare higher number
        _forged(lambda good: replace(good, leader=A)),
        _forged(lambda good: replace(good, swarm="0" * 64)),
        _forged(lambda good: Certificate.from_bytes(replace(good, term=2).to_bytes())),
    ],
)
def test_false_certificates(false: Certificate) -> None:
    with pytest.raises(PeerMistake):
        false.verify(THREE, verify)


def test_a_certificate_of_one_version_is_none_of_another() -> None:
    with pytest.raises(PeerMistake, match="not of backbone version 2"):
        certificate_of(B, (A, B, C)).verify(FOUR, verify)
    certificate_of(B, (A, B, C), version=2).verify(FOUR, verify)
    with pytest.raises(PeerMistake, match="2 votes, not 3"):
        certificate_of(B, (A, B), version=2).verify(FOUR, verify)


def test_with_the_keys_of_the_daemon() -> None:
    """Ed25519 keys and libp2p peer ids, as the daemon injects them."""
    owner, *peers = [Identity.generate() for _ in range(4)]
    by_id = {str(peer.peer_id): peer for peer in peers}
    members = [Member(peer, bytes(16)) for peer in by_id]
    backbone = BackboneSet.make(SWARM, members, owner.sign)
    backbone.verify(SWARM, lambda data, signature: verify_ed25519(str(owner.peer_id), data, signature))
    leader, other, _ = backbone.peers
    votes = [Vote.cast(SWARM, 1, 1, leader, voter, by_id[voter].sign) for voter in (leader, other)]
    certificate = Certificate.from_bytes(Certificate.of(votes).to_bytes())
    certificate.verify(backbone, verify_ed25519)
    assert len(certificate.to_bytes()) < 500
    forged = replace(certificate, votes=(votes[0], replace(votes[1], signature=votes[0].signature)))
    with pytest.raises(PeerMistake, match="not signed"):
        forged.verify(backbone, verify_ed25519)
    assert keys_of(A).verify(A, b"x", sign_as(A)(b"x"))
