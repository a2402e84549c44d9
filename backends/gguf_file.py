"""A GGUF model file, single or split, that is safe to hand to llama.cpp.

This is the border: a model file is somebody else's bytes. `GGUFFile.open` reads the whole header of every part with
our own bounded reader (gguf_header), checks what llama.cpp only asserts (gguf_checks), and raises BadModelFile with one
line that names the file and the fault. After that everything is a look-up: metadata decoded on demand, tensors as views
of the mapped file (`data`) or read into a buffer (`read_into`). Long-lived processes read: a mapped page that was cut
off the file or that the disk cannot read kills the process, a read merely fails.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from backends import gguf_checks, gguf_header
from backends.gguf_header import GGUFError, Metadata, MetaValue, TensorInfo
from backends.gguf_types import PARTS_MAX, TENSORS_MAX, ValueType
from capabilities.errors import BadModelFile

__all__ = ["GGUFFile", "MetaValue", "TensorInfo"]

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


class _Part:
    """One file: its descriptor for reads, its mapping for views, its header."""

    def __init__(self, path: Path, index: int) -> None:
        self.path = path
        self.fd = _open_regular(path, index)
        self.size = os.fstat(self.fd).st_size
        try:
            self.buffer = _map(self.fd, self.size)
        except GGUFError:
            os.close(self.fd)
            raise
        try:
            self.header = gguf_header.read_header(self.buffer, index)
        except BaseException:
            self.close()
            raise
        self.metadata = Metadata(self.buffer, self.header.entries)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # views of it live on; it goes when they do
            self.buffer.close()

    def number(self, key: str, kind: ValueType) -> int | None:
        """The integer at `key`, None if absent."""
        if key not in self.metadata:
            return None
        if self.metadata.types(key)[0] != kind:
            raise GGUFError(f"{key} must have type {kind.name}")
        value = self.metadata[key]
        assert isinstance(value, int)
        return value


def _open_regular(path: Path, index: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO's open would wait for its writer
    except FileNotFoundError:
        if index == 0:
            raise GGUFError("no such file", hint="Check the path.") from None
        hint = "Put all parts of a split model into one folder, under the names that they were published with."
        raise GGUFError(f"is missing: part {index + 1} of this model", hint=hint) from None
    except OSError as error:
        raise GGUFError(f"cannot be read: {error.strerror}", hint="Check the file's owner and mode.") from None
    except ValueError:
        raise GGUFError("is not a possible path") from None  # it holds a NUL
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "is a directory" if stat.S_ISDIR(mode) else "is not a regular file"
        raise GGUFError(kind, hint="Name the model's GGUF file; of a split one the first part.")
    return fd


def _map(fd: int, size: int) -> mmap.mmap:
    if size == 0:
        raise GGUFError("is empty")
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, OverflowError, ValueError) as error:  # the size is more than this system can map
        raise GGUFError(f"cannot be mapped into memory: {error}") from None


class GGUFFile:
    """A validated, open model. Metadata is the first part's; tensors are all parts' in file order."""

    def __init__(self, parts: tuple[_Part, ...], architecture: str, tensors: dict[str, TensorInfo]) -> None:
        self._parts = parts
        self.paths = tuple(part.path for part in parts)
        self.sizes = tuple(part.size for part in parts)
        self.architecture = architecture
        self.metadata: Mapping[str, MetaValue] = parts[0].metadata
        self.metadata_types: Mapping[str, tuple[int, int | None]] = MappingProxyType(
            {key: (entry.type, entry.element) for key, entry in parts[0].header.entries.items()}
        )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: Path | str) -> GGUFFile:
        """Open `path`, a single file or the first part of a split one (its siblings are found by name).

        Raises BadModelFile for whatever is wrong with it; nothing stays open then.
        """
        opened: list[_Part] = []
        current = Path(path)
        try:
            opened.append(_Part(current, 0))
            for index, sibling in enumerate(_siblings(opened[0]), start=1):
                current = sibling
                opened.append(_Part(current, index))
                _check_sibling(opened[0], opened[index], index)
            current = opened[0].path
            tensors = _merge(opened)
            return cls(tuple(opened), gguf_checks.check_model(opened[0].metadata, tensors), tensors)
        except BaseException as error:
            for part in opened:
                part.close()
            if isinstance(error, GGUFError):
                message = f"{gguf_header.shown(current.name)}: {error}"
                raise BadModelFile(message, hint=error.hint, path=str(current)) from None
            raise

    @property
    def stem(self) -> str:
        """The file's name without `.gguf` and without a part's number: fit for naming what is derived from it."""
        match = _SPLIT_NAME.fullmatch(self.paths[0].name)
        return match["stem"] if match else self.paths[0].name.removesuffix(".gguf")

    def raw_metadata(self, key: str) -> bytes:
        """Type and value of `key` as they stand in the file."""
        return self._parts[0].metadata.raw(key)

    def data(self, info: TensorInfo, offset: int = 0, length: int | None = None) -> memoryview:
        """Bytes [offset, offset + length) of a tensor, a view of the mapped file (nothing is copied).

        Where the file was cut short since, or the disk fails, looking at it ends the process (SIGBUS).
        """
        length = _checked_range(info, offset, length)
        begin = info.offset + offset
        return memoryview(self._parts[info.part].buffer)[begin : begin + length]

    def read_into(self, info: TensorInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with a tensor's bytes from `offset` on. BadModelFile if the file no longer has them."""
        _checked_range(info, offset, target.nbytes)
        part, done = self._parts[info.part], 0
        while done < target.nbytes:
            try:
                got = os.preadv(part.fd, [target[done:]], info.offset + offset + done)
            except OSError as error:
                raise BadModelFile(f"{part.path.name}: cannot be read: {error.strerror}", path=str(part.path)) from None
            if got == 0:
                raise BadModelFile(f"{part.path.name}: was cut short while in use", path=str(part.path))
            done += got

    def close(self) -> None:
        """Close the files. Views that `data` gave stay valid."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _checked_range(info: TensorInfo, offset: int, length: int | None) -> int:
    if length is None:
        length = info.nbytes - offset
    if not 0 <= offset <= offset + length <= info.nbytes:
        raise ValueError(f"{info.name} has {info.nbytes} bytes: no range of {length} at {offset}")
    return length


def _siblings(first: _Part) -> list[Path]:
    """Paths of the other parts, by the rules of llama.cpp: the keys rule, the name must agree with them."""
    count = first.number("split.count", ValueType.UINT16)
    if count is None or count <= 1:
        return []
    if count > PARTS_MAX:
        raise GGUFError(f"is split in {count:,} parts; the limit is {PARTS_MAX}")
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(f"is part of a model split in {count}, so it must be named NAME-00001-of-{count:05}.gguf")
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if first.number("split.no", ValueType.UINT16) != 0 or int(match["number"]) != 1:
        what = f"is not the first part of its model; open {gguf_header.shown(names[0])}"
        raise GGUFError(what, hint="Name the first part: the others are found beside it.")
    return [first.path.with_name(name) for name in names[1:]]


def _check_sibling(first: _Part, part: _Part, index: int) -> None:
    """`part` is the `index`-th part of the same model as `first`."""
    number = part.number("split.no", ValueType.UINT16)
    if number != index:
        says = "does not say which part it is" if number is None else f"says it is part {number + 1}"
        raise GGUFError(f"{says}; part {index + 1} belongs here")
    for key, kind in (("split.count", ValueType.UINT16), ("split.tensors.count", ValueType.INT32)):
        ours, theirs = first.number(key, kind), part.number(key, kind)
        if theirs is not None and theirs != ours:
            raise GGUFError(f"belongs to another model: {key} is {theirs}, the first part says {ours}")
    theirs_name = part.metadata.get("general.architecture")
    if theirs_name is not None and theirs_name != first.metadata.get("general.architecture"):
        raise GGUFError("belongs to another model: its general.architecture is not the first part's")


def _merge(parts: list[_Part]) -> dict[str, TensorInfo]:
    """All parts' tensors by name."""
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for info in part.header.tensors:
            if info.name in tensors:
                raise GGUFError(f"has two tensors named {info.name}")
            tensors[info.name] = info
    if len(tensors) > TENSORS_MAX:
        raise GGUFError(f"has {len(tensors):,} tensors in all parts; the limit is {TENSORS_MAX:,}")
    if len(parts) > 1:
        claimed = parts[0].number("split.tensors.count", ValueType.INT32)
        if claimed != len(tensors):
            raise GGUFError(
                f"says split.tensors.count is {claimed}; its {len(parts)} parts hold {len(tensors)} tensors"
            )
    return tensors
