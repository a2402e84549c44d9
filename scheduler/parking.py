"""Requests whose step came to nothing because nobody could compute some expert: they wait for it, and hold up nobody.

A step of several requests fails for all when one of them needs what is missing. So each is tried again by itself, at
once; who then fails is *parked*: it keeps its place and what it has, and is tried again after a while that grows, or as
soon as there is another routing. Whoever gets through goes on, by itself as long as anybody waits. A parked request
ends with the error that it met when its own deadline comes, or after `park_s`, whichever is first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capabilities.errors import ExpertsUnavailable, NotReady, SwarmError
from scheduler.answer import Answer

RETRY_S_MIN, RETRY_S_MAX = 0.25, 2.0  # a try costs the others a step that fails, usually at once


@dataclass(slots=True)
class _Place:
    """How a request stands that met a missing expert. `since` counts from the first failure without a success after."""

    since: float
    error: SwarmError
    retry_at: float = -math.inf
    wait_s: float = 0.0  # 0: it has not failed alone yet


class Parking:
    """park_s: the longest that a request waits here; 0: it is not parked at all."""

    def __init__(self, park_s: float) -> None:
        self._park_s = park_s
        self._places: dict[Answer, _Place] = {}
        self._alone: dict[Answer, int] = {}  # who is tried alone, with the number of its last step

    @property
    def parked(self) -> int:
        return sum(place.wait_s > 0 for place in self._places.values())

    def takes(self, error: SwarmError) -> bool:
        """Whether requests wait after such an error, rather than fail."""
        return self._park_s > 0 and isinstance(error, ExpertsUnavailable | NotReady)

    def failed(self, answers: Sequence[Answer], error: SwarmError, now: float) -> None:
        """The step of these requests met a missing expert."""
        for answer in answers:
            place = self._places.setdefault(answer, _Place(now, error))
            place.error = error
            self._alone.setdefault(answer, 0)
            if len(answers) == 1:
                place.wait_s = min(max(2 * place.wait_s, RETRY_S_MIN), RETRY_S_MAX)
                place.retry_at = now + place.wait_s

    def done(self, answer: Answer) -> None:
        """A step of this request came through."""
        if self._places.pop(answer, None) is not None and not self._places:
            self._alone.clear()

    def forget(self, answer: Answer) -> None:
        """The request has ended."""
        self._alone.pop(answer, None)
        self.done(answer)

    def retry(self) -> None:
        """There is another routing: everybody may try again, together."""
        for place in self._places.values():
            place.retry_at, place.wait_s = -math.inf, 0.0
        self._alone.clear()

    def deadline(self, answer: Answer) -> float:
        """When the request ends if nothing changes."""
        place = self._places.get(answer)
        return answer.deadline if place is None else min(answer.deadline, place.since + self._park_s)

    def error(self, answer: Answer) -> SwarmError | None:
        """What a request waits for, as the error that it met; None if it does not wait."""
        place = self._places.get(answer)
        return None if place is None else place.error

    def next_try(self) -> float:
        """When the next parked request is tried again."""
        return min((place.retry_at for place in self._places.values()), default=math.inf)

    def choose(self, running: Iterable[Answer], last_together: int, now: float) -> list[Answer]:
        """Of these requests, those for the next step: all who need not be alone, or, in turn, one who must."""
        able = [a for a in running if (place := self._places.get(a)) is None or place.retry_at <= now]
        together = [answer for answer in able if answer not in self._alone]
        alone = [answer for answer in able if answer in self._alone]
        if not alone:
            return together
        first = min(alone, key=self._alone.__getitem__)
        return [first] if not together or self._alone[first] <= last_together else together

    def is_alone(self, answers: Sequence[Answer]) -> bool:
        """Whether a step is of one who must be alone."""
        return len(answers) == 1 and answers[0] in self._alone

    def stepped(self, answers: Sequence[Answer], number: int) -> None:
        """A step of that number was issued."""
        for answer in answers:
            if answer in self._alone:
                self._alone[answer] = number
