"""Peers that find each other on one network, with real multicast on loopback; other swarms and junk beside them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from zeroconf import ServiceInfo, Zeroconf

from scheduler.advert_findings import FindingKind
from swarmnode import limits
from swarmnode.identity import Identity
from swarmnode.net.interface import PeerId
from swarmnode.swarm import mdns
from swarmnode.swarm.mdns import SERVICE, Announced, LanDiscovery, LanState, tag_of
from tests.net_tools import eventually
from tests.swarm_nodes import real_swarm

PSK = b"p" * 32
LOOPBACK = ("127.0.0.1",)


def multicast_fault() -> str:
    """Why multicast does not work on loopback here; "" if it does."""
    group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("", 0))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            receiver.settimeout(2)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            sender.sendto(b"x", ("224.0.0.251", receiver.getsockname()[1]))
            receiver.recv(1)
    except OSError as error:
        return str(error)
    return ""


FAULT = multicast_fault()
needs_multicast = pytest.mark.skipif(bool(FAULT), reason=f"no multicast on loopback here: {FAULT}")


def discovery(peer: PeerId, psk: bytes = PSK, port: int = 4100, **options: Any) -> tuple[LanDiscovery, list[str]]:
    heard: list[str] = []
    addresses = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",)
    return LanDiscovery(psk, peer, lambda: addresses, heard.append, interfaces=LOOPBACK, **options), heard


@asynccontextmanager
async def running(*runs: Callable[[], Any]) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        for run in runs:
            nursery.start_soon(run)
        yield nursery
        nursery.cancel_scope.cancel()


@needs_multicast
async def test_members_find_each_other_and_strangers_learn_nothing() -> None:
    one, other, stranger = (Identity.generate().peer_id for _ in range(3))
    (left, left_heard), (right, _) = discovery(one), discovery(other, port=4200)
    foreign, foreign_heard = discovery(stranger, psk=b"q" * 32)
    async with running(left.run, right.run, foreign.run):
        await eventually(lambda: other in left.found() and one in right.found())
        assert left.found() == {other: (f"/ip4/127.0.0.1/tcp/4200/p2p/{other}",)}
        assert left_heard == [other]
        await eventually(lambda: left.state is right.state is foreign.state is LanState.ON)
        assert (foreign.found(), foreign_heard) == ({}, [])


@needs_multicast
async def test_who_leaves_is_forgotten() -> None:
    one, other = Identity.generate().peer_id, Identity.generate().peer_id
    (left, _), (right, _) = discovery(one), discovery(other)
    async with running(left.run):
        async with running(right.run):
            await eventually(lambda: other in left.found())
        await eventually(lambda: not left.found())


@needs_multicast
async def test_members_on_one_network_connect_without_addresses(tmp_path: Path) -> None:
    async with real_swarm(tmp_path, 2, lan=True) as (_, (first, second)):
        await eventually(lambda: first.knows(second) and second.knows(first))
        assert first.swarm.addresses_of(second.peer) == second.network.addresses
        assert FindingKind.MULTICAST not in [finding.kind for finding in first.swarm.findings()]


async def test_a_node_of_this_machine_alone_has_nothing_to_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "Zeroconf", None)  # it is not touched
    made = LanDiscovery(PSK, Identity.generate().peer_id, lambda: ("/ip4/127.0.0.1/tcp/1/p2p/x",), print)
    await made.run()
    assert made.state is LanState.OFF


async def test_where_the_system_refuses_multicast_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mdns, "Zeroconf", refuse)
    made, _ = discovery(Identity.generate().peer_id)
    await made.run()
    assert (made.state, made.reason) == (LanState.BLOCKED, "the system refuses multicast: Operation not permitted")


class Deaf:
    """A zeroconf whose packets all get lost."""

    def __init__(self, **_: object) -> None:
        self.closed = False

    def register_service(self, info: ServiceInfo) -> None: ...

    def close(self) -> None:
        self.closed = True


class NoBrowser:
    def __init__(self, zeroconf: object, kind: str, listener: object) -> None: ...

    def cancel(self) -> None: ...


async def test_who_does_not_even_hear_itself_says_that_multicast_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "Zeroconf", Deaf)
    monkeypatch.setattr(mdns, "ServiceBrowser", NoBrowser)
    monkeypatch.setattr(limits, "LAN_ECHO_SECONDS_MAX", 0.05)
    made, _ = discovery(Identity.generate().peer_id)
    async with running(made.run):
        await eventually(lambda: made.state is LanState.BLOCKED)
    assert "does not hear" in made.reason


# -- what others may say -----------------------------------------------------------------------------------------------


def test_a_tag_tells_members_alone() -> None:
    assert tag_of(PSK, "one") != tag_of(PSK, "two") != tag_of(b"q" * 32, "two")
    assert len(tag_of(PSK, "one")) == 32


def test_what_is_announced() -> None:
    listened = (
        "/ip4/192.168.1.7/tcp/4100/p2p/x",
        "/ip6/2001:db8::1/tcp/4100/p2p/x",
        "/ip4/10.0.0.1/tcp/4200/p2p/x",
        "/ip4/127.0.0.1/tcp/4100/p2p/x",
        "/memory/1/p2p/x",
    )
    assert Announced.of(listened, local=False) == Announced(4100, ("192.168.1.7", "2001:db8::1"))
    assert Announced.of(listened[3:], local=True) == Announced(4100, ("127.0.0.1",))
    assert Announced.of(listened[3:], local=False) is None
    assert Announced.of((), local=True) is None


@needs_multicast
async def test_false_announcements_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAN_PEERS_MAX", 1)
    honest, second, liar = (Identity.generate().peer_id for _ in range(3))
    made, heard = discovery(Identity.generate().peer_id)
    zeroconf = Zeroconf(interfaces=list(LOOPBACK))

    def announce(peer: str, tag: str, address: str = "127.0.0.1") -> None:
        zeroconf.register_service(
            ServiceInfo(
                SERVICE,
                f"{peer}.{SERVICE}",
                port=4100,
                parsed_addresses=[address],
                properties={"t": tag},
                server=f"{peer[-8:]}.local.",
            )
        )

    def all_of_them() -> None:
        announce("no peer id 0O", tag_of(PSK, "no peer id 0O"))
        announce(liar, tag_of(PSK, honest))
        announce(honest, tag_of(PSK, honest))
        announce(second, tag_of(PSK, second))

    try:
        async with running(made.run):
            await trio.to_thread.run_sync(all_of_them)
            await eventually(lambda: heard)
            await trio.sleep(1)
            assert heard == [honest], "and no more than may be remembered"
    finally:
        await trio.to_thread.run_sync(zeroconf.close)
