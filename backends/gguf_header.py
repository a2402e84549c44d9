"""Reading the header of one GGUF that nobody has vouched for.

One pass over the mapped bytes: every count, length, type and offset is checked where it is read, nothing is allocated
in proportion to what the file merely claims, and values stay in the file until somebody asks for them (a vocabulary of
250,000 tokens costs a scan over its lengths, not its strings). What is accepted here is accepted by llama.cpp's own
reader (ggml/src/gguf.cpp), never the other way round.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from backends import gguf_types as gt
from backends.gguf_types import ValueType

MetaValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_OTHER_FORMATS = {
    b"vers": "a Git LFS pointer, not the model itself",
    b"<!DO": "a web page, not a model",
    b"<htm": "a web page, not a model",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
    b"FUGG": "a big-endian GGUF",
}


class GGUFError(Exception):
    """What is wrong with a model file, in one line that does not name the file (gguf_file.py adds it).

    `hint` says what to do next where that is not to fetch the file again.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in ggml order (ne0, the contiguous dimension, first)."""

    name: str
    shape: tuple[int, ...]
    type: int
    part: int  # index in GGUFFile.paths
    offset: int  # absolute, in that part
    nbytes: int


@dataclass(frozen=True, slots=True)
class MetaEntry:
    """One metadata value in the file: [start, end) spans its type and value, `offset` is where the values begin."""

    type: int
    element: int | None  # element type of an array
    count: int
    start: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header: entries by key and the part's tensors, both in file order."""

    entries: dict[str, MetaEntry]
    tensors: tuple[TensorInfo, ...]


def shown(raw: bytes | str) -> str:
    """A name from the file, safe to print on one line and short."""
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else raw
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:100])
    return text if len(text) <= 80 else text[:80] + "..."


class _Cursor:
    """A position in the header. Reading past the file's end, or past what we accept, is a GGUFError."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.pos = 0
        self.end = min(len(buffer), gt.HEADER_BYTES_MAX)
        self.elements_left = gt.ARRAY_ELEMENTS_MAX

    def need(self, nbytes: int) -> int:
        """Advance by `nbytes`; returns the position before."""
        before = self.pos
        self.pos = before + nbytes
        if self.pos > self.end:
            raise self.overrun()
        return before

    def overrun(self) -> GGUFError:
        if self.end < len(self.buffer):
            return GGUFError(f"claims a header of more than {gt.HEADER_BYTES_MAX >> 20} MiB: damaged")
        return GGUFError(f"ends inside its header, after {len(self.buffer):,} bytes: truncated or damaged")

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.buffer, self.need(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.buffer, self.need(8))[0]
        return value

    def text(self) -> bytes:
        length = self.u64()
        begin = self.need(length)
        return self.buffer[begin : begin + length]

    def skip_texts(self, count: int) -> None:
        """Pass over `count` strings. The hot loop of opening a file, hence its local names."""
        unpack, buffer, pos, end = _U64.unpack_from, self.buffer, self.pos, self.end
        for _ in range(count):
            if pos + 8 > end:
                raise self.overrun()
            pos += 8 + unpack(buffer, pos)[0]
        if pos > end:
            raise self.overrun()
        self.pos = pos


def read_header(buffer: mmap.mmap, part: int) -> Header:
    """Validate the header in `buffer`, part `part` of a model. Raises GGUFError."""
    cursor = _Cursor(buffer)
    n_tensors, n_keys = _read_counts(cursor)
    entries = _read_entries(cursor, n_keys)
    alignment = _alignment(buffer, entries)
    described = [_read_tensor(cursor, index) for index in range(n_tensors)]
    return Header(entries, _lay_out(described, cursor.pos, alignment, len(buffer), part))


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, keys) from the fixed fields at the start."""
    magic = cursor.buffer[:4]
    if magic != gt.MAGIC:
        what = _OTHER_FORMATS.get(magic)
        raise GGUFError(f"is {what}" if what else "is not a GGUF file: it does not begin with the letters GGUF")
    cursor.need(4)
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise GGUFError("is a big-endian GGUF; only little-endian files can be read")
    if version not in gt.VERSIONS:
        raise GGUFError(f"is GGUF version {version}; versions {gt.VERSIONS[0]} and {gt.VERSIONS[1]} can be read")
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    if n_tensors > gt.TENSORS_MAX:
        raise GGUFError(f"claims {n_tensors:,} tensors; the limit is {gt.TENSORS_MAX:,}")
    if n_keys > gt.KEYS_MAX:
        raise GGUFError(f"claims {n_keys:,} metadata keys; the limit is {gt.KEYS_MAX:,}")
    return n_tensors, n_keys


def _read_entries(cursor: _Cursor, n_keys: int) -> dict[str, MetaEntry]:
    entries: dict[str, MetaEntry] = {}
    for index in range(n_keys):
        raw = cursor.text()
        if not raw:
            raise GGUFError(f"metadata key {index} is empty")
        key = _printable(raw, gt.KEY_BYTES_MAX, f"metadata key {index}")
        if key in entries:
            raise GGUFError(f"metadata key {shown(key)} appears twice")
        entries[key] = _read_entry(cursor, key)
    return entries


def _read_entry(cursor: _Cursor, key: str) -> MetaEntry:
    start = cursor.pos
    kind, element, count = cursor.u32(), None, 1
    if kind == ValueType.ARRAY:
        element, count = cursor.u32(), cursor.u64()
        if element == ValueType.ARRAY:
            raise GGUFError(f"metadata key {shown(key)} is an array of arrays, which GGUF files may not hold")
        cursor.elements_left -= count
        if cursor.elements_left < 0:
            raise GGUFError(
                f"metadata key {shown(key)} claims {count:,} elements; all arrays may have {gt.ARRAY_ELEMENTS_MAX:,}"
            )
    value_kind = kind if element is None else element
    offset = cursor.pos
    if value_kind == ValueType.STRING:
        cursor.skip_texts(count)
    elif value_kind in gt.SCALARS:
        cursor.need(count * gt.SCALARS[value_kind][1])
    else:
        raise GGUFError(f"metadata key {shown(key)} has value type {value_kind}, which GGUF does not define")
    return MetaEntry(kind, element, count, start, offset, cursor.pos)


