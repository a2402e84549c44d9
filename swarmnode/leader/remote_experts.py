"""The experts of a swarm as llama.cpp's graph sees them: dispatch a layer to its holders, collect their rows.

`RemoteExperts` is called from the decode thread, which blocks in `collect`; frames leave and answers arrive on the
event loop. A dispatch hands all its frames over in one step and goes on; each answer is put into a list that the decode
thread reads when all are there, or one is an error. What then is owed, and by whom, is scheduler/exchange.py's: a
holder that fails is replaced within the layer, one that is slow is asked past, and the result never depends on who
answers first.
"""

from __future__ import annotations

import queue
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio

from backends.experts import F32, I32
from backends.manifest import LayerExperts
from capabilities.errors import NotReady, SwarmError
from scheduler.combine import weighted_sums
from scheduler.dispatch import Plan, plan
from scheduler.exchange import Asked, Exchange
from swarmnode.expert_messages import Activations, dispatch_rows_max, dispatch_tokens_max, encode_notice
from swarmnode.leader.audit_tap import AuditTap
from swarmnode.leader.flight import Flight
from swarmnode.leader.link import NOT_FINITE, Answer, PeerLink
from swarmnode.leader.own_experts import OWN_COPY, OwnExperts
from swarmnode.leader.routing import Detours, Routing

_SAMPLE_ROWS: Final = 8  # of one step
_SAMPLES_MAX: Final = 64  # steps
_SAMPLE_S: Final = 10.0  # rows come with each token of any request
_SLICE_S: Final = 0.25  # our clock counts no more for one wait or one computation, so our own sleep is nobody's fault

LAYER_SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""From kernels on one machine to the deadline of a layer, in steps that tell a LAN, a continent and trouble apart."""


@dataclass
class LayerTiming:
    """Layers that were computed elsewhere, and seconds from handing a layer over to having its rows.

    `decode_*` counts those of one token alone, whose time is nearly all round trip; `by_seconds` has these by their
    time: up to each of LAYER_SECONDS_BOUNDS, and above them all.
    """

    layers: int = 0
    round_trip_s: float = 0.0
    decode_layers: int = 0
    decode_round_trip_s: float = 0.0
    by_seconds: list[int] = field(default_factory=lambda: [0] * (len(LAYER_SECONDS_BOUNDS) + 1))


@dataclass
class FailoverStatistics:
    """Counters since the start: peers that failed or were late in the middle of a layer, peers that were asked because
    another was slow, rows of the leader's own copy, and steps in which a peer of another numeric class stood in."""

    failures: int = 0
    hedges: int = 0
    own_rows: int = 0
    mixed_steps: int = 0


