"""The DHT of dht.py on py-libp2p's Kademlia, with its sharp edges covered.

    async with open_kademlia(network, rank, server=True) as dht:
        await dht.put("/swarmnode/name", value)

Kademlia itself (routing table, look-ups) is the original. It gets a host that dials as this program does, reads so much
of a stream and no more, and answers what its addresses are from a cache; bounded stores; a rule for every value. Its
own service is not run: it would end the process with whatever it raises. What it does not do by itself is done here:
peers that connect enter the routing table; a look-up asks the network although there is a copy at hand.

`server` nodes keep things for others and are named to them, so they should be reachable: a node behind a NAT should
only ask. A provider's record is a claim that nobody has checked, and stays for an hour after its peer has died.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
import trio
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.common import ALPHA, PROTOCOL_ID, QUERY_TIMEOUT
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.records.validator import NamespacedValidator, Validator
from multiaddr import Multiaddr

from capabilities.errors import PeerMistake
from scheduler.rates import TokenBucket
from swarmnode.net import limits
from swarmnode.net.dht import DhtStatistics, RankValue
from swarmnode.net.groups import without_groups
from swarmnode.net.interface import ConnectionLost, DialFailed, PeerId
from swarmnode.net.kademlia_stores import BoundedProviders, BoundedValues
from swarmnode.net.libp2p_host import Libp2pNetwork

log = structlog.get_logger(__name__)

NAMESPACE = "swarmnode"
NAME_CHARS_MAX = 96
_IDENTIFY_SECONDS = (0.2, 1.0, 5.0, 30.0)
"""After a connection: identify needs a moment to learn the peer's addresses, without which it cannot be named."""


