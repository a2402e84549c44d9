"""Where two sides part: each layer's experts on the very same rows, so that one layer's error hides no other's.

The residual's drift says that something differs from some layer on. Here every chosen expert of every layer gets what A
gave it, on both sides, and what comes back is compared expert by expert, with the peers that computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from backends.experts import F32, I32
from backends.llama import LlamaSettings
from backends.moe_hook import ServingHook
from capabilities.equivalence import TINY
from swarmnode.equivalence.passes import WINDOW, decode, windows_of
from swarmnode.equivalence.shared import Share
from swarmnode.equivalence.splits import Split
from swarmnode.local_experts import LocalExperts


@dataclass(frozen=True, slots=True)
class Parted:
    """One expert that differs. peer_a, peer_b: who computed it on each side, None: this machine."""

    layer: int
    expert: int
    peer_a: str | None
    peer_b: str | None
    relative_l2: float

    @property
    def words(self) -> str:
        by = " and ".join(dict.fromkeys(peer for peer in (self.peer_a, self.peer_b) if peer is not None))
        who = f", which {by} computed," if by else ""
        return f"expert {self.expert} of layer {self.layer}{who} is off by {self.relative_l2:.2g}"


class _Kept:
    """An executor that keeps what was dispatched, and what came of it: layer -> x [T, n_in], ids [T, K], out."""

    def __init__(self, executor: LocalExperts) -> None:
        self._executor = executor
        self.layers: dict[int, tuple[F32, I32, F32]] = {}

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        self._executor.dispatch(layer, x, ids)
        self.layers[layer] = x.copy(), ids.copy(), np.empty((0, 0, 0), np.float32)

    def collect(self, layer: int) -> F32:
        out = self._executor.collect(layer)
        x, ids, _ = self.layers[layer]
        self.layers[layer] = x, ids, out.copy()
        return out


def find_divergence(split: Split, text: str) -> tuple[Parted | None, Parted | None]:
    """The expert that differs most in the first layer where any does, and the one that differs most of all.

    Raises:
        SwarmError: a peer cannot compute any more.
    """
    kept = _Kept(split.executors[0])
    settings = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW)
    with split.open_trunk(settings, ServingHook(split.learned.layers.values(), kept)) as model:
        decode(model, windows_of(model.vocabulary, text, WINDOW)[0])
    found: list[Parted] = []
    for layer, (x, ids, of_a) in sorted(kept.layers.items()):
        split.executors[1].dispatch(layer, x, ids)
        found += _experts_of(layer, ids, of_a, split.executors[1].collect(layer), split.shares)
    first = min((each.layer for each in found), default=None)
    return _most(each for each in found if each.layer == first), _most(found)


def _experts_of(
    layer: int, ids: I32, of_a: F32, of_b: F32, shares: tuple[Share | None, Share | None]
) -> Iterator[Parted]:
    """Those whose rows differ in any bit."""
    for expert in np.unique(ids).tolist():
        a, b = (side[ids == expert].astype(np.float64) for side in (of_a, of_b))
        if np.array_equal(a, b):
            continue
        relative = float(np.linalg.norm(b - a)) / max(float(np.linalg.norm(a)), TINY)
        peers = [share.peer.row.name if share and share.holds(layer, expert) else None for share in shares]
        yield Parted(layer, expert, peers[0], peers[1], relative)


def _most(found: Iterable[Parted]) -> Parted | None:
    return max(found, key=lambda each: each.relative_l2, default=None)


def add_divergence(level: dict[str, Any], split: Split, text: str) -> dict[str, Any]:
    """The level `layer` with where the sides part; a reason for failing names it, too."""
    first, worst = find_divergence(split, text)
    reason = level["reason"]
    if not level["pass"] and worst is not None:
        reason = f"{reason}; {worst.words}"
    parted = {"first": first and asdict(first), "worst": worst and asdict(worst)}
    return {**level, "reason": reason, "divergence": parted}
