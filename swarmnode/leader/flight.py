"""One layer between its dispatch and its collection: what peers are sent, how long they may take, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.activations import quantize_q8_0
from backends.experts import F32
from backends.manifest import LayerExperts
from capabilities.errors import ExpertsUnavailable
from scheduler.combine import add_partials, sum_rows
from scheduler.dispatch import Plan, deadline_s, gather, hedge_after_s
from scheduler.exchange import Asked, Exchange
from swarmnode.expert_messages import Activations
from swarmnode.leader.link import Answer
from swarmnode.leader.routing import Routing


@dataclass(slots=True, eq=False)
class Flight:
    """A layer between its dispatch and its collection. Chunks of tokens begin at `starts`.

    groups: rows are asked for although sums are wanted, since a holder is replaced; they are added by these plans.
    wanted: the decode thread is woken once so many answers are there; `eager`, by every one.
    """

    number: int
    layer: LayerExperts
    routing: Routing
    x: F32  # [T, n_in]
    ids_shape: tuple[int, int]
    weights: F32 | None  # [T, K] where sums are wanted
    starts: list[int]
    plans: list[Plan]
    groups: list[Plan]
    exchange: Exchange
    started: float
    quantized: Activations | None = None
    sent: list[Asked] = field(default_factory=list)
    own: list[Asked] = field(default_factory=list)
    answers: list[tuple[Asked, Answer]] = field(default_factory=list)
    taken: int = 0
    wanted: int = 0
    eager: bool = False

    def activations(self, asked: Asked) -> Activations:
        """What a peer is sent for its rows."""
        part, start = asked.part, self.starts[asked.share.chunk]
        source: Activations = self.x
        if self.layer.layer in self.routing.quantized.get(part.peer, ()):
            if self.quantized is None:
                self.quantized = quantize_q8_0(self.x)
            source = self.quantized
        return source if len(part.rows) == self.ids_shape[0] else source[start + part.rows]

    def set_instants(self, frames: Sequence[tuple[Asked, Activations]], now: float) -> None:
        """Set how long each peer, at its measured rate, may take to answer all of these."""
        rows: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for asked, x in frames:
            peer, n = asked.part.peer, len(asked.part.experts)
            back = n if asked.weights is None else len(x)
            rows[peer] = rows.get(peer, 0) + n
            sizes[peer] = sizes.get(peer, 0) + x.nbytes + 4 * self.layer.n_out * back
        instants = {}
        for peer, n in rows.items():
            rate = self.routing.links[peer].rate.rows_per_s
            instants[peer] = now + deadline_s(n, sizes[peer], rate), now + hedge_after_s(n, rate)
        for asked, _ in frames:
            asked.overdue_at, asked.hedge_at = instants[asked.part.peer]

    def rows(self) -> F32:
        """Every expert's row [T, K, n_out], once the exchange is complete."""
        out = np.empty((*self.ids_shape, self.layer.n_out), np.float32)
        for chunk, start in enumerate(self.starts):
            split = self.plans[chunk]
            gather(split, self._replies(chunk), out[start : start + split.n_tokens])
        return out

    def totals(self) -> F32:
        """Every token's total [T, n_out], once the exchange is complete."""
        totals = [self._total(chunk) for chunk in range(len(self.starts))]
        return totals[0] if len(totals) == 1 else np.concatenate(totals)

    def late(self, asked: Asked) -> ExpertsUnavailable:
        """The error of a peer whose answer is overdue."""
        peer, layer = asked.part.peer, self.layer.layer
        experts = sorted(set(asked.part.experts.tolist()))
        return ExpertsUnavailable(
            f"experts {', '.join(map(str, experts))} of layer {layer} are unavailable: peer"
            f" {self.routing.links[peer].name} did not answer in time",
            layer=layer,
            experts=experts,
            peer=peer,
            cause="timeout",
        )

    def _total(self, chunk: int) -> F32:
        split, n_out = self.plans[chunk], self.layer.n_out
        if not self.groups:
            return add_partials(split, self._replies(chunk), n_out)
        assert self.weights is not None
        rows = np.empty((split.n_tokens, split.n_used, n_out), np.float32)
        gather(split, self._replies(chunk), rows)
        start = self.starts[chunk]
        return sum_rows(self.groups[chunk], rows, self.weights[start : start + split.n_tokens])

    def _replies(self, chunk: int) -> dict[str, F32]:
        return {
            share.part.peer: share.values
            for share in self.exchange.shares
            if share.chunk == chunk and share.values is not None
        }