class KademliaNode:
    """See dht.Dht; made by `open_kademlia`."""

    def __init__(self, network: Libp2pNetwork, nursery: trio.Nursery, rank: RankValue, *, server: bool) -> None:
        self._network = network
        self._nursery = nursery
        self._rank = rank
        self._counts = Counter[str]()
        self._serving = Counter[PeerId]()
        self._reads: dict[PeerId, TokenBucket] = {}
        self._provides = TokenBucket(limits.DHT_PROVIDES_BURST, limits.DHT_PROVIDES_PER_SECOND, trio.current_time())
        self._closed = False
        host = _Host(network, self._counts)
        validator = NamespacedValidator({NAMESPACE: _Rule(self)}, strict_validation=True)
        self._dht = _Table(
            host,
            DHTMode.SERVER if server else DHTMode.CLIENT,
            validator=validator,
            validator_changed=True,
            strict_validation=True,
        )
        self._dht.value_store = BoundedValues(host, host.get_id())
        self._dht.provider_store = BoundedProviders(host, self._dht.peer_routing)
        self._dht._inbound_limiter = trio.CapacityLimiter(limits.DHT_STREAMS_MAX)
        if server:
            network.host.set_stream_handler(PROTOCOL_ID, self._serve)
        network.on_connection(self._on_connection)
        for peer in network.connected_peers():
            self._on_connection(peer, True)

    # --- See dht.Dht ---

    async def put(self, name: str, value: bytes) -> bool:
        self.check(name, value)
        store, key = self._dht.value_store, name.encode()
        store.put(key, value)
        with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
            try:
                return await self._each(await self._closest(key), lambda peer: store._store_at_peer(peer, key, value))
            except Exception as error:  # whatever peers' answers provoke in the original
                log.debug("storing in the DHT failed", name=name, reason=str(error))
        return False

    async def get(self, name: str) -> bytes | None:
        self._counts["lookups"] += 1
        store, key = self._dht.value_store.store, name.encode()
        kept = store.pop(key, None)  # or it would be all that the original looks at
        found: bytes | None = None
        try:
            with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
                found = await self._dht.get_value(name)
        except Exception as error:
            log.debug("looking up in the DHT failed", name=name, reason=str(error))
        if kept is not None and (found is None or self._rank(name, kept[0].value) > self._rank(name, found)):
            store[key] = kept
            return bytes(kept[0].value)
        return found

    async def provide(self, name: str) -> bool:
        await trio.sleep(self._provides.owe(trio.current_time(), 1))
        with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
            try:
                return bool(await self._dht.provider_store.provide(_hash(name)))
            except Exception as error:
                log.debug("providing in the DHT failed", name=name, reason=str(error))
        return False

    async def find_providers(self, name: str) -> tuple[PeerId, ...]:
        self._counts["lookups"] += 1
        store, key = self._dht.provider_store, _hash(name)
        kept = store.get_providers(key)
        store.providers.pop(key, None)
        found: list[Any] = []
        try:
            with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
                found = await store.find_providers(key, limits.DHT_PROVIDERS_PER_KEY_MAX)
        except Exception as error:
            log.debug("looking for providers failed", name=name, reason=str(error))
        finally:
            for provider in kept:
                store.add_provider(key, provider)
        peers = dict.fromkeys(PeerId(provider.peer_id.to_base58()) for provider in (*kept, *found))
        return tuple(peer for peer in peers if peer != self._network.peer_id)

    def statistics(self) -> DhtStatistics:
        return DhtStatistics(
            known_peers=self._dht.get_routing_table_size(),
            values_kept=self._dht.get_value_store_size(),
            providers_kept=self._dht.provider_store.size(),
            lookups=self._counts["lookups"],
            values_refused=self._counts["values_refused"],
            streams_refused=self._counts["streams_refused"],
            dials=self._counts["dials"],
        )

    async def _closest(self, key: bytes) -> list[ID]:
        closest = await self._dht.peer_routing.find_closest_peers_network(key)
        return [peer for peer in closest if peer != self._dht.local_peer_id]

    async def _each(self, peers: Sequence[ID], action: Callable[[ID], Awaitable[bool]]) -> bool:
        """Do `action` with all peers, a few at a time. Whether it succeeded with any."""
        places, successes = trio.CapacityLimiter(ALPHA), 0

        async def one(peer: ID) -> None:
            nonlocal successes
            async with places:
                with trio.move_on_after(QUERY_TIMEOUT):
                    successes += await action(peer)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(one, peer)
        return successes > 0

    # --- Peers ---

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        if self._closed:
            return
        if up:
            self._nursery.start_soon(self._enter, peer)

    async def _enter(self, peer: PeerId) -> None:
        """Put a connected peer into the routing table, once its addresses are known."""
        for pause_s in _IDENTIFY_SECONDS:
            await trio.sleep(pause_s)
            if self._closed or peer not in self._network.connected_peers():
                return
            with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
                if await self._dht.add_peer(ID.from_base58(peer)):
                    return

    # --- What peers ask ---

    async def _serve(self, stream: Any) -> None:
        """Handler of a peer's stream. Its exceptions end in the network."""
        peer = PeerId(stream.muxed_conn.peer_id.to_base58())
        if self._closed or self._serving[peer] >= limits.DHT_STREAMS_PER_PEER_MAX:
            self._counts["streams_refused"] += 1
            await stream.reset()
            return
        self._serving[peer] += 1
        try:
            with trio.move_on_after(limits.DHT_SERVE_SECONDS_MAX) as scope:
                await self._dht.handle_stream(_Bounded(stream, limits.DHT_REQUEST_BYTES_MAX, self._reads_of(peer)))
            if scope.cancelled_caught:
                self._counts["streams_refused"] += 1
                await stream.reset()
        finally:
            self._serving[peer] -= 1
            if not self._serving[peer]:
                del self._serving[peer]

    def _reads_of(self, peer: PeerId) -> TokenBucket:
        """How much the peer may still ask; remembered for a while after it has left."""
        reads = self._reads.pop(peer, None)
        if reads is None:
            reads = TokenBucket(limits.DHT_READS_BURST, limits.DHT_READS_PER_SECOND, trio.current_time())
        self._reads[peer] = reads
        if len(self._reads) > limits.DHT_RATES_MAX:
            del self._reads[next(iter(self._reads))]
        return reads

    def check(self, name: str, value: bytes) -> int:
        """The rank of a value, whoever brought it. Raises PeerMistake."""
        if len(name) > NAME_CHARS_MAX or len(value) > limits.DHT_VALUE_BYTES_MAX:
            raise PeerMistake(f"a value of {len(value):,} bytes under a name of {len(name)}")
        return self._rank(name, value)

    def refused(self) -> None:
        self._counts["values_refused"] += 1

    # --- Life ---

    async def look_around(self) -> None:
        """Refresh the routing table now and then; drop what is too old."""
        pause_s = limits.DHT_FIRST_REFRESH_SECONDS
        while True:
            await trio.sleep(pause_s)
            pause_s = limits.DHT_REFRESH_SECONDS
            try:
                with trio.move_on_after(limits.DHT_LOOKUP_SECONDS_MAX):
                    await self._dht.peer_routing.refresh_routing_table()
                self._dht.value_store.cleanup_expired()
                self._dht.provider_store.cleanup_expired()
                self._forget_peers()
            except Exception:
                log.exception("refreshing the DHT failed")

    def _forget_peers(self) -> None:
        """Answers name peers without end; the book of those that are not connected is bounded like the network's."""
        store = self._network.host.get_peerstore()
        if len(known := store.peer_ids()) > limits.KNOWN_PEERS_MAX:
            connected = set(self._network.connected_peers())
            for peer in known:
                if peer != self._network.host.get_id() and PeerId(peer.to_base58()) not in connected:
                    store.clear_peerdata(peer)

    def close(self) -> None:
        self._closed = True


