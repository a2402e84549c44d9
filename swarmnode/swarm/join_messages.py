"""What is said on /swarmnode/join/1. A stream carries one conversation, which whoever opened it begins:

    newcomer   join(invite id, wire)         a member   renew(certificate)       an owner's node   seat(swarm)
    issuer       challenge(32 bytes)         backbone     admitted(...)          anybody             seat_is(vote file)
    newcomer       proof(32 bytes)
    issuer           admitted(...)

Who wants to see before it joins begins with preview(invite id, wire) instead of join, and is told outline(JSON) instead
of being admitted; the invite is not used up by that.

Each may end with refused(error) instead. An admission brings all that a member knows: its certificate, the owner's
keys, the backbone and the bans, and where to find the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from capabilities.backbone import VOTE_FILE_BYTES
from capabilities.errors import PeerMistake, SwarmError
from capabilities.membership_certificate import MEMBERSHIP_BYTES_MAX
from capabilities.packing import SWARM_ID_CHARS
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.invites import CHALLENGE_BYTES, INVITE_ID_BYTES, PROOF_BYTES
from swarmnode.swarm.ownership import OWNER_KEY_BYTES, SALT_BYTES
from swarmnode.swarm.record import NEWS_MAX
from swarmnode.wire import Fields, Frame, bounded_error, encode_frame

PROTOCOL: Final = "/swarmnode/join/1"
_WIRE_MAX: Final = 2**16


@dataclass(frozen=True, slots=True)
class Join:
    """I have this invite. `wire` is the newcomer's wire version."""

    invite_id: bytes
    wire: int


@dataclass(frozen=True, slots=True)
class Preview:
    """I have this invite, and want to know what I would hold. As Join otherwise."""

    invite_id: bytes
    wire: int


@dataclass(frozen=True, slots=True)
class Renew:
    """I am a member by this certificate (canonical bytes); its issuer has left the backbone."""

    certificate: bytes


@dataclass(frozen=True, slots=True)
class Seat:
    """What is the name of your vote file in this swarm?"""

    swarm: str


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    proof: bytes


@dataclass(frozen=True, slots=True)
class Admitted:
    """`certificate` and `news` are canonical bytes, not yet judged; `news` in the order in which it can be checked."""

    certificate: bytes
    first_key: bytes
    salt: bytes
    addresses: tuple[str, ...]
    news: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OutlineIs:
    """JSON of outline.Outline, not yet judged."""

    data: bytes


@dataclass(frozen=True, slots=True)
class SeatIs:
    vote_file: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    error: SwarmError


Opening: TypeAlias = Join | Preview | Renew | Seat
Reply: TypeAlias = Challenge | Admitted | OutlineIs | SeatIs | Refused


def encode(message: Opening | Proof | Reply) -> bytes:
    """The message as one frame."""
    match message:
        case Join():
            return encode_frame({"kind": "join", "invite": message.invite_id, "wire": message.wire})
        case Preview():
            return encode_frame({"kind": "preview", "invite": message.invite_id, "wire": message.wire})
        case OutlineIs():
            return encode_frame({"kind": "outline"}, message.data)
        case Renew():
            return encode_frame({"kind": "renew", "certificate": message.certificate})
        case Seat():
            return encode_frame({"kind": "seat", "swarm": message.swarm})
        case Proof():
            return encode_frame({"kind": "proof", "proof": message.proof})
        case Challenge():
            return encode_frame({"kind": "challenge", "nonce": message.nonce})
        case SeatIs():
            return encode_frame({"kind": "seat_is", "vote_file": message.vote_file})
        case Refused():
            return encode_frame({"kind": "refused", "error": bounded_error(message.error)})
        case Admitted():
            header = {
                "kind": "admitted",
                "certificate": message.certificate,
                "first_key": message.first_key,
                "salt": message.salt,
                "addresses": len(message.addresses),
            }
            addresses = (address.encode() for address in message.addresses)
            return encode_frame(header, join_blobs((*addresses, *message.news)))


def decode_opening(frame: Frame) -> Opening:
    """What begins a conversation. PeerMistake if it is nothing of the kind."""
    fields = Fields(frame.header, "join message")
    match fields.text("kind", 16):
        case "join":
            return Join(fields.binary("invite", INVITE_ID_BYTES, INVITE_ID_BYTES), fields.integer("wire", 0, _WIRE_MAX))
        case "preview":
            invite_id = fields.binary("invite", INVITE_ID_BYTES, INVITE_ID_BYTES)
            return Preview(invite_id, fields.integer("wire", 0, _WIRE_MAX))
        case "renew":
            return Renew(fields.binary("certificate", MEMBERSHIP_BYTES_MAX, 1))
        case "seat":
            return Seat(fields.text("swarm", SWARM_ID_CHARS, SWARM_ID_CHARS))
        case kind:
            raise PeerMistake(f"a join stream begins with {kind!r}")


def decode_proof(frame: Frame) -> Proof:
    """The answer to a challenge. PeerMistake if it is none."""
    fields = Fields(frame.header, "join message")
    if fields.text("kind", 16) != "proof":
        raise PeerMistake("no proof follows the challenge")
    return Proof(fields.binary("proof", PROOF_BYTES, PROOF_BYTES))


def decode_reply(frame: Frame) -> Reply:
    """What the other side answers. PeerMistake if it is nothing of the kind."""
    fields = Fields(frame.header, "join message")
    match fields.text("kind", 16):
        case "challenge":
            return Challenge(fields.binary("nonce", CHALLENGE_BYTES, CHALLENGE_BYTES))
        case "seat_is":
            return SeatIs(fields.binary("vote_file", VOTE_FILE_BYTES, VOTE_FILE_BYTES))
        case "outline":
            return OutlineIs(bytes(frame.payload))
        case "refused":
            return Refused(fields.error("error"))
        case "admitted":
            count = fields.integer("addresses", 0, limits.SWARM_ADDRESSES_MAX)
            blobs = split_blobs(frame.payload, "admission", limits.SWARM_ADDRESSES_MAX + NEWS_MAX)
            return Admitted(
                certificate=fields.binary("certificate", MEMBERSHIP_BYTES_MAX, 1),
                first_key=fields.binary("first_key", OWNER_KEY_BYTES, OWNER_KEY_BYTES),
                salt=fields.binary("salt", SALT_BYTES, SALT_BYTES),
                addresses=tuple(blob.decode("ascii", "replace") for blob in blobs[:count]),
                news=blobs[count:],
            )
        case kind:
            raise PeerMistake(f"the other side of a join stream answered {kind!r}")
