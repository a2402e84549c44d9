"""The Network of interface.py on real libp2p: TCP, Noise, yamux.

py-libp2p's host keeps the books (connections, identify, and later gossip and the DHT, through `host`). Everything that
bytes pass through is from this folder, because the original is slow, unbounded in places, and ends the process when a
peer provokes an exception in the wrong task. Handlers run in tasks of this network, behind one `except`.

    async with open_libp2p_network(identity, ["/ip4/0.0.0.0/tcp/4100"]) as network:
        network.serve("/example/1", handler, max_streams_per_peer=4)
        peer = await network.connect("/ip4/192.0.2.1/tcp/4100/p2p/12D3KooW...")
        stream = await network.open_stream(peer, "/example/1")
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import trio
from libp2p.abc import INotifee
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.rcmgr import Direction
from multiaddr import Multiaddr

from swarmnode.identity import Identity
from swarmnode.net import limits, multistream
from swarmnode.net.addresses import parse_dial_address, reachable
from swarmnode.net.admission import HandshakeGate
from swarmnode.net.counters import Counters
from swarmnode.net.groups import without_groups
from swarmnode.net.handlers import ConnectionNews, Handlers
from swarmnode.net.interface import (
    ConnectionCallback,
    ConnectionLost,
    DialFailed,
    ListenFailed,
    NetworkStatistics,
    PeerId,
    ProtocolNotSupported,
    StreamHandler,
)
from swarmnode.net.libp2p_adapters import (
    MuxedStream,
    NoAutoConnector,
    Upgrader,
    tame_libp2p_logging,
)
from swarmnode.net.loopback import Courier, Loopback
from swarmnode.net.muxer import Muxer
from swarmnode.net.muxer_stream import MuxerStream
from swarmnode.net.noise_session import NoiseHandshake
from swarmnode.net.tcp import TcpLink, TcpTransport

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Connection:
    muxer: Muxer
    dialed_here: bool


class Libp2pNetwork:
    """See interface.Network; made by `open_libp2p_network`. `host` is py-libp2p's, for its gossip and DHT."""

    host: BasicHost

    def __init__(self, identity: Identity, nursery: trio.Nursery, network_key: bytes | None) -> None:
        self.nursery = nursery
        self.counters = Counters()
        self._identity = identity
        self._gate = HandshakeGate()
        self._transport = TcpTransport(nursery, self._accept, self.counters, network_key)
        self.handlers = Handlers(self.counters)
        self._courier = Courier()
        self._loopback = Loopback(self, identity.peer_id, self._courier.carry)
        self._connections: dict[PeerId, list[_Connection]] = {}
        self._news = ConnectionNews()
        self._dialing: dict[PeerId, trio.Lock] = {}
        self._refused: list[Callable[[PeerId], bool]] = []
        upgrader = Upgrader(NoiseHandshake(identity.key_pair), self._admit, self.counters)
        self._swarm = _make_swarm(identity, upgrader, self._transport)
        self.host = BasicHost(
            self._swarm,
            addrs_factory=reachable,
            negotiate_timeout=int(limits.PROTOCOL_SECONDS_MAX),
            disable_identify_address_discovery=True,
        )
        self._swarm.set_stream_handler(self._on_libp2p_stream)
        self._swarm.register_notifee(_Watcher(self))

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(str(address) for address in self.host.get_addrs())

    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(self._connections)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._news.add(callback)

    def statistics(self) -> NetworkStatistics:
        self.counters.handshakes_pending = self._gate.pending
        return self.counters.snapshot()

    # --- Streams ---

    def serve(self, protocol: str, handler: StreamHandler, *, max_streams_per_peer: int) -> None:
        """See interface.Network."""
        self.handlers.add(protocol, handler, max_streams_per_peer)
        self.host.set_stream_handler(TProtocol(protocol), _only_listed)

    async def open_stream(self, peer: PeerId, protocol: str) -> MuxerStream:
        """See interface.Network."""
        if peer == self.peer_id:
            return await self._loopback.open_stream(protocol)
        connection = self._preferred(peer)
        if connection is None:
            raise ConnectionLost(f"there is no connection to {peer}")
        stream = connection.muxer.open_stream()
        stream.protocol = protocol
        agreed = False
        try:
            with trio.move_on_after(limits.OPEN_STREAM_SECONDS_MAX):
                await multistream.propose(stream, [protocol])
                agreed = True
        except multistream.NegotiationFailed as error:
            raise ProtocolNotSupported(f"{peer} does not serve {protocol}: {error}") from error
        finally:
            if not agreed:
                await stream.reset()
        if not agreed:
            raise ConnectionLost(f"{peer} did not answer for {limits.OPEN_STREAM_SECONDS_MAX:.0f} s")
        return stream

    async def _on_libp2p_stream(self, net_stream: Any) -> None:
        """A peer opened a stream. Runs in a task of libp2p's, which must see no exception."""
        muxed: MuxedStream = net_stream.muxed_stream
        try:
            with trio.fail_after(limits.PROTOCOL_SECONDS_MAX):
                protocol = await multistream.answer(muxed.stream, self.host.get_mux().get_protocols())
        except Exception as error:
            log.debug("stream refused", peer=muxed.stream.peer, reason=str(error))
            self.counters.streams_refused += 1
            await muxed.stream.reset()
            return
        muxed.stream.protocol = protocol
        if protocol in self.handlers:
            self.nursery.start_soon(self.handlers.run, muxed.stream)
            return
        try:
            net_stream.set_protocol(protocol)
            await self.host.get_mux().handlers[protocol](net_stream)
        except Exception as error:
            log.debug("libp2p handler failed", protocol=protocol, peer=muxed.stream.peer, error=repr(error))
            await muxed.stream.reset()

    # --- Connections ---

    async def connect(self, multiaddr: str) -> PeerId:
        """See interface.Network."""
        peer, address = parse_dial_address(multiaddr)
        if peer == self.peer_id:
            if multiaddr in self.addresses:
                return peer
            raise DialFailed(multiaddr, "that is this node's own identity (a copied data folder?)")
        lock = self._dialing.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if self._preferred(peer) is None:
                    await self._dial(multiaddr, address, ID.from_base58(peer))
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialing.pop(peer, None)
        return peer

    async def _dial(self, text: str, address: Multiaddr, peer: ID) -> None:
        link: TcpLink | None = None
        connected = False
        try:
            with trio.move_on_after(limits.CONNECT_SECONDS_MAX):
                link = await self._transport.dial_link(address)
                await self.host.upgrade_outbound_connection(link, peer)
                connected = True
        except Exception as error:  # libp2p wraps causes in its own exceptions
            raise DialFailed(text, _root_cause(error)) from error
        finally:
            if link is not None and not connected:
                link.close_now()
        if not connected:
            raise DialFailed(text, f"no answer for {limits.CONNECT_SECONDS_MAX:.0f} s")

    async def disconnect(self, peer: PeerId) -> None:
        """See interface.Network."""
        for connection in list(self._connections.get(peer, ())):
            connection.muxer.close("disconnected by this side")
            self._remove(connection)

    async def _accept(self, link: TcpLink, listened: Multiaddr) -> None:
        """An inbound connection; returns when it is a peer's or has failed to become one."""
        admitted = False
        try:
            with self._gate.place(link.get_remote_address()[0]):
                await self._swarm.upgrade_inbound_raw_conn(link, listened)
                admitted = True
        except Exception as error:
            log.debug("inbound connection failed", address=link.get_remote_address()[0], reason=_root_cause(error))
        finally:
            if not admitted:
                self.counters.junk_connections += 1
                link.close_now()

    def _admit(self, peer: PeerId) -> None:
        if peer == self.peer_id:
            raise ValueError("the other side has this node's identity (a copied data folder?)")
        if any(refused(peer) for refused in self._refused):
            raise ValueError("this node makes no connections with that peer")

    def refuse(self, refused: Callable[[PeerId], bool]) -> None:
        """See interface.Network."""
        self._refused.append(refused)

    def _preferred(self, peer: PeerId) -> _Connection | None:
        """If both sides dialed, both must prefer the same: one that the smaller id dialed, and of those the newest."""
        smaller_dialed_here = self.peer_id < peer
        open_ones = [each for each in self._connections.get(peer, ()) if not each.muxer.closed.is_set()]
        open_ones.sort(key=lambda each: each.dialed_here == smaller_dialed_here)
        return open_ones[-1] if open_ones else None

    def on_connected(self, muxer: Muxer, *, dialed_here: bool) -> None:
        """A connection is up; called by libp2p's swarm before the dial or the accept returns."""
        if len(self._connections.get(muxer.peer, ())) >= limits.CONNECTIONS_PER_PEER_MAX:
            muxer.break_off("too many connections of one peer")
            return
        connection = _Connection(muxer, dialed_here)
        self._connections.setdefault(muxer.peer, []).append(connection)
        if len(self._connections[muxer.peer]) == 1:
            self._news.tell(muxer.peer, up=True)
        self.nursery.start_soon(self._watch, connection)
        self._bound_peer_store()

    def _bound_peer_store(self) -> None:
        store = self.host.get_peerstore()
        if len(known := store.peer_ids()) > limits.KNOWN_PEERS_MAX:
            for peer in known:
                if peer != self.host.get_id() and PeerId(peer.to_base58()) not in self._connections:
                    store.clear_peerdata(peer)

    async def _watch(self, connection: _Connection) -> None:
        """Wait for the end of a connection; end it if it was dialed here, is idle, and the other one is preferred."""
        muxer = connection.muxer
        while not muxer.closed.is_set():
            with trio.move_on_after(limits.DUPLICATE_CHECK_SECONDS):
                await muxer.closed.wait()
            if connection.dialed_here and not muxer.streams_open and self._preferred(muxer.peer) is not connection:
                muxer.close("a spare connection")
        self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        peer = connection.muxer.peer
        others = [each for each in self._connections.get(peer, ()) if each is not connection]
        if others:
            self._connections[peer] = others
        elif self._connections.pop(peer, None):
            self._news.tell(peer, up=False)

    # --- Life ---

    async def listen(self, addresses: Iterable[str]) -> None:
        """Raises ListenFailed if one of them cannot be listened on."""
        for text in addresses:
            try:
                address = Multiaddr(text)
            except ValueError as error:
                raise ListenFailed(f"cannot listen on {text}: {error}") from None
            if not await self._swarm.listen(address):
                reason = self._transport.listen_errors.get(str(address), "only TCP addresses are supported")
                raise ListenFailed(f"cannot listen on {text}: {reason}")

    async def run_loopback(self) -> None:
        """Carry this node's streams to itself."""
        self.nursery.start_soon(self._courier.run)
        while True:
            await trio.sleep(limits.KEEPALIVE_TICK_SECONDS)
            self._loopback.check_waits(trio.current_time())

    def close_connections(self) -> None:
        for connections in list(self._connections.values()):
            for connection in connections:
                connection.muxer.close("this node shut down")


