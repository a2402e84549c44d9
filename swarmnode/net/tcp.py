"""TCP for libp2p: a socket that can be used without the scheduler, a dialer and a listener.

A round trip of 8 KiB costs some 10 us of cryptography and system calls, and several times as much in scheduler passes
when each layer awaits the next. So `TcpLink` offers both: the awaiting calls that libp2p's handshake uses, and
`send_now`/`receive_now`, which do what the kernel can do at once; the muxer waits only when the kernel says so.

With a network key, everything on the socket is XORed with a Salsa20 stream (py-libp2p's private networks): who lacks
the key cannot even begin a handshake.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import trio
from Crypto.Cipher import Salsa20
from libp2p.abc import IListener, IRawConnection, ITransport
from libp2p.connection_types import ConnectionType
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmnode.net import limits
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionLost

log = structlog.get_logger(__name__)

_HOST_PROTOCOLS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
_NONCE_BYTES = 8
_ACCEPT_PAUSE_SECONDS = 0.1
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TcpLink(IRawConnection):  # type: ignore[misc]
    """A connected TCP socket. It may be closed at any time, at once; whoever waits on it then gets ConnectionLost."""

    def __init__(
        self, sock: socket.socket, *, is_initiator: bool, counters: Counters, network_key: bytes | None
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_initiator = is_initiator
        self._socket = sock
        self._counters = counters
        self._key = None if network_key is None else NetworkKey(network_key)
        self._ahead = bytearray()
        self.may_have_more = False
        """The last `receive_now` was full: asking again is worth more than waiting for the kernel to say so."""
        self._closed = False
        host, port = sock.getpeername()[:2]
        self._remote = (str(host), int(port))

    # --- Without waiting ---

    def protect(self, data: bytes) -> bytes:
        """`data` as it goes over the wire. Every result must be sent, whole and in order."""
        return data if self._key is None else self._key.encrypt(data)

    def send_now(self, protected: bytes | bytearray | memoryview) -> int:
        """Hand bytes from `protect` to the kernel; how many it took, 0 if its buffer is full."""
        if self._closed:
            raise ConnectionLost("the connection is closed")
        try:
            sent = self._socket.send(protected)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(f"sending failed: {error.strerror}") from error
        self._counters.bytes_sent += sent
        return sent

    def receive_now(self) -> bytes | None:
        """What has arrived, at most RECEIVE_CHUNK_BYTES; None if nothing has, b"" at the end."""
        while not self._closed:
            try:
                data = self._socket.recv(limits.RECEIVE_CHUNK_BYTES)
            except BlockingIOError:
                self.may_have_more = False
                return None
            except OSError as error:
                raise ConnectionLost(f"receiving failed: {error.strerror}") from error
            self._counters.bytes_received += len(data)
            self.may_have_more = len(data) == limits.RECEIVE_CHUNK_BYTES
            if not data or self._key is None:
                return data
            if plain := self._key.decrypt(data):
                return plain
        raise ConnectionLost("the connection is closed")

    def close_now(self) -> None:
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._socket.fileno())
            self._socket.close()

    def take_ahead(self) -> bytes:
        """Bytes that `read` fetched but nobody took: whoever goes over to `receive_now` starts with them."""
        ahead, self._ahead = bytes(self._ahead), bytearray()
        return ahead

    # --- Waiting ---

    async def wait_readable(self) -> None:
        await self._wait(trio.lowlevel.wait_readable)

    async def wait_writable(self) -> None:
        await self._wait(trio.lowlevel.wait_writable)

    async def _wait(self, wait: Callable[[int], Awaitable[None]]) -> None:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        try:
            await wait(self._socket.fileno())
        except trio.ClosedResourceError:
            raise ConnectionLost("the connection was closed") from None

    async def send(self, data: bytes) -> None:
        """All of `data`. Cancelling in the middle leaves half of it sent: the link is then good for nothing."""
        await self.send_protected(self.protect(data))

    async def send_protected(self, protected: bytes) -> None:
        rest = memoryview(protected)
        while rest := rest[self.send_now(rest) :]:
            await self.wait_writable()

    async def receive_some(self) -> bytes:
        """The next bytes; b"" at the end."""
        if self._ahead:
            return self.take_ahead()
        while (data := self.receive_now()) is None:
            await self.wait_readable()
        return data

    async def receive_exactly(self, n: int) -> bytes:
        while len(self._ahead) < n:
            while (data := self.receive_now()) is None:
                await self.wait_readable()
            if not data:
                raise ConnectionLost("the connection was closed in its handshake")
            self._ahead += data
        taken = bytes(self._ahead[:n])
        del self._ahead[:n]
        return taken

    # --- What libp2p asks for ---

    async def read(self, n: int | None = None) -> bytes:
        data = await self.receive_some()
        if n is not None and len(data) > n:
            self._ahead[:0] = data[n:]
            data = data[:n]
        return data

    async def write(self, data: bytes) -> None:
        await self.send(bytes(data))

    async def close(self) -> None:
        self.close_now()

    def get_remote_address(self) -> tuple[str, int]:
        return self._remote

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [_multiaddr(*self._remote)]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


class NetworkKey:
    """The two Salsa20 streams of one connection in a private network. Each side sends its nonce first."""

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a network key has 32 bytes, not {len(key)}")
        self._key = key
        self._outward: Salsa20.Salsa20Cipher | None = None
        self._inward: Salsa20.Salsa20Cipher | None = None
        self._nonce = b""

    def encrypt(self, data: bytes) -> bytes:
        if self._outward is not None:
            return self._outward.encrypt(data)
        nonce = os.urandom(_NONCE_BYTES)
        self._outward = Salsa20.new(key=self._key, nonce=nonce)
        return nonce + self._outward.encrypt(data)

    def decrypt(self, data: bytes) -> bytes:
        """Empty while the peer's nonce is incomplete."""
        if self._inward is None:
            missing = _NONCE_BYTES - len(self._nonce)
            self._nonce, data = self._nonce + data[:missing], data[missing:]
            if len(self._nonce) < _NONCE_BYTES:
                return b""
            self._inward = Salsa20.new(key=self._key, nonce=self._nonce)
        return self._inward.decrypt(data)


