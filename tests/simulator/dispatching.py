"""A leader's dispatches: a layer's rows from its holders, by the plan, whoever fails meanwhile; as the daemon's.

Frames are single messages here, which may be lost, doubled and late: more than a stream does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capabilities.errors import ExpertsUnavailable, NotReady, SwarmError
from scheduler.combine import add_partials, sum_rows, weighted_sums
from scheduler.dispatch import LayerRouting, Plan, deadline_s, gather, hedge_after_s, plan
from scheduler.exchange import Asked, Exchange
from scheduler.own_time import OwnTime
from scheduler.placement import Placement
from tests.simulator.host import Host
from tests.simulator.messages import Dispatch, Rows
from tests.simulator.toy import CHUNK_TOKENS, F32, I32, USED, WIDTH, Choice, Experts

SLICE_S = 0.25  # how often is looked for what is overdue, at most
OWN_COPY_S = 0.02  # to compute a part from the leader's own file


@dataclass(slots=True)
class _Frame:
    """A dispatch that is under way. `answer` takes rows or why there are none."""

    peer: str
    sent: float
    answer: Callable[[Any], None]


class Dispatching:
    """Channel "rows". `failed` hears of peers that answered nonsense or not at all, `timed` of all others."""

    channel = "rows"

    def __init__(
        self, host: Host, experts: Experts, combined: Callable[[Placement, Choice, F32], None], *, sums: bool
    ) -> None:
        """`sums`: workers add their own rows. `combined` hears of each layer that is complete."""
        self.host = host
        self.sums = sums
        self.combined = combined
        self.failed: Callable[[str, str], None] = lambda peer, why: None
        self.rates: Callable[[str], float | None] = lambda peer: None
        self.replaced: Callable[[int], None] = lambda parts: None
        self.timed: Callable[[str, int, float], None] = lambda peer, rows, seconds: None
        self._experts = experts
        self._frames: dict[int, _Frame] = {}
        self._numbers = host.boots << 32  # an answer to a process that is gone must not look like one to this
        self._placement: Placement | None = None
        self._routing: Mapping[int, LayerRouting] = {}
        self._classes: Mapping[str, str] = {}
        self._answering: Mapping[str, Placement] = {}
        self._exchange: _Running | None = None
        self._own_time = OwnTime(host.now(), SLICE_S)
        self._drained: list[Callable[[], None]] = []

    def start(self) -> None:
        pass

    def now(self) -> float:
        """The time that deadlines count in: own sleep is nobody's fault."""
        return self._own_time.at(self.host.now())

    def reset(self) -> None:
        """Another leadership begins, or this one ends: what is under way is forgotten."""
        self._frames.clear()
        self._placement, self._exchange = None, None
        self._drained.clear()

    def route(
        self,
        placement: Placement | None,
        routing: Mapping[int, LayerRouting],
        classes: Mapping[str, str],
        answering: Mapping[str, Placement],
    ) -> None:
        """What dispatches use from the next layer on. `answering`: the epoch under which each peer answers."""
        self._placement, self._routing, self._classes, self._answering = placement, routing, classes, answering

    def when_drained(self, action: Callable[[], None]) -> None:
        """Do it once the step that runs has ended."""
        if self._exchange is None:
            action()
        else:
            self._drained.append(action)

    def step_ended(self) -> None:
        drained, self._drained = self._drained, []
        for action in drained:
            action()

    # -- frames -------------------------------------------------------------------------------------------------

    def send(
        self,
        peer: str,
        placement: Placement,
        layer: int,
        x: F32,
        tokens: I32,
        experts: I32,
        answer: Callable[[Any], None],
        weights: F32 | None = None,
    ) -> int:
        """One frame to one peer; `answer` gets its rows or the word with which it refuses."""
        self._numbers += 1
        number = self._numbers
        self._frames[number] = _Frame(peer, self.host.now(), answer)
        dispatch = Dispatch(placement.term, placement.epoch, number, layer, x, tokens, experts, weights)
        self.host.send(peer, "dispatch", dispatch)
        return number

    def give_up(self, number: int, why: str) -> None:
        """Wait no longer for a frame."""
        frame = self._frames.pop(number, None)
        if frame is not None:
            frame.answer(why)

    def lost(self, peer: str, why: str) -> None:
        """A peer's connection broke, or it is silent: it owes nothing any more."""
        for number in [number for number, frame in self._frames.items() if frame.peer == peer]:
            self.give_up(number, why)

    def receive(self, sender: str, message: Rows) -> None:
        frame = self._frames.get(message.number)
        if frame is None or frame.peer != sender:
            return  # late, doubled, or made up
        del self._frames[message.number]
        if message.refusal:
            frame.answer(message.refusal)
            return
        self.timed(sender, len(message.values), self.host.now() - frame.sent)
        frame.answer(message.values)

    # -- layers -------------------------------------------------------------------------------------------------

    def compute(self, choice: Choice, done: Callable[[F32 | SwarmError], None]) -> None:
        """The chosen experts' rows, float32 [T, USED, WIDTH], their sums [T, WIDTH], or why there are none."""
        if self._placement is None:
            done(NotReady("nothing is placed", layer=choice.layer))
            return
        try:
            table, answering = self._routing[choice.layer], self._answering
            running = _Running(self, self._placement, table, self._classes, answering, choice, done)
        except ExpertsUnavailable as error:
            done(error)
            return
        self._exchange = running
        running.begin()

    def own_copy(self, asked: Asked, choice: Choice, answer: Callable[[Any], None]) -> None:
        part = asked.part
        rows = self._experts.rows(choice.layer, choice.x[part.rows], part.tokens, part.experts)
        if asked.weights is not None:
            rows = weighted_sums(rows, asked.weights, part.tokens)
        self.host.after(OWN_COPY_S, lambda: answer(rows))

    def ended(self, running: _Running) -> bool:
        """Whether this exchange counted until now."""
        if self._exchange is not running:
            return False
        self._exchange = None
        return True

    def counts(self, running: _Running) -> bool:
        return self._exchange is running


