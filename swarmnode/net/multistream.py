"""multistream-select 1.0.0: two sides agree on a protocol by its name.

libp2p does this three times for a connection (security, muxer) and a stream (application protocol). This version reads
lines of bounded length, takes any bytes without raising what nobody expects, and proposes without waiting for the
greeting, so that agreeing costs one round trip and not two. Other implementations understand that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from swarmnode.net import limits

_GREETING = b"/multistream/1.0.0"
_NOT_AVAILABLE = b"na"


class Negotiable(Protocol):
    """Whatever a protocol can be agreed on: a link, a session or a stream."""

    async def send(self, data: bytes) -> None: ...

    async def receive_exactly(self, n: int) -> bytes: ...


class NegotiationFailed(Exception):
    """The other side speaks something else, or none of the proposed protocols."""


async def propose(channel: Negotiable, protocols: Sequence[str]) -> str:
    """As the side that opened `channel`: the first of `protocols` that the other side speaks."""
    await channel.send(_line(_GREETING) + _line(protocols[0].encode()))
    if await _read_line(channel) != _GREETING:
        raise NegotiationFailed("the other side does not speak multistream-select")
    for index, protocol in enumerate(protocols):
        if index:
            await channel.send(_line(protocol.encode()))
        answer = await _read_line(channel)
        if answer == protocol.encode():
            return protocol
        if answer != _NOT_AVAILABLE:
            raise NegotiationFailed("the other side answered with a protocol that was not proposed")
    raise NegotiationFailed(f"the other side speaks none of {', '.join(protocols)}")


async def answer(channel: Negotiable, protocols: Collection[str]) -> str:
    """As the other side: the first proposal that is one of `protocols`."""
    if await _read_line(channel) != _GREETING:
        raise NegotiationFailed("the other side does not speak multistream-select")
    await channel.send(_line(_GREETING))
    for _ in range(limits.PROPOSALS_MAX):
        proposal = await _read_line(channel)
        name = proposal.decode("utf-8", errors="replace")
        if name in protocols:
            await channel.send(_line(proposal))
            return name
        await channel.send(_line(_NOT_AVAILABLE))
    raise NegotiationFailed("the other side proposed too many protocols")


def _line(text: bytes) -> bytes:
    n = len(text) + 1
    prefix = bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80, n >> 7])
    return prefix + text + b"\n"


async def _read_line(channel: Negotiable) -> bytes:
    """One line without its newline. Its length is a varint of at most two bytes, as the limit is below 2^14."""
    n = (await channel.receive_exactly(1))[0]
    if n & 0x80:
        n = n & 0x7F | (await channel.receive_exactly(1))[0] << 7
    if not 0 < n <= limits.PROTOCOL_NAME_BYTES_MAX:
        raise NegotiationFailed(f"a line of {n} bytes where a protocol's name should be")
    line = await channel.receive_exactly(n)
    if line[-1:] != b"\n":
        raise NegotiationFailed("a line without its end where a protocol's name should be")
    return line[:-1]
