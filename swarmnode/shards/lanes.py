"""A fetch at work: a few lanes a source, each a stream and the task that works through jobs on it.

A lane takes a job from the plan (fetch_plan.py), resumes it where an earlier attempt ended, writes chunk by chunk to
disk and checks the hash at the end; memory holds one chunk a lane. What a source does wrong costs the source, never the
fetch; what this node's disk does wrong ends the fetch at once. Where the bytes go is the goal's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import trio

from backends.manifest import PIECE_BYTES
from capabilities.errors import ExpertsUnavailable, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.shards.fetch_plan import ExpertPart, FetchPlan, Job, Source, Transfer, TrunkPart
from swarmnode.shards.messages import (
    PROTOCOL,
    ExpertRange,
    RefusalError,
    ShardRequest,
    TrunkRange,
    decode_chunk,
    encode_request,
)
from swarmnode.shards.pace import Pace
from swarmnode.shards.store import CacheError
from swarmnode.wire import read_frame

Progress = Callable[[int, int], None]
"""progress(bytes here, bytes in all), in the task that fetches, after every chunk. Wrong bytes are taken off again."""

_POLL_SECONDS = 0.2
_RESET_SECONDS_MAX = 1.0

_log = structlog.get_logger(__name__)


class PartialPart(Protocol):
    """A part on its way to the disk, with one writer. `write`, `restart` and `finish` block."""

    size: int

    @property
    def offset(self) -> int:
        """Bytes that are here: where the fetch goes on."""

    def write(self, chunk: bytes | memoryview) -> None: ...

    def restart(self) -> None:
        """Drop what is here."""

    def finish(self) -> bool:
        """With every byte written: True if the hash is right; False drops it."""

    def close(self) -> None:
        """Stop here and keep what has arrived. Does nothing after `finish`."""


class Goal(Protocol):
    """What a fetch fills. The first two block; they and the parts that they give raise CacheError for the disk."""

    def has(self, job: Job) -> bool:
        """Whether the part is here, and right."""

    def begin(self, job: Job) -> PartialPart | None:
        """Start or resume a part; None: another writer is at it, or it is here."""

    def unavailable(
        self,
        part: ExpertPart | TrunkPart,
        missing: Sequence[ExpertPart | TrunkPart],
        reasons: str,
        cause: str,
        peer: str | None,
    ) -> SwarmError:
        """The error that ends a fetch that `part` cannot be had for; the others of `missing` were not there either."""


async def give_up(stream: Stream) -> None:
    """Reset a stream, also when this task is cancelled."""
    with trio.move_on_after(_RESET_SECONDS_MAX) as scope:
        scope.shield = True
        await stream.reset()


def reason(error: Exception) -> str:
    """Why a source failed, in one line."""
    if isinstance(error, trio.TooSlowError):
        return "too slow"
    return (str(error) or type(error).__name__)[: limits.ERROR_DETAIL_BYTES_MAX]


def experts_unavailable(
    part: ExpertPart | TrunkPart,
    missing: Sequence[ExpertPart | TrunkPart],
    reasons: str,
    cause: str,
    peer: str | None,
) -> SwarmError:
    """`Goal.unavailable` of experts."""
    assert isinstance(part, ExpertPart)
    return ExpertsUnavailable(
        f"no peer gave {part} ({reasons})",
        hint="Check in `swarmctl status` that a peer with the model is connected; the fetch resumes where it was.",
        layer=part.layer,
        experts=sorted(o.expert for o in missing if isinstance(o, ExpertPart) and o.layer == part.layer),
        peer=peer,
        cause=cause,
    )


def _range(part: ExpertPart | TrunkPart, offset: int, length: int) -> ExpertRange | TrunkRange:
    if isinstance(part, TrunkPart):
        return TrunkRange(part.index * PIECE_BYTES + offset, length)
    return ExpertRange(part.layer, part.expert, offset, length)


class Fetch:
    """One fetch: the plan, its lanes, and what they share."""

    def __init__(
        self, network: Network, model: str, goal: Goal, progress: Progress | None, pace: Pace | None = None
    ) -> None:
        self.network = network
        self.model = model
        self.goal = goal
        self.pace = Pace() if pace is None else pace
        self.plan = FetchPlan((), (), 0.0)
        self.failure: SwarmError | None = None
        self._progress = progress
        self._skips = False
        self._skipped: SwarmError | None = None
        self._have: dict[bytes, int] = {}
        self._have_bytes = 0
        self._total_bytes = 0
        self._changed = trio.Event()

    async def run(
        self, jobs: Sequence[Job], sources: Sequence[PeerId], patience_seconds: float, *, skip: bool = False
    ) -> SwarmError | None:
        """Reach the goal for every job, from up to SHARD_SOURCES_MAX sources, or raise why not.

        skip: what no source has is left out, and told: the error of the last such job.
        """
        self._skips = skip
        self._total_bytes = sum(job.size for job in jobs)
        missing = []
        for job in jobs:
            if await trio.to_thread.run_sync(self.goal.has, job):
                self.has(job, job.size)
            else:
                missing.append(job)
        self.plan = FetchPlan(missing, sources[: limits.SHARD_SOURCES_MAX], trio.current_time())
        async with trio.open_nursery() as nursery:
            for source in self.plan.sources:
                for _ in range(limits.SHARD_LANES_PER_SOURCE):
                    nursery.start_soon(_Lane(self, source).run)
            await self._watch(patience_seconds)
            nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure
        return self._skipped

    def has(self, job: Job, count: int) -> None:
        """`count` bytes of the job are on disk now."""
        self._have_bytes += count - self._have.get(job.digest, 0)
        self._have[job.digest] = count
        if self._progress is not None:
            self._progress(self._have_bytes, self._total_bytes)

    def notify(self) -> None:
        """The plan changed: whoever waits looks again."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self) -> None:
        """Until the plan changes, or time alone may have changed what is possible."""
        with trio.move_on_after(_POLL_SECONDS):
            await self._changed.wait()

    async def _watch(self, patience_seconds: float) -> None:
        """Return when everything is here or `failure` says why it will not be."""
        while self.failure is None and not self.plan.done:
            job = self.plan.hopeless(trio.current_time(), patience_seconds)
            if job is not None:
                error = self._unavailable(job)
                if self._skips and error.details.get("cause") != "timeout":
                    self._skipped = error
                    self.plan.skip(job)
                else:
                    self.failure = error
            else:
                await self.wait()

    def _unavailable(self, job: Job) -> SwarmError:
        sources = self.plan.sources
        if any(source.banned for source in sources):
            cause = "bad_reply"
        else:
            cause = "refused" if all(job.digest in source.lacks for source in sources) else "timeout"
        reasons = "; ".join(f"{source.peer}: {source.reason}" for source in sources) or "nobody to ask"
        parts = [other.part for other in self.plan.open_jobs()]
        return self.goal.unavailable(job.part, parts, reasons, cause, sources[0].peer if sources else None)


