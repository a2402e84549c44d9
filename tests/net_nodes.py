"""Nodes of the real network for tests, and a peer of theirs whose frames are in the hands of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.identity import Identity
from swarmnode.net import multistream
from swarmnode.net.counters import Counters
from swarmnode.net.libp2p_adapters import OWN_MUXER
from swarmnode.net.libp2p_host import Libp2pNetwork, open_libp2p_network
from swarmnode.net.noise_session import NoiseHandshake
from swarmnode.net.tcp import TcpTransport
from tests.net_tools import RawPeer, accept_nothing
from tests.patience import PATIENCE_S
from tests.test_net_conformance import ECHO, LOOPBACK, ask, echo


@asynccontextmanager
async def network(identity: Identity | None = None, psk: bytes | None = None) -> AsyncIterator[Libp2pNetwork]:
    """A node that serves ECHO on loopback."""
    async with open_libp2p_network(identity or Identity.generate(), LOOPBACK, psk=psk) as opened:
        opened.serve(ECHO, echo, max_streams_per_peer=8)
        yield opened


async def check_service(node: Libp2pNetwork) -> None:
    """A newcomer connects to `node` and is served, soon."""
    with trio.fail_after(PATIENCE_S):
        async with network() as newcomer:
            await newcomer.connect(node.addresses[0])
            assert await ask(await newcomer.open_stream(node.peer_id, ECHO), b"honest") == b"honest"


def port_of(node: Libp2pNetwork) -> int:
    return int(node.addresses[0].split("/")[4])


def protocols(node: Libp2pNetwork, peer: ID) -> list[str]:
    store = node.host.get_peerstore()
    return list(store.get_protocols(peer)) if store.has_peer(peer) else []


@asynccontextmanager
async def raw_peer(node: Libp2pNetwork, identity: Identity | None = None) -> AsyncIterator[RawPeer]:
    """A connection to `node`, muxer agreed, whose frames are in the hands of the test."""
    async with trio.open_nursery() as nursery:
        transport = TcpTransport(nursery, accept_nothing, Counters(), None)
        link = await transport.dial_link(Multiaddr(f"/ip4/127.0.0.1/tcp/{port_of(node)}"))
        try:
            await multistream.propose(link, ["/noise"])
            handshake = NoiseHandshake((identity or Identity.generate()).key_pair)
            session = await handshake.initiate(link, ID.from_base58(node.peer_id))
            await multistream.propose(session, [OWN_MUXER])
            yield RawPeer(session)
        finally:
            link.close_now()
            nursery.cancel_scope.cancel()
