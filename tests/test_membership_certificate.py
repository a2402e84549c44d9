"""Membership certificates: one form, everything signed, and an issuer whose word counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import PeerMistake
from capabilities.membership_certificate import MEMBERSHIP_BYTES_MAX, MembershipCertificate
from swarmnode.identity import Identity, verify

SWARM = "5a" * 32
ISSUER, MEMBER, STRANGER = (Identity.generate() for _ in range(3))


def issued(expires_at_s: int = 0) -> MembershipCertificate:
    return MembershipCertificate.issue(
        SWARM, MEMBER.peer_id, ISSUER.peer_id, ISSUER.sign, issued_at_s=1_000, expires_at_s=expires_at_s
    )


def check(certificate: MembershipCertificate, *, now_s: int | None = None, peer: str = MEMBER.peer_id) -> None:
    certificate.verify(SWARM, peer, {ISSUER.peer_id}, verify, now_s=now_s)


def test_a_member_is_known_by_it() -> None:
    certificate = MembershipCertificate.from_bytes(issued().to_bytes())
    assert certificate == issued()
    check(certificate)
    check(issued(2_000), now_s=1_999)
    check(issued(), now_s=10**12)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"swarm": "00" * 32}, "another swarm"),
        ({"peer": STRANGER.peer_id}, "another peer"),
        ({"issuer": STRANGER.peer_id}, "not in the backbone"),
        ({"issued_at_s": 1_001}, "not signed"),
        ({"expires_at_s": 9_000}, "not signed"),
        ({"signature": bytes(64)}, "not signed"),
    ],
)
def test_any_change_voids_it(change: dict[str, object], reason: str) -> None:
    with pytest.raises(PeerMistake, match=reason):
        check(replace(issued(), **change))  # type: ignore[arg-type]


def test_another_peer_cannot_show_it() -> None:
    with pytest.raises(PeerMistake, match="another peer"):
        check(issued(), peer=STRANGER.peer_id)


def test_it_ends_only_by_a_clock_that_is_trusted() -> None:
    with pytest.raises(PeerMistake, match="ended 5 s ago"):
        check(issued(2_000), now_s=2_005)
    check(issued(2_000))


def test_its_size_is_bounded_by_its_fields() -> None:
    longest = MembershipCertificate(SWARM, "1" * 64, "z" * 64, 2**63 - 1, 2**63 - 1, bytes(64))
    assert len(longest.to_bytes()) <= MEMBERSHIP_BYTES_MAX


@given(st.binary(max_size=400))
def test_junk_is_a_peers_mistake(data: bytes) -> None:
    with pytest.raises(PeerMistake):
        MembershipCertificate.from_bytes(data)


@given(at=st.integers(0, len(issued().to_bytes()) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(at: int, bit: int) -> None:
    data = bytearray(issued().to_bytes())
    data[at] ^= 1 << bit
    with pytest.raises(PeerMistake):
        check(MembershipCertificate.from_bytes(bytes(data)))
