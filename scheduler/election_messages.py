"""What backbone peers say to each other in an election, and its plain form for the wire.

`to_plain` gives a short tuple of numbers, flags and bytes, ready for msgpack; `from_plain` reads such a one within
bounds, or raises PeerMistake. Signed records travel as their canonical bytes. Every message names the version of
the backbone that acts for its sender, so that whoever is behind is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from capabilities.backbone import (
    ENACTMENT_BYTES_MAX,
    MEMBERS_MAX,
    SET_BYTES_MAX,
    STORED_BYTES_MAX,
    BackboneSet,
    Enactment,
    Stored,
)
from capabilities.certificates import MANDATE_BYTES_MAX, VOTE_BYTES_MAX, Mandate, Vote
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, Plain

WORDS_MAX: Final = MEMBERS_MAX + 1
"""Members of two versions that differ by one."""

MESSAGE_BYTES_MAX: Final = ENACTMENT_BYTES_MAX + SET_BYTES_MAX + WORDS_MAX * (STORED_BYTES_MAX + 4) + 64
"""The longest message, a BackboneUpdate, as msgpack. All others stay under 3 KiB."""


@dataclass(frozen=True, slots=True)
class PreVoteRequest:
    """Would you vote for me in `term`? `proof`, a member's vote, and the newest `mandate` show why it is that high."""

    version: int
    term: int
    proof: Vote | None
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class PreVoteReply:
    """If not granted, why: `vote`, the sender's last if not older than `term`; `mandate`, if newer than the asker's."""

    version: int
    term: int
    granted: bool
    vote: Vote | None
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Vote for me in `term`. `transfer`: the leader asked the sender to take over, so that it lives is no obstacle.

    `proof` and `mandate` as in PreVoteRequest.
    """

    version: int
    term: int
    transfer: bool
    proof: Vote | None
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class VoteReply:
    """The vote that was asked for, or why not, as in PreVoteReply."""

    version: int
    term: int
    vote: Vote | None
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I lead `term`. The mandate comes along until the follower has shown that it has it."""

    version: int
    term: int
    number: int
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to heartbeat `number`. `term`: the newest that the sender has a mandate of; it comes along if newer.

    `eligible`: the sender may lead (it holds the trunk and is fit); `covers`: it reaches a copy of every expert.
    """

    version: int
    term: int
    number: int
    eligible: bool
    covers: bool
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class TimeoutNow:
    """The leader of `term` asks the receiver to take over at once."""

    version: int
    term: int


@dataclass(frozen=True, slots=True)
class BackboneUpdate:
    """What the sender knows of the backbone: proof of the version that acts, the next one, and who has stored that."""

    enactment: Enactment | None
    pending: BackboneSet | None
    words: tuple[Stored, ...]

    @property
    def version(self) -> int:
        return 0 if self.enactment is None else self.enactment.current.version


Message: TypeAlias = (
    PreVoteRequest
    | PreVoteReply
    | VoteRequest
    | VoteReply
    | Heartbeat
    | HeartbeatReply
    | TimeoutNow
    | BackboneUpdate
)  # fmt: skip

_KINDS: Final[tuple[type[Message], ...]] = (
    PreVoteRequest,
    PreVoteReply,
    VoteRequest,
    VoteReply,
    Heartbeat,
    HeartbeatReply,
    TimeoutNow,
    BackboneUpdate,
)
"""A message's kind on the wire is its place here; its fields follow in their order."""

_NUMBER_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}


def to_plain(message: Message) -> Plain:
    """The message as a tuple that begins with its kind."""
    kind = type(message)
    return (_NUMBER_OF[kind], *(_plain(getattr(message, name)) for name in kind.__slots__))


def _plain(value: Any) -> Plain:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if value is None:
        return b""
    plain: Plain = value if isinstance(value, int) else value.to_bytes()
    return plain


def from_plain(value: object) -> Message:
    """The message that a peer sent, as msgpack gave it (lists or tuples).

    Raises:
        PeerMistake: it is none. Signatures are for the receiver to check.
    """
    if not isinstance(value, tuple | list) or not value or type(value[0]) is not int:
        raise PeerMistake("an election message is no array that begins with its kind")
    if not 0 <= value[0] < len(_KINDS):
        raise PeerMistake(f"an election message of unknown kind {value[0]}")
    kind = _KINDS[value[0]]
    fields = Fields(value[1:], len(kind.__slots__), kind.__name__)
    return kind(*(_READ[name](fields, name) for name in kind.__slots__))


def _integer(fields: Fields, name: str) -> int:
    return fields.integer(name)


def _flag(fields: Fields, name: str) -> bool:
    return fields.flag(name)


def _record(bytes_max: int, from_bytes: Callable[[bytes], object]) -> Callable[[Fields, str], object]:
    """Reads a record or, for no bytes, None."""

    def read(fields: Fields, name: str) -> object:
        data = fields.blob(name, bytes_max)
        return from_bytes(data) if data else None

    return read


def _words(fields: Fields, name: str) -> tuple[Stored, ...]:
    return tuple(Stored.from_bytes(item) for item in fields.array(name, WORDS_MAX))


_READ: Final[dict[str, Callable[[Fields, str], Any]]] = {
    "version": _integer,
    "term": _integer,
    "number": _integer,
    "granted": _flag,
    "transfer": _flag,
    "eligible": _flag,
    "covers": _flag,
    "proof": _record(VOTE_BYTES_MAX, Vote.from_bytes),
    "vote": _record(VOTE_BYTES_MAX, Vote.from_bytes),
    "mandate": _record(MANDATE_BYTES_MAX, Mandate.from_bytes),
    "enactment": _record(ENACTMENT_BYTES_MAX, Enactment.from_bytes),
    "pending": _record(SET_BYTES_MAX, BackboneSet.from_bytes),
    "words": _words,
}
"""How each field is read; a name means the same in every message."""
