"""What lies between the hosts, as a pure machine: packets in with the present instant, packets out when they are due.

Every ordered pair of hosts has a link of its own, so that each direction can be slow, lossy, narrow or cut by itself.
Packets are IP (layer 3): the destination address names the host, multicast goes to all others. There is no clock and no
device in here; `bridge.py` has both.
"""

from __future__ import annotations

import heapq
import ipaddress
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

QUEUE_BYTES_MAX: Final = 16 << 20
"""On one link. Above what Linux lets one TCP connection keep in flight (6 MiB): a link without a rate drops nothing."""

QUEUE_SECONDS_MAX: Final = 0.5
QUEUE_BYTES_MIN: Final = 32 << 10
"""A link with a rate drops what would wait longer, as home routers do: many hold half a second, which is already more
than any of their users want."""

TCP: Final = 6
_SYN, _ACK = 0x02, 0x10


@dataclass(slots=True)
class Link:
    """One direction between two hosts."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of packets
    rate_bytes_s: float = math.inf
    cut: bool = False
    free_at_s: float = -math.inf  # when the last packet has been put on the wire
    waiting_bytes: int = 0

    @property
    def room_bytes(self) -> float:
        """Of its queue, with what is under way."""
        in_time = self.rate_bytes_s * (QUEUE_SECONDS_MAX + self.delay_s)
        return min(QUEUE_BYTES_MAX, max(QUEUE_BYTES_MIN, in_time))

    @classmethod
    def check(cls, **changes: Any) -> None:
        """ValueError for what no link can be."""
        for name, value in changes.items():
            if name == "cut":
                good = isinstance(value, bool)
            elif name == "loss":
                good = 0 <= value <= 1
            else:
                good = value >= 0 if name == "delay_s" else name == "rate_bytes_s" and value > 0
            if not good:
                raise ValueError(f"a link has no {name} of {value!r}")


def destination(packet: bytes) -> bytes | None:
    """The address that an IP packet goes to, 4 or 16 bytes; None if it is no whole header."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        return packet[16:20]
    if version == 6 and len(packet) >= 40:
        return packet[24:40]
    return None


def opens_connection(packet: bytes) -> bool:
    """Whether this is the first packet of a TCP connection: SYN without ACK."""
    if packet[0] >> 4 == 4:
        protocol, start = packet[9], (packet[0] & 15) * 4
    else:
        protocol, start = packet[6], 40  # Linux puts no extension header before TCP's
    flags = packet[start + 13] if protocol == TCP and len(packet) > start + 13 else 0
    return flags & (_SYN | _ACK) == _SYN


def is_multicast(address: bytes) -> bool:
    return address[0] == 0xFF if len(address) == 16 else 224 <= address[0] < 240


class Links:
    """All links between hosts 0 to n - 1, whose addresses are given as text, any number for each."""

    def __init__(self, addresses: Sequence[Iterable[str]], random: Random) -> None:
        self.n = len(addresses)
        self._random = random
        self._hosts = {ipaddress.ip_address(text).packed: i for i, texts in enumerate(addresses) for text in texts}
        self._links = {(a, b): Link() for a in range(self.n) for b in range(self.n) if a != b}
        self._shielded: set[int] = set()
        self._due: list[tuple[float, int, int, int, bytes]] = []  # (due, number, from, to, packet)
        self._number = 0
        self.counts: Counter[str] = Counter()

    def set(self, source: int, to: int, **changes: Any) -> None:
        """Change a link: `delay_s`, `loss`, `rate_bytes_s`, `cut`. ValueError, and nothing is changed, if it cannot."""
        if (link := self._links.get((source, to))) is None:
            raise ValueError(f"there is no link from {source} to {to}")
        Link.check(**changes)
        for name, value in changes.items():
            setattr(link, name, value)

    def shield(self, host: int, shielded: bool) -> None:
        """Whether connections to a host are dropped, as a router that translates addresses does: it can only dial."""
        if not 0 <= host < self.n:
            raise ValueError(f"there is no host {host}")
        (self._shielded.add if shielded else self._shielded.discard)(host)

    def send(self, source: int, packet: bytes, now_s: float) -> None:
        """A host puts a packet on the wire."""
        address = destination(packet)
        if address is not None and is_multicast(address):
            for to in range(self.n):
                if to != source:
                    self._enqueue(source, to, packet, now_s)
        elif address is None or (to := self._hosts.get(address, source)) == source:
            self.counts["nowhere"] += 1
        elif to in self._shielded and opens_connection(packet):
            self.counts["shielded"] += 1
        else:
            self._enqueue(source, to, packet, now_s)

    def _enqueue(self, source: int, to: int, packet: bytes, now_s: float) -> None:
        link = self._links[source, to]
        if link.cut:
            self.counts["cut"] += 1
        elif link.loss and self._random.random() < link.loss:
            self.counts["lost"] += 1
        elif link.waiting_bytes + len(packet) > link.room_bytes:
            self.counts["full"] += 1
        else:
            link.free_at_s = max(now_s, link.free_at_s) + len(packet) / link.rate_bytes_s
            link.waiting_bytes += len(packet)
            self._number += 1
            heapq.heappush(self._due, (link.free_at_s + link.delay_s, self._number, source, to, packet))

    def next_due_s(self) -> float | None:
        """When the next packet arrives."""
        return self._due[0][0] if self._due else None

    def receive(self, now_s: float) -> list[tuple[int, bytes]]:
        """(host, packet) of all that has arrived by now. What was on a link when it was cut is lost."""
        arrived = []
        while self._due and self._due[0][0] <= now_s:
            _, _, source, to, packet = heapq.heappop(self._due)
            link = self._links[source, to]
            link.waiting_bytes -= len(packet)
            self.counts["cut" if link.cut else "delivered"] += 1
            if not link.cut:
                arrived.append((to, packet))
        return arrived
