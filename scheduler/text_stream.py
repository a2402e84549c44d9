"""From the bytes of tokens to text that may be shown.

Two things make a token's text unsafe to show at once: it may end inside a UTF-8 character, and it may be the beginning
of a stop string that later tokens complete. Both are held back until the next tokens decide. The result depends on the
bytes alone, never on where tokens cut them: each stop string is followed character by character (Knuth, Morris, Pratt),
the match that completes first wins, and of several that complete together the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from capabilities.errors import UsageError

STOPS_MAX = 16  # OpenAI's API allows 4; every one is followed through every character
STOP_CHARACTERS_MAX = 512  # so much text can be held back


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became safe to show, and whether a stop string ended the stream (nothing of it is in any text)."""

    text: str
    stopped: bool


def check_stops(stops: Sequence[str]) -> None:
    """Raise UsageError unless these can be stop strings."""
    if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
        raise UsageError("stop must be a list of strings")
    if len(stops) > STOPS_MAX:
        raise UsageError(f"at most {STOPS_MAX} stop strings are allowed, not {len(stops)}")
    if not all(stops):
        raise UsageError("a stop string must not be empty")
    if max(map(len, stops), default=0) > STOP_CHARACTERS_MAX:
        raise UsageError(f"a stop string may have at most {STOP_CHARACTERS_MAX} characters")


class TextStream:
    """One answer's text. Raises UsageError for stop strings that are empty, too long or too many."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        check_stops(stop)
        # "replace" writes U+FFFD as soon as bytes are provably no UTF-8, and keeps a tail that may still become it.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self._stopped = False

    def feed(self, token_bytes: bytes) -> TextDelta:
        """Take a token's bytes, give the text that is safe by now. After a stop nothing more comes."""
        return self._take(self._decoder.decode(token_bytes))

    def finish(self) -> TextDelta:
        """The end of the answer: what was held back. A character that stayed incomplete is left out, not half shown."""
        text, self._held = self._held, ""
        return TextDelta(text, self._stopped)

    def _take(self, text: str) -> TextDelta:
        if self._stopped:
            return TextDelta("", True)
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [matcher.length for matcher in self._matchers if matcher.step(character)]
            if complete:
                self._held, self._stopped = "", True
                return TextDelta(seen[: end - max(complete)], True)
        safe = len(seen) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = seen[safe:]
        return TextDelta(seen[:safe], False)


class _Matcher:
    """Follows one stop string through the text; `matched` is how much of it the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.matched = 0
        # _shorter[n]: the longest proper prefix of the stop string that its first n + 1 characters end with.
        self._shorter = [0] * len(stop)
        n = 0
        for i in range(1, len(stop)):
            while n and stop[i] != stop[n]:
                n = self._shorter[n - 1]
            n += stop[i] == stop[n]
            self._shorter[i] = n

    def step(self, character: str) -> bool:
        """Whether this character completes the stop string (which ends the stream: there is no step after it)."""
        while self.matched and character != self._stop[self.matched]:
            self.matched = self._shorter[self.matched - 1]
        self.matched += character == self._stop[self.matched]
        return self.matched == self.length
