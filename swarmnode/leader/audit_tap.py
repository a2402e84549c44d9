"""Where audits meet live work: the decode thread shows each answer here, and goes on.

It keeps what it is shown until the step has ended, or the judge comes to look, and draws then which answers are chosen:
one after the other that costs a token little, and in the middle of a layer much more. What waits for the judge is
bounded (scheduler/audit_queue.py): what finds no room is dropped, and counted. Whoever judges is woken once, and then
comes to look: waking another thread for every answer costs more than all the rest. Which request used which peer when
is remembered, too, for the day when a peer turns out to have cheated.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.experts import F32
from backends.manifest import LayerExperts
from capabilities.errors import SwarmError
from scheduler.audit_choice import Chosen
from scheduler.audit_queue import AuditQueue, Waiting
from scheduler.audit_tests import Change
from scheduler.audits import Audits
from scheduler.dispatch import PeerRows
from swarmnode.leader.recomputing import Sample

SHOWN_BYTES_MAX: Final = 4 << 20  # a decode step of a large model takes a few MB, a layer of a prefill far more
REQUESTS_REMEMBERED_MAX: Final = 4096  # far above the requests that can be under way


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    """An answer as `answered` gets it."""

    peer: str
    layer: LayerExperts
    x: F32
    part: PeerRows
    weights: F32 | None
    answer: F32
    rounded: bool
    ask_f32: bool
    requests: tuple[str, ...]


class AuditTap:
    """`audits` may be touched by whoever holds `lock`: the decode thread, in here, and the event loop.

    wake: called on the decode thread when something was shown after `sleep`. Until the tap is open nothing is chosen:
    nobody would look at it.
    """

    def __init__(self, audits: Audits, wake: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.audits = audits
        self.open = False
        self._wake = wake
        self._asleep = False
        self._shown: deque[_Shown] = deque()
        self._refused: deque[tuple[str, tuple[Change, ...], SwarmError]] = deque()  # each peer once
        self._shown_bytes = 0
        self._waiting: AuditQueue[Sample] = AuditQueue(audits.suspected)
        self._step: tuple[str, ...] = ()
        self._used: dict[str, int] = {}  # in this step: peer, and the number of its last answer
        self._last: OrderedDict[str, dict[str, int]] = OrderedDict()  # by request
        self._of: dict[tuple[str, int], tuple[str, ...]] = {}  # of what is chosen and not judged yet: the requests
        self._waits: Counter[str] = Counter()  # by request: how many of these

    # -- decode thread ------------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[str]) -> None:
        self._note_step()
        self._step = tuple(requests)

    def answered(
        self,
        peer: str,
        layer: LayerExperts,
        x: F32,
        part: PeerRows,
        weights: F32 | None,
        answer: F32,
        *,
        rounded: bool,
        ask_f32: bool,
    ) -> None:
        """A peer's answer to `part` of activations x [T, n_in], of which it got the rows part.rows. Nobody may change
        the arrays any more."""
        self._shown.append(_Shown(peer, layer, x, part, weights, answer, rounded, ask_f32, self._step))
        self._shown_bytes += x.nbytes + answer.nbytes
        if self._shown_bytes >= SHOWN_BYTES_MAX:
            self.look()
        if self._asleep:
            self._asleep = False
            self._wake()

    def refused(self, peer: str, error: SwarmError) -> None:
        """A peer's answer had values that are not finite, and others computed it."""
        with self.lock:
            self._look()
            changes = self.audits.refused(peer) if self.open else ()
        if changes:
            self._refused.append((peer, changes, error))
            self._wake()

    def used_since(self, peer: str, number: int) -> list[str]:
        """The requests that a peer's answers after that number went into. All of those that shared a step with one."""
        self._note_step()
        return [request for request, last in self._last.items() if last.get(peer, 0) > number]

    def _note_step(self) -> None:
        with self.lock:
            self._look()
            if not self._used:
                return
            for request in self._step:
                self._last.setdefault(request, {}).update(self._used)
                self._last.move_to_end(request)
            while len(self._last) > REQUESTS_REMEMBERED_MAX:
                self._last.popitem(last=False)
            self._used = {}

    # -- either -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Choose among the answers that were shown."""
        with self.lock:
            self._look()

    def _look(self) -> None:
        self._shown_bytes = 0
        while self._shown:
            shown = self._shown.popleft()
            chosen = self.audits.answered(shown.peer, len(shown.part.experts)) if self.open else None
            self._used[shown.peer] = self.audits.number(shown.peer)
            if chosen is not None and not self._waiting.has_room(chosen):
                self.audits.dropped(chosen)
            elif chosen is not None:
                sample = _sample(chosen, shown)
                self._of[chosen.peer, chosen.number] = shown.requests
                self._waits.update(shown.requests)
                self._drop(self._waiting.add(Waiting(chosen, sample, sample.nbytes)))

    def _drop(self, lost: Sequence[Chosen]) -> None:
        for chosen in lost:
            self.audits.dropped(chosen)
            self._end(chosen)

    def _end(self, chosen: Chosen) -> tuple[str, ...]:
        requests = self._of.pop((chosen.peer, chosen.number), ())
        for request in requests:
            self._waits[request] -= 1
            if not self._waits[request]:
                del self._waits[request]
        return requests

    # -- event loop ---------------------------------------------------------------------------------------------

    def take(self) -> tuple[Chosen, Sample] | None:
        """The answer that is judged next."""
        with self.lock:
            self._look()
            waiting = self._waiting.take()
            return None if waiting is None else (waiting.chosen, waiting.sample)

    def convicted(self) -> tuple[str, tuple[Change, ...], SwarmError] | None:
        """A peer whose answers were refused too often, what that changed, and the last answer's error."""
        return self._refused.popleft() if self._refused else None

    def dropped(self, chosen: Chosen) -> None:
        """What was taken is not judged after all."""
        with self.lock:
            self._drop((chosen,))

    def judged(self, chosen: Chosen) -> tuple[str, ...]:
        """What was taken needs no judging any more. The requests that it went into."""
        with self.lock:
            return self._end(chosen)

    def waits(self, request: str) -> bool:
        """Whether something that was chosen of a request's answers is not judged yet."""
        with self.lock:
            self._look()
            return request in self._waits

    def suspects(self, request: str) -> bool:
        """Whether something is held against a peer that had a part in a request."""
        self._note_step()
        with self.lock:
            return any(map(self.audits.suspected, self._last.get(request, ())))

    def forget(self, peer: str) -> None:
        """It is quarantined: what waits of it needs no judging."""
        with self.lock:
            self._look()
            self._drop(self._waiting.forget(peer))

    def sleep(self) -> bool:
        """Have `wake` called as soon as something is shown. False if something was, or waits."""
        self._asleep = True  # first: what is shown from now on wakes
        if self._shown or self._waiting or self._refused:
            self._asleep = False
        return self._asleep


