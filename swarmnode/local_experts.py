"""A swarm without a network: several expert backends in one process, behind the same plan and both combines.

`swarmctl model check` proves a model on it before anyone joins with it; the tests use it as the smallest swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from backends.experts import F32, I32, ExpertBackend
from backends.manifest import ExpertSource, Manifest
from backends.program import ExpertProgram
from scheduler.combine import add_partials, weighted_sums
from scheduler.dispatch import LayerRouting, PeerRows, Plan, check_reply, gather, plan
from scheduler.placement import Placement


class Computes(Protocol):
    """The part of an ExpertBackend that computes."""

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32: ...


class LocalExperts:
    """A StepExecutor that computes on `workers` (name -> backend), each holding what `placement` says.

    `arrival`: in which order the workers answer, given their parts of a dispatch; it must change nothing.
    """

    def __init__(
        self,
        manifest: Manifest,
        placement: Placement,
        workers: Mapping[str, Computes],
        *,
        arrival: Callable[[Sequence[PeerRows]], Iterable[PeerRows]] = iter,
    ) -> None:
        self._layers = manifest.by_layer
        self._routing = {layer: LayerRouting(layer, holders) for layer, holders in placement.holders.items()}
        self._workers = workers
        self._arrival = arrival
        self._results: dict[int, F32] = {}

    def begin_step(self, requests: Sequence[str]) -> None:
        self._results.clear()

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        """Compute the chosen experts ids [T, K] on activations x [T, n_in], each on its holder, one after the other."""
        split = plan(ids, self._routing[layer])
        out = np.empty((*ids.shape, self._layers[layer].n_out), np.float32)
        gather(split, self._replies(split, x), out)
        self._results[layer] = out

    def collect(self, layer: int) -> F32:
        """The outputs [T, K, n_out] of the last dispatch of this layer."""
        return self._results.pop(layer)

    def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
        """The same with one row a token from each holder, who weights and adds its own by weights [T, K]."""
        split = plan(ids, self._routing[layer])
        by_slot, parts = weights.reshape(-1), {part.peer: part for part in split.parts}
        sums = {
            peer: weighted_sums(y, by_slot[parts[peer].slots], parts[peer].tokens)
            for peer, y in self._replies(split, x).items()
        }
        self._results[layer] = add_partials(split, sums, self._layers[layer].n_out)

    def collect_sum(self, layer: int) -> F32:
        """Each token's total [T, n_out] of the last dispatch of this layer."""
        return self._results.pop(layer)

    def _replies(self, split: Plan, x: F32) -> dict[str, F32]:
        replies = {}
        for part in self._arrival(split.parts):
            y = self._workers[part.peer].compute(split.layer, x[part.rows], part.tokens, part.experts)
            check_reply(y, part, split.layer, self._layers[split.layer].n_out)
            replies[part.peer] = y
        return replies


def load_experts(
    backend: ExpertBackend, manifest: Manifest, held: Mapping[int, Sequence[int]], source: ExpertSource
) -> None:
    """Load experts of every layer in `held` straight from a source."""
    for number, experts in held.items():
        load_layer(backend, manifest, number, experts, source)


def load_layer(
    backend: ExpertBackend, manifest: Manifest, number: int, experts: Sequence[int], source: ExpertSource
) -> None:
    """Load some experts of one layer straight from a source."""
    layer = manifest.experts_of(number)
    program = ExpertProgram.from_bytes(manifest.programs[layer.program])

    def read(expert: int, tensor: int) -> bytes | memoryview:
        return source.read(number, expert, layer.offsets[tensor], layer.tensors[tensor].nbytes)

    backend.load_layer(layer, program, experts, read)
