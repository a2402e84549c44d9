"""A backbone peer gets the swarm's model: fetched, checked, resumed, refused, and then as good as the original."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import trio

from backends.add_model import MANIFEST, TRUNK, add_model
from backends.device import Device
from backends.expert_source import hash_file
from backends.experts import GgmlExperts
from backends.learn import run_once
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import LearningHook, ServingHook
from capabilities.errors import BadModelFile, ExpertsUnavailable, ModelNotFound, SwarmError
from scheduler.placement import LayerSpec, WorkerSpec, even_split
from swarmnode.local_experts import LocalExperts, load_experts
from swarmnode.model_keeper import ModelKeeper
from swarmnode.models import Models, OpenModel, run_child
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import MemoryNetwork, open_memory_hub
from swarmnode.shards.fetch import fetch_experts
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.serving import Serving
from swarmnode.shards.store import ShardCache
from tests.expert_models import quiet, tiny_file
from tests.patience import PATIENCE_S

N_TOKENS = 12


@dataclass
class Node:
    """A peer with a keeper that runs, and what it told."""

    network: MemoryNetwork
    models: Models
    cache: ShardCache
    source: PeerId
    changes: list[str | None] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    keeper: ModelKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = ModelKeeper(self.network, self.models, self.cache, self.changed)

    def changed(self) -> None:
        self.changes.append(self.keeper.held())

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not condition():
                if (phase := self.keeper.state.phase) not in self.phases[-1:]:
                    self.phases.append(phase)
                await trio.sleep(0.005)

    async def holds(self) -> str:
        await self.until(lambda: self.keeper.held() is not None)
        name = self.keeper.held()
        assert name is not None
        return name

    async def fails(self) -> SwarmError:
        await self.until(lambda: self.keeper.state.phase == "failed")
        assert self.keeper.state.error is not None
        return self.keeper.state.error


@pytest.fixture
def original(tmp_path: Path) -> Models:
    """A node's models: olmoe, from its file."""
    shutil.copy(tiny_file("olmoe"), tmp_path / "olmoe.gguf")
    add_model(tmp_path / "olmoe.gguf", tmp_path / "there" / "olmoe", "olmoe", quiet)
    return Models(tmp_path / "there")


@asynccontextmanager
async def node(tmp_path: Path, find: Callable[[str], ServedModel | None], budget: int = 10**9) -> AsyncIterator[Node]:
    """A peer, connected to one that serves what `find` says."""
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        network, source = hub.join(), hub.join()
        ShardService(find).register(source)
        await network.connect(source.addresses[0])
        cache = ShardCache(tmp_path / "cache", budget)
        made = Node(network, Models(tmp_path / "here", cache), cache, source.peer_id)
        nursery.start_soon(made.keeper.run)
        yield made
        nursery.cancel_scope.cancel()


def answer(opened: OpenModel) -> list[int]:
    """Greedy tokens of a model whose experts are computed by three workers, read from its source."""
    manifest = opened.manifest
    specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers]
    placement = even_split(specs, [WorkerSpec(name, 1 << 40) for name in "abc"], term=1, epoch=1)
    workers = {name: GgmlExperts(Device("CPU", threads=1)) for name in "abc"}
    for name, backend in workers.items():
        load_experts(backend, manifest, placement.held_by(name), opened.served.source)
    learning, tokens = LearningHook(), [1, 2, 3]
    with LlamaModel(opened.trunk, LlamaSettings(context_tokens=64, batch_tokens=16, threads=1), learning) as model:
        run_once(model)
        model.clear_all()
        model.hook = ServingHook(learning.layers.values(), LocalExperts(manifest, placement, workers))
        fed = 0
        for _ in range(N_TOKENS):
            new = np.array(tokens[fed:], np.int32)
            positions = np.arange(fed, len(tokens), dtype=np.int32)
            logits = model.decode(new, positions, np.zeros(len(new), np.int32), np.ones(len(new), bool))
            fed = len(tokens)
            tokens.append(int(logits[-1].argmax()))
    for backend in workers.values():
        backend.close()
    return tokens


