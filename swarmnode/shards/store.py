"""The worker's disk cache of experts: one file an expert, named by its content hash.

An expert is the unit of everything that happens to the cache: it is hashed, placed, fetched and evicted alone. Files
named by hash need no index that could disagree with the folder, serve every manifest that lists the same bytes, and
make resuming and eviction plain file operations. A file under its final name was complete and verified when it was
renamed; it is verified again before its first use in a process, so a torn or rotten file costs a new fetch, never a
wrong answer, and no fsync is needed. What has not arrived in full is kept as `HASH.part` and continued later.

The object is thread-safe and blocks: call what reads or writes from a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.manifest import LayerExperts, Manifest
from capabilities.errors import ExpertsUnavailable, SwarmError
from swarmnode.shards.files import shard_path
from swarmnode.shards.pace import Pace

_PART: Final = ".part"
_REHASH_BYTES: Final = 1024 * 1024
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CacheError(SwarmError):
    """The expert cache cannot take or give what it should: its budget, the disk's space, or the disk itself."""

    type = "cache_error"
    default_hint = "Free space on that disk, or change the expert cache's folder or budget in the configuration."


@contextlib.contextmanager
def disk_errors(what: str, folder: Path, *, missing_ok: bool = False) -> Iterator[None]:
    """Turn what the system reports into CacheError; with `missing_ok` a missing file stays FileNotFoundError."""
    try:
        yield
    except OSError as error:
        if missing_ok and isinstance(error, FileNotFoundError):
            raise
        reason = error.strerror or type(error).__name__
        if error.errno in _NO_SPACE:
            free = shutil.disk_usage(folder).free if folder.exists() else 0
            reason = f"the disk is full ({free} bytes free)"
        raise CacheError(f"{what} in {folder}: {reason}", path=str(folder)) from error


def bytes_in(root: Path) -> int:
    """What the files of a cache take, which need not be open."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # evicted meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Experts and bytes on disk; `kept_bytes` may not be evicted at present."""

    experts: int
    partial: int
    used_bytes: int
    kept_bytes: int
    budget_bytes: int


@dataclass(slots=True)
class _Entry:
    """One file. `size` is what it may grow to, so that the budget holds when several experts arrive at once."""

    size: int
    complete: bool
    writing: bool = False
    verified: tuple[int, int, int] | None = None
    """inode, bytes and mtime of the file when its hash was last found right"""


