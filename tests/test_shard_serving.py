"""Serving what one holds: from models that were added, from the cache, also after a restart, and never too much."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from backends.add_model import add_model
from capabilities.errors import ExpertsUnavailable
from swarmnode import limits
from swarmnode.member_messages import Assign
from swarmnode.models import Models
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.shards.fetch import fetch_experts, fetch_manifest
from swarmnode.shards.manifests import ManifestStore
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.shards.store import ShardCache
from swarmnode.worker.epochs import Epochs
from swarmnode.worker.loader import Loader
from tests.expert_models import DOWN_ONLY, quiet, tiny_file
from tests.fake_backend import FakeBackend
from tests.patience import PATIENCE_S
from tests.shard_models import ShardModel, shard_model

_RANDOM = shard_model()
MANIFEST = replace(_RANDOM.manifest, programs=(DOWN_ONLY.to_bytes(),))
MODEL = replace(_RANDOM, manifest=MANIFEST)


def filled_cache(folder: Path, wanted: dict[int, list[int]], model: ShardModel = MODEL) -> ShardCache:
    """A cache with some experts of a model, and its manifest beside them."""
    cache = ShardCache(folder, 10**8)
    ManifestStore(folder).put(model.manifest)
    for layer, experts in wanted.items():
        described = model.manifest.experts_of(layer)
        for expert in experts:
            part = cache.begin(described.hashes[expert], described.expert_bytes)
            assert part is not None
            part.write(model.experts[layer, expert])
            assert part.finish()
    return cache


async def holder(hub: MemoryHub, client: MemoryNetwork, serving: Serving) -> ShardService:
    """A peer that serves; `client` is connected to it."""
    network, service = hub.join(), ShardService(serving.find)
    service.register(network)
    await client.connect(network.addresses[0])
    return service


def no_models(folder: Path) -> Models:
    return Models(folder / "no models")


async def test_a_worker_fetches_from_two_that_hold_a_half_each(tmp_path: Path) -> None:
    halves = [filled_cache(tmp_path / str(i), {1: [i, i + 2], 3: [i, i + 2]}) for i in range(2)]
    async with open_memory_hub() as hub:
        client, cache = hub.join(), ShardCache(tmp_path / "mine", 10**8)
        services = [await holder(hub, client, Serving(no_models(tmp_path), half)) for half in halves]
        sources = list(client.connected_peers())
        manifest = await fetch_manifest(client, sources, MANIFEST.id)
        with trio.fail_after(PATIENCE_S):
            await fetch_experts(client, sources, manifest, MODEL.everything, cache)
        for (layer, expert), data in MODEL.experts.items():
            described = manifest.experts_of(layer)
            assert cache.open(described.hashes[expert], described.expert_bytes) == data
        assert all(service.statistics.bytes_sent > 4 * 6_000 for service in services), "each gave its half"
        assert all(service.statistics.mistakes == 0 for service in services)
        with pytest.raises(ExpertsUnavailable, match="not in the cache") as caught:
            await fetch_experts(client, sources[:1], manifest, {1: [0, 1, 2, 3]}, ShardCache(tmp_path / "b", 10**8))
        assert caught.value.details["cause"] == "refused", "who holds a half is not blamed"


async def test_a_worker_that_restarts_serves_what_it_had_loaded(tmp_path: Path) -> None:
    held = {1: (0, 3), 3: (1,)}
    async with open_memory_hub() as hub:
        worker = hub.join()
        source = filled_cache(tmp_path / "source", MODEL.everything)
        await holder(hub, worker, Serving(no_models(tmp_path), source))
        cache = ShardCache(tmp_path / "cache", 10**8)
        loader = Loader(worker, cache, Epochs(), 10**9, FakeBackend)
        assign = Assign(1, 1, "m", MANIFEST.id, tuple(map(str, worker.connected_peers())), held)
        await loader.load(assign, lambda phase, done, total: None)
    async with open_memory_hub() as hub:
        client = hub.join()
        restarted = ShardCache(tmp_path / "cache", 10**8)
        await holder(hub, client, Serving(no_models(tmp_path), restarted))
        sources = client.connected_peers()
        manifest = await fetch_manifest(client, sources, MANIFEST.id)
        mine = ShardCache(tmp_path / "mine", 10**8)
        await fetch_experts(client, sources, manifest, held, mine)
        assert mine.statistics().experts == 3
        again = Loader(client, restarted, Epochs(), 10**9, FakeBackend)
        await again.load(replace(assign, sources=()), lambda phase, done, total: None)  # nobody needs to be asked


def test_manifests_are_kept_within_a_bound_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFESTS_KEPT_MAX", 2)
    manifests = [replace(MANIFEST, name=f"m{i}") for i in range(3)]
    store = ManifestStore(tmp_path)
    for index, manifest in enumerate(manifests):
        store.put(manifest)
        os.utime(tmp_path / "manifests" / manifest.id, ns=(index, index))
    assert [store.get(manifest.id) for manifest in manifests] == [None, *manifests[1:]]
    assert sorted(os.listdir(tmp_path / "manifests")) == sorted(m.id for m in manifests[1:])
    (tmp_path / "manifests" / manifests[1].id).write_bytes(manifests[2].to_bytes())
    (tmp_path / "manifests" / ("0" * 64)).write_bytes(b"junk")
    restarted = ManifestStore(tmp_path)
    assert restarted.get(manifests[1].id) is None
    assert restarted.get("0" * 64) is None
    assert restarted.get("../manifests/" + manifests[2].id) is None
    assert restarted.get("\0") is None
    assert restarted.get(manifests[2].id) == manifests[2]
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the cache was")
    restarted.put(manifests[0])  # logged
    assert restarted.get(manifests[0].id) == manifests[0]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """Three models from one file each."""
    for kind in ("olmoe", "deepseek2", "gpt-oss"):
        shutil.copy(tiny_file(kind), tmp_path / f"{kind}.gguf")
        add_model(tmp_path / f"{kind}.gguf", tmp_path / "models" / kind, kind, quiet)
    return Models(tmp_path / "models")


def test_every_model_is_served_and_few_are_open(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SERVED_MODELS_OPEN_MAX", 2)
    serving, before = Serving(models, None), open_files()
    ids = models.ids()
    held = serving.find(ids["olmoe"])
    assert held is not None
    for name in ("deepseek2", "gpt-oss", "deepseek2"):
        served = serving.find(ids[name])
        assert served is not None
        assert served.manifest.id == ids[name]
        assert served.trunk is not None
    assert open_files() == before + 3, "two, and one that is still read"
    layer = held.manifest.layers[0]
    data = held.source.read(layer.layer, 0, 0, layer.expert_bytes)
    assert np.frombuffer(data, np.uint8).any()
    del held
    assert open_files() == before + 2
    assert serving.find("0" * 64) is None


def open_files() -> int:
    """Different GGUF files of these tests that this process has open."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return len({os.readlink(link) for link in links if link.exists() and "every_model" in os.readlink(link)})


def test_a_model_that_was_removed_or_whose_file_changed_is_not_served(models: Models, tmp_path: Path) -> None:
    manifest = models.manifest("olmoe")
    cache = ShardCache(tmp_path / "cache", 10**8)
    serving, manifest_id = Serving(models, cache), manifest.id
    assert serving.find(manifest_id) is not None
    models.remove("olmoe")
    assert serving.find(manifest_id) is None
    os.utime(tmp_path / "deepseek2.gguf", ns=(1, 1))
    changed = models.ids()["deepseek2"]
    assert serving.find(changed) is None
    ManifestStore(cache.root).put(models.manifest("deepseek2"))
    assert Serving(models, cache).find(changed) is not None, "what is in the cache has its hash"
