"""What is said on /swarmnode/leadership/1: a member opens a stream to each backbone peer and hears who leads.

    member     knows(term, news, record)       first, and whenever it knows more
    backbone     proof(mandate, news)          only to whom has shown to know less
    backbone     word(...)                     at every change; `still` instead if nothing changed for a second
    backbone     record(term, total, offset)   only from the leader, to members of the backbone; in pieces
    member     proof(mandate, news)            to a backbone peer that knows less

A word proves nothing by itself: a peer is believed to lead if it says so itself, in a term of which it has shown the
mandate. News is what the swarm's owner signed, and which backbone acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from capabilities.certificates import MANDATE_BYTES_MAX, Mandate
from capabilities.errors import PeerMistake
from capabilities.packing import INTEGER_MAX, PEER_ID_CHARS_MAX
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.record import NEWS_MAX, is_address
from swarmnode.wire import Fields, Frame, encode_frame

PROTOCOL: Final = "/swarmnode/leadership/1"
DIGEST_BYTES: Final = 16
_WHY_CHARS_MAX: Final = 300
_MODEL_ID_CHARS_MAX: Final = 64
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Knows:
    """`term`: the newest mandate that is on the member's disk; `news`, `record`: digests, the latter empty for none."""

    term: int
    news: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """A mandate (or None) and news, as canonical bytes in the order in which they can be checked."""

    mandate: Mandate | None
    news: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """What a backbone peer says of the leadership.

    `term`: the newest certified one that it knows; `leader`: who leads it and was heard lately, or empty. `eligible`:
    the sender may lead. `why`: why nobody leads, or why the sender cannot vote. `model`: the id of the manifest that it
    serves as the leader, or empty. `news`: the digest of the news that it has. `addresses`: where it listens, each with
    its peer id.
    """

    term: int
    leader: str
    eligible: bool
    why: str
    model: str
    news: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Still:
    """The last word still holds."""


@dataclass(frozen=True, slots=True)
class RecordPart:
    """A piece of the leader's record of `term`, which has `total` bytes; pieces come in order."""

    term: int
    total: int
    offset: int
    data: bytes


FromMember: TypeAlias = Knows | Proof
FromBackbone: TypeAlias = Word | Still | Proof | RecordPart


def encode(message: FromMember | FromBackbone) -> bytes:
    """The message as one frame. A word's texts are cut to what fits."""
    match message:
        case Knows():
            return encode_frame({"kind": "knows", "term": message.term, "news": message.news, "record": message.record})
        case Proof():
            mandate = b"" if message.mandate is None else message.mandate.to_bytes()
            return encode_frame({"kind": "proof"}, join_blobs((mandate, *message.news)))
        case Word():
            header = {
                "kind": "word",
                "term": message.term,
                "leader": message.leader,
                "eligible": message.eligible,
                "why": message.why[:_WHY_CHARS_MAX],
                "model": message.model,
                "news": message.news,
                "addresses": list(message.addresses[: limits.SWARM_ADDRESSES_PER_PEER_MAX]),
            }
            return encode_frame(header)
        case Still():
            return encode_frame({"kind": "still"})
        case RecordPart():
            header = {"kind": "record", "term": message.term, "total": message.total, "offset": message.offset}
            return encode_frame(header, message.data)


def decode_from_member(frame: Frame) -> FromMember:
    """PeerMistake unless a member may say it. Signatures are for the receiver to check."""
    fields = Fields(frame.header, "leadership message")
    match fields.text("kind", 16):
        case "knows":
            term, news = fields.integer("term", 0, INTEGER_MAX), fields.binary("news", DIGEST_BYTES, DIGEST_BYTES)
            return Knows(term, news, fields.binary("record", DIGEST_BYTES))
        case "proof":
            return _proof(frame)
        case kind:
            raise PeerMistake(f"a member says {kind!r} of the leadership")


def decode_from_backbone(frame: Frame) -> FromBackbone:
    """PeerMistake unless a backbone peer may say it. Signatures are for the receiver to check."""
    fields = Fields(frame.header, "leadership message")
    match fields.text("kind", 16):
        case "word":
            return _word(frame, fields)
        case "still":
            return Still()
        case "proof":
            return _proof(frame)
        case "record":
            return _record_part(frame, fields)
        case kind:
            raise PeerMistake(f"a backbone peer says {kind!r} of the leadership")


def _word(frame: Frame, fields: Fields) -> Word:
    model = fields.text("model", _MODEL_ID_CHARS_MAX)
    addresses = frame.header.get("addresses")
    if type(addresses) is not list or len(addresses) > limits.SWARM_ADDRESSES_PER_PEER_MAX:
        raise PeerMistake("leadership message: its addresses are no short list")
    if not all(type(address) is str and is_address(address) for address in addresses):
        raise PeerMistake("leadership message: an address is none")
    if not _HEX.issuperset(model):
        raise PeerMistake("leadership message: its model is no manifest's id")
    return Word(
        term=fields.integer("term", 0, INTEGER_MAX),
        leader=fields.text("leader", PEER_ID_CHARS_MAX),
        eligible=fields.flag("eligible"),
        why=fields.text("why", _WHY_CHARS_MAX),
        model=model,
        news=fields.binary("news", DIGEST_BYTES, DIGEST_BYTES),
        addresses=tuple(addresses),
    )


def _proof(frame: Frame) -> Proof:
    blobs = split_blobs(frame.payload, "leadership proof", 1 + NEWS_MAX)
    if not blobs or len(blobs[0]) > MANDATE_BYTES_MAX:
        raise PeerMistake("leadership proof: it does not begin with a mandate")
    return Proof(Mandate.from_bytes(blobs[0]) if blobs[0] else None, blobs[1:])


def _record_part(frame: Frame, fields: Fields) -> RecordPart:
    total = fields.integer("total", 1, limits.LEADER_RECORD_BYTES_MAX)
    offset = fields.integer("offset", 0, total - 1)
    if not 0 < len(frame.payload) <= total - offset:
        raise PeerMistake("leadership record: a piece is empty or reaches beyond the end")
    return RecordPart(fields.integer("term", 1, INTEGER_MAX), total, offset, bytes(frame.payload))
