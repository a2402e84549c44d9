"""What the invariants are about, measured: on tiny models by test_invariants.py, on the demo model by
`python -m tests.measure_invariants`.

A model is decoded once with its experts computed by one backend, and what its layers dispatch is kept: activations, the
router's choice and its weights. From these rows follow the errors of single experts and of their sums, what sharding
changes, and what routers would choose elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from backends.experts import F32, I32, ExpertBackend
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import PartialSumHook
from backends.numpy_reference import NumpyExperts
from capabilities.equivalence import F64, growth_exponent, predicted_flips
from scheduler.combine import add_partials, weighted_sums
from scheduler.dispatch import LayerRouting, plan
from swarmnode.equivalence.passes import WINDOW, decode, windows_of
from swarmnode.equivalence.splits import Split
from swarmnode.equivalence.text import bundled_text
from swarmnode.local_experts import LocalExperts

SETTINGS = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """What one layer dispatched: activations x [T, n_in], experts ids [T, K], the likeliest first, weights [T, K]."""

    x: F32
    ids: I32
    weights: F32

    def computed(self, backend: ExpertBackend, layer: int) -> F32:
        """Every chosen expert's row by a backend, [T, K, n_out]."""
        y = backend.compute(layer, self.x, self._tokens, self.ids.reshape(-1))
        return y.reshape(*self.ids.shape, -1)

    def exact(self, oracle: NumpyExperts, layer: int) -> F64:
        """The same in float64."""
        y: F64 = oracle.unrounded(layer, self.x, self._tokens, self.ids.reshape(-1)).astype(np.float64)
        return y.reshape(*self.ids.shape, -1)

    @property
    def _tokens(self) -> I32:
        return np.repeat(np.arange(len(self.x), dtype=np.int32), self.ids.shape[1])


class Keeping:
    """A SumExecutor that passes rows on to another one and keeps them."""

    def __init__(self, inner: LocalExperts) -> None:
        self._inner = inner
        self._kept: dict[int, list[LayerRows]] = {}

    def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
        self._kept.setdefault(layer, []).append(LayerRows(x.copy(), ids.copy(), weights.copy()))
        self._inner.dispatch_sum(layer, x, ids, weights)

    def collect_sum(self, layer: int) -> F32:
        return self._inner.collect_sum(layer)

    def rows(self) -> dict[int, LayerRows]:
        """Of all decodes, by layer."""
        return {layer: _joined(parts) for layer, parts in sorted(self._kept.items())}


def _joined(parts: Sequence[LayerRows]) -> LayerRows:
    names = ("x", "ids", "weights")
    return LayerRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def rows_of(split: Split, tokens: int) -> tuple[dict[int, LayerRows], dict[int, LayerRows]]:
    """What layers dispatch over a text, with the experts of each side of a split."""
    found = []
    for executor in split.executors:
        keeping = Keeping(executor)
        with split.open_trunk(SETTINGS, PartialSumHook(split.learned.layers.values(), keeping)) as model:
            for window in windows_of(model.vocabulary, bundled_text(), tokens):
                decode(model, window)
        found.append(keeping.rows())
    return found[0], found[1]


# -- routers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SelfRouted:
    """Two sides' routers left to themselves, [T]: whether the sets differ, A's gap between the last expert that was
    chosen and the first that was not, and by how much any of the router's logits moved."""

    changed: NDArray[np.bool_]
    gaps: F64
    moved: F64


def self_routed(file: Path, layer: int, a: LayerRows, b: LayerRows) -> SelfRouted:
    """Of one layer whose router is a matrix and sees what the experts see."""
    reader = GGUFReader(file)
    router = next(t.data for t in reader.tensors if t.name == f"blk.{layer}.ffn_gate_inp.weight").astype(np.float64)
    of_a, of_b = a.x @ router.T, b.x @ router.T
    k = a.ids.shape[1]
    ordered = np.sort(of_a, axis=1)
    changed = (np.sort(a.ids, axis=1) != np.sort(b.ids, axis=1)).any(axis=1)
    return SelfRouted(changed, ordered[:, -k] - ordered[:, -k - 1], np.abs(of_b - of_a).max(axis=1))


# -- sums over experts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorsOfSums:
    """exponent: p where the error of a sum of k experts grows as k^p; None of fewer than three experts. cosine: between
    two experts' errors for one token, on average. relative: error of the whole sum over the sum."""

    exponent: float | None
    cosine: float
    relative: float


