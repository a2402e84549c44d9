"""Whose turn it is among those who wait, so that nobody's many requests keep another's only one waiting.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with requests of equal size: a request's tag is one more than that
of its client's last one, but at least the tag of whoever was served last; the lowest tag goes first, and of equal ones
whoever came first. So clients that ask one thing at a time are served as they come, and of one that asks a hundred
things all but the first wait behind them. A tag never changes: a place in the queue only grows by newcomers who have
less under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairQueue(Generic[K]):
    """Requests by their keys, from `put` to `drop`. It remembers a client only as long as a request of it is here."""

    def __init__(self) -> None:
        self._waiting: dict[K, tuple[int, int]] = {}  # tag, and how many came before
        self._clients: dict[K, str] = {}  # of all that are here, waiting or served
        self._here: Counter[str] = Counter()
        self._last: dict[str, int] = {}  # the tag of a client's newest request
        self._now = 0  # the highest tag that was served
        self._came = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def put(self, key: K, client: str) -> None:
        tag = max(self._now, self._last.get(client, -1) + 1)
        self._waiting[key] = tag, self._came
        self._last[client] = tag
        self._clients[key] = client
        self._here[client] += 1
        self._came += 1

    def put_back(self, key: K) -> None:
        """One that was taken waits again, before all others."""
        self._waiting[key] = self._now, -1

    def order(self) -> list[K]:
        """Those who wait, the next one first."""
        return sorted(self._waiting, key=self._waiting.__getitem__)

    def take(self) -> K:
        """The next one; from now on it is served. IndexError if nobody waits."""
        key = self.order()[0]
        self._now = max(self._now, self._waiting.pop(key)[0])
        return key

    def drop(self, key: K) -> None:
        """It has ended, waiting or served. Nothing happens if it is not here."""
        self._waiting.pop(key, None)
        client = self._clients.pop(key, None)
        if client is None:
            return
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client], self._last[client]

    def of(self, client: str) -> int:
        """How many of a client's are here, waiting or served."""
        return self._here.get(client, 0)
