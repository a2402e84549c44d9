"""Frames between a daemon and a child that computes for it: a small msgpack header and raw bytes, over a socket pair.

    magic (4 bytes)   header bytes (uint32)   body bytes (uint32)   header   body

Little-endian on both sides, whatever processor is emulated. Every call has a deadline: a side that hangs shows as
TimeoutError, one that is gone as EOFError or OSError, and one that speaks nonsense as ValueError.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Final

import msgpack

MAGIC: Final = b"KRN1"
HEADER_BYTES_MAX: Final = 1 << 20  # a layer's description with a program of 64 KiB and 4096 expert ids takes 0.1 MiB
BODY_BYTES_MAX: Final = 1 << 31  # 4096 rows of 131072 values in F32
_HEAD: Final = struct.Struct("<4sII")
HEAD_BYTES: Final = _HEAD.size

Header = dict[str, Any]


def pack_head(header: Header, *bodies: memoryview | bytes) -> bytes:
    """The begin of a frame, up to its body, which is `bodies` one after the other."""
    packed = msgpack.packb(header)
    size = sum(len(body) for body in bodies)
    if len(packed) > HEADER_BYTES_MAX or size > BODY_BYTES_MAX:
        raise ValueError(f"a frame of {len(packed)} and {size} bytes")
    head: bytes = _HEAD.pack(MAGIC, len(packed), size) + packed
    return head


def frame_sizes(head: bytes | bytearray, body_bytes_max: int = BODY_BYTES_MAX) -> tuple[int, int]:
    """Bytes of the header and of the body that follow the first HEAD_BYTES of a frame."""
    magic, header_bytes, body_bytes = _HEAD.unpack(head)
    if magic != MAGIC or header_bytes > HEADER_BYTES_MAX or body_bytes > body_bytes_max:
        raise ValueError(f"no frame: it begins with {bytes(magic)!r}, {header_bytes} and {body_bytes}")
    return header_bytes, body_bytes


def unpack_header(data: bytes | bytearray) -> Header:
    try:
        header = msgpack.unpackb(data, use_list=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"a header that is no msgpack: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("a header that is no map")
    return header


class Frames:
    """One end. Not thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, header: Header, *bodies: memoryview | bytes, seconds: float | None = None) -> None:
        """Send one frame whose body is `bodies` one after the other. None waits for ever."""
        head = pack_head(header, *bodies)
        ends_at = None if seconds is None else time.monotonic() + seconds
        for part in (head, *bodies):
            if len(part):
                self._end.settimeout(_left(ends_at))
                self._end.sendall(part)

    def receive(
        self, *, seconds: float | None = None, body_bytes_max: int = BODY_BYTES_MAX
    ) -> tuple[Header, bytearray]:
        """The next frame: its header and its body."""
        ends_at = None if seconds is None else time.monotonic() + seconds
        header_bytes, body_bytes = frame_sizes(self._exactly(HEAD_BYTES, ends_at), body_bytes_max)
        header = unpack_header(self._exactly(header_bytes, ends_at))
        return header, self._exactly(body_bytes, ends_at)

    def _exactly(self, count: int, ends_at: float | None) -> bytearray:
        out = bytearray(count)
        view, done = memoryview(out), 0
        while done < count:
            self._end.settimeout(_left(ends_at))
            received = self._end.recv_into(view[done:])
            if not received:
                raise EOFError("the other side has closed")
            done += received
        return out

    def close(self) -> None:
        self._end.close()


def _left(ends_at: float | None) -> float | None:
    if ends_at is None:
        return None
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is up")
    return left
