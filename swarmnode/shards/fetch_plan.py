"""Who fetches what next: the decisions of a fetch from several sources, pure.

Each source works through one shared list of parts: experts, or pieces of a trunk. A source that fails is left alone for
a while, doubling; one that sends wrong bytes is out. What a broken transfer brought stays, and another source goes on
from there, so a wrong hash at the end convicts only a source that brought every byte; after a mixture that was wrong,
the part is fetched again from one source alone. A source without work takes a part over from one that is so slow that
the change pays off.

Instants are seconds of any monotonic clock, passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode import limits

_TAKE_OVER_FACTOR = 3.0
"""How much longer than the idle source would need for all of it. Below, measuring noise would shuffle work around."""

_TAKE_OVER_SECONDS_MIN = 1.0
"""Nothing is taken over for less: a new request costs round trips."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One expert."""

    layer: int
    expert: int

    def __str__(self) -> str:
        return f"expert {self.expert} of layer {self.layer}"


@dataclass(frozen=True, slots=True)
class TrunkPart:
    """One piece of the trunk."""

    index: int

    def __str__(self) -> str:
        return f"piece {self.index} of the trunk"


@dataclass(eq=False, slots=True)
class Job:
    """One part to fetch. Experts with the same bytes are one job; `part` then is the first."""

    digest: bytes
    size: int
    part: ExpertPart | TrunkPart
    contributors: set[str] = field(default_factory=set)
    """Who sent what is on disk of it: peers, or "" for a run of this program before."""
    alone: bool = False
    """A mixture of sources was wrong: only one source's bytes from here on."""
    reserved_for: Source | None = None
    """Counts only while that source may be asked."""


@dataclass(eq=False, slots=True)
class Source:
    """A peer's standing in this fetch."""

    peer: str
    banned: bool = False
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    reason: str = "did not answer yet"
    lacks: set[bytes] = field(default_factory=set)
    received_bytes: int = 0
    busy_seconds: float = 0.0

    def usable(self, now: float) -> bool:
        """Whether it may be asked at this instant."""
        return not self.banned and now >= self.retry_at

    @property
    def rate(self) -> float:
        """Bytes a second of one of its streams; 0.0 as long as nothing is known."""
        return self.received_bytes / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(eq=False, slots=True)
class Transfer:
    """A job in the hands of a source. `cancel` makes its task give the job back."""

    job: Job
    source: Source
    begun_at: float
    cancel: Callable[[], None]
    received_bytes: int = 0
    missing_bytes: int = 0

    def seconds_left(self, now: float) -> float:
        """At its own pace so far; infinite while nothing has come."""
        elapsed = now - self.begun_at
        return self.missing_bytes * elapsed / self.received_bytes if self.received_bytes else float("inf")


class FetchPlan:
    """The jobs of one fetch and the sources' standing."""

    def __init__(self, jobs: Iterable[Job], peers: Sequence[str], now: float) -> None:
        self.sources = [Source(peer) for peer in peers]
        self._pending = list(jobs)
        self._active: list[Transfer] = []
        self._progress_at = now

    @property
    def done(self) -> bool:
        return not self._pending and not self._active

    def open_jobs(self) -> list[Job]:
        """Everything that is not done, what is in transfer first."""
        return [transfer.job for transfer in self._active] + self._pending

    def take(self, source: Source, now: float, cancel: Callable[[], None]) -> Transfer | None:
        """The next job for `source`; None while there is nothing for it, it has to wait, or it is out."""
        if not source.usable(now):
            return None
        for index, job in enumerate(self._pending):
            holder = job.reserved_for
            free = holder is None or holder is source or not holder.usable(now)
            if free and job.digest not in source.lacks:
                del self._pending[index]
                job.reserved_for = None
                transfer = Transfer(job, source, now, cancel, missing_bytes=job.size)
                self._active.append(transfer)
                return transfer
        return None

    def take_over(self, source: Source, now: float) -> Transfer | None:
        """The transfer that `source`, idle, should take over: reserved for it now, to be cancelled by the caller."""
        if not source.usable(now) or not source.rate:
            return None
        slowest = max(
            (t for t in self._active if t.source is not source and t.job.digest not in source.lacks),
            key=lambda t: t.seconds_left(now),
            default=None,
        )
        if slowest is None or slowest.job.reserved_for is not None:
            return None
        would_take = slowest.job.size / source.rate
        waited = now - slowest.begun_at
        limit = max(_TAKE_OVER_SECONDS_MIN, _TAKE_OVER_FACTOR * would_take)
        if waited < limit or slowest.seconds_left(now) < limit:
            return None
        slowest.job.reserved_for = source
        return slowest

    def received(self, transfer: Transfer, count: int, now: float) -> None:
        """A chunk of `count` bytes has come and is on disk."""
        transfer.received_bytes += count
        transfer.missing_bytes -= count
        transfer.job.contributors.add(transfer.source.peer)
        transfer.source.failures = 0
        self._progress_at = now

    def finished(self, transfer: Transfer, now: float) -> None:
        """The job is complete and right."""
        self._release(transfer, now)
        self._progress_at = now

    def given_back(self, transfer: Transfer, now: float, *, later: bool = False) -> None:
        """The job goes on with whoever comes next; `later`: after all others."""
        self._release(transfer, now)
        self._pending.insert(len(self._pending) if later else 0, transfer.job)

    def wrong(self, transfer: Transfer, now: float) -> bool:
        """All bytes came and the hash is wrong; they are gone. True if the source is convicted (and out)."""
        job, source = transfer.job, transfer.source
        guilty = job.contributors == {source.peer}
        job.contributors.clear()
        job.alone = True
        if guilty:
            self.ban(source, f"sent wrong bytes for {job.part}")
        self.given_back(transfer, now)
        return guilty

    def ban(self, source: Source, reason: str) -> None:
        """The source broke the protocol or sent wrong bytes: not asked again in this fetch."""
        source.banned = True
        source.reason = reason

    def failed(self, source: Source, reason: str, now: float) -> None:
        """The source broke off, timed out or refused for now."""
        pause = limits.SHARD_BACKOFF_SECONDS_MIN * 2.0 ** min(source.failures, 16)
        source.failures += 1
        source.retry_at = max(source.retry_at, now + min(pause, limits.SHARD_BACKOFF_SECONDS_MAX))
        source.reason = reason

    def lacking(self, source: Source, job: Job, reason: str) -> None:
        """The source does not hold it."""
        source.lacks.add(job.digest)
        source.reason = reason

    def hopeless(self, now: float, patience_seconds: float) -> Job | None:
        """A job that this fetch will not get: nobody is left who may have it, or nothing came for too long."""
        if now - self._progress_at >= patience_seconds:
            return next(iter(self.open_jobs()), None)
        lacks = [source.lacks for source in self.sources if not source.banned]
        if not lacks:
            return next(iter(self._pending), None)
        nowhere = set.intersection(*lacks)
        return next((job for job in self._pending if job.digest in nowhere), None) if nowhere else None

    def skip(self, job: Job) -> None:
        """Do without a job that is in nobody's hands."""
        if job in self._pending:
            self._pending.remove(job)

    def _release(self, transfer: Transfer, now: float) -> None:
        self._active.remove(transfer)
        transfer.source.received_bytes += transfer.received_bytes
        transfer.source.busy_seconds += now - transfer.begun_at
