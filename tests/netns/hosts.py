"""Hosts made of network namespaces, each with one TUN device whose other end is a file of ours. Linux, as root.

A namespace here has no name and no file: it lives as long as somebody holds it, so whatever happens to a test, nothing
is left over, and nothing of the machine's own network is seen or changed. Python 3.11 lacks `unshare` and `setns`;
addresses are set with the ioctls of netdevice(7), which need no other program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEVICE: Final = b"swarm0"
MTU: Final = 1500
QUEUE_PACKETS: Final = 20_000  # a busy machine may keep the bridge from reading for a while
IPV4_NETWORK: Final = ipaddress.IPv4Network("10.77.0.0/24")
IPV6_NETWORK: Final = ipaddress.IPv6Network("fd77::/64")
HOSTS_MAX: Final = 64

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_IFF_UP = 0x1
_SIOCGIFINDEX, _SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8933, 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8922, 0x8943
_NAMESPACE = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Two files that this process holds: the namespace, and its device's other end."""

    namespace: int
    device: int


def addresses(index: int, *, ipv4: bool, ipv6: bool) -> list[str]:
    """Of host `index`, from 0."""
    networks = [IPV4_NETWORK] * ipv4 + [IPV6_NETWORK] * ipv6
    return [str(network[index + 1]) for network in networks]


def make(count: int, *, ipv4: bool, ipv6: bool) -> list[Namespace]:
    """Make `count` hosts. For a process with one thread, since it visits each namespace. Raises OSError."""
    made = []
    home = os.open(_NAMESPACE, os.O_RDONLY)
    try:
        for index in range(count):
            _check(_libc().unshare(_CLONE_NEWNET), "unshare")
            made.append(Namespace(os.open(_NAMESPACE, os.O_RDONLY), _open_device()))
            _set_up(addresses(index, ipv4=ipv4, ipv6=ipv6))
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET), "setns")
        os.close(home)
    return made


def end_all(namespaces: Collection[int]) -> None:
    """kill -9 for every process that is in one of these namespaces (open files)."""
    ours = {os.fstat(each).st_ino for each in namespaces}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (folder / "ns" / "net").stat().st_ino in ours:
                    os.kill(int(folder.name), signal.SIGKILL)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _open_device() -> int:
    """A TUN device in the present namespace: whole IP packets, one a read or write."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE, _IFF_TUN | _IFF_NO_PI))
    return device


def _set_up(texts: Collection[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", DEVICE, MTU))
        fcntl.ioctl(control, _SIOCSIFTXQLEN, struct.pack("16si20x", DEVICE, QUEUE_PACKETS))
        for text in texts:
            if (address := ipaddress.ip_address(text)).version == 4:
                fcntl.ioctl(control, _SIOCSIFADDR, _with_address(address.packed))
                fcntl.ioctl(control, _SIOCSIFNETMASK, _with_address(IPV4_NETWORK.netmask.packed))
        for name in (b"lo", DEVICE):
            flags = struct.unpack("16sh22x", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sh22x", name, 0)))[1]
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))
        index = struct.unpack("16si20x", fcntl.ioctl(control, _SIOCGIFINDEX, struct.pack("16si20x", DEVICE, 0)))[1]
    for text in texts:
        if (address := ipaddress.ip_address(text)).version == 6:
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as control:
                request = struct.pack("16sIi", address.packed, IPV6_NETWORK.prefixlen, index)
                fcntl.ioctl(control, _SIOCSIFADDR, request)


def _with_address(packed: bytes) -> bytes:
    """`struct ifreq` with an IPv4 socket address: family, port, address, padding."""
    return struct.pack("16sHH4s16x", DEVICE, socket.AF_INET, 0, packed)
