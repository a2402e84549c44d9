"""The daemon's side of the control channel, a Unix socket for this user alone. control_client.py has the protocol.

A connection carries one request to one handler, whose result or typed error ends it. Three tasks live as long as the
request: the handler, one that reads in order to notice that the caller has gone, and one that tells the caller from
time to time that the daemon lives. When the caller goes, the handler is cancelled wherever it is: what a request holds
is released by leaving its `with` blocks, and there is no other way to end it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from capabilities.errors import Internal, Overloaded, RequestCancelled, SwarmError, UsageError
from swarmnode.control_client import KEEPALIVE_SECONDS, REPLY_LINE_BYTES_MAX, REQUEST_LINE_BYTES_MAX
from swarmnode.durable import storage_failed

if TYPE_CHECKING:
    from trio_typing import TaskStatus

Json = Any
Handler = Callable[[dict[str, Json], "ControlReply"], Awaitable[Mapping[str, Json]]]

CONNECTIONS_MAX: Final = 64
"""Requests at a time. Each may hold a prompt of 1 MiB; the leader's queue is the bound that a person meets first."""

REQUEST_SECONDS_MAX: Final = 10.0
"""From connecting to the end of the request line: swarmctl sends both in one go."""

WRITE_SECONDS_MAX: Final = 30.0
"""A caller that reads nothing for this long, with 200 KB in the kernel's buffer unread, has gone in all but name."""

LAST_WORD_SECONDS: Final = 0.5
RECEIVE_BYTES: Final = 1 << 16

_log = structlog.get_logger(__name__)


class ControlReply:
    """What a handler uses to send events while it works."""

    def __init__(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        self._stream = stream
        self._scope = scope  # of the whole request
        self._turn = trio.Lock()
        self._whole = True  # False while a line is half sent

    async def event(self, name: str, **fields: Json) -> None:
        """Send one event. Waits while the caller reads slowly; if it has gone, the handler is cancelled here."""
        await self._send(_encode({"event": name, **fields}))

    async def _send(self, line: bytes) -> None:
        async with self._turn:
            try:
                self._whole = False
                with trio.fail_after(WRITE_SECONDS_MAX):
                    await self._stream.send_all(line)
                self._whole = True
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                self._scope.cancel()
                await trio.lowlevel.checkpoint()

    async def _last_word(self, error: SwarmError) -> None:
        """Say why a request ends that did not end by itself."""
        with trio.CancelScope(shield=True), trio.move_on_after(LAST_WORD_SECONDS):
            if self._whole:
                await self._send(_encode({"error": error.to_json()}))


async def serve_control(
    path: Path, handlers: Mapping[str, Handler], *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; `started()` once callers can connect.

    Raises UsageError if another daemon serves this socket. A socket left over by one that died is replaced.
    """
    with _listening(path) as listener:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, _Server(handlers).serve, [listener])
            task_status.started()


class _Server:
    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._connections = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection. Nothing that a caller or a handler does escapes from here."""
        self._connections += 1
        try:
            async with stream:
                with trio.CancelScope() as scope:
                    await self._serve(stream, ControlReply(stream, scope))
        except Exception:
            _log.exception("control connection failed")
        finally:
            self._connections -= 1

    async def _serve(self, stream: trio.SocketStream, reply: ControlReply) -> None:
        try:
            if self._connections > CONNECTIONS_MAX:
                raise Overloaded(f"this daemon already serves {CONNECTIONS_MAX} commands")
            method, params = _parse(await _read_request(stream))
            if (handler := self._handlers.get(method)) is None:
                raise UsageError(f"this daemon knows no command {method[:40]!r}", hint="Is swarmctl newer than it?")
        except SwarmError as error:
            await reply._last_word(error)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, stream, reply._scope)
                nursery.start_soon(_keep_alive, reply)
                await reply._send(await _outcome(handler, params, reply))
                nursery.cancel_scope.cancel()
        except BaseException:
            if not reply._scope.cancel_called:
                await reply._last_word(RequestCancelled("the daemon is stopping"))
            raise


async def _outcome(handler: Handler, params: dict[str, Json], reply: ControlReply) -> bytes:
    """The line that ends a request: its result, or the error that a handler raised."""
    try:
        return _encode({"result": await handler(params, reply)})
    except Exception as error:
        return _encode({"error": _typed(error).to_json()})


def _typed(error: Exception) -> SwarmError:
    """The error as the caller sees it. A nursery wraps what its tasks raise: a group of typed errors is its first."""
    if isinstance(error, ExceptionGroup):
        typed, others = error.split(SwarmError)
        if typed and not others:
            return _typed(typed.exceptions[0])
    if isinstance(error, SwarmError):
        return error
    if isinstance(error, OSError) and (failed := storage_failed(error)) is not None:
        return failed
    _log.error("control handler failed", exc_info=error)
    return Internal(f"the daemon failed: {type(error).__name__}")


async def _cancel_when_gone(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Reads until the caller closes. What it still sends has no meaning and is dropped."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await stream.receive_some(RECEIVE_BYTES):
            pass
    scope.cancel()


async def _keep_alive(reply: ControlReply) -> None:
    while True:
        await trio.sleep(KEEPALIVE_SECONDS)
        await reply._send(b"\n")


async def _read_request(stream: trio.SocketStream) -> bytes:
    pending = bytearray()
    with trio.move_on_after(REQUEST_SECONDS_MAX):
        while len(pending) <= REQUEST_LINE_BYTES_MAX:
            data = await stream.receive_some(RECEIVE_BYTES)
            pending += data
            if b"\n" in data:
                return bytes(pending.partition(b"\n")[0])
            if not data:
                raise UsageError("the request ends before its line does")
        raise UsageError(f"the request is longer than {REQUEST_LINE_BYTES_MAX} bytes")
    raise UsageError(f"no request came within {REQUEST_SECONDS_MAX:.0f} s")


def _parse(line: bytes) -> tuple[str, dict[str, Json]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError("the request is not JSON") from error
    method, params = (value.get("method"), value.get("params", {})) if isinstance(value, dict) else (None, None)
    if not isinstance(method, str) or not isinstance(params, dict):
        raise UsageError('a request is {"method": TEXT, "params": {...}}')
    return method, params


def _encode(value: Mapping[str, Json]) -> bytes:
    line = json.dumps(value, allow_nan=False).encode() + b"\n"
    if len(line) > REPLY_LINE_BYTES_MAX:
        raise Internal(f"a reply of {len(line)} bytes is over the limit of {REPLY_LINE_BYTES_MAX}")
    return line


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[trio.SocketListener]:
    """The listening socket, under a lock that the kernel drops with the process: a socket without one is left over."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another daemon already runs with this data folder ({path})",
                hint="Stop it, or give this one a folder of its own with --data-dir.",
            ) from error
        if path.is_socket():
            path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(str(path))
            except OSError as error:
                raise UsageError(f"cannot listen at {path}: {error.strerror or error}") from error
            try:
                path.chmod(0o600)
                sock.listen(CONNECTIONS_MAX)
                yield trio.SocketListener(trio.socket.from_stdlib_socket(sock))
            finally:
                path.unlink(missing_ok=True)
