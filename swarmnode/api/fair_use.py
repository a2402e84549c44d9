"""Whose answer begins next, where several clients ask this daemon: each has a share, and waits visibly.

The leader sees one peer here, whoever asks through it; so keys and addresses are told apart here, by the same order in
which the leader serves its peers (scheduler/fair_queue.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from scheduler.fair_queue import FairQueue
from scheduler.rates import TokenBucket
from swarmnode.api import limits
from swarmnode.api.errors import Refusal
from swarmnode.config_sections import ApiConfig

_MINUTE_S = 60.0


@dataclass(eq=False)
class _Waiter:
    on_place: Callable[[int], None]
    place: int = 0
    turn: trio.Event = field(default_factory=trio.Event)


class FairUse:
    """All answers of one daemon's HTTP clients. `running` counts those whose turn it is."""

    def __init__(self, config: ApiConfig) -> None:
        self.running = 0
        self._config = config
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._rates: OrderedDict[str, TokenBucket] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def admit(self, client: str, answers: int) -> None:
        """Refusal, 429, if the client may not have so many more now."""
        has, most = self._queue.of(client), self._config.waiting_per_client
        if has + answers > most:
            message = f"you have {has} answers under way or waiting; {most} are allowed"
            raise Refusal(429, message, "too_many_answers", retry=True)
        if self.waiting + answers > limits.WAITING_MAX:
            raise Refusal(429, f"{self.waiting} answers wait here already", "overloaded", retry=True)
        if self._config.answers_per_minute:
            self._take(client, answers)

    def _take(self, client: str, answers: int) -> None:
        now, most = trio.current_time(), self._config.answers_per_minute
        rate = self._rates.pop(client, None) or TokenBucket(most, most / _MINUTE_S, now)
        self._rates[client] = rate
        if len(self._rates) > limits.CLIENTS_REMEMBERED_MAX:
            self._rates.popitem(last=False)
        if not rate.take(now, answers):
            seconds = math.ceil(rate.missing(now, answers) * _MINUTE_S / most)
            message = f"you may begin {most} answers a minute: wait {seconds} s"
            raise Refusal(429, message, "rate_limit_exceeded", headers={"retry-after": str(seconds)})

    @asynccontextmanager
    async def turn(self, client: str, on_place: Callable[[int], None]) -> AsyncIterator[None]:
        """Wait for the client's turn, and have it until the context is left. `on_place` hears the place meanwhile."""
        waiter = _Waiter(on_place)
        self._queue.put(waiter, client)
        self._next()
        try:
            await waiter.turn.wait()
            yield
        finally:
            self.running -= waiter.turn.is_set()
            self._queue.drop(waiter)
            self._next()

    def _next(self) -> None:
        while self._queue and self.running < self._config.parallel:
            self._queue.take().turn.set()
            self.running += 1
        for place, waiter in enumerate(self._queue.order(), 1):
            if waiter.place != place:
                waiter.place = place
                waiter.on_place(place)
