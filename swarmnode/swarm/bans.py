"""Who may not take part, by the owner's word.

A `Ban` says of one peer that it is banned, or is so no more. Sequences grow through the whole swarm, and of two records
on a peer the later one counts; a lifted ban therefore stays in the list, or a replay of the old one would ban again.
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

BAN_BYTES_MAX: Final = 256
BANS_BYTES_MAX: Final = limits.BANS_MAX * (BAN_BYTES_MAX + 2)
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Ban:
    """`banned` False lifts an earlier ban of `peer`."""

    swarm: str
    peer: str
    sequence: int
    banned: bool
    signature: bytes

    @classmethod
    def make(cls, swarm: str, peer: str, sequence: int, banned: bool, sign_as_owner: Sign) -> Ban:
        payload = cls(swarm, peer, sequence, banned, b"").payload()
        return cls(swarm, peer, sequence, banned, sign_as_owner(payload))

    def payload(self) -> bytes:
        """What the owner signs."""
        return pack(("swarmnode ban", _FORMAT, self.swarm, self.peer, self.sequence, self.banned))

    def verify(self, swarm: str, verify_owner: VerifyOwner) -> None:
        """PeerMistake unless the owner of `swarm` signed this."""
        if self.swarm != swarm or not verify_owner(self.payload(), self.signature):
            raise PeerMistake(f"not signed by the swarm's owner: ban {self.sequence} of {self.peer}")

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.swarm, self.peer, self.sequence, self.banned, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Ban:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "ban", BAN_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Ban:
        fields = Fields(value, 6, "ban")
        fields.format(_FORMAT)
        return cls(
            swarm=fields.swarm(),
            peer=fields.peer("peer"),
            sequence=fields.integer("sequence", low=1),
            banned=fields.flag("banned"),
            signature=fields.signature(),
        )


@dataclass(frozen=True)
class BanList:
    """The newest record of each peer, by peer. It never shrinks."""

    by_peer: Mapping[str, Ban] = field(default_factory=lambda: MappingProxyType({}))

    def is_banned(self, peer: str) -> bool:
        ban = self.by_peer.get(peer)
        return ban is not None and ban.banned

    @property
    def banned(self) -> tuple[str, ...]:
        """The peers that are banned now, sorted."""
        return tuple(sorted(peer for peer, ban in self.by_peer.items() if ban.banned))

    @property
    def next_sequence(self) -> int:
        """For the owner's next record."""
        return max((ban.sequence for ban in self.by_peer.values()), default=0) + 1

    def is_news(self, ban: Ban) -> bool:
        """Whether it is later than what is known of the peer. Two records with one sequence: the ban counts."""
        known = self.by_peer.get(ban.peer)
        return known is None or (ban.sequence, ban.banned) > (known.sequence, known.banned)

    def with_(self, *bans: Ban) -> BanList:
        """The list after these records (verified). Older ones change nothing.

        Raises:
            PeerMistake: there would be more than BANS_MAX.
        """
        found = dict(self.by_peer)
        for ban in bans:
            if self.is_news(ban):
                found[ban.peer] = ban
        if len(found) > limits.BANS_MAX:
            raise PeerMistake(f"a swarm has {limits.BANS_MAX} bans at most, lifted ones included")
        return BanList(MappingProxyType(found))

    def signed_anew(self, sign_as_owner: Sign) -> tuple[Ban, ...]:
        """All records by another owner key, with sequences that follow: for after a rotation."""
        first = self.next_sequence
        return tuple(
            Ban.make(ban.swarm, ban.peer, first + number, ban.banned, sign_as_owner) for number, ban in enumerate(self)
        )

    def __iter__(self) -> Iterator[Ban]:
        return (self.by_peer[peer] for peer in sorted(self.by_peer))

    def to_bytes(self) -> bytes:
        return join_blobs(ban.to_bytes() for ban in self)

    @classmethod
    def from_bytes(cls, data: bytes) -> BanList:
        """What `to_bytes` gave; signatures are not checked. PeerMistake for anything else."""
        bans = [Ban.from_bytes(blob) for blob in split_blobs(data, "bans", limits.BANS_MAX)]
        peers = [ban.peer for ban in bans]
        if peers != sorted(set(peers)):
            raise PeerMistake("bans: unsorted or not distinct")
        return cls(MappingProxyType({ban.peer: ban for ban in bans}))
