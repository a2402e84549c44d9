"""A text through both models, window by window: the levels layer, logits and decisions.

Every position sees the same tokens on both sides. The layers are compared twice: with each side's routers free, and
with B's routers pinned to A's choices, which takes the experts that changed out of the drift. Beside it llama.cpp on
the undivided model is compared with itself under another choice of kernels (`fast`): its own noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.experts import F32, I32
from backends.llama import LlamaModel, LlamaSettings
from backends.trace import TracingHook
from backends.vocabulary import Vocabulary
from capabilities.equivalence import (
    TINY,
    LogitRows,
    RoutingChange,
    decisions_level,
    growth_exponent,
    layer_level,
    logit_rows,
    logits_level,
    routing_change,
)
from capabilities.errors import UsageError
from swarmnode.equivalence.splits import Split

Progress = Callable[[str, int, int], None]

WINDOW: Final = 64  # tokens that see each other
CHARS_A_TOKEN: Final = 4  # at first twice as many are read for each token; where tokens are longer, more
CUT_TOKENS: Final = 8  # the last of a text that is cut short: whole it may have others there
LEVELS: Final = ("layer", "logits", "decisions")


@dataclass(eq=False)
class Drift:
    """How far B's residual is from A's after each layer: rows of every window, [T] a layer."""

    apart: dict[int, list[NDArray[np.float64]]] = field(default_factory=dict)
    relative: dict[int, list[NDArray[np.float64]]] = field(default_factory=dict)

    def add(self, a: dict[int, F32], b: dict[int, F32]) -> None:
        for layer, of_a in a.items():
            distance = np.linalg.norm(b[layer].astype(np.float64) - of_a, axis=1)
            size = np.maximum(np.linalg.norm(of_a.astype(np.float64), axis=1), TINY)
            self.apart.setdefault(layer, []).append(distance)
            self.relative.setdefault(layer, []).append(distance / size)

    def figures(self) -> dict[str, Any]:
        """Medians over tokens for each layer, and how they grow. Distances grow with the residual itself, too."""
        layers = sorted(self.apart)
        distance = [float(np.median(np.concatenate(self.apart[layer]))) for layer in layers]
        relative = [float(np.median(np.concatenate(self.relative[layer]))) for layer in layers]
        return {
            "exponent": growth_exponent(relative),
            "l2_exponent": growth_exponent(distance),
            "relative_l2": relative,
            "l2": distance,
            "first_layer": next((n for n, d in zip(layers, distance, strict=True) if d > 0), None),
        }


@dataclass(eq=False)
class Passes:
    """What windows have shown so far."""

    free: Drift = field(default_factory=Drift)
    pinned: Drift = field(default_factory=Drift)
    logits: list[LogitRows] = field(default_factory=list)
    routes: dict[int, list[tuple[I32, I32]]] = field(default_factory=dict)
    floor_free: Drift = field(default_factory=Drift)
    floor_pinned: Drift = field(default_factory=Drift)
    floor_routes: dict[int, list[tuple[I32, I32]]] = field(default_factory=dict)
    floor: list[LogitRows] = field(default_factory=list)

    def levels(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        rows, floor = LogitRows.join(self.logits), LogitRows.join(self.floor)
        if "layer" in wanted:
            pinned, free = self.pinned.figures(), self.free.figures()
            noise = {"pinned": self.floor_pinned.figures(), "free": self.floor_free.figures()}
            verdict = layer_level(pinned["relative_l2"], noise["pinned"]["relative_l2"], sorted(self.pinned.apart))
            yield {**verdict, "layers": len(self.free.apart), "pinned": pinned, "free": free, "noise_floor": noise}
        if "logits" in wanted:
            yield logits_level(rows, floor)
        if "decisions" in wanted:
            yield decisions_level(rows, _routing(self.routes), floor, _routing(self.floor_routes))


def _routing(routes: Mapping[int, Sequence[tuple[I32, I32]]]) -> list[RoutingChange]:
    return [
        routing_change(layer, *(np.concatenate(side) for side in zip(*windows, strict=True)))
        for layer, windows in sorted(routes.items())
    ]


def pass_through(split: Split, text: str, tokens: int, progress: Progress) -> Passes:
    """Run so many tokens of the text through both sides.

    Raises:
        UsageError: the text has fewer tokens.
        UnsupportedModel: this architecture's layers cannot be traced.
    """
    found = Passes()
    settings = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW)
    a, b = split.hooks()
    with split.open_trunk(settings, a) as model:
        windows = windows_of(model.vocabulary, text, tokens)
        for done, window in enumerate(windows):
            progress("a text through both models", done, len(windows))
            _compare(model, a, b, window, found)
    fast = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW, fast=True)
    watching, other = split.watching_hooks()
    with split.open_whole(settings, watching) as quiet, split.open_whole(fast, other) as quick:
        for done, window in enumerate(windows):
            progress("llama.cpp's own noise", done, len(windows))
            other.pinned = None
            of_quiet, of_fast = decode(quiet, window), decode(quick, window)
            found.floor.append(logit_rows(of_quiet, of_fast))
            found.floor_free.add(watching.residuals, other.residuals)
            _keep_routes(found.floor_routes, watching.routes, other.routes)
            other.pinned = dict(watching.routes)
            decode(quick, window)
            found.floor_pinned.add(watching.residuals, other.residuals)
    return found


def windows_of(vocabulary: Vocabulary, text: str, tokens: int) -> list[I32]:
    """The first `tokens` tokens of a text in windows of WINDOW; a last one of a single token is left out.

    Raises:
        UsageError: the text has fewer tokens.
    """
    length, every = min(tokens * CHARS_A_TOKEN, len(text)), np.empty(0, np.int32)
    while len(every) < tokens + CUT_TOKENS and length < 2 * len(text):
        length = 2 * length
        every = np.array(vocabulary.tokenize(text[:length]), np.int32)
    if len(every) < tokens:
        raise UsageError(
            f"the bundled text has {len(every)} tokens for this model, not {tokens}", hint="Lower --tokens."
        )
    windows = [every[start : start + WINDOW] for start in range(0, tokens, WINDOW)]
    windows[-1] = windows[-1][: tokens - (len(windows) - 1) * WINDOW]
    return [window for window in windows if len(window) > 1]


def decode(model: LlamaModel, window: I32) -> F32:
    """Logits [T, V] of a window by itself."""
    n = len(window)
    model.clear_all()
    return model.decode(window, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.ones(n, bool))


def _keep_routes(to: dict[int, list[tuple[I32, I32]]], of_a: Mapping[int, I32], of_b: Mapping[int, I32]) -> None:
    for layer, chosen in of_a.items():
        to.setdefault(layer, []).append((chosen, of_b[layer]))


def _compare(model: LlamaModel, a: TracingHook, b: TracingHook, window: I32, found: Passes) -> None:
    model.hook, b.pinned = a, None
    of_a = decode(model, window)
    a.check()
    residuals, routes = dict(a.residuals), dict(a.routes)
    model.hook = b
    of_b = decode(model, window)
    found.free.add(residuals, b.residuals)
    _keep_routes(found.routes, routes, b.routes)
    b.pinned = routes
    decode(model, window)
    found.pinned.add(residuals, b.residuals)
    found.logits.append(logit_rows(of_a, of_b))
