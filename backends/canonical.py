"""Reading msgpack that a peer sent, piece by piece, against a known structure.

`msgpack.unpackb` builds whatever the bytes describe, and sixteen megabytes of nested empty lists become a gigabyte
before any check runs. This reader is asked for what should come next (a number up to a limit, a text of at most so many
bytes) and refuses everything else. It reads the forms that msgpack-python writes for plain values; whether a number
took more bytes than it needs is for the caller, who writes the value again and compares.
"""

from __future__ import annotations

_FIXED_INT_MAX, _FIXED_MAP, _FIXED_ARRAY, _FIXED_TEXT = 0x7F, 0x80, 0x90, 0xA0
_UINTS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_BLOBS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


class CanonicalReader:
    """A position in msgpack bytes. Every method raises ValueError where something else stands, naming `what`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._pos = 0

    def number(self, high: int, what: str) -> int:
        """An integer from 0 to `high`."""
        tag = self._take(1, what)[0]
        value = tag if tag <= _FIXED_INT_MAX else self._sized(tag, _UINTS, what)
        if value > high:
            raise ValueError(f"{what} is {value:,}; the limit is {high:,}")
        return value

    def text(self, bytes_max: int, what: str) -> str:
        """A UTF-8 string of at most `bytes_max` bytes."""
        length = self._count(_FIXED_TEXT, 0x1F, _TEXTS, bytes_max, what)
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8") from None

    def blob(self, bytes_max: int, what: str) -> bytes:
        """At most `bytes_max` bytes."""
        length = self._sized(self._take(1, what)[0], _BLOBS, what)
        if length > bytes_max:
            raise ValueError(f"{what} has {length:,} bytes; the limit is {bytes_max:,}")
        return self._take(length, what)

    def items(self, count_max: int, what: str) -> int:
        """The number of elements of an array, which follow."""
        return self._count(_FIXED_ARRAY, 0x0F, _ARRAYS, count_max, what)

    def fields(self, count: int, what: str) -> None:
        """The start of a map of exactly `count` fields."""
        if self._count(_FIXED_MAP, 0x0F, _MAPS, count, what) != count:
            raise ValueError(f"{what} does not have {count} fields")

    def key(self, name: str) -> None:
        """The key `name` of a map."""
        if self.text(len(name), f"key {name}") != name:
            raise ValueError(f"key {name} is missing")

    def finish(self) -> None:
        """Nothing follows."""
        if self._pos != len(self._data):
            raise ValueError(f"{len(self._data) - self._pos:,} bytes follow its end")

    def _count(self, fixed: int, mask: int, sized: dict[int, int], count_max: int, what: str) -> int:
        tag = self._take(1, what)[0]
        count = tag & mask if tag & ~mask == fixed else self._sized(tag, sized, what)
        if count > count_max:
            raise ValueError(f"{what} has {count:,} elements; the limit is {count_max:,}")
        return count

    def _sized(self, tag: int, sized: dict[int, int], what: str) -> int:
        if tag not in sized:
            raise ValueError(f"{what} has the wrong type (msgpack 0x{tag:02x})")
        return int.from_bytes(self._take(sized[tag], what), "big")

    def _take(self, count: int, what: str) -> bytes:
        piece = self._data[self._pos : self._pos + count]
        if len(piece) != count:
            raise ValueError(f"ends inside {what}")
        self._pos += count
        return piece
