"""The parts of this folder in the shapes that py-libp2p's swarm expects, and its unwanted habits turned off.

- `Upgrader` makes a link a muxed connection: Noise and nothing else, our muxer's own name or stock yamux's. Both names
  mean the same class here, so that a peer with another libp2p meets the same bounds.
- `MuxedConnection` and `MuxedStream` wrap Muxer and MuxerStream for libp2p's own protocols (identify, ping and later
  gossip). Our protocols use the MuxerStream inside, without these layers.
- The swarm's auto-connector would dial whatever addresses peers have told about; libp2p's log goes to structlog.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.connection_types import ConnectionType
from libp2p.network.auto_connector import AutoConnector
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarmnode.net import limits, multistream
from swarmnode.net.counters import Counters
from swarmnode.net.interface import NetworkError, PeerId, StreamClosed
from swarmnode.net.muxer import Muxer, ReceiveBudget
from swarmnode.net.muxer_stream import MuxerStream
from swarmnode.net.noise_session import NOISE_PROTOCOL, NoiseHandshake, NoiseSession
from swarmnode.net.tcp import TcpLink

log = structlog.get_logger(__name__)

OWN_MUXER = "/swarmnode/yamux/1.0.0"
STOCK_MUXER = "/yamux/1.0.0"
MUXERS = (OWN_MUXER, STOCK_MUXER)


class Upgrader(TransportUpgrader):  # type: ignore[misc]
    """Link to session to muxer. `admit` raises if the peer, proven by the handshake, may not connect."""

    def __init__(self, handshake: NoiseHandshake, admit: Callable[[PeerId], None], counters: Counters) -> None:
        super().__init__({}, {})
        self._handshake = handshake
        self._admit = admit
        self._counters = counters
        self._budget = ReceiveBudget()

    async def upgrade_security(self, raw_conn: TcpLink, is_initiator: bool, peer_id: ID | None = None) -> NoiseSession:
        try:
            with trio.fail_after(limits.HANDSHAKE_SECONDS_MAX):
                if is_initiator:
                    await multistream.propose(raw_conn, [NOISE_PROTOCOL])
                    session = await self._handshake.initiate(raw_conn, peer_id)
                else:
                    await multistream.answer(raw_conn, [NOISE_PROTOCOL])
                    session = await self._handshake.respond(raw_conn)
            self._admit(PeerId(session.get_remote_peer().to_base58()))
        except Exception as error:  # py-libp2p's handshake raises whatever the peer's bytes provoke
            raw_conn.close_now()
            raise SecurityUpgradeFailure(str(error) or type(error).__name__) from error
        return session

    async def upgrade_connection(self, conn: NoiseSession, peer_id: ID) -> MuxedConnection:
        try:
            with trio.fail_after(limits.HANDSHAKE_SECONDS_MAX):
                if conn.is_initiator:
                    await multistream.propose(conn, MUXERS)
                else:
                    await multistream.answer(conn, MUXERS)
        except Exception as error:
            conn.link.close_now()
            raise MuxerUpgradeFailure(str(error) or type(error).__name__) from error
        return MuxedConnection(Muxer(conn, PeerId(peer_id.to_base58()), self._counters, self._budget), peer_id)


class MuxedConnection(IMuxedConn):  # type: ignore[misc]
    """A Muxer for py-libp2p. The swarm sets `on_close` and awaits it to learn of the end."""

    on_close: Callable[[], Awaitable[Any]] | None = None

    def __init__(self, muxer: Muxer, peer_id: ID) -> None:
        self.muxer = muxer
        self.peer_id = peer_id
        self.event_started = trio.Event()

    async def start(self) -> None:
        self.event_started.set()
        try:
            await self.muxer.run()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(limits.DISCONNECT_SECONDS_MAX):
                await self._tell_swarm()

    async def _tell_swarm(self) -> None:
        try:
            if self.on_close is not None:
                await self.on_close()
        except Exception:
            log.exception("libp2p failed to close a connection", peer=self.muxer.peer)

    async def close(self) -> None:
        self.muxer.close("closed on this side")

    @property
    def is_initiator(self) -> bool:
        return self.muxer.session.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self.is_closed

    @property
    def is_closed(self) -> bool:
        return self.muxer.closed.is_set()

    async def open_stream(self) -> MuxedStream:
        try:
            return MuxedStream(self.muxer.open_stream(), self)
        except NetworkError as error:
            raise MuxedStreamError(str(error)) from error

    async def accept_stream(self) -> MuxedStream:
        try:
            return MuxedStream(await self.muxer.accept_stream(), self)
        except NetworkError as error:
            raise MuxedConnUnavailable(str(error)) from error

    def get_remote_address(self) -> tuple[str, int]:
        return self.muxer.session.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.muxer.session.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.muxer.session.get_connection_type()


class MuxedStream(IMuxedStream):  # type: ignore[misc]
    """A MuxerStream for py-libp2p's own protocols."""

    def __init__(self, stream: MuxerStream, connection: MuxedConnection) -> None:
        self.stream = stream
        self.muxed_conn = connection

    async def read(self, n: int | None = None) -> bytes:
        try:
            return await self.stream.receive_some(n)
        except StreamClosed as error:
            raise MuxedStreamEOF(str(error)) from error
        except NetworkError as error:
            raise MuxedStreamReset(str(error)) from error

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.send(data)
        except StreamClosed as error:
            raise MuxedStreamClosed(str(error)) from error
        except NetworkError as error:
            raise MuxedStreamReset(str(error)) from error

    async def close(self) -> None:
        self.stream.half_close()

    async def reset(self) -> None:
        await self.stream.reset()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use a cancel scope")

    def get_remote_address(self) -> tuple[str, int]:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> MuxedStream:
        return self


class NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """Dials nobody: whom to connect to is decided above this folder."""

    async def maybe_connect(self) -> None:
        return

    def record_disconnect(self, peer_id: ID) -> None:
        """Not even remembers: the original keeps every peer that ever left."""


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.debug("libp2p", source=record.name, severity=record.levelname, message=record.getMessage()[:2_000])


def tame_libp2p_logging() -> None:
    """Send libp2p's warnings to structlog, at debug, and keep it from configuring the root logger.

    Most of its warnings are about what peers do, which is counted here, and it logs tracebacks of ordinary losses. It
    also calls `logging.debug`, which installs a handler on a root logger that has none.
    """
    libp2p_log = logging.getLogger("libp2p")
    libp2p_log.propagate = False
    libp2p_log.setLevel(logging.WARNING)
    if not any(isinstance(handler, _ToStructlog) for handler in libp2p_log.handlers):
        libp2p_log.handlers[:] = [_ToStructlog(logging.WARNING)]
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
