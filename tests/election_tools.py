"""A swarm's keys for tests of elections: signatures that only their signer can make, at the price of one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from capabilities.backbone import BackboneSet, Enactment, Member, Sign, Stored
from capabilities.certificates import Certificate, Vote
from scheduler.backbone_ledger import Keys

SWARM = hashlib.sha256(b"a swarm for tests").hexdigest()
OWNER = "owner"


def sign_as(peer: str) -> Sign:
    secret = b"secret of " + peer.encode()
    return lambda data: hashlib.blake2b(data, key=secret[:64]).digest()


def verify(peer: str, data: bytes, signature: bytes) -> bool:
    return sign_as(peer)(data) == signature


def verify_owner(data: bytes, signature: bytes) -> bool:
    return verify(OWNER, data, signature)


def keys_of(peer: str) -> Keys:
    return Keys(sign_as(peer), verify, verify_owner)


def vote_file(peer: str) -> bytes:
    """The name of the vote file that this peer begins with."""
    return hashlib.blake2b(peer.encode(), digest_size=16).digest()


def member(peer: str) -> Member:
    return Member(peer, vote_file(peer))


def backbone_of(peers: Iterable[str], previous: BackboneSet | None = None) -> BackboneSet:
    return BackboneSet.make(SWARM, [member(peer) for peer in peers], sign_as(OWNER), previous)


def vote_of(voter: str, leader: str, term: int = 1, version: int = 1) -> Vote:
    return Vote.cast(SWARM, version, term, leader, voter, sign_as(voter))


def certificate_of(leader: str, voters: Iterable[str], term: int = 1, version: int = 1) -> Certificate:
    return Certificate.of(vote_of(voter, leader, term, version) for voter in voters)


def enactment_of(previous: BackboneSet, current: BackboneSet, peers: Iterable[str], floor: int = 0) -> Enactment:
    """Signed by these peers, be they a quorum or not."""
    words = tuple(Stored.make(current, peer, floor, sign_as(peer)) for peer in sorted(peers))
    return Enactment(previous, current, words)
