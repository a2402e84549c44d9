"""A swarm without a network: several expert backends in one process, behind the same plan and combine.

`swarmctl model check` proves a model on it before anyone joins with it; the tests use it as the smallest swarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from backends.experts import F32, I32, ExpertBackend
from backends.manifest import ExpertSource, Manifest
from backends.program import ExpertProgram
from scheduler.dispatch import LayerRouting, check_reply, gather, plan
from scheduler.placement import Placement


class LocalExperts:
    """A StepExecutor that computes on `workers` (name -> backend), each holding what `placement` says.

    `reorder`: answers are taken in reversed order, which must change nothing.
    """

    def __init__(
        self, manifest: Manifest, placement: Placement, workers: Mapping[str, ExpertBackend], *, reorder: bool = False
    ) -> None:
        self._layers = manifest.by_layer
        self._routing = {layer: LayerRouting(layer, holders) for layer, holders in placement.holders.items()}
        self._workers = workers
        self._reorder = reorder
        self._results: dict[int, F32] = {}

    def begin_step(self, requests: Sequence[str]) -> None:
        self._results.clear()

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        """Compute the chosen experts ids [T, K] on activations x [T, n_in], each on its holder, one after the other."""
        spec = self._layers[layer]
        split = plan(ids, self._routing[layer])
        parts = split.parts[::-1] if self._reorder else split.parts
        replies = {}
        for part in parts:
            y = self._workers[part.peer].compute(layer, x[part.rows], part.tokens, part.experts)
            check_reply(y, part, layer, spec.n_out)
            replies[part.peer] = y
        out = np.empty((*ids.shape, spec.n_out), np.float32)
        gather(split, replies, out)
        self._results[layer] = out

    def collect(self, layer: int) -> F32:
        """The outputs [T, K, n_out] of the last dispatch of this layer."""
        return self._results.pop(layer)


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
