"""Swarms to place on, for tests: drawn ones of every kind, plain ones, and the hard rules as a judge of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from scheduler.placement import LayerSpec, Placement, WorkerSpec

PLENTY = 10**12


def alike(n: int, *, rtt_ms: float = 1.0, rows_per_s: float = 1_000.0, budget_bytes: int = PLENTY) -> list[WorkerSpec]:
    return [WorkerSpec(f"w{i}", budget_bytes, rtt_ms=rtt_ms, rows_per_s=rows_per_s) for i in range(n)]


def stack(n_layers: int, n_expert: int, expert_bytes: int = 10) -> list[LayerSpec]:
    return [LayerSpec(i, n_expert, expert_bytes) for i in range(n_layers)]


@st.composite
def layer_lists(draw: st.DrawFn, *, equal_sizes: bool = False) -> list[LayerSpec]:
    size = draw(st.integers(1, 5))
    layers = []
    for i in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 9))
        counts = draw(st.none() | st.lists(st.integers(0, 50), min_size=n, max_size=n).map(tuple))
        layers.append(LayerSpec(2 * i + 1, n, size if equal_sizes else draw(st.integers(1, 5)), counts))
    return layers


@st.composite
def worker_specs(draw: st.DrawFn, peer: str, *, budgets: st.SearchStrategy[int]) -> WorkerSpec:
    return WorkerSpec(
        peer,
        draw(budgets),
        host=draw(st.sampled_from(("", "", "h0", "h1", "h2"))),
        rows_per_s=draw(st.sampled_from((0.0, 30.0, 1_000.0, 1_100.0, 50_000.0))),
        rtt_ms=draw(st.sampled_from((0.0, 0.3, 20.0, 21.0, 250.0))),
        fitness=draw(st.sampled_from(("fit", "fit", "fit", "unfit", "quarantined"))),
        accumulates_f32=draw(st.booleans()),
        numeric_class=draw(st.sampled_from((None, "a", "b"))),
        draining=draw(st.integers(0, 7)) == 0,
    )


def worker_lists(budgets: st.SearchStrategy[int]) -> st.SearchStrategy[list[WorkerSpec]]:
    return st.integers(1, 7).flatmap(
        lambda n: st.tuples(*(worker_specs(f"w{i}", budgets=budgets) for i in range(n))).map(list)
    )


def used_bytes(placement: Placement, layers: Sequence[LayerSpec]) -> Counter[str]:
    used: Counter[str] = Counter()
    for spec in layers:
        for peers in placement.holders[spec.layer]:
            for peer in peers:
                used[peer] += spec.expert_bytes
    return used


def gains(before: Placement, after: Placement, layers: Sequence[LayerSpec]) -> Counter[str]:
    """Bytes that each peer must load that it did not hold."""
    gained: Counter[str] = Counter()
    for spec in layers:
        for old, new in zip(before.holders[spec.layer], after.holders[spec.layer], strict=True):
            for peer in set(new) - set(old):
                gained[peer] += spec.expert_bytes
    return gained


def experts_held(placement: Placement, peer: str) -> int:
    return sum(map(len, placement.held_by(peer).values()))


def broken_rules(
    placement: Placement,
    layers: Sequence[LayerSpec],
    workers: Sequence[WorkerSpec],
    replicas: int,
    output: frozenset[int],
) -> list[str]:
    """The hard rules, read off the result alone."""
    spec_of = {worker.peer: worker for worker in workers}
    used = used_bytes(placement, layers)
    free = {w.peer: w.budget_bytes - used[w.peer] for w in workers}
    copies = {(spec.layer, e): peers for spec in layers for e, peers in enumerate(placement.holders[spec.layer])}
    redundant: Counter[str] = Counter()
    for (layer, _), peers in copies.items():
        if len(peers) > 1:
            redundant.update(dict.fromkeys(peers, next(s.expert_bytes for s in layers if s.layer == layer)))
    broken = [f"{peer} has {-left} bytes too many" for peer, left in free.items() if left < 0]
    broken += [f"{peer} must hold nothing" for peer in used if not spec_of[peer].may_hold]
    broken += [f"layer {spec.layer} is cut" for spec in layers if len(placement.holders[spec.layer]) != spec.n_expert]
    able = [worker for worker in workers if worker.may_hold]
    for spec in layers:
        for expert, peers in enumerate(placement.holders[spec.layer]):
            name = f"expert {expert} of layer {spec.layer}"
            hosts = [spec_of[peer].host or peer for peer in peers]
            if not 1 <= len(peers) <= replicas:
                broken.append(f"{name} has {len(peers)} copies")
            if len(set(hosts)) < len(hosts):
                broken.append(f"{name} is twice on one host")
            worst = 3
            if spec.layer in output and peers:
                tiers = {spec_of[peer].tier for peer in peers}
                worst = max(tiers)
                if worst and 0 in tiers:
                    broken.append(f"{name} of an output rank is on right and wrong peers")
                if worst and any(w.tier == 0 and free[w.peer] + redundant[w.peer] >= spec.expert_bytes for w in able):
                    broken.append(f"{name} of an output rank is on a wrong peer although there is room on a right one")
            if len(peers) < replicas and any(
                w.tier <= worst and (w.host or w.peer) not in hosts and free[w.peer] >= spec.expert_bytes for w in able
            ):
                broken.append(f"{name} lacks a copy although there is room")
    return broken
