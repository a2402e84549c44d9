"""The owner's key on disk: who has the file and its passphrase decides who leads, who belongs and who is banned.

The file is text, so that it can be printed or mailed to oneself: a frame of two lines around base64, in which the
Ed25519 seed is sealed (ChaCha20-Poly1305) under a key that scrypt derives from the passphrase. It has a checksum of its
own, so a damaged file is not mistaken for a wrong passphrase. The daemon never needs this key and never sees the
passphrase: commands sign with it and hand over what they signed.

While the key is being rotated two files exist, and the swarm's record tells which of them is the owner's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from capabilities.errors import PeerMistake, UsageError
from capabilities.packing import Fields, decode, pack
from swarmnode.durable import write_whole
from swarmnode.swarm.errors import BadOwnerKey
from swarmnode.swarm.ownership import OWNER_KEY_BYTES

PASSPHRASE_CHARS_MIN: Final = 8
PASSPHRASE_CHARS_MAX: Final = 1_024

SCRYPT_LOG2_N: Final = 15
SCRYPT_R: Final = 8
SCRYPT_P: Final = 3
"""32 MiB and a quarter to half a second a guess (OWASP's recommendation of equal strength for the least memory)."""

_LOG2_N_MAX: Final = 18  # an imported file must not ask for more than 256 MiB
_P_MAX: Final = 8
_BEGIN: Final = "-----BEGIN SWARMNODE OWNER KEY-----"
_END: Final = "-----END SWARMNODE OWNER KEY-----"
_FILE_BYTES_MAX: Final = 4_096
_BODY_BYTES_MAX: Final = 512
_LINE_CHARS: Final = 64
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_CHECKSUM_BYTES: Final = 8
_FORMAT: Final = 1


class OwnerKey:
    """An unlocked key. Never logged: its repr shows the public half."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: bytes = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> OwnerKey:
        return cls(Ed25519PrivateKey.generate())

    def sign(self, data: bytes) -> bytes:
        """A 64-byte Ed25519 signature."""
        return self._private.sign(data)

    def seal(self, swarm: str, passphrase: str) -> SealedKey:
        """The key as it may be stored. UsageError for a passphrase that is too short or too long."""
        derived = _bounded(passphrase)
        salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
        bare = SealedKey(swarm, self.public, SCRYPT_LOG2_N, SCRYPT_P, salt, nonce, b"")
        cipher = ChaCha20Poly1305(bare.derive(derived))
        sealed = cipher.encrypt(nonce, self._private.private_bytes_raw(), bare.associated())
        return SealedKey(swarm, self.public, SCRYPT_LOG2_N, SCRYPT_P, salt, nonce, sealed)

    def __repr__(self) -> str:
        return f"OwnerKey({self.public.hex()[:16]}...)"


@dataclass(frozen=True, slots=True)
class SealedKey:
    """A key under its passphrase, with the swarm that it owns."""

    swarm: str
    public: bytes
    log2_n: int
    p: int
    salt: bytes
    nonce: bytes
    sealed: bytes

    def derive(self, passphrase: bytes) -> bytes:
        """The cipher's key. Takes a quarter of a second and 32 MiB, on purpose."""
        n = 1 << self.log2_n
        memory = 128 * SCRYPT_R * (n + self.p + 2)
        return hashlib.scrypt(passphrase, salt=self.salt, n=n, r=SCRYPT_R, p=self.p, maxmem=memory, dklen=32)

    def associated(self) -> bytes:
        """What the cipher protects besides the key: everything else in the file."""
        return pack((_FORMAT, self.swarm, self.public, self.log2_n, self.p, self.salt, self.nonce))

    def unlock(self, passphrase: str) -> OwnerKey:
        """BadOwnerKey if the passphrase is wrong."""
        derived = self.derive(_normal(passphrase))
        try:
            seed = ChaCha20Poly1305(derived).decrypt(self.nonce, self.sealed, self.associated())
        except InvalidTag:
            hint = "Try again; without it the key cannot be used, and nobody can restore it."
            raise BadOwnerKey("wrong passphrase for the owner's key", hint=hint) from None
        key = OwnerKey(Ed25519PrivateKey.from_private_bytes(seed))
        if key.public != self.public:
            raise BadOwnerKey("the owner's key file holds another key than it says")
        return key

    def to_bytes(self) -> bytes:
        fields = (self.swarm, self.public, self.log2_n, self.p, self.salt, self.nonce, self.sealed)
        return pack((_FORMAT, *fields))

    def to_text(self) -> str:
        """The file's content."""
        body = self.to_bytes()
        text = base64.b64encode(body + hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]).decode()
        lines = (text[at : at + _LINE_CHARS] for at in range(0, len(text), _LINE_CHARS))
        return "\n".join((_BEGIN, *lines, _END)) + "\n"

    @classmethod
    def from_text(cls, text: str, source: str) -> SealedKey:
        """What `to_text` gave; blank lines and lines around the frame do not matter.

        Raises:
            BadOwnerKey: naming `source`.
        """
        _, begun, rest = text.partition(_BEGIN)
        inside, ended, _ = rest.partition(_END)
        if not begun or not ended:
            raise BadOwnerKey(f"{source} holds no owner key", hint=f"It must have a line {_BEGIN}.", path=source)
        try:
            data = base64.b64decode("".join(inside.split()), validate=True)
            body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
            if hashlib.sha256(body).digest()[:_CHECKSUM_BYTES] != checksum:
                raise PeerMistake("its checksum is not its own")
            return decode(body, "owner key", _BODY_BYTES_MAX, cls._read)
        except (PeerMistake, binascii.Error, ValueError) as error:
            hint = "Use another copy of it (`swarmctl owner export` makes them)."
            raise BadOwnerKey(f"the owner key in {source} is damaged: {error}", hint=hint, path=source) from None

    @classmethod
    def _read(cls, value: object) -> SealedKey:
        fields = Fields(value, 8, "owner key")
        fields.format(_FORMAT)
        sealed_bytes = OWNER_KEY_BYTES + _TAG_BYTES
        return cls(
            swarm=fields.swarm(),
            public=fields.blob("public key", OWNER_KEY_BYTES, OWNER_KEY_BYTES),
            log2_n=fields.integer("scrypt n", _LOG2_N_MAX, 1),
            p=fields.integer("scrypt p", _P_MAX, 1),
            salt=fields.blob("salt", _SALT_BYTES, _SALT_BYTES),
            nonce=fields.blob("nonce", _NONCE_BYTES, _NONCE_BYTES),
            sealed=fields.blob("sealed key", sealed_bytes, sealed_bytes),
        )


