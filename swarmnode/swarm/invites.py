"""An invite: all that a newcomer needs, as one word to copy.

    swn1 base64url( u16be length of the record | record | first 4 bytes of SHA-256 )

Whoever has it can read the network key and, while the invite lasts, become a member: it is a secret. The length and the
checksum tell a word that was cut off from one that was mistyped.

The secret is proven, never sent: the issuer keeps only `verifier` = SHA-256(key), where key is derived from the secret.
The newcomer sends key XOR HMAC(verifier, challenge and both peer ids); the issuer takes the HMAC away again and hashes
what is left (the idea of SCRAM, RFC 5802). So neither the issuer's file nor a proof overheard lets anybody join.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from capabilities.errors import PeerMistake, UsageError
from capabilities.packing import Fields, decode, pack
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.ownership import OWNER_KEY_BYTES
from swarmnode.swarm.record import NAME_CHARS_MAX, PSK_BYTES, is_address, is_name

PREFIX: Final = "swn1"
INVITE_ID_BYTES: Final = 8
SECRET_BYTES: Final = 16
VERIFIER_BYTES: Final = 32
PROOF_BYTES: Final = 32
CHALLENGE_BYTES: Final = 32

_FAMILY: Final = "swn"
_LENGTH_BYTES: Final = 2
_CHECKSUM_BYTES: Final = 4
_RECORD_BYTES_MAX: Final = 3_000
_TIME_MAX: Final = 2**40
_ALPHABET: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_FORMAT: Final = 1
_COPY_HINT: Final = "Copy the whole word that `swarmctl invite` printed, or ask for a new one."


@dataclass(frozen=True, slots=True)
class Invite:
    """What a token says. `addresses` are the issuer's, each with its peer id. Times are Unix seconds of its clock."""

    swarm: str
    name: str
    owner_key: bytes
    psk: bytes = field(repr=False)
    issuer: str
    addresses: tuple[str, ...]
    invite_id: bytes
    secret: bytes = field(repr=False)
    issued_at_s: int
    expires_at_s: int
    uses: int

    @property
    def token(self) -> str:
        """The word to copy."""
        record = self.to_bytes()
        body = len(record).to_bytes(_LENGTH_BYTES, "big") + record
        return PREFIX + _encode(body + _checksum(body))

    @classmethod
    def parse(cls, text: str) -> Invite:
        """The invite in a token; spaces and line breaks that copying brought in do not matter.

        Raises:
            UsageError: naming what is wrong with it.
        """
        try:
            return decode(_record_of(text), "invite", _RECORD_BYTES_MAX, cls._read)
        except PeerMistake as mistake:  # the checksum fits, so somebody made it like this
            raise UsageError(f"no valid invite: {mistake.message}", hint="Ask for a new one.") from None

    def check_time(self, now_s: float) -> None:
        """NotAdmitted if the invite has ended by this machine's clock, which may be wrong: the hint says so."""
        if now_s < self.expires_at_s:
            return
        hint = (
            "Ask for a new one. If this one was made just now, the clock is wrong: this machine's says "
            f"{moment(now_s)} (UTC), and the invite was made at {moment(self.issued_at_s)}."
        )
        ago = duration(now_s - self.expires_at_s)
        raise NotAdmitted(f"the invite expired {ago} ago, by this machine's clock", hint=hint, cause="expired")

    @property
    def key(self) -> bytes:
        """What the proof shows."""
        return hashlib.sha256(b"swarmnode invite key" + self.secret).digest()

    @property
    def verifier(self) -> bytes:
        """What the issuer keeps of the secret."""
        return hashlib.sha256(self.key).digest()

    def prove(self, challenge: bytes, newcomer: str) -> bytes:
        """The proof that the issuer's challenge asks for."""
        return _xor(self.key, _mask(self.verifier, challenge, self.invite_id, newcomer, self.issuer))

    def to_bytes(self) -> bytes:
        suffix = f"/p2p/{self.issuer}"
        return pack(
            (
                _FORMAT,
                bytes.fromhex(self.swarm),
                self.name.encode(),
                self.owner_key,
                self.psk,
                self.issuer,
                join_blobs(address.removesuffix(suffix).encode() for address in self.addresses),
                self.invite_id,
                self.secret,
                self.issued_at_s,
                self.expires_at_s,
                self.uses,
            )
        )

    @classmethod
    def _read(cls, value: object) -> Invite:
        fields = Fields(value, 12, "invite")
        fields.format(_FORMAT)
        swarm = fields.blob("swarm", 32, 32).hex()
        name = fields.blob("name", NAME_CHARS_MAX, 1).decode("ascii", "replace")
        owner_key = fields.blob("owner key", OWNER_KEY_BYTES, OWNER_KEY_BYTES)
        psk = fields.blob("network key", PSK_BYTES, PSK_BYTES)
        issuer = fields.peer("issuer")
        blobs = split_blobs(fields.blob("addresses", _RECORD_BYTES_MAX), "addresses", limits.INVITE_ADDRESSES_MAX)
        addresses = tuple(f"{blob.decode('ascii', 'replace')}/p2p/{issuer}" for blob in blobs)
        if not is_name(name) or not addresses or not all(map(is_address, addresses)):
            raise PeerMistake("invite: its name or an address is none")
        return cls(
            swarm,
            name,
            owner_key,
            psk,
            issuer,
            addresses,
            invite_id=fields.blob("id", INVITE_ID_BYTES, INVITE_ID_BYTES),
            secret=fields.blob("secret", SECRET_BYTES, SECRET_BYTES),
            issued_at_s=fields.integer("issued at", _TIME_MAX),
            expires_at_s=fields.integer("expires at", _TIME_MAX),
            uses=fields.integer("uses", limits.INVITE_USES_MAX, 1),
        )


