"""What a newcomer would hold and what a token's layers would take then, told before it joins: a placement on paper.

The very functions that place experts and choose who answers are asked, with the newcomer among the workers. What is
measured later differs by what they do not know: the trunk's own time, other people's requests, links that waver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.layer_cost import PeerSpeed, share_out
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, apart
from scheduler.placing import REPLICAS, place


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one newcomer.

    experts, layers, nbytes    what it would hold, of how many layers, and what it would fetch for that
    kernel_ms                  a token's work in its kernels
    layers_ms                  one token's layers, for one stream alone, with it; None if no placement is possible
    layers_ms_without          without it; None likewise
    missing                    why even with it not every expert has a place; "" if each has
    """

    experts: int
    layers: int
    nbytes: int
    kernel_ms: float
    layers_ms: float | None
    layers_ms_without: float | None
    missing: str = ""


def predict(
    layers: Sequence[LayerSpec],
    used: Sequence[int],
    workers: Sequence[WorkerSpec],
    newcomer: WorkerSpec,
    *,
    replicas: int = REPLICAS,
) -> Prediction:
    """used: how many experts a token uses, for each of the layers. workers: those that are there, without the newcomer.

    Raises ValueError for values out of range.
    """
    without = _placed(layers, workers, replicas)
    everybody = [*workers, newcomer]
    try:
        after = _place(layers, everybody, replicas)
    except PlacementImpossible as error:
        return _alone(layers, newcomer, error.message)
    held = after.held_by(newcomer.peer)
    sizes = {spec.layer: spec.expert_bytes for spec in layers}
    rows = 0.0
    for spec, count in zip(layers, used, strict=True):
        first = sum(peers[0] == newcomer.peer for peers in after.holders[spec.layer])
        rows += count * first / spec.n_expert
    return Prediction(
        experts=sum(map(len, held.values())),
        layers=len(held),
        nbytes=sum(sizes[layer] * len(experts) for layer, experts in held.items()),
        kernel_ms=rows / newcomer.rows_per_s * 1e3,
        layers_ms=_layers_ms(after, layers, used, everybody),
        layers_ms_without=None if without is None else _layers_ms(without, layers, used, workers),
    )


def _alone(layers: Sequence[LayerSpec], newcomer: WorkerSpec, missing: str) -> Prediction:
    """What it has room for, where the swarm cannot serve the model even with it."""
    room, count, nbytes, some = newcomer.budget_bytes, 0, 0, 0
    for spec in layers:
        fits = min(spec.n_expert, (room - nbytes) // spec.expert_bytes)
        count, nbytes, some = count + fits, nbytes + fits * spec.expert_bytes, some + (fits > 0)
    return Prediction(count, some, nbytes, 0.0, None, None, missing)


def _place(layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec], replicas: int) -> Placement:
    return place(layers, apart(workers), term=1, epoch=1, replicas=replicas)


def _placed(layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec], replicas: int) -> Placement | None:
    try:
        return _place(layers, workers, replicas)
    except PlacementImpossible:
        return None


def _layers_ms(
    placement: Placement, layers: Sequence[LayerSpec], used: Sequence[int], workers: Sequence[WorkerSpec]
) -> float:
    """Milliseconds for one token's layers, by the formula of layer_cost.py, when it is alone."""
    speeds = {worker.peer: PeerSpeed(worker.rtt_ms / 1e3, worker.rows_per_s) for worker in workers}
    seconds = 0.0
    for spec, rows in zip(layers, used, strict=True):
        peers = sorted({peer for holders in placement.holders[spec.layer] for peer in holders})
        index = {peer: i for i, peer in enumerate(peers)}
        options = [[index[peer] for peer in holders] for holders in placement.holders[spec.layer]]
        seconds += share_out(options, [speeds[peer] for peer in peers], float(rows), spec.popularity)[1]
    return seconds * 1e3


def anonymous(workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """The workers under other names, hosts likewise: who is one machine stays so, and who they are is not told."""
    hosts = {host: f"host-{i}" for i, host in enumerate(sorted({worker.host for worker in workers if worker.host}))}
    return [
        replace(worker, peer=f"worker-{i}", host=hosts.get(worker.host, ""), numeric_class=None)
        for i, worker in enumerate(workers)
    ]
