"""Whether a volunteer's machine is to work now: by the hours, the power, the network and whether somebody uses it.

A cause to stop counts at once; work begins again when there has been none for RETURN_S, so that a plug that is pulled
twice does not move experts through the swarm twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from capabilities.errors import UsageError

RETURN_S = 60.0
DAY_MINUTES = 24 * 60
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(r"(?:([a-z,-]+) +)?(\d{1,2}):(\d{2}) ?- ?(\d{1,2}):(\d{2})", re.ASCII)
_HINT = 'Write for example "22:00-07:00", "sat,sun 00:00-24:00" or "mon-fri 18:30-23:00".'


@dataclass(frozen=True, slots=True)
class Window:
    """A part of some days of the week, in minutes since midnight; one whose end is not after its begin goes on into the
    next day."""

    days: frozenset[int]  # 0 = Monday
    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Raises UsageError for what is none."""
        found = _WINDOW.fullmatch(text.strip().lower())
        if found is None:
            raise UsageError(f"{text!r:.40} is no time of day to work in", hint=_HINT)
        begin, end = (int(found[i]) * 60 + int(found[i + 1]) for i in (2, 4))
        if begin >= DAY_MINUTES or end > DAY_MINUTES or int(found[3]) > 59 or int(found[5]) > 59:
            raise UsageError(f"{text!r:.40} has a time that no clock shows", hint=_HINT)
        return cls(_days(found[1], text), begin, end)

    def holds(self, weekday: int, minute: int) -> bool:
        """Whether this minute of that day (0 = Monday) is in it."""
        if self.begin < self.end:
            return weekday in self.days and self.begin <= minute < self.end
        late = weekday in self.days and minute >= self.begin
        return late or ((weekday - 1) % 7 in self.days and minute < self.end)


def _days(words: str | None, text: str) -> frozenset[int]:
    if words is None:
        return frozenset(range(7))
    days: set[int] = set()
    for part in words.split(","):
        first, _, last = part.partition("-")
        if first not in _DAYS or (last or first) not in _DAYS or part.endswith("-"):
            raise UsageError(f"{text!r:.40} names no days of the week", hint=_HINT)
        begin, end = _DAYS.index(first), _DAYS.index(last or first)
        days |= {day % 7 for day in range(begin, end + 1 + 7 * (end < begin))}
    return frozenset(days)


@dataclass(frozen=True, slots=True)
class Conditions:
    """When to work. `idle_s`: only after nobody has used the machine for so long; 0: also beside its user."""

    windows: Sequence[Window] = ()  # none: always
    on_battery: bool = False
    on_metered: bool = False
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """How things are. None: this machine does not tell."""

    weekday: int
    minute: int
    battery: bool | None = None  # it runs on one now
    metered: bool | None = None
    idle_s: float | None = None  # since somebody used it


def causes(conditions: Conditions, facts: Facts) -> tuple[str, ...]:
    """Why not to work now, in words; none if there is no reason."""
    found = []
    if conditions.windows and not any(window.holds(facts.weekday, facts.minute) for window in conditions.windows):
        found.append("these are not its hours")
    if facts.battery and not conditions.on_battery:
        found.append("it runs on battery")
    if facts.metered and not conditions.on_metered:
        found.append("its network is metered")
    if conditions.idle_s:
        if facts.idle_s is None:
            found.append("this machine does not tell whether somebody uses it")
        elif facts.idle_s < conditions.idle_s:
            found.append("somebody uses it")
    return tuple(found)


class Availability:
    """`observe` whenever the facts may have changed; `reasons` is why not to work, empty while it may."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._clear_since: float | None = None
        self.reasons: tuple[str, ...] = ()

    def observe(self, facts: Facts, now: float) -> bool:
        """Whether `reasons` changed between none and some. `now`: seconds of a monotonic clock."""
        found, before = causes(self._conditions, facts), self.reasons
        if found:
            self._clear_since, self.reasons = None, found
        elif before:
            self._clear_since = now if self._clear_since is None else self._clear_since
            if now - self._clear_since >= RETURN_S:
                self.reasons = ()
        return bool(before) is not bool(self.reasons)
