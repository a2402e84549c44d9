"""Connections for the sake of gossip: a node that has few neighbours finds more among the peers that it hears of, and
first of all among those that it finds on its own local network.

Whoever it cannot reach at the addresses that the peer advertises is remembered: that goes into this node's own advert,
so that the peer hears of it. A peer that cannot be reached may still connect to us, and needs to do no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import structlog
import trio

from scheduler.advert_book import PeerState, PeerView
from scheduler.advert_findings import Unreached
from swarmnode import limits
from swarmnode.net.interface import DialFailed, Network

_log = structlog.get_logger(__name__)


class Neighbourhood:
    """Dials until there are NEIGHBOURS_WANTED connections.

    `peers` is whom this node has heard of; `nearby` gives addresses of peers on the local network, heard of or not.
    """

    def __init__(
        self,
        network: Network,
        peers: Callable[[], Mapping[str, PeerView]],
        unreached: Unreached,
        nearby: Callable[[], Mapping[str, Sequence[str]]],
    ) -> None:
        self._network = network
        self._peers = peers
        self._unreached = unreached
        self._nearby = nearby
        self._tried: dict[str, float] = {}
        self._wake = trio.Event()

    def look(self, peer: str) -> None:
        """The peer was found nearby, or at other addresses than before: do not wait for the next turn."""
        self._tried.pop(peer, None)
        self._wake.set()

    async def run(self) -> None:
        while True:
            with trio.move_on_after(limits.NEIGHBOUR_DIAL_SECONDS * random.uniform(0.5, 1.5)):
                await self._wake.wait()
            self._wake = trio.Event()
            if len(self._network.connected_peers()) < limits.NEIGHBOURS_WANTED:
                await self._find_one()

    async def _find_one(self) -> None:
        """Try a peer at random that is not connected, and was not tried in vain lately."""
        now, connected = trio.current_time(), set(self._network.connected_peers())
        retry_s = limits.NEIGHBOUR_RETRY_SECONDS if connected else limits.NEIGHBOUR_LONELY_RETRY_SECONDS
        self._tried = {peer: then for peer, then in self._tried.items() if now - then < retry_s}
        nearby = [peer for peer in self._nearby() if peer not in connected and peer not in self._tried]
        if nearby:
            chosen = random.choice(nearby)
            self._tried[chosen] = now
            if await self._dial(chosen, self._nearby().get(chosen, ())) is None:
                self._tried.pop(chosen, None)  # `look` may have been quicker
            self._wake.set()
            return
        candidates = [
            view
            for peer, view in self._peers().items()
            if peer not in connected
            and peer not in self._tried
            and view.state is not PeerState.GONE
            and view.advert.content.addresses
        ]
        if candidates:
            await self.reach(random.choice(candidates))

    async def reach(self, view: PeerView) -> bool:
        """Whether one of the peer's addresses answers; it is connected then."""
        peer = view.advert.peer
        self._tried[peer] = trio.current_time()
        failure = await self._dial(peer, view.advert.content.addresses)
        if failure is None:
            self._unreached.reached(peer)
            self._tried.pop(peer, None)
            return True
        self._unreached.failed(peer, *failure)
        return False

    async def _dial(self, peer: str, addresses: Sequence[str]) -> tuple[str, str] | None:
        """None if it is connected now; else the last address and what was wrong with it."""
        failure = ("", "no address")
        for address in addresses[: limits.NEIGHBOUR_ADDRESSES_MAX]:
            try:
                reached = await self._network.connect(address)
            except DialFailed as error:
                failure = (address, error.reason)
                _log.debug("neighbour not reached", peer=peer, reason=error.reason)
                continue
            if reached == peer:
                return None
            failure = (address, f"{reached} answers there")
        return failure
