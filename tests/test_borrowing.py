"""A leader without the model's file computes what its workers should answer, from experts that it fetches for it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import trio

from backends.device import Device
from backends.manifest import LayerExperts
from capabilities.errors import ExpertsUnavailable
from swarmnode import limits
from swarmnode.leader import probe as probe_module
from swarmnode.leader.probe import ProbeReference
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import MemoryNetwork, open_memory_hub
from swarmnode.shards.borrowing import Borrowing
from swarmnode.shards.service import ServedModel, ShardService
from swarmnode.shards.store import CachedExperts, CacheError, ShardCache
from tests.expert_models import take_apart
from tests.patience import PATIENCE_S

TINY = take_apart("olmoe")
LAYER = TINY.layer
EVERY = list(range(LAYER.n_expert))


class Part:
    """A source with some experts of every layer; counts what is read."""

    def __init__(self, experts: Sequence[int], damaged: bool = False) -> None:
        self.experts = set(experts)
        self.damaged = damaged
        self.read_of: set[int] = set()
        self.gate = trio.Event()
        self.gate.set()

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
        trio.from_thread.run(self.gate.wait)
        if expert not in self.experts:
            raise ExpertsUnavailable("not here", layer=layer, experts=[expert], cause="refused")
        self.read_of.add(expert)
        data = TINY.source.read(layer, expert, offset, length)
        return bytes([data[0] ^ 1]) + data[1:] if self.damaged else data


@dataclass
class Lab:
    network: MemoryNetwork
    cache: ShardCache
    peers: list[PeerId]

    def reference(self, others: Sequence[PeerId] = ()) -> ProbeReference:
        """As of a leader without the file."""
        source = CachedExperts(self.cache, TINY.manifest)
        borrowing = Borrowing(self.network, TINY.manifest, self.cache, lambda: others)
        return ProbeReference(TINY.manifest, source, Device("CPU", threads=1), borrowing.obtain)


@asynccontextmanager
async def lab(folder: Path, *parts: Part, budget: int = 10**9) -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub:
        network, peers = hub.join(), []
        for part in parts:
            peer = hub.join()
            served = ServedModel(TINY.manifest, TINY.manifest.to_bytes(), part)
            ShardService({TINY.manifest.id: served}.get).register(peer)
            peers.append(await network.connect(peer.addresses[0]))
        yield Lab(network, ShardCache(folder, budget), peers)


async def right_rows(layer: LayerExperts, experts: Sequence[int]) -> np.ndarray:  # type: ignore[type-arg]
    """What a leader with the file expects."""
    reference = ProbeReference(TINY.manifest, TINY.source, Device("CPU", threads=1))
    return await reference.expected(layer, experts, PeerId("nobody"))


async def test_the_rows_are_those_of_a_leader_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched from the very worker that is probed, in batches, and only once."""
    monkeypatch.setattr(probe_module, "BATCH_BYTES_MAX", 3 * LAYER.expert_bytes)
    right = await right_rows(LAYER, EVERY)
    worker = Part(EVERY)
    async with lab(tmp_path, worker, budget=4 * LAYER.expert_bytes) as made:
        reference = made.reference()
        borrowing = Borrowing(made.network, TINY.manifest, made.cache, list)
        async with borrowing.obtain(LAYER, [5], made.peers[0]):
            assert made.cache.statistics().kept_bytes == LAYER.expert_bytes
        assert np.array_equal(await reference.expected(LAYER, [5, 1], made.peers[0]), right[[5, 1]])
        assert worker.read_of == {1, 5}
        assert np.array_equal(await reference.expected(LAYER, EVERY, made.peers[0]), right)
        assert made.cache.statistics().kept_bytes == 0
        worker.read_of.clear()
        assert np.array_equal(await reference.expected(LAYER, EVERY, made.peers[0]), right)
        assert worker.read_of == set(), "rows are remembered"


async def test_what_the_holder_does_not_give_comes_from_another(tmp_path: Path) -> None:
    right = await right_rows(LAYER, EVERY)
    async with lab(tmp_path, Part(EVERY, damaged=True), Part(EVERY[:3]), Part(EVERY[3:])) as made:
        liar, first, second = made.peers
        rows = await made.reference([first, second]).expected(LAYER, EVERY, liar)
        assert np.array_equal(rows, right)


async def test_nobody_gives_them_or_not_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Part(EVERY[:2])
    async with lab(tmp_path, worker) as made:
        with pytest.raises(ExpertsUnavailable, match="not here"):
            await made.reference().expected(LAYER, EVERY, made.peers[0])
        monkeypatch.setattr(limits, "BORROW_SECONDS_MIN", 0.1)
        monkeypatch.setattr(limits, "BORROW_BYTES_PER_SECOND_MIN", 1e9)
        shutil.rmtree(tmp_path)
        worker.gate = trio.Event()
        with pytest.raises(ExpertsUnavailable, match="did not come in time") as caught:
            await made.reference().expected(LAYER, EVERY[:2], made.peers[0])
        assert caught.value.details["peer"] == made.peers[0]
        assert made.cache.statistics().kept_bytes == 0
        worker.gate.set()


async def test_a_probe_that_is_cancelled_lets_go(tmp_path: Path) -> None:
    worker = Part(EVERY)
    worker.gate = trio.Event()
    async with lab(tmp_path, worker) as made:
        reference = made.reference()
        with trio.move_on_after(0.1) as scope:
            await reference.expected(LAYER, EVERY, made.peers[0])
        assert scope.cancelled_caught
        assert made.cache.statistics().kept_bytes == 0
        worker.gate.set()
        with trio.fail_after(PATIENCE_S):
            await reference.expected(LAYER, EVERY, made.peers[0])


async def test_few_at_a_time_and_a_cache_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BORROWINGS_MAX", 1)
    worker = Part(EVERY)
    async with lab(tmp_path, worker, budget=2 * LAYER.expert_bytes) as made:
        reference, done = made.reference(), []

        async def expect(expert: int) -> None:
            await reference.expected(LAYER, [expert, expert + 1], made.peers[0])
            done.append(expert)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for expert in (0, 2, 4):
                    nursery.start_soon(expect, expert)
        assert sorted(done) == [0, 2, 4], "each waited for the room that the one before it gave back"
        with pytest.raises(CacheError, match="budget"):
            await made.reference().expected(LAYER, EVERY[:3], made.peers[0])
