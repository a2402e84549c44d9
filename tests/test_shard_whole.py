"""A whole model from other peers: resumed, from sources that lie or have little, and from this node's cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from backends.gguf_file import GGUFFile
from capabilities.errors import ExpertsUnavailable
from capabilities.held_experts import HeldExperts
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.store import CacheError, ShardCache
from swarmnode.shards.whole import fetch_whole
from tests.expert_models import take_apart, tiny_file
from tests.patience import PATIENCE_S
from tests.shard_models import ShardModel
from tests.test_shards import OnSend, Peer, after, connected, flipped


@dataclass(frozen=True)
class Layers(ShardModel):
    """Some layers of it."""

    held: tuple[int, ...] = ()

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
        if layer not in self.held:
            raise ExpertsUnavailable(f"expert {expert} of layer {layer} is not here", layer=layer, experts=[expert])
        return super().read(layer, expert, offset, length)


@dataclass
class Source:
    """A tiny model, as it is served, and its own file."""

    model: ShardModel
    trunk: Path
    file: Path

    @property
    def layers(self) -> list[int]:
        return [layer.layer for layer in self.model.manifest.layers]

    def peer(self, *layers: int, on_send: OnSend | None = None) -> Peer:
        """One that holds the experts of these layers alone; of all, if none is named."""
        held = Layers(self.model.manifest, self.model.experts, b"", layers or tuple(self.layers))
        return Peer(held, on_send, served_as=self.model.manifest.id)

    def held(self, *layers: int) -> HeldExperts:
        """What such a one says to hold."""
        experts = self.model.everything
        return HeldExperts.of(self.model.manifest.id, {layer: experts[layer] for layer in layers})


@pytest.fixture(scope="module")
def source() -> Source:
    parts = take_apart("olmoe", "q4_0")
    experts = {
        (layer.layer, expert): bytes(parts.source.read(layer.layer, expert, 0, layer.expert_bytes))
        for layer in parts.manifest.layers
        for expert in range(layer.n_expert)
    }
    return Source(ShardModel(parts.manifest, experts, b""), parts.trunk, tiny_file("olmoe", "q4_0"))


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARD_CHUNK_BYTES", 4096)
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MIN", 0.01)
    monkeypatch.setattr(limits, "SHARD_BACKOFF_SECONDS_MAX", 0.05)


async def fetch(
    source: Source,
    client: Network,
    ids: list[PeerId],
    target: Path,
    holdings: dict[PeerId, HeldExperts] | None = None,
    cache: ShardCache | None = None,
) -> None:
    with trio.fail_after(PATIENCE_S):
        nbytes = await fetch_whole(
            client, ids, source.model.manifest, source.trunk, target, holdings=holdings, cache=cache
        )
    check(source, target, nbytes)


def check(source: Source, target: Path, nbytes: int) -> None:
    assert nbytes == target.stat().st_size
    with GGUFFile.open(target) as whole, GGUFFile.open(source.file) as own:
        assert {name: bytes(whole.data(info)) for name, info in whole.tensors.items()} == {
            name: bytes(own.data(info)) for name, info in own.tensors.items()
        }
    assert [path.name for path in target.parent.iterdir()] == [target.name]


async def test_one_that_has_all_is_enough_and_one_that_lies_is_left(source: Source, tmp_path: Path) -> None:
    async with connected(source.peer(on_send=flipped), source.peer()) as (client, ids):
        await fetch(source, client, ids, tmp_path / "whole.gguf")


async def test_others_are_asked_for_what_they_say_to_hold(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One source at a time: the first has nothing, and each of the others one layer."""
    monkeypatch.setattr(limits, "SHARD_SOURCES_MAX", 1)
    peers = [source.peer(-1), *(source.peer(layer) for layer in source.layers)]
    async with connected(*peers) as (client, ids):
        holdings = {peer: source.held(layer) for peer, layer in zip(ids[1:], source.layers, strict=True)}
        await fetch(source, client, ids[:1], tmp_path / "whole.gguf", holdings)


async def test_an_expert_that_nobody_has_is_named_and_what_came_is_kept(source: Source, tmp_path: Path) -> None:
    last = source.layers[-1]
    target = tmp_path / "whole.gguf"
    async with connected(source.peer(-1), source.peer(*source.layers[:-1])) as (client, ids):
        with pytest.raises(ExpertsUnavailable, match=f"of layer {last}"):
            await fetch(source, client, ids[:1], target, {ids[1]: source.held(*source.layers)})
    assert not target.exists()
    peer = source.peer()
    async with connected(peer) as (client, ids):
        await fetch(source, client, ids, target)
    assert {layer for layer, _, _ in peer.reads} == {last}, "what is on the disk is hashed, not fetched"


async def test_damage_since_the_last_attempt_is_mended(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "whole.gguf"
    async with connected(source.peer(on_send=after(0.001))) as (client, ids):
        await fetch(source, client, ids, target)
        whole, peer = target.read_bytes(), source.peer()
    damaged = bytearray(whole)
    damaged[len(whole) - 100] ^= 1
    target.with_name("whole.gguf.part").write_bytes(damaged)
    os.remove(target)
    async with connected(peer) as (client, ids):
        await fetch(source, client, ids, target)
    assert target.read_bytes() == whole
    assert len({(layer, expert) for layer, expert, _ in peer.reads}) <= 1


async def test_what_this_node_holds_is_copied(source: Source, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 10**9)
    model = source.model
    for layer in model.manifest.layers:
        for expert, digest in enumerate(layer.hashes):
            part = cache.begin(digest, layer.expert_bytes)
            assert part is not None
            part.write(model.experts[layer.layer, expert])
            assert part.finish()
    (tmp_path / "here").mkdir()
    async with connected() as (client, ids):
        await fetch(source, client, ids, tmp_path / "here" / "whole.gguf", cache=cache)


async def test_a_disk_that_is_too_small_is_named_before_anything_comes(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1))
    peer = source.peer()
    async with connected(peer) as (client, ids):
        with pytest.raises(CacheError, match="1 are free"):
            await fetch(source, client, ids, tmp_path / "whole.gguf")
    assert not peer.reads
    assert not os.listdir(tmp_path)
