"""Experts for a moment, on a node without the model's file: fetched into the cache, kept there while they are read.

A leader that has the trunk alone proves its workers with this: it computes what they should answer from bytes that it
got from the very holder that it probes, or from any other, for the manifest's hashes say which bytes are right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import trio

from backends.manifest import LayerExperts, Manifest
from capabilities.errors import ExpertsUnavailable
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch import fetch_experts
from swarmnode.shards.store import ShardCache


class Borrowing:
    """`obtain` is what leader.probe.ProbeReference asks."""

    def __init__(
        self, network: Network, manifest: Manifest, cache: ShardCache, others: Callable[[], Iterable[PeerId]]
    ) -> None:
        """`others`: peers that may have any expert, besides the holder that is named each time."""
        self._network = network
        self._manifest = manifest
        self._cache = cache
        self._others = others
        self._turns = trio.CapacityLimiter(limits.BORROWINGS_MAX)

    @asynccontextmanager
    async def obtain(self, layer: LayerExperts, experts: Sequence[int], holder: PeerId) -> AsyncIterator[None]:
        """Within the context these experts are in the cache. Cancelling it keeps what has come for the next time.

        Raises:
            ExpertsUnavailable: neither the holder nor anybody else gave them in time.
            CacheError: the cache cannot take them.
        """
        sources = list(dict.fromkeys([holder, *self._others()]))
        seconds = len(experts) * layer.expert_bytes / limits.BORROW_BYTES_PER_SECOND_MIN
        async with self._turns:
            with self._cache.keep(layer.hashes[expert] for expert in experts):
                with trio.move_on_after(max(seconds, limits.BORROW_SECONDS_MIN)) as deadline:
                    await fetch_experts(self._network, sources, self._manifest, {layer.layer: experts}, self._cache)
                if deadline.cancelled_caught:
                    raise ExpertsUnavailable(
                        f"experts of layer {layer.layer} to compare with did not come in time",
                        hint="Nobody who holds them sends fast enough; a peer with the model's file would.",
                        layer=layer.layer,
                        experts=list(experts),
                        peer=str(holder),
                        cause="timeout",
                    )
                yield
