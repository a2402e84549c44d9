"""Frames: how every application protocol of a swarm puts a message on a stream.

    u32le header length | u32le payload length | header (msgpack) | payload (raw bytes)

The header says what the payload means; tensors travel raw and little-endian, so the only copy on the way out is into
the frame. A reader learns both lengths first and judges them against the protocol's `FrameLimits`, then the header, and
only then takes the payload. Whatever is wrong with the bytes of a peer is a `PeerMistake`, and nothing else is raised
for it; what the stream itself raises (a reset, the end) passes through.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Never, NoReturn, Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from capabilities.errors import PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.limits import FrameLimits

Header = Any
"""What msgpack gives: None, bool, int, float, str, bytes, list, dict. Read it through `Fields`."""

Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous bytes; a NumPy array counts as its raw bytes."""

_LENGTHS: Final = struct.Struct("<II")
LENGTHS_BYTES: Final = _LENGTHS.size


class Readable(Protocol):
    """The half of a stream that reading a frame needs."""

    async def receive_exactly(self, n: int) -> bytes: ...


def _view(data: Buffer) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


class Frame(NamedTuple):
    """One message as it came: the header decoded within limits (its fields not yet judged), the payload untouched."""

    header: Header
    payload: bytes | memoryview


def encode_frame(header: Header, *payload: Buffer) -> bytes:
    """A frame as one buffer, ready for one write. The payload may come in parts; each part is copied once."""
    packed: bytes = msgpack.packb(header)
    parts = [_view(part) for part in payload]
    return b"".join((_LENGTHS.pack(len(packed), sum(part.nbytes for part in parts)), packed, *parts))


async def read_frame(
    stream: Readable, allowed: FrameLimits, check: Callable[[Header, int], object] | None = None
) -> Frame:
    """The next frame of `stream`. `check(header, payload_bytes)` may refuse a large payload before it is read.

    Raises PeerMistake when the frame breaks `allowed` or its header is not msgpack within limits, and whatever the
    stream raises when it ends or breaks. It has no deadline of its own: only the caller knows what to expect when.
    """
    lengths = _LENGTHS.unpack(await stream.receive_exactly(LENGTHS_BYTES))
    header_bytes, payload_bytes = _check_lengths(lengths, allowed)
    if payload_bytes <= limits.EAGER_PAYLOAD_BYTES:
        data = await stream.receive_exactly(header_bytes + payload_bytes)
        # A copy of its own, not a view: NumPy is fast only on aligned memory.
        return Frame(decode_header(data[:header_bytes], allowed), bytes(data[header_bytes:]))
    header = decode_header(await stream.receive_exactly(header_bytes), allowed)
    if check is not None:
        check(header, payload_bytes)
    return Frame(header, await stream.receive_exactly(payload_bytes))


class FrameStream(Readable, Protocol):
    """What serve_frames needs of a stream (net.interface.Stream)."""

    def peek(self) -> bytearray: ...

    def receive_nowait(self, n: int) -> bytes: ...

    async def arrivals(self, take: Callable[[], bool]) -> None: ...


Later = Callable[[], Awaitable[None]]


async def serve_frames(
    stream: FrameStream,
    allowed: FrameLimits,
    handle: Callable[[Frame], Later | None],
    check: Callable[[Header, int], object] | None = None,
) -> Never:
    """Hand every frame of `stream` to `handle`, a small one in the very moment in which its last byte arrives.

    `handle` must be quick; what takes time it returns, to be awaited before the next frame is looked at. `check` is
    that of read_frame. Raises what read_frame raises, and what `handle` and the rest of its work raise.
    """
    later: list[Later] = []

    def take() -> bool:
        while len(buffer := stream.peek()) >= LENGTHS_BYTES:
            header_bytes, payload_bytes = _check_lengths(_LENGTHS.unpack_from(buffer), allowed)
            total = LENGTHS_BYTES + header_bytes + payload_bytes
            if payload_bytes > limits.EAGER_PAYLOAD_BYTES:
                return False
            if len(buffer) < total:
                return True
            data = stream.receive_nowait(total)
            header_end = LENGTHS_BYTES + header_bytes
            rest = handle(Frame(decode_header(data[LENGTHS_BYTES:header_end], allowed), data[header_end:]))
            if rest is not None:
                later.append(rest)
                return False
        return True

    while True:
        await stream.arrivals(take)
        rest = later.pop() if later else handle(await read_frame(stream, allowed, check))
        if rest is not None:
            await rest()


def _check_lengths(lengths: tuple[int, int], allowed: FrameLimits) -> tuple[int, int]:
    header_bytes, payload_bytes = lengths
    if not 0 < header_bytes <= allowed.header_bytes:
        raise PeerMistake(f"a frame announced a header of {header_bytes} bytes, not 1 to {allowed.header_bytes}")
    if payload_bytes > allowed.payload_bytes:
        raise PeerMistake(f"a frame announced {payload_bytes} bytes of payload, over {allowed.payload_bytes}")
    return lengths


