"""The experts of a swarm as llama.cpp's graph sees them: dispatch a layer to its holders, collect their rows.

`RemoteExperts` is called from the decode thread, which blocks in `collect`; frames leave and answers arrive on the
event loop. A dispatch hands all its frames over in one step and goes on; each answer is put into a queue that the
decode thread reads. Rows go to their slots by the plan, and sums are added in the plan's order, so the result never
depends on who answers first.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import trio

from backends.activations import quantize_q8_0
from backends.experts import F32, I32
from backends.manifest import LayerExperts
from capabilities.errors import ExpertsUnavailable, NotReady, PeerMistake, SwarmError
from scheduler.combine import add_partials, sum_rows
from scheduler.dispatch import LayerRouting, PeerRows, Plan, check_reply, deadline_s, gather, plan
from swarmnode.expert_messages import Activations, dispatch_rows_max, dispatch_tokens_max, encode_notice
from swarmnode.leader.link import Answer, PeerLink

_SLICE_S: Final = 0.25  # of a wait: a deadline counts no more of the clock than this for each, so our own sleep is free


@dataclass(frozen=True, slots=True)
class Routing:
    """One epoch as the decode thread uses it; replaced whole, never changed.

    quantized: for each peer the layers whose activations it gets as Q8_0. ask_f32: layers whose kernels are asked to
    accumulate in F32.
    """

    term: int
    epoch: int
    layers: Mapping[int, LayerRouting]
    links: Mapping[str, PeerLink]
    quantized: Mapping[str, frozenset[int]]
    ask_f32: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Part:
    """One frame's worth of a dispatch: tokens from `start` on, and what each peer owes for them.

    `groups`: rows are asked for although sums are wanted, since a holder is replaced; they are added by this plan.
    """

    start: int
    plan: Plan
    groups: Plan | None = None
    replies: dict[str, F32] = field(default_factory=dict)


_Outgoing = tuple[int, PeerRows, Activations, F32 | None]
"""One peer's frame: the index of its part, what it is asked for, activations, and weights [R] if for sums."""


@dataclass(slots=True)
class _Exchange:
    number: int
    layer: LayerExperts
    links: Mapping[str, PeerLink]
    ids_shape: tuple[int, int]
    weights: F32 | None  # [T, K] where sums are wanted
    parts: list[_Part]
    patience_s: float  # how much longer to wait for its answers
    asked: int
    answers: list[tuple[int, str, Answer]] = field(default_factory=list, kw_only=True)
    started: float


@dataclass
class LayerTiming:
    """Layers that were computed elsewhere, and seconds from handing a layer over to having its rows.

    `decode_*` counts those of one token alone, whose time is nearly all round trip.
    """

    layers: int = 0
    round_trip_s: float = 0.0
    decode_layers: int = 0
    decode_round_trip_s: float = 0.0