class ShardCache:
    """Experts by content hash (32 bytes), within `budget_bytes` of disk; the least recently used go first."""

    def __init__(self, root: Path, budget_bytes: int, downloads: Pace | None = None) -> None:
        """Scan `root` (made if missing), oldest use first; a folder over its budget shrinks with the next expert.

        downloads: how fast experts, and trunks beside them, may come in; None: as they come.
        """
        self.root = root
        self.downloads = Pace() if downloads is None else downloads
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._kept: Counter[bytes] = Counter()
        self._entries: dict[bytes, _Entry] = {}  # ordered by last use
        self._used_bytes = 0
        self._reserved_bytes = 0
        with self._disk_errors():
            root.mkdir(parents=True, exist_ok=True)
            for _, digest, size, complete in sorted(self._scan()):
                self._entries[digest] = _Entry(size, complete)
                self._used_bytes += size

    def reserve(self, nbytes: int) -> None:
        """Leave so many bytes of the budget to other files (trunks), evicting what may go.

        Raises CacheError, and reserves what was reserved before, if that is not enough.
        """
        with self._lock:
            before, self._reserved_bytes = self._reserved_bytes, nbytes
            try:
                self._make_room(0, b"")
            except CacheError:
                self._reserved_bytes = before
                raise

    def statistics(self) -> CacheStatistics:
        """A consistent snapshot; cheap."""
        with self._lock:
            entries = self._entries
            complete = sum(entry.complete for entry in entries.values())
            kept = sum(entries[digest].size for digest in self._kept if digest in entries)
            return CacheStatistics(complete, len(entries) - complete, self._used_bytes, kept, self.budget_bytes)

    def open(self, digest: bytes, size: int) -> memoryview | None:
        """The expert's bytes, mapped and read-only, or None when it is not here.

        The first use in this process reads and hashes all of it; a damaged file is removed and counts as not here. The
        mapping (and its file descriptor) lives as long as the view or a slice of it, even if the file is evicted.
        Raises CacheError when this process cannot open files; that says nothing about the file.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or not entry.complete:
                return None
            self._entries[digest] = self._entries.pop(digest)
        path = self._path(digest)
        try:
            with self._disk_errors(missing_ok=True), path.open("rb") as file:
                stat = os.fstat(file.fileno())
                mapped = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
                with contextlib.suppress(OSError):  # a file system for reading only
                    # The time of last use orders evictions after a restart; that of the content must stay.
                    os.utime(file.fileno(), ns=(time.time_ns(), stat.st_mtime_ns))
        except (FileNotFoundError, ValueError):  # gone, or shorter than it should be
            self._remove(digest, entry)
            return None
        signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if entry.verified != signature:
            if stat.st_size != size or hashlib.sha256(mapped).digest() != digest:
                self._remove(digest, entry)
                return None
            entry.verified = signature
        return mapped

    def begin(self, digest: bytes, size: int) -> PartialShard | None:
        """Start or resume writing an expert of `size` bytes, making room first.

        None when that is not to be done: another writer is at it, or it is complete (`open` says whether it is right).
        Raises CacheError when what may be evicted is not enough.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None and (entry.writing or entry.complete):
                return None
            self._make_room(size - (entry.size if entry else 0), digest)
            self._used_bytes += size - (entry.size if entry else 0)
            self._entries.pop(digest, None)
            self._entries[digest] = _Entry(size, complete=False, writing=True)
        try:
            with self._disk_errors():
                return PartialShard(self, digest, size)
        except BaseException:
            if entry is None:
                self._remove(digest)
            else:
                self._settle(digest, entry.size, None)
            raise

    @contextlib.contextmanager
    def keep(self, digests: Iterable[bytes]) -> Iterator[None]:
        """Within the context these experts, here or still to come, are not evicted. Contexts may overlap."""
        counted = Counter(digests)
        with self._lock:
            self._kept.update(counted)
        try:
            yield
        finally:
            with self._lock:
                self._kept.subtract(counted)
                self._kept += Counter()  # drops the zeros

    def discard(self, digests: Iterable[bytes]) -> None:
        """Remove these experts where they are neither kept nor being written (a model was removed)."""
        with self._lock:
            for digest in digests:
                entry = self._entries.get(digest)
                if entry is not None and not entry.writing and digest not in self._kept:
                    self._unlink(digest)

    def evict_one(self) -> bool:
        """Remove the least recently used expert that may go; False when there is none."""
        with self._lock:
            return self._evict_one()

    # --- Private ------------------------------------------------------------------------------------------------------

    def _path(self, digest: bytes) -> Path:
        return shard_path(self.root, digest)

    def _scan(self) -> Iterator[tuple[int, bytes, int, bool]]:
        """(last use, digest, bytes, complete) of every file that looks like ours; others are left alone."""
        for folder in os.scandir(self.root):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                name = file.name.removesuffix(_PART)
                if len(name) != 64 or set(name) - set("0123456789abcdef") or not file.is_file(follow_symlinks=False):
                    continue
                if file.name != name and Path(folder.path, name).exists():
                    os.unlink(file.path)  # a leaving beside the complete file
                    continue
                stat = file.stat()
                yield stat.st_atime_ns, bytes.fromhex(name), stat.st_size, file.name == name

    def _make_room(self, more_bytes: int, digest: bytes) -> None:
        while self._used_bytes + more_bytes > self.budget_bytes - self._reserved_bytes:
            if not self._evict_one(digest):
                trunks = f" and {self._reserved_bytes} by trunks" if self._reserved_bytes else ""
                raise CacheError(
                    f"an expert needs {more_bytes} bytes; of the cache's budget of {self.budget_bytes} bytes "
                    f"{self._used_bytes} are taken by experts that may not be evicted{trunks}",
                    path=str(self.root),
                )

    def _evict_one(self, spared: bytes = b"") -> bool:
        for digest, entry in self._entries.items():
            if not entry.writing and digest != spared and digest not in self._kept:
                self._unlink(digest)
                return True
        return False

    def _remove(self, digest: bytes, seen: _Entry | None = None) -> None:
        """Remove the file; with `seen` only if it is still the one that was looked at."""
        with self._lock:
            if seen is None or self._entries.get(digest) is seen:
                self._unlink(digest)

    def _unlink(self, digest: bytes) -> None:
        entry = self._entries.pop(digest, None)
        if entry is None:
            return
        self._used_bytes -= entry.size
        path = self._path(digest)
        with self._disk_errors():
            path.unlink(missing_ok=True)
            path.with_name(path.name + _PART).unlink(missing_ok=True)

    def _settle(self, digest: bytes, size: int, verified: tuple[int, int, int] | None) -> None:
        """A writer is done: with a complete file (`verified`), or leaving `size` bytes to be continued."""
        with self._lock:
            entry = self._entries[digest]
            self._used_bytes += size - entry.size
            self._entries[digest] = _Entry(size, complete=verified is not None, verified=verified)

    def _disk_errors(self, *, missing_ok: bool = False) -> contextlib.AbstractContextManager[None]:
        return disk_errors("the expert cache", self.root, missing_ok=missing_ok)