async def test_a_fetched_model_answers_as_the_original_does(original: Models, tmp_path: Path) -> None:
    manifest = original.manifest("olmoe")
    async with node(tmp_path, Serving(original, None).find) as peer:
        peer.keeper.want(manifest.id, [peer.source])
        name = await peer.holds()
        assert (name, peer.changes) == ("olmoe", ["olmoe"])
        assert "checking" in peer.phases
        shown = peer.models.show(name)
        assert (shown["source"], shown["files"], shown["fault"]) == ("swarm", [], None)
        assert original.show(name)["source"] == "file"
        opened = peer.models.open(name)
        with pytest.raises(ExpertsUnavailable, match="not in the cache"):
            opened.served.source.read(manifest.layers[0].layer, 0, 0, 1)
        everything = {layer.layer: range(layer.n_expert) for layer in manifest.layers}
        await fetch_experts(peer.network, [peer.source], manifest, everything, peer.cache)
        theirs = original.open("olmoe")
        mine = await trio.to_thread.run_sync(answer, opened)
        assert mine == await trio.to_thread.run_sync(answer, theirs)
        theirs.close()
        assert len(set(mine)) > 4
        served = Serving(peer.models, peer.cache).find(manifest.id)
        assert served is not None
        assert served.trunk is not None
        peer.models.remove(name)
        peer.keeper.models_changed()
        await peer.until(lambda: peer.changes == ["olmoe", None, "olmoe"])  # the swarm still serves it


async def test_a_fetch_that_was_interrupted_goes_on_and_is_not_listed(original: Models, tmp_path: Path) -> None:
    manifest = original.manifest("olmoe")
    folder = Models(tmp_path / "here").begin_draft(manifest)
    shutil.copy(tmp_path / "there" / "olmoe" / TRUNK, folder / f"{TRUNK}.part")
    (tmp_path / "here" / ".fetch-of another").mkdir()
    assert Models(tmp_path / "here").names() == []
    asked: list[str] = []

    def without_manifest(manifest_id: str) -> ServedModel | None:
        asked.append(manifest_id)
        return None

    async with node(tmp_path, without_manifest) as peer:
        peer.keeper.want(manifest.id, [peer.source])
        assert await peer.holds() == "olmoe"
        assert asked == [], "manifest and trunk were there"
        assert os.listdir(tmp_path / "here") == ["olmoe"]


async def test_a_trunk_that_is_bad_in_itself_is_refused_once(original: Models, tmp_path: Path) -> None:
    """Its bytes are those that its manifest names; llama.cpp never sees it in the daemon."""
    good, bad = original.manifest("olmoe"), tmp_path / "bad.gguf"
    trunk = bytearray((tmp_path / "there" / "olmoe" / TRUNK).read_bytes())
    trunk[:4] = b"XXXX"
    bad.write_bytes(trunk)
    forged = replace(good, trunk=hash_file(bad))
    with_source = Serving(original, None).find(good.id)
    assert with_source is not None
    served, requests = ServedModel(forged, forged.to_bytes(), with_source.source, bad), []

    def find(manifest_id: str) -> ServedModel | None:
        requests.append(manifest_id)
        return served

    async with node(tmp_path, find) as peer:
        peer.keeper.want(forged.id, [peer.source])
        assert isinstance(await peer.fails(), BadModelFile)
        assert peer.models.names() == []
        assert os.listdir(tmp_path / "here") == []
        before = len(requests)
        assert before >= 2
        peer.keeper.models_changed()
        await trio.sleep(1.2)  # a second after news, others are tried again
        assert len(requests) == before
        peer.keeper.want("", [])
        peer.keeper.want(forged.id, [peer.source])
        assert isinstance(await peer.fails(), BadModelFile)
        assert (len(requests), peer.changes) == (before, [])


async def test_a_trunk_of_another_model_is_refused(original: Models, tmp_path: Path) -> None:
    add_model(tiny_file("deepseek2"), tmp_path / "there" / "other", "other", quiet)
    other = original.manifest("other")
    folder = Models(tmp_path / "here").begin_draft(replace(original.manifest("olmoe"), trunk=other.trunk))
    shutil.copy(tmp_path / "there" / "other" / TRUNK, folder / TRUNK)
    with pytest.raises(BadModelFile, match="another model's than its manifest says"):
        await run_child([sys.executable, "-m", "backends.check_trunk", str(folder)], "trunk", quiet)
    programs = tuple(reversed(original.manifest("olmoe").programs))
    swapped = replace(original.manifest("olmoe"), programs=(programs[0] + b"\0",))
    (folder / MANIFEST).write_bytes(swapped.to_bytes())
    shutil.copy(tmp_path / "there" / "olmoe" / TRUNK, folder / TRUNK)
    with pytest.raises(BadModelFile, match="does not match the manifest"):
        await run_child([sys.executable, "-m", "backends.check_trunk", str(folder)], "trunk", quiet)


