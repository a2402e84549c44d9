"""Manifests and experts between peers: several sources, resuming, and sources that die, lie, drag or refuse."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import ExpertsUnavailable, ModelNotFound, PeerMistake
from swarmnode import limits
from swarmnode.identity import Identity
from swarmnode.net.interface import Network, PeerId, Stream, StreamReset
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import open_memory_hub
from swarmnode.shards.fetch import fetch_experts, fetch_manifest
from swarmnode.shards.messages import (
    PROTOCOL,
    ExpertRange,
    RefusalError,
    ShardRequest,
    decode_chunk,
    decode_request,
    encode_chunk,
    encode_refusal,
    encode_request,
)
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import CacheError, ShardCache
from swarmnode.wire import Frame, encode_frame, read_frame, split_frame
from tests.net_tools import eventually
from tests.patience import PATIENCE_S, stuck, turns
from tests.shard_models import ShardModel, shard_model

CHUNK = 4_096
MODEL = shard_model()  # eight experts of six chunks each
EXPERT = ExpertRange(layer=1, expert=0, offset=0, length=6 * CHUNK)


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARD_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MIN", 0.01)
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MAX", 0.05)


OnSend = Callable[["Peer", bytes], Awaitable[bytes]]


@dataclass
class Peer:
    """A peer that serves `model` with the real service, over streams whose sends go through `on_send`."""

    model: ShardModel = MODEL
    on_send: OnSend | None = None
    served_as: str = MODEL.manifest.id
    sends: int = 0
    reads: list[tuple[int, int, int]] = field(default_factory=list)
    service: TamperedService = field(init=False)

    def __post_init__(self) -> None:
        served = ServedModel(self.model.manifest, self.model.manifest.to_bytes(), self)
        self.service = TamperedService({self.served_as: served}.get)
        self.service.peer = self

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
        self.reads.append((layer, expert, offset))
        return self.model.read(layer, expert, offset, length)


class TamperedService(ShardService):
    """The real service, over tampered streams."""

    peer: Peer

    async def handle(self, stream: Stream) -> None:
        await super().handle(Tampered(stream, self.peer))


class Tampered:
    """A stream whose sends go through the peer's `on_send`, which may change, delay or refuse them."""

    def __init__(self, stream: Stream, peer: Peer) -> None:
        self._stream = stream
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, data: bytes) -> None:
        self._peer.sends += 1
        if self._peer.on_send is not None:
            data = await self._peer.on_send(self._peer, data)
        await self._stream.send(data)


@asynccontextmanager
async def connected(*peers: Peer) -> AsyncIterator[tuple[Network, list[PeerId]]]:
    """A client's network and the ids of `peers`, which serve shards on it."""
    async with open_memory_hub() as hub:
        client = hub.join()
        ids = []
        for peer in peers:
            network = hub.join()
            peer.service.register(network)
            ids.append(await client.connect(network.addresses[0]))
        yield client, ids


