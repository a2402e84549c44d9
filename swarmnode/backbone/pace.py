"""How fast one peer may speak: beyond that it is read more slowly, and mistakes count as many messages."""

from __future__ import annotations

import trio

from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.net.interface import PeerId


class Pace:
    """Remembers each peer's rate over its streams."""

    def __init__(self) -> None:
        self._rates: dict[PeerId, TokenBucket] = {}

    async def spoke(self, peer: PeerId, messages: float = 1) -> None:
        """The peer said so much: returns when it may go on."""
        await trio.sleep(self._owe(peer, messages))

    def erred(self, peer: PeerId) -> None:
        """The peer sent what no honest one sends; what it says next waits for that."""
        self._owe(peer, limits.LEADERSHIP_MISTAKE_COST)

    def _owe(self, peer: PeerId, messages: float) -> float:
        now = trio.current_time()
        rate = self._rates.pop(peer, None) or TokenBucket(
            limits.LEADERSHIP_MEMBER_FRAMES_BURST, limits.LEADERSHIP_MEMBER_FRAMES_PER_SECOND, now
        )
        self._rates[peer] = rate  # as the last: those that were silent longest are forgotten first
        if len(self._rates) > limits.LEADERSHIP_PACES_MAX:
            del self._rates[next(iter(self._rates))]
        return rate.owe(now, messages)
