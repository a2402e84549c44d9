"""The child process that measures this daemon's backend, so that the event loop and the kernels at work go on.

    python -m swarmnode.measure_child      the order as JSON on standard input, the result as backends/child.py says

A backend that crashes, hangs or prints ends this process and not the daemon. It takes the lowest priority, and turns
with other daemons of the machine: two that measure at once would slow each other down, and be told so for a week.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from backends.child import Report, run_child
from backends.device import Device
from backends.experts import ExpertBackend, GgmlExperts
from backends.ggml import allow_wide_kernels
from backends.measure import Request, declared_by, measure_backend
from backends.measurement_cache import cached_measurement
from backends.program import Node
from backends.variant_process import KernelExperts
from capabilities.measurement import NAME_CHARS_MAX, BackendMeasurement
from swarmnode.compute import choose_compute
from swarmnode.config_sections import ComputeConfig

TURN_SECONDS_MAX: Final = 20.0
"""Waiting for other daemons that measure; then together."""

_NICE: Final = 19


def order(
    config: ComputeConfig, threads: int, folder: Path, request: Request, *, fast: bool, deadline_s: float, anew: bool
) -> dict[str, Any]:
    """What the child reads."""
    return {
        "compute": config.model_dump(),
        "threads": threads,
        "folder": str(folder),
        "kinds": list(request.kinds),
        "widths": [request.n_in, request.n_ff],
        "units": [[unit.op, unit.name, list(unit.params)] for unit in request.units],
        "fast": fast,
        "deadline_s": deadline_s,
        "anew": anew,
    }


def measure(ordered: dict[str, Any], report: Report) -> BackendMeasurement:
    """Carry an order out.

    Raises:
        SwarmError: there is no such backend, or its device failed.
    """
    if ordered["fast"]:
        allow_wide_kernels()
    config, threads, folder = ComputeConfig(**ordered["compute"]), ordered["threads"], Path(ordered["folder"])
    units = tuple(Node(op, (), name, tuple(params)) for op, name, params in ordered["units"])
    n_in, n_ff = ordered["widths"]
    request = Request(tuple(ordered["kinds"]), n_in, n_ff, units=units)

    def progress(done: int, total: int, what: str) -> None:
        report(what, done, total)

    with _turn(folder):
        if config.factory or config.kernel or config.backend != "ggml":
            compute = choose_compute(config, threads)
            backend = compute.make()
            if isinstance(backend, KernelExperts):
                backend.start()  # which may take longer than measuring may
            try:
                measured = measure_backend(
                    backend, _declared(request, backend), deadline_s=ordered["deadline_s"], progress=progress
                )
            finally:
                backend.close()
            return replace(measured, name=compute.name[:NAME_CHARS_MAX], device=compute.device[:NAME_CHARS_MAX])
        device = Device(config.device, threads=threads)
        return cached_measurement(
            folder,
            device,
            _declared(request, GgmlExperts(device)),
            threads=threads,
            deadline_s=ordered["deadline_s"],
            progress=progress,
            anew=ordered["anew"],
        )


def _declared(request: Request, backend: ExpertBackend) -> Request:
    accumulation, source = declared_by(backend)
    return replace(request, accumulation=accumulation, source=source)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Measure alone on this machine, as far as its daemons share the folder; a folder that cannot be used is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "measuring.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    ends_at = time.monotonic() + TURN_SECONDS_MAX
    while time.monotonic() < ends_at:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(file)


def main() -> int:
    ordered: dict[str, Any] = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    return run_child(lambda report: measure(ordered, report).to_json())


if __name__ == "__main__":
    sys.exit(main())
