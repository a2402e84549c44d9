"""Whose word is the owner's: the key that a swarm began with, and the keys that followed it.

A swarm's id is the hash of its first owner key and a salt, so whoever knows the id can check the whole chain: the first
key signed a `Rotation` to the second one, and so on. A member knows the chain as it has heard it; it only grows, and of
two rotations with the same number the first one heard stands. After a rotation the old key can sign nothing new: what
it signed before and still matters is listed in the rotation by hash (`kept`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from capabilities.backbone import Sign
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, decode, pack
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs

OWNER_KEY_BYTES: Final = 32
SALT_BYTES: Final = 16
DIGEST_BYTES: Final = 32
ROTATION_BYTES_MAX: Final = 256 + limits.KEPT_RECORDS_MAX * (DIGEST_BYTES + 2)
CHAIN_BYTES_MAX: Final = 128 + limits.ROTATIONS_MAX * (ROTATION_BYTES_MAX + 2)
_FORMAT: Final = 1


def verify_signature(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the raw Ed25519 key signed `data`. False for anything malformed; never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def swarm_id(owner_key: bytes, salt: bytes) -> str:
    """The id of the swarm that begins with this owner key: 64 hexadecimal digits."""
    return hashlib.sha256(owner_key + salt).hexdigest()


@dataclass(frozen=True, slots=True)
class Rotation:
    """The swarm's owner key number `number` (the first one is 0) is `new_key`, signed by the key before it.

    `kept` are the SHA-256 hashes, sorted, of what older keys signed and what stays good.
    """

    swarm: str
    number: int
    old_key: bytes
    new_key: bytes
    kept: tuple[bytes, ...]
    signature: bytes

    def payload(self) -> bytes:
        """What the old key signs."""
        return pack(("swarmnode rotation", _FORMAT, self.swarm, self.number, self.old_key, self.new_key, self.kept))

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.swarm, self.number, self.old_key, self.new_key, self.kept, self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Rotation:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "rotation", ROTATION_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Rotation:
        fields = Fields(value, 7, "rotation")
        fields.format(_FORMAT)
        swarm, number = fields.swarm(), fields.integer("number", limits.ROTATIONS_MAX, 1)
        old_key = fields.blob("old key", OWNER_KEY_BYTES, OWNER_KEY_BYTES)
        new_key = fields.blob("new key", OWNER_KEY_BYTES, OWNER_KEY_BYTES)
        kept = fields.array("kept", limits.KEPT_RECORDS_MAX)
        hashes = tuple(each for each in kept if isinstance(each, bytes) and len(each) == DIGEST_BYTES)
        if hashes != kept or list(hashes) != sorted(set(hashes)):
            raise PeerMistake("rotation: what it keeps are no distinct, sorted hashes")
        return cls(swarm, number, old_key, new_key, hashes, fields.signature())


@dataclass(frozen=True)
class OwnerChain:
    """The owner keys of one swarm, first to newest."""

    first_key: bytes
    salt: bytes
    rotations: tuple[Rotation, ...] = ()

    @property
    def swarm(self) -> str:
        return swarm_id(self.first_key, self.salt)

    @property
    def current(self) -> bytes:
        """The key that may sign now (32 bytes)."""
        return self.rotations[-1].new_key if self.rotations else self.first_key

    @property
    def keys(self) -> tuple[bytes, ...]:
        return self.first_key, *(rotation.new_key for rotation in self.rotations)

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether this is the owner's word: by the newest key, or by an older one and kept. Never raises."""
        if verify_signature(self.current, data, signature):
            return True
        digest, keys = hashlib.sha256(data).digest(), self.keys
        return any(
            digest in rotation.kept and any(verify_signature(key, data, signature) for key in keys[: rotation.number])
            for rotation in self.rotations
        )

    def rotate(self, new_key: bytes, kept: Iterable[bytes], sign_with_current: Sign) -> Rotation:
        """The owner's record that makes `new_key` the newest one. ValueError where there cannot be one more."""
        hashes = tuple(sorted(set(kept)))
        number = len(self.rotations) + 1
        if number > limits.ROTATIONS_MAX or len(hashes) > limits.KEPT_RECORDS_MAX or new_key in self.keys:
            raise ValueError(f"no rotation number {number} that keeps {len(hashes)} records")
        payload = Rotation(self.swarm, number, self.current, new_key, hashes, b"").payload()
        return Rotation(self.swarm, number, self.current, new_key, hashes, sign_with_current(payload))

    def followed_by(self, rotation: Rotation) -> OwnerChain:
        """The chain with one rotation more; unchanged if it is known, or if one before it has not been heard yet.

        Raises:
            PeerMistake: it is of another swarm, not by the newest key, or another one with its number is known.
        """
        if rotation.number > len(self.rotations) + 1:
            return self
        if rotation.number <= len(self.rotations):
            if rotation != self.rotations[rotation.number - 1]:
                raise PeerMistake(f"another rotation {rotation.number} of the owner's key is known")
            return self
        if (rotation.swarm, rotation.old_key) != (self.swarm, self.current) or rotation.new_key in self.keys:
            raise PeerMistake(f"rotation {rotation.number} does not follow the owner's newest key")
        if not verify_signature(self.current, rotation.payload(), rotation.signature):
            raise PeerMistake(f"rotation {rotation.number} is not signed by the owner's key")
        return OwnerChain(self.first_key, self.salt, (*self.rotations, rotation))

    def to_bytes(self) -> bytes:
        rotations = join_blobs(rotation.to_bytes() for rotation in self.rotations)
        return pack((_FORMAT, self.first_key, self.salt, rotations))

    @classmethod
    def from_bytes(cls, data: object) -> OwnerChain:
        """The chain with every signature checked. PeerMistake if these are no bytes of one, or it does not hold."""
        return decode(data, "owner keys", CHAIN_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> OwnerChain:
        fields = Fields(value, 4, "owner keys")
        fields.format(_FORMAT)
        chain = cls(
            fields.blob("first key", OWNER_KEY_BYTES, OWNER_KEY_BYTES), fields.blob("salt", SALT_BYTES, SALT_BYTES)
        )
        blobs = split_blobs(fields.blob("rotations", CHAIN_BYTES_MAX), "rotations", limits.ROTATIONS_MAX)
        for blob in blobs:
            chain = chain.followed_by(Rotation.from_bytes(blob))
        if len(chain.rotations) != len(blobs):
            raise PeerMistake("owner keys: rotations are missing or out of order")
        return chain
