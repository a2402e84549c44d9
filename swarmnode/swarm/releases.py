"""Whom the owner has released: what leaders held of the peer before counts no more, and it is audited like a new one.

Each peer's releases are counted; a verdict names the count that it knew, so a replay of either changes nothing. Two
records with one number say the same, whichever owner key signed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from capabilities.backbone import Sign, VerifyOwner
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, decode, pack
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs

RELEASE_BYTES_MAX: Final = 256
RELEASES_BYTES_MAX: Final = limits.RELEASES_MAX * (RELEASE_BYTES_MAX + 2)
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Release:
    """Release number `number` of `peer` (the first one is 1); at_s: when, in Unix seconds by the owner's clock."""

    swarm: str
    peer: str
    number: int
    at_s: int
    signature: bytes

    @classmethod
    def make(cls, swarm: str, peer: str, number: int, at_s: int, sign_as_owner: Sign) -> Release:
        payload = cls(swarm, peer, number, at_s, b"").payload()
        return cls(swarm, peer, number, at_s, sign_as_owner(payload))

    def payload(self) -> bytes:
        """What the owner signs."""
        return pack(("swarmnode release", _FORMAT, self.swarm, self.peer, self.number, self.at_s))

    def verify(self, swarm: str, verify_owner: VerifyOwner) -> None:
        """PeerMistake unless the owner of `swarm` signed this."""
        if self.swarm != swarm or not verify_owner(self.payload(), self.signature):
            raise PeerMistake(f"not signed by the swarm's owner: release {self.number} of {self.peer}")

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.swarm, self.peer, self.number, self.at_s, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Release:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "release", RELEASE_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Release:
        fields = Fields(value, 6, "release")
        fields.format(_FORMAT)
        swarm, peer = fields.swarm(), fields.peer("peer")
        return cls(swarm, peer, fields.integer("number", low=1), fields.integer("when"), fields.signature())


@dataclass(frozen=True)
class ReleaseList:
    """The newest release of each peer, by peer. It never shrinks."""

    by_peer: Mapping[str, Release] = field(default_factory=lambda: MappingProxyType({}))

    def number_of(self, peer: str) -> int:
        """How often the owner has released the peer."""
        known = self.by_peer.get(peer)
        return 0 if known is None else known.number

    def is_news(self, release: Release, verify_owner: VerifyOwner) -> bool:
        """Whether it is later than what is known, or the same by a key that counts where the known one's does not."""
        known = self.by_peer.get(release.peer)
        if known is None or release.number > known.number:
            return True
        if release.number < known.number or release == known:
            return False
        return not verify_owner(known.payload(), known.signature)

    def with_(self, release: Release) -> ReleaseList:
        """The list after a record (verified, and news). PeerMistake if there would be more than RELEASES_MAX."""
        found = {**self.by_peer, release.peer: release}
        if len(found) > limits.RELEASES_MAX:
            raise PeerMistake(f"a swarm has releases of {limits.RELEASES_MAX} peers at most")
        return ReleaseList(MappingProxyType(found))

    def signed_anew(self, sign_as_owner: Sign) -> tuple[Release, ...]:
        """The same by another owner key: for after a rotation."""
        return tuple(Release.make(each.swarm, each.peer, each.number, each.at_s, sign_as_owner) for each in self)

    def __iter__(self) -> Iterator[Release]:
        return (self.by_peer[peer] for peer in sorted(self.by_peer))

    def __len__(self) -> int:
        return len(self.by_peer)

    def to_bytes(self) -> bytes:
        return join_blobs(release.to_bytes() for release in self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReleaseList:
        """What `to_bytes` gave; signatures are not checked. PeerMistake for anything else."""
        releases = [Release.from_bytes(blob) for blob in split_blobs(data, "releases", limits.RELEASES_MAX)]
        peers = [release.peer for release in releases]
        if peers != sorted(set(peers)):
            raise PeerMistake("releases: unsorted or not distinct")
        return cls(MappingProxyType({release.peer: release for release in releases}))
