"""What one neighbour is going to get: messages, control and subscriptions, several in one RPC.

The router thinks that this is py-libp2p's queue of RPCs. Here they are taken apart: messages wait a moment for others,
leave out those that the neighbour turns out to have, and each thing is said once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import trio
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.net import limits


class Outbox:
    """Filled by the router and the node, emptied by the neighbour's sending task."""

    max_message_size = limits.GOSSIP_RPC_BYTES_MAX

    def __init__(self, in_mesh: Callable[[str], bool], message_id: Callable[[rpc_pb2.Message], bytes]) -> None:
        self._in_mesh = in_mesh
        self._message_id = message_id
        self._messages: dict[bytes, rpc_pb2.Message] = {}
        self._bytes = 0
        self._subscriptions: list[str] = []
        self._grafts: set[str] = set()
        self._prunes: dict[str, int] = {}
        self._ihave: dict[str, list[bytes]] = {}
        self._iwant: dict[bytes, None] = {}
        self._due = math.inf
        self._changed = trio.Event()
        self.dropped = 0

    # --- What the router calls ---

    def split_rpc(self, rpc: rpc_pb2.RPC) -> list[rpc_pb2.RPC]:
        return [rpc]

    def push(self, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        """Take the RPC apart. Its sender's record, a signature and addresses in each RPC, is of no use here."""
        for message in rpc.publish:
            self.add(self._message_id(message), message)
        for graft in rpc.control.graft:
            self._prunes.pop(graft.topicID, None)
            self._grafts.add(graft.topicID)
        for prune in rpc.control.prune:
            self._grafts.discard(prune.topicID)
            self._prunes[prune.topicID] = prune.backoff
        for ihave in rpc.control.ihave:
            self._ihave[ihave.topicID] = list(ihave.messageIDs)[-limits.GOSSIP_IDS_MAX :]
        for iwant in rpc.control.iwant:
            self._iwant.update(dict.fromkeys(iwant.messageIDs))
        self._schedule()
        return True

    # --- What the node calls ---

    def subscribe(self, topic: str) -> None:
        self._subscriptions.append(topic)
        self._schedule(at_once=True)

    def add(self, message_id: bytes, message: rpc_pb2.Message, *, at_once: bool = False) -> None:
        """Send the message, unless it is discarded before."""
        if message_id in self._messages:
            return
        self._messages[message_id] = message
        self._bytes += len(message.data)
        while self._bytes > limits.GOSSIP_OUTBOX_BYTES_MAX:
            self.discard(next(iter(self._messages)))
            self.dropped += 1
        self._schedule(at_once=at_once)

    def discard(self, message_id: bytes) -> None:
        """The neighbour has the message."""
        message = self._messages.pop(message_id, None)
        if message is not None:
            self._bytes -= len(message.data)

    def _schedule(self, *, at_once: bool = False) -> None:
        delay = 0.0 if at_once else limits.GOSSIP_RELAY_SECONDS_MAX * random.uniform(0.5, 1)
        due = trio.current_time() + delay
        if due < self._due:
            self._due = due
            self._changed.set()

    async def next(self) -> rpc_pb2.RPC:
        """Wait until something should be sent, and take it out: a batch of messages and everything else."""
        while True:
            while trio.current_time() < self._due:
                with trio.move_on_at(self._due):
                    await self._changed.wait()
                self._changed = trio.Event()
            self._due = math.inf
            rpc = self._take()
            if rpc.ByteSize():
                return rpc

    def _take(self) -> rpc_pb2.RPC:
        rpc = rpc_pb2.RPC()
        for topic in self._subscriptions:
            rpc.subscriptions.add(subscribe=True, topicid=topic)
        self._subscriptions.clear()
        size = 0
        while self._messages and size < limits.GOSSIP_BATCH_BYTES:
            message_id = next(iter(self._messages))
            rpc.publish.append(self._messages[message_id])
            size += len(self._messages[message_id].data)
            self.discard(message_id)
        if self._messages:
            self._schedule(at_once=True)
        self._take_control(rpc)
        return rpc

    def _take_control(self, rpc: rpc_pb2.RPC) -> None:
        # The router repeats the grafts of one heartbeat in what it sends to each further peer: only true ones go out.
        for topic in filter(self._in_mesh, self._grafts):
            rpc.control.graft.add(topicID=topic)
        for topic, backoff in self._prunes.items():
            rpc.control.prune.add(topicID=topic, backoff=backoff)
        for topic, ids in self._ihave.items():
            rpc.control.ihave.add(topicID=topic, messageIDs=ids)
        if self._iwant:
            rpc.control.iwant.add(messageIDs=list(self._iwant)[-limits.GOSSIP_IDS_MAX :])
        for said in (self._grafts, self._prunes, self._ihave, self._iwant):
            said.clear()
