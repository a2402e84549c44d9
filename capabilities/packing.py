"""Signed records as bytes: one value has one form, and every other form of it is refused.

A record is a msgpack array that begins with its format number. Who signs or hashes a record signs these bytes, so there
must be no second way to write it: `decode` reads strictly, builds the record, writes it again and compares. Bytes come
from hostile peers; whatever is wrong with them is a `PeerMistake`, and none of them costs more than its own length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, TypeVar

import msgpack

from capabilities.errors import PeerMistake

Plain: TypeAlias = "int | str | bytes | bool | tuple[Plain, ...]"
"""What a record is made of. No floats (they have several forms) and no maps (they have an order)."""

ITEMS_MAX: Final = 64
"""Elements of one array: the longest is a certificate's list of votes (9) or a record's fields."""

PEER_ID_CHARS_MAX: Final = 64
"""A libp2p peer id of an Ed25519 key has 52 characters."""

SWARM_ID_CHARS: Final = 64
SIGNATURE_BYTES: Final = 64
INTEGER_MAX: Final = 2**63 - 1

_BASE58: Final = frozenset("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")
_HEX: Final = frozenset("0123456789abcdef")


class OtherFormat(PeerMistake):
    """A record in a format that this version does not read: of a newer version, or of one that is long gone."""

    type = "other_format"
    default_hint = "Another version of swarmnode wrote it: bring both sides to one version (`swarmnode version`)."


class Record(Protocol):
    """What has a canonical form."""

    def to_bytes(self) -> bytes: ...


R = TypeVar("R", bound=Record)
W = TypeVar("W", bound=str)


def pack(value: Plain) -> bytes:
    """The one form of a value."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def decode(data: object, what: str, bytes_max: int, read: Callable[[object], R]) -> R:
    """The record in `data`, of at most `bytes_max` bytes.

    Raises:
        PeerMistake: it is none, or not in its canonical form.
    """
    if type(data) is not bytes or len(data) > bytes_max:
        size = f"{len(data):,} bytes" if type(data) is bytes else type(data).__name__
        raise PeerMistake(f"{what}: {size}, not up to {bytes_max:,} bytes")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            max_str_len=bytes_max,
            max_bin_len=bytes_max,
            max_array_len=ITEMS_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerMistake(f"{what}: no msgpack of a record: {error!s:.100}") from None
    record = read(value)
    if record.to_bytes() != data:
        raise PeerMistake(f"{what}: not in canonical form")
    return record


def check_not_newer(value: object, known: int, what: str) -> None:
    """OtherFormat if a record's format is past `known`: it may have any number of fields, so look at this first."""
    if isinstance(value, tuple | list) and value and type(value[0]) is int and value[0] > known:
        raise OtherFormat(f"{what}: format {value[0]}; this version reads format {known} and older ones")


class Fields:
    """Reads an array of exactly `count` fields in their order; anything unexpected is a PeerMistake naming `what`."""

    __slots__ = ("_at", "_values", "_what")

    def __init__(self, value: object, count: int, what: str) -> None:
        if not isinstance(value, tuple | list) or len(value) != count:
            raise PeerMistake(f"{what}: not an array of {count} fields")
        self._values = value
        self._what = what
        self._at = 0

    def format(self, known: int) -> None:
        """The format number, which must be the known one."""
        found = self.integer("format", INTEGER_MAX)
        if found != known:
            raise OtherFormat(f"{self._what}: format {found}; this node reads format {known}")

    def integer(self, name: str, high: int = INTEGER_MAX, low: int = 0) -> int:
        """An integer in low..high; a bool is none."""
        value = self._next()
        if type(value) is not int or not low <= value <= high:
            raise self._mistake(name, value, f"an integer in {low}..{high}")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self._next()
        if type(value) is not bool:
            raise self._mistake(name, value, "true or false")
        return value

    def text(self, name: str, bytes_max: int) -> str:
        """A text of up to `bytes_max` bytes of UTF-8."""
        value = self._next()
        if type(value) is not str or len(value.encode(errors="replace")) > bytes_max:
            raise self._mistake(name, value, f"a text of up to {bytes_max} bytes")
        return value

    def word(self, name: str, words: tuple[W, ...]) -> W:
        """One of `words`."""
        value = self._next()
        for word in words:
            if value == word:
                return word
        raise self._mistake(name, value, f"one of {', '.join(words)}")

    def blob(self, name: str, bytes_max: int, bytes_min: int = 0) -> bytes:
        """bytes_min..bytes_max bytes."""
        value = self._next()
        if type(value) is not bytes or not bytes_min <= len(value) <= bytes_max:
            raise self._mistake(name, value, f"{bytes_min}..{bytes_max} bytes")
        return value

    def signature(self) -> bytes:
        """64 bytes."""
        return self.blob("signature", SIGNATURE_BYTES, SIGNATURE_BYTES)

    def peer(self, name: str) -> str:
        """A peer id: 1 to 64 characters of base58."""
        value = self._next()
        if type(value) is not str or not 0 < len(value) <= PEER_ID_CHARS_MAX or not _BASE58.issuperset(value):
            raise self._mistake(name, value, "a peer id")
        return value

    def swarm(self) -> str:
        """A swarm id: 64 hexadecimal digits."""
        value = self._next()
        if type(value) is not str or len(value) != SWARM_ID_CHARS or not _HEX.issuperset(value):
            raise self._mistake("swarm", value, "a swarm id")
        return value

    def array(self, name: str, count_max: int) -> tuple[object, ...]:
        """An array of up to `count_max` elements, not yet judged."""
        value = self._next()
        if not isinstance(value, tuple | list) or len(value) > count_max:
            raise self._mistake(name, value, f"an array of up to {count_max}")
        return tuple(value)

    def _next(self) -> object:
        self._at += 1
        value: object = self._values[self._at - 1]
        return value

    def _mistake(self, name: str, value: object, wanted: str) -> PeerMistake:
        return PeerMistake(f"{self._what}: {name} is {value!r:.60}, not {wanted}")
