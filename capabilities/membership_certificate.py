"""That a peer belongs to a swarm: the signed word of a backbone peer, which anybody can check without asking.

It is given on admission, shown at each member hello and carried by each advert. It stands and falls with its issuer:
who is not in a backbone set (any more) vouches for nobody, whatever date its word bears, so its holders have theirs
renewed by another backbone peer. Canonical bytes, like all signed records (packing.py).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from capabilities.backbone import Sign, Verify
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, decode, pack

MEMBERSHIP_BYTES_MAX: Final = 352  # 64 + 2 * 64 + 64 bytes of fields, two times and the heads of all
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class MembershipCertificate:
    """`issuer` vouches for `peer`. Times are Unix seconds of the issuer's clock; `expires_at_s` 0 means never."""

    swarm: str
    peer: str
    issuer: str
    issued_at_s: int
    expires_at_s: int
    signature: bytes

    @classmethod
    def issue(
        cls, swarm: str, peer: str, issuer: str, sign: Sign, *, issued_at_s: int, expires_at_s: int = 0
    ) -> MembershipCertificate:
        """Signed by the issuer's peer key."""
        payload = cls(swarm, peer, issuer, issued_at_s, expires_at_s, b"").payload()
        return cls(swarm, peer, issuer, issued_at_s, expires_at_s, sign(payload))

    def payload(self) -> bytes:
        """What the issuer signs."""
        fields = (self.swarm, self.peer, self.issuer, self.issued_at_s, self.expires_at_s)
        return pack(("swarmnode membership", _FORMAT, *fields))

    def verify(
        self, swarm: str, peer: str, issuers: Container[str], verify: Verify, *, now_s: int | None = None
    ) -> None:
        """Check it for a peer whose identity is proven.

        `issuers`: the peers whose word counts, those of the backbone sets. `now_s`: by which to judge its end; None
        leaves the end aside, as a receiver whose clock is not trusted should.

        Raises:
            PeerMistake: it does not make `peer` a member of `swarm`.
        """
        if (self.swarm, self.peer) != (swarm, peer):
            raise PeerMistake(f"the membership certificate that {peer} shows is of another peer or another swarm")
        if self.issuer not in issuers:
            raise PeerMistake(f"the membership certificate of {peer} is by {self.issuer}, which is not in the backbone")
        if now_s is not None and 0 < self.expires_at_s <= now_s:
            raise PeerMistake(f"the membership certificate of {peer} ended {now_s - self.expires_at_s} s ago")
        if not verify(self.issuer, self.payload(), self.signature):
            raise PeerMistake(f"not signed by {self.issuer}: the membership certificate of {peer}")

    def to_bytes(self) -> bytes:
        fields = (self.swarm, self.peer, self.issuer, self.issued_at_s, self.expires_at_s)
        return pack((_FORMAT, *fields, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> MembershipCertificate:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "membership certificate", MEMBERSHIP_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> MembershipCertificate:
        fields = Fields(value, 7, "membership certificate")
        fields.format(_FORMAT)
        return cls(
            swarm=fields.swarm(),
            peer=fields.peer("peer"),
            issuer=fields.peer("issuer"),
            issued_at_s=fields.integer("issued at"),
            expires_at_s=fields.integer("expires at"),
            signature=fields.signature(),
        )
