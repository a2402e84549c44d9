"""Where audits meet live work: the decode thread shows each answer here, and goes on.

It costs the token a hash, and where the answer is chosen and there is room for it, a copy of its rows. What waits for
the judge is bounded: what finds no room is dropped, and counted. Whoever judges is woken once, and then comes to look:
waking another thread for every answer costs a token more than all the rest of it. Which request used which peer when is
remembered, too, for the day when a peer turns out to have cheated.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from backends.experts import F32
from backends.manifest import LayerExperts
from scheduler.audits import Audits, Chosen
from scheduler.dispatch import PeerRows
from swarmnode.leader.recomputing import Sample

WAITING_MAX: Final = 128
WAITING_OF_A_PEER_MAX: Final = 24  # so that one that is new does not crowd out the others
WAITING_BYTES_MAX: Final = 32 << 20
REQUESTS_REMEMBERED_MAX: Final = 4096  # far above the requests that can be under way


class AuditTap:
    """`audits` may be touched by whoever holds `lock`: the decode thread, in here, and the event loop.

    wake: called on the decode thread when something waits after `sleep`. Until the tap is open nothing is chosen:
    nobody would look at it.
    """

    def __init__(self, audits: Audits, wake: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.audits = audits
        self.open = False
        self._wake = wake
        self._asleep = False
        self._waiting: deque[tuple[Chosen, Sample]] = deque()
        self._of_a_peer: Counter[str] = Counter()
        self._bytes = 0
        self._step: tuple[str, ...] = ()
        self._used: dict[str, int] = {}  # in this step: peer, and the number of its last answer
        self._last: OrderedDict[str, dict[str, int]] = OrderedDict()  # by request

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
        """A peer's answer to `part` of activations x [T, n_in], of which it got the rows part.rows."""
        with self.lock:
            chosen = self.audits.answered(peer, len(part.experts)) if self.open else None
            self._used[peer] = self.audits.number(peer)
            if chosen is None:
                return
            if len(self._waiting) >= WAITING_MAX or self._of_a_peer[peer] >= WAITING_OF_A_PEER_MAX:
                self.audits.dropped(chosen)
                return
            sample = _sample(chosen, layer, x, part, weights, answer, rounded, ask_f32)
            if self._bytes + sample.nbytes > WAITING_BYTES_MAX:
                self.audits.dropped(chosen)
                return
            self._waiting.append((chosen, sample))
            self._of_a_peer[peer] += 1
            self._bytes += sample.nbytes
            asleep, self._asleep = self._asleep, False
        if asleep:
            self._wake()

    def used_since(self, peer: str, number: int) -> list[str]:
        """The requests that a peer's answers after that number went into. All of those that shared a step with one."""
        self._note_step()
        return [request for request, last in self._last.items() if last.get(peer, 0) > number]

    def _note_step(self) -> None:
        if self._used:
            for request in self._step:
                self._last.setdefault(request, {}).update(self._used)
                self._last.move_to_end(request)
            self._used = {}
            while len(self._last) > REQUESTS_REMEMBERED_MAX:
                self._last.popitem(last=False)

    # -- event loop ---------------------------------------------------------------------------------------------

    def take(self) -> tuple[Chosen, Sample] | None:
        """The answer that waits longest."""
        with self.lock:
            if not self._waiting:
                return None
            chosen, sample = self._waiting.popleft()
            self._of_a_peer[chosen.peer] -= 1
            self._bytes -= sample.nbytes
            return chosen, sample

    def sleep(self) -> bool:
        """Have `wake` called as soon as something waits. False if something does."""
        with self.lock:
            self._asleep = not self._waiting
            return self._asleep


def _sample(
    chosen: Chosen,
    layer: LayerExperts,
    x: F32,
    part: PeerRows,
    weights: F32 | None,
    answer: F32,
    rounded: bool,
    ask_f32: bool,
) -> Sample:
    """Some of an answer's rows, or of its tokens' sums: as many as were chosen, at least one."""
    if chosen.rows >= len(part.experts):  # what decoding asks for: no time must be lost here
        return Sample(
            chosen.peer, layer, x[part.rows], part.tokens, part.experts, weights, answer.copy(), rounded,
            ask_f32, whole=True,
        )  # fmt: skip
    random = np.random.default_rng(chosen.seed)
    if weights is None:
        rows = np.arange(len(part.experts))
        if chosen.rows < len(rows):
            rows = np.sort(random.choice(len(rows), chosen.rows, replace=False))
        kept = answer[rows]
    else:
        counts = np.bincount(part.tokens, minlength=len(answer))
        order = random.permutation(len(answer))
        most = max(1, int(np.searchsorted(np.cumsum(counts[order]), chosen.rows, side="right")))
        tokens = np.sort(order[:most])
        rows = np.flatnonzero(np.isin(part.tokens, tokens))
        kept = answer[tokens]
    sent, which = np.unique(part.tokens[rows], return_inverse=True)
    return Sample(
        chosen.peer,
        layer,
        x[part.rows[sent]].copy(),
        which.astype(np.int32),
        part.experts[rows],
        None if weights is None else weights[rows],
        kept.copy(),
        rounded,
        ask_f32,
        whole=len(kept) == len(answer),
    )