class RemoteExperts:
    """The StepExecutor of a leader.

    `set_routing`, `begin_request` and `end_request` are called on the event loop, the rest on the decode thread.
    `own` answers where the routing says so. `mixed`: in the present step, or the last one, a peer took part that is not
    known to be of the leader's own numeric class.
    """

    def __init__(
        self, layers: Sequence[LayerExperts], token: trio.lowlevel.TrioToken, own: OwnExperts | None = None
    ) -> None:
        self._specs = {spec.layer: spec for spec in layers}
        self._token = token
        self._own = own
        self._routing: Routing | None = None
        self.routings = 0
        self._complete: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers of flights with something to look at
        self._number = 0
        self._open: dict[int, Flight] = {}
        self._begun: set[str] = set()
        self._clock_s = 0.0
        self._ticked = time.monotonic()
        self._detours = Detours()
        self._owed: dict[Asked, PeerLink] = {}  # asked, and then not waited for any more
        self._samples: dict[int, list[F32]] = {}  # of layers that somebody wants rows of
        self.timing = LayerTiming()
        self.failover = FailoverStatistics()
        self.tap: AuditTap | None = None  # who looks at answers
        self.mixed = self._stood_in = False
        self.give_up: Callable[[], SwarmError | None] = lambda: None

    # -- event loop ---------------------------------------------------------------------------------------------

    def set_routing(self, routing: Routing | None) -> None:
        """The epoch that dispatches use from the next layer on."""
        self._routing = routing
        self.routings += 1

    @property
    def has_own_copy(self) -> bool:
        return self._own is not None

    def close(self) -> None:
        """Free the own copy. The decode thread has ended."""
        if self._own is not None:
            self._own.close()

    async def sample(self, layer: int, rows: int) -> F32 | None:
        """The layer's next activations, as they are dispatched [rows, n_in]; None if too few come in time."""
        taken: list[F32] = []
        self._samples[layer] = taken
        try:
            with trio.move_on_after(_SAMPLE_S):
                while sum(map(len, taken)) < rows:  # noqa: ASYNC110 - the decode thread has better to do than to tell
                    await trio.sleep(_SLICE_S)
        finally:
            del self._samples[layer]
        return np.concatenate(taken)[:rows] if sum(map(len, taken)) >= rows else None

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

    # -- decode thread: out -------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[str]) -> None:
        """Drop what an aborted step left open."""
        self._open.clear()
        self.mixed = self._stood_in = False
        if self.tap is not None:
            self.tap.begin_step(requests)

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
        self._look_whether_to_give_up()
        routing, spec = self._routing, self._specs[layer]
        if routing is None:
            raise NotReady("the swarm has no placement that covers every expert", layer=layer)
        started = time.perf_counter()
        if (wanted := self._samples.get(layer)) is not None and len(wanted) < _SAMPLES_MAX:
            wanted.append(x[:_SAMPLE_ROWS].copy())
        n_tokens, n_used = ids.shape
        step = max(1, min(n_tokens, dispatch_rows_max(spec.n_out) // n_used, dispatch_tokens_max(spec.n_in)))
        table = self._detours.around(routing, layer)
        starts = list(range(0, n_tokens, step))
        plans = [plan(ids[start : start + step], table) for start in starts]
        groups: list[Plan] = []
        by_slot: list[F32] | None = None
        if weights is not None and table.groups is not None:
            groups = [plan(ids[start : start + step], table.groups) for start in starts]
        elif weights is not None:
            by_slot = [weights[start : start + step].reshape(-1) for start in starts]
        exchange = Exchange(layer, spec.n_out, table, routing.classes, plans, by_slot)
        self._number += 1
        flight = Flight(
            self._number, spec, routing, x, (n_tokens, n_used), weights, starts, plans, groups, exchange, started
        )
        self._open[layer] = flight
        self._tick()
        self._ask(flight, exchange.asked())

    def _ask(self, flight: Flight, asked: Sequence[Asked]) -> None:
        """Send what is asked of peers; what is asked of the own copy is computed when the layer is collected."""
        peers = [each for each in asked if each.part.peer != OWN_COPY]
        flight.own += [each for each in asked if each.part.peer == OWN_COPY]
        frames = [(each, flight.activations(each)) for each in peers]
        flight.set_instants(frames, self._clock_s)
        flight.sent += peers
        flight.wanted += len(peers)
        for each, x in frames:
            self._send(flight, each, x)

    def _send(self, flight: Flight, asked: Asked, x: Activations) -> None:
        routing, layer, part = flight.routing, flight.layer, asked.part

        def on_answer(answer: Answer) -> None:
            flight.answers.append((asked, answer))
            self._owed.pop(asked, None)
            self._detours.answered(part.peer)
            # The decode thread is woken once, for waking it costs more than to look at an answer. It goes first: the
            # sleep gives it the interpreter, which this thread needs only to wait for the next message.
            if len(flight.answers) >= flight.wanted or flight.eager or isinstance(answer, SwarmError):
                self._complete.put(flight.number)
                time.sleep(0)

        routing.links[part.peer].send(
            term=routing.term,
            epoch=routing.epochs.get(part.peer, routing.epoch),
            layer=layer.layer,
            x=x,
            tokens=part.tokens,
            experts=part.experts,
            weights=asked.weights,
            n_out=layer.n_out,
            ask_f32=layer.layer in routing.ask_f32,
            on_answer=on_answer,
        )

    # -- decode thread: back ------------------------------------------------------------------------------------

    def collect(self, layer: int) -> F32:
        """The outputs [T, K, n_out] of the last dispatch of this layer.

        Raises:
            ExpertsUnavailable: a holder failed, refused, did not answer in time or answered nonsense, and nobody could
                take its place; it names layer, experts and peer.
        """
        flight = self._answered(layer)
        out = flight.rows()
        self._time(flight)
        return out

    def collect_sum(self, layer: int) -> F32:
        """Each token's total [T, n_out] of the last dispatch for sums of this layer. Raises as `collect` does."""
        flight = self._answered(layer)
        totals = flight.totals()
        self._time(flight)
        return totals

    def _answered(self, layer: int) -> Flight:
        """The last dispatch of a layer, once all its answers are there."""
        flight = self._open.pop(layer)
        exchange = flight.exchange
        while True:
            self._compute_own(flight)
            if exchange.complete:
                break
            self._wait(flight)
            self._take(flight)
            if not exchange.complete:
                self._look_at_the_clock(flight)
        if flight.eager:
            self._keep_owed(flight)
        self.mixed = self.mixed or flight.routing.is_mixed(exchange.computed)
        if exchange.mixed and not self._stood_in:
            self._stood_in = True
            self.failover.mixed_steps += 1
        return flight

    def _wait(self, flight: Flight) -> None:
        """Wait until there is something to look at: answers, or an instant that has come."""
        instant = flight.exchange.next_instant()
        while not flight.own:
            self._tick()
            left = instant - self._clock_s
            if left <= 0:
                return
            try:
                if self._complete.get(timeout=min(left, _SLICE_S)) == flight.number:
                    return  # else it belongs to a step that was aborted, or is another word on an earlier layer
            except queue.Empty:
                self._look_whether_to_give_up()

    def _look_whether_to_give_up(self) -> None:
        if (error := self.give_up()) is not None:
            raise error

    def _tick(self) -> None:
        now = time.monotonic()
        self._clock_s += min(now - self._ticked, _SLICE_S)
        self._ticked = now

    def _take(self, flight: Flight) -> None:
        """Look at the answers that came. Raises the first error that nobody makes up for."""
        exchange = flight.exchange
        while flight.taken < len(flight.answers):
            asked, answer = flight.answers[flight.taken]
            flight.taken += 1
            if isinstance(answer, SwarmError):
                if self.tap is not None and answer.details.get("cause") == NOT_FINITE:
                    self.tap.refused(asked.part.peer, answer)
                self._replace(flight, asked, answer)
            elif (fault := exchange.fault(asked, answer)) is not None:
                self._fail_link(flight, asked, "bad_reply", fault.message)
                self._replace(flight, asked, fault)
            else:
                exchange.answered(asked, answer)
                self._show(flight, asked, answer)

    def _show(self, flight: Flight, asked: Asked, answer: F32) -> None:
        """Have an answer looked at, now or never."""
        if self.tap is not None:
            peer, layer = asked.part.peer, flight.layer
            self.tap.answered(
                peer,
                layer,
                flight.x[flight.starts[asked.share.chunk] :],
                asked.part,
                asked.weights,
                answer,
                rounded=layer.layer in flight.routing.quantized.get(peer, ()),
                ask_f32=layer.layer in flight.routing.ask_f32,
            )

    def _look_at_the_clock(self, flight: Flight) -> None:
        self._tick()
        exchange = flight.exchange
        for asked in exchange.overdue(self._clock_s):
            self._fail_link(flight, asked, "timeout", "it owes an answer")
            self._replace(flight, asked, flight.late(asked))
        hedges = exchange.hedge(self._clock_s)
        if hedges:
            flight.eager = True
            self.failover.hedges += len(hedges)
            self._detours.slow(each.part.peer for hedge in hedges for each in hedge.share.asked if each.owes)
            for asked, _ in list(flight.answers):  # after the above: one that came just now is not slow for ever
                self._detours.answered(asked.part.peer)
            self._ask(flight, hedges)
        for asked, link in list(self._owed.items()):
            if asked.overdue_at <= self._clock_s and self._owed.pop(asked, None) is not None:
                self._token.run_sync_soon(link.fail, "timeout", "it owes an answer")

    def _replace(self, flight: Flight, asked: Asked, error: SwarmError) -> None:
        """Somebody else takes over what a peer owes. Raises if there is nobody."""
        flight.eager = True
        if error.details.get("cause") != NOT_FINITE:  # that is of these rows alone
            self.failover.failures += self._detours.failed(asked.part.peer)
        self._ask(flight, flight.exchange.failed(asked, error))

    def _fail_link(self, flight: Flight, asked: Asked, cause: str, reason: str) -> None:
        """Whoever is late or wrong must prove itself again."""
        self._token.run_sync_soon(flight.routing.links[asked.part.peer].fail, cause, reason)

    def _keep_owed(self, flight: Flight) -> None:
        """Who lost to somebody faster still owes an answer, and fails if it never comes."""
        for asked in flight.sent:
            self._owed[asked] = flight.routing.links[asked.part.peer]
        for asked, _ in list(flight.answers):  # after the above: an answer that comes now finds it
            self._owed.pop(asked, None)

    def _compute_own(self, flight: Flight) -> None:
        """Compute here what nobody else gives."""
        while flight.own:
            asked = flight.own.pop()
            part, start = asked.part, flight.starts[asked.share.chunk]
            try:
                values = self._own_rows(flight, flight.x[start + part.rows], part.tokens, part.experts)
            except SwarmError as error:
                self._replace(flight, asked, error)
                continue
            self.failover.own_rows += len(values)
            flight.exchange.answered(
                asked, values if asked.weights is None else weighted_sums(values, asked.weights, part.tokens)
            )

    def _own_rows(self, flight: Flight, x: F32, tokens: I32, experts: I32) -> F32:
        layer = flight.layer.layer
        if self._own is None:
            raise NotReady("this leader has no copy of its own", layer=layer)
        return self._own.compute(layer, x, tokens, experts, ask_f32=layer in flight.routing.ask_f32)

    def _time(self, flight: Flight) -> None:
        timing, seconds = self.timing, time.perf_counter() - flight.started
        timing.layers += 1
        timing.round_trip_s += seconds
        if flight.ids_shape[0] == 1:
            timing.decode_layers += 1
            timing.decode_round_trip_s += seconds
            timing.by_seconds[bisect_left(LAYER_SECONDS_BOUNDS, seconds)] += 1
