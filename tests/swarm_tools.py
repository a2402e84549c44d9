"""Swarms of real daemons for tests: tiny models, the undivided model as the yardstick, and ways to look and to wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capabilities.errors import SwarmError
from swarmnode.handlers import parse_ask
from swarmnode.local_swarm import LocalNode, LocalSwarm, Settings
from swarmnode.undivided import Undivided, UndividedAnswer
from tests.patience import PATIENCE_S
from tests.tiny_architectures import write_olmoe, write_tiny_model

CONTEXT_TOKENS = 1024
WORKERS = 2
TWELVE_A_MIB = {"f32": (64, 112), "q8_0": (64, 416)}
"""Widths with which 12 experts take just under a MiB: half of what three layers of an olmoe have."""

Params = dict[str, Any]


class Served:
    """A swarm that serves a tiny model, and the same model undivided."""

    def __init__(self, swarm: LocalSwarm, model: Path) -> None:
        self.swarm = swarm
        self.model = model
        self.undivided = Undivided(model, context_tokens=CONTEXT_TOKENS)

    @property
    def leader(self) -> LocalNode:
        return self.swarm.leader

    @property
    def workers(self) -> list[LocalNode]:
        return self.swarm.workers

    def expected(self, params: Params) -> UndividedAnswer:
        """What llama.cpp alone answers."""
        return self.undivided.answer(parse_ask(params))

    def check(self, node: LocalNode, params: Params) -> dict[str, Any]:
        """Ask through `node`; the answer must be llama.cpp's own, token by token."""
        answer, expected = node.call("ask", **params), self.expected(params)
        assert answer["tokens"] == list(expected.tokens)
        assert answer["finish_reason"] == expected.finish_reason
        assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
        return answer

    @property
    def leader_id(self) -> str:
        return str(self.leader.status()["self"])

    def requests(self) -> dict[str, int]:
        found: dict[str, int] = self.leader.status()["requests"]
        return found


@contextmanager
def serving(
    root: Path,
    kind: str = "olmoe",
    *,
    quantisation: str = "f32",
    workers: int = WORKERS,
    each: Settings | None = None,
    **leader: Any,
) -> Iterator[Served]:
    """A ready swarm with a tiny model. `leader` are keys of its configuration's section; `each`: of every node's.

    Two workers have room for half of an olmoe's experts each. Of other kinds one may hold all, if round trips were slow
    when they were placed.
    """
    model = root / f"{kind}.gguf"
    if kind == "olmoe" and workers == 2:
        write_olmoe(model, 3, quantisation=quantisation, widths=TWELVE_A_MIB[quantisation])
        each = {**(each or {}), "node": {"memory_mib": 1, **(each or {}).get("node", {})}}
    else:
        write_tiny_model(model, kind, quantisation=quantisation)
    settings = {
        "leader": {"context_tokens": CONTEXT_TOKENS, "batch_tokens": 64, "own_copy": False, **leader},
        "swarm": {"replicas": 1},
    }
    with LocalSwarm(root / "swarm", workers, leader=settings, each=each) as swarm:
        swarm.add_model(model)
        swarm.wait_ready(timeout_s=PATIENCE_S)
        served = Served(swarm, model)
        try:
            yield served
        finally:
            served.undivided.close()


def ask(prompt: str, max_tokens: int | None = 40, **params: Any) -> Params:
    """A raw prompt's parameters; greedy unless they say otherwise."""
    return {"prompt": prompt, "raw": True, "max_tokens": max_tokens, "temperature": 0, **params}


def long_ask(prompt: str = "A long story:", **params: Any) -> Params:
    """An answer that takes some seconds."""
    return ask(prompt, 900, ignore_eos=True, **params)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def failure(call: Callable[[], Any]) -> SwarmError:
    """The typed error that a call ends with."""
    try:
        call()
    except SwarmError as error:
        return error
    raise AssertionError("no error")


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
    return value


def logged(node: LocalNode, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of a daemon's log, or those of one event."""
    lines = [json.loads(line) for line in node.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if event is None or line.get("event") == event]
