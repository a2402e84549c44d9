"""Which peer holds which experts: what a placement is, what it is made from, and the simplest way to make one.

`even_split` gives each expert to one worker and every worker a share of every layer: shares are equal unless a budget
is too small for that, and what such a worker cannot hold is shared by the others. It is what a model is checked with,
on workers that are all alike. Swarms are placed by scheduler/placing.py, which knows replicas, hosts, precision, speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from capabilities.errors import NotReady
from capabilities.verdict import Fitness

OUTPUT_RANKS_SHARE = 4  # one in so many layers, counted from the output, is an output rank unless it is said otherwise


class PlacementImpossible(NotReady):
    """The workers' budgets together cannot hold the experts."""

    default_hint = "Join more workers, or give those that are there a larger memory budget."


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer to place: its number, its routed experts and the bytes of one of them.

    popularity: how often each expert was chosen, in any unit, [n_expert]; None if nobody counted.
    """

    layer: int
    n_expert: int
    expert_bytes: int
    popularity: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A peer that may hold experts, the bytes that it has for them, and what was measured of it.

    host: the machine that it runs on, which may run others; the peer itself if empty. rows_per_s: expert rows a second.
    accumulates_f32: in F32 when asked to. numeric_class: of its arithmetic for this model's weight types, None if it is
    not known; unknown classes are all different. A quarantined or draining peer holds nothing.
    """

    peer: str
    budget_bytes: int
    host: str = ""
    rows_per_s: float = 1_000.0
    rtt_ms: float = 1.0
    fitness: Fitness = "fit"
    accumulates_f32: bool = True
    numeric_class: str | None = None
    draining: bool = False

    @property
    def may_hold(self) -> bool:
        return self.fitness != "quarantined" and not self.draining

    @property
    def tier(self) -> int:
        """How far from right for an output rank: 0 is fit with F32, 1 fit without, 2 and 3 the same but unfit."""
        return 2 * (self.fitness != "fit") + (not self.accumulates_f32)


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds what in one epoch of a term: holders[layer][expert] are the peers, the preferred one first."""

    term: int
    epoch: int
    holders: Mapping[int, tuple[tuple[str, ...], ...]]

    def held_by(self, peer: str) -> dict[int, tuple[int, ...]]:
        """The experts of each layer that the peer holds; layers without any are left out."""
        held = {
            layer: tuple(expert for expert, peers in enumerate(holders) if peer in peers)
            for layer, holders in self.holders.items()
        }
        return {layer: experts for layer, experts in held.items() if experts}

    def peers(self) -> tuple[str, ...]:
        """All holders, sorted."""
        return tuple(sorted({p for holders in self.holders.values() for peers in holders for p in peers}))


def apart(workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """The workers, each as a host of its own if all of them are on one.

    Copies belong on different hosts; where there is but one, copies on different workers still outlive a worker.
    """
    if len({worker.host or worker.peer for worker in workers}) > 1:
        return list(workers)
    return [replace(worker, host="") for worker in workers]


def output_ranks(layers: Iterable[LayerSpec]) -> frozenset[int]:
    """The layers where an error has no later one to average it away: the last quarter, rounded up."""
    numbers = sorted(spec.layer for spec in layers)
    return frozenset(numbers[len(numbers) - -(-len(numbers) // OUTPUT_RANKS_SHARE) :])


def check_specs(layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec]) -> None:
    """Raise ValueError for what no honest caller passes."""
    if len({worker.peer for worker in workers}) < len(workers) or len({spec.layer for spec in layers}) < len(layers):
        raise ValueError("a layer or a peer is named twice")
    if any(spec.n_expert < 1 or spec.expert_bytes < 1 for spec in layers) or any(w.budget_bytes < 0 for w in workers):
        raise ValueError("a layer has at least one expert of at least one byte, and no budget is below zero")
    for spec in layers:
        counted = spec.popularity
        if counted is not None and (len(counted) != spec.n_expert or not all(0 <= p < math.inf for p in counted)):
            raise ValueError(f"layer {spec.layer}: popularity is one finite number of zero or more for each expert")
    if not all(0 <= worker.rtt_ms < math.inf and 0 <= worker.rows_per_s < math.inf for worker in workers):
        raise ValueError("round trips and rates are finite and not negative")


def even_split(layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec], *, term: int, epoch: int) -> Placement:
    """Place every expert on one worker. The same input in any order gives the same placement.

    Where budgets allow, no two workers differ by more than one expert in any layer, nor over all layers by more than
    the bytes of one expert. Raises PlacementImpossible naming the bytes that are missing.
    """
    check_specs(layers, workers)
    workers = sorted(workers, key=lambda worker: worker.peer)
    total = sum(spec.n_expert * spec.expert_bytes for spec in layers)
    budgets = [worker.budget_bytes for worker in workers]
    if sum(budgets) < total:
        raise PlacementImpossible(
            f"the experts take {total} bytes, the {len(workers)} workers' budgets add up to {sum(budgets)}: "
            f"{total - sum(budgets)} bytes are missing"
        )
    free, load, left = list(budgets), [0] * len(workers), total
    counts: dict[int, list[int]] = {}
    # The largest experts first: small ones still fit into what those leave.
    for spec in sorted(layers, key=lambda spec: (-spec.expert_bytes, spec.layer)):
        counts[spec.layer] = _split_layer(spec, free, load, left)
        for i, count in enumerate(counts[spec.layer]):
            free[i] -= count * spec.expert_bytes
            load[i] += count * spec.expert_bytes
        left -= spec.n_expert * spec.expert_bytes
    return Placement(
        term,
        epoch,
        {
            layer: tuple((worker.peer,) for worker, n in zip(workers, counts[layer], strict=True) for _ in range(n))
            for layer in sorted(counts)
        },
    )


def _split_layer(spec: LayerSpec, free: list[int], load: list[int], left: int) -> list[int]:
    """How many experts of a layer each worker takes, given its free and used bytes and all the bytes yet to place."""
    size = spec.expert_bytes
    room = [bytes_free // size for bytes_free in free]
    shares = _shares(free, left)
    largest = max(shares)
    quotas = [spec.n_expert * share for share in shares]
    counts = [int(quota) for quota in quotas]  # within room: a share is never more than what is free
    for _ in range(spec.n_expert - sum(counts)):
        able = [i for i in range(len(free)) if counts[i] < room[i]]
        if not able:
            missing = (spec.n_expert - sum(counts)) * size
            raise PlacementImpossible(f"{missing} bytes are missing: no budget has room for one more whole expert")
        # Rounding left some over: first to those that no budget holds back (their shares are equal, so the one that
        # carries least is behind), and to nobody beyond its quota rounded up while another is below.
        taker = min(able, key=lambda i: (counts[i] >= quotas[i], shares[i] < largest, load[i] + counts[i] * size, i))
        counts[taker] += 1
    return counts


def _shares(free: list[int], left: int) -> list[Fraction]:
    """Fractions that add up to 1, equal but for workers whose free bytes are less than an equal fraction of `left`."""
    shares = [Fraction(0)] * len(free)
    rest = Fraction(1)
    by_room = sorted(range(len(free)), key=lambda i: (free[i], i))
    for n, i in enumerate(by_room):
        shares[i] = min(Fraction(free[i], left), rest / (len(free) - n))
        rest -= shares[i]
    return shares
