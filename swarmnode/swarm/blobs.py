"""Several byte strings as one, where a record holds more of them than an array may (packing.ITEMS_MAX).

u16be length | bytes | u16be length | bytes ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from capabilities.errors import PeerMistake

BLOB_BYTES_MAX: Final = 0xFFFF
_LENGTH: Final = struct.Struct(">H")


def join_blobs(blobs: Iterable[bytes]) -> bytes:
    """The one form of a list of byte strings (each up to 65,535 bytes)."""
    return b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)


def split_blobs(data: bytes | memoryview, what: str, count_max: int) -> tuple[bytes, ...]:
    """What `join_blobs` made. PeerMistake naming `what` if it is cut, or holds more than `count_max`."""
    data = bytes(data)
    found: list[bytes] = []
    at = 0
    while at < len(data):
        if len(found) == count_max:
            raise PeerMistake(f"{what}: more than {count_max}")
        begin = at + _LENGTH.size
        if begin > len(data):
            raise PeerMistake(f"{what}: cut off")
        at = begin + _LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            raise PeerMistake(f"{what}: cut off")
        found.append(data[begin:at])
    return tuple(found)
