"""The one thin interface that everything above libp2p uses: peers, connections and streams of bytes.

Two implementations pass the same tests: real libp2p (libp2p_host.py) and a network in one process (memory.py), so every
protocol, and a simulator of whole swarms, runs on either. Nothing above this folder imports libp2p.

Deadlines come from the caller, through trio's cancel scopes. Besides, every operation ends by itself after a bound from
limits.py, so that a forgotten deadline is a late error and never a hang.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NewType, Protocol

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, for example `12D3KooW...`: the hash of a public key, proven in the handshake."""


_TEXT_CHARS_MAX = 300


class NetworkError(Exception):
    """Base of everything that a network does to its user. A peer that misbehaves shows as one of these, too."""


class StreamClosed(NetworkError):
    """No more bytes will come. `clean`: the peer closed between two messages, with nothing left over."""

    def __init__(self, message: str, *, clean: bool) -> None:
        super().__init__(message)
        self.clean = clean


class StreamReset(NetworkError):
    """The stream was given up in the middle, by the peer or by a bound on this side; its connection lives on."""


class ConnectionLost(NetworkError):
    """There is no connection to the peer, or it broke underneath the stream."""


class ProtocolNotSupported(NetworkError):
    """The peer is connected but does not serve this protocol."""


class ListenFailed(NetworkError):
    """An address that this node should listen on cannot be used."""


class DialFailed(NetworkError):
    """No connection could be made. `reason` says why in one line, without the address; long texts are cut."""

    def __init__(self, address: str, reason: str) -> None:
        self.address = address[:_TEXT_CHARS_MAX]
        self.reason = reason[:_TEXT_CHARS_MAX]
        super().__init__(f"cannot connect to {self.address}: {self.reason}")


@dataclass(frozen=True, slots=True)
class NetworkStatistics:
    """Counters since the start, except the first three, which are what is open now."""

    connections_open: int
    streams_open: int
    handshakes_pending: int
    bytes_sent: int
    """On the wire, encryption and framing included. So is bytes_received."""
    bytes_received: int
    streams_refused: int
    """Streams of peers that were over a limit, asked for an unknown protocol or never asked for one."""
    peer_mistakes: int
    """Streams that ended because the peer broke their protocol, or kept this node waiting beyond a deadline."""
    handler_errors: int
    """Handlers of this node that raised anything else than a NetworkError: faults of this program."""
    junk_connections: int
    """Inbound connections that never became a peer: junk, plaintext, another network key, silence."""
    connections_broken: int
    """Connections that this node closed because the peer broke the rules of the wire, or stopped answering."""


class Stream(Protocol):
    """An ordered stream of bytes to and from one peer. One task may receive while others send; sends take turns."""

    peer: PeerId
    protocol: str

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data` whole: pass header and body together, they then leave in one piece.

        Returns when the data is on its way, not when it has arrived. If a send is cancelled after its first bytes
        left, the stream is reset (the peer would otherwise read the next message from the middle of this one); the
        connection and its other streams are never harmed.

        Raises StreamReset, StreamClosed (closed on this side) or ConnectionLost.
        """
        ...

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """Send `data` whole if that takes no waiting. False: nothing was sent, so use `send`.

        It saves a hot path two passes of the scheduler. Raises as `send` does.
        """
        ...

    def send_from_thread(self, data: bytes) -> bool:
        """Like `send_nowait`, from another thread than the network's. False: hand `data` to the network's thread."""
        ...

    async def arrivals(self, take: Callable[[], bool]) -> None:
        """Call `take()` whenever bytes have arrived, at once and in the network's own task, until it returns False.

        `take` looks with `peek` and takes with `receive_nowait`; what it leaves is there for `receive_exactly`. It must
        be quick and must not wait. It saves a hot path a pass of the scheduler for each message. Raises what `take`
        raises, and like `receive_exactly` when nothing more will come.
        """
        ...

    def peek(self) -> bytearray:
        """What has arrived and was not received yet; not to be changed or kept."""
        ...

    def receive_nowait(self, n: int) -> bytes:
        """The next `n` bytes of what `peek` shows."""
        ...

    async def receive_exactly(self, n: int) -> bytes:
        """Exactly `n` bytes, n >= 0. Cancelling loses nothing: the next call starts at the same byte.

        Raises StreamClosed at the end of the stream: `clean` if no byte of the `n` had arrived. Raises StreamReset or
        ConnectionLost otherwise; after a lost connection, complete data that had arrived can still be read.
        """
        ...

    async def aclose(self) -> None:
        """Tell the peer that nothing more comes, give up what it still sends, free the stream. Never raises."""
        ...

    async def reset(self) -> None:
        """Give the stream up at once, in both directions. Never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
ConnectionCallback = Callable[[PeerId, bool], None]


class ServesProtocols(Protocol):
    """What a service is registered with: the network itself, or what lets only some peers through to it."""

    def serve(self, protocol: str, handler: StreamHandler, *, max_streams_per_peer: int) -> None:
        """See Network."""
        ...


class Network(Protocol):
    """This node among its peers."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs, with `/p2p/` and this node's id, that are really listened on; the most useful first."""
        ...

    def serve(self, protocol: str, handler: StreamHandler, *, max_streams_per_peer: int) -> None:
        """Run `handler` for each stream that a peer opens for `protocol`; at most so many at once for each peer.

        The stream is closed when the handler returns and reset when it raises. What it raises is logged and counted,
        and goes no further. Raises ValueError if the protocol is served already.
        """
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A new stream to a connected peer, or to this node itself, which needs no connection.

        Raises ConnectionLost (also: not connected), ProtocolNotSupported, or StreamReset if too many are open; a
        peer that has too many open resets the stream, which may show here or at its first use.
        """
        ...

    async def connect(self, multiaddr: str) -> PeerId:
        """Connect to the peer that the address names with `/p2p/`; at once if connected, or if the address is one of
        this node's own. Raises DialFailed."""
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to the peer. Never raises."""
        ...

    def refuse(self, refused: Callable[[PeerId], bool]) -> None:
        """Make no connections with peers of which `refused` says so, in either direction. Those that are up stay.

        It is asked once the peer has proven its id, and must not block. The peer sees its connection fail, at once or
        at its first use.
        """
        ...

    def connected_peers(self) -> tuple[PeerId, ...]: ...

    def on_connection(self, callback: ConnectionCallback) -> None:
        """Have `callback(peer, up)` called when a peer's first connection comes up and when its last one is gone.

        It runs in the network's task: it must not block, and what it raises is logged and dropped.
        """
        ...

    def statistics(self) -> NetworkStatistics: ...
