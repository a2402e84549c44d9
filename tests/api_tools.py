"""The HTTP interface in one process: a real server on loopback, over a swarm whose every reply the test decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

from capabilities.errors import SwarmError
from scheduler.requests import Timings, Usage
from swarmnode.api.service import Http
from swarmnode.config_sections import ApiConfig
from swarmnode.paths import find_paths
from swarmnode.prompt_messages import Alive, Ask, Done, Queued, Reply, Token
from tests.patience import PATIENCE_S

MODEL = {"name": "tiny", "id": "ab" * 32, "combine": "router-order"}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def token(index: int, text: str, **more: Any) -> Token:
    return Token(index, 100 + index, text, **more)


def done(text: str = "", tokens: int = 2, **more: Any) -> Done:
    return Done("stop", text, Usage(3, tokens), Timings(0.0, 0.0, 0.0), **more)


@dataclass
class Conversation:
    """One request that reached the swarm."""

    ask: Ask
    ended: trio.Event = field(default_factory=trio.Event)
    _send: trio.MemorySendChannel[Reply] = None  # type: ignore[assignment]
    _receive: trio.MemoryReceiveChannel[Reply] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Reply](1000)

    def say(self, *replies: Reply) -> None:
        for reply in replies:
            self._send.send_nowait(reply)

    async def heard(self) -> AsyncIterator[Reply]:
        """As an asker hears it: that the leader lives, when it says nothing else."""
        while True:
            reply: Reply = Alive()
            with trio.move_on_after(0.1):
                reply = await self._receive.receive()
            yield reply


def answer(conversation: Conversation) -> None:
    """A script: an answer at once."""
    conversation.say(Queued(0), token(0, "Good "), token(1, "day"), done("."))


class FakeSwarm:
    """handlers.Services, and the asker in it. `script` answers each request at once, where there is one."""

    leader: Any = None
    models: Any = None

    def __init__(self, script: Callable[[Conversation], None] | None = None) -> None:
        self.conversations: list[Conversation] = []
        self.came = trio.Event()
        self.refusal: SwarmError | None = None
        self.model: Mapping[str, Any] | None = MODEL
        self.ready = True
        self.draining = False
        self._script = script

    @property
    def asker(self) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return self

    @asynccontextmanager
    async def replies(self, ask: Ask) -> AsyncIterator[AsyncIterator[Reply]]:
        conversation = Conversation(ask)
        self.conversations.append(conversation)
        if self._script is not None:
            self._script(conversation)
        self.came.set()
        try:
            yield conversation.heard()
        finally:
            conversation.ended.set()

    async def next(self) -> Conversation:
        """The request that comes next, or the one that came last."""
        with trio.fail_after(PATIENCE_S):
            await self.came.wait()
        self.came = trio.Event()
        return self.conversations[-1]

    def counters(self) -> Mapping[str, Any]:
        return {"network": None, "worker": None}

    async def placement(self, without: str | None) -> Mapping[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return {"epoch": 1, "without": without}

    async def drain(self, on: bool) -> Mapping[str, Any]:
        self.draining = on
        return {"draining": on}

    async def status(self) -> Mapping[str, Any]:
        return {"self": "me", "model": self.model, "ready": self.ready, "reason": None, "findings": [], "peers": []}


@dataclass
class Served:
    http: Http
    swarm: FakeSwarm
    stop: trio.CancelScope
    ended: trio.Event

    @property
    def url(self) -> str:
        return str(self.http.url)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def raw(self, data: bytes, seconds: float = PATIENCE_S) -> bytes:
        """Everything that comes back for these bytes, until the server closes."""
        with trio.fail_after(seconds):
            async with await self.connect() as stream:
                await stream.send_all(data)
                return b"".join([part async for part in stream])

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, **options) as client:
            yield client


@asynccontextmanager
async def serving_http(
    script: Callable[[Conversation], None] | None = None, *, folder: Path | None = None, **config: Any
) -> AsyncIterator[Served]:
    """`config`: keys of the [api] section. `folder`: the daemon's data folder, if anything there counts."""
    swarm = FakeSwarm(script)
    services: Any = swarm
    paths = find_paths(folder or Path("no-such-folder"))
    if folder is not None:
        paths.make()
    http = Http(ApiConfig(**{"listen": "127.0.0.1:0", **config}), services, paths)
    ended = trio.Event()

    async def run(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(http.run)
                task_status.started(scope)
        ended.set()

    async with trio.open_nursery() as nursery:
        scope = await nursery.start(run)
        yield Served(http, swarm, scope, ended)
        scope.cancel()


def post(body: bytes, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    """A whole request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
