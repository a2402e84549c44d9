"""Multiaddrs: what a peer's address names, and what this node's listened addresses mean to others.

A node that listens on 0.0.0.0 must not tell others to dial 0.0.0.0, nor a bridge that only containers on this machine
can reach. The wildcard is replaced by the machine's addresses, with the one that leads to the internet first.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.net.interface import DialFailed, PeerId
from swarmnode.net.tcp import tcp_target

_ADDRESS_CHARS_MAX = 512
_BRIDGES = ("docker", "br-", "virbr", "veth", "vmnet", "lxc", "cni", "podman")


def parse_dial_address(text: str) -> tuple[PeerId, Multiaddr]:
    """Peer and address of `/ip4/HOST/tcp/PORT/p2p/PEER`. Raises DialFailed."""
    try:
        if len(text) > _ADDRESS_CHARS_MAX:
            raise ValueError("the address is too long")
        address = Multiaddr(text)
        tcp_target(address)
        peer = address.value_for_protocol("p2p") if "/p2p/" in text else None
        if not peer:
            raise ValueError("the address must end in /p2p/ and the peer's id")
        return PeerId(ID.from_string(peer).to_base58()), address
    except Exception as error:  # the parsers raise whatever the text provokes
        raise DialFailed(text, str(error)) from None


def reachable(listened: Iterable[Multiaddr]) -> list[Multiaddr]:
    """`listened` with every wildcard replaced by this machine's addresses, the most useful first, none twice.

    Loopback is left out where a wildcard gives anything else: to others it would mean themselves.
    """
    named: dict[str, None] = {}
    meant: dict[str, bool] = {}  # by wildcards, and whether it is loopback
    for address in listened:
        host, port = tcp_target(address)
        if not ipaddress.ip_address(host).is_unspecified:
            named[_text(host, port)] = None
            continue
        for each in machine_addresses(ipv6=":" in host):
            meant[_text(each, port)] = ipaddress.ip_address(each).is_loopback
    only_loopback = all(meant.values()) and not named
    told = [text for text, loopback in meant.items() if only_loopback or not loopback]
    return [Multiaddr(text) for text in dict.fromkeys((*named, *told))]


def _text(host: str, port: int) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"


def machine_addresses(*, ipv6: bool) -> list[str]:
    """Addresses of the interfaces that are up: the way to the internet first, bridges of virtual networks, loopback."""
    outward = _outward_address(socket.AF_INET6 if ipv6 else socket.AF_INET)
    ranked = [
        (0 if each.address == outward else 3 if each.loopback else 2 if each.bridge else 1, each.address)
        for each in interface_addresses()
        if (":" in each.address) is ipv6
    ]
    return [address for _, address in sorted(ranked)]


class InterfaceAddress(NamedTuple):
    """`bridge`: of a virtual network that is on this machine alone."""

    address: str
    bridge: bool
    loopback: bool


def interface_addresses() -> list[InterfaceAddress]:
    """The addresses of all interfaces that are up, but those that mean nothing without the interface (link-local)."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        InterfaceAddress(entry.address, name.startswith(_BRIDGES), ipaddress.ip_address(entry.address).is_loopback)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and name in up and "%" not in entry.address
    ]


def _outward_address(family: socket.AddressFamily) -> str | None:
    """The source address of packets to the internet. Connecting a datagram socket sends nothing."""
    target = ("2001:4860:4860::8888", 53) if family == socket.AF_INET6 else ("8.8.8.8", 53)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError:
            return None
        return str(probe.getsockname()[0])
