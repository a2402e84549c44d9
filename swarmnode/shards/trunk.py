"""A model's trunk from other peers: one file, fetched by pieces that each have a hash in the manifest.

The pieces come like experts, from several sources at once, so whoever sends a wrong one is out at once and has spoilt
that piece alone. They lie in one file beside the target, which becomes the target when it is whole; where an earlier
attempt ended is found by hashing what is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from backends.manifest import PIECE_BYTES, FileHash, Manifest
from backends.trunk_file import write_at
from capabilities.errors import BadModelFile, ModelNotFound, SwarmError
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch_plan import ExpertPart, Job, TrunkPart
from swarmnode.shards.lanes import Fetch, Progress
from swarmnode.shards.pace import Pace
from swarmnode.shards.store import CacheError, disk_errors

_PART: Final = ".part"
_DISK: Final = "Free space on that disk, or raise node.disk_mib in the configuration."


async def fetch_trunk(
    network: Network,
    sources: Sequence[PeerId],
    manifest: Manifest,
    path: Path,
    progress: Progress | None = None,
    *,
    budget_bytes: int,
    patience_seconds: float | None = None,
    pace: Pace | None = None,
) -> None:
    """Have the trunk of `manifest` at `path`, whole, right and on disk; from up to SHARD_SOURCES_MAX sources.

    What an earlier attempt left beside `path` is hashed and used; a file at `path` is taken for right. Cancelling is
    safe at any time. Nobody else may fetch to the same path meanwhile. Raises ModelNotFound as soon as no source is
    left for a piece, or when nothing came for `patience_seconds` (default SHARD_FETCH_PATIENCE_SECONDS); CacheError if
    the trunk is larger than `budget_bytes`, or the disk cannot take it; BadModelFile if the manifest contradicts
    itself.
    """
    if await trio.Path(path).exists():
        return
    patience = limits.SHARD_FETCH_PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    draft = await trio.to_thread.run_sync(_Draft, path, manifest, budget_bytes)
    try:
        pieces = enumerate(manifest.trunk.pieces)
        jobs = [Job(digest, manifest.trunk.piece_bytes(index), TrunkPart(index)) for index, digest in pieces]
        await Fetch(network, manifest.id, draft, progress, pace).run(jobs, sources, patience)
        whole = hashlib.sha256()
        for job in jobs:
            await trio.to_thread.run_sync(draft.add_to, whole, job)
        await trio.to_thread.run_sync(draft.finish, whole.digest())
    finally:
        draft.close()


class _Draft:
    """The trunk's file while it is fetched (lanes.Goal)."""

    def __init__(self, path: Path, manifest: Manifest, budget_bytes: int) -> None:
        self.trunk: FileHash = manifest.trunk
        self._name = manifest.name
        self.folder = path.parent
        self._path = path
        self._part = path.with_name(path.name + _PART)
        self._pieces: dict[int, _Piece] = {}
        self._right: dict[int, bool] = {}  # of the pieces that were looked at
        self._lock = threading.Lock()
        if self.trunk.size > budget_bytes:
            raise CacheError(
                f"the trunk of {manifest.name} has {self.trunk.size} bytes, over this node's budget of {budget_bytes}",
                hint=_DISK, path=str(path.parent),
            )  # fmt: skip
        with disk_errors("the trunk", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._check_space()
            except BaseException:
                os.close(self.fd)
                raise

    def has(self, job: Job) -> bool:
        index = _index(job)
        with self._lock:
            if index not in self._right:  # of an earlier attempt, if it is there at all
                self._right[index] = hashlib.sha256(self._read(index)).digest() == job.digest
            return self._right[index]

    def begin(self, job: Job) -> _Piece | None:
        index = _index(job)
        with self._lock:
            return None if self._right.get(index) else self._pieces.setdefault(index, _Piece(self, index))

    def arrived(self, piece: _Piece, right: bool) -> None:
        """Every byte of a piece has been written."""
        with self._lock:
            del self._pieces[piece.index]
            self._right[piece.index] = right

    def unavailable(
        self,
        part: ExpertPart | TrunkPart,
        missing: Sequence[ExpertPart | TrunkPart],
        reasons: str,
        cause: str,
        peer: str | None,
    ) -> SwarmError:
        return ModelNotFound(
            f"no peer gave {part} of {self._name} ({reasons})",
            hint="Check in `swarmctl status` that a peer with the model is connected; the fetch resumes where it was.",
            peer=peer,
            cause=cause,
        )

    def add_to(self, whole: hashlib._Hash, job: Job) -> None:
        """Hash a piece, as it lies on the disk."""
        with disk_errors("the trunk", self.folder):
            whole.update(self._read(_index(job)))

    def finish(self, digest: bytes) -> None:
        """With every piece there, and the hash of the whole: give it its name."""
        with disk_errors("the trunk", self.folder):
            if digest != self.trunk.sha256:
                self._part.unlink()
                raise BadModelFile(
                    f"the manifest of {self._name} contradicts itself: its trunk's pieces are right, the whole is not",
                    hint="Remove that model where it was added, and add it again.",
                )
            os.truncate(self.fd, self.trunk.size)
            os.fsync(self.fd)
            self._part.rename(self._path)

    def close(self) -> None:
        os.close(self.fd)

    def _check_space(self) -> None:
        missing = self.trunk.size - os.fstat(self.fd).st_blocks * 512
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise CacheError(
                f"the trunk of {self._name} needs {missing} more bytes in {self.folder}; {free} are free",
                hint=_DISK, path=str(self.folder),
            )  # fmt: skip

    def _read(self, index: int) -> bytes:
        return os.pread(self.fd, self.trunk.piece_bytes(index), index * PIECE_BYTES)


def _index(job: Job) -> int:
    assert isinstance(job.part, TrunkPart)
    return job.part.index


class _Piece:
    """A piece on its way to the disk (lanes.PartialPart). A broken transfer is continued, by whoever comes next."""

    def __init__(self, draft: _Draft, index: int) -> None:
        self.index = index
        self.size = draft.trunk.piece_bytes(index)
        self._draft = draft
        self._hash = hashlib.sha256()
        self._offset = 0

    @property
    def offset(self) -> int:
        return self._offset

    def write(self, chunk: bytes | memoryview) -> None:
        if self._offset + len(chunk) > self.size:
            raise ValueError("more bytes than the piece has")
        with disk_errors("the trunk", self._draft.folder):
            write_at(self._draft.fd, memoryview(chunk), self.index * PIECE_BYTES + self._offset)
        self._hash.update(chunk)
        self._offset += len(chunk)

    def restart(self) -> None:
        self._hash, self._offset = hashlib.sha256(), 0

    def finish(self) -> bool:
        right = self._hash.digest() == self._draft.trunk.pieces[self.index]
        self._draft.arrived(self, right)
        return right

    def close(self) -> None:
        pass
