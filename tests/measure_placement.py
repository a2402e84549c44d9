"""How long placing takes at the size that the design promises: 10,000 peers, 48 layers of 256 experts, one core.

    OMP_NUM_THREADS=1 python -m tests.measure_placement [--peers 10000] [--seed 1]

Each line is one placement, with its seconds, what it moved and the copies that it reached; the swarm's peers differ in
everything. The promise is 10 s for each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from scheduler.placement import LayerSpec, Placement, WorkerSpec
from scheduler.placement_report import describe, without
from scheduler.placing import place
from tests.placing_swarms import gains

EXPERT_BYTES = 1_000_000


def peers(n: int, random: Random, *, experts_each: float) -> list[WorkerSpec]:
    """Peers of all kinds, with memory for so many experts on average."""
    return [
        WorkerSpec(
            f"peer{i:05}",
            int(random.uniform(0.5, 1.5) * experts_each * EXPERT_BYTES),
            host=f"host{random.randrange(n)}",
            rows_per_s=random.uniform(100, 10_000),
            rtt_ms=random.uniform(1, 100),
            fitness="fit" if random.random() < 0.95 else "unfit",
            accumulates_f32=random.random() < 0.6,
            numeric_class=f"class{random.randrange(12)}",
        )
        for i in range(n)
    ]


def timed(
    name: str, layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec], previous: Placement | None
) -> Placement:
    start = time.perf_counter()
    placement = place(layers, workers, term=1, epoch=1, previous=previous)
    seconds = time.perf_counter() - start
    copies = sum(len(peers) for holders in placement.holders.values() for peers in holders)
    moved = sum(gains(previous, placement, layers).values()) // EXPERT_BYTES if previous is not None else copies
    print(f"{seconds:6.2f} s  {name:44} {moved:6} moved, {copies} copies", flush=True)
    return placement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random, n = Random(options.seed), options.peers
    layers = [LayerSpec(i, options.experts, EXPERT_BYTES) for i in range(options.layers)]
    each = options.layers * options.experts / n
    workers = peers(n, random, experts_each=8 * each)
    full = timed("from nothing", layers, workers, None)
    timed("again, nothing changed", layers, workers, full)
    timed("one leaves", layers, workers[1:], full)
    timed("a tenth leaves", layers, workers[n // 10 :], full)
    half = timed("half the peers, from nothing", layers, workers[n // 2 :], None)
    timed("one joins", layers, workers[n // 2 - 1 :], half)
    timed("as many join", layers, workers, half)
    timed("nobody accumulates in F32 any more", layers, [replace(w, accumulates_f32=False) for w in workers], full)
    timed("memory for 1.9 copies", layers, peers(n, random, experts_each=1.9 * each + 0.5), None)
    tight = peers(n, random, experts_each=1.2 * each + 0.5)
    timed("memory for 1.2 copies", layers, tight, None)
    timed("and other budgets then", layers, tight, full)
    start = time.perf_counter()
    report = describe(full, layers, workers)
    print(f"{time.perf_counter() - start:6.2f} s  its report: {report.token_ms:.0f} ms for a token's experts")
    start = time.perf_counter()
    without(full, layers, workers, full.holders[0][0][0])
    print(f"{time.perf_counter() - start:6.2f} s  what the loss of one would cost")


if __name__ == "__main__":
    main()
