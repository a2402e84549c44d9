"""Who leads a term: a member's signed vote, the certificate that a quorum of them makes, and the mandate.

A term exists by its certificate alone. Votes name the swarm, the backbone version, the term and the leader, so none of
them can be counted for anything else; a member votes once a term, whatever the version, so that no term has two
leaders. A mandate is a certificate with its backbone set: whoever knows the owner's key can check it, and nobody needs
to trust who brought it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from capabilities.backbone import MEMBERS_MAX, SET_BYTES_MAX, BackboneSet, Sign, Verify, VerifyOwner
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, decode, pack

VOTE_BYTES_MAX: Final = 320
CERTIFICATE_BYTES_MAX: Final = 1_536  # nine votes of 133 bytes and 160 for what they share
MANDATE_BYTES_MAX: Final = CERTIFICATE_BYTES_MAX + SET_BYTES_MAX + 16
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Vote:
    """`voter` says that `leader` shall lead `term`, under the backbone of that version."""

    swarm: str
    backbone_version: int
    term: int
    leader: str
    voter: str
    signature: bytes

    @classmethod
    def cast(cls, swarm: str, backbone_version: int, term: int, leader: str, voter: str, sign: Sign) -> Vote:
        payload = cls(swarm, backbone_version, term, leader, voter, b"").payload()
        return cls(swarm, backbone_version, term, leader, voter, sign(payload))

    @property
    def subject(self) -> tuple[str, int, int, str]:
        """What is voted on: votes of equal subject make a certificate."""
        return self.swarm, self.backbone_version, self.term, self.leader

    def payload(self) -> bytes:
        """What the voter signs."""
        return pack(("swarmnode vote", _FORMAT, *self.subject, self.voter))

    def verify(self, verify: Verify) -> None:
        """PeerMistake unless the voter signed this."""
        if not verify(self.voter, self.payload(), self.signature):
            raise PeerMistake(f"not signed by {self.voter}: its vote in term {self.term}")

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, *self.subject, self.voter, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Vote:
        """PeerMistake unless these are the canonical bytes of a vote. The signature is not checked."""
        return decode(data, "vote", VOTE_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Vote:
        fields = Fields(value, 7, "vote")
        fields.format(_FORMAT)
        return cls(
            swarm=fields.swarm(),
            backbone_version=fields.integer("backbone version", low=1),
            term=fields.integer("term", low=1),
            leader=fields.peer("leader"),
            voter=fields.peer("voter"),
            signature=fields.signature(),
        )


@dataclass(frozen=True)
class Certificate:
    """A quorum's votes, sorted by voter, for one leader of one term."""

    swarm: str
    backbone_version: int
    term: int
    leader: str
    votes: tuple[Vote, ...]

    @classmethod
    def of(cls, votes: Iterable[Vote]) -> Certificate:
        """From votes that agree (at least one)."""
        ordered = tuple(sorted(votes, key=lambda vote: vote.voter))
        return cls(*ordered[0].subject, ordered)

    def verify(self, backbone: BackboneSet, verify: Verify) -> None:
        """PeerMistake unless a quorum of `backbone`, distinct members, voted for this leader, who is one of them."""
        if (self.swarm, self.backbone_version) != (backbone.swarm, backbone.version):
            raise PeerMistake(f"the certificate of term {self.term} is not of backbone version {backbone.version}")
        voters = [vote.voter for vote in self.votes]
        strangers = set(voters).union((self.leader,)).difference(backbone.peers)
        if strangers or len(set(voters)) != len(voters):
            raise PeerMistake(f"the certificate of term {self.term} has votes of strangers, or one member's twice")
        if not backbone.is_quorum(voters):
            raise PeerMistake(f"the certificate of term {self.term} has {len(voters)} votes, not {backbone.quorum}")
        for vote in self.votes:
            if vote.subject != self._subject:
                raise PeerMistake(f"the certificate of term {self.term} has a vote for something else")
            vote.verify(verify)

    @property
    def _subject(self) -> tuple[str, int, int, str]:
        return self.swarm, self.backbone_version, self.term, self.leader

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        votes = tuple((vote.voter, vote.signature) for vote in self.votes)  # the rest of a vote is in the certificate
        return pack((_FORMAT, *self._subject, votes))

    @classmethod
    def from_bytes(cls, data: object) -> Certificate:
        """PeerMistake unless these are the canonical bytes of one. Votes are not checked."""
        return decode(data, "certificate", CERTIFICATE_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Certificate:
        fields = Fields(value, 6, "certificate")
        fields.format(_FORMAT)
        swarm, version = fields.swarm(), fields.integer("backbone version", low=1)
        term, leader = fields.integer("term", low=1), fields.peer("leader")
        pairs = [Fields(item, 2, "certificate's vote") for item in fields.array("votes", MEMBERS_MAX)]
        votes = tuple(Vote(swarm, version, term, leader, pair.peer("voter"), pair.signature()) for pair in pairs)
        voters = [vote.voter for vote in votes]
        if voters != sorted(set(voters)):
            raise PeerMistake("certificate: its votes are unsorted or not distinct")
        return cls(swarm, version, term, leader, votes)


@dataclass(frozen=True)
class Mandate:
    """A certificate and the backbone set under which it counts: all that anybody needs in order to check who leads.

    Versions of the backbone never go back as terms grow: once a quorum has voted under one, no quorum of an older one
    is left to vote. So a mandate of a newer term and an older backbone is the work of members that were removed.
    """

    certificate: Certificate
    backbone: BackboneSet

    @property
    def term(self) -> int:
        return self.certificate.term

    @property
    def leader(self) -> str:
        return self.certificate.leader

    def verify(self, swarm: str, verify: Verify, verify_owner: VerifyOwner) -> None:
        """PeerMistake unless a quorum of a backbone of this swarm gave this term to this leader."""
        self.backbone.verify(swarm, verify_owner)
        self.certificate.verify(self.backbone, verify)

    def check_after(self, known: Mandate) -> None:
        """PeerMistake unless an honest swarm can have given both mandates, this one not before the `known` one."""
        if self.term == known.term and self.leader != known.leader:
            raise PeerMistake(f"term {known.term} is certified for both {known.leader} and {self.leader}")
        if self.term > known.term and self.backbone.version < known.backbone.version:
            raise PeerMistake(f"term {self.term} is newer than {known.term}, but of an older backbone")

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return pack((_FORMAT, self.certificate.to_bytes(), self.backbone.to_bytes()))

    @classmethod
    def from_bytes(cls, data: object) -> Mandate:
        """PeerMistake unless these are the canonical bytes of one. Signatures are not checked."""
        return decode(data, "mandate", MANDATE_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Mandate:
        fields = Fields(value, 3, "mandate")
        fields.format(_FORMAT)
        certificate = Certificate.from_bytes(fields.blob("certificate", CERTIFICATE_BYTES_MAX))
        return cls(certificate, BackboneSet.from_bytes(fields.blob("backbone", SET_BYTES_MAX)))
