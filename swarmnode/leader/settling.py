"""When an answer may end: once what was chosen of it has been judged, or after a while.

Its tokens are delivered as they come. Only its end waits, for it says whether the answer is tainted: that a row in it
was found wrong, or that a peer which had a part in it was convicted. An answer that is found so while it is under way
is the batcher's matter; one that has given its last token is found here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import trio

from swarmnode.leader.audit_tap import AuditTap

SETTLE_S_MAX: Final = 2.0
"""A judge with nothing else to do needs a twentieth of it; behind many new peers' answers an end need not wait for
long."""

SUSPECT_S_MAX: Final = 5.0
"""Where something is held against a peer that had a part: six audits decide, and come before all others'."""

_LATE_MAX: Final = 4096  # names of answers that ended as they were found out: those of the last seconds count


class Settling:
    """Everything is on the event loop. hurry: called when somebody begins to wait."""

    def __init__(self, tap: AuditTap, hurry: Callable[[], None]) -> None:
        self._tap = tap
        self._hurry = hurry
        self._late: OrderedDict[str, None] = OrderedDict()
        self._telling = 0
        self._news = trio.Event()

    async def settled(self, request: str, since: float, patience_s: float) -> bool | None:
        """Whether an answer that gave its last token at that instant is tainted; None: that is not known after so many
        seconds of waiting, nor long enough ago."""
        until = trio.current_time() + patience_s
        while self._telling or self._tap.waits(request):
            limit = SUSPECT_S_MAX if self._tap.suspects(request) else SETTLE_S_MAX
            now = trio.current_time()
            if now >= since + limit:
                break
            if now >= until:
                return None
            self._hurry()
            with trio.move_on_after(min(until, since + limit) - now):
                await self._news.wait()
        return request in self._late

    def judged(self) -> None:
        """Some answer needs no judging any more."""
        self._news.set()
        self._news = trio.Event()

    def telling(self) -> Callable[[Sequence[str]], None]:
        """The batcher is told of answers that are found out; it says which of them had ended already."""
        self._telling += 1

        def told(ended: Sequence[str]) -> None:
            self._telling -= 1
            for name in ended:
                self._late[name] = None
                self._late.move_to_end(name)
            while len(self._late) > _LATE_MAX:
                self._late.popitem(last=False)
            self.judged()

        return told
