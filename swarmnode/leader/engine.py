"""The leader's decode thread: one llama.cpp context, one batcher, one loop.

llama.cpp blocks, so it has a thread of its own, and that thread alone owns the model and the batcher. Requests come in
through a bounded queue of commands; tokens go out as batches of effects to the event loop. Between two steps the loop
takes new requests and cancellations, and tells what it knows before it decodes, so that a refusal does not wait for a
step. It does so at each layer of a step, too, and while that is waited for: whoever goes away frees the slot at once,
however long the step takes, and a step for which nobody waits any more is given up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
import trio

from backends.llama import LlamaModel
from backends.moe_hook import ExpertExecutor
from capabilities.errors import Internal, NoLeader, Overloaded, RequestCancelled, SwarmError
from scheduler.batching import Batcher
from scheduler.requests import Effect, FailedEffect, FinishedEffect, Request
from scheduler.steps import BatcherStatistics, Step

_log = structlog.get_logger(__name__)

COMMANDS_MAX: Final = 1024  # far above the batcher's own queue; beyond it a submission is refused at once
_IDLE_WAIT_S: Final = 60.0
_STOP_WAIT_S: Final = 5.0  # for the step that runs; a decode step has 4 s at most

Sink = Callable[[Effect], None]


class StepExecutor(ExpertExecutor, Protocol):
    """An executor that is told which requests a step serves, for its logs and errors.

    `routings` changes whenever other peers answer than before: it may be worth while to try again what failed.
    `give_up` is the engine's: what it returns ends the step.
    """

    give_up: Callable[[], SwarmError | None]

    @property
    def routings(self) -> int: ...

    @property
    def mixed(self) -> bool:
        """Whether a peer of another numeric class than the placement's took part in the last step."""

    def begin_step(self, requests: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    reason: str


class StepGivenUp(RequestCancelled):
    """Nobody waits for this step any more."""


@dataclass(frozen=True, slots=True)
class _Distrust:
    find: Callable[[], Sequence[str]]
    told: Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters of the engine. `decode_s` is time inside llama.cpp and the executor."""

    batcher: BatcherStatistics
    steps: int
    decode_s: float


class DecodeEngine:
    """Runs requests on a model. All methods but the thread's own are called from the event loop."""

    def __init__(self, model: LlamaModel, executor: StepExecutor, batcher: Batcher) -> None:
        self._model = model
        self._executor = executor
        self._batcher = batcher
        self._commands: queue.Queue[_Submit | _Cancel | _Distrust | None] = queue.Queue(COMMANDS_MAX)
        self._sinks: dict[str, Sink] = {}
        self._later: list[_Distrust] = []  # what must wait for the end of the step
        self._step: Step | None = None  # the one that runs
        executor.give_up = self._give_up
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._stopped = trio.Event()
        self._stopping = False
        self._steps = 0
        self._routings = 0
        self._decode_s = 0.0
        self._begun = 0  # steps, whether they came to anything or not; both counters are the decode thread's
        self._ended = 0
        self._boundaries: list[tuple[int, trio.Event]] = []  # set once so many steps have ended

    def start(self) -> None:
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """No request is taken any more."""
        return self._stopping

    async def stop(self) -> bool:
        """End all requests with an error and stop the thread; whether it has ended. Bounded by the step that runs."""
        self._stopping = True
        self.wake()
        with trio.move_on_after(_STOP_WAIT_S):
            await self._stopped.wait()
        return self._stopped.is_set()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` gets its effects on the event loop, the last one terminal.

        Raises:
            Overloaded: too many requests wait.
            NoLeader: the engine has stopped.
        """
        if self._stopping:
            raise NoLeader("the leader is stopping")
        if request.id in self._sinks:
            raise Overloaded(f"request id {request.id} is in use")
        try:
            self._commands.put_nowait(_Submit(request, sink))
        except queue.Full:
            raise Overloaded("too many requests wait for this leader") from None
        self._sinks[request.id] = sink

    def cancel(self, request_id: str, reason: str) -> None:
        """Drop a request: no further effects reach its sink."""
        if self._sinks.pop(request_id, None) is not None:
            try:
                self._commands.put_nowait(_Cancel(request_id, reason))
            except queue.Full:  # the request then ends by its own deadline
                _log.warning("engine.cancel_lost", request_id=request_id)

    def distrust(self, find: Callable[[], Sequence[str]], told: Callable[[Sequence[str]], None]) -> None:
        """Requests had a part computed wrong: they begin anew, or end as tainted. `find` names them, on the thread.

        told: called on the event loop with those that had ended already, after their last effects.
        """
        try:
            self._commands.put_nowait(_Distrust(find, told))
        except queue.Full:
            _log.warning("engine.distrust_lost")
            told(())

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(self._batcher.statistics(), self._steps, self._decode_s)

    def wake(self) -> None:
        """Something changed that requests may wait for."""
        with contextlib.suppress(queue.Full):  # then it does not sleep
            self._commands.put_nowait(None)

    async def step_boundary(self) -> None:
        """Wait until the step that runs now, if one does, has ended."""
        begun, event = self._begun, trio.Event()
        self._boundaries.append((begun, event))  # first this, then the look: a step that ends now finds it
        if self._ended >= begun or self._stopping:
            event.set()
        await event.wait()

    # -- event loop ---------------------------------------------------------------------------------------------

    def _deliver(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            ended = isinstance(effect, FinishedEffect | FailedEffect)
            sink = self._sinks.pop(effect.request, None) if ended else self._sinks.get(effect.request)
            if sink is not None:
                sink(effect)
        self._pass_boundaries(self._ended)

    def _pass_boundaries(self, ended: int) -> None:
        passed = [each for each in self._boundaries if each[0] <= ended or each[1].is_set()]
        for each in passed:
            each[1].set()
            self._boundaries.remove(each)

    def _stop(self) -> None:
        self._pass_boundaries(self._begun)
        self._stopped.set()

    # -- decode thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._one_round()
            self._post(self._fail_everything(NoLeader("the leader stopped in the middle of the answer")))
        except trio.RunFinishedError:
            return
        except BaseException:
            _log.exception("engine.died")
            self._stopping = True
            self._post(self._fail_everything(Internal("the leader's decode thread died")))
        finally:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)

    def _one_round(self) -> None:
        effects = self._take_commands()
        if self._routings != self._executor.routings:
            self._routings = self._executor.routings
            self._batcher.retry()
        now = time.monotonic()
        effects += self._batcher.expire(now)
        step = self._batcher.next_step(now)
        self._post(effects)
        if step is None:
            self._wait(now)
            return
        self._begun += 1
        effects = self._decode(step)
        self._ended = self._begun
        self._post(effects)

    def _take_commands(self) -> list[Effect]:
        effects: list[Effect] = []
        waited, self._later = self._later, []
        for distrust in waited:
            effects += self._obey(distrust)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return effects
            if command is not None:
                effects += self._obey(command)

    def _wait(self, now: float) -> None:
        """Sleep until a command comes, or an instant of the batcher's."""
        instant = self._batcher.next_deadline()
        timeout = _IDLE_WAIT_S if instant is None else min(_IDLE_WAIT_S, max(0.0, instant - now))
        try:
            command = self._commands.get(timeout=timeout)
        except queue.Empty:
            return
        if command is not None:
            self._post(self._obey(command))

    def _obey(self, command: _Submit | _Cancel | _Distrust) -> list[Effect]:
        now = time.monotonic()
        if isinstance(command, _Distrust):
            if self._step is not None:
                self._later.append(command)
                return []
            found = command.find()
            names = self._batcher.distrust(found)
            _log.warning("engine.distrusted", requests=names)
            self._token.run_sync_soon(command.told, [name for name in found if name not in names])
            return []
        if isinstance(command, _Cancel):
            return self._batcher.cancel(command.request_id, command.reason, now)
        try:
            return self._batcher.submit(command.request, now)
        except SwarmError as error:
            return [FailedEffect(command.request.id, error)]

    def _decode(self, step: Step) -> list[Effect]:
        started = time.monotonic()
        self._step = step
        try:
            for sequence in step.clear:
                self._model.clear(sequence)
            for sequence, position in step.cut:
                self._model.cut(sequence, position)
            self._executor.begin_step(step.requests)
            logits = self._model.decode(step.tokens, step.positions, step.sequences, step.wants_logits)
        except StepGivenUp as error:
            ended = [*self._take_commands(), *self._batcher.expire(time.monotonic())]  # its requests, each as it is
            return ended + self._failed(step, error)
        except SwarmError as error:
            return self._failed(step, error)
        except Exception:
            _log.exception("engine.step_failed", requests=step.requests)
            return self._failed(step, Internal("the leader could not decode; its log has the details"))
        finally:
            self._step = None
        now = time.monotonic()
        self._steps += 1
        self._decode_s += now - started
        return self._batcher.step_done(step, logits, now, mixed=self._executor.mixed)

    def _give_up(self) -> StepGivenUp | None:
        """Why the step that runs is not worth its end. Called on the decode thread, in the middle of it."""
        step = self._step
        if step is None:
            return None
        if not self._commands.empty():
            self._post(self._take_commands())
        if not self._batcher.is_wanted or time.monotonic() >= step.give_up_at:
            return StepGivenUp("nobody waits for this step any more")
        return None

    def _failed(self, step: Step, error: SwarmError) -> list[Effect]:
        _log.warning("engine.step_aborted", requests=step.requests, error=error.to_json())
        return self._batcher.step_failed(step, error, False, time.monotonic())

    def _fail_everything(self, error: SwarmError) -> list[Effect]:
        return [FailedEffect(request_id, error) for request_id in list(self._sinks)]

    def _post(self, effects: list[Effect]) -> None:
        if effects or self._boundaries:
            self._token.run_sync_soon(self._deliver, effects)
