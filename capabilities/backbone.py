"""The backbone: which peers may lead a swarm, by the word of its owner, and since when a change of it acts.

A `BackboneSet` lists the members, signed by the owner's key and chained to the version before, from which it differs by
one member: so any majority of a version shares a member with any majority of the next one. Two steps apart they may
share none. Version n+1 therefore acts only once majorities of n and of n+1 have stored it, and from then on they vote
under n-1 no more. The proof is an `Enactment`: both sets and the members' signed `Stored`. Each of those names the
highest term that its signer knew; no term up to the highest of them (the `floor`) may be voted on under the new
version, since an older version's quorum may have given it away already.

A member is a peer with its *vote file*, the random name of the file in which it remembers its votes. Who lost that file
does not know what it voted; it finds another name in the set than its own, and may take part only when removed and
added anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from capabilities.errors import PeerMistake
from capabilities.packing import INTEGER_MAX, SIGNATURE_BYTES, Fields, decode, pack

Sign: TypeAlias = Callable[[bytes], bytes]
"""Data to its signature (64 bytes) by the own key."""

Verify: TypeAlias = Callable[[str, bytes, bytes], bool]
"""Peer id, data, signature: whether that peer signed it. False for anything malformed; never raises."""

VerifyOwner: TypeAlias = Callable[[bytes, bytes], bool]
"""Data, signature: whether the swarm's owner signed it."""

MEMBERS_MAX: Final = 9
"""Nine survive the loss of four; every member more costs each vote and heartbeat one message more."""