def _sample(chosen: Chosen, shown: _Shown) -> Sample:
    """Some of an answer's rows, or of its tokens' sums: as many as were chosen, at least one."""
    part, answer, weights = shown.part, shown.answer, shown.weights
    if chosen.rows >= len(part.experts):
        sent, tokens, experts, kept = part.rows, part.tokens, part.experts, answer
    else:
        rows, of_answer = _some(chosen, shown)
        which, inverse = np.unique(part.tokens[rows], return_inverse=True)
        sent, tokens, experts, kept = part.rows[which], inverse.astype(np.int32), part.experts[rows], answer[of_answer]
        weights = None if weights is None else weights[rows]
    whole = len(kept) == len(answer)
    return Sample(
        shown.peer, shown.layer, shown.x[sent], tokens, experts, weights, kept, shown.rounded, shown.ask_f32, whole
    )


def _some(chosen: Chosen, shown: _Shown) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which of the rows that were asked, and which of those that were answered."""
    part, random = shown.part, np.random.default_rng(chosen.seed)
    if shown.weights is None:
        rows = np.sort(random.choice(len(part.experts), chosen.rows, replace=False))
        return rows, rows
    counts = np.bincount(part.tokens, minlength=len(shown.answer))
    order = random.permutation(len(shown.answer))
    most = max(1, int(np.searchsorted(np.cumsum(counts[order]), chosen.rows, side="right")))
    tokens = np.sort(order[:most])
    return np.flatnonzero(np.isin(part.tokens, tokens)), tokens
