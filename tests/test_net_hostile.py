"""Strangers and peers that misbehave, against a whole node: after each of them it serves the next honest peer.

What the rules of the muxer are is in test_net_muxer_rules.py.
"""

from __future__ import annotations

import contextlib

import libp2p
import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarmnode.identity import Identity
from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost, NetworkError
from swarmnode.net.libp2p_adapters import STOCK_MUXER
from tests.net_nodes import check_service, network, port_of, protocols, raw_peer
from tests.net_tools import ACK, DATA, PING, RST, SYN, WINDOW, eventually, frame
from tests.patience import PATIENCE_S, turns
from tests.test_net_conformance import ECHO, ask

# --- Strangers --------------------------------------------------------------------------------------------------------

JUNK = {
    "zeros": bytes(1000),
    "random": bytes(range(256)) * 40,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(100),
    "endless line": b"\xff\xff\xff\xff\x7f",
    "junk for a handshake": b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\x00\x20" + b"\xff" * 32,
    "a huge handshake message": b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + bytes(65_535),
    "not UTF-8": b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
async def test_junk_instead_of_a_handshake(junk: bytes) -> None:
    async with network() as node:
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(node))
        async with stream:
            await stream.send_all(junk)
            await stream.send_eof()
            with trio.fail_after(PATIENCE_S):
                await read_to_end(stream)
        await eventually(lambda: node.statistics().junk_connections == 1)
        assert node.statistics().connections_open == node.statistics().handshakes_pending == 0
        await check_service(node)


async def read_to_end(stream: trio.SocketStream) -> None:
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass


async def test_300_idle_connections_hurt_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS_MAX", 4.0)
    async with network() as node:
        idle = [await trio.open_tcp_stream("127.0.0.1", port_of(node)) for _ in range(300)]
        try:
            assert 0 < node.statistics().handshakes_pending <= limits.PENDING_HANDSHAKES_MAX
            await check_service(node)
            assert node.statistics().handshakes_pending > 0  # served while they were there, not after
            with trio.fail_after(PATIENCE_S):
                for stream in idle:
                    await read_to_end(stream)
            await eventually(lambda: node.statistics().junk_connections == 300)
        finally:
            for stream in idle:
                await stream.aclose()


async def test_a_handshake_in_single_bytes_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS_MAX", 0.5)
    async with network() as node:
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(node))
        started = trio.current_time()

        async def send_slowly() -> None:
            for byte in b"\x13/multistream/1.0.0\n" * 9:
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.05)

        with pytest.raises(trio.BrokenResourceError):
            await send_slowly()
        assert trio.current_time() - started > 0.4
        await stream.aclose()


async def test_plaintext_is_refused() -> None:
    key_pair = libp2p.create_new_ed25519_key_pair()
    plaintext = {TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(key_pair)}
    host = libp2p.new_host(key_pair=key_pair, sec_opt=plaintext, muxer_opt={TProtocol(STOCK_MUXER): Yamux})
    async with network() as node:
        async with host.run(listen_addrs=[]):
            with pytest.raises(Exception, match="unable to connect"), trio.fail_after(PATIENCE_S):
                await host.connect(info_from_p2p_addr(Multiaddr(node.addresses[0])))
            await host.close()
        assert node.connected_peers() == ()
        assert node.statistics().junk_connections > 0


# --- Peers that misbehave once they are in ----------------------------------------------------------------------------


STREAM_JUNK = {
    "66 bytes": b"\x8f" * 66,
    "not UTF-8": b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
    "a line of zero bytes": b"\x00",
    "a protocol that nobody serves": b"\x13/multistream/1.0.0\n\x06/none\n" * 9,
    "junk for gossip": b"\x13/multistream/1.0.0\n\x0f/meshsub/1.1.0\n" + b"\x8f" * 66,
    "junk for identify/push": b"\x13/multistream/1.0.0\n\x14/ipfs/id/push/1.0.0\n" + b"\x40" + b"\x8f" * 64,
    "junk for ping": b"\x13/multistream/1.0.0\n\x11/ipfs/ping/1.0.0\n" + b"\x8f" * 7,
}


@pytest.mark.parametrize("junk", STREAM_JUNK.values(), ids=STREAM_JUNK.keys())
async def test_junk_on_a_stream_harms_the_stream_only(junk: bytes) -> None:
    async with network() as node, raw_peer(node) as peer:
        await peer.send(frame(DATA, SYN, 1, len(junk), junk), frame(DATA, 4, 1, 0))
        await eventually(lambda: node.statistics().streams_open <= 1)  # libp2p's own identify stream may remain
        await peer.send(frame(PING, SYN, 0, 1))
        assert await peer.skip_to(PING, ACK)
        await check_service(node)