@asynccontextmanager
async def open_libp2p_network(
    identity: Identity, listen_addresses: Iterable[str], *, psk: bytes | None = None
) -> AsyncIterator[Libp2pNetwork]:
    """A running network. `psk`: the 32-byte key of a private network; who lacks it cannot connect.

    Raises ListenFailed. On leaving, all connections are closed and handlers cancelled.
    """
    tame_libp2p_logging()
    with without_groups():
        async with trio.open_nursery() as nursery:
            network = Libp2pNetwork(identity, nursery, psk)
            nursery.start_soon(network.run_loopback)
            try:
                async with network.host.run(listen_addrs=[]):
                    await network.listen(listen_addresses)
                    try:
                        yield network
                    finally:
                        network.close_connections()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(limits.DISCONNECT_SECONDS_MAX):
                    await network.host.close()
                nursery.cancel_scope.cancel()


def _make_swarm(identity: Identity, upgrader: Upgrader, transport: TcpTransport) -> Swarm:
    """py-libp2p's book of connections, with its retries, its auto-connector and its own limits out of the way."""
    peer_id = ID.from_pubkey(identity.key_pair.public_key)
    peer_store = PeerStore(max_peers=sys.maxsize)  # bounded in Libp2pNetwork
    peer_store.add_key_pair(peer_id, identity.key_pair)
    config = ConnectionConfig(
        max_connections=limits.CONNECTIONS_MAX,
        high_watermark=limits.CONNECTIONS_MAX,
        low_watermark=0,
        min_connections=0,
        max_connections_per_peer=limits.CONNECTIONS_PER_PEER_MAX,
        inbound_upgrade_timeout=2 * limits.HANDSHAKE_SECONDS_MAX,
        outbound_upgrade_timeout=2 * limits.HANDSHAKE_SECONDS_MAX,
    )
    swarm = Swarm(
        peer_id,
        peer_store,
        upgrader,
        [transport],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
    )
    swarm.auto_connector = NoAutoConnector(swarm)
    return swarm


class _Watcher(INotifee):  # type: ignore[misc]
    """The swarm's news of new connections. Their end is known earlier from the muxer itself."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network

    async def connected(self, network: Any, conn: Any) -> None:
        self._network.on_connected(conn.muxed_conn.muxer, dialed_here=conn.direction == Direction.OUTBOUND)

    async def disconnected(self, network: Any, conn: Any) -> None: ...

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...


async def _only_listed(_: Any) -> None:
    """Stands for a served protocol in libp2p's list, which identify shows to peers; never called."""


def _root_cause(error: BaseException) -> str:
    while deeper := error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__:
        error = deeper
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