VOTE_FILE_BYTES: Final = 16
SET_BYTES_MAX: Final = 1_024
STORED_BYTES_MAX: Final = 320
ENACTMENT_BYTES_MAX: Final = 3_584  # two sets (970 each) and the words of at most ten members (145 each)
_DIGEST_BYTES: Final = 32
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A peer and the name of the file in which it remembers its votes (16 random bytes)."""

    peer: str
    vote_file: bytes


@dataclass(frozen=True)
class BackboneSet:
    """The members of one version, sorted by peer. `previous`: the digest of the version before; the first has none."""

    swarm: str
    version: int
    previous: bytes
    members: tuple[Member, ...]
    signature: bytes

    @classmethod
    def make(
        cls, swarm: str, members: Collection[Member], sign_as_owner: Sign, previous: BackboneSet | None = None
    ) -> BackboneSet:
        """A first version, or the one after `previous`.

        Raises:
            ValueError: no set may have these members, or none that follows `previous`.
        """
        version, digest = (1, b"") if previous is None else (previous.version + 1, previous.digest)
        unsigned = cls(swarm, version, digest, tuple(sorted(members)), b"")
        made = cls(swarm, version, digest, unsigned.members, sign_as_owner(unsigned.payload))
        try:
            cls.from_bytes(made.to_bytes())
            if previous is not None:
                made.check_follows(previous)
        except PeerMistake as mistake:
            raise ValueError(mistake.message) from None
        return made

    @cached_property
    def peers(self) -> tuple[str, ...]:
        """The members' peer ids, sorted."""
        return tuple(member.peer for member in self.members)

    @property
    def quorum(self) -> int:
        """The least number of members that is a majority."""
        return len(self.members) // 2 + 1

    def is_quorum(self, peers: Collection[str]) -> bool:
        """Whether these distinct peers hold a majority."""
        return len(set(peers) & set(self.peers)) >= self.quorum

    def seats(self, peer: str, vote_file: bytes) -> bool:
        """Whether this peer is a member with this vote file."""
        return Member(peer, vote_file) in self.members

    @cached_property
    def payload(self) -> bytes:
        """What the owner signs."""
        members = tuple((member.peer, member.vote_file) for member in self.members)
        return pack(("swarmnode backbone", _FORMAT, self.swarm, self.version, self.previous, members))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what the owner signs: names this set and no other of the same version."""
        return hashlib.sha256(self.payload).digest()

    def check_follows(self, previous: BackboneSet) -> None:
        """PeerMistake unless this is the version after `previous` and differs from it by one member."""
        if (self.swarm, self.version, self.previous) != (previous.swarm, previous.version + 1, previous.digest):
            raise PeerMistake(f"backbone version {self.version} does not follow version {previous.version}")
        if len(set(self.members) ^ set(previous.members)) != 1:
            raise PeerMistake(f"backbone version {self.version} differs by more than one member")

    def verify(self, swarm: str, verify_owner: VerifyOwner) -> None:
        """PeerMistake unless the owner of `swarm` signed this."""
        if self.swarm != swarm or not verify_owner(self.payload, self.signature):
            raise PeerMistake(f"backbone version {self.version}: not signed by the swarm's owner")

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        members = tuple((member.peer, member.vote_file) for member in self.members)
        return pack((_FORMAT, self.swarm, self.version, self.previous, members, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> BackboneSet:
        """PeerMistake unless these are the canonical bytes of a set. The signature is not checked."""
        return decode(data, "backbone set", SET_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> BackboneSet:
        fields = Fields(value, 6, "backbone set")
        fields.format(_FORMAT)
        swarm, version = fields.swarm(), fields.integer("version", low=1)
        previous = fields.blob("previous", _DIGEST_BYTES)
        members = tuple(_read_member(item) for item in fields.array("members", MEMBERS_MAX))
        peers = [member.peer for member in members]
        if not members or peers != sorted(set(peers)):
            raise PeerMistake("backbone set: its members are none, unsorted or not distinct")
        if len(previous) != (0 if version == 1 else _DIGEST_BYTES):
            raise PeerMistake("backbone set: exactly the first version follows none")
        return cls(swarm, version, previous, members, fields.signature())


def _read_member(value: object) -> Member:
    fields = Fields(value, 2, "backbone member")
    return Member(fields.peer("peer"), fields.blob("vote file", VOTE_FILE_BYTES, VOTE_FILE_BYTES))


@dataclass(frozen=True, slots=True)
class Stored:
    """A member's word: this set (by digest) is in my state file, and I knew no term beyond `floor` when I wrote it.

    It is given only by a peer for which the version before acts already.
    """

    swarm: str
    version: int
    digest: bytes
    peer: str
    floor: int
    signature: bytes

    @classmethod
    def make(cls, backbone: BackboneSet, peer: str, floor: int, sign: Sign) -> Stored:
        payload = cls(backbone.swarm, backbone.version, backbone.digest, peer, floor, b"").payload()
        return cls(backbone.swarm, backbone.version, backbone.digest, peer, floor, sign(payload))

    def payload(self) -> bytes:
        """What the member signs."""
        return pack(("swarmnode stored", _FORMAT, self.swarm, self.version, self.digest, self.peer, self.floor))

    def verify(self, backbone: BackboneSet, verify: Verify) -> None:
        """PeerMistake unless the peer said this of this very set."""
        if (self.swarm, self.version, self.digest) != (backbone.swarm, backbone.version, backbone.digest):
            raise PeerMistake(f"{self.peer} stored another backbone set than version {backbone.version}")
        if not verify(self.peer, self.payload(), self.signature):
            raise PeerMistake(f"not signed by {self.peer}: that it stored backbone version {self.version}")

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.swarm, self.version, self.digest, self.peer, self.floor, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Stored:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "stored backbone", STORED_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Stored:
        fields = Fields(value, 7, "stored backbone")
        fields.format(_FORMAT)
        return cls(
            swarm=fields.swarm(),
            version=fields.integer("version", low=2),
            digest=fields.blob("digest", _DIGEST_BYTES, _DIGEST_BYTES),
            peer=fields.peer("peer"),
            floor=fields.integer("floor"),
            signature=fields.signature(),
        )


@dataclass(frozen=True)
class Enactment:
    """Proof that `current` acts: majorities of it and of `previous` (None for the first version) have stored it.

    `words` are sorted by peer. Different peers may hold different proofs of one version; each is good.
    """

    previous: BackboneSet | None
    current: BackboneSet
    words: tuple[Stored, ...]

    @classmethod
    def of_first(cls, first: BackboneSet) -> Enactment:
        """The first version acts by the owner's word alone."""
        return cls(None, first, ())

    @classmethod
    def of(cls, previous: BackboneSet, current: BackboneSet, words: Mapping[str, Stored]) -> Enactment | None:
        """The proof, once majorities of both sets are among `words` (verified, by peer); None before."""
        if not (previous.is_quorum(words) and current.is_quorum(words)):
            return None
        return cls(previous, current, tuple(words[peer] for peer in sorted(words)))

    @property
    def floor(self) -> int:
        """No term up to this one may be voted on under `current`."""
        return max((word.floor for word in self.words), default=0)

    def verify(self, swarm: str, verify: Verify, verify_owner: VerifyOwner) -> None:
        """PeerMistake unless it proves that `current` acts."""
        self.current.verify(swarm, verify_owner)
        if self.previous is None:
            if self.current.version != 1 or self.words:
                raise PeerMistake(f"nothing shows that backbone version {self.current.version} acts")
            return
        self.previous.verify(swarm, verify_owner)
        self.current.check_follows(self.previous)
        peers = [word.peer for word in self.words]
        if not (self.previous.is_quorum(peers) and self.current.is_quorum(peers)):
            raise PeerMistake(f"too few members have stored backbone version {self.current.version}")
        for word in self.words:
            if word.peer not in self.previous.peers and word.peer not in self.current.peers:
                raise PeerMistake(f"{word.peer} is no member of backbone version {self.current.version}")
            word.verify(self.current, verify)

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        previous = b"" if self.previous is None else self.previous.to_bytes()
        words = tuple((word.peer, word.floor, word.signature) for word in self.words)  # the rest follows from `current`
        return pack((_FORMAT, previous, self.current.to_bytes(), words))

    @classmethod
    def from_bytes(cls, data: object) -> Enactment:
        """PeerMistake unless these are the canonical bytes of one. Signatures and majorities are not checked."""
        return decode(data, "enactment", ENACTMENT_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Enactment:
        fields = Fields(value, 4, "enactment")
        fields.format(_FORMAT)
        before = fields.blob("previous", SET_BYTES_MAX)
        previous = BackboneSet.from_bytes(before) if before else None
        current = BackboneSet.from_bytes(fields.blob("current", SET_BYTES_MAX))
        words = tuple(_read_word(item, current) for item in fields.array("words", MEMBERS_MAX + 1))
        peers = [word.peer for word in words]
        if peers != sorted(set(peers)):
            raise PeerMistake("enactment: its words are unsorted or not distinct")
        return cls(previous, current, words)


def _read_word(value: object, current: BackboneSet) -> Stored:
    fields = Fields(value, 3, "enactment's word")
    peer, floor = fields.peer("peer"), fields.integer("floor", INTEGER_MAX)
    signature = fields.blob("signature", SIGNATURE_BYTES, SIGNATURE_BYTES)
    return Stored(current.swarm, current.version, current.digest, peer, floor, signature)
