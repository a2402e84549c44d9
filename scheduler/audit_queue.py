"""Answers that wait to be recomputed: bounded, and nobody's are in front of everybody else's.

Each peer has a queue of its own, and the peers take turns; every second turn is a suspect's, if one waits: six audits
decide about it. Of a peer's answers the one of its stretch (audit_choice.py) comes first, then the newest: what a peer
does now says more than what it did. Where there is no room the longest queue makes some. It loses one that is not of a
stretch, by lot: the secret's, so that nobody knows which answers of a busy hour nobody will look at.

**How late.** With n peers that have answers waiting, of which s are suspected, a peer's turn comes within 2 n audits,
and a suspect's within 2 s. So one whose waiting answers are all wrong is suspected after 2 n audits of anybody's
answers at most, and out after 10 s more, if so many of its answers wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from scheduler.audit_choice import Chosen

T = TypeVar("T")

WAITING_MAX: Final = 1024  # four for each of as many peers as there may be members
WAITING_OF_A_PEER_MAX: Final = 24  # twice what decides about one that is new
WAITING_BYTES_MAX: Final = 32 << 20  # 800 decode steps' answers of a layer 2,048 wide


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """An answer, and what it takes to recompute it. nbytes: of the latter."""

    chosen: Chosen
    sample: T
    nbytes: int


class _Queue(Generic[T]):
    """One peer's."""

    def __init__(self) -> None:
        self.waiting: list[Waiting[T]] = []
        self.nbytes = 0

    @property
    def length(self) -> float:
        """As a share of the room that there is for all."""
        return max(len(self.waiting) / WAITING_MAX, self.nbytes / WAITING_BYTES_MAX)


class AuditQueue(Generic[T]):
    """suspected: whether something is held against a peer now."""

    def __init__(self, suspected: Callable[[str], bool]) -> None:
        self._suspected = suspected
        self._queues: OrderedDict[str, _Queue[T]] = OrderedDict()  # whose turn is next comes first
        self._count = self._bytes = 0
        self._suspects_turn = True

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._bytes

    def has_room(self, chosen: Chosen) -> bool:
        """Whether to `add` it at all: else it would be lost at once."""
        queue = self._queues.get(chosen.peer)
        if chosen.sure or queue is None or len(queue.waiting) < WAITING_OF_A_PEER_MAX:
            return True
        return any(_loss(each.chosen) < _loss(chosen) for each in queue.waiting)

    def add(self, waiting: Waiting[T]) -> list[Chosen]:
        """One more. What finds no room any more, itself perhaps."""
        queue = self._queues.setdefault(waiting.chosen.peer, _Queue())
        queue.waiting.append(waiting)
        self._count_in(queue, waiting, 1)
        lost = []
        if len(queue.waiting) > WAITING_OF_A_PEER_MAX:
            lost.append(self._lose(waiting.chosen.peer))
        while self._count > WAITING_MAX or self._bytes > WAITING_BYTES_MAX:
            lost.append(self._lose(max(self._queues, key=lambda peer: self._queues[peer].length)))
        return lost

    def take(self) -> Waiting[T] | None:
        """The next to judge, if any waits."""
        if not self._queues:
            return None
        peer = next(iter(self._queues))
        if self._suspects_turn:
            peer = next((each for each in self._queues if self._suspected(each)), peer)
        self._suspects_turn = not self._suspects_turn
        self._queues.move_to_end(peer)
        waiting = self._queues[peer].waiting
        return self._remove(peer, next((at for at, each in enumerate(waiting) if each.chosen.sure), len(waiting) - 1))

    def forget(self, peer: str) -> list[Chosen]:
        """It needs no judging any more. What waited of it."""
        forgotten = []
        while peer in self._queues:
            forgotten.append(self._remove(peer, 0).chosen)
        return forgotten

    def _lose(self, peer: str) -> Chosen:
        """By lot; where all are of a stretch, the oldest."""
        waiting = self._queues[peer].waiting
        return self._remove(peer, min(range(len(waiting)), key=lambda at: _loss(waiting[at].chosen))).chosen

    def _remove(self, peer: str, at: int) -> Waiting[T]:
        queue = self._queues[peer]
        removed = queue.waiting[at]
        del queue.waiting[at]
        self._count_in(queue, removed, -1)
        if not queue.waiting:
            del self._queues[peer]
        return removed

    def _count_in(self, queue: _Queue[T], waiting: Waiting[T], sign: int) -> None:
        queue.nbytes += sign * waiting.nbytes
        self._bytes += sign * waiting.nbytes
        self._count += sign


def _loss(chosen: Chosen) -> tuple[bool, int]:
    """Whoever has the least is lost first."""
    return chosen.sure, chosen.number if chosen.sure else chosen.seed
