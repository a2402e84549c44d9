"""Connections for the sake of gossip: a node that has few neighbours finds more among the peers that it hears of.

Whoever it cannot reach at the addresses that the peer advertises is remembered: that goes into this node's own advert,
so that the peer hears of it. A peer that cannot be reached may still connect to us, and needs to do no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import structlog
import trio

from scheduler.advert_book import PeerState, PeerView
from scheduler.advert_findings import Unreached
from swarmnode import limits
from swarmnode.net.interface import DialFailed, Network

_log = structlog.get_logger(__name__)


class Neighbourhood:
    """Dials until there are NEIGHBOURS_WANTED connections. `peers` is whom this node has heard of."""

    def __init__(self, network: Network, peers: Callable[[], Mapping[str, PeerView]], unreached: Unreached) -> None:
        self._network = network
        self._peers = peers
        self._unreached = unreached
        self._tried: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await trio.sleep(limits.NEIGHBOUR_DIAL_SECONDS * random.uniform(0.5, 1.5))
            if len(self._network.connected_peers()) < limits.NEIGHBOURS_WANTED:
                await self._find_one()

    async def _find_one(self) -> None:
        """Try a peer at random that is not connected, and was not tried in vain lately."""
        now, connected = trio.current_time(), set(self._network.connected_peers())
        self._tried = {peer: then for peer, then in self._tried.items() if now - then < limits.NEIGHBOUR_RETRY_SECONDS}
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
        peer, failure = view.advert.peer, ("", "")
        self._tried[peer] = trio.current_time()
        for address in view.advert.content.addresses[: limits.NEIGHBOUR_ADDRESSES_MAX]:
            try:
                reached = await self._network.connect(address)
            except DialFailed as error:
                failure = (address, error.reason)
                _log.debug("neighbour not reached", peer=peer, reason=error.reason)
                continue
            if reached == peer:
                self._unreached.reached(peer)
                del self._tried[peer]
                return True
            failure = (address, f"{reached} answers there")
        self._unreached.failed(peer, *failure)
        return False