class RemoteExperts:
    """The StepExecutor of a leader.

    `set_routing`, `begin_request` and `end_request` are called on the event loop, the rest on the decode thread.
    """

    def __init__(self, layers: Sequence[LayerExperts], token: trio.lowlevel.TrioToken) -> None:
        self._specs = {spec.layer: spec for spec in layers}
        self._token = token
        self._routing: Routing | None = None
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers of exchanges that are answered or failed
        self._number = 0
        self._open: dict[int, _Exchange] = {}
        self._begun: set[str] = set()
        self.timing = LayerTiming()

    # -- event loop ---------------------------------------------------------------------------------------------

    def set_routing(self, routing: Routing | None) -> None:
        """The epoch that dispatches use from the next layer on."""
        self._routing = routing

    def begin_request(self, request_id: str) -> None:
        """Tell the workers that dispatches for this request follow, for their logs."""
        self._begun.add(request_id)
        self._notify(request_id, begins=True)

    def end_request(self, request_id: str) -> None:
        """Tell the workers that a request has ended, if they heard that it began."""
        if request_id in self._begun:
            self._begun.discard(request_id)
            self._notify(request_id, begins=False)

    def _notify(self, request_id: str, *, begins: bool) -> None:
        routing = self._routing
        if routing is None:
            return
        notice = encode_notice(routing.term, request_id, begins=begins)
        for link in routing.links.values():
            link.send_frame(notice)

    def _send(self, routing: Routing, exchange: _Exchange, frames: list[_Outgoing]) -> None:
        layer = exchange.layer
        for index, part, x, weights in frames:

            def on_answer(answer: Answer, index: int = index, peer: str = part.peer) -> None:
                exchange.answers.append((index, peer, answer))
                # The decode thread is woken once, for waking it costs more than to look at an answer. It goes first:
                # the sleep gives it the interpreter, which this thread needs only to wait for the next message.
                if len(exchange.answers) >= exchange.asked or isinstance(answer, SwarmError):
                    self._complete.put(exchange.number)
                    time.sleep(0)

            routing.links[part.peer].send(
                term=routing.term,
                epoch=routing.epoch,
                layer=layer.layer,
                x=x,
                tokens=part.tokens,
                experts=part.experts,
                weights=weights,
                n_out=layer.n_out,
                ask_f32=layer.layer in routing.ask_f32,
                on_answer=on_answer,
            )

    # -- decode thread ------------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[str]) -> None:
        """Drop what an aborted step left open."""
        self._open.clear()

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        """Send activations x [T, n_in] to the holders of the chosen experts ids [T, K].

        Raises:
            NotReady: no epoch has begun.
            ExpertsUnavailable: a chosen expert has no holder that can be reached.
        """
        self._dispatch(layer, x, ids, None)

    def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
        """The same for sums, by weights [T, K]. Raises as `dispatch` does."""
        self._dispatch(layer, x, ids, weights)

    def _dispatch(self, layer: int, x: F32, ids: I32, weights: F32 | None) -> None:
        routing, spec = self._routing, self._specs[layer]
        if routing is None:
            raise NotReady("the swarm has no placement that covers every expert", layer=layer)
        started = time.perf_counter()
        n_tokens, n_used = ids.shape
        step = max(1, min(n_tokens, dispatch_rows_max(spec.n_out) // n_used, dispatch_tokens_max(spec.n_in)))
        table = routing.layers[layer]
        groups = table.groups if weights is not None else None
        parts: list[_Part] = []
        frames: list[_Outgoing] = []
        quantized: Activations | None = None
        for start in range(0, n_tokens, step):
            some = ids[start : start + step]
            part = _Part(start, plan(some, table), plan(some, groups) if groups is not None else None)
            by_slot = None if weights is None or groups is not None else weights[start : start + step].reshape(-1)
            for rows in part.plan.parts:
                if layer in routing.quantized.get(rows.peer, ()):
                    quantized = quantize_q8_0(x) if quantized is None else quantized
                    source: Any = quantized
                else:
                    source = x
                chosen = source if len(rows.rows) == n_tokens else source[start + rows.rows]
                frames.append((len(parts), rows, chosen, None if by_slot is None else by_slot[rows.slots]))
            parts.append(part)
        self._number += 1
        exchange = _Exchange(
            number=self._number,
            layer=spec,
            links=routing.links,
            ids_shape=(n_tokens, n_used),
            weights=weights,
            parts=parts,
            patience_s=self._patience_s(routing, spec, frames),
            asked=len(frames),
            started=started,
        )
        self._open[layer] = exchange
        self._send(routing, exchange, frames)

    def _patience_s(self, routing: Routing, spec: LayerExperts, frames: list[_Outgoing]) -> float:
        """How long every peer, at its measured rate, may take to answer all its frames."""
        rows: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for _, part, x, weights in frames:
            back = len(part.experts) if weights is None else len(x)
            rows[part.peer] = rows.get(part.peer, 0) + len(part.experts)
            sizes[part.peer] = sizes.get(part.peer, 0) + x.nbytes + 4 * spec.n_out * back
        waits = [deadline_s(n, sizes[peer], routing.links[peer].rate.rows_per_s) for peer, n in rows.items()]
        return max(waits, default=0.0)

    def collect(self, layer: int) -> F32:
        """The outputs [T, K, n_out] of the last dispatch of this layer.

        Raises:
            ExpertsUnavailable: a holder failed, refused, did not answer in time or answered nonsense; it names layer,
                experts and peer.
        """
        exchange = self._answered(layer)
        out = np.empty((*exchange.ids_shape, exchange.layer.n_out), np.float32)
        for part in exchange.parts:
            gather(part.plan, part.replies, out[part.start : part.start + part.plan.n_tokens])
        self._time(exchange)
        return out

    def collect_sum(self, layer: int) -> F32:
        """Each token's total [T, n_out] of the last dispatch for sums of this layer. Raises as `collect` does."""
        exchange = self._answered(layer)
        totals = [self._totals(exchange, part) for part in exchange.parts]
        self._time(exchange)
        return totals[0] if len(totals) == 1 else np.concatenate(totals)

    @staticmethod
    def _totals(exchange: _Exchange, part: _Part) -> F32:
        n_tokens, n_out = part.plan.n_tokens, exchange.layer.n_out
        if part.groups is None:
            return add_partials(part.plan, part.replies, n_out)
        assert exchange.weights is not None
        rows = np.empty((n_tokens, part.plan.n_used, n_out), np.float32)
        gather(part.plan, part.replies, rows)
        return sum_rows(part.groups, rows, exchange.weights[part.start : part.start + n_tokens])

    def _answered(self, layer: int) -> _Exchange:
        """The last dispatch of a layer, once all its answers are there."""
        exchange = self._open.pop(layer)
        while not self._is_complete(exchange):
            if exchange.patience_s <= 0:
                self._accept(exchange)
                raise self._late(exchange)
        self._accept(exchange)
        return exchange

    def _time(self, exchange: _Exchange) -> None:
        timing, seconds = self.timing, time.perf_counter() - exchange.started
        timing.layers += 1
        timing.round_trip_s += seconds
        if exchange.ids_shape[0] == 1:
            timing.decode_layers += 1
            timing.decode_round_trip_s += seconds

    def _is_complete(self, exchange: _Exchange) -> bool:
        """Wait a moment for the answers; whether they are all there, or one is an error."""
        started = time.monotonic()
        try:
            number = self._complete.get(timeout=_SLICE_S)
        except queue.Empty:
            exchange.patience_s -= _SLICE_S
            return False
        exchange.patience_s -= min(time.monotonic() - started, _SLICE_S)
        return number == exchange.number  # else it belongs to a step that was aborted

    def _accept(self, exchange: _Exchange) -> None:
        """Check what was answered. Raises the first error."""
        for index, peer, answer in exchange.answers:
            if isinstance(answer, SwarmError):
                raise answer
            part = exchange.parts[index]
            rows = next(p for p in part.plan.parts if p.peer == peer)
            summed = exchange.weights is not None and part.groups is None
            try:
                check_reply(answer, rows, exchange.layer.layer, exchange.layer.n_out, partial_sums=summed)
            except PeerMistake as mistake:
                raise ExpertsUnavailable(
                    mistake.message,
                    layer=exchange.layer.layer,
                    experts=sorted(set(rows.experts.tolist())),
                    peer=peer,
                    cause="bad_reply",
                ) from None
            part.replies[peer] = answer

    def _late(self, exchange: _Exchange) -> ExpertsUnavailable:
        """The error that names the first peer that owes rows. Whoever owes some must prove itself again."""
        late = [rows for part in exchange.parts for rows in part.plan.parts if rows.peer not in part.replies]
        for peer in {rows.peer for rows in late}:
            self._token.run_sync_soon(exchange.links[peer].fail, "timeout", "it owes an answer")
        peer, layer = late[0].peer, exchange.layer.layer
        experts = sorted(set(late[0].experts.tolist()))
        return ExpertsUnavailable(
            f"experts {', '.join(map(str, experts))} of layer {layer} are unavailable: peer"
            f" {exchange.links[peer].name} did not answer in time",
            layer=layer,
            experts=experts,
            peer=peer,
            cause="timeout",
        )
