"""A LeaderView in the hands of a test."""

from __future__ import annotations

import trio

from scheduler.term_guard import StaleTerm, UncertifiedTerm
from swarmnode.leadership import KnownLeader
from swarmnode.net.interface import PeerId


class SettableView:
    """Who leads is what the test says. A newer term fences older ones, as the real view's does."""

    def __init__(self) -> None:
        self.term = 0
        self._parted = False
        self._leader: KnownLeader | None = None
        self._obeyed: KnownLeader | None = None
        self._changed = trio.Event()

    def set(self, peer: PeerId | None, term: int = 0, address: str = "", *, parted: bool = False) -> None:
        """`peer` leads `term`; None: nobody that is known. parted: nor can there be one."""
        self._parted = parted
        self._leader = None if peer is None else KnownLeader(peer, term, None, address)
        if self._leader is not None:
            self._obeyed, self.term = self._leader, max(self.term, term)
        self._changed.set()
        self._changed = trio.Event()

    @property
    def leader(self) -> KnownLeader | None:
        return self._leader

    @property
    def reason(self) -> str:
        return "" if self._leader is not None else "there is an election"

    @property
    def parted(self) -> bool:
        return self._parted

    async def changed(self) -> None:
        await self._changed.wait()

    def check(self, term: int, peer: str) -> None:
        """As TermGuard.check."""
        if term < self.term:
            raise StaleTerm(f"term {term} is over: term {self.term} is certified", term=self.term)
        if self._obeyed is None or (peer, term) != (self._obeyed.peer, self._obeyed.term):
            raise UncertifiedTerm(f"{peer} does not lead term {term} here", term=self.term)