class _Lane:
    """One stream to one source and the task that works through jobs on it."""

    def __init__(self, fetch: Fetch, source: Source) -> None:
        self._fetch = fetch
        self._source = source
        self._stream: Stream | None = None

    async def run(self) -> None:
        fetch, source = self._fetch, self._source
        try:
            while not source.banned:
                scope = trio.CancelScope()
                transfer = fetch.plan.take(source, trio.current_time(), scope.cancel)
                if transfer is None:
                    if slower := fetch.plan.take_over(source, trio.current_time()):
                        slower.cancel()
                    await fetch.wait()
                    continue
                with scope:
                    await self._work(transfer)
                if scope.cancelled_caught:  # a faster source takes it over; the rest of the answer is of no use
                    await self._drop_stream()
                    fetch.plan.given_back(transfer, trio.current_time())
                fetch.notify()
        finally:
            await self._drop_stream()

    async def _work(self, transfer: Transfer) -> None:
        """Try one job and tell the plan how it went. Nothing is awaited between its end and the telling."""
        plan, source, job = self._fetch.plan, self._source, transfer.job
        try:
            complete = await self._transfer(transfer)
        except CacheError as error:
            self._fetch.failure = error
            return
        except RefusalError as refusal:
            if isinstance(refusal.error, ExpertsUnavailable):
                plan.lacking(source, job, str(refusal))
            else:
                plan.failed(source, str(refusal)[: limits.ERROR_DETAIL_BYTES_MAX], trio.current_time())
        except PeerMistake as mistake:
            plan.ban(source, mistake.message)
        except (NetworkError, trio.TooSlowError) as error:
            await self._drop_stream()
            plan.failed(source, reason(error), trio.current_time())
        else:
            if complete is None:
                plan.given_back(transfer, trio.current_time(), later=True)
            elif complete:
                plan.finished(transfer, trio.current_time())
            else:
                self._fetch.has(job, 0)
                plan.wrong(transfer, trio.current_time())
                _log.warning("shard_hash_wrong", peer=source.peer, part=str(job.part))
            return
        _log.info("shard_source_failed", peer=source.peer, part=str(job.part), reason=source.reason)
        plan.given_back(transfer, trio.current_time())

    async def _transfer(self, transfer: Transfer) -> bool | None:
        """True: the part is here; False: its hash was wrong; None: another fetch is busy with it."""
        goal, job = self._fetch.goal, transfer.job
        part = await trio.to_thread.run_sync(goal.begin, job)
        if part is None:
            if await trio.to_thread.run_sync(goal.has, job):
                self._fetch.has(job, job.size)
                return True
            await trio.sleep(_POLL_SECONDS)
            return None
        try:
            self._attribute(job, part)
            transfer.missing_bytes = job.size - part.offset
            self._fetch.has(job, part.offset)
            if transfer.missing_bytes:
                await self._receive(transfer, part)
            return await trio.to_thread.run_sync(part.finish)
        finally:
            part.close()

    def _attribute(self, job: Job, part: PartialPart) -> None:
        """Keep straight whose bytes the partial file holds, and drop them where the plan wants one source's alone."""
        if job.alone and job.contributors - {self._source.peer}:
            part.restart()
        if part.offset == 0:
            job.contributors.clear()
        elif not job.contributors:
            job.contributors.add("")

    async def _receive(self, transfer: Transfer, part: PartialPart) -> None:
        job = transfer.job
        wanted = _range(job.part, part.offset, transfer.missing_bytes)
        end = wanted.offset + wanted.length
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            if self._stream is None:
                self._stream = await self._fetch.network.open_stream(PeerId(self._source.peer), PROTOCOL)
            await self._stream.send(encode_request(ShardRequest(self._fetch.model, wanted)))
        while part.offset < part.size:
            with trio.fail_after(limits.SHARD_CHUNK_SECONDS_MAX):
                frame = await read_frame(self._stream, limits.SHARDS_REPLY)
            data, _ = decode_chunk(frame, end - part.size + part.offset, end)
            await self._fetch.pace.spend(len(data))
            await trio.to_thread.run_sync(part.write, data)
            self._fetch.plan.received(transfer, len(data), trio.current_time())
            self._fetch.has(job, part.offset)

    async def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await give_up(stream)