async def test_66_bytes_of_junk_after_the_handshake_end_the_connection() -> None:
    async with network() as node, raw_peer(node) as peer:
        await eventually(lambda: len(node.connected_peers()) == 1)
        await peer.session.link.send(b"\x8f" * 66)  # a length beyond what follows: nothing can be opened yet
        await peer.session.link.send(b"\x8f" * 40_000)
        assert await peer.closed()
        assert node.statistics().connections_broken == 1
        await check_service(node)


async def test_overrunning_a_window_ends_the_connection() -> None:
    async with network() as node, raw_peer(node) as peer:
        proposal = b"\x13/multistream/1.0.0\n" + bytes([len(ECHO) + 1]) + ECHO.encode() + b"\n"
        await peer.send(frame(DATA, SYN, 1, len(proposal), proposal))
        with contextlib.suppress(ConnectionLost):
            await peer.send(frame(DATA, 0, 1, limits.FIRST_WINDOW_BYTES, bytes(limits.FIRST_WINDOW_BYTES)))
        assert await peer.closed()
        await eventually(lambda: node.statistics().connections_broken == 1)
        await check_service(node)


async def test_a_stream_that_never_names_its_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROTOCOL_SECONDS_MAX", 0.2)
    async with network() as node, raw_peer(node) as peer:
        await peer.send(frame(WINDOW, SYN, 1, 0))
        got = await peer.skip_to(WINDOW, RST)
        while got[2] != 1:
            got = await peer.skip_to(WINDOW, RST)
        assert node.statistics().streams_refused >= 1


async def test_junk_in_answer_to_identify_is_survived() -> None:
    """The node asks every newcomer who it is: libp2p runs that where an exception would end the process."""
    async with network() as node, raw_peer(node) as peer:
        opened = await peer.skip_to(WINDOW, SYN)
        answer = b"\x13/multistream/1.0.0\n\x0f/ipfs/id/1.0.0\n" + b"\xff\xff\x03" + b"\x8f" * 200
        await peer.send(frame(DATA, 0, opened[2], len(answer), answer), frame(WINDOW, RST, opened[2], 0))
        await turns()
        await check_service(node)


async def test_connections_of_one_peer_are_limited() -> None:
    identity = Identity.generate()
    async with network() as node, trio.open_nursery() as nursery:

        async def connect_and_stay() -> None:
            async with raw_peer(node, identity):
                await trio.sleep_forever()

        async def try_to() -> None:
            with contextlib.suppress(NetworkError, ExceptionGroup):
                await connect_and_stay()

        for _ in range(10):
            nursery.start_soon(try_to)
        await eventually(lambda: node.statistics().connections_broken == 10 - limits.CONNECTIONS_PER_PEER_MAX)
        assert node.statistics().connections_open == limits.CONNECTIONS_PER_PEER_MAX
        await check_service(node)
        nursery.cancel_scope.cancel()


async def test_all_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 2)
    async with network() as node, network() as first, network() as second, network() as third:
        for each in (first, second):
            await each.connect(node.addresses[0])

        async def connect_and_use() -> None:
            await third.connect(node.addresses[0])
            await third.open_stream(node.peer_id, ECHO)

        with pytest.raises(NetworkError), trio.fail_after(PATIENCE_S):
            await connect_and_use()
        await first.disconnect(node.peer_id)
        await eventually(lambda: len(node.connected_peers()) == 1)
        await eventually(lambda: third.connected_peers() == ())
        await third.connect(node.addresses[0])
        assert await ask(await third.open_stream(node.peer_id, ECHO), b"place") == b"place"


async def test_what_peers_tell_about_themselves_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KNOWN_PEERS_MAX", 4)
    async with network() as node:
        for _ in range(8):
            async with network() as visitor:
                peer = ID.from_base58(await node.connect(visitor.addresses[0]))
                await eventually(lambda peer=peer: ECHO in protocols(node, peer))  # type: ignore[misc]
            await eventually(lambda: node.connected_peers() == ())
        assert 2 <= len(node.host.get_peerstore().peer_ids()) <= 5
        await check_service(node)
        assert node.host.get_private_key()


async def test_nobody_is_dialed_who_was_not_asked_for() -> None:
    """libp2p would dial all addresses that it ever heard of, to have many connections."""
    async with network() as node, network() as other:
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port_of(other)}")
        node.host.get_peerstore().add_addrs(ID.from_base58(other.peer_id), [address], 3600)
        await node.host.get_network().auto_connector.maybe_connect()
        await turns()
        assert node.connected_peers() == other.connected_peers() == ()