class TcpTransport(ITransport):  # type: ignore[misc]
    """Dials and listens. Accepted links go to `accept`, in a task of `nursery`, and not to libp2p's own handler:
    that one keeps a slot and a task for every connection that ever came, until the host ends."""

    def __init__(
        self,
        nursery: trio.Nursery,
        accept: Callable[[TcpLink, Multiaddr], Awaitable[None]],
        counters: Counters,
        network_key: bytes | None,
    ) -> None:
        self._nursery = nursery
        self._accept = accept
        self._counters = counters
        self._network_key = network_key
        self.listen_errors: dict[str, str] = {}

    def link(self, stream: trio.SocketStream, *, is_initiator: bool) -> TcpLink:
        """Take the socket out of a trio stream. Raises OSError if the peer is gone already."""
        sock = socket.socket(fileno=stream.socket.detach())
        try:
            return TcpLink(sock, is_initiator=is_initiator, counters=self._counters, network_key=self._network_key)
        except BaseException:
            sock.close()
            raise

    async def dial_link(self, address: Multiaddr) -> TcpLink:
        """Raises OSError, or ValueError for an address that is no TCP address."""
        host, port = tcp_target(address)
        return self.link(await trio.open_tcp_stream(host, port), is_initiator=True)

    async def dial(self, maddr: Multiaddr) -> TcpLink:
        try:
            return await self.dial_link(maddr)
        except (OSError, ValueError) as error:
            raise OpenConnectionError(f"cannot connect to {maddr}: {error}") from error

    def create_listener(self, handler_function: Any) -> TcpListener:
        return TcpListener(self, self._nursery, self._accept)

    def can_dial(self, maddr: Multiaddr) -> bool:
        try:
            tcp_target(maddr)
        except ValueError:
            return False
        return True

    def can_listen(self, maddr: Multiaddr) -> bool:
        return self.can_dial(maddr)

    def protocols(self) -> list[str]:
        return ["tcp"]


class TcpListener(IListener):  # type: ignore[misc]
    """One listened address."""

    def __init__(
        self,
        transport: TcpTransport,
        nursery: trio.Nursery,
        accept: Callable[[TcpLink, Multiaddr], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._nursery = nursery
        self._accept = accept
        self._listeners: list[trio.SocketListener] = []

    async def listen(self, maddr: Multiaddr) -> None:
        try:
            host, port = tcp_target(maddr)
            self._listeners = list(await trio.open_tcp_listeners(port, host=host))
        except (OSError, ValueError) as error:
            self._transport.listen_errors[str(maddr)] = getattr(error, "strerror", None) or str(error)
            raise OpenConnectionError(str(error)) from error
        for listener in self._listeners:
            self._nursery.start_soon(self._accept_loop, listener, maddr)

    async def _accept_loop(self, listener: trio.SocketListener, maddr: Multiaddr) -> None:
        while True:
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    log.warning("cannot accept a connection", reason=error.strerror)
                    await trio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            with contextlib.suppress(OSError):  # gone between accept and getpeername
                link = self._transport.link(stream, is_initiator=False)
                self._nursery.start_soon(self._accept, link, maddr)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        open_ones = (listener.socket for listener in self._listeners if listener.socket.fileno() >= 0)
        return tuple(_multiaddr(*socket.getsockname()[:2]) for socket in open_ones)

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.aclose()
        self._listeners.clear()


def tcp_target(address: Multiaddr) -> tuple[str, int]:
    """Host and port of `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/p2p/ID]`. Raises ValueError for any other address."""
    parts = [(protocol.name, value) for protocol, value in address.items()]
    names = [name for name, _ in parts]
    if len(parts) not in (2, 3) or names[0] not in _HOST_PROTOCOLS or names[1:] not in (["tcp"], ["tcp", "p2p"]):
        raise ValueError("only /ip4, /ip6 and /dns addresses with /tcp are supported")
    return str(parts[0][1]), int(str(parts[1][1]))


def _multiaddr(host: str, port: int) -> Multiaddr:
    kind = "ip6" if ":" in host else "ip4"
    return Multiaddr(f"/{kind}/{host.partition('%')[0]}/tcp/{port}")