def split_frame(data: bytes, allowed: FrameLimits) -> tuple[Frame, int]:
    """The frame at the start of `data` and the bytes it takes. For tests and recorded conversations."""
    if len(data) < LENGTHS_BYTES:
        raise PeerMistake("a frame ended within its lengths")
    header_bytes, payload_bytes = _LENGTHS.unpack_from(data)
    end = LENGTHS_BYTES + header_bytes + payload_bytes
    if not 0 < header_bytes <= allowed.header_bytes or payload_bytes > allowed.payload_bytes or end > len(data):
        raise PeerMistake(f"a frame of {header_bytes} and {payload_bytes} bytes is too long or was cut short")
    header = decode_header(data[LENGTHS_BYTES : LENGTHS_BYTES + header_bytes], allowed)
    return Frame(header, data[LENGTHS_BYTES + header_bytes : end]), end


def decode_header(data: bytes | memoryview, allowed: FrameLimits) -> Header:
    """msgpack with hard limits: no extension types, only str and bytes as keys, few items, short texts, shallow.

    msgpack makes room for an array when it meets its length, so a false length costs at most `items` pointers a level.
    """
    try:
        header = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=allowed.text_bytes,
            max_bin_len=allowed.text_bytes,
            max_array_len=allowed.items,
            max_map_len=allowed.items,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerMistake(f"a header is no msgpack within the limits: {error!s:.200}") from None
    if type(header) is list or type(header) is dict:
        _check_depth(header, limits.HEADER_DEPTH_MAX)
    return header


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _check_depth(container: list[Any] | dict[Any, Any], levels: int) -> None:
    """Raise PeerMistake when containers nest deeper than `levels`; recursion ends with them."""
    if levels == 0:
        raise PeerMistake(f"a header nests deeper than {limits.HEADER_DEPTH_MAX} levels")
    for item in container.values() if isinstance(container, dict) else container:
        if type(item) is list or type(item) is dict:
            _check_depth(item, levels - 1)


class Fields:
    """Typed reading of a header's fields, by name (a map) or position (an array); anything unexpected is a PeerMistake.

    `name` is the message's, for the error. Fields that nobody reads are allowed, so that a newer peer may add some.
    """

    __slots__ = ("_fields", "_name")

    def __init__(self, header: Header, name: str, shape: type[dict[Any, Any]] | type[list[Any]] = dict) -> None:
        if type(header) is not shape:
            raise PeerMistake(f"{name}: the header is a {type(header).__name__}, not a {shape.__name__}")
        self._fields: Mapping[Any, Any] | Sequence[Any] = header
        self._name = name

    def has(self, key: str | int) -> bool:
        """Whether the field is there and not None."""
        return self._get(key, optional=True) is not None

    def integer(self, key: str | int, low: int, high: int) -> int:
        """An integer in low..high, both included. A bool is none."""
        value = self._get(key)
        if type(value) is not int or not low <= value <= high:
            self._fail(key, value, f"an integer in {low}..{high}")
        return value

    def number(self, key: str | int, low: float, high: float) -> float:
        """A finite number in low..high."""
        value = self._get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            self._fail(key, value, f"a number in {low}..{high}")
        return float(value)

    def flag(self, key: str | int) -> bool:
        """True or False."""
        value = self._get(key)
        if type(value) is not bool:
            self._fail(key, value, "true or false")
        return value

    def text(self, key: str | int, chars_max: int, chars_min: int = 0) -> str:
        """A string of chars_min..chars_max characters."""
        value = self._get(key)
        if type(value) is not str or not chars_min <= len(value) <= chars_max:
            self._fail(key, value, f"a text of {chars_min}..{chars_max} characters")
        return value

    def binary(self, key: str | int, size_max: int, size_min: int = 0) -> bytes:
        """A byte string of size_min..size_max bytes."""
        value = self._get(key)
        if type(value) is not bytes or not size_min <= len(value) <= size_max:
            self._fail(key, value, f"{size_min}..{size_max} bytes")
        return value

    def integers(self, key: str | int, count_max: int, low: int, high: int) -> list[int]:
        """A list of up to count_max integers in low..high."""
        value = self._get(key)
        if type(value) is not list or len(value) > count_max:
            self._fail(key, value, f"a list of up to {count_max} integers")
        if not all(type(item) is int and low <= item <= high for item in value):
            self._fail(key, value, f"integers in {low}..{high}")
        return list(value)

    def numbers(self, key: str | int, count_max: int, low: float, high: float) -> list[float]:
        """A list of up to count_max finite numbers in low..high."""
        items = Fields(self._list(key, count_max), self._name, list)
        return [items.number(i, low, high) for i in range(items.count)]

    def texts(self, key: str | int, count_max: int, chars_max: int) -> list[str]:
        """A list of up to count_max texts of up to chars_max characters."""
        items = Fields(self._list(key, count_max), self._name, list)
        return [items.text(i, chars_max) for i in range(items.count)]

    def binaries(self, key: str | int, count_max: int, size_max: int) -> list[bytes]:
        """A list of up to count_max byte strings of up to size_max bytes."""
        items = Fields(self._list(key, count_max), self._name, list)
        return [items.binary(i, size_max) for i in range(items.count)]

    @property
    def count(self) -> int:
        """How many fields there are."""
        return len(self._fields)

    def _list(self, key: str | int, count_max: int) -> list[Any]:
        value = self._get(key)
        if type(value) is not list or len(value) > count_max:
            self._fail(key, value, f"a list of up to {count_max}")
        return value

    def error(self, key: str | int) -> SwarmError:
        """A typed error that `bounded_error` made."""
        value = self._get(key)
        if type(value) is not dict or not all(type(name) is str for name in value):
            self._fail(key, value, "an error")
        return SwarmError.from_json(value)

    def _get(self, key: str | int, optional: bool = False) -> Any:
        fields = self._fields
        if isinstance(fields, dict) and key in fields:
            return fields[key]
        if isinstance(fields, list) and isinstance(key, int) and key < len(fields):
            return fields[key]
        if optional:
            return None
        raise PeerMistake(f"{self._name}: field {key!r} is missing")

    def _fail(self, key: str | int, value: Any, wanted: str) -> NoReturn:
        raise PeerMistake(f"{self._name}: field {key!r} is {value!r:.60}, not {wanted}")