def errors_of_sums(actual: F32, exact: F64) -> ErrorsOfSums:
    """Of experts' rows [T, K, n], each scaled to the same size, so that none has more say than others."""
    n_used = actual.shape[1]
    size = np.linalg.norm(exact, axis=2, keepdims=True)
    errors, rows = (actual - exact) / size, exact / size
    sums = np.cumsum(errors, axis=1)
    grown = np.sqrt((sums**2).sum(axis=2).mean(axis=0))
    unit = errors / np.linalg.norm(errors, axis=2, keepdims=True)
    together = (unit.sum(axis=1) ** 2).sum(axis=1).mean()
    whole = np.linalg.norm(errors.sum(axis=1), axis=1) / np.linalg.norm(rows.sum(axis=1), axis=1)
    return ErrorsOfSums(
        growth_exponent(grown.tolist()), float((together - n_used) / (n_used * (n_used - 1))), float(np.median(whole))
    )


@dataclass(frozen=True, slots=True)
class Sharding:
    """A sum over experts by nodes against the undivided one: largest difference, and relative to each sum's norm."""

    largest: float
    relative: float


def sharded_in_float64(rows: LayerRows, y: F64, layer: int, owners: Sequence[str]) -> Sharding:
    """By the swarm's plan and its partial sums, of exact rows y [T, K, n_out], in float64, against one sum over all
    experts. owners: of each expert."""
    weights = rows.weights.astype(np.float64)
    undivided = np.einsum("tk,tkn->tn", weights, y)
    return _sharding(_sharded(rows, y, weights, layer, owners), undivided)


def sharded_in_f32(rows: LayerRows, y: F32, layer: int, owners: Sequence[str]) -> Sharding:
    """The same in single precision, as in service, against the exact sum of these rows."""
    exact = np.einsum("tk,tkn->tn", rows.weights.astype(np.float64), y.astype(np.float64))
    return _sharding(_sharded(rows, y, rows.weights, layer, owners).astype(np.float64), exact)


def _sharded(
    rows: LayerRows, y: NDArray[Any], weights: NDArray[Any], layer: int, owners: Sequence[str]
) -> NDArray[Any]:
    split = plan(rows.ids, LayerRouting(layer, [(owner,) for owner in owners]))
    flat, each = y.reshape(-1, y.shape[2]), weights.reshape(-1)
    sums = {part.peer: weighted_sums(flat[part.slots], each[part.slots], part.tokens) for part in split.parts}
    return add_partials(split, sums, y.shape[2])


def _sharding(total: F64, exact: F64) -> Sharding:
    apart = np.abs(total - exact)
    relative = np.linalg.norm(apart, axis=1) / np.linalg.norm(exact, axis=1)
    return Sharding(float(apart.max()), float(np.median(relative)))


# -- margins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Wobble:
    """Logits moved at random, many times over. below: positions whose margin is smaller than any movement can turn."""

    positions: int
    below: int
    predicted: float
    flips: int
    flips_above: int


def wobble(logits: F32, size: float, draws: int, seed: int = 0) -> Wobble:
    """Move every logit [T, V] by up to `size` either way, evenly; figures are sums over all draws."""
    random = np.random.default_rng(seed)
    top = np.sort(np.partition(logits, -2, axis=1)[:, -2:], axis=1).astype(np.float64)
    margins, best = top[:, 1] - top[:, 0], logits.argmax(axis=1)
    near = logits >= top[:, 1:] - 2 * size  # no other can win
    flips = above = 0
    for t in np.flatnonzero(near.sum(axis=1) > 1):
        ids = np.flatnonzero(near[t])
        moved = logits[t, ids].astype(np.float64) + random.uniform(-size, size, (draws, len(ids)))
        turned = int((ids[moved.argmax(axis=1)] != best[t]).sum())
        flips += turned
        above += turned if margins[t] > 2 * size else 0
    deviation = np.full(len(margins), size / math.sqrt(3))
    return Wobble(
        len(logits), int((margins <= 2 * size).sum()), draws * predicted_flips(margins, deviation), flips, above
    )


def logits_of(model: LlamaModel, tokens: int) -> F32:
    return np.concatenate([decode(model, window) for window in windows_of(model.vocabulary, bundled_text(), tokens)])
