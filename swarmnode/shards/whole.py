"""A whole model from other peers, as one file that llama.cpp reads: its trunk, and every expert where it belongs.

Whoever has it can compute an answer alone, and so prove one (`swarmctl verify`). Experts come as they do to a worker,
from several sources at once, each checked against its hash before it counts, and lie in a file beside the target that
becomes the target when it is whole. Where an earlier attempt ended is found by hashing what is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from backends.gguf_file import GGUFFile
from backends.manifest import Manifest
from backends.trunk_file import write_at
from backends.whole_file import WholePlan, plan_whole
from capabilities.errors import ExpertsUnavailable, SwarmError
from capabilities.held_experts import HeldExperts
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch_plan import ExpertPart, Job
from swarmnode.shards.lanes import Fetch, Progress, experts_unavailable
from swarmnode.shards.pace import Pace
from swarmnode.shards.store import CacheError, ShardCache, disk_errors

_PART: Final = ".part"
_WHAT: Final = "the model"


async def fetch_whole(
    network: Network,
    sources: Sequence[PeerId],
    manifest: Manifest,
    trunk: Path,
    target: Path,
    progress: Progress | None = None,
    *,
    holdings: Mapping[PeerId, HeldExperts] | None = None,
    cache: ShardCache | None = None,
    pace: Pace | None = None,
) -> int:
    """Have the whole model of `manifest`, whose trunk is here, at `target`; its bytes. A file that is there goes.

    sources: who may have everything, the likeliest first. holdings: what others say to hold, who are asked for what is
    still missing then. cache: experts that are here already. Cancelling is safe at any time. Nobody else may fetch to
    the same path meanwhile.

    Raises:
        ExpertsUnavailable: no source gave one of the experts.
        CacheError: the disk cannot take the file.
        UnsupportedModel: see backends.whole_file.plan_whole.
    """
    draft = await trio.to_thread.run_sync(_Draft, trunk, manifest, target, cache)
    patience = limits.SHARD_FETCH_PATIENCE_SECONDS
    others = {peer: _parts(manifest, held) for peer, held in (holdings or {}).items()}
    group, jobs = list(sources[: limits.SHARD_SOURCES_MAX]), draft.jobs
    failure: SwarmError | None = None
    try:
        while jobs:
            try:
                fetch = Fetch(network, manifest.id, draft, progress, pace)
                failure = await fetch.run(jobs, group, patience, skip=True) or failure
            except ExpertsUnavailable as error:  # nothing came for long
                failure = error
            missing = await trio.to_thread.run_sync(draft.missing)
            group, jobs = _next_group(missing, others)
            if missing and not group:
                assert failure is not None, "the first group was asked for everything"
                raise failure
        await trio.to_thread.run_sync(draft.finish)
        return draft.plan.nbytes
    finally:
        draft.close()


def _next_group(missing: Sequence[Job], others: dict[PeerId, set[ExpertPart]]) -> tuple[list[PeerId], list[Job]]:
    """Whom to ask next, each of whom adds most to the others, and for what; they are taken out of `others`."""
    group: list[PeerId] = []
    wanted = {job.part: job for job in missing if isinstance(job.part, ExpertPart)}
    taken: set[ExpertPart] = set()
    while others and len(group) < limits.SHARD_SOURCES_MAX:
        best = max(others, key=lambda peer: len(others[peer] & wanted.keys() - taken))
        gained = others.pop(best) & wanted.keys() - taken
        if not gained:
            others.clear()
            break
        group.append(best)
        taken |= gained
    return group, [job for part, job in wanted.items() if part in taken]


def _parts(manifest: Manifest, held: HeldExperts) -> set[ExpertPart]:
    return {ExpertPart(layer, expert) for layer in manifest.by_layer for expert in held.experts_of(layer)}


class _Draft:
    """The file while it is fetched (lanes.Goal)."""

    def __init__(self, trunk: Path, manifest: Manifest, target: Path, cache: ShardCache | None) -> None:
        with GGUFFile.open(trunk) as gguf:
            self.plan: WholePlan = plan_whole(gguf, manifest)
            self.places: dict[bytes, list[tuple[int, int, int]]] = {}
            self.jobs: list[Job] = []
            for layer in manifest.layers:
                for expert, digest in enumerate(layer.hashes):
                    if digest not in self.places:
                        self.jobs.append(Job(digest, layer.expert_bytes, ExpertPart(layer.layer, expert)))
                    self.places.setdefault(digest, []).extend(self.plan.places(layer, expert))
            self.folder = target.parent
            self._name = manifest.name
            self._cache = cache
            self._target, self._part = target, target.with_name(target.name + _PART)
            self._writing: set[bytes] = set()
            self._right: dict[bytes, bool] = {}  # of the experts that were looked at
            self._lock = threading.Lock()
            with disk_errors(_WHAT, self.folder):
                self.resumed = self._part.exists()
                self.fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    self._check_space()
                    self.plan.write_trunk(gguf, self.fd)
                except BaseException:
                    os.close(self.fd)
                    if not self.resumed:
                        self._part.unlink()
                    raise

    def has(self, job: Job) -> bool:
        with self._lock:
            known = self._right.get(job.digest)
        if known is None:
            known = (self.resumed and self._read_right(job)) or self._copied(job)
            with self._lock:
                self._right[job.digest] = known
        return known

    def missing(self) -> list[Job]:
        """What is not here yet."""
        return [job for job in self.jobs if not self.has(job)]

    def begin(self, job: Job) -> _Expert | None:
        with self._lock:
            if self._right.get(job.digest) or job.digest in self._writing:
                return None
            self._writing.add(job.digest)
            return _Expert(self, job)

    def ended(self, digest: bytes, right: bool) -> None:
        """Whoever wrote an expert has stopped."""
        with self._lock:
            self._writing.discard(digest)
            self._right[digest] = right

    unavailable = staticmethod(experts_unavailable)

    def write(self, digest: bytes, data: bytes | memoryview, offset: int) -> None:
        """Bytes of an expert from `offset` on, wherever they belong."""
        view = memoryview(data)
        with disk_errors(_WHAT, self.folder):
            for begin, start, nbytes in self.places[digest]:
                low, high = max(begin, offset), min(begin + nbytes, offset + len(view))
                write_at(self.fd, view[low - offset : max(low, high) - offset], start + low - begin)

    def finish(self) -> None:
        """With everything there: give it its name."""
        with disk_errors(_WHAT, self.folder):
            os.fsync(self.fd)
            self._part.rename(self._target)

    def close(self) -> None:
        os.close(self.fd)

    def _copied(self, job: Job) -> bool:
        """Whether it was in this node's cache; then it is copied."""
        view = None if self._cache is None else self._cache.open(job.digest, job.size)
        if view is not None:
            self.write(job.digest, view, 0)
        return view is not None

    def _read_right(self, job: Job) -> bool:
        """Whether an earlier attempt has left the whole expert, wherever it belongs."""
        places = self.places[job.digest]
        with disk_errors(_WHAT, self.folder):
            found = [(begin, os.pread(self.fd, nbytes, start)) for begin, start, nbytes in places]
        pieces = dict(found)
        joined = b"".join(pieces[begin] for begin in sorted(pieces))
        return all(pieces[begin] == data for begin, data in found) and hashlib.sha256(joined).digest() == job.digest

    def _check_space(self) -> None:
        missing = self.plan.nbytes - os.fstat(self.fd).st_blocks * 512
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise CacheError(
                f"the model {self._name} needs {missing} more bytes in {self.folder}; {free} are free",
                hint="Free space on that disk, or name a file on another one.",
                path=str(self.folder),
            )


class _Expert:
    """An expert on its way to the disk (lanes.PartialPart)."""

    def __init__(self, draft: _Draft, job: Job) -> None:
        self.size = job.size
        self.offset = 0
        self._draft = draft
        self._digest = job.digest
        self._hash = hashlib.sha256()
        self._over = False

    def write(self, chunk: bytes | memoryview) -> None:
        if self.offset + len(chunk) > self.size:
            raise ValueError("more bytes than the expert has")
        self._draft.write(self._digest, chunk, self.offset)
        self._hash.update(chunk)
        self.offset += len(chunk)

    def restart(self) -> None:
        self._hash, self.offset = hashlib.sha256(), 0

    def finish(self) -> bool:
        right, self._over = self._hash.digest() == self._digest, True
        self._draft.ended(self._digest, right)
        return right

    def close(self) -> None:
        if not self._over:  # another source begins it anew
            self._over = True
            self._draft.ended(self._digest, False)