def _alignment(buffer: mmap.mmap, entries: Mapping[str, MetaEntry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return gt.DEFAULT_ALIGNMENT
    if entry.type != ValueType.UINT32:
        raise GGUFError(f"general.alignment has type {type_name(entry.type)}; it must be UINT32")
    value: int = _U32.unpack_from(buffer, entry.offset)[0]
    if value & (value - 1) or not gt.ALIGNMENT_MIN <= value <= gt.ALIGNMENT_MAX:
        raise GGUFError(
            f"general.alignment is {value}; it must be a power of two from {gt.ALIGNMENT_MIN} to {gt.ALIGNMENT_MAX}"
        )
    return value


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset in the data section) of the next tensor."""
    raw = cursor.text()
    if not raw:
        raise GGUFError(f"tensor {index} has no name")
    name = _printable(raw, gt.TENSOR_NAME_BYTES_MAX, f"name of tensor {index}")
    n_dims = cursor.u32()
    if n_dims > gt.DIMENSIONS_MAX:
        raise GGUFError(f"tensor {name} has {n_dims} dimensions; the limit is {gt.DIMENSIONS_MAX}")
    shape = tuple(cursor.u64() for _ in range(n_dims))
    elements = 1
    for extent in shape:
        if extent == 0:
            raise GGUFError(f"tensor {name} has a dimension of zero")
        elements *= extent
    if elements > gt.TENSOR_ELEMENTS_MAX:
        raise GGUFError(f"tensor {name} has impossible dimensions {'x'.join(map(str, shape))}")
    return name, shape, cursor.u32(), cursor.u64()


def _lay_out(
    described: list[tuple[str, tuple[int, ...], int, int]], header_end: int, alignment: int, file_bytes: int, part: int
) -> tuple[TensorInfo, ...]:
    """Place the tensors: one after the other, each at the next aligned offset, as llama.cpp demands."""
    data_start = gt.padded(header_end, alignment)
    expected, end, tensors = 0, 0, []
    for name, shape, kind, offset in described:
        try:
            nbytes = gt.tensor_bytes(kind, shape)
        except ValueError as error:
            raise GGUFError(f"tensor {name} {error}") from None
        if offset % alignment:
            raise GGUFError(f"tensor {name} starts at offset {offset:,}, not a multiple of the alignment {alignment}")
        if offset != expected:
            relation = "overlaps the tensor before it" if offset < expected else "leaves a gap before it"
            raise GGUFError(f"tensor {name} {relation}: it starts at {offset:,} instead of {expected:,}")
        end = data_start + offset + nbytes
        expected = gt.padded(offset + nbytes, alignment)
        tensors.append(TensorInfo(name, shape, kind, part, data_start + offset, nbytes))
    if end > file_bytes:
        raise GGUFError(f"{end - file_bytes:,} of its {end:,} bytes are missing: truncated, or still being downloaded")
    return tuple(tensors)


def _printable(raw: bytes, bytes_max: int, what: str) -> str:
    """`raw` as text that can be printed and compared: llama.cpp cuts names at a NUL, so one must not hide there."""
    if len(raw) > bytes_max:
        raise GGUFError(f"{what} is {len(raw):,} bytes long; the limit is {bytes_max:,}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise GGUFError(f"{what} is not UTF-8: {shown(raw)}") from None
    if not text.isprintable():
        raise GGUFError(f"{what} holds control characters: {shown(text)}")
    return text


def type_name(kind: int) -> str:
    """Name of a value type."""
    return ValueType(kind).name


class Metadata(Mapping[str, MetaValue]):
    """A file's metadata, decoded when asked for. Strings that are not UTF-8 show replacement characters."""

    def __init__(self, buffer: mmap.mmap, entries: dict[str, MetaEntry]) -> None:
        self._buffer = buffer
        self.entries = entries
        self._decoded: dict[str, MetaValue] = {}

    def __getitem__(self, key: str) -> MetaValue:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self.entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def types(self, key: str) -> tuple[int, int | None]:
        """(value type, element type of an array) of `key`."""
        return self.entries[key].type, self.entries[key].element

    def raw(self, key: str) -> bytes:
        """Type and value of `key` as they stand in the file."""
        return self._buffer[self.entries[key].start : self.entries[key].end]

    def texts(self, key: str) -> Iterator[bytes]:
        """The undecoded strings of `key`, a string or an array of strings."""
        return self._entry_texts(self.entries[key])

    def _entry_texts(self, entry: MetaEntry) -> Iterator[bytes]:
        pos = entry.offset
        for _ in range(entry.count):
            length = _U64.unpack_from(self._buffer, pos)[0]
            yield self._buffer[pos + 8 : pos + 8 + length]
            pos += 8 + length

    def _decode(self, entry: MetaEntry) -> MetaValue:
        kind = entry.type if entry.element is None else entry.element
        if kind == ValueType.STRING:
            texts = [raw.decode("utf-8", "replace") for raw in self._entry_texts(entry)]
            return texts if entry.element is not None else texts[0]
        values = list(struct.unpack_from(f"<{entry.count}{gt.SCALARS[kind][0]}", self._buffer, entry.offset))
        if entry.element is not None:
            return values
        value: bool | int | float = values[0]
        return value
