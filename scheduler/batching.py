"""Continuous batching: which tokens the trunk decodes next, and what its logits mean for each request.

A request waits in a bounded first-in-first-out queue for one of a fixed number of slots. A slot is a llama.cpp sequence
with a key-value cache of its own; the lowest free one is given, because dense sequence ids share a pass. Of a request's
tokens (prompt and answer so far) the first `cached` are in the cache. With one token missing there it joins the decode
batch, with more it is prefilled; a lost cache is `cached = 0`.

Each step is either prefill or decode, since llama.cpp takes two passes for a mixture. They alternate while there is
work for both, and a prefill beside decoding is kept short, so neither starves the other. A prefill shares its rows
evenly among the prompts: a short one does not wait for a long one, and equal lengths share a pass.

    effects += batcher.expire(now)
    step = batcher.next_step(now)            # None: nothing to do until `next_deadline`
    ...clear step.clear, cut step.cut, decode the rows...
    effects += batcher.step_done(step, logits, now)    or    batcher.step_failed(step, error, lost, now)

`submit` and `cancel` may come between any of these, also while a step runs (but calls never overlap: one lock or one
thread). Every request that was accepted gets exactly one terminal effect, FinishedEffect or FailedEffect.

Requests whose step failed for want of an expert keep their slot and try again (parking.py); what they had in the cache
before that step stays, where it can be cut back to that, and is made anew otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Overloaded,
    RequestCancelled,
    SwarmError,
    UsageError,
)
from scheduler.answer import Answer, Vocabulary
from scheduler.fair_queue import FairQueue
from scheduler.parking import Parking
from scheduler.requests import Effect, FailedEffect, QueuedEffect, Request
from scheduler.slot_sharing import RetryEstimate, gives_way, loses_slot
from scheduler.steps import BatcherStatistics, Step, StepKind, make_step, share_rows

# Rows of a prefill step while others generate: they wait for it between two tokens. At 200 rows/s, a slow machine, that
# is 0.6 s; much less would waste passes, which cost a round trip a layer whatever their size.
PREFILL_ROWS_BESIDE_DECODE = 128


class Batcher:
    """The core of the leader's decode loop. Instants are seconds of one monotonic clock.

    slots           sequences of the llama.cpp context (n_seq_max)
    context_tokens  cache cells of each sequence (n_ctx / n_seq_max)
    batch_tokens    most rows a step (n_batch; with n_ubatch equal to it a step is one pass where lengths allow)
    queue_limit     most requests that wait for a slot
    vocabulary      the model's; ids are checked against it, since one bad id fails a whole decode in llama.cpp
    park_s          how long a request waits for experts that nobody can compute; 0: it fails at once
    can_cut         a sequence of this model can be cut back to an earlier position
    """

    def __init__(
        self,
        slots: int,
        context_tokens: int,
        batch_tokens: int,
        queue_limit: int,
        vocabulary: Vocabulary,
        *,
        park_s: float = 0.0,
        can_cut: bool = False,
    ) -> None:
        if slots < 1 or context_tokens < 1 or batch_tokens < slots or queue_limit < 0:
            raise ValueError("needs slots >= 1, context_tokens >= 1, batch_tokens >= slots, queue_limit >= 0")
        self._context_tokens = context_tokens
        self._batch_tokens = batch_tokens
        self._queue_limit = queue_limit
        self._vocabulary = vocabulary
        self._live: dict[str, Answer] = {}
        self._waiting: dict[str, Answer] = {}
        self._queue: FairQueue[str] = FairQueue()
        self._retry = RetryEstimate()
        self._slots: list[Answer | None] = [None] * slots
        self._to_clear: set[int] = set()
        self._to_cut: dict[int, int] = {}  # sequence: from which position on
        self._parking = Parking(park_s)
        self._can_cut = can_cut
        self._last_together = 0
        self._step: Step | None = None  # the one that runs
        self._step_answers: tuple[Answer, ...] = ()
        self._last_kind: StepKind = "decode"
        self._steps_issued = 0
        self._count = dict.fromkeys(
            ("accepted", "finished", "cancelled", "failed", "prefill", "decode", "failed_steps", "rows", "tokens"), 0
        )

    # Requests come and go

    def submit(self, request: Request, now: float) -> list[Effect]:
        """Accept a request: a QueuedEffect with its position, or its end if there is nothing to generate.

        Raises ContextLengthExceeded, Overloaded (the queue is full) or UsageError; then it was not accepted.
        """
        self._check(request)
        answer = Answer(request, self._context_tokens, self._vocabulary, now)
        effects: list[Effect] = []
        if answer.ended is None and None not in self._slots and len(self._waiting) >= self._queue_limit:
            other = gives_way(self._waiting.values(), request.client)
            if other is None:
                raise self._overloaded()
            effects += self._fail(other, self._overloaded(), now)
        self._count["accepted"] += 1
        self._live[request.id] = answer
        if answer.ended is not None:
            return effects + self._finish(answer, now)
        self._waiting[request.id] = answer
        self._queue.put(request.id, request.client)
        return effects + self._admit(now)

    def _overloaded(self) -> Overloaded:
        message = f"all {len(self._slots)} slots are busy and {len(self._waiting)} requests wait already"
        return Overloaded(message, retry_after_s=self._retry.after_s(len(self._waiting), len(self._slots)))

    def cancel(self, request_id: str, reason: str, now: float) -> list[Effect]:
        """End a request. Nothing happens if it has ended already: its end and the cancellation may cross."""
        answer = self._live.get(request_id)
        if answer is None:
            return []
        return self._fail(answer, RequestCancelled(reason, request_id=request_id), now)

    def distrust(self, request_ids: Iterable[str]) -> list[str]:
        """Some of what these requests have in the cache was computed wrong: it is made anew. Not while a step runs.

        One that has delivered tokens since it came here ends as tainted. Those that have begun and not ended, by name.
        """
        begun = []
        for name in request_ids:
            answer = self._live.get(name)
            if answer is None:
                continue
            answer.tainted |= answer.delivered
            if answer.slot is not None and answer.touched:
                answer.cached = 0
                self._to_clear.add(answer.slot)
            begun.append(name)
        return begun

    def expire(self, now: float) -> list[Effect]:
        """End the requests whose deadline has passed; between steps, take slots back for clients that have none."""
        effects: list[Effect] = []
        expired = [answer for answer in self._live.values() if self._parking.deadline(answer) <= now]
        for answer in reversed(expired):  # those in the queue first: none of them is given a slot on the way
            request = answer.request
            if (error := self._parking.error(answer)) is not None:
                effects += self._fail(answer, error, now)
                continue
            where = "in the queue" if answer.slot is None else f"after {answer.completion} tokens"
            message = f"the request's deadline of {request.deadline_s:g} s passed {where}"
            effects += self._fail(answer, DeadlineExceeded(message, request_id=request.id), now)
        while self._step is None and self._waiting:
            first = self._waiting[self._queue.order()[0]]
            loser = loses_slot(self._slots, first.request.client)
            if loser is None:
                break
            effects += self._displace(loser, now)
        return effects

    def next_deadline(self) -> float | None:
        """The instant at which `expire` or `next_step` next has something to do, if nothing comes before."""
        ends = min((self._parking.deadline(answer) for answer in self._live.values()), default=None)
        return None if ends is None else min(ends, self._parking.next_try())

    def retry(self) -> None:
        """Other peers answer than before: requests that wait for experts try again."""
        self._parking.retry()

    # Steps

    def next_step(self, now: float) -> Step | None:
        """The next rows to decode, or None. The step then runs until step_done or step_failed: one at a time."""
        if self._step is not None:
            raise RuntimeError(f"step {self._step.number} has not ended")
        slots = [answer for answer in self._slots if answer is not None and answer.deadline > now]
        running = self._parking.choose(slots, self._last_together, now)
        decoding = [answer for answer in running if answer.missing == 1]
        prefilling = [answer for answer in running if answer.missing > 1]
        if prefilling and (not decoding or self._last_kind == "decode"):
            limit = max(PREFILL_ROWS_BESIDE_DECODE, len(self._slots)) if decoding else self._batch_tokens
            return self._issue("prefill", share_rows(prefilling, min(limit, self._batch_tokens)))
        if decoding:
            return self._issue("decode", [(answer, 1) for answer in decoding])
        return None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for what the step that runs brings."""
        return any(answer.slot is not None for answer in self._step_answers)

    def step_done(self, step: Step, logits: NDArray[np.float32], now: float, *, mixed: bool = False) -> list[Effect]:
        """The step's rows are in the cache: sample where they asked for it.

        logits: float32 [number of rows that want them, n_vocab]. Some that are not finite fail their request alone.
        mixed: a peer of another numeric class than the placement's took part.
        """
        expected = (sum(part.wants_logits for part in step.parts), self._vocabulary.n_tokens)
        if logits.shape != expected:
            raise ValueError(f"logits of shape {logits.shape}, expected {expected}")
        effects: list[Effect] = []
        row = 0
        for part, answer in zip(step.parts, self._end_step(step), strict=True):
            if answer.slot is not None:  # it may have ended while the step ran
                self._parking.done(answer)
                answer.mixed |= mixed
                answer.cached += part.rows
                if part.wants_logits:
                    effects += self._advance(answer, logits[row], now)
            row += part.wants_logits
        self._count[step.kind] += 1
        self._count["rows"] += len(step.tokens)
        return effects

    def step_failed(self, step: Step, error: SwarmError, lost_sequences: bool, now: float) -> list[Effect]:
        """The step came to nothing: its requests fail with `error`, or wait, if it is experts that are missing.

        lost_sequences: the whole cache is gone (a new context); the other requests are prefilled again.
        """
        effects: list[Effect] = []
        answers = self._end_step(step)
        self._count["failed_steps"] += 1
        self._to_clear.update(step.clear)  # perhaps it never came to that, nor to the cuts
        self._to_cut.update(step.cut)
        if lost_sequences:
            for slot, other in enumerate(self._slots):
                if other is not None and other.touched:
                    other.cached = 0
                    self._to_clear.add(slot)
        left = [answer for answer in answers if answer.slot is not None]
        if self._parking.takes(error):
            self._parking.failed(left, error, now)
            for answer in left:
                self._restore(answer, step.kind)
            return effects
        for answer in left:
            effects += self._fail(answer, error, now)
        return effects

    def _restore(self, answer: Answer, kind: StepKind) -> None:
        """Undo what a failed step may have done to a sequence. A prompt's rows may have pushed out what came before."""
        assert answer.slot is not None
        if self._can_cut and kind == "decode" and answer.cached:
            self._to_cut[answer.slot] = answer.cached
        else:
            answer.cached = 0
            self._to_clear.add(answer.slot)

    # What people ask

    def queue_position(self, request_id: str) -> int | None:
        """0 = has a slot, 1 = next in the queue; None = not here (any more)."""
        if request_id in self._waiting:
            return self._queue.order().index(request_id) + 1
        return 0 if request_id in self._live else None

    def statistics(self) -> BatcherStatistics:
        count = self._count
        return BatcherStatistics(
            slots=len(self._slots),
            running=sum(answer is not None for answer in self._slots),
            waiting=len(self._waiting),
            parked=self._parking.parked,
            accepted=count["accepted"],
            finished=count["finished"],
            cancelled=count["cancelled"],
            failed=count["failed"],
            prefill_steps=count["prefill"],
            decode_steps=count["decode"],
            failed_steps=count["failed_steps"],
            rows_decoded=count["rows"],
            tokens_generated=count["tokens"],
        )

    # Inside

    def _check(self, request: Request) -> None:
        if request.id in self._live:
            raise UsageError(f"request id {request.id} is in use")
        prompt, generated = len(request.prompt_tokens), len(request.generated)
        # One more than the cache holds is an answer that filled it: the last token needs no cell.
        if prompt > self._context_tokens or prompt + generated > self._context_tokens + 1:
            so_far = f" and the answer so far {generated}" if generated else ""
            message = f"the prompt has {prompt} tokens{so_far}; the context holds {self._context_tokens}"
            raise ContextLengthExceeded(message, request_id=request.id)
        n_tokens = self._vocabulary.n_tokens
        of_text = (*request.prompt_tokens, *request.generated)
        for parameter, tokens in (("prompt", of_text), ("logit_bias", request.params.logit_bias)):
            for token in tokens:
                if not 0 <= token < n_tokens:
                    message = f"{parameter}: token id {token} is outside the model's vocabulary of {n_tokens}"
                    raise UsageError(message, parameter=parameter)

    def _issue(self, kind: StepKind, shares: list[tuple[Answer, int]]) -> Step:
        self._steps_issued += 1
        self._last_kind = kind
        self._step_answers = tuple(answer for answer, _ in shares)
        self._parking.stepped(self._step_answers, self._steps_issued)
        if not self._parking.is_alone(self._step_answers):
            self._last_together = self._steps_issued
        cut = sorted((slot, at) for slot, at in self._to_cut.items() if slot not in self._to_clear)
        self._step = make_step(self._steps_issued, kind, shares, clear=sorted(self._to_clear), cut=cut)
        for answer in self._step_answers:
            answer.touched = True
        self._to_clear.clear()
        self._to_cut.clear()
        return self._step

    def _end_step(self, step: Step) -> tuple[Answer, ...]:
        if self._step is not step:
            raise RuntimeError(f"step {step.number} is not the one that runs")
        answers = self._step_answers
        self._step, self._step_answers = None, ()
        return answers

    def _advance(self, answer: Answer, logits: NDArray[np.float32], now: float) -> list[Effect]:
        effects: list[Effect] = []
        try:
            token = answer.take(logits, now)
        except SwarmError as error:
            return self._fail(answer, error, now)
        if token is not None:
            self._count["tokens"] += 1
            effects.append(token)
        if answer.ended is not None:
            effects += self._finish(answer, now)
        return effects

    def _finish(self, answer: Answer, now: float) -> list[Effect]:
        self._count["finished"] += 1
        return [answer.finish(now), *self._release(answer, now)]

    def _fail(self, answer: Answer, error: SwarmError, now: float) -> list[Effect]:
        self._count["cancelled" if isinstance(error, RequestCancelled) else "failed"] += 1
        return [FailedEffect(answer.request.id, error), *self._release(answer, now)]

    def _release(self, answer: Answer, now: float) -> list[Effect]:
        """Forget a request and give its place to the next."""
        del self._live[answer.request.id]
        self._parking.forget(answer)
        self._waiting.pop(answer.request.id, None)
        self._queue.drop(answer.request.id)
        if answer.slot is not None:
            self._retry.held(now - answer.slot_since)
            self._vacate(answer)
        return self._admit(now)

    def _vacate(self, answer: Answer) -> None:
        assert answer.slot is not None
        self._slots[answer.slot] = None
        if answer.touched:
            self._to_clear.add(answer.slot)
        answer.slot = None

    def _displace(self, answer: Answer, now: float) -> list[Effect]:
        """An answer gives its slot to the first in the queue, and is then the first itself."""
        self._parking.forget(answer)
        self._vacate(answer)
        answer.displace()
        effects = self._admit(now)
        self._waiting[answer.request.id] = answer
        self._queue.put_back(answer.request.id)
        return [*effects, *self._admit(now)]

    def _admit(self, now: float) -> list[Effect]:
        """Give free slots to the head of the queue, and tell those whose place changed."""
        effects: list[Effect] = []
        while self._waiting and None in self._slots:
            answer = self._waiting.pop(self._queue.take())
            slot = self._slots.index(None)
            self._slots[slot] = answer
            answer.admitted(slot, now)
            effects.append(QueuedEffect(answer.request.id, 0))
        for position, answer in enumerate(map(self._waiting.__getitem__, self._queue.order()), 1):
            if answer.queue_position != position:
                answer.queue_position = position
                effects.append(QueuedEffect(answer.request.id, position))
        return effects
