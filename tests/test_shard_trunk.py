"""A trunk from other peers: whole, resumed piece by piece, and from sources of which some lie, drag or have none."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from backends.manifest import PIECE_BYTES, Manifest
from capabilities.errors import BadModelFile, ModelNotFound, PeerMistake
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId, Stream
from swarmnode.shards import trunk as trunk_module
from swarmnode.shards.messages import (
    PROTOCOL,
    RefusalError,
    ShardRequest,
    TrunkRange,
    decode_chunk,
    decode_request,
    encode_request,
)
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import CacheError
from swarmnode.shards.trunk import fetch_trunk
from swarmnode.wire import encode_frame, read_frame, split_frame
from tests.patience import PATIENCE_S
from tests.shard_models import shard_model
from tests.test_shards import OnSend, TamperedService, after, breaking_at, connected, flipped

MODEL = shard_model(layers=(0,), n_expert=2, trunk_bytes=2 * PIECE_BYTES + 300_000)
MANIFEST = MODEL.manifest
CHUNKS = 16  # of a piece


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MIN", 0.01)
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MAX", 0.05)


class Holder:
    """A peer that serves the trunk with the real service, over streams whose sends go through `on_send`."""

    def __init__(self, file: Path | None, on_send: OnSend | None = None, manifest: Manifest = MANIFEST) -> None:
        self.on_send = on_send
        self.sends = 0
        served = ServedModel(manifest, manifest.to_bytes(), MODEL, file)
        self.service = TamperedService({manifest.id: served}.get)
        self.service.peer = self  # type: ignore[assignment]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "original.gguf"
    path.write_bytes(MODEL.trunk)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "here" / "trunk.gguf"


async def fetch(
    client: Network, ids: list[PeerId], target: Path, manifest: Manifest = MANIFEST, budget: int = 10**9
) -> None:
    with trio.fail_after(PATIENCE_S):
        await fetch_trunk(client, ids, manifest, target, budget_bytes=budget)


def is_whole(target: Path) -> bool:
    """The trunk is there, and nothing beside it."""
    return target.read_bytes() == MODEL.trunk and not target.with_name("trunk.gguf.part").exists()


async def test_a_trunk_comes_whole_from_several_sources(file: Path, target: Path) -> None:
    a, b = Holder(file, after(0.001)), Holder(file, after(0.001))
    seen: list[tuple[int, int]] = []
    async with connected(a, b) as (client, ids):  # type: ignore[arg-type]
        await fetch_trunk(
            client, ids, MANIFEST, target, lambda done, total: seen.append((done, total)), budget_bytes=10**9
        )
        assert is_whole(target)
        assert seen[-1] == (len(MODEL.trunk), len(MODEL.trunk))
        assert min(a.service.statistics.requests, b.service.statistics.requests) >= 1
        assert a.service.statistics.requests + b.service.statistics.requests == 3
        await fetch(client, ids, target)  # it is there
        assert a.service.statistics.requests + b.service.statistics.requests == 3


async def test_what_an_earlier_attempt_left_is_used(file: Path, target: Path) -> None:
    """Cancelled after the first piece, with rot in what was written: only that is fetched again."""
    slow = Holder(file, after(0.005))
    async with connected(slow) as (client, ids):  # type: ignore[arg-type]
        with trio.CancelScope() as scope:

            def stop(done: int, total: int) -> None:
                if done >= 2 * PIECE_BYTES:
                    scope.cancel()

            await fetch_trunk(client, ids, MANIFEST, target, stop, budget_bytes=10**9)
        assert scope.cancelled_caught
    rot_the_second_piece(target.with_name("trunk.gguf.part"))
    again = Holder(file)
    async with connected(again) as (client, ids):  # type: ignore[arg-type]
        await fetch(client, ids, target)
    assert is_whole(target)
    assert again.service.statistics.requests == 2, "the first piece was right"


def rot_the_second_piece(part: Path) -> None:
    on_disk = bytearray(part.read_bytes())
    assert on_disk[:PIECE_BYTES] == MODEL.trunk[:PIECE_BYTES]
    on_disk[PIECE_BYTES] ^= 1
    part.write_bytes(on_disk[: 2 * PIECE_BYTES])


async def test_a_source_that_breaks_loses_nothing(file: Path, target: Path) -> None:
    holder = Holder(file, breaking_at(5, 9))
    async with connected(holder) as (client, ids):  # type: ignore[arg-type]
        await fetch(client, ids, target)
    assert is_whole(target)
    assert holder.sends == 2 * CHUNKS + 2 + 2, "only the chunks that were lost came twice"


async def test_a_hostile_source_costs_itself_only(file: Path, target: Path) -> None:
    liar, honest = Holder(file, flipped), Holder(file, after(0.002))
    async with connected(liar, honest) as (client, ids):  # type: ignore[arg-type]
        await fetch(client, ids, target)
    assert is_whole(target)
    assert liar.service.statistics.requests <= limits.SHARD_LANES_PER_SOURCE, "it was not asked again"
    assert honest.service.statistics.requests == 3


async def test_a_source_that_drags_is_left_for_a_better_one(file: Path, target: Path) -> None:
    dragging = Holder(file, after(1.0))
    async with connected(dragging, Holder(file)) as (client, ids):  # type: ignore[arg-type]
        begin = trio.current_time()
        await fetch(client, ids, target)
        assert trio.current_time() - begin < 14, "alone it would take sixteen seconds for a piece"
    assert is_whole(target)


async def test_wrong_bytes_from_everybody_are_an_error_and_no_trunk(file: Path, target: Path) -> None:
    async with connected(Holder(file, flipped)) as (client, ids):  # type: ignore[arg-type]
        with pytest.raises(ModelNotFound, match="sent wrong bytes for piece") as caught:
            await fetch(client, ids, target)
    assert caught.value.details == {"peer": ids[0], "cause": "bad_reply"}
    with pytest.raises(FileNotFoundError):
        is_whole(target)


async def test_a_source_without_the_trunk_is_not_blamed(file: Path, target: Path) -> None:
    async with connected(Holder(None), Holder(file)) as (client, ids):  # type: ignore[arg-type]
        await fetch(client, ids, target)
        assert is_whole(target)
        with pytest.raises(ModelNotFound, match="does not hold the trunk of random"):
            await fetch_trunk(
                client, ids[:1], MANIFEST, target.with_name("b"), budget_bytes=10**9, patience_seconds=0.2
            )
        with pytest.raises(ModelNotFound, match="nobody to ask"):
            await fetch(client, [], target.with_name("c"))


async def test_the_budget_and_the_disk_are_respected(file: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(Holder(file)) as (client, ids):  # type: ignore[arg-type]
        with pytest.raises(CacheError, match="over this node's budget of 1000"):
            await fetch(client, ids, target, budget=1_000)
        with monkeypatch.context() as patch:
            usage = trunk_module.shutil.disk_usage("/")  # type: ignore[attr-defined]
            patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=5))
            with pytest.raises(CacheError, match="5 are free"):
                await fetch(client, ids, target)
        with monkeypatch.context() as patch:

            def full(fd: int, data: bytes, offset: int) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "pwrite", full)
            with pytest.raises(CacheError, match="the disk is full"):
                await fetch(client, ids, target)
        await fetch(client, ids, target)
    assert is_whole(target)


async def test_a_manifest_that_contradicts_itself(file: Path, target: Path) -> None:
    forged = replace(MANIFEST, trunk=replace(MANIFEST.trunk, sha256=bytes(32)))
    async with connected(Holder(file, manifest=forged)) as (client, ids):  # type: ignore[arg-type]
        with pytest.raises(BadModelFile, match="contradicts itself"):
            await fetch(client, ids, target, forged)
    assert os.listdir(target.parent) == []


async def test_ranges_outside_the_trunk_and_a_file_that_shrank(file: Path) -> None:
    holder, size = Holder(file), len(MODEL.trunk)
    async with connected(holder) as (client, ids):  # type: ignore[arg-type]
        stream = await client.open_stream(ids[0], PROTOCOL)
        for offset, length in ((size, 1), (0, size + 1), (5, 2**40)):
            with pytest.raises(RefusalError) as caught:
                await ask(stream, offset, length)
            assert isinstance(caught.value.error, PeerMistake)
        assert await ask(stream, size - 100, 100) == MODEL.trunk[-100:]
        os.truncate(file, 1_000)
        with pytest.raises(RefusalError, match="has no 100 bytes at 2000"):
            await ask(stream, 2_000, 100)
        await trio.Path(file).unlink()
        with pytest.raises(RefusalError, match="No such file"):
            await ask(stream, 0, 100)
        await stream.aclose()
    assert isinstance(holder.service, ShardService)


async def ask(stream: Stream, offset: int, length: int) -> bytes:
    await stream.send(encode_request(ShardRequest(MANIFEST.id, TrunkRange(offset, length))))
    return bytes(decode_chunk(await read_frame(stream, limits.SHARDS_REPLY), offset, offset + length)[0])


def test_golden_request() -> None:
    request = ShardRequest("ab" * 32, TrunkRange(4_096, 10))
    header = b"\x84\xa5model\xd9\x40" + b"ab" * 32 + b"\xa5trunk\x01\xa6offset\xcd\x10\x00\xa6length\x0a"
    assert encode_request(request) == len(header).to_bytes(4, "little") + bytes(4) + header
    assert decode_request(split_frame(encode_request(request), limits.SHARDS_REQUEST)[0].header) == request
    for wrong in ({"trunk": 2, "offset": 0, "length": 1}, {"trunk": 1, "offset": 0, "length": 0}, {"trunk": 1}):
        frame, _ = split_frame(encode_frame({"model": "ab" * 32, **wrong}), limits.SHARDS_REQUEST)
        with pytest.raises(PeerMistake):
            decode_request(frame.header)