def _normal(passphrase: str) -> bytes:
    """The same passphrase from every keyboard: one may type é as one character, another as two."""
    return unicodedata.normalize("NFC", passphrase).encode(errors="surrogateescape")


def _bounded(passphrase: str) -> bytes:
    if not PASSPHRASE_CHARS_MIN <= len(passphrase) <= PASSPHRASE_CHARS_MAX:
        raise UsageError(
            f"a passphrase has {PASSPHRASE_CHARS_MIN} to {PASSPHRASE_CHARS_MAX} characters, not {len(passphrase)}",
            hint="A few words that nobody would guess are easy to remember.",
        )
    return _normal(passphrase)


def read_key_file(path: Path) -> SealedKey:
    """The sealed key in a file. BadOwnerKey if it cannot be read or holds none."""
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise BadOwnerKey(f"there is no owner key at {path}", path=str(path)) from None
    except OSError as error:
        hint = "Check the file's owner and mode."
        raise BadOwnerKey(f"cannot read {path}: {error.strerror}", hint=hint, path=str(path)) from error
    if len(data) > _FILE_BYTES_MAX:
        raise BadOwnerKey(f"{path} is too long to hold an owner key", path=str(path))
    return SealedKey.from_text(data.decode(errors="replace"), str(path))


def export_key(key: SealedKey, target: Path) -> None:
    """A copy for safe-keeping, still under its passphrase. UsageError if the file exists or cannot be written."""
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key.to_text())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise UsageError(f"{target} exists already", hint="Name another file.", path=str(target)) from None
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", path=str(target)) from error


class OwnerKeyFile:
    """The place of one swarm's owner key in a data folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = path.with_name(f"{path.name}.next")

    @property
    def exists(self) -> bool:
        return self.path.exists() or self._next.exists()

    def save(self, key: SealedKey) -> None:
        """Keep the key (mode 0600), in place of any other."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self.path, key.to_text().encode())

    def save_next(self, key: SealedKey) -> None:
        """Keep the key that is about to follow, beside the one that still counts."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._next, key.to_text().encode())

    def read(self, public: bytes) -> SealedKey:
        """The key that counts, by its public half; a rotation that was interrupted is finished on the way.

        Raises:
            BadOwnerKey: it is not here, or the file holds another one.
        """
        if self._next.exists() and read_key_file(self._next).public == public:
            self._next.replace(self.path)
        found = read_key_file(self.path)
        if found.public != public:
            hint = "The key was rotated since: import the newest copy with `swarmctl owner import FILE`."
            raise BadOwnerKey(f"the key in {self.path} is not the swarm's owner key", hint=hint, path=str(self.path))
        return found
