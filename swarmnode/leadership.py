"""Who leads, as the rest of a daemon sees it: whom a worker obeys and where an asker's prompts go.

In a swarm this comes from elections (backbone/leader_watch.py); where the configuration names the leader, from there.
Either way it may change at any moment, so nobody keeps the answer: look, and wait for `changed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import trio

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake
from swarmnode.net.interface import PeerId


@dataclass(frozen=True, slots=True)
class KnownLeader:
    """A peer that leads `term` and can be reached, as far as this node knows.

    `mandate` proves it, None where the configuration names the leader. `address` is where to dial it; empty: whoever
    watches the backbone keeps a connection to it.
    """

    peer: PeerId
    term: int
    mandate: Mandate | None = None
    address: str = ""


class LeaderView(Protocol):
    """Everything is on the event loop."""

    @property
    def leader(self) -> KnownLeader | None:
        """Who leads now; None: nobody that this node knows of and reaches."""

    @property
    def reason(self) -> str:
        """Why there is no leader, for people; empty if there is one."""

    @property
    def parted(self) -> bool:
        """Whether so few of the backbone answer that nobody can be elected among them."""

    async def changed(self) -> None:
        """Wait until `leader` is another one (or another term's, or None) than when this was called, or `parted` is."""

    def check(self, term: int, peer: str) -> None:
        """Whether to obey an order that `peer`, whose key was proven, gives in `term`.

        Raises:
            SwarmError: StaleTerm, UncertifiedTerm or PeerMistake, with the reason.
        """


class NamedLeader:
    """The leader that the configuration names: it never changes, and any term of its is believed."""

    def __init__(self, peer: PeerId, address: str = "") -> None:
        self._leader = KnownLeader(peer, 0, None, address)

    @property
    def leader(self) -> KnownLeader:
        return self._leader

    @property
    def reason(self) -> str:
        return ""

    @property
    def parted(self) -> bool:
        return False

    async def changed(self) -> None:
        await trio.sleep_forever()

    def check(self, term: int, peer: str) -> None:
        """Raises PeerMistake for anybody else."""
        if peer != self._leader.peer:
            raise PeerMistake("only the swarm's leader may dispatch", peer=peer)