@asynccontextmanager
async def libp2p_networks(count: int) -> AsyncIterator[list[Network]]:
    """Networks of `count` peers on loopback, not connected to each other."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]))
            for _ in range(count)
        ]


def assert_complete(cache: ShardCache, model: ShardModel = MODEL, wanted: dict[int, list[int]] | None = None) -> None:
    for layer, experts in (wanted or model.everything).items():
        described = model.manifest.experts_of(layer)
        for expert in experts:
            assert cache.open(described.hashes[expert], described.expert_bytes) == model.experts[layer, expert]


async def fetch(client: Network, ids: list[PeerId], cache: ShardCache, **options: Any) -> None:
    with trio.fail_after(PATIENCE_S):
        await fetch_experts(client, ids, MODEL.manifest, options.pop("wanted", MODEL.everything), cache, **options)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path, 10**6)


# --- Manifests --------------------------------------------------------------------------------------------------------


async def test_a_manifest_comes_from_the_first_peer_that_has_it() -> None:
    async with connected(Peer(served_as="0" * 64), Peer(), Peer()) as (client, ids):
        assert await fetch_manifest(client, ids, MODEL.manifest.id) == MODEL.manifest


async def test_a_forged_manifest_is_not_believed() -> None:
    other = shard_model(layers=(0,))
    async with connected(Peer(other, served_as=MODEL.manifest.id), Peer()) as (client, ids):
        assert await fetch_manifest(client, ids, MODEL.manifest.id) == MODEL.manifest
        with pytest.raises(ModelNotFound, match="do not have the hash"):
            await fetch_manifest(client, ids[:1], MODEL.manifest.id)
        with pytest.raises(ModelNotFound, match="nobody to ask"):
            await fetch_manifest(client, [], MODEL.manifest.id)


async def test_a_manifest_of_many_chunks() -> None:
    large = shard_model(layers=(0, 1, 2), n_expert=1_000, width=1, ff=1)
    async with connected(Peer(large, served_as=large.manifest.id)) as (client, ids):
        assert len(large.manifest.to_bytes()) > 20 * CHUNK
        assert await fetch_manifest(client, ids, large.manifest.id) == large.manifest


async def test_a_peer_that_never_answers_costs_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFEST_SECONDS_MAX", 0.1)
    async with connected(Peer(on_send=never), Peer()) as (client, ids):
        assert await fetch_manifest(client, ids, MODEL.manifest.id) == MODEL.manifest
        with pytest.raises(ModelNotFound, match="too slow"):
            await fetch_manifest(client, ids[:1], MODEL.manifest.id)


# --- Experts: when all goes well --------------------------------------------------------------------------------------


async def test_experts_come_from_several_sources_at_once(cache: ShardCache) -> None:
    seen: list[tuple[int, int]] = []
    a, b = Peer(on_send=after(0.002)), Peer(on_send=after(0.002))
    async with connected(a, b) as (client, ids):
        await fetch(client, ids, cache, progress=lambda done, total: seen.append((done, total)))
    assert_complete(cache)
    assert len({read[:2] for read in a.reads}) >= 2
    assert len({read[:2] for read in b.reads}) >= 2
    assert len(a.reads) + len(b.reads) == 8 * 6, "nothing was fetched twice"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (MODEL.total_bytes, MODEL.total_bytes)


async def test_only_what_is_wanted_and_missing_is_fetched(cache: ShardCache) -> None:
    peer = Peer()
    async with connected(peer) as (client, ids):
        await fetch(client, ids, cache, wanted={3: [2, 0]})
        assert {read[:2] for read in peer.reads} == {(3, 0), (3, 2)}
        peer.reads.clear()
        seen: list[tuple[int, int]] = []
        await fetch(client, ids, cache, wanted={3: [0, 1, 2], 1: []}, progress=lambda *now: seen.append(now))
        assert {read[:2] for read in peer.reads} == {(3, 1)}
        assert seen[-1] == (3 * 6 * CHUNK, 3 * 6 * CHUNK)
        for wanted in ({2: [0]}, {1: [4]}, {1: [-1]}):
            with pytest.raises(ValueError, match="no such experts"):
                await fetch(client, ids, cache, wanted=wanted)
    assert cache.statistics().kept_bytes == 0


async def test_equal_experts_are_fetched_once(cache: ShardCache) -> None:
    twins = shard_model(layers=(0,), n_expert=2)
    layer = twins.manifest.layers[0]
    object.__setattr__(layer, "hashes", (layer.hashes[0],) * 2)
    peer = Peer(twins, served_as=twins.manifest.id)
    async with connected(peer) as (client, ids):
        await fetch_experts(client, ids, twins.manifest, {0: [0, 1]}, cache)
    assert len(peer.reads) == 6


async def test_two_fetches_of_the_same_experts_share_the_work(cache: ShardCache) -> None:
    peer = Peer(on_send=after(0.005))
    async with connected(peer) as (client, ids), trio.open_nursery() as nursery:
        nursery.start_soon(fetch, client, ids, cache)
        await fetch(client, ids, cache)
    assert_complete(cache)
    assert len(peer.reads) == 8 * 6


async def test_memory_stays_small_whatever_the_experts_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARD_CHUNK_BYTES", 256 * limits.KIB)
    large = shard_model(layers=(0,), n_expert=5, width=512, ff=1_024)  # 6 MiB each
    cache = ShardCache(tmp_path, 10**8)
    async with connected(Peer(large, served_as=large.manifest.id)) as (client, ids):
        tracemalloc.start()
        await fetch_experts(client, ids, large.manifest, large.everything, cache)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert_complete(cache, large)
    assert peak < 10 * limits.MIB, "the network may hold a window for each stream"


# --- Experts: faults --------------------------------------------------------------------------------------------------


async def never(peer: Peer, data: bytes) -> bytes:
    await trio.sleep_forever()
    return data


def after(seconds: float) -> OnSend:
    async def delayed(peer: Peer, data: bytes) -> bytes:
        await trio.sleep(seconds)
        return data

    return delayed


def breaking_at(*sends: int) -> OnSend:
    async def broken(peer: Peer, data: bytes) -> bytes:
        number = peer.sends
        await trio.sleep(0.01)  # what was sent before has arrived: a reset would take it along
        if number in sends:
            raise StreamReset("gone")
        return data

    return broken


async def flipped(peer: Peer, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_a_source_that_breaks_and_comes_back_goes_on_where_it_was(cache: ShardCache) -> None:
    peer = Peer(on_send=breaking_at(4, 9))
    async with connected(peer) as (client, ids):
        await fetch(client, ids, cache, wanted={1: [0, 1, 2]})
    assert_complete(cache, wanted={1: [0, 1, 2]})
    assert len(peer.reads) == 18 + 2, "only the chunks that were lost came twice"


async def test_another_source_goes_on_where_one_died(cache: ShardCache) -> None:
    dying, healthy = Peer(on_send=breaking_at(*range(4, 1_000))), Peer(on_send=after(0.01))
    async with connected(dying, healthy) as (client, ids):
        await fetch(client, ids, cache)
    assert_complete(cache)
    assert dying.sends > 4
    assert len(healthy.reads) == 8 * 6 - 3, "it went on behind the three chunks that had come"


async def test_a_source_that_sends_wrong_bytes_is_out(cache: ShardCache) -> None:
    liar, honest = Peer(on_send=flipped), Peer(on_send=after(0.005))
    async with connected(liar, honest) as (client, ids):
        seen: list[int] = []
        await fetch(client, ids, cache, progress=lambda done, total: seen.append(done))
    assert_complete(cache)
    assert len({read[:2] for read in liar.reads}) <= limits.SHARD_LANES_PER_SOURCE
    assert seen[-1] == MODEL.total_bytes


async def test_nobody_left_is_an_error_that_names_layer_expert_and_peer(cache: ShardCache) -> None:
    async with connected(Peer(on_send=flipped)) as (client, ids):
        with pytest.raises(ExpertsUnavailable, match="sent wrong bytes for expert") as caught:
            await fetch(client, ids, cache, wanted={3: [1, 2]})
    assert caught.value.details == {"layer": 3, "experts": [1, 2], "peer": ids[0], "cause": "bad_reply"}
    assert ids[0] in caught.value.message
    assert cache.statistics().experts == 0


async def test_poisoned_beginnings_convict_nobody(cache: ShardCache) -> None:
    layer = MODEL.manifest.experts_of(1)
    part = cache.begin(layer.hashes[0], layer.expert_bytes)
    assert part is not None
    part.write(bytes(2 * CHUNK))
    part.close()
    peer = Peer()
    async with connected(peer) as (client, ids):
        await fetch(client, ids, cache, wanted={1: [0]})
    assert_complete(cache, wanted={1: [0]})
    chunks_asked = [offset // CHUNK for *_, offset in peer.reads]
    assert chunks_asked == [2, 3, 4, 5, 0, 1, 2, 3, 4, 5]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "a chunk too long": lambda data: encode_chunk(0, 6 * CHUNK, bytes(CHUNK + 1)),
    "a chunk too short": lambda data: encode_chunk(0, 6 * CHUNK, bytes(CHUNK - 1)),
    "another end": lambda data: encode_chunk(0, 7 * CHUNK, bytes(CHUNK)),
    "another offset": lambda data: encode_chunk(CHUNK, 6 * CHUNK, bytes(CHUNK)),
    "an offset that is no number": lambda data: encode_frame({"offset": "0", "end": 6 * CHUNK}, bytes(CHUNK)),
    "two gigabytes": lambda data: data[:4] + (2**31).to_bytes(4, "little") + data[8:],
    "a giant header": lambda data: (2**31).to_bytes(4, "little") + data[4:],
    "no msgpack": lambda data: data[:8] + b"\xc1" * (len(data) - 8),
    "an error that is none": lambda data: encode_frame({"error": 7}),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_source_that_lies_about_lengths_is_out(cache: ShardCache, name: str) -> None:
    async def lie(peer: Peer, data: bytes) -> bytes:
        return LIES[name](data)

    liar, honest = Peer(on_send=lie), Peer(on_send=after(0.002))
    async with connected(liar, honest) as (client, ids):
        await fetch(client, ids, cache)
    assert_complete(cache)
    assert liar.service.statistics.requests <= limits.SHARD_LANES_PER_SOURCE


async def test_a_source_that_falls_silent_is_left_at_its_deadline(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARD_CHUNK_SECONDS_MAX", 0.1)
    monkeypatch.setattr(limits, "SEND_SECONDS_MAX", 0.15)
    async with connected(Peer(on_send=never), Peer()) as (client, ids):
        await fetch(client, ids, cache)
        assert_complete(cache)
        cache.discard(MODEL.manifest.experts_of(1).hashes)
        with pytest.raises(ExpertsUnavailable, match="too slow") as caught:
            await fetch(client, ids[:1], cache, patience_seconds=0.5)
    assert caught.value.details["cause"] == "timeout"
    assert caught.value.details["layer"] == 1


async def test_a_dragging_source_does_not_hold_up_the_end(cache: ShardCache) -> None:
    dragging = Peer(on_send=after(2.0))
    async with connected(dragging, Peer()) as (client, ids):
        begin = trio.current_time()
        await fetch(client, ids, cache)
        assert trio.current_time() - begin < 10, "alone it would take twelve seconds for an expert"
    assert_complete(cache)


async def test_experts_that_a_source_lacks_come_from_another(cache: ShardCache, tmp_path: Path) -> None:
    class Half(Peer):
        def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
            if layer == 3:
                raise ExpertsUnavailable("not here", layer=layer, experts=[expert], cause="refused")
            return super().read(layer, expert, offset, length)

    half, whole = Half(), Peer(on_send=after(0.002))
    async with connected(half, whole) as (client, ids):
        await fetch(client, ids, cache)
        assert_complete(cache)
        assert half.reads
        with pytest.raises(ExpertsUnavailable, match="not here") as caught:
            await fetch(client, ids[:1], ShardCache(tmp_path / "other", 10**6))
    assert caught.value.details == {"layer": 3, "experts": [0, 1, 2, 3], "peer": ids[0], "cause": "refused"}


async def test_a_peer_that_is_not_there_and_nobody_at_all(cache: ShardCache) -> None:
    gone = PeerId("12D3KooWGone")
    async with connected(Peer()) as (client, ids):
        await fetch(client, [gone, *ids], cache)
        assert_complete(cache)
        cache.discard(MODEL.manifest.experts_of(1).hashes)
        with pytest.raises(ExpertsUnavailable, match="12D3KooWGone"):
            await fetch(client, [gone], cache, patience_seconds=0.2)
        with pytest.raises(ExpertsUnavailable, match="nobody to ask"):
            await fetch(client, [], cache)


async def test_a_damaged_file_in_the_cache_is_fetched_again(cache: ShardCache) -> None:
    async with connected(Peer()) as (client, ids):
        await fetch(client, ids, cache)
        path = next(path for path in cache.root.rglob("*") if path.is_file())
        path.write_bytes(b"\0" * path.stat().st_size)
        restarted = ShardCache(cache.root, 10**6)
        peer = Peer()
        async with connected(peer) as (second, sources):
            await fetch(second, sources, restarted)
    assert_complete(restarted)
    assert len(peer.reads) == 6


async def test_a_full_disk_ends_the_fetch_and_a_later_one_resumes(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pwrite, turn = 0, os.pwrite, threading.Lock()

    def limited(fd: int, data: memoryview, offset: int) -> int:
        nonlocal written
        with turn:  # several threads write
            if written >= 15 * CHUNK:
                raise OSError(errno.ENOSPC, "No space left on device")
            written += len(data)
        return pwrite(fd, data, offset)

    peer = Peer()
    async with connected(peer) as (client, ids):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", limited)
            with cache.keep(MODEL.manifest.experts_of(1).hashes), pytest.raises(CacheError, match="disk is full"):
                await fetch(client, ids, cache)
        kept = cache.statistics().used_bytes
        assert kept == 15 * CHUNK
        await stuck(lambda: len(peer.reads))  # until the source has noticed
        peer.reads.clear()
        await fetch(client, ids, cache)
    assert_complete(cache)
    assert len(peer.reads) == 8 * 6 - 15


async def test_a_budget_too_small_is_an_error_before_anything_is_lost(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * 6 * CHUNK)
    async with connected(Peer()) as (client, ids):
        with pytest.raises(CacheError, match="budget"):
            await fetch(client, ids, cache)
        await fetch(client, ids, cache, wanted={1: [0, 1, 2]})
    assert_complete(cache, wanted={1: [0, 1, 2]})


async def test_a_cancelled_fetch_resumes(cache: ShardCache) -> None:
    peer = Peer(on_send=after(0.01))
    async with connected(peer) as (client, ids):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, client, ids, cache)
            await eventually(lambda: len(peer.reads) > 15)
            nursery.cancel_scope.cancel()
        there = cache.statistics().used_bytes // CHUNK
        assert 5 < there < 40
        await stuck(lambda: len(peer.reads))
        peer.reads.clear()
        await fetch(client, ids, cache)
    assert_complete(cache)
    assert len(peer.reads) == 8 * 6 - there


# --- The service alone ------------------------------------------------------------------------------------------------


async def ask(stream: Stream, request: ShardRequest) -> bytes:
    await stream.send(encode_request(request))
    data, end = bytearray(), None
    while end is None or len(data) < end:
        chunk, end = decode_chunk(await read_frame(stream, limits.SHARDS_REPLY), len(data), end)
        data += chunk
    return bytes(data)


async def test_a_stream_carries_one_request_after_the_other_and_survives_refusals() -> None:
    model, total = MODEL.manifest.id, 6 * CHUNK
    peer = Peer()
    async with connected(peer) as (client, ids):
        stream = await client.open_stream(ids[0], PROTOCOL)
        assert await ask(stream, ShardRequest(model, ExpertRange(1, 2, 0, 100))) == MODEL.experts[1, 2][:100]
        for request, error in (
            (ShardRequest("0" * 64, None), ModelNotFound),
            (ShardRequest(model, ExpertRange(2, 0, 0, 1)), PeerMistake),
            (ShardRequest(model, ExpertRange(1, 4, 0, 1)), PeerMistake),
            (ShardRequest(model, ExpertRange(1, 0, 0, total + 1)), PeerMistake),
            (ShardRequest(model, ExpertRange(1, 0, total, 1)), PeerMistake),
            (ShardRequest(model, ExpertRange(1, 0, 0, 2**40)), PeerMistake),
        ):
            with pytest.raises(RefusalError) as caught:
                await ask(stream, request)
            assert type(caught.value.error) is error
        assert await ask(stream, ShardRequest(model, None)) == MODEL.manifest.to_bytes()
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
    assert peer.service.statistics.requests == 8
    assert (peer.service.statistics.refused, peer.service.statistics.mistakes) == (6, 5)
    assert peer.service.statistics.streams_open == 0


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", encode_frame([]), encode_frame({}, b"x"), bytes(66)])
async def test_junk_is_refused_and_harms_nobody(cache: ShardCache, junk: bytes) -> None:
    peer = Peer()
    async with connected(peer) as (client, ids):
        stream = await client.open_stream(ids[0], PROTOCOL)
        await stream.send(junk)
        with pytest.raises(RefusalError, match="peer_mistake"):
            decode_chunk(await read_frame(stream, limits.SHARDS_REPLY), 0)
        await fetch(client, ids, cache, wanted={1: [0]})
    assert peer.service.statistics.mistakes == 1


async def test_an_idle_stream_and_one_that_reads_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_STREAM_SECONDS_MAX", 0.05)
    monkeypatch.setattr(limits, "SEND_SECONDS_MAX", 0.1)
    idle, stuck = Peer(), Peer(on_send=never)
    async with connected(idle, stuck) as (client, ids):
        await client.open_stream(ids[0], PROTOCOL)
        stream = await client.open_stream(ids[1], PROTOCOL)
        await stream.send(encode_request(ShardRequest(MODEL.manifest.id, EXPERT)))
        await turns()
        await eventually(lambda: idle.service.statistics.streams_open == stuck.service.statistics.streams_open == 0)


async def test_more_streams_than_allowed_are_told_so(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARD_STREAMS_MAX", 1)
    peer = Peer()
    async with connected(peer) as (client, ids):
        stream = await client.open_stream(ids[0], PROTOCOL)
        await ask(stream, ShardRequest(MODEL.manifest.id, EXPERT))
        with pytest.raises(ModelNotFound, match="overloaded"):
            await fetch_manifest(client, ids, MODEL.manifest.id)
        await stream.aclose()
        await fetch(client, ids, cache)  # its two lanes share the one stream that is allowed
    assert_complete(cache)


async def test_a_disk_that_hangs_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Peer):
        def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
            trio.from_thread.run(trio.sleep, 0.3)
            return super().read(layer, expert, offset, length)

    monkeypatch.setattr(limits, "SHARD_READ_WAIT_SECONDS_MAX", 0.05)
    async with connected(Hanging()) as (client, ids):
        stream = await client.open_stream(ids[0], PROTOCOL)
        with pytest.raises(RefusalError, match="disk is too slow"):
            await ask(stream, ShardRequest(MODEL.manifest.id, EXPERT))


# --- Over libp2p ------------------------------------------------------------------------------------------------------


async def test_over_libp2p_with_a_connection_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MiB from two peers, one of which loses its connection; a small round trip beside it stays quick."""
    monkeypatch.setattr(limits, "SHARD_CHUNK_BYTES", 256 * limits.KIB)
    model = shard_model(layers=(0, 1), n_expert=8, width=128, ff=1_024)
    mended = trio.Event()

    async def paced(peer: Peer, data: bytes) -> bytes:
        await trio.sleep(0.01)
        if peer.sends > 20:
            await mended.wait()
        return data

    peers = [Peer(model, on_send=paced, served_as=model.manifest.id) for _ in range(2)]
    cache = ShardCache(tmp_path, 10**9)
    round_trips, reads_before = list[float](), 0

    async def echo(stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive_exactly(8))

    async def measure(stream: Stream) -> None:
        while True:
            begin = trio.current_time()
            await stream.send(bytes(8))
            await stream.receive_exactly(8)
            round_trips.append(trio.current_time() - begin)
            await trio.sleep(0.01)

    async with libp2p_networks(3) as (client, *others):
        for network, peer in zip(others, peers, strict=True):
            peer.service.register(network)
            network.serve("/echo/1", echo, max_streams_per_peer=1)
            await client.connect(network.addresses[0])
        ids = [network.peer_id for network in others]
        assert await fetch_manifest(client, ids, model.manifest.id) == model.manifest

        async def break_and_mend() -> None:
            nonlocal reads_before
            await eventually(lambda: len(peers[1].reads) > 2)
            await client.disconnect(ids[1])
            reads_before = len(peers[1].reads)
            await client.connect(others[1].addresses[0])
            mended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure, await client.open_stream(ids[0], "/echo/1"))
            nursery.start_soon(break_and_mend)
            with trio.fail_after(PATIENCE_S):
                await fetch_experts(client, ids, model.manifest, model.everything, cache)
            nursery.cancel_scope.cancel()
    assert_complete(cache, model)
    assert peers[1].service.statistics.streams_open == 0
    assert 0 < reads_before < len(peers[1].reads), "it was used before and after"
    assert sorted(round_trips)[len(round_trips) // 2] < 0.5


# --- Messages ---------------------------------------------------------------------------------------------------------


def test_golden_messages() -> None:
    request = ShardRequest("ab" * 32, ExpertRange(3, 5, 4_096, 10))
    header = b"\x85\xa5model\xd9\x40" + b"ab" * 32 + b"\xa5layer\x03\xa6expert\x05\xa6offset\xcd\x10\x00\xa6length\x0a"
    assert encode_request(request) == len(header).to_bytes(4, "little") + bytes(4) + header
    assert decode_request(split_frame(encode_request(request), limits.SHARDS_REQUEST)[0].header) == request
    assert encode_chunk(1, 3, b"xy") == b"\x0e\0\0\0\2\0\0\0\x82\xa6offset\x01\xa3end\x03xy"


JUNK = st.none() | st.booleans() | st.integers(-5, 2**63) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
KEYS = st.sampled_from(["model", "trunk", "layer", "expert", "offset", "length", "end", "error"])


@given(st.dictionaries(KEYS, JUNK | st.just("ab" * 32)), st.binary(max_size=9), st.none() | st.integers(1, 9))
def test_random_messages_raise_only_peer_mistakes(header: dict[str, Any], payload: bytes, end: int | None) -> None:
    for decode in (lambda: decode_request(header), lambda: decode_chunk(Frame(header, payload), 0, end)):
        try:
            decode()
        except (PeerMistake, RefusalError):
            continue


def test_a_refusal_carries_its_error() -> None:
    frame, _ = split_frame(encode_refusal(ModelNotFound("no such model")), limits.SHARDS_REPLY)
    with pytest.raises(RefusalError) as caught:
        decode_chunk(frame, 0)
    assert isinstance(caught.value.error, ModelNotFound)
