"""How much of this machine's time others may have for work that serves nobody's request.

Each asker has an allowance of its own, and all together have one: strangers who take turns get no more than that. A
piece of work is let through while there is something left and charged when it is done, by what it really took; so one
piece may overdraw, and its debt is waited for. Instants are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from scheduler.rates import TokenBucket

_LEFT_MIN: Final = 0.5  # seconds of computing: with less than that left, nothing is begun


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds of computing at once, and what comes back of them each second."""

    burst_s: float
    per_s: float


class Allowance:
    """`askers_max`: how many are remembered; of more, the one that was served longest ago begins anew."""

    def __init__(self, all_together: Rate, each: Rate, askers_max: int, now: float) -> None:
        self._total = TokenBucket(all_together.burst_s, all_together.per_s, now)
        self._total_rate, self._each = all_together, each
        self._askers_max = askers_max
        self._askers: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_s(self, asker: str, now: float) -> float:
        """Seconds until the asker may have something computed; 0: now."""
        own = self._bucket(asker, now).missing(now, _LEFT_MIN) / self._each.per_s
        return max(own, self._total.missing(now, _LEFT_MIN) / self._total_rate.per_s)

    def charge(self, asker: str, seconds: float, now: float) -> None:
        """So much was computed for the asker."""
        self._bucket(asker, now).owe(now, seconds)
        self._total.owe(now, seconds)

    def _bucket(self, asker: str, now: float) -> TokenBucket:
        bucket = self._askers.pop(asker, None) or TokenBucket(self._each.burst_s, self._each.per_s, now)
        self._askers[asker] = bucket
        if len(self._askers) > self._askers_max:
            self._askers.popitem(last=False)
        return bucket
