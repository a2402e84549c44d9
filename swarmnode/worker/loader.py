"""Loads an assignment: manifest, experts into the disk cache, and from there into the backend's memory.

Everything is checked before it is believed: the manifest against its id, every expert against its hash, the share
against this worker's memory budget. Loading runs in a thread, a layer at a time, and stages one tensor at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from backends.experts import ExpertBackend
from backends.manifest import Manifest
from backends.program import ExpertProgram
from capabilities.errors import Internal, PeerMistake
from swarmnode.expert_messages import HeldLayer
from swarmnode.member_messages import Assign, Phase
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch import fetch_experts, fetch_manifest
from swarmnode.shards.manifests import ManifestStore
from swarmnode.shards.store import ShardCache, layer_reader
from swarmnode.worker.epochs import Epochs, ExpertSet

OnProgress = Callable[[Phase, int, int], None]
MIB: Final = 1 << 20


class Loader:
    """Prepares expert sets. `make_backend` gives a fresh backend for each."""

    def __init__(
        self,
        network: Network,
        cache: ShardCache,
        epochs: Epochs,
        memory_budget_bytes: int,
        make_backend: Callable[[], ExpertBackend],
    ) -> None:
        self._network = network
        self._cache = cache
        self._epochs = epochs
        self._budget_bytes = memory_budget_bytes
        self._make_backend = make_backend
        self._turn = trio.Lock()
        self._manifests = ManifestStore(cache.root)
        self.manifest: Manifest | None = None
        """Of the model that was assigned last."""

    async def load(self, assign: Assign, progress: OnProgress) -> None:
        """Fetch and load the assigned experts and register them as the prepared epoch. One load at a time.

        Raises:
            SwarmError: with the reason; what was fetched stays in the cache.
        """
        async with self._turn:  # one that was cancelled first frees what it has loaded
            await self._load(assign, progress)

    async def _load(self, assign: Assign, progress: OnProgress) -> None:
        sources = [PeerId(peer) for peer in assign.sources]
        manifest = await trio.to_thread.run_sync(self._manifests.get, assign.manifest)
        if manifest is None:
            manifest = await fetch_manifest(self._network, sources, assign.manifest)
            await trio.to_thread.run_sync(self._manifests.put, manifest)
        self.manifest = manifest
        total = self._check(manifest, assign)
        await self._epochs.make_room(total, self._budget_bytes)
        with self._cache.keep(
            manifest.experts_of(layer).hashes[expert] for layer, experts in assign.held.items() for expert in experts
        ):
            await fetch_experts(
                self._network,
                sources,
                manifest,
                assign.held,
                self._cache,
                lambda done, total: progress("fetching", done, total),
            )
            await self._load_layers(manifest, assign, progress)

    def _check(self, manifest: Manifest, assign: Assign) -> int:
        """The bytes of the share, which must exist and fit."""
        total = 0
        for number, experts in assign.held.items():
            layer = manifest.experts_of(number)
            if experts and experts[-1] >= layer.n_expert:
                raise PeerMistake(f"an assignment names expert {experts[-1]} of {layer.n_expert} in layer {number}")
            total += layer.expert_bytes * len(experts)
        if total > self._budget_bytes:
            raise Internal(
                f"the assigned experts take {total // MIB} MiB, over this worker's budget of"
                f" {self._budget_bytes // MIB} MiB",
                hint="Raise node.memory_mib on this worker, or join more workers.",
            )
        return total

    async def _load_layers(self, manifest: Manifest, assign: Assign, progress: OnProgress) -> None:
        backend = self._make_backend()
        prepared = ExpertSet(assign.term, assign.epoch, assign.manifest, dict(assign.held), backend, {})
        total = self._check(manifest, assign)
        done = 0
        try:
            for number, experts in assign.held.items():
                progress("loading", done, total)
                await trio.to_thread.run_sync(self._load_layer, backend, manifest, number, experts)
                layer = manifest.experts_of(number)
                prepared.layers[number] = HeldLayer.of(layer, experts)
                prepared.bytes_held += layer.expert_bytes * len(experts)
                done += layer.expert_bytes * len(experts)
        except BaseException:
            backend.close()
            raise
        progress("loading", total, total)
        prepared.loaded = True
        self._epochs.prepare(prepared)

    def _load_layer(self, backend: ExpertBackend, manifest: Manifest, number: int, experts: tuple[int, ...]) -> None:
        layer = manifest.experts_of(number)
        program = ExpertProgram.from_bytes(manifest.programs[layer.program])
        backend.load_layer(layer, program, experts, layer_reader(self._cache, layer))
