"""The Gossip of gossip.py inside one process, without a network: what is published arrives at once, or never.

    hub = GossipHub()
    left, right = hub.join(PeerId("left")), hub.join(PeerId("right"))

For tests of what is said, not of how it travels. Everybody is everybody's neighbour; `loses` may take messages away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmnode.net import limits
from swarmnode.net.gossip import GossipHandler, GossipStatistics, MessageTooLarge, Verdict
from swarmnode.net.interface import PeerId


class GossipHub:
    """All nodes of one process. `loses(sender, receiver)` says whether a message is lost on its way."""

    def __init__(self, loses: Callable[[PeerId, PeerId], bool] = lambda sender, receiver: False) -> None:
        self.loses = loses
        self.nodes: dict[PeerId, MemoryGossip] = {}

    def join(self, peer: PeerId) -> MemoryGossip:
        """A new node."""
        return self.nodes.setdefault(peer, MemoryGossip(self, peer))

    def leave(self, peer: PeerId) -> None:
        """The node hears nothing any more, and its messages reach nobody."""
        self.nodes.pop(peer, None)


class MemoryGossip:
    """One node of a hub: see gossip.Gossip."""

    def __init__(self, hub: GossipHub, peer: PeerId) -> None:
        self._hub = hub
        self._peer = peer
        self._topics: dict[str, tuple[GossipHandler, int]] = {}
        self._counts: dict[str, Any] = dict.fromkeys(GossipStatistics.__slots__, 0)

    def publish(self, topic: str, data: bytes) -> None:
        """See gossip.Gossip."""
        _, bytes_max = self._topics[topic]
        if len(data) > bytes_max:
            raise MessageTooLarge(f"{len(data):,} bytes for {topic}, which takes up to {bytes_max:,}")
        self._counts["published"] += 1
        self._counts["bytes_sent"] += len(data)
        for peer in self.neighbours():
            if not self._hub.loses(self._peer, peer):
                self._hub.nodes[peer].take(topic, data, self._peer)

    async def subscribe(self, topic: str, handler: GossipHandler, *, bytes_max: int) -> None:
        """See gossip.Gossip."""
        if topic in self._topics or not 0 < len(topic) <= limits.GOSSIP_TOPIC_CHARS_MAX:
            raise ValueError(f"cannot listen to {topic!r}")
        self._topics[topic] = handler, bytes_max

    def neighbours(self) -> tuple[PeerId, ...]:
        """See gossip.Gossip."""
        if self._peer not in self._hub.nodes:
            return ()
        return tuple(peer for peer in self._hub.nodes if peer != self._peer)

    def statistics(self) -> GossipStatistics:
        return GossipStatistics(**(self._counts | {"neighbours": len(self.neighbours())}))

    def take(self, topic: str, data: bytes, sender: PeerId) -> None:
        """A message arrived."""
        handler, bytes_max = self._topics.get(topic, (None, 0))
        if handler is None or len(data) > bytes_max:
            self._counts["stray"] += 1
            return
        self._counts["received"] += 1
        verdict = handler(data, sender)
        if verdict is not Verdict.PASS_ON:
            self._counts["refused" if verdict is Verdict.REFUSE else "ignored"] += 1
