"""Fetching manifests and experts from other peers: the asking side of /swarmnode/shards/1.

A fetch runs a few lanes a source. A lane takes an expert from the plan (fetch_plan.py), resumes its file where an
earlier attempt ended, writes chunk by chunk to disk and checks the hash at the end; memory holds one chunk a lane. What
a source does wrong costs the source, never the fetch; what this node's disk does wrong ends the fetch at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import structlog
import trio

from backends.manifest import Manifest
from capabilities.errors import ExpertsUnavailable, ModelNotFound, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.shards.fetch_plan import FetchPlan, Job, Source, Transfer
from swarmnode.shards.messages import PROTOCOL, ExpertRange, RefusalError, ShardRequest, decode_chunk, encode_request
from swarmnode.shards.store import CacheError, PartialShard, ShardCache
from swarmnode.wire import read_frame

Progress = Callable[[int, int], None]
"""progress(bytes here, bytes in all), in the task that fetches, after every chunk. Wrong bytes are taken off again."""

_POLL_SECONDS = 0.2
_RESET_SECONDS_MAX = 1.0

_log = structlog.get_logger(__name__)


async def fetch_manifest(network: Network, peers: Sequence[PeerId], manifest_id: str) -> Manifest:
    """The manifest with this id from the first of `peers` that has it; its hash is the id, so nobody can forge one.

    Raises ModelNotFound, with every peer's reason, when none gives it within MANIFEST_SECONDS_MAX each.
    """
    reasons = []
    for peer in peers[: limits.SHARD_SOURCES_MAX]:
        try:
            with trio.fail_after(limits.MANIFEST_SECONDS_MAX):
                data = await _manifest_bytes(network, peer, manifest_id)
            return await trio.to_thread.run_sync(_checked_manifest, data, manifest_id)
        except (NetworkError, trio.TooSlowError, PeerMistake, RefusalError) as error:
            reasons.append(f"{peer}: {_reason(error)}")
    raise ModelNotFound(
        f"no peer gave the manifest {manifest_id[:16]} ({'; '.join(reasons) or 'nobody to ask'})",
        hint="Check in `swarmctl status` that a peer with the model is connected.",
    )


async def fetch_experts(
    network: Network,
    sources: Sequence[PeerId],
    manifest: Manifest,
    wanted: Mapping[int, Sequence[int]],
    cache: ShardCache,
    progress: Progress | None = None,
    *,
    patience_seconds: float | None = None,
) -> None:
    """Have every expert of `wanted` (layer to expert ids) in `cache`, verified; from up to SHARD_SOURCES_MAX sources.

    What is in the cache already is verified and, if damaged, fetched. None of the wanted experts is evicted meanwhile;
    to keep them longer, wrap the call in `cache.keep`. Cancelling is safe at any time: a later fetch goes on from
    the bytes that are here. Raises ExpertsUnavailable (layer, experts, peer) as soon as no source is left for an
    expert, or when nothing came for `patience_seconds` (default SHARD_FETCH_PATIENCE_SECONDS); CacheError when the
    cache cannot take them; ValueError for experts that the manifest does not have.
    """
    patience = limits.SHARD_FETCH_PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    jobs = _jobs(manifest, wanted)
    with cache.keep(job.digest for job in jobs):
        await _Fetch(network, manifest, cache, progress).run(jobs, sources[: limits.SHARD_SOURCES_MAX], patience)


def _jobs(manifest: Manifest, wanted: Mapping[int, Sequence[int]]) -> list[Job]:
    jobs: dict[bytes, Job] = {}
    for number, experts in wanted.items():
        layer = manifest.by_layer.get(number)
        if layer is None or not all(0 <= expert < layer.n_expert for expert in experts):
            raise ValueError(f"the manifest has no such experts in layer {number}: {list(experts)}")
        for expert in experts:
            digest = layer.hashes[expert]
            jobs.setdefault(digest, Job(digest, layer.expert_bytes, number, expert))
    return list(jobs.values())


async def _manifest_bytes(network: Network, peer: PeerId, manifest_id: str) -> bytes:
    stream = await network.open_stream(peer, PROTOCOL)
    try:
        await stream.send(encode_request(ShardRequest(manifest_id, None)))
        data = bytearray()
        end: int | None = None
        while end is None or len(data) < end:
            chunk, end = decode_chunk(await read_frame(stream, limits.SHARDS_REPLY), len(data), end)
            data += chunk
    except BaseException:
        await _give_up(stream)
        raise
    await stream.aclose()
    return bytes(data)


def _checked_manifest(data: bytes, manifest_id: str) -> Manifest:
    if hashlib.sha256(data).hexdigest() != manifest_id:
        raise PeerMistake("the bytes of the manifest do not have the hash that is its id")
    return Manifest.from_bytes(data)


async def _give_up(stream: Stream) -> None:
    with trio.move_on_after(_RESET_SECONDS_MAX) as scope:
        scope.shield = True
        await stream.reset()


def _reason(error: Exception) -> str:
    if isinstance(error, trio.TooSlowError):
        return "too slow"
    return (str(error) or type(error).__name__)[: limits.ERROR_DETAIL_BYTES_MAX]


class _Fetch:
    """One fetch: the plan, its lanes, and what they share."""

    def __init__(self, network: Network, manifest: Manifest, cache: ShardCache, progress: Progress | None) -> None:
        self.network = network
        self.manifest = manifest
        self.cache = cache
        self.plan = FetchPlan((), (), 0.0)
        self.failure: SwarmError | None = None
        self._progress = progress
        self._have: dict[bytes, int] = {}
        self._have_bytes = 0
        self._total_bytes = 0
        self._changed = trio.Event()

    async def run(self, jobs: list[Job], peers: Sequence[PeerId], patience_seconds: float) -> None:
        self._total_bytes = sum(job.size for job in jobs)
        missing = []
        for job in jobs:
            if await trio.to_thread.run_sync(self.cache.open, job.digest, job.size) is None:
                missing.append(job)
            else:
                self.has(job, job.size)
        self.plan = FetchPlan(missing, peers, trio.current_time())
        async with trio.open_nursery() as nursery:
            for source in self.plan.sources:
                for _ in range(limits.SHARD_LANES_PER_SOURCE):
                    nursery.start_soon(_Lane(self, source).run)
            await self._watch(patience_seconds)
            nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure

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
                self.failure = self._unavailable(job)
            else:
                await self.wait()

    def _unavailable(self, job: Job) -> ExpertsUnavailable:
        sources = self.plan.sources
        if any(source.banned for source in sources):
            cause = "bad_reply"
        else:
            cause = "refused" if all(job.digest in source.lacks for source in sources) else "timeout"
        reasons = "; ".join(f"{source.peer}: {source.reason}" for source in sources)
        return ExpertsUnavailable(
            f"no peer gave expert {job.expert} of layer {job.layer} ({reasons or 'nobody to ask'})",
            hint="Check in `swarmctl status` that a peer with the model is connected; the fetch resumes where it was.",
            layer=job.layer,
            experts=sorted(other.expert for other in self.plan.open_jobs() if other.layer == job.layer),
            peer=sources[0].peer if sources else None,
            cause=cause,
        )


class _Lane:
    """One stream to one source and the task that works through jobs on it."""

    def __init__(self, fetch: _Fetch, source: Source) -> None:
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
            plan.failed(source, _reason(error), trio.current_time())
        else:
            if complete is None:
                plan.given_back(transfer, trio.current_time(), later=True)
            elif complete:
                plan.finished(transfer, trio.current_time())
            else:
                self._fetch.has(job, 0)
                plan.wrong(transfer, trio.current_time())
                _log.warning("shard_hash_wrong", peer=source.peer, layer=job.layer, expert=job.expert)
            return
        _log.info("shard_source_failed", peer=source.peer, layer=job.layer, expert=job.expert, reason=source.reason)
        plan.given_back(transfer, trio.current_time())

    async def _transfer(self, transfer: Transfer) -> bool | None:
        """True: the expert is in the cache; False: its hash was wrong; None: another fetch is busy with it."""
        cache, job = self._fetch.cache, transfer.job
        part = await trio.to_thread.run_sync(cache.begin, job.digest, job.size)
        if part is None:
            if await trio.to_thread.run_sync(cache.open, job.digest, job.size) is not None:
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

    def _attribute(self, job: Job, part: PartialShard) -> None:
        """Keep straight whose bytes the partial file holds, and drop them where the plan wants one source's alone."""
        if job.alone and job.contributors - {self._source.peer}:
            part.restart()
        if part.offset == 0:
            job.contributors.clear()
        elif not job.contributors:
            job.contributors.add("")

    async def _receive(self, transfer: Transfer, part: PartialShard) -> None:
        job = transfer.job
        wanted = ExpertRange(job.layer, job.expert, part.offset, transfer.missing_bytes)
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            if self._stream is None:
                self._stream = await self._fetch.network.open_stream(PeerId(self._source.peer), PROTOCOL)
            await self._stream.send(encode_request(ShardRequest(self._fetch.manifest.id, wanted)))
        while part.offset < part.size:
            with trio.fail_after(limits.SHARD_CHUNK_SECONDS_MAX):
                frame = await read_frame(self._stream, limits.SHARDS_REPLY)
            data, _ = decode_chunk(frame, part.offset, part.size)
            await trio.to_thread.run_sync(part.write, data)
            self._fetch.plan.received(transfer, len(data), trio.current_time())
            self._fetch.has(job, part.offset)

    async def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await _give_up(stream)
