"""What stands before every route: whether the client may ask at all, its body within limits, and its leaving.

One task reads from the client for as long as its request lives. So a body is bounded whatever the route does with it,
and a client that goes away cancels its request wherever that is, which frees the leader.
"""

from __future__ import annotations

import traceback
from typing import Any, Final

import structlog
import trio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capabilities.errors import SwarmError
from swarmnode.api import limits
from swarmnode.api.access import CLIENT, Access
from swarmnode.api.errors import Refusal, refusal_of
from swarmnode.api.metrics import HttpMetrics

_log = structlog.get_logger(__name__)


GONE: Final = 499
"""In the metrics: the client went away before its answer began."""


_ALWAYS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    # The daemon's page loads nothing from elsewhere, and nobody shows it inside another one.
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
)


class Guard:
    """An ASGI app around another one."""

    def __init__(self, app: ASGIApp, access: Access, metrics: HttpMetrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._bodies = _Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        incoming = _Incoming(receive, self._bodies, _declared(scope))
        outgoing = _Outgoing(send, incoming)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(incoming.run, nursery.cancel_scope)
                await self._answer(scope, incoming, outgoing)
                nursery.cancel_scope.cancel()
        finally:
            incoming.release()
            self._metrics.answered(scope["path"], outgoing.status)

    async def _answer(self, scope: Scope, incoming: _Incoming, outgoing: _Outgoing) -> None:
        failed: BaseException | None = None
        try:
            granted = self._access.check(scope)
            outgoing.headers += granted.headers
            scope[CLIENT] = granted.client
            app = self._app if granted.response is None else granted.response
            await app(scope, incoming.receive, outgoing.send)
        except* Exception as errors:
            failed = errors
        if failed is None:
            return
        refusal = _refusal(failed)
        if outgoing.status != GONE:  # nothing can be said any more; the connection ends, so the client knows
            _log.warning("api.answer_broke_off", reason=refusal.code)
            return
        await _tell(refusal, scope, incoming, outgoing)


async def _tell(refusal: Refusal, scope: Scope, incoming: _Incoming, outgoing: _Outgoing) -> None:
    """Answer with a refusal. A client that still sends its body hears it at once, and what comes is dropped for a
    moment: a connection that ends with bytes unread may lose its answer, too."""
    response = refusal.response()
    with trio.move_on_after(limits.REST_SECONDS_MAX) as waiting:
        await incoming.wait_read()
    if not waiting.cancelled_caught:
        await response(scope, incoming.receive, outgoing.send)
        return

    async def send(message: Message) -> None:
        await outgoing.send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    response.headers["connection"] = "close"
    await response(scope, incoming.receive, send)
    with trio.move_on_after(limits.DISCARD_SECONDS_MAX):
        await incoming.wait_read()
    await outgoing.send({"type": "http.response.body", "body": b"", "more_body": False})


def _declared(scope: Scope) -> int:
    """Bytes that the body will have, as the client says; 0: it does not say."""
    return int(Headers(scope=scope).get("content-length", "0"))  # h11 lets only numbers through


def _refusal(error: BaseException) -> Refusal:
    if isinstance(error, BaseExceptionGroup):  # the first of them is told
        return _refusal(error.exceptions[0])
    if isinstance(error, Refusal):
        return error
    if isinstance(error, SwarmError):
        return refusal_of(error)
    if isinstance(error, HTTPException):  # the router's
        return _no_route(error)
    # Neither the message nor the values are logged: a request's text might stand in them.
    where = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
    _log.error("api.failed", error=type(error).__name__, where=where)
    return Refusal(500, "this is a bug: the daemon's log says where", "internal")


def _no_route(error: HTTPException) -> Refusal:
    if error.status_code == 405:
        takes = (error.headers or {}).get("allow", "another")
        return Refusal(405, f"this address takes {takes}", "method_not_allowed", headers=error.headers)
    there_are = "/v1/chat/completions, /v1/completions and /v1/models (docs/api.md has all)"
    return Refusal(error.status_code, f"there is nothing at this address; there are {there_are}", "not_found")


class _Bodies:
    """Bytes of all bodies that are held now."""

    def __init__(self) -> None:
        self.bytes = 0


class _Incoming:
    """The client's side of one request. `run` reads it, until the client goes."""

    def __init__(self, receive: Receive, bodies: _Bodies, declared: int) -> None:
        self._receive = receive
        self._bodies = bodies
        self._body = bytearray()
        self._taken = 0
        self._known = trio.Event()  # the whole body, or why it is refused
        self._read = trio.Event()  # the whole body, or as much as will be
        self._refusal: Refusal | None = None
        self._given = False
        self.gone = False  # the client
        self.answered = False  # the last byte is being sent: Hypercorn tells then, too, that the client is gone
        if declared > limits.BODY_BYTES_MAX:
            self._refuse(_too_large())

    async def run(self, scope: trio.CancelScope) -> None:
        with trio.move_on_after(limits.BODY_SECONDS_MAX) as waiting:
            if await self._read_body():
                self._go(scope)
                return
        if waiting.cancelled_caught:
            self._refuse(Refusal(408, f"the body took over {limits.BODY_SECONDS_MAX:g} s", "timeout"))
        self._known.set()
        self._read.set()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._go(scope)

    def _go(self, scope: trio.CancelScope) -> None:
        self.gone = True
        if not self.answered:
            scope.cancel()

    async def _read_body(self) -> bool:
        """Whether the client went away meanwhile."""
        dropped = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return True
            data: bytes = message.get("body", b"")
            if self._refusal is not None:
                dropped += len(data)
            elif len(self._body) + len(data) > limits.BODY_BYTES_MAX:
                self._refuse(_too_large())
            elif self._bodies.bytes + len(data) > limits.BODIES_BYTES_MAX:
                self._refuse(Refusal(429, "this node holds as much text as it can", "overloaded", retry=True))
            else:
                self._body += data
                self._taken += len(data)
                self._bodies.bytes += len(data)
            if not message.get("more_body") or dropped > limits.DISCARD_BYTES_MAX:
                return False

    def _refuse(self, refusal: Refusal) -> None:
        self._refusal = self._refusal or refusal
        self._body.clear()
        self._known.set()

    def release(self) -> None:
        self._bodies.bytes -= self._taken
        self._taken = 0

    async def wait_read(self) -> None:
        await self._read.wait()

    async def receive(self) -> Message:
        """ASGI's: the whole body as one message; after it nothing, until the client goes.

        Raises:
            Refusal: the body is too large, or came too slowly.
        """
        if self._given:
            await trio.sleep_forever()
        await self._known.wait()
        if self._refusal is not None:
            raise self._refusal
        self._given = True
        body = bytes(self._body)
        self._body.clear()
        return {"type": "http.request", "body": body, "more_body": False}


def _too_large() -> Refusal:
    return Refusal(413, f"the body has over {limits.BODY_BYTES_MAX} bytes", "body_too_large")


class _Outgoing:
    """ASGI's send, with headers that stand in every answer, and the knowledge whether one has begun."""

    def __init__(self, send: Send, incoming: _Incoming) -> None:
        self.status = GONE
        self.headers = list(_ALWAYS)
        self._send = send
        self._incoming = incoming

    async def send(self, message: Any) -> None:
        if self._incoming.gone:
            return
        self._incoming.answered = message["type"] == "http.response.body" and not message.get("more_body")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
        await self._send(message)
