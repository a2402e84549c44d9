"""Fetching manifests and experts from other peers: the asking side of /swarmnode/shards/1 (trunks: trunk.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import trio

from backends.manifest import Manifest
from capabilities.errors import ModelNotFound, PeerMistake
from swarmnode import limits
from swarmnode.net.interface import Network, NetworkError, PeerId
from swarmnode.shards.fetch_plan import ExpertPart, Job
from swarmnode.shards.lanes import Fetch, Progress, experts_unavailable, give_up, reason
from swarmnode.shards.messages import PROTOCOL, RefusalError, ShardRequest, decode_chunk, encode_request
from swarmnode.shards.store import PartialShard, ShardCache
from swarmnode.wire import read_frame


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
            reasons.append(f"{peer}: {reason(error)}")
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
        await Fetch(network, manifest.id, _IntoCache(cache), progress, cache.downloads).run(jobs, sources, patience)


def _jobs(manifest: Manifest, wanted: Mapping[int, Sequence[int]]) -> list[Job]:
    jobs: dict[bytes, Job] = {}
    for number, experts in wanted.items():
        layer = manifest.by_layer.get(number)
        if layer is None or not all(0 <= expert < layer.n_expert for expert in experts):
            raise ValueError(f"the manifest has no such experts in layer {number}: {list(experts)}")
        for expert in experts:
            digest = layer.hashes[expert]
            jobs.setdefault(digest, Job(digest, layer.expert_bytes, ExpertPart(number, expert)))
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
        await give_up(stream)
        raise
    await stream.aclose()
    return bytes(data)


def _checked_manifest(data: bytes, manifest_id: str) -> Manifest:
    if hashlib.sha256(data).hexdigest() != manifest_id:
        raise PeerMistake("the bytes of the manifest do not have the hash that is its id")
    return Manifest.from_bytes(data)


class _IntoCache:
    """Experts go into the cache (lanes.Goal)."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache

    def has(self, job: Job) -> bool:
        return self._cache.open(job.digest, job.size) is not None

    def begin(self, job: Job) -> PartialShard | None:
        return self._cache.begin(job.digest, job.size)

    unavailable = staticmethod(experts_unavailable)