class PartialShard:
    """An expert on its way to the disk. One writer; ends with `finish`, or with `close` to be resumed later."""

    def __init__(self, cache: ShardCache, digest: bytes, size: int) -> None:
        self.size = size
        self._cache = cache
        self._digest = digest
        self._path = cache._path(digest)
        self._part = self._path.with_name(self._path.name + _PART)
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._offset = 0
        try:
            self._rehash()
        except BaseException:
            os.close(self._fd)
            raise
        self.resumed_bytes = self._offset
        """Bytes of an earlier attempt, maybe of another process: nobody may be blamed for them."""

    @property
    def offset(self) -> int:
        """Bytes that are here and hashed: where the fetch goes on."""
        return self._offset

    def write(self, chunk: bytes | memoryview) -> None:
        """Append. On a full disk evicts what may go, then raises CacheError; what was written before stays."""
        if self._offset + len(chunk) > self.size:
            raise ValueError("more bytes than the expert has")
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[os.pwrite(self._fd, rest, self._offset + len(chunk) - len(rest)) :]
            except OSError as error:
                if error.errno not in _NO_SPACE or not self._cache.evict_one():
                    with self._cache._disk_errors():
                        raise
        self._hash.update(chunk)
        self._offset += len(chunk)

    def restart(self) -> None:
        """Drop what is here."""
        os.ftruncate(self._fd, 0)
        self._hash = hashlib.sha256()
        self._offset = self.resumed_bytes = 0

    def finish(self) -> bool:
        """With every byte written: True when the hash is right and the expert is now in the cache; False drops it."""
        if self._offset != self.size:
            raise ValueError(f"{self._offset} of {self.size} bytes are here")
        fd, self._fd = self._fd, -1
        stat = os.fstat(fd)
        os.close(fd)
        if self._hash.digest() != self._digest:
            self._cache._remove(self._digest)
            return False
        try:
            with self._cache._disk_errors():
                self._part.replace(self._path)
        except BaseException:
            self._cache._remove(self._digest)
            raise
        self._cache._settle(self._digest, self.size, (stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return True

    def close(self) -> None:
        """Stop here and keep what has arrived. Does nothing after `finish`."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        os.close(fd)
        if self._offset:
            self._cache._settle(self._digest, self._offset, None)
        else:
            self._cache._remove(self._digest)

    def _rehash(self) -> None:
        while block := os.pread(self._fd, min(_REHASH_BYTES, self.size - self._offset), self._offset):
            self._hash.update(block)
            self._offset += len(block)
        os.ftruncate(self._fd, self._offset)


class CachedExperts:
    """The cached experts of one manifest, as a source to serve them from (backends.manifest.ExpertSource)."""

    def __init__(self, cache: ShardCache, manifest: Manifest) -> None:
        self._cache = cache
        self._manifest = manifest

    def read(self, layer: int, expert: int, offset: int, length: int) -> memoryview:
        """See ExpertSource. Raises ExpertsUnavailable when the expert is not in the cache. Blocks."""
        experts = self._manifest.experts_of(layer)
        experts.check_range(expert, offset, length)
        return _open(self._cache, experts, expert)[offset : offset + length]


def layer_reader(cache: ShardCache, layer: LayerExperts) -> Callable[[int, int], memoryview]:
    """`read(expert, tensor_index)` for ExpertBackend.load_layer: mapped slices, so loading stages one tensor at most.

    `read` raises ExpertsUnavailable when the expert is not in the cache or its file was damaged: fetch again.
    """

    def read(expert: int, tensor_index: int) -> memoryview:
        begin = layer.offsets[tensor_index]
        return _open(cache, layer, expert)[begin : begin + layer.tensors[tensor_index].nbytes]

    return read


def _open(cache: ShardCache, layer: LayerExperts, expert: int) -> memoryview:
    data = cache.open(layer.hashes[expert], layer.expert_bytes)
    if data is None:
        raise ExpertsUnavailable(
            f"expert {expert} of layer {layer.layer} is not in the cache, or its file was damaged",
            layer=layer.layer, experts=[expert], cause="refused",
        )  # fmt: skip
    return data
