"""What a swarm's status was a moment ago: whoever asks often does not make this node ask its leader as often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from swarmnode.api import limits

T = TypeVar("T")


class Seen(Generic[T]):
    """Remembers what `look(name)` gave for a short while. Those who ask meanwhile wait for one look."""

    def __init__(self, look: Callable[[str], Awaitable[T]]) -> None:
        self._look = look
        self._turn = trio.Lock()
        self._seen: OrderedDict[str, tuple[float, T]] = OrderedDict()

    async def now(self, name: str = "") -> T:
        async with self._turn:
            at, value = self._seen.get(name, (0.0, None))
            if value is None or trio.current_time() - at >= limits.SEEN_SECONDS:
                value = await self._look(name)
                self._seen[name] = trio.current_time(), value
                if len(self._seen) > limits.SEEN_MAX:
                    self._seen.popitem(last=False)
            return value
