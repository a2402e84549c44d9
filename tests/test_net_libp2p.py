"""The network on real sockets, in what a conformance test cannot do: processes that die, libp2p of other makes,
addresses, private networks. What any Network must do is in test_net_conformance.py; junk is in test_net_hostile.py.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import libp2p
import psutil
import pytest
import trio
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as StockNoise
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarmnode.identity import Identity
from swarmnode.net import addresses, limits
from swarmnode.net.addresses import machine_addresses
from swarmnode.net.interface import ConnectionLost, DialFailed, ListenFailed, PeerId, Stream, StreamReset
from swarmnode.net.libp2p_adapters import STOCK_MUXER
from swarmnode.net.libp2p_host import open_libp2p_network
from tests.net_nodes import network, port_of, protocols
from tests.net_tools import eventually
from tests.patience import LOADED, PATIENCE_S, turns
from tests.test_net_conformance import ECHO, LOOPBACK, ask

MEASURE = "/measure/1"


@contextmanager
def process(kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A peer in a process of its own, that echoes on MEASURE, and its address."""
    command = [sys.executable, "-m", "tests.measure_net", "--serve", kind, "--folder", "."]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# --- Processes that die -----------------------------------------------------------------------------------------------


async def test_a_killed_peer_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 2 * PATIENCE_S)  # it is not by this that it is noticed
    with process("ours") as (child, address):
        async with network() as node:
            peer = await node.connect(address)
            stream = await node.open_stream(peer, MEASURE)
            assert await ask(stream, b"alive") == b"alive"
            child.send_signal(signal.SIGKILL)
            with pytest.raises(ConnectionLost), trio.fail_after(PATIENCE_S):
                await stream.receive_exactly(1)
            await eventually(lambda: node.connected_peers() == ())


async def test_a_suspended_peer_is_noticed_by_the_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.1)
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 2.0)
    with process("ours") as (child, address):
        async with network() as node:
            peer = await node.connect(address)
            stream = await node.open_stream(peer, MEASURE)
            assert await ask(stream, b"alive") == b"alive"
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(ConnectionLost, match="no sign of life"), trio.fail_after(PATIENCE_S):
                await stream.receive_exactly(1)
            child.send_signal(signal.SIGCONT)
            assert await node.connect(address) == peer
            assert await ask(await node.open_stream(peer, MEASURE), b"back") == b"back"


# --- libp2p of another make -------------------------------------------------------------------------------------------


def stock_host() -> Any:
    key_pair = libp2p.create_new_ed25519_key_pair()
    noise = StockNoise(key_pair, noise_privkey=create_new_key_pair().private_key)
    return libp2p.new_host(key_pair=key_pair, sec_opt={NOISE: noise}, muxer_opt={TProtocol(STOCK_MUXER): Yamux})


def exactly(stream: Any) -> Callable[[int], Awaitable[bytes]]:
    async def receive_exactly(n: int) -> bytes:
        data = b""
        while len(data) < n:
            data += await stream.read(n - len(data))
        return data

    return receive_exactly


async def test_a_stock_peer_dials_us_and_is_served() -> None:
    host = stock_host()
    async with network() as node, host.run(listen_addrs=[]):
        await host.connect(info_from_p2p_addr(Multiaddr(node.addresses[0])))
        peer = ID.from_base58(node.peer_id)
        stream = await host.new_stream(peer, [TProtocol("/test/none"), TProtocol(ECHO)])
        for size in (10, 100_000, 3_000_000):
            data = os.urandom(size)
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.write, size.to_bytes(4, "little") + data)
                    assert await exactly(stream)(4 + size) == size.to_bytes(4, "little") + data
        await stream.close()
        assert len(await PingService(host).ping(peer, 1)) == 1
        await host.close()


async def test_we_dial_a_stock_peer_and_are_served() -> None:
    """Its yamux sends frames larger than ours, and another first window would break it."""
    with process("stock") as (_, address):
        async with network() as node:
            peer = await node.connect(address)
            stream = await node.open_stream(peer, MEASURE)
            for size in (10, 100_000, 3_000_000):
                with trio.fail_after(PATIENCE_S):
                    assert await ask(stream, os.urandom(size))
            await stream.aclose()
            await eventually(lambda: node.statistics().streams_open == 0)


