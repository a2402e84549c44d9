"""A clock that leaves out this process's own sleep, so that nobody is blamed for it.

If this process was stopped or starved, others' messages lie unread in the sockets while the clock runs. So time counts
by at most one ordinary stretch between two looks at the clock, whatever really passed; it must be looked at regularly.
"""

from __future__ import annotations

import math


class OwnTime:
    """Seconds since the start that this process was awake for; `stretch_s` is the longest that one look adds."""

    __slots__ = ("_now", "_stretch_s", "_time", "steady_s")

    def __init__(self, now: float, stretch_s: float) -> None:
        self._now = now
        self._stretch_s = stretch_s
        self._time = 0.0
        self.steady_s = math.inf
        """Since this process last slept: what was sent meanwhile may only be read now."""

    def at(self, now: float) -> float:
        """The own time at an instant of the monotonic clock."""
        passed = max(0.0, now - self._now)
        self._time += min(passed, self._stretch_s)
        self.steady_s = 0.0 if passed > self._stretch_s else self.steady_s + passed
        self._now = max(self._now, now)
        return self._time
