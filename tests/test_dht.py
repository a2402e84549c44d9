"""The DHT: values and providers are found by peers that never met, and neither junk nor idlers shut anybody out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from capabilities.errors import PeerMistake
from swarmnode.identity import Identity
from swarmnode.net import limits
from swarmnode.net.dht import Dht, DhtHub
from swarmnode.net.interface import PeerId, Stream, StreamReset
from swarmnode.net.kademlia import KademliaNode, open_kademlia
from swarmnode.net.kademlia_stores import BoundedProviders, BoundedValues
from swarmnode.net.libp2p_host import Libp2pNetwork, open_libp2p_network
from tests.gossip_tools import framed
from tests.net_tools import eventually
from tests.patience import PATIENCE_S

KAD = "/ipfs/kad/1.0.0"
NAME = "/swarmnode/5a5a/name"


def rank(name: str, value: bytes) -> int:
    """Values are `<number> of <name>`."""
    number, _, owner = value.partition(b" of ")
    if owner.decode() != name or not number.isdigit():
        raise PeerMistake("not a value of this name")
    return int(number)


def value(number: int, name: str = NAME) -> bytes:
    return f"{number} of {name}".encode()


class Node:
    def __init__(self, network: Libp2pNetwork, dht: KademliaNode) -> None:
        self.network = network
        self.dht = dht


@asynccontextmanager
async def chain(count: int, clients: frozenset[int] = frozenset()) -> AsyncIterator[list[Node]]:
    """Real nodes, each connected to the one before, which know of each other by Kademlia alone."""
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for index in range(count):
            network = await stack.enter_async_context(
                open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"])
            )
            dht = await stack.enter_async_context(open_kademlia(network, rank, server=index not in clients))
            nodes.append(Node(network, dht))
            if index:
                await network.connect(nodes[index - 1].network.addresses[0])
        for index, node in enumerate(nodes):
            servers = len({index - 1, index + 1} & set(range(count)) - clients)
            await eventually(lambda node=node, servers=servers: node.dht.statistics().known_peers >= servers)
        yield nodes


@asynccontextmanager
async def real(count: int) -> AsyncIterator[list[Dht]]:
    async with chain(count) as nodes:
        yield [node.dht for node in nodes]


@asynccontextmanager
async def in_memory(count: int) -> AsyncIterator[list[Dht]]:
    hub = DhtHub(rank)
    yield [hub.join(PeerId(f"peer{index}")) for index in range(count)]


both = pytest.mark.parametrize("dhts", [in_memory, real])


@both
async def test_values_and_providers_are_found_from_afar(dhts: Callable[[int], Any]) -> None:
    async with dhts(5) as (first, second, _, _, last):
        assert await last.get(NAME) is None
        assert await first.put(NAME, value(1))
        assert await last.get(NAME) == value(1)
        assert await first.put(NAME, value(2))
        assert await last.get(NAME) == value(2), "a copy at hand is not all that is looked at"
        await second.put(NAME, value(1))
        assert await last.get(NAME) == value(2), "an older one replaces nothing"
        with pytest.raises(PeerMistake):
            await first.put(NAME, b"junk")
        with pytest.raises(PeerMistake):
            await first.put(NAME, b"0" * 9_000 + value(1))

        assert await last.find_providers("layers 0-15") == ()
        assert await first.provide("layers 0-15")
        assert await second.provide("layers 0-15")
        for _ in range(2):
            assert await second.provide("layers 0-15")
        found = await last.find_providers("layers 0-15")
        assert len(found) == len(set(found)) == 2
        assert len(await second.find_providers("layers 0-15")) == 1
        assert last.statistics().lookups >= 5


async def test_a_node_that_cannot_be_reached_asks_without_being_named_to_others() -> None:
    async with chain(4, clients=frozenset((3,))) as nodes:
        assert await nodes[0].dht.put(NAME, value(7))
        assert await nodes[3].dht.get(NAME) == value(7)
        known = [ID.to_base58(peer) for node in nodes[:3] for peer in node.dht._dht.routing_table.get_peer_ids()]
        assert nodes[3].network.peer_id not in known


async def test_an_old_copy_at_hand_does_not_hide_what_others_know() -> None:
    async with chain(3) as nodes:
        assert await nodes[0].dht.put(NAME, value(5))
        store, key = nodes[2].dht._dht.value_store, NAME.encode()
        store.put_record(key, Record(key=key, value=value(1)))
        assert await nodes[2].dht.get(NAME) == value(5)
        assert store.get(key).value == value(5)
        for node in nodes[:2]:
            node.dht._dht.value_store.put_record(key, Record(key=key, value=value(3)))
        assert await nodes[2].dht.get(NAME) == value(5), "what is at hand counts as well"


async def test_a_node_alone_has_only_what_it_put() -> None:
    async with chain(1) as (node,):
        with trio.fail_after(PATIENCE_S):
            assert not await node.dht.put(NAME, value(3))
            assert await node.dht.get(NAME) == value(3)
            assert await node.dht.get("/swarmnode/other") is None
            assert await node.dht.find_providers("x") == ()


# -- hostile peers -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stranger(node: Node) -> AsyncIterator[Libp2pNetwork]:
    async with open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as network:
        await network.connect(node.network.addresses[0])
        yield network


async def ask(network: Libp2pNetwork, node: Node, data: bytes) -> Stream:
    stream = await network.open_stream(node.network.peer_id, KAD)
    await stream.send(data)
    return stream


def put_message(name: bytes, content: bytes) -> bytes:
    message = Message(type=Message.PUT_VALUE, key=name)
    message.record.CopyFrom(Record(key=name, value=content))
    return framed(message.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xff\xff junk"),
        b"\xff\xff\xff\x7f",
        framed(os.urandom(limits.DHT_REQUEST_BYTES_MAX - 10)),
        put_message(NAME.encode(), b"junk"),
        put_message(b"/swarmnode/other", value(9)),
        put_message(b"no namespace", b"x"),
        put_message(b"/pk/x", b"x"),
        put_message(b"\xff\xfe", b"x"),
        put_message(NAME.encode(), b"1 of " + b"x" * 9_000),
        framed(Message(type=Message.FIND_NODE, key=b"").SerializeToString()),
        framed(Message(type=Message.GET_VALUE, key=b"x" * 200).SerializeToString()),
    ],
    ids=range(11),
)
async def test_junk_is_refused_and_the_node_lives(data: bytes) -> None:
    async with chain(2) as nodes, stranger(nodes[0]) as network:
        stream = await ask(network, nodes[0], data)
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamReset):
            await stream.receive_exactly(10_000)
        assert nodes[0].dht.statistics().values_kept == 0
        assert await nodes[1].dht.put(NAME, value(1))
        assert await nodes[0].dht.get(NAME) == value(1)


async def test_silent_streams_do_not_shut_others_out() -> None:
    async with chain(2) as nodes, stranger(nodes[0]) as network:
        for _ in range(20):
            with contextlib.suppress(StreamReset):
                await ask(network, nodes[0], b"\x7f")
        await eventually(lambda: nodes[0].dht.statistics().streams_refused >= 20 - limits.DHT_STREAMS_PER_PEER_MAX)
        assert await nodes[1].dht.put(NAME, value(1))


async def test_silent_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DHT_SERVE_SECONDS_MAX", 0.2)
    async with chain(1) as (node,), stranger(node) as network:
        stream = await ask(network, node, b"\x7f")
        with trio.fail_after(PATIENCE_S), pytest.raises(StreamReset):
            await stream.receive_exactly(1)
        assert node.dht.statistics().streams_refused == 1


async def test_a_provider_must_be_who_says_so() -> None:
    async with chain(2) as nodes, stranger(nodes[0]) as network:
        key = bytes(32)
        message = Message(type=Message.ADD_PROVIDER, key=key)
        victim = ID.from_base58(nodes[1].network.peer_id)
        message.providerPeers.add(id=victim.to_bytes(), addrs=[Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes()])
        await ask(network, nodes[0], framed(message.SerializeToString()))
        await trio.sleep(0.3)
        assert nodes[0].dht.statistics().providers_kept == 0


# -- bounds ------------------------------------------------------------------------------------------------------------


class StoreHost:
    """What the stores need of a host."""

    def __init__(self) -> None:
        self.keys = create_new_key_pair()

    def get_id(self) -> ID:
        return ID.from_pubkey(self.keys.public_key)

    def get_private_key(self) -> Any:
        return self.keys.private_key


def test_values_are_bounded_and_own_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DHT_VALUES_MAX", 4)
    host = StoreHost()
    store = BoundedValues(host, host.get_id())
    store.put(b"own", b"1")
    for index in range(10):
        store.put_record(b"key%d" % index, Record(key=b"key%d" % index, value=b"1"))
    assert set(store.store) == {b"own", b"key7", b"key8", b"key9"}
    _, until = store.store[b"key9"]
    assert until <= time.time() + limits.DHT_VALUE_SECONDS_MAX


def provider(index: int) -> PeerInfo:
    return PeerInfo(ID(b"\x00\x24" + index.to_bytes(36, "big")), [Multiaddr("/ip4/127.0.0.1/tcp/1")] * 20)


def test_providers_are_bounded_in_every_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DHT_PROVIDER_KEYS_MAX", 50)
    store = BoundedProviders(StoreHost())
    keys = [index.to_bytes(32, "big") for index in range(100)]
    for index in range(30):
        store.add_provider(keys[0], provider(index))
    assert len(store.get_providers(keys[0])) == limits.DHT_PROVIDERS_PER_KEY_MAX
    assert store.get_providers(keys[0])[-1].peer_id == provider(29).peer_id, "the newest stay"
    assert all(len(each.addrs) <= 8 for each in store.get_providers(keys[0]))
    store.add_provider(b"short", provider(1))
    for key in keys[:80]:
        store.add_provider(key, provider(99))
    assert b"short" not in store.providers
    assert len(store.providers) == 50
    held = sum(str(provider(99).peer_id) in known for known in store.providers.values())
    assert held <= limits.DHT_KEYS_PER_PROVIDER_MAX


def test_providers_expire_after_an_hour() -> None:
    store = BoundedProviders(StoreHost())
    store.add_provider(bytes(32), provider(1))
    for known in store.providers.values():
        for record in known.values():
            record.timestamp -= limits.DHT_PROVIDER_SECONDS_MAX + 1
    store.add_provider(bytes(32), provider(2))
    assert [each.peer_id for each in store.get_providers(bytes(32))] == [provider(2).peer_id]