async def test_identify_tells_what_we_serve() -> None:
    async with network() as node, network() as other:
        peer = ID.from_base58(await other.connect(node.addresses[0]))
        await eventually(lambda: ECHO in protocols(other, peer))


async def test_libp2ps_own_protocols_run_over_our_muxer() -> None:
    async with network() as node, network() as other:
        peer = ID.from_base58(await other.connect(node.addresses[0]))
        round_trips = await PingService(other.host).ping(peer, 3)
        assert len(round_trips) == 3


# --- Addresses and dialing --------------------------------------------------------------------------------------------


async def test_a_dead_address_does_not_spoil_the_next() -> None:
    async with network() as node, network() as other:
        dead = f"/ip4/127.0.0.1/tcp/{unused_port()}/p2p/{node.peer_id}"
        started = trio.current_time()
        for _ in range(3):
            with pytest.raises(DialFailed, match="refused"):
                await other.connect(dead)
        assert await other.connect(node.addresses[0]) == node.peer_id
        assert trio.current_time() - started < LOADED


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_an_address_that_swallows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_SECONDS_MAX", 0.3)
    async with network() as node:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        with pytest.raises(DialFailed, match="no answer"):
            await node.connect(address)
        await listener.aclose()


async def test_another_peer_answers_at_the_address() -> None:
    async with network() as node, network() as other:
        with pytest.raises(DialFailed, match="does not correspond"):
            await other.connect(f"/ip4/127.0.0.1/tcp/{port_of(node)}/p2p/{Identity.generate().peer_id}")
        await eventually(lambda: node.connected_peers() == ())


async def test_a_copied_data_folder_is_named() -> None:
    identity = Identity.generate()
    async with network(identity) as node, network(identity) as twin:
        with pytest.raises(DialFailed, match="copied data folder"):
            await twin.connect(node.addresses[0])


async def test_names_and_ipv6_can_be_dialed() -> None:
    async with open_libp2p_network(Identity.generate(), ["/ip6/::1/tcp/0", *LOOPBACK]) as node, network() as other:
        assert node.addresses[0].startswith("/ip6/::1/")
        await other.connect(node.addresses[0])
        await other.disconnect(node.peer_id)
        assert await other.connect(node.addresses[1].replace("/ip4/127.0.0.1", "/dns/localhost")) == node.peer_id


