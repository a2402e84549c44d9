"""Who may be in a handshake at the same time: a bound that idle connections cannot use up.

Refusing newcomers when all places are taken would let a few hundred silent connections lock honest peers out. So the
newcomer is let in, and the oldest of the address with most places goes: an honest handshake takes milliseconds, hence
the oldest is silent, and one address that floods competes with itself only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from swarmnode.net import limits


class HandshakeGate:
    """The places, oldest first."""

    def __init__(self, places: int = limits.PENDING_HANDSHAKES_MAX) -> None:
        self._places = places
        self._pending: dict[trio.CancelScope, str] = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    @contextmanager
    def place(self, address: str) -> Iterator[trio.CancelScope]:
        """A cancel scope for one handshake with `address`: it ends at the deadline, or when the place is needed."""
        if len(self._pending) >= self._places:
            self._make_room()
        scope = trio.CancelScope(deadline=trio.current_time() + limits.HANDSHAKE_SECONDS_MAX)
        self._pending[scope] = address
        try:
            with scope:
                yield scope
        finally:
            self._pending.pop(scope, None)

    def _make_room(self) -> None:
        busiest, _ = Counter(self._pending.values()).most_common(1)[0]
        oldest = next(scope for scope, address in self._pending.items() if address == busiest)
        del self._pending[oldest]
        oldest.cancel()