@asynccontextmanager
async def open_kademlia(network: Libp2pNetwork, rank: RankValue, *, server: bool) -> AsyncIterator[KademliaNode]:
    """A running node. On leaving it takes no part any more; the network stays."""
    with without_groups():
        async with trio.open_nursery() as nursery:
            node = KademliaNode(network, nursery, rank, server=server)
            nursery.start_soon(node.look_around)
            try:
                yield node
            finally:
                node.close()
                nursery.cancel_scope.cancel()


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class _Table(KadDHT):  # type: ignore[misc]
    """The original takes whoever asks something for a peer that also answers; identify knows better."""

    async def add_peer(self, peer_id: ID, *, skip_server_mode_check: bool = False) -> bool:
        return bool(await super().add_peer(peer_id))


class _Rule(Validator):  # type: ignore[misc]
    """The rule for values, as py-libp2p wants it."""

    def __init__(self, node: KademliaNode) -> None:
        self._node = node

    def validate(self, key: str, value: bytes) -> None:
        try:
            self._node.check(key, value)
        except PeerMistake:
            self._node.refused()
            raise

    def select(self, key: str, values: list[bytes]) -> int:
        """The first of the best ones."""
        ranks = [self._node.check(key, value) for value in values]
        return ranks.index(max(ranks))


class _Host:
    """py-libp2p's host for its DHT: it dials with this program's means, and does not ask the system all the time."""

    def __init__(self, network: Libp2pNetwork, counts: Counter[str]) -> None:
        self._network = network
        self._counts = counts
        self._dials = TokenBucket(limits.DHT_DIALS_BURST, limits.DHT_DIALS_PER_SECOND, trio.current_time())
        self._addresses: list[Multiaddr] = []
        self._addresses_at = -limits.DHT_ADDRESSES_CACHED_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network.host, name)

    def set_stream_handler(self, protocol: TProtocol, handler: Any) -> None:
        """The node has its own."""

    def get_addrs(self) -> list[Multiaddr]:
        now = trio.current_time()
        if now - self._addresses_at >= limits.DHT_ADDRESSES_CACHED_SECONDS:
            self._addresses, self._addresses_at = self._network.host.get_addrs(), now
        return self._addresses

    async def new_stream(self, peer: ID, protocols: Sequence[TProtocol]) -> _Bounded:
        if PeerId(peer.to_base58()) not in self._network.connected_peers():
            await self._dial(peer)
        return _Bounded(await self._network.host.new_stream(peer, protocols), limits.DHT_REPLY_BYTES_MAX)

    async def _dial(self, peer: ID) -> None:
        if not self._dials.take(trio.current_time()):
            raise ConnectionLost("too many connections are being made for look-ups")
        self._counts["dials"] += 1
        for address in self._network.host.get_peerstore().addrs(peer)[: limits.DHT_DIAL_ADDRESSES_MAX]:
            text = str(address).partition("/p2p/")[0]
            with trio.move_on_after(limits.DHT_DIAL_SECONDS_MAX):
                try:
                    await self._network.connect(f"{text}/p2p/{peer.to_base58()}")
                    return
                except DialFailed as error:
                    log.debug("a peer of the DHT cannot be reached", peer=peer.to_base58(), reason=error.reason)
        raise ConnectionLost("no address of the peer answers")


class _Bounded:
    """A stream of py-libp2p's of which only so many bytes are read, as fast as `reads` allows."""

    def __init__(self, stream: Any, bytes_max: int, reads: TokenBucket | None = None) -> None:
        self._stream = stream
        self._left = bytes_max
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int | None = None) -> bytes:
        if n is not None and n > self._left:
            raise PeerMistake("a message of the DHT is too long")
        if self._reads is not None:
            await trio.sleep(self._reads.owe(trio.current_time(), 1))
        data: bytes = await self._stream.read(n)
        self._left -= len(data)
        return data
