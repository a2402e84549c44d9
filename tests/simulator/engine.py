"""A leader's decode loop: the batcher's steps through the toy trunk, whose experts are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from capabilities.errors import SwarmError
from scheduler.batching import Batcher
from scheduler.requests import Effect, Request
from scheduler.steps import Step
from tests.simulator.dispatching import Dispatching
from tests.simulator.host import Host
from tests.simulator.toy import F32, VOCABULARY, Pass, Trunk

SLOTS, CONTEXT_TOKENS, BATCH_TOKENS, QUEUE = 2, 28, 8, 8
TRUNK_S = 0.002


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests wait for experts that nobody has now, and whether the model keeps their cache meanwhile."""

    park_s: float
    can_cut: bool


class Engine:
    """Of one leadership. `deliver` gets every effect."""

    def __init__(
        self,
        host: Host,
        dispatching: Dispatching,
        deliver: Callable[[Effect], None],
        batcher: Callable[..., Batcher],
        patience: Patience,
    ) -> None:
        self.host = host
        self.batcher = batcher(
            SLOTS,
            CONTEXT_TOKENS,
            BATCH_TOKENS,
            QUEUE,
            VOCABULARY,
            park_s=patience.park_s,
            can_cut=patience.can_cut,
        )
        self.live = True
        self._dispatching = dispatching
        self._deliver = deliver
        self._trunk = Trunk(can_cut=patience.can_cut)
        self._busy = False
        self._wakes = 0

    def submit(self, request: Request) -> None:
        """Raises SwarmError if it is not accepted."""
        self._tell(self.batcher.submit(request, self.host.now()))
        self.wake()

    def cancel(self, request: str) -> None:
        self._tell(self.batcher.cancel(request, "the asker is gone", self.host.now()))
        self.wake()

    def rerouted(self) -> None:
        """Other peers answer than before."""
        if self.live:
            self.batcher.retry()
            self.wake()

    def wake(self) -> None:
        """Something changed: there may be a step to do."""
        if self._busy or not self.live:
            return
        now = self.host.now()
        self._tell(self.batcher.expire(now))
        step = self.batcher.next_step(now)
        if step is not None:
            self._busy = True
            self._go_on(step, self._trunk.begin(step))
            return
        due = self.batcher.next_deadline()
        if due is not None:
            self._wakes += 1
            number = self._wakes
            self.host.after(max(due - now, 0.001), lambda: self.wake() if self._wakes == number else None)

    def _tell(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._deliver(effect)

    def _go_on(self, step: Step, running: Pass) -> None:
        if running.choice is not None:
            self._dispatching.compute(running.choice, lambda result: self._combined(step, running, result))
        else:
            self.host.after(TRUNK_S, lambda: self._done(step, running))

    def _combined(self, step: Step, running: Pass, result: F32 | SwarmError) -> None:
        if not self.live:
            return
        if isinstance(result, SwarmError):
            self._trunk.spoil(step)
            self.host.world.note(f"{self.host.name} aborts a step: {result.message}")
            # Never within the call that began the step: an aborted one could begin the next, and so on without end.
            self.host.after(TRUNK_S, lambda: self._aborted(step, result))
        else:
            running.combined(result)
            self._go_on(step, running)

    def _done(self, step: Step, running: Pass) -> None:
        if self.live:
            self._ended(self.batcher.step_done(step, running.logits, self.host.now()))

    def _aborted(self, step: Step, error: SwarmError) -> None:
        if self.live:
            self._ended(self.batcher.step_failed(step, error, False, self.host.now()))

    def _ended(self, effects: list[Effect]) -> None:
        self._busy = False
        self._dispatching.step_ended()
        self._tell(effects)
        self.wake()
