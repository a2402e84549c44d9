"""What a peer computes for another member: operators in a child process, rows of experts with the kernels that serve.

Rows are computed a few at a time, under the same lock as dispatches, so that one of those waits for a slice at most;
while the worker serves requests, comparisons get a tenth of the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from backends.child import parse_line
from backends.manifest import Manifest
from capabilities.errors import Internal, NotReady, PeerMistake, SwarmError
from capabilities.held_experts import HeldExperts
from swarmnode import limits
from swarmnode.comparing.child import order
from swarmnode.comparing.messages import (
    Held,
    HeldAnswer,
    Operators,
    Request,
    Rows,
    encode_held,
    encode_operators,
    encode_rows,
    layer_digest,
)
from swarmnode.config_sections import ComputeConfig
from swarmnode.expert_messages import decode_dispatch
from swarmnode.worker.epochs import ExpertSet
from swarmnode.worker.service import Worker

THREADS: Final = 1  # of the child: others' questions need not be answered soon


@dataclass(eq=False)
class Spent:
    """Seconds of computing that a piece of work took, whatever became of it."""

    seconds: float = 0.0


class Work:
    """config: the backend that serves. fast: leader.fast, which changes kernels. worker: None on a node without one."""

    def __init__(self, name: str, config: ComputeConfig, worker: Worker, folder: Path, *, fast: bool = False) -> None:
        self._name = name
        self._config = config
        self._fast = fast
        self._worker = worker
        self._folder = folder

    async def answer(self, asked: Request, spent: Spent) -> bytes:
        """The frame that answers.

        Raises:
            SwarmError: it cannot be computed here, with the reason.
        """
        match asked:
            case Operators():
                return await self._operators(asked, spent)
            case Held():
                return encode_held(await trio.to_thread.run_sync(self._held))
            case Rows():
                return await self._rows(asked, spent)

    # -- operators ------------------------------------------------------------------------------------------------

    async def _operators(self, asked: Operators, spent: Spent) -> bytes:
        started = trio.current_time()
        try:
            with tempfile.TemporaryDirectory(prefix="compare-", dir=self._folder) as folder:
                out = Path(folder) / "rows"
                head = await _run_child(order(self._config, THREADS, self._fast, asked, out))
                spent.seconds = float(head["seconds"])
                return encode_operators(head, await trio.to_thread.run_sync(out.read_bytes))
        finally:
            spent.seconds = spent.seconds or trio.current_time() - started

    # -- experts --------------------------------------------------------------------------------------------------

    def _serving(self) -> tuple[ExpertSet, Manifest]:
        held, manifest = self._worker.serving, self._worker.manifest
        if held is None or not held.loaded or manifest is None or manifest.id != held.manifest:
            raise NotReady(f"{self._name} holds no experts now", hint="It holds some once a placement gives it some.")
        return held, manifest

    def _held(self) -> HeldAnswer:
        held, manifest = self._serving()
        digests = {layer: layer_digest(manifest, manifest.experts_of(layer)) for layer in held.wanted}
        return HeldAnswer(self._name, HeldExperts.of(held.manifest, held.wanted), digests)

    async def _rows(self, asked: Rows, spent: Spent) -> bytes:
        held, _ = self._serving()
        layer = held.layers.get(asked.head.layer)
        if held.manifest != asked.model or layer is None:
            raise NotReady(f"{self._name} holds nothing of layer {asked.head.layer} of that model now")
        dispatch = decode_dispatch(asked.head, asked.payload, layer)
        if asked.head.n_rows * layer.n_out * 4 > limits.COMPARE_PAYLOAD_BYTES_MAX:
            raise PeerMistake(f"{asked.head.n_rows} rows of {layer.n_out} values do not fit an answer")
        x, epochs, served = np.asarray(dispatch.x, np.float32), self._worker.epochs, self._served()
        parts = []
        for start in range(0, asked.head.n_rows, limits.COMPARE_SLICE_ROWS):
            part = slice(start, start + limits.COMPARE_SLICE_ROWS)
            async with epochs.computing:
                if not epochs.holds(held):
                    raise NotReady(f"{self._name} was given other experts meanwhile", hint="Compare again.")
                started = trio.current_time()
                compute: Callable[..., Any] = held.backend.compute
                y = await trio.to_thread.run_sync(
                    compute, asked.head.layer, x, dispatch.tokens[part], dispatch.experts[part]
                )
                took = trio.current_time() - started
            spent.seconds += took
            parts.append(y)
            if served != (served := self._served()):
                await trio.sleep(min(limits.COMPARE_YIELD_FACTOR * took, limits.COMPARE_YIELD_SECONDS_MAX))
        return encode_rows(np.concatenate(parts))

    def _served(self) -> int:
        return self._worker.experts.statistics.dispatches


async def _run_child(ordered: dict[str, Any]) -> dict[str, Any]:
    """Run the child and wait for it; cancelling ends it.

    Raises:
        SwarmError: what the child fails with, or that it ended without a result.
    """
    command = [sys.executable, "-m", "swarmnode.comparing.child"]
    ended = await trio.run_process(
        command, stdin=json.dumps(ordered).encode(), capture_stdout=True, stderr=subprocess.DEVNULL, check=False
    )
    for line in reversed(ended.stdout.splitlines()):
        message = parse_line(line)
        if "result" in message:
            found: dict[str, Any] = message["result"]
            return found
        if "error" in message:
            raise SwarmError.from_json(message["error"])
    raise Internal(f"comparing ended with status {ended.returncode} and no result", hint="Its backend may be unsound.")
