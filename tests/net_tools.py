"""Connections for tests of the network layer, on real sockets and real encryption, down to the level of raw bytes."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from libp2p.peer.id import ID

from swarmnode.identity import Identity
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionLost
from swarmnode.net.muxer import Muxer, ReceiveBudget
from swarmnode.net.noise_session import NoiseHandshake, NoiseSession
from swarmnode.net.tcp import TcpLink, TcpTransport
from tests.patience import PATIENCE_S

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct("!BBHII")


def frame(kind: int, flags: int, stream_id: int, value: int, body: bytes = b"", version: int = 0) -> bytes:
    return HEADER.pack(version, kind, flags, stream_id, value) + body


@asynccontextmanager
async def link_pair(
    counters: tuple[Counters, Counters], network_keys: tuple[bytes | None, bytes | None] = (None, None)
) -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """Two ends of a TCP connection; the first one dialed."""
    async with trio.open_nursery() as nursery:
        near, far = (
            TcpTransport(nursery, accept_nothing, of, key) for of, key in zip(counters, network_keys, strict=True)
        )
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        dialed = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        links = near.link(dialed, is_initiator=True), far.link(await listener.accept(), is_initiator=False)
        await listener.aclose()
        try:
            yield links
        finally:
            for link in links:
                link.close_now()
            nursery.cancel_scope.cancel()


async def accept_nothing(*_: object) -> None:
    raise AssertionError("nothing is accepted here")


@asynccontextmanager
async def session_pair(
    counters: tuple[Counters, Counters], network_key: bytes | None = None
) -> AsyncIterator[tuple[NoiseSession, NoiseSession]]:
    """Two ends of an encrypted connection; the first one is the initiator."""
    identities = Identity.generate(), Identity.generate()
    async with link_pair(counters, (network_key, network_key)) as (near, far):
        sessions: dict[str, NoiseSession] = {}

        async def initiate() -> None:
            peer = ID.from_base58(identities[1].peer_id)
            sessions["near"] = await NoiseHandshake(identities[0].key_pair).initiate(near, peer)

        async def respond() -> None:
            sessions["far"] = await NoiseHandshake(identities[1].key_pair).respond(far)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(initiate)
            nursery.start_soon(respond)
        yield sessions["near"], sessions["far"]


@dataclass
class MuxerPair:
    near: Muxer
    far: Muxer
    near_counters: Counters = field(default_factory=Counters)
    far_counters: Counters = field(default_factory=Counters)


@asynccontextmanager
async def muxer_pair(network_key: bytes | None = None) -> AsyncIterator[MuxerPair]:
    """Two running muxers that are connected; `near` is the initiator."""
    counters = Counters(), Counters()
    async with session_pair(counters, network_key) as sessions, trio.open_nursery() as nursery:
        near, far = (
            Muxer(session, f"peer-of-{name}", each, ReceiveBudget())  # type: ignore[arg-type]
            for name, session, each in zip(("near", "far"), sessions, counters, strict=True)
        )
        nursery.start_soon(near.run)
        nursery.start_soon(far.run)
        yield MuxerPair(near, far, *counters)
        nursery.cancel_scope.cancel()


class RawPeer:
    """The other end of a muxer's connection, in the hands of a test: it sends any frames, and reads when asked."""

    def __init__(self, session: NoiseSession) -> None:
        self.session = session

    async def send(self, *frames: bytes) -> None:
        await self.session.send(b"".join(frames))

    async def frame(self) -> tuple[int, int, int, int, bytes]:
        """The next frame: kind, flags, stream id, value, body."""
        _, kind, flags, stream_id, value = HEADER.unpack(await self.session.receive_exactly(HEADER.size))
        body = await self.session.receive_exactly(value) if kind == DATA else b""
        return kind, flags, stream_id, value, body

    async def skip_to(self, kind: int, flags: int) -> tuple[int, int, int, int, bytes]:
        with trio.fail_after(PATIENCE_S):
            while True:
                got = await self.frame()
                if got[0] == kind and got[1] & flags == flags:
                    return got

    async def closed(self) -> bool:
        """Whether the muxer closes the connection, whatever it sends before."""
        with trio.move_on_after(PATIENCE_S):
            try:
                while True:
                    await self.session.receive_exactly(1)
            except ConnectionLost:
                return True
        return False


@dataclass
class Attacked:
    muxer: Muxer
    peer: RawPeer
    counters: Counters
    budget: ReceiveBudget


@asynccontextmanager
async def attacked_muxer(budget: ReceiveBudget | None = None) -> AsyncIterator[Attacked]:
    """A running muxer and its peer in the hands of the test; the peer is the initiator (odd stream numbers)."""
    counters = Counters(), Counters()
    budget = budget or ReceiveBudget()
    async with session_pair(counters) as (near, far), trio.open_nursery() as nursery:
        muxer = Muxer(far, "attacker", counters[1], budget)  # type: ignore[arg-type]
        nursery.start_soon(muxer.run)
        yield Attacked(muxer, RawPeer(near), counters[1], budget)
        nursery.cancel_scope.cancel()


async def eventually(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - conditions are of all kinds
            await trio.sleep(0.005)
