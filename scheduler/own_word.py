"""What this node's own adverts are numbered, and whether somebody else speaks in its name.

After a restart others may still pass on what the instance before said, possibly with higher numbers (the clock that the
first number comes from may have been set back). The next advert jumps past the highest that is met. A dead instance
says nothing new, though: one whose numbers go on growing for some time is alive, so this identity was copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from capabilities.advert import SEQUENCE_MAX

CLONE_WORDS_MIN: Final = 3
CLONE_SECONDS_MIN: Final = 20.0  # a message cache holds five seconds, and a heartbeat comes each 15
CLONE_FORGET_S: Final = 900.0
_OTHERS_MAX: Final = 4


@dataclass(slots=True)
class _Other:
    """An instance with this node's identity. Times are own time."""

    first: float
    last: float
    newest: tuple[int, int]
    words: int = 1


class OwnWord:
    """The numbering of this node's adverts, which goes on from `sequence`. `instance` is drawn at its start."""

    def __init__(self, peer: str, instance: bytes, sequence: int) -> None:
        self.peer = peer
        self.instance = instance
        self.sequence = sequence
        self.jumps = 0
        self._others: dict[bytes, _Other] = {}

    def next(self) -> int:
        """The number of the next advert."""
        self.sequence = min(self.sequence + 1, SEQUENCE_MAX)
        return self.sequence

    def hear_other(self, instance: bytes, number: tuple[int, int], time: float) -> None:
        """Another instance's (sequence, heartbeat) is going round, signed with this node's key."""
        other = self._others.get(instance)
        if other is None:
            if len(self._others) >= _OTHERS_MAX:
                del self._others[min(self._others, key=lambda each: self._others[each].last)]
            self._others[instance] = _Other(time, time, number)
        elif number > other.newest:
            other.newest, other.last, other.words = number, time, other.words + 1
        if number[0] >= self.sequence:
            self.sequence = min(number[0], SEQUENCE_MAX)
            self.jumps += 1

    def cloned(self, time: float) -> bool:
        """Whether another process is at work with this identity."""
        return any(
            other.words >= CLONE_WORDS_MIN
            and other.last - other.first >= CLONE_SECONDS_MIN
            and time - other.last < CLONE_FORGET_S
            for other in self._others.values()
        )
