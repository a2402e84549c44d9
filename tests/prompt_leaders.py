"""Leaders that answer prompts on a network in memory: all of a leader's side but llama.cpp, whose place a made-up model
takes. Its logits follow from a sequence's tokens, so every such leader gives the same answer."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capabilities.errors import NotReady
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.prompts import PromptService, PromptStreams
from swarmnode.net.interface import Network
from tests.patience import PATIENCE_S

CONTEXT = 200
WAVE = "👋".encode()
PIECES = (b"a", b"b", b" ab", "é".encode()[:1], "é".encode()[1:], WAVE[:3], WAVE[3:], b"\xff", b"", b"c\n")
END = len(PIECES)


class MadeUpModel:
    """`step_s` is how long a decode takes; it waits while `may_run` is not set."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.step_s = 0.0
        self._sequences: dict[int, list[int]] = {}

    routings = 0
    mixed = False

    def begin_step(self, requests: Sequence[str]) -> None:
        pass

    def clear(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)

    def decode(self, tokens: Any, positions: Any, sequences: Any, wants_logits: Any) -> Any:
        assert self.may_run.wait(PATIENCE_S)
        time.sleep(self.step_s)
        rows = []
        for token, position, sequence, wanted in zip(tokens, positions, sequences, wants_logits, strict=True):
            known = self._sequences.setdefault(int(sequence), [])
            assert position == len(known)
            known.append(int(token))
            if wanted:
                rows.append(np.random.default_rng(known).normal(0, 2, END + 1))
                rows[-1][END] -= 3
        return np.array(rows, np.float32)

    # What PromptService needs of a vocabulary.

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) % len(PIECES) for c in text]


@dataclass
class PromptLeader:
    network: Network
    model: MadeUpModel
    engine: DecodeEngine
    prompts: PromptService
    refusal: NotReady | None = None
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def running(self) -> int:
        b = self.engine.statistics().batcher
        return b.running + b.waiting


async def settled_at_once(request: str, since: float, patience_s: float) -> bool | None:
    """No answer is looked at, so none waits for its end."""
    return False


@asynccontextmanager
async def prompt_leader(network: Network) -> AsyncIterator[PromptLeader]:
    """`network`'s node leads."""
    model = MadeUpModel()
    vocabulary = Vocabulary(END + 1, lambda token: b"" if token == END else PIECES[token], END.__eq__)
    engine = DecodeEngine(model, model, Batcher(4, CONTEXT, 64, 64, vocabulary))  # type: ignore[arg-type]
    begun: list[str] = []
    ended: list[str] = []
    service = PromptService(
        engine,
        model,  # type: ignore[arg-type]
        CONTEXT,
        60.0,
        lambda: made.refusal,
        begun.append,
        ended.append,
        settled_at_once,
    )
    made = PromptLeader(network, model, engine, service, None, begun, ended)
    PromptStreams(service.answer).register(network)
    engine.start()
    try:
        yield made
    finally:
        model.may_run.set()
        await engine.stop()