async def test_both_dial_at_once_and_one_connection_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DUPLICATE_CHECK_SECONDS", 1.5)
    async with network() as left, network() as right:
        news: list[tuple[PeerId, bool]] = []
        left.on_connection(lambda peer, up: news.append((peer, up)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.connect, right.addresses[0])
            nursery.start_soon(right.connect, left.addresses[0])
        await eventually(lambda: left.statistics().connections_open == right.statistics().connections_open == 2)
        there = await left.open_stream(right.peer_id, ECHO)
        back = await right.open_stream(left.peer_id, ECHO)
        await eventually(lambda: left.statistics().connections_open == right.statistics().connections_open == 1)
        await turns()
        assert left.statistics().connections_open == 1
        assert await ask(there, b"there") == b"there"
        assert await ask(back, b"back") == b"back"
        assert news == [(right.peer_id, True)]


async def test_many_dials_of_one_peer_make_one_connection() -> None:
    async with network() as left, network() as right:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(left.connect, right.addresses[0])
        assert left.statistics().connections_open == 1


async def test_wildcards_are_replaced_by_addresses_that_can_be_dialed() -> None:
    async with open_libp2p_network(Identity.generate(), ["/ip4/0.0.0.0/tcp/0"]) as node, network() as other:
        hosts = [address.split("/")[2] for address in node.addresses]
        *others, loopback = machine_addresses(ipv6=False)
        assert loopback == "127.0.0.1"
        assert hosts == (others or [loopback])
        for address in node.addresses:
            await other.connect(address)
            await other.disconnect(node.peer_id)


def test_loopback_is_told_to_nobody_who_could_be_told_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {False: ["192.0.2.7", "127.0.0.1"], True: ["::1"]}
    monkeypatch.setattr(addresses, "machine_addresses", lambda *, ipv6: machine[ipv6])
    wildcards = [Multiaddr("/ip4/0.0.0.0/tcp/1"), Multiaddr("/ip6/::/tcp/1")]
    assert list(map(str, addresses.reachable(wildcards))) == ["/ip4/192.0.2.7/tcp/1"]
    by_name = [Multiaddr("/ip4/127.0.0.1/tcp/2"), *wildcards]
    assert list(map(str, addresses.reachable(by_name))) == ["/ip4/127.0.0.1/tcp/2", "/ip4/192.0.2.7/tcp/1"]
    machine[False] = ["127.0.0.1"]
    assert list(map(str, addresses.reachable(wildcards))) == ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"]


async def test_addresses_that_cannot_be_listened_on() -> None:
    async with network() as node:
        for address, reason in (
            (f"/ip4/127.0.0.1/tcp/{port_of(node)}", "in use"),
            ("/ip4/127.0.0.1/udp/0/quic-v1", "only TCP"),
            ("/ip4/192.0.2.77/tcp/0", "assign"),
            ("junk", "junk"),
        ):
            with pytest.raises(ListenFailed, match=reason):
                async with open_libp2p_network(Identity.generate(), [*LOOPBACK, address]):
                    pass


# --- Private networks -------------------------------------------------------------------------------------------------


async def test_a_private_network() -> None:
    key = os.urandom(32)
    async with network(psk=key) as node, network(psk=key) as member:
        await member.connect(node.addresses[0])
        stream = await member.open_stream(node.peer_id, ECHO)
        for size in (10, 1 << 20):
            assert len(await ask(stream, bytes(size))) == size


@pytest.mark.parametrize("key", [None, b"x" * 32], ids=["none", "another"])
async def test_strangers_to_a_private_network(key: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS_MAX", 1.0)
    async with network(psk=os.urandom(32)) as node, network(psk=key) as stranger:
        with pytest.raises(DialFailed), trio.fail_after(PATIENCE_S):
            await stranger.connect(node.addresses[0])
        await eventually(lambda: node.statistics().junk_connections == 1)


# --- Life -------------------------------------------------------------------------------------------------------------


async def test_errors_inside_come_out_as_themselves_and_at_once() -> None:
    async with network() as first, network() as second, network() as third:

        async def fail_inside() -> None:
            async with network() as node:
                for other in (first, second, third):
                    await node.connect(other.addresses[0])
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"), trio.fail_after(LOADED):
            await fail_inside()


def open_descriptors() -> int:
    """Without those that earlier tests left to the garbage collector."""
    gc.collect()
    return psutil.Process().num_fds()


async def test_leaving_cancels_handlers_and_frees_everything() -> None:
    cancelled = False

    async def stay(_: Stream) -> None:
        nonlocal cancelled
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled = True
            raise

    descriptors = open_descriptors()
    async with network() as node:
        async with network() as other:
            other.serve("/test/stay/1", stay, max_streams_per_peer=1)
            await node.connect(other.addresses[0])
            stream = await node.open_stream(other.peer_id, "/test/stay/1")
        assert cancelled
        with pytest.raises((ConnectionLost, StreamReset)), trio.fail_after(PATIENCE_S):
            await stream.receive_exactly(1)
    await eventually(lambda: open_descriptors() <= descriptors)


async def test_peers_that_come_and_go_leave_nothing_behind() -> None:
    async with network() as node:
        tasks = trio.lowlevel.current_statistics().tasks_living
        descriptors = open_descriptors()
        for _ in range(3):
            async with network() as visitor:
                for _ in range(10):
                    await visitor.connect(node.addresses[0])
                    assert await ask(await visitor.open_stream(node.peer_id, ECHO), b"hi") == b"hi"
                    await visitor.disconnect(node.peer_id)
                    await eventually(lambda: node.connected_peers() == ())
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)
        await eventually(lambda: open_descriptors() <= descriptors)


QUIET = """
import logging, trio
from tests.net_nodes import network
async def main():
    async with network() as left, network() as right:
        await left.connect(right.addresses[0])
        await trio.sleep(0.2)
        await left.disconnect(right.peer_id)
        await trio.sleep(0.2)
trio.run(main)
print("handlers", [type(handler).__name__ for handler in logging.getLogger().handlers])
"""


def test_libp2p_neither_configures_logging_nor_writes_to_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "handlers ['NullHandler']"
    assert logging.getLogger("libp2p").propagate is False
