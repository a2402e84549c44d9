"""Connections to a set of peers that changes: dialed again and again until they are there, and when they broke.

A peer has several addresses, tried one after the other, the one that worked last first. A peer that connected to us
needs no dial, so a backbone peer without an open port takes part as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import structlog
import trio

from swarmnode import limits
from swarmnode.net.interface import DialFailed, Network, PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)


def _ignore(*_: object) -> None:
    pass


class Dialer:
    """Run `run` in a nursery; everything is on the event loop.

    `addresses_of(peer)` gives where the peer may be, best first; addresses of other peers among them are passed over.
    `on_reached(peer)` hears of each dial that worked, `on_unreached(peer, address, reason)` when no address did.
    """

    def __init__(
        self,
        network: Network,
        addresses_of: Callable[[str], Sequence[str]],
        *,
        on_reached: Callable[[PeerId], object] = _ignore,
        on_unreached: Callable[[PeerId, str, str], object] = _ignore,
    ) -> None:
        self._network = network
        self._addresses_of = addresses_of
        self._on_reached = on_reached
        self._on_unreached = on_unreached
        self._wishes: dict[str, frozenset[str]] = {}
        self._tended: dict[PeerId, trio.CancelScope] = {}
        self._reasons: dict[PeerId, str] = {}
        self._worked: dict[PeerId, str] = {}
        self._nursery: trio.Nursery | None = None
        self._news = trio.Event()
        network.on_connection(self._on_connection)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._tend_all()
            task_status.started()
            await trio.sleep_forever()

    def keep(self, user: str, peers: Iterable[str]) -> None:
        """Keep connections to these for `user` from now on, instead of what it wanted before.

        Connections to peers that nobody wants any more stay as they are, and are not dialed again.
        """
        self._wishes[user] = frozenset(peers) - {self._network.peer_id}
        self._tend_all()

    def reason(self, peer: str) -> str:
        """Why the peer could not be reached, last time; empty if it is connected, or was not tried."""
        return "" if self.is_connected(peer) else self._reasons.get(PeerId(peer), "")

    def is_connected(self, peer: str) -> bool:
        return peer in self._network.connected_peers()

    async def wait_connected(self, peer: str) -> None:
        """Return when there is a connection to the peer, whoever made it."""
        while not self.is_connected(peer):
            await self._news.wait()

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        self._news.set()
        self._news = trio.Event()

    def _tend_all(self) -> None:
        if self._nursery is None:
            return
        wanted = {PeerId(peer) for peers in self._wishes.values() for peer in peers}
        for peer in self._tended.keys() - wanted:
            self._tended.pop(peer).cancel()
            self._reasons.pop(peer, None)
            self._worked.pop(peer, None)
        for peer in sorted(wanted - self._tended.keys()):
            scope = self._tended[peer] = trio.CancelScope()
            self._nursery.start_soon(self._tend, peer, scope)

    async def _tend(self, peer: PeerId, scope: trio.CancelScope) -> None:
        pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
        with scope:
            while True:
                if await self._dial(peer):
                    since = trio.current_time()
                    while self.is_connected(peer):
                        await self._news.wait()
                    if trio.current_time() - since >= limits.BACKBONE_STABLE_SECONDS:
                        pause_s = limits.BACKBONE_RETRY_SECONDS_MIN
                with trio.move_on_after(pause_s * random.uniform(0.5, 1.0)):
                    await self.wait_connected(peer)
                pause_s = min(2 * pause_s, limits.BACKBONE_RETRY_SECONDS_MAX)

    async def _dial(self, peer: PeerId) -> bool:
        """Whether the peer is connected, perhaps after a dial."""
        failure = ("", "no address of it is known")
        for address in self._addresses(peer):
            if self.is_connected(peer):
                break
            reason = f"no answer for {limits.BACKBONE_DIAL_SECONDS_MAX:.0f} s"
            with trio.move_on_after(limits.BACKBONE_DIAL_SECONDS_MAX):
                try:
                    await self._network.connect(address)
                    self._worked[peer] = address
                    self._on_reached(peer)
                    break
                except DialFailed as error:
                    reason = error.reason
            failure = (address, reason)
        if self.is_connected(peer):
            self._reasons.pop(peer, None)
            return True
        address, reason = failure
        said = f"{address.partition('/p2p/')[0]}: {reason}" if address else reason
        if self._reasons.get(peer) != said:
            _log.info("backbone.unreached", peer=peer, reason=said)
        self._reasons[peer] = said
        if address:
            self._on_unreached(peer, address, reason)
        return False

    def _addresses(self, peer: PeerId) -> list[str]:
        """Those that name the peer, the one that worked first, a bounded number."""
        known = [address for address in self._addresses_of(peer) if address.endswith(f"/p2p/{peer}")]
        worked = self._worked.get(peer)
        known.sort(key=lambda address: address != worked)
        return known[: limits.SWARM_ADDRESSES_PER_PEER_MAX]
