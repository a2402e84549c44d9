"""Swarms of gossiping nodes in one process, and a neighbour whose RPCs are in the hands of a test."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.identity import Identity
from swarmnode.net.gossip import GossipStatistics, Verdict
from swarmnode.net.gossip_router import PROTOCOL
from swarmnode.net.gossipsub import GossipSubNode, open_gossipsub
from swarmnode.net.interface import Network, PeerId, Stream
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import open_memory_hub
from tests.net_tools import eventually

TOPIC = "swarmnode/5a5a5a5a5a5a5a5a/adverts"
BYTES_MAX = 8_194
HEARTBEAT_BYTES, ADVERT_BYTES = 152, 1_000  # tests/test_advert.py holds adverts to these
RPC_OVERHEAD_BYTES = 12 + 18 + 52  # the muxer's header, Noise's length and tag, IPv4 and TCP with timestamps


@dataclass
class Listener:
    """A node and what it heard. `verdict` judges; messages that begin with `bad` are refused."""

    network: Network
    gossip: GossipSubNode
    heard: list[bytes] = field(default_factory=list)
    times: dict[bytes, float] = field(default_factory=dict)
    raises: bool = False

    def hear(self, data: bytes, neighbour: PeerId) -> Verdict:
        if self.raises:
            raise RuntimeError("a handler that fails")
        self.heard.append(data)
        self.times.setdefault(data, trio.current_time())
        if data.startswith(b"bad"):
            return Verdict.REFUSE
        return Verdict.IGNORE if data.startswith(b"old") else Verdict.PASS_ON


async def listener_on(stack: AsyncExitStack, network: Network) -> Listener:
    listener = Listener(network, await stack.enter_async_context(open_gossipsub(network)))
    await listener.gossip.subscribe(TOPIC, listener.hear, bytes_max=BYTES_MAX)
    return listener


@asynccontextmanager
async def memory_listeners(
    count: int, edges: Iterable[tuple[int, int]], chance: random.Random | None = None
) -> AsyncIterator[list[Listener]]:
    """Nodes in memory; with `chance` their links take 5 to 50 ms."""
    async with open_memory_hub() as hub, AsyncExitStack() as stack:
        networks = [hub.join() for _ in range(count)]
        listeners = [await listener_on(stack, network) for network in networks]
        async with trio.open_nursery() as nursery:
            for one, other in edges:
                if chance is not None:
                    hub.set_delay(networks[one].peer_id, networks[other].peer_id, chance.uniform(0.005, 0.05))
                nursery.start_soon(networks[one].connect, networks[other].addresses[0])
        yield listeners


@asynccontextmanager
async def libp2p_listeners(count: int, edges: Iterable[tuple[int, int]]) -> AsyncIterator[list[Listener]]:
    """The same on real sockets."""
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]))
            for _ in range(count)
        ]
        listeners = [await listener_on(stack, network) for network in networks]
        async with trio.open_nursery() as nursery:
            for one, other in edges:
                nursery.start_soon(networks[one].connect, networks[other].addresses[0])
        yield listeners


LISTENERS: dict[str, Callable[..., object]] = {"memory": memory_listeners, "libp2p": libp2p_listeners}


class Attacker:
    """A neighbour of a node: a network of its own, and RPCs as a test writes them."""

    def __init__(self, network: Network, stream: Stream, received: bytearray) -> None:
        self.network = network
        self.stream = stream
        self.received = received

    async def send(self, *rpcs: rpc_pb2.RPC) -> None:
        await self.stream.send(b"".join(framed(rpc.SerializeToString()) for rpc in rpcs))

    async def send_bytes(self, data: bytes) -> None:
        await self.stream.send(data)


@asynccontextmanager
async def attacker(node: Listener, *, reads: bool = True) -> AsyncIterator[Attacker]:
    """A real libp2p peer, connected to `node`, with a gossip stream of which the test writes each byte.

    `node` has a stream to it as well, of which everything is read, or nothing.
    """
    received = bytearray()

    async def listen(stream: Stream) -> None:
        while reads:
            received.extend(await stream.receive_exactly(1))
        await trio.sleep_forever()

    async with open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as network:
        network.serve(PROTOCOL, listen, max_streams_per_peer=4)
        await network.connect(node.network.addresses[0])
        stream = await network.open_stream(node.network.peer_id, PROTOCOL)
        await eventually(lambda: network.peer_id in node.gossip.neighbours())
        yield Attacker(network, stream, received)


def framed(data: bytes) -> bytes:
    size, head = len(data), bytearray()
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + data


def message(data: bytes, topic: str = TOPIC) -> rpc_pb2.Message:
    return rpc_pb2.Message(data=data, topicIDs=[topic])


def meshed(chance: random.Random, peers: int, backbone: int, wanted: int) -> list[tuple[int, int]]:
    """Everybody is connected to the backbone, and to others until there are `wanted` connections."""
    edges = {(hub, peer) for hub in range(backbone) for peer in range(hub + 1, peers)}
    for peer in range(peers):
        while sum(peer in edge for edge in edges) < wanted:
            other = chance.randrange(peers)
            if other != peer:
                edges.add((min(peer, other), max(peer, other)))
    return sorted(edges)


async def chatter(nodes: list[Listener], chance: random.Random, seconds: float) -> dict[bytes, float]:
    """Each node sends a heartbeat each 15 s, and each twentieth time an advert; when each was sent."""
    sent: dict[bytes, float] = {}

    async def speak(number: int, node: Listener) -> None:
        await trio.sleep(chance.uniform(0, 15))
        while True:
            size = ADVERT_BYTES if chance.random() < 15 / 300 else HEARTBEAT_BYTES
            data = b"%04d" % number + chance.randbytes(size - 4)
            sent[data] = trio.current_time()
            node.gossip.publish(TOPIC, data)
            await trio.sleep(15)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for number, node in enumerate(nodes):
                nursery.start_soon(speak, number, node)
    return sent


def spent(before: GossipStatistics, after: GossipStatistics, seconds: float) -> float:
    """Bytes a second on the wire that a node sent."""
    rpcs = after.rpcs_sent - before.rpcs_sent
    return (after.bytes_sent - before.bytes_sent + rpcs * RPC_OVERHEAD_BYTES) / seconds
