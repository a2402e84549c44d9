"""Dispatches of a real model to one peer: the activations and choices of its own layers, over a text.

llama.cpp runs the trunk over the bundled text, window by window; what its layers dispatch is kept, cut into pieces of
one token to sixteen as decoding and prefill send them, and planned as a leader plans: the peer holds every other
expert.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from backends.expert_source import GGUFExpertSource
from backends.experts import F32, I32, ExpertBackend
from backends.gguf_file import GGUFFile
from backends.llama import LlamaSettings
from backends.manifest import ExpertSource, LayerExperts, Manifest
from backends.moe_hook import ServingHook
from scheduler.dispatch import LayerRouting, PeerRows, plan
from scheduler.placement import OUTPUT_RANKS_SHARE
from swarmnode.equivalence.passes import decode, windows_of
from swarmnode.equivalence.splits import split_model
from swarmnode.equivalence.targets import STAND_IN, find_target
from swarmnode.equivalence.text import bundled_text
from swarmnode.local_experts import LocalExperts, load_layer

Progress = Callable[[str, int, int], None]

PEER: Final = "peer"
_OTHER: Final = "another"
LAYERS_MAX: Final = 8  # spread over the model: each cheat holds its share of them in memory
TOKENS: Final = 512  # of the text
_TOKENS_OF_A_DISPATCH: Final = (1, 1, 1, 2, 4, 16)  # single sequences, a few together, a prefill


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """To PEER: rows part.rows of x [T, n_in]. ask_f32: the layer is an output rank."""

    layer: LayerExperts
    x: F32
    part: PeerRows
    ask_f32: bool

    def answer(self, backend: ExpertBackend) -> F32:
        """The peer's rows [R, n_out]."""
        part = self.part
        return backend.compute(self.layer.layer, self.x[part.rows], part.tokens, part.experts, ask_f32=self.ask_f32)


@dataclass(frozen=True, eq=False)
class Dispatches:
    """All of them, and what they are computed with."""

    manifest: Manifest
    source: ExpertSource
    layers: tuple[int, ...]
    each: tuple[Dispatch, ...]

    def load(self, backend: ExpertBackend) -> None:
        """What the peer holds."""
        for number in self.layers:
            load_layer(backend, self.manifest, number, _held(self.manifest.experts_of(number)), self.source)


class _Recorder:
    """An executor that keeps what passes (moe_hook.ExpertExecutor)."""

    def __init__(self, executor: LocalExperts, layers: Sequence[int]) -> None:
        self._executor = executor
        self._layers = frozenset(layers)
        self.seen: list[tuple[int, F32, I32]] = []

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        if layer in self._layers:
            self.seen.append((layer, x.copy(), ids.copy()))
        self._executor.dispatch(layer, x, ids)

    def collect(self, layer: int) -> F32:
        return self._executor.collect(layer)


@contextmanager
def open_dispatches(file: Path, seed: int, progress: Progress) -> Iterator[Dispatches]:
    """The model's dispatches, readable for as long as the context lasts.

    Raises:
        SwarmError: the model cannot be used.
    """
    target = find_target(STAND_IN)
    with ExitStack() as stack:
        split = stack.enter_context(split_model(file, target, target, progress))
        numbers = [layer.layer for layer in split.manifest.layers]
        step = max(1, -(-len(numbers) // LAYERS_MAX))
        chosen = tuple(sorted({*numbers[step - 1 :: step], numbers[-1]}))
        recorder = _Recorder(split.executors[0], chosen)
        hook = ServingHook(split.learned.layers.values(), recorder)
        with split.open_trunk(LlamaSettings(context_tokens=64, batch_tokens=64), hook) as model:
            windows = windows_of(model.vocabulary, bundled_text(), TOKENS)
            for done, window in enumerate(windows):
                progress("a text through the model", done, len(windows))
                decode(model, window)
        gguf = stack.enter_context(GGUFFile.open(file))
        outputs = frozenset(numbers[-max(1, len(numbers) // OUTPUT_RANKS_SHARE) :])
        each = tuple(_cut(split.manifest, recorder.seen, outputs, random.Random(seed)))
        yield Dispatches(split.manifest, GGUFExpertSource(gguf, split.manifest), chosen, each)


def _held(layer: LayerExperts) -> list[int]:
    return list(range(0, layer.n_expert, 2))


def _cut(
    manifest: Manifest, seen: Sequence[tuple[int, F32, I32]], outputs: frozenset[int], draw: random.Random
) -> Iterator[Dispatch]:
    for number, x, ids in seen:
        layer = manifest.experts_of(number)
        holders = [(PEER if expert in _held(layer) else _OTHER,) for expert in range(layer.n_expert)]
        routing, start = LayerRouting(number, holders), 0
        while start < len(x):
            stop = start + draw.choice(_TOKENS_OF_A_DISPATCH)
            parts = plan(np.ascontiguousarray(ids[start:stop]), routing).parts
            part = next((each for each in parts if each.peer == PEER), None)
            if part is not None:
                yield Dispatch(layer, x[start:stop], part, number in outputs)
            start = stop
