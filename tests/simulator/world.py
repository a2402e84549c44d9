"""Time and order: one queue of things to happen, and a hash of everything that did."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable

TRACE_LINES = 4000
AT_ONE_INSTANT_MAX = 20_000


class StandsStill(Exception):
    """Things go on happening at one instant: somebody turns in a circle."""


class World:
    """Seconds since the beginning, exact order, and randomness that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._at_once = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def chance(self, purpose: str) -> random.Random:
        """A source of its own for each purpose, so that one's use does not shift another's numbers."""
        return random.Random(f"{self.seed} {purpose}")

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it then, after whatever was planned for the same instant before."""
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, action))

    def note(self, line: str) -> None:
        """Something happened: it goes into the history."""
        line = f"{self.now:.4f} {line}"
        self.trace.append(line)
        self._hash.update(line.encode())

    def run(self, until: float) -> None:
        """Let everything happen up to that instant."""
        while self._queue and self._queue[0][0] <= until:
            now, _, action = heapq.heappop(self._queue)
            self._at_once = self._at_once + 1 if now == self.now else 0
            if self._at_once > AT_ONE_INSTANT_MAX:
                raise StandsStill(f"time stands still at {now:.4f}")
            self.now = now
            self.events += 1
            action()
        self.now = until

    @property
    def trace_hash(self) -> str:
        """Of the history so far."""
        return self._hash.hexdigest()