def proof_fits(verifier: bytes, proof: bytes, challenge: bytes, invite_id: bytes, newcomer: str, issuer: str) -> bool:
    """The issuer's side: whether the newcomer knows the secret."""
    if len(proof) != PROOF_BYTES:
        return False
    key = _xor(proof, _mask(verifier, challenge, invite_id, newcomer, issuer))
    return hmac.compare_digest(hashlib.sha256(key).digest(), verifier)


def new_invite_id() -> bytes:
    return secrets.token_bytes(INVITE_ID_BYTES)


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def moment(unix_s: float) -> str:
    """A date and time (UTC) for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(unix_s, 0), 2**40)))


def duration(seconds: float) -> str:
    """About how long, for people."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if (count := int(seconds // size)) >= 2:
            return f"{count} {unit}s"
    return f"{max(0, round(seconds))} seconds"


def _mask(verifier: bytes, challenge: bytes, invite_id: bytes, newcomer: str, issuer: str) -> bytes:
    message = pack(("swarmnode join", challenge, invite_id, newcomer, issuer))
    return hmac.digest(verifier, message, "sha256")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _record_of(text: str) -> bytes:
    """The record in a token whose form is right. UsageError naming what is not."""
    if len(text) > limits.INVITE_TOKEN_CHARS_MAX:
        raise UsageError(f"no invite: {len(text)} characters are too many for one", hint=_COPY_HINT)
    word = "".join(text.split())
    if not word.startswith(PREFIX):
        if word.startswith(_FAMILY):
            message = f"an invite of another kind ({word[:4]!r}); this version reads {PREFIX}"
            raise UsageError(message, hint="Install the version that the swarm uses.")
        raise UsageError(f"no invite: an invite begins with {PREFIX}", hint=_COPY_HINT)
    body = word.removeprefix(PREFIX)
    for at, character in enumerate(body):
        if character not in _ALPHABET:
            message = f"the invite is mistyped: character {at + len(PREFIX) + 1} is {character!r}, which none contains"
            raise UsageError(message, hint=_COPY_HINT)
    length = 0 if len(body) < 4 else int.from_bytes(_decode(body[:4])[:_LENGTH_BYTES], "big")
    whole = -(-(_LENGTH_BYTES + length + _CHECKSUM_BYTES) * 4 // 3)
    if len(body) < whole or not length:
        raise UsageError("the invite is cut off, or its beginning is mistyped", hint=_COPY_HINT)
    data = _decode(body)
    framed, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) != whole or _checksum(framed) != checksum or _encode(data) != body:
        message = (
            "the invite is mistyped: its checksum does not fit"
            if len(body) == whole
            else ("the invite is mistyped or something follows it: it is longer than it says")
        )
        raise UsageError(message, hint=_COPY_HINT)
    return framed[_LENGTH_BYTES:]


def _decode(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return b""  # no number of characters that base64 gives
