"""One HTTP connection: Hypercorn's protocol on trio, within limits of ours.

Hypercorn takes as many connections as come, waits without end, and uncancellably, for a client that stopped reading,
and speaks HTTP/2 as well, which nobody needs here. So accepting and writing are bounded here, and HTTP/1.1 is all; what
that means is Hypercorn's and h11's.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, Final

import h11
import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.logging import Logger
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from swarmnode.api import limits

_log = structlog.get_logger(__name__)

_FULL_BODY: Final = json.dumps(
    {"error": {"message": "too many connections", "type": "rate_limit_error", "param": None, "code": "overloaded"}}
).encode()
_FULL: Final = (
    f"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: {limits.RETRY_SECONDS}\r\n"
    f"content-length: {len(_FULL_BODY)}\r\nconnection: close\r\n\r\n"
).encode() + _FULL_BODY


class Connections:
    """Serves connections of one listener with one app. `open` counts them."""

    def __init__(self, app: ASGIApp) -> None:
        self.open = 0
        self._streams: set[trio.SocketStream] = set()
        self._ended = trio.Event()  # one of them
        self._by_address: Counter[str] = Counter()
        wrapped: Any = app
        self._app = ASGIWrapper(wrapped)
        self._config = _config()
        self._context = WorkerContext(None)

    async def run(self, listeners: list[trio.SocketListener]) -> None:
        """Serve until cancelled. Then answers have a moment for their last words, before every connection ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_all_when_cancelled)
            await trio.serve_listeners(self._serve, listeners)

    async def _end_all_when_cancelled(self) -> None:
        """Hypercorn writes uncancellably: only the end of its stream ends a write that a client does not take."""
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(limits.LAST_WORD_SECONDS):
                    while self._streams:
                        self._ended = trio.Event()
                        await self._ended.wait()
                for stream in list(self._streams):
                    await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One connection until its end. Nothing that a client does escapes from here."""
        try:
            address = str(stream.socket.getpeername()[0])
        except OSError:  # it went away before it was served
            await trio.aclose_forcefully(stream)
            return
        if self.open >= limits.CONNECTIONS_MAX or self._by_address[address] >= _most_of(address):
            await _refuse(stream)
            return
        self.open += 1
        self._streams.add(stream)
        self._by_address[address] += 1
        try:
            await _Connection(self._app, self._config, self._context, _BoundedStream(stream)).run()
        except* Exception as errors:  # what h11 or Hypercorn stumbles over ends with its connection
            _log.warning("api.connection_failed", error=type(errors.exceptions[0]).__name__)
        finally:
            self.open -= 1
            self._streams.discard(stream)
            self._ended.set()
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
            await trio.aclose_forcefully(stream)


def _config() -> Config:
    config = Config()
    config.h11_max_incomplete_size = limits.HEADER_BYTES_MAX
    config.keep_alive_timeout = limits.HEADERS_SECONDS_MAX
    config.include_server_header = False
    config.logger_class = _QuietLogger
    return config


class _QuietLogger(Logger):
    """Hypercorn would log a failure with its message, where a request's text might stand."""

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        _log.error("api.hypercorn_failed", reason=message, error=getattr(sys.exc_info()[0], "__name__", None))


def _most_of(address: str) -> int:
    here = address.startswith("127.") or address == "::1"
    return limits.CONNECTIONS_MAX if here else limits.CONNECTIONS_PER_ADDRESS_MAX


async def _refuse(stream: trio.SocketStream) -> None:
    with trio.move_on_after(limits.REFUSE_SECONDS_MAX):
        try:
            await stream.send_all(_FULL)
            await stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
    await trio.aclose_forcefully(stream)


class _Connection(TCPServer):
    """Hypercorn's, without TLS and HTTP/2."""

    def __init__(self, app: ASGIWrapper, config: Config, context: WorkerContext, stream: _BoundedStream) -> None:
        bounded: Any = stream
        super().__init__(app, config, context, {}, bounded)
        self._socket = stream.socket

    async def run(self) -> None:
        try:
            client = parse_socket_addr(self._socket.family, self._socket.getpeername())
            server = parse_socket_addr(self._socket.family, self._socket.getsockname())
            async with TaskGroup() as group:
                self._task_group = group
                state = ConnectionState({})
                protocol: Any = _Http1(
                    self.app, self.config, self.context, group, state, False, client, server, self.protocol_send
                )
                self.protocol = protocol
                await self.idle_task.restart(group, self._idle_timeout)
                await self._read_data()
                await self.idle_task.stop()  # else a client that has gone keeps its place until it would have been idle
        except OSError:
            pass
        finally:
            await self._close()


class _Http1(H11Protocol):
    async def _check_protocol(self, event: h11.Request) -> None:
        """Stay with HTTP/1.1: an upgrade that is not taken is no error."""


class _BoundedStream:
    """What Hypercorn needs of a stream. A write that takes too long breaks it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self.receive_some = stream.receive_some
        self.send_eof = stream.send_eof
        self.aclose = stream.aclose

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(limits.WRITE_SECONDS_MAX) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            await trio.aclose_forcefully(self._stream)
            raise trio.BrokenResourceError("the client reads nothing")
