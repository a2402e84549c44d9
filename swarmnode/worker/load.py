"""How busy this node's kernels are: seconds of computing a second, over the last while.

A heartbeat carries it every 15 s, and `swarmctl top` asks more often, so it is read off a counter at whatever instants
somebody asks, and spans at least a heartbeat where there is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from capabilities.advert import LOAD_MAX

WINDOW_S: Final = 15.0  # a heartbeat's interval: what one says covers the time since the last
SAMPLES_MAX: Final = 64  # at four a second the window is full; beyond, the oldest go first and it gets shorter
SAMPLE_S_MIN: Final = 0.25


class LoadMeter:
    """Thousandths of the recent time that were spent in kernels, 0 to LOAD_MAX.

    compute_us: a counter of microseconds that only grows. clock: seconds, monotonic.
    """

    def __init__(self, compute_us: Callable[[], int], clock: Callable[[], float]) -> None:
        self._compute_us = compute_us
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), compute_us())], SAMPLES_MAX)

    def __call__(self) -> int:
        now, computed = self._clock(), self._compute_us()
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        if now - self._samples[-1][0] >= SAMPLE_S_MIN:
            self._samples.append((now, computed))
        if now - since < SAMPLE_S_MIN:
            return 0
        return min(LOAD_MAX, round((computed - before) / ((now - since) * 1e6) * LOAD_MAX))
