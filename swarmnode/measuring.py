"""Has this node's backend measured: at start, for the model's own weights once they are known, and when asked to.

The work is a child's (measure_child.py). What was measured last stays valid until the next result is there. A machine
that is too slow for the usual deadline tells what it found by then, and goes on with a longer one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from backends.child import parse_line
from backends.gguf_types import GGML_TYPES
from backends.manifest import Manifest
from backends.measure import DEADLINE_S, Request
from capabilities.errors import Internal, SwarmError
from capabilities.measurement import BackendMeasurement
from capabilities.numeric_class import work_of
from swarmnode import limits
from swarmnode.compute import Compute
from swarmnode.config_sections import ComputeConfig
from swarmnode.measure_child import order
from swarmnode.measured import Measured

_log = structlog.get_logger(__name__)

USUAL_TYPES: Final = ("q4_K", "q6_K", "q8_0", "f16")
"""Measured while no model is known: half a second each."""

USUAL: Final = Request(tuple(kind for kind, known in sorted(GGML_TYPES.items()) if known.name in USUAL_TYPES))

DEADLINES_S: Final = (DEADLINE_S, 600.0)
"""The second one where the first was too short. An emulated processor takes three minutes for the usual types, and as
long for the widest experts that a fingerprint is taken of, in half precision."""

CLASSES_KEPT: Final = 8  # of so many models and usual types

RunChild = Callable[[dict[str, Any]], Awaitable[BackendMeasurement]]


class Measuring:
    """Run `run` in a nursery; `current` is the newest result.

    `folder` keeps results between starts, best one for all daemons of the machine. `fast`: leader.fast, which changes
    kernels.
    """

    def __init__(
        self,
        config: ComputeConfig,
        compute: Compute,
        threads: int,
        folder: Path,
        *,
        fast: bool = False,
        run_child: RunChild | None = None,
    ) -> None:
        self.current = Measured(compute.name, compute.device)
        self._config = config
        self._threads = threads
        self._folder = folder
        self._fast = fast
        self._run_child = run_child or measure_in_child
        self._request = USUAL
        self._anew = False
        self._at_work = trio.CancelScope()
        self._wanted = trio.Event()
        self._done = trio.Event()
        self._wanted.set()
        self._on_change: list[Callable[[], object]] = []
        self._classes: dict[str, str] = {}  # by what they were measured with

    @contextmanager
    def on_change(self, callback: Callable[[], object]) -> Iterator[None]:
        """Within the context `callback` is called after each result. It must not block."""
        self._on_change.append(callback)
        try:
            yield
        finally:
            self._on_change.remove(callback)

    @property
    def classes(self) -> tuple[str, ...]:
        """The numeric classes that were measured, the newest of each kind of work: before a model is known that is
        another than afterwards, and other peers may be slower to know it."""
        return tuple(self._classes.values())

    @property
    def busy(self) -> bool:
        """Whether a result is still to come."""
        return self._wanted.is_set()

    def for_model(self, manifest: Manifest) -> None:
        """Its experts are to be computed: measure their types and widths, unless that was done last."""
        request = Request.of_model(manifest)
        if request.kinds and request != self._request:
            self._request = request
            self._want()

    async def remeasure(self) -> Measured:
        """Measure again, whatever is kept, and wait for the result."""
        self._anew = True
        self._want()
        return await self.wait()

    async def wait(self) -> Measured:
        """The result of what is wanted now, once it is there. Bound the wait: `run` must be running."""
        await self._done.wait()
        return self.current

    def _want(self) -> None:
        """What is measured now is not wanted any more: on a slow machine it could take minutes yet."""
        self._at_work.cancel()
        self._wanted.set()
        if self._done.is_set():
            self._done = trio.Event()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            request, anew, self._anew = self._request, self._anew, False
            with trio.CancelScope() as self._at_work:
                await self._measure(request, anew)
            if request == self._request and not self._anew:
                self._wanted = trio.Event()
                self._done.set()

    async def _measure(self, request: Request, anew: bool) -> None:
        for deadline_s in DEADLINES_S:
            ordered = order(
                self._config, self._threads, self._folder, request, fast=self._fast, deadline_s=deadline_s, anew=anew
            )
            try:
                measured = await self._run_child(ordered)
                self.current = replace(self.current, backend=measured, error="")
                self._remember(self.current.numeric_class())
                _log.info(
                    "backend.measured", backend=measured.name, complete=measured.complete, types=len(measured.types)
                )
            except SwarmError as error:
                self.current = replace(self.current, error=error.message)
                _log.warning("backend.not_measured", error=error.to_json())
            for callback in self._on_change:
                callback()
            if self.current.error or self.current.complete:
                return

    def _remember(self, word: str) -> None:
        if word:
            self._classes.pop(work_of(word), None)
            self._classes[work_of(word)] = word
        while len(self._classes) > CLASSES_KEPT:
            del self._classes[next(iter(self._classes))]


async def measure_in_child(ordered: dict[str, Any]) -> BackendMeasurement:
    """Run the child and wait for it; cancelling ends it.

    Raises:
        SwarmError: the backend cannot be made or failed, or the child ended without a result in time.
    """
    command = [sys.executable, "-m", "swarmnode.measure_child"]
    stdin = json.dumps(ordered).encode()
    seconds = ordered["deadline_s"] + limits.MEASURE_EXTRA_SECONDS_MAX
    with trio.move_on_after(seconds):
        ended = await trio.run_process(
            command, stdin=stdin, capture_stdout=True, stderr=subprocess.DEVNULL, check=False
        )
        for line in reversed(ended.stdout.splitlines()):
            message = parse_line(line)
            if "result" in message:
                return BackendMeasurement.from_json(message["result"])
            if "error" in message:
                raise SwarmError.from_json(message["error"])
        raise Internal(f"measuring the backend ended with status {ended.returncode} and no result", hint=_HINT)
    raise Internal(f"measuring the backend took more than {seconds:.0f} s", hint=_HINT)


_HINT: Final = "Look at compute.* in the configuration: another backend or device may be sound."
