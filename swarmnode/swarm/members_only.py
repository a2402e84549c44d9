"""Protocols for members alone: who has the network's key may connect, but it may have left since, or never belonged.

A peer shows that it belongs by its advert, which holds its certificate and reaches its neighbours in the first moments
of a connection. So a stream that comes before it waits a little.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId, Stream, StreamHandler

_LOOK_S = 0.05


class MembersOnly:
    """Serves protocols on a network for those of whom `is_member` is true."""

    def __init__(self, network: Network, is_member: Callable[[PeerId], bool]) -> None:
        self._network = network
        self._is_member = is_member

    def serve(self, protocol: str, handler: StreamHandler, *, max_streams_per_peer: int) -> None:
        """See interface.Network."""

        async def guarded(stream: Stream) -> None:
            await self._wait_known(stream.peer)
            await handler(stream)

        self._network.serve(protocol, guarded, max_streams_per_peer=max_streams_per_peer)

    async def _wait_known(self, peer: PeerId) -> None:
        """Raises PeerMistake if the peer does not show in time that it is a member."""
        deadline = trio.current_time() + limits.MEMBERSHIP_SECONDS_MAX
        while not self._is_member(peer):
            if trio.current_time() >= deadline:
                raise PeerMistake(f"{peer} has not shown that it belongs to the swarm", peer=str(peer))
            await trio.sleep(_LOOK_S)
