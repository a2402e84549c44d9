"""Where the queue's order is not enough: clients that find it full, or all slots taken by somebody's long answers.

A full queue makes room for a client that has little in it: the newest request of the client with the most gives way,
before it was begun. And where the first in the queue has nothing running while another client has several, the one of
those with the fewest tokens gives its slot back: it waits with the tokens that it has, and goes on as if nothing had
happened. That happens to an answer once at most, so that it ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from scheduler.answer import Answer

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1, 60  # what a refused client is told: not at once, and nobody waits for longer
_ANSWER_S = 5.0  # what an answer holds a slot for, before any was seen
_SMOOTHING = 0.2  # weight of the newest answer


def gives_way(waiting: Iterable[Answer], client: str) -> Answer | None:
    """Whose place in a full queue a newcomer of this client may have, if anybody's. `waiting`: in order of coming."""
    able = [answer for answer in waiting if not answer.displaced]
    counts = Counter(answer.request.client for answer in able)
    if not counts:
        return None
    most, count = counts.most_common(1)[0]
    if count <= counts[client] + 1:
        return None
    return next(answer for answer in reversed(able) if answer.request.client == most)


def loses_slot(slots: Sequence[Answer | None], client: str) -> Answer | None:
    """Who gives his slot to this client, the first in the queue, if somebody should."""
    held = [answer for answer in slots if answer is not None]
    counts = Counter(answer.request.client for answer in held)
    if counts[client] or len(held) < len(slots):
        return None
    able = [answer for answer in held if counts[answer.request.client] > 1 and not answer.displaced]
    return max(able, key=lambda a: (counts[a.request.client], -a.completion), default=None)


class RetryEstimate:
    """When a refused request may be worth another try: once those that wait have had their turn."""

    def __init__(self) -> None:
        self._answer_s = _ANSWER_S

    def held(self, seconds: float) -> None:
        """An answer held its slot for so long."""
        self._answer_s += _SMOOTHING * (seconds - self._answer_s)

    def after_s(self, waiting: int, slots: int) -> int:
        """In whole seconds, for so many that wait."""
        return min(max(math.ceil(self._answer_s * (waiting + 1) / slots), RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
