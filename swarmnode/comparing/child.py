"""The child process that computes operators for another member, so that the daemon goes on whatever the backend does.

    python -m swarmnode.comparing.child     the order as JSON on standard input, the result as backends/child.py says

It takes the lowest priority and writes what it computed to a file that the order names. The result says which recipes
were done, a hash of each one's inputs, how precisely the kernels add, and the seconds of computing that it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, Final

from backends.child import Report, run_child
from backends.ggml import allow_wide_kernels
from backends.llama import start_library
from backends.measure import measure_precision
from backends.variant_process import KernelProcess
from capabilities.precision import Verdict
from swarmnode.comparing.messages import Operators
from swarmnode.compute import choose_compute
from swarmnode.config_sections import ComputeConfig
from swarmnode.equivalence.recipes import Recipe, compute, inputs_hash, joined, type_of
from swarmnode.equivalence.targets import PRECISION_WIDTHS

_NICE: Final = 19


def order(config: ComputeConfig, threads: int, fast: bool, asked: Operators, out: Path) -> dict[str, Any]:
    """What the child reads."""
    return {
        "compute": config.model_dump(),
        "threads": threads,
        "fast": fast,
        "type": asked.type,
        "recipes": [[each.op, each.type, each.length, list(each.widths)] for each in asked.recipes],
        "out": str(out),
    }


def work(ordered: dict[str, Any]) -> dict[str, Any]:
    """Carry an order out.

    Raises:
        SwarmError: there is no such backend, it does not know the weight type, or its device failed.
    """
    start_library()
    if ordered["fast"]:
        allow_wide_kernels()
    config, threads = ComputeConfig(**ordered["compute"]), ordered["threads"]
    made = choose_compute(config, threads)
    recipes = [Recipe(op, kind, length, tuple(widths)) for op, kind, length, widths in ordered["recipes"]]
    verdict, rows = Verdict(), made.rows
    if ordered["type"]:
        backend = made.make()
        verdict = measure_precision(backend, type_of(ordered["type"]), PRECISION_WIDTHS)
        backend.close()
    done, hashes = [], []
    with Path(ordered["out"]).open("wb") as file:
        for recipe in recipes:
            hashes.append(inputs_hash(recipe.inputs()))
            done.append(int(recipe.op in ("matmul", "swiglu") or rows is not None))
            if done[-1]:
                file.write(joined(compute(recipe, made.make, rows)))
    if isinstance(rows, KernelProcess):
        rows.close()  # so that its time counts
    return {
        "done": done,
        **{f"inputs_{index}": found for index, found in enumerate(hashes)},
        "accumulation": str(verdict.accumulation),
        "source": str(verdict.source),
        "seconds": _seconds(),
    }


def _seconds() -> float:
    """Of computing, kernels' processes included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    ordered: dict[str, Any] = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        os.nice(_NICE)

    def carry_out(_report: Report) -> dict[str, Any]:
        return work(ordered)

    return run_child(carry_out)


if __name__ == "__main__":
    sys.exit(main())