class _Running:
    """One layer's exchange, with what carries it."""

    def __init__(
        self,
        dispatching: Dispatching,
        placement: Placement,
        routing: LayerRouting,
        classes: Mapping[str, str],
        answering: Mapping[str, Placement],
        choice: Choice,
        done: Callable[[F32 | SwarmError], None],
    ) -> None:
        self._dispatching = dispatching
        self._placement = placement
        self._answering = answering
        self._choice = choice
        self._done = done
        self._chunks = [choice.part(start) for start in range(0, len(choice.x), CHUNK_TOKENS)]
        self._plans = [plan(chunk.ids, routing) for chunk in self._chunks]
        self._groups: list[Plan] = []  # rows are asked for although sums are wanted, and added by these plans
        by_slot: list[F32] | None = None
        if dispatching.sums and routing.groups is not None:
            self._groups = [plan(chunk.ids, routing.groups) for chunk in self._chunks]
        elif dispatching.sums:
            by_slot = [chunk.weights.reshape(-1) for chunk in self._chunks]
        self.exchange = Exchange(choice.layer, WIDTH, routing, classes, self._plans, by_slot)
        self._numbers: dict[int, int] = {}  # id of an Asked -> its frame

    def begin(self) -> None:
        self._send(self.exchange.asked())
        self._watch()

    def _send(self, some: list[Asked]) -> None:
        for asked in some:
            self._send_one(asked)

    def _send_one(self, asked: Asked) -> None:
        part, dispatching, choice = asked.part, self._dispatching, self._chunks[asked.share.chunk]
        if part.peer == dispatching.host.name:
            dispatching.own_copy(asked, choice, lambda values: self._answer(asked, values))
            return
        rows, rate, now = len(part.experts), dispatching.rates(part.peer), dispatching.now()
        asked.overdue_at = now + deadline_s(rows, 4 * WIDTH * (len(part.rows) + rows), rate)
        asked.hedge_at = now + hedge_after_s(rows, rate)
        x = choice.x[part.rows]
        self._numbers[id(asked)] = dispatching.send(
            part.peer,
            self._answering[part.peer],
            choice.layer,
            x,
            part.tokens,
            part.experts,
            lambda values: self._answer(asked, values),
            asked.weights,
        )

    def _answer(self, asked: Asked, values: Any) -> None:
        """Rows came, or a word that says why none will."""
        if not self._dispatching.counts(self):
            return
        if isinstance(values, str):
            error = ExpertsUnavailable(values, layer=self._choice.layer, peer=asked.part.peer, cause=values)
            self._fail(asked, error)
            return
        fault = self.exchange.fault(asked, values)
        if fault is not None:
            self._fail(asked, fault)
            return
        self.exchange.answered(asked, values)
        self._look()

    def _fail(self, asked: Asked, error: ExpertsUnavailable) -> None:
        host = self._dispatching.host
        host.world.note(f"{host.name} misses rows of {asked.part.peer}: {error.message}")
        self._dispatching.failed(asked.part.peer, error.message)
        try:
            others = self.exchange.failed(asked, error)
        except SwarmError as last:
            if self._dispatching.ended(self):
                self._done(last)
            return
        self._dispatching.replaced(len(others))
        self._send(others)
        self._look()

    def _look(self) -> None:
        if self.exchange.complete and self._dispatching.ended(self):
            result = np.concatenate([self._result(number) for number in range(len(self._chunks))])
            self._dispatching.combined(self._placement, self._choice, result)
            self._done(result)

    def _result(self, number: int) -> F32:
        """A chunk's rows [T, USED, WIDTH], or its totals [T, WIDTH]."""
        split, chunk = self._plans[number], self._chunks[number]
        replies = {
            share.part.peer: share.values
            for share in self.exchange.shares
            if share.chunk == number and share.values is not None
        }
        if self._dispatching.sums and not self._groups:
            return add_partials(split, replies, WIDTH)
        rows = np.full((len(chunk.x), USED, WIDTH), np.nan, np.float32)
        gather(split, replies, rows)
        return sum_rows(self._groups[number], rows, chunk.weights) if self._groups else rows

    def _watch(self) -> None:
        """Look for what is late, again and again."""
        if not self._dispatching.counts(self):
            return
        now = self._dispatching.now()
        for asked in self.exchange.overdue(now):
            self._dispatching.give_up(self._numbers[id(asked)], "timeout")
            if not self._dispatching.counts(self):
                return
        self._send(self.exchange.hedge(now))
        self._dispatching.host.after(SLICE_S, self._watch)