def bounded_error(error: SwarmError) -> dict[str, Any]:
    """`error.to_json()` cut to what a header takes (under 4 KiB): texts shortened, details and experts limited."""
    short: dict[str, Any] = {
        "type": error.type,
        "message": _cut(error.message, limits.ERROR_MESSAGE_BYTES_MAX),
        "hint": _cut(error.hint, limits.ERROR_HINT_BYTES_MAX),
    }
    for key, value in error.details.items():
        if key == "experts" and isinstance(value, (list, tuple)):
            short[key] = [item for item in value[: limits.ERROR_EXPERTS_MAX] if type(item) is int]
        elif isinstance(value, (bool, int, float)):
            short[key] = value
        else:
            short[key] = _cut(str(value), limits.ERROR_DETAIL_BYTES_MAX)
    return short


def _cut(text: str, size_max: int) -> str:
    return text.encode(errors="replace")[:size_max].decode(errors="ignore")


# --- Tensors ----------------------------------------------------------------------------------------------------------

F32: Final = 0
"""Wire code of little-endian float32."""

Q8_0: Final = 1
"""Wire code of ggml's Q8_0: for 32 values one float16 scale and 32 int8. Only bytes here; kernels interpret them."""

Q8_0_BLOCK_VALUES: Final = 32
Q8_0_BLOCK_BYTES: Final = 34


def row_bytes(dtype: int, width: int) -> int:
    """Bytes of a row of `width` values. Raises PeerMistake for an unknown dtype or a width that Q8_0 cannot hold."""
    if dtype == F32:
        return 4 * width
    if dtype == Q8_0 and width % Q8_0_BLOCK_VALUES == 0:
        return width // Q8_0_BLOCK_VALUES * Q8_0_BLOCK_BYTES
    raise PeerMistake(f"rows of {width} values cannot have wire dtype {dtype}")


def decode_rows(
    data: Buffer, dtype: int, rows: int, width: int, offset: int = 0, *, finite: bool = True
) -> NDArray[np.float32 | np.uint8]:
    """A read-only view of `rows` rows at `offset`: float32 [rows, width], or uint8 [rows, row_bytes] for Q8_0.

    Raises PeerMistake for too few bytes and, unless `finite` is False and the caller looks itself, for values (Q8_0:
    scales) that are not finite: one NaN row would poison every sequence that shares the batch.
    """
    stride = row_bytes(dtype, width)
    if _view(data).nbytes < offset + rows * stride:
        raise PeerMistake(f"{rows} rows of {stride} bytes do not fit the payload")
    if dtype == F32:
        values: NDArray[Any] = np.frombuffer(data, "<f4", rows * width, offset).reshape(rows, width)
        well = not finite or bool(np.isfinite(values).all())
    else:
        values = np.frombuffer(data, np.uint8, rows * stride, offset).reshape(rows, stride)
        halves = np.frombuffer(data, "<f2", values.nbytes // 2, offset)
        well = not finite or bool(np.isfinite(halves[:: Q8_0_BLOCK_BYTES // 2]).all())  # a block begins with its scale
    if not well:
        raise PeerMistake("a tensor has values that are not finite")
    return values