async def test_a_child_that_cannot_be_started_is_an_error_like_any_other(
    original: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python here"))
    async with node(tmp_path, Serving(original, None).find) as peer:
        peer.keeper.want(original.manifest("olmoe").id, [peer.source])
        error = await peer.fails()
        assert error.type == "internal"
        assert "cannot run a child process" in error.message


async def test_a_source_that_comes_later_is_asked_at_once(
    original: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.model_keeper._RETRY_S_MIN", 0.01)
    monkeypatch.setattr("swarmnode.model_keeper._RETRY_S_MAX", 60.0)
    manifest = original.manifest("olmoe")
    async with node(tmp_path, Serving(original, None).find) as peer:
        peer.keeper.want(manifest.id, [])
        assert isinstance(await peer.fails(), ModelNotFound)
        await trio.sleep(0.3)  # the pauses double
        peer.keeper.want(manifest.id, [peer.source])
        assert await peer.holds() == "olmoe"
        peer.keeper.want("", [])
        assert (peer.keeper.held(), peer.changes) == (None, ["olmoe", None])


async def test_another_wish_ends_a_fetch(original: Models, tmp_path: Path) -> None:
    manifest, hangs = original.manifest("olmoe"), trio.Event()

    def find(manifest_id: str) -> ServedModel | None:
        if manifest_id != manifest.id:
            trio.from_thread.run(hangs.wait)
        return serving.find(manifest_id)

    serving = Serving(original, None)
    async with node(tmp_path, find) as peer:
        peer.keeper.want("0" * 64, [peer.source])
        await peer.until(lambda: peer.keeper.state.phase == "manifest")
        peer.keeper.want(manifest.id, [peer.source])
        assert await peer.holds() == "olmoe"
        hangs.set()


async def test_the_budget_counts_trunks_and_experts(original: Models, tmp_path: Path) -> None:
    manifest = original.manifest("olmoe")
    async with node(tmp_path, Serving(original, None).find, budget=manifest.trunk.size - 1) as peer:
        peer.keeper.want(manifest.id, [peer.source])
        error = await peer.fails()
        assert error.type == "cache_error"
        assert "over this node's budget" in error.message
    async with node(tmp_path, Serving(original, None).find, budget=manifest.trunk.size + 10**6) as peer:
        layer = manifest.layers[0]
        wanted = {layer.layer: range(layer.n_expert)}
        await fetch_experts(peer.network, [peer.source], manifest, wanted, peer.cache)
        before = peer.cache.statistics()
        peer.cache.budget_bytes = manifest.trunk.size + before.used_bytes // 2
        with peer.cache.keep(layer.hashes):
            peer.keeper.want(manifest.id, [peer.source])
            assert "may not be evicted" in (await peer.fails()).message
            assert not (tmp_path / "here" / f".fetch-{manifest.id}" / TRUNK).exists()
        assert peer.cache.statistics() == replace(before, budget_bytes=peer.cache.budget_bytes)
        peer.keeper.want(manifest.id, [])
        peer.keeper.want(manifest.id, [peer.source])
        await peer.holds()
        assert 0 < peer.cache.statistics().used_bytes <= before.used_bytes // 2, "experts made room"


async def test_models_that_are_not_served_any_more_make_room(original: Models, tmp_path: Path) -> None:
    found = Serving(original, None).find(original.manifest("olmoe").id)
    assert found is not None
    named = [replace(found.manifest, name=name) for name in ("first", "second", "third", "fourth")]
    served = {m.id: ServedModel(m, m.to_bytes(), found.source, found.trunk) for m in named}
    size = found.trunk.stat().st_blocks * 512
    async with node(tmp_path, served.get, budget=3 * size - 1) as peer:
        for manifest in named[:2]:
            peer.keeper.want(manifest.id, [peer.source])
            await peer.holds()
        assert peer.models.names() == ["first", "second"]
        peer.models.open("first").close()
        peer.keeper.want(named[2].id, [peer.source])
        assert await peer.holds() == "third"
        assert peer.models.names() == ["first", "third"], "the one that was served longest ago went"

        peer.cache.budget_bytes = size - 1
        peer.keeper.want(named[3].id, [peer.source])
        assert (await peer.fails()).type == "cache_error"
        assert peer.models.names() == ["first", "third"], "nothing goes in vain"


async def test_a_name_that_is_taken_and_a_hostile_one(original: Models, tmp_path: Path) -> None:
    found = Serving(original, None).find(original.manifest("olmoe").id)
    assert found is not None
    named = [replace(found.manifest, name=name) for name in ("olmoe", "../../evil", "x" * 200)]
    served = {m.id: ServedModel(m, m.to_bytes(), found.source, found.trunk) for m in named}
    async with node(tmp_path, served.get) as peer:
        add_model(tiny_file("deepseek2"), tmp_path / "here" / "olmoe", "olmoe", quiet)
        names = []
        for manifest in named:
            peer.keeper.want(manifest.id, [peer.source])
            names.append(await peer.holds())
        assert names == [f"olmoe-{named[0].id[:8]}", "evil", "x" * 63]
        assert sorted(peer.models.names()) == sorted(["olmoe", *names])
        assert peer.models.show(names[0])["name"] == names[0]
