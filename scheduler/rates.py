"""How often somebody may: tokens that come back with time."""

from __future__ import annotations


class TokenBucket:
    """Holds up to `burst` tokens and gains `per_s` a second. Instants are seconds of one monotonic clock."""

    __slots__ = ("_burst", "_now", "_per_s", "_tokens")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._now = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take so many if they are there. False, and nothing taken, if not."""
        if self.missing(now, tokens) > 0:
            return False
        self._tokens -= tokens
        return True

    def owe(self, now: float, tokens: float) -> float:
        """Take so many whether they are there or not; the seconds until the debt is paid."""
        self.missing(now, 0)
        self._tokens -= tokens
        return max(0.0, -self._tokens / self._per_s)

    def missing(self, now: float, tokens: float = 1.0) -> float:
        """How many of `tokens` are not there yet."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._now) * self._per_s)
        self._now = max(self._now, now)
        return max(0.0, tokens - self._tokens)
