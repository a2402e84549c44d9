"""Telling everybody in the swarm: topics, messages, and who listens. Two implementations pass the same tests.

gossipsub.py runs py-libp2p's GossipSub over any Network; memory_gossip.py hands messages over within one process.

A message has no author here: whatever goes over a topic is signed by itself, so a signature around it would prove
nothing new and double the size of a heartbeat. Its id is the hash of its content, so nobody can make others drop a
message by sending another one under its id. The handler is the judge: a node passes on only what its handler accepts,
so junk and replays end at the first honest neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from swarmnode.net.interface import PeerId


class Verdict(Enum):
    """What becomes of a message."""

    PASS_ON = "pass_on"
    """Others should get it from here, too."""
    IGNORE = "ignore"
    """It is of no use here, and need not be for others; nobody is to blame."""
    REFUSE = "refuse"
    """No honest node sends this: it counts against the neighbour."""


GossipHandler = Callable[[bytes, PeerId], Verdict]
"""A message and the neighbour that brought it -> what becomes of it.

It runs in the network's task: it must not block. What it raises is logged, and the message ignored. It may be called
again with a message that it had minutes ago, and a newcomer gets the messages of the last seconds: records need a
number of their own to tell old from new.
"""


class MessageTooLarge(ValueError):
    """This node tried to publish more than a message may hold."""


@dataclass(frozen=True, slots=True)
class GossipStatistics:
    """Counters since the start, except the first two, which are what is now."""

    neighbours: int
    """Connected peers with a working stream."""
    mesh: int
    """Those of them to which messages go at once, summed over the topics."""
    published: int
    received: int
    """New messages, whether accepted or not. Duplicates are not among them."""
    duplicates: int
    relayed: int
    """Copies of others' messages that were sent on."""
    ignored: int
    """New messages that the handler did not want passed on."""
    refused: int
    """New messages that no honest node sends, by the handler's verdict."""
    stray: int
    """Messages for a topic that this node does not listen to, too large, or not of exactly one topic."""
    junk: int
    """RPCs that were none, or over a limit: each costs its neighbour the stream."""
    control_dropped: int
    """Entries of control messages beyond limits, or about topics that this node does not know."""
    throttled_s: float
    """For how long neighbours over their rate were not read."""
    outbox_dropped: int
    """Messages that a slow neighbour did not get."""
    handler_errors: int
    """Exceptions of handlers and of the router: faults of this program."""
    rpcs_sent: int
    bytes_sent: int
    """In those RPCs, without the muxer's, encryption's and TCP's share. So is bytes_received."""
    bytes_received: int


class Gossip(Protocol):
    """This node's part in the gossip of a swarm."""

    def publish(self, topic: str, data: bytes) -> None:
        """Send to everybody that listens to the topic, to which this node must listen itself.

        Returns at once; nobody acknowledges. This node's own handler is not called.

        Raises:
            MessageTooLarge: `data` is larger than the topic's messages may be.
            KeyError: this node does not listen to the topic.
        """
        ...

    async def subscribe(self, topic: str, handler: GossipHandler, *, bytes_max: int) -> None:
        """Listen to a topic from now on. Larger messages than `bytes_max` are dropped unseen.

        Raises ValueError for a topic that is listened to already, or a name that is too long.
        """
        ...

    def neighbours(self) -> tuple[PeerId, ...]:
        """The peers that this node exchanges gossip with directly."""
        ...

    def statistics(self) -> GossipStatistics: ...
