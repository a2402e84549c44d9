"""GossipSub over any Network: the streams to neighbours, what they may send, and who gets what (see gossip.py).

    async with open_gossipsub(network) as gossip:
        await gossip.subscribe("news", handler, bytes_max=1024)
        gossip.publish("news", b"...")

One task for each neighbour sends what its outbox holds; one for each of the neighbour's streams reads. A neighbour that
sends too much is read more slowly, so its flood waits in its own memory; one that sends junk loses the stream. Nothing
that a neighbour sends reaches the router before it is bounded, and whatever the router raises ends here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11
from libp2p.pubsub.pb import rpc_pb2

from capabilities.errors import PeerMistake
from scheduler.rates import TokenBucket
from swarmnode.net import limits
from swarmnode.net.gossip import GossipHandler, GossipStatistics, MessageTooLarge, Verdict
from swarmnode.net.gossip_outbox import Outbox
from swarmnode.net.gossip_router import PROTOCOL, Router, Surroundings, clean_control, message_id
from swarmnode.net.groups import without_groups
from swarmnode.net.interface import Network, NetworkError, PeerId, ProtocolNotSupported, Stream

log = structlog.get_logger(__name__)

_HOUSEKEEPING_SECONDS = 30.0
_VARINT_BYTES_MAX = 5


@dataclass(frozen=True, slots=True)
class _Topic:
    handler: GossipHandler
    bytes_max: int


class _Rates:
    """How much a neighbour may still send."""

    def __init__(self, now: float) -> None:
        self._messages = TokenBucket(limits.GOSSIP_MESSAGES_BURST, limits.GOSSIP_MESSAGES_PER_SECOND, now)
        self._bytes = TokenBucket(limits.GOSSIP_BYTES_BURST, limits.GOSSIP_BYTES_PER_SECOND, now)

    def owe(self, now: float, messages: int, size: int) -> float:
        """Count them, and say for how many seconds the neighbour should not be read."""
        return max(self._messages.owe(now, messages), self._bytes.owe(now, size))


@dataclass(slots=True)
class _Neighbour:
    """A connected peer."""

    rates: _Rates
    sending: trio.CancelScope = field(default_factory=trio.CancelScope)
    served: dict[bytes, None] = field(default_factory=dict)

    def may_send(self, wanted: bytes) -> bool:
        """Whether the neighbour asks for this message for the first time."""
        if wanted in self.served:
            return False
        self.served[wanted] = None
        if len(self.served) > limits.GOSSIP_SERVED_MAX:
            del self.served[next(iter(self.served))]
        return True


class GossipSubNode:
    """See gossip.Gossip; made by `open_gossipsub`."""

    def __init__(self, network: Network, nursery: trio.Nursery) -> None:
        self._network = network
        self._nursery = nursery
        self._surroundings = Surroundings()
        self._router = Router(self._surroundings)
        self._topics: dict[str, _Topic] = {}
        self._neighbours: dict[PeerId, _Neighbour] = {}
        self._rates: dict[PeerId, _Rates] = {}
        self._closed = False
        self._counts: dict[str, Any] = dict.fromkeys(GossipStatistics.__slots__, 0)
        network.serve(PROTOCOL, self._read, max_streams_per_peer=limits.GOSSIP_STREAMS_PER_PEER_MAX)
        network.on_connection(self._on_connection)
        for peer in network.connected_peers():
            self._on_connection(peer, True)

    # --- For the layers above ---

    def publish(self, topic: str, data: bytes) -> None:
        """See gossip.Gossip."""
        bytes_max = self._topics[topic].bytes_max
        if len(data) > bytes_max:
            raise MessageTooLarge(f"{len(data):,} bytes for {topic}, which takes up to {bytes_max:,}")
        message = rpc_pb2.Message(data=data, topicIDs=[topic])
        self._counts["published"] += 1
        own_id = message_id(message)
        self._surroundings.seen_messages.add(own_id, trio.current_time())
        self._router.mcache.put(message)
        for peer in self._router.first_receivers(topic):
            if peer in self._surroundings.peer_queues:
                self._surroundings.peer_queues[peer].add(own_id, message, at_once=True)

    async def subscribe(self, topic: str, handler: GossipHandler, *, bytes_max: int) -> None:
        """See gossip.Gossip."""
        if topic in self._topics or not 0 < len(topic) <= limits.GOSSIP_TOPIC_CHARS_MAX:
            raise ValueError(f"cannot listen to {topic!r}")
        if bytes_max > limits.GOSSIP_MESSAGE_BYTES_MAX:
            raise ValueError(f"no message has {bytes_max:,} bytes")
        self._topics[topic] = _Topic(handler, bytes_max)
        for outbox in self._surroundings.peer_queues.values():
            outbox.subscribe(topic)
        await self._router.join(topic)

    def neighbours(self) -> tuple[PeerId, ...]:
        """See gossip.Gossip."""
        return tuple(self._surroundings.peer_queues)

    def statistics(self) -> GossipStatistics:
        outboxes = self._surroundings.peer_queues
        mesh = sum(peer in outboxes for topic in self._topics for peer in self._router.receivers(topic))
        return GossipStatistics(**(self._counts | {"neighbours": len(outboxes), "mesh": mesh}))

    # --- Neighbours that come and go ---

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        if self._closed:
            return
        if up:
            rates = self._rates.pop(peer, None) or _Rates(trio.current_time())
            self._rates[peer] = rates
            if len(self._rates) > limits.GOSSIP_RATES_MAX:
                del self._rates[next(iter(self._rates))]
            neighbour = self._neighbours[peer] = _Neighbour(rates)
            self._nursery.start_soon(self._keep_sending, peer, neighbour)
        elif (gone := self._neighbours.pop(peer, None)) is not None:
            gone.sending.cancel()
            self._surroundings.forget(peer)

    async def _keep_sending(self, peer: PeerId, neighbour: _Neighbour) -> None:
        """While the peer is connected: open a stream, send, and again when it breaks."""
        retry_s = limits.GOSSIP_RETRY_SECONDS_MIN
        with neighbour.sending:
            while True:
                try:
                    stream = await self._network.open_stream(peer, PROTOCOL)
                    retry_s = limits.GOSSIP_RETRY_SECONDS_MIN
                    await self._send(stream)
                except ProtocolNotSupported:
                    retry_s = limits.GOSSIP_RETRY_SECONDS_MAX
                except (NetworkError, trio.TooSlowError) as error:
                    log.debug("gossip stream ended", peer=peer, reason=str(error))
                except Exception:
                    log.exception("gossip to a neighbour failed", peer=peer)
                    self._counts["handler_errors"] += 1
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, limits.GOSSIP_RETRY_SECONDS_MAX)

    async def _send(self, stream: Stream) -> None:
        peer = stream.peer
        outbox = self._surroundings.peer_queues[peer] = Outbox(self._router.in_mesh(peer), message_id)
        for topic in self._topics:
            outbox.subscribe(topic)
        self._router.add_peer(peer, PROTOCOL_ID_V11)
        self._router.feed(peer)
        try:
            for topic in self._surroundings.topics_of(peer):
                await self._welcome(peer, topic)
            while True:
                rpc = await outbox.next()
                data = _framed(rpc.SerializeToString())
                with trio.fail_after(limits.GOSSIP_SEND_SECONDS_MAX):
                    await stream.send(data)
                self._counts["rpcs_sent"] += 1
                self._counts["bytes_sent"] += len(data)
        finally:
            self._counts["outbox_dropped"] += outbox.dropped
            if self._surroundings.peer_queues.get(peer) is outbox:
                del self._surroundings.peer_queues[peer]
                self._router.remove_peer(peer)
            await stream.reset()

    async def _welcome(self, peer: PeerId, topic: str) -> None:
        """The neighbour listens to the topic and can be sent to: take it into the mesh, tell it the latest."""
        if topic in self._topics and peer in self._surroundings.peer_queues:
            await self._router.on_peer_subscribed(peer, topic)
            for recent_id, message in self._router.recent(topic):
                self._surroundings.peer_queues[peer].add(recent_id, message)

    # --- What neighbours send ---

    async def _read(self, stream: Stream) -> None:
        """Handler of a neighbour's stream. Raises PeerMistake for junk, which costs the neighbour the stream."""
        while stream.peer in self._neighbours:
            data = await self._receive_frame(stream)
            self._counts["bytes_received"] += len(data)
            rpc = self._parse(data)
            refused = 0
            for message in rpc.publish:
                await trio.lowlevel.checkpoint()  # a signature to verify takes a tenth of a millisecond
                refused += self._take_message(stream.peer, message) is Verdict.REFUSE
            await self._take_subscriptions(stream.peer, rpc)
            await self._take_control(stream.peer, rpc)
            cost = 1 + len(rpc.publish) + refused * limits.GOSSIP_REFUSED_COST
            await self._wait_for_rate(stream.peer, cost, len(data))

    async def _receive_frame(self, stream: Stream) -> bytes:
        size = 0
        for at in range(_VARINT_BYTES_MAX):
            (byte,) = await stream.receive_exactly(1)
            size |= (byte & 0x7F) << 7 * at
            if byte < 0x80:
                break
        else:
            size = limits.GOSSIP_RPC_BYTES_MAX + 1
        if size > limits.GOSSIP_RPC_BYTES_MAX:
            self._counts["junk"] += 1
            raise PeerMistake(f"a gossip RPC of over {limits.GOSSIP_RPC_BYTES_MAX:,} bytes")
        return await stream.receive_exactly(size)

    def _parse(self, data: bytes) -> rpc_pb2.RPC:
        rpc = rpc_pb2.RPC()
        try:
            rpc.ParseFromString(data)
            if len(rpc.publish) > limits.GOSSIP_RPC_MESSAGES_MAX:
                raise ValueError(f"{len(rpc.publish):,} messages")
        except Exception as error:  # the parser raises whatever the bytes provoke
            self._counts["junk"] += 1
            raise PeerMistake(f"a gossip RPC that is none: {error!s:.100}") from None
        return rpc

    async def _wait_for_rate(self, peer: PeerId, messages: int, size: int) -> None:
        neighbour = self._neighbours.get(peer)
        wait_s = 0.0 if neighbour is None else neighbour.rates.owe(trio.current_time(), messages, size)
        if wait_s > 0:
            self._counts["throttled_s"] += wait_s
            await trio.sleep(wait_s)

    def _take_message(self, peer: PeerId, message: rpc_pb2.Message) -> Verdict:
        """Judge a message, and relay it if it is good."""
        topic = self._topics.get(message.topicIDs[0]) if len(message.topicIDs) == 1 else None
        if topic is None or len(message.data) > topic.bytes_max:
            self._counts["stray"] += 1
            return Verdict.REFUSE
        # Only what the id is made of: a sender's other fields would be relayed under the same id.
        plain = rpc_pb2.Message(data=message.data, topicIDs=message.topicIDs)
        plain_id, now = message_id(plain), trio.current_time()
        if self._surroundings.seen_messages.has(plain_id):
            self._counts["duplicates"] += 1
            if peer in self._surroundings.peer_queues:
                self._surroundings.peer_queues[peer].discard(plain_id)
            return Verdict.IGNORE
        self._surroundings.seen_messages.add(plain_id, now)
        self._counts["received"] += 1
        verdict = self._judge(topic.handler, plain.data, peer)
        if verdict is Verdict.PASS_ON:
            self._relay(plain_id, plain, peer)
        else:
            self._counts["refused" if verdict is Verdict.REFUSE else "ignored"] += 1
        return verdict

    def _judge(self, handler: GossipHandler, data: bytes, peer: PeerId) -> Verdict:
        try:
            return handler(data, peer)
        except Exception:
            log.exception("gossip handler failed", peer=peer)
            self._counts["handler_errors"] += 1
            return Verdict.IGNORE

    def _relay(self, plain_id: bytes, message: rpc_pb2.Message, source: PeerId) -> None:
        self._router.mcache.put(message)
        for peer in self._router.receivers(message.topicIDs[0]) - {source}:
            if peer in self._surroundings.peer_queues:
                self._surroundings.peer_queues[peer].add(plain_id, message)
                self._counts["relayed"] += 1

    async def _take_subscriptions(self, peer: PeerId, rpc: rpc_pb2.RPC) -> None:
        surroundings = self._surroundings
        for subscription in rpc.subscriptions[: 2 * limits.GOSSIP_TOPICS_MAX]:
            topic = subscription.topicid
            if not subscription.subscribe:
                surroundings.unsubscribe(peer, topic)
            elif len(topic) > limits.GOSSIP_TOPIC_CHARS_MAX or peer not in self._neighbours:
                self._counts["control_dropped"] += 1
            elif peer not in surroundings.peer_topics.get(topic, ()):
                if len(surroundings.topics_of(peer)) >= limits.GOSSIP_TOPICS_MAX:
                    self._counts["control_dropped"] += 1
                    continue
                surroundings.peer_topics.setdefault(topic, set()).add(peer)
                await self._welcome(peer, topic)

    async def _take_control(self, peer: PeerId, rpc: rpc_pb2.RPC) -> None:
        neighbour = self._neighbours.get(peer)
        if neighbour is None or not rpc.HasField("control"):
            return
        router = self._router
        if rpc.control.iwant:
            router.feed(peer)
        control, dropped = clean_control(rpc.control, self._topics, router.worth_asking, neighbour.may_send)
        self._counts["control_dropped"] += dropped
        try:
            await router.handle_rpc(rpc_pb2.RPC(control=control), peer)
        except Exception:
            log.exception("gossip router failed", peer=peer)
            self._counts["handler_errors"] += 1

    # --- Life ---

    def close(self) -> None:
        """Take no part any more; the tasks are ended by whoever started them."""
        self._closed = True
        self._neighbours.clear()

    async def run_router(self) -> None:
        """The router's heartbeat, whatever happens in it."""
        while True:
            try:
                await self._router.heartbeat()
            except Exception:
                log.exception("gossip heartbeat failed")
                self._counts["handler_errors"] += 1
                await trio.sleep(self._router.heartbeat_interval)

    async def keep_house(self) -> None:
        """Forget what is over."""
        while True:
            await trio.sleep(_HOUSEKEEPING_SECONDS)
            self._surroundings.seen_messages.forget(trio.current_time())
            self._router.forget_old()


@asynccontextmanager
async def open_gossipsub(network: Network) -> AsyncIterator[GossipSubNode]:
    """A running node. On leaving, its streams are given up; the network stays."""
    with without_groups():
        async with trio.open_nursery() as nursery:
            node = GossipSubNode(network, nursery)
            nursery.start_soon(node.run_router)
            nursery.start_soon(node.keep_house)
            try:
                yield node
            finally:
                node.close()
                nursery.cancel_scope.cancel()


def _framed(data: bytes) -> bytes:
    """With the length before it, as a varint."""
    size, head = len(data), bytearray()
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data
