"""The leader's side of prompts: text to tokens, a request to the engine, its effects back to whoever asked.

`PromptService.answer` serves the leader's own command line and remote askers alike: it yields replies until the last.
Leaving it in any way (the asker's stream broke, Ctrl-C) cancels the request in the engine. An asker that lost sight of
this leader may come back with another attempt before the first one is known to be over: the newest counts.
`PromptStreams` is the protocol's side of it, which is there before any model is.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
import trio

from backends.vocabulary import Vocabulary
from capabilities.errors import NotReady, Overloaded, RequestCancelled, SwarmError, UsageError
from scheduler.attempts import is_passing
from scheduler.requests import Effect, FailedEffect, FinishedEffect, QueuedEffect, Request, TokenEffect
from swarmnode import limits
from swarmnode.leader.asked import Reader
from swarmnode.leader.engine import DecodeEngine
from swarmnode.net.interface import NetworkError, ServesProtocols, Stream
from swarmnode.prompt_frames import decode_ask, encode_reply, generated_count
from swarmnode.prompt_messages import (
    PROTOCOL,
    Alive,
    Ask,
    Done,
    Failed,
    Queued,
    Reply,
    Token,
    loggable,
)
from swarmnode.wire import Header, read_frame

_log = structlog.get_logger(__name__)

EFFECTS_MAX: Final = 4096  # replies that wait for a slow asker; beyond, its request ends as overloaded
_DISCARD_BYTES: Final = 64 << 10
_LAST_WORDS_S: Final = 1.0  # for replies to leave when the leader stops


Settled = Callable[[str, float, float], Awaitable[bool | None]]
"""What Settling.settled is."""


@dataclass
class PromptStatistics:
    """`failed` are requests that ended here without their answer; one that its asker takes elsewhere has not failed."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    tainted: int = 0


class PromptService:
    """Requests of all askers. `ready` tells why none can be served now, or None."""

    def __init__(
        self,
        engine: DecodeEngine,
        vocabulary: Vocabulary,
        context_tokens: int,
        deadline_s: float,
        ready: Callable[[], NotReady | None],
        on_begin: Callable[[str], None],
        on_end: Callable[[str], None],
        settled: Settled,
    ) -> None:
        """settled: whether an answer may end, and is tainted."""
        self.statistics = PromptStatistics()
        self._engine = engine
        self._vocabulary = vocabulary
        self._reader = Reader(vocabulary, context_tokens, deadline_s)
        self._ready = ready
        self._on_begin = on_begin
        self._on_end = on_end
        self._settled = settled
        self._running: dict[str, _Running] = {}  # by the asker's request id

    @asynccontextmanager
    async def answer(self, ask: Ask, asker: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """`async with service.answer(ask, asker) as replies: async for reply in replies: ...`; the last one ends it."""
        log = _log.bind(request_id=ask.request_id, asker=asker)
        send, receive = trio.open_memory_channel[Reply](EFFECTS_MAX)
        running = _Running(asker, ask, _Sink(send, ask, self._vocabulary, self._on_begin))
        submitted = False
        try:
            try:
                request = replace(await self._request(ask), client=asker)
                self._replace(running)
                self._engine.submit(request, running.sink)
                self._running[ask.request_id] = running
                submitted = True
                self.statistics.accepted += 1
                log.info(
                    "request.begin",
                    role="leader",
                    prompt_tokens=len(request.prompt_tokens),
                    generated=len(ask.generated),
                    attempt=ask.attempt,
                )
            except SwarmError as error:
                send.send_nowait(Failed(error))
            async with aclosing(self._replies(receive, log, ask, submitted)) as replies:
                yield replies
        finally:
            if submitted:
                self._engine.cancel(running.name, "the asker went away")
                if self._running.get(ask.request_id) is running:
                    del self._running[ask.request_id]
                    self._on_end(ask.request_id)
            send.close()

    def _replace(self, newcomer: _Running) -> None:
        """End an older attempt at the same request. Raises Overloaded if this one is not newer, or somebody else's."""
        old = self._running.get(newcomer.ask.request_id)
        if old is None:
            return
        if old.asker != newcomer.asker or old.ask.attempt >= newcomer.ask.attempt:
            raise Overloaded(f"request id {newcomer.ask.request_id} is in use")
        self._engine.cancel(old.name, "another attempt took its place")
        old.sink.fail(RequestCancelled("another attempt took its place", request_id=old.ask.request_id))

    async def _request(self, ask: Ask) -> Request:
        if (reason := self._ready()) is not None:
            raise reason
        return await self._reader.request(ask, _name(ask))

    async def _replies(
        self, receive: trio.MemoryReceiveChannel[Reply], log: Any, ask: Ask, submitted: bool
    ) -> AsyncGenerator[Reply, None]:
        ended = False
        try:
            while not ended:
                reply: Reply = Alive()
                with trio.move_on_after(limits.PROMPT_KEEPALIVE_SECONDS):
                    reply = await receive.receive()
                if isinstance(reply, Done):
                    since = trio.current_time()
                    while (found := await self._settled(_name(ask), since, limits.PROMPT_KEEPALIVE_SECONDS)) is None:
                        yield Alive()
                    reply = replace(reply, tainted=reply.tainted or found)
                ended = self._count(reply, log)
                if isinstance(reply, Failed):
                    self._count_failure(reply.error, ask.attempt, submitted)
                yield reply
        finally:
            if not ended:
                self.statistics.cancelled += 1
                log.info("request.cancelled", role="leader")

    def _count(self, reply: Reply, log: Any) -> bool:
        """Keep the statistics; whether this reply is the last."""
        match reply:
            case Token():
                self.statistics.tokens += 1
            case Done(reason, _, usage, timings):
                self.statistics.finished += 1
                self.statistics.tainted += reply.tainted
                log.info(
                    "request.end",
                    role="leader",
                    finish_reason=reason,
                    completion_tokens=usage.completion_tokens,
                    seconds=round(timings.queue_s + timings.prefill_s + timings.decode_s, 3),
                )
                return True
            case Failed(error):
                log.warning("request.failed", role="leader", error=loggable(error))
                return True
        return False

    def _count_failure(self, error: SwarmError, attempt: int, submitted: bool) -> None:
        if not (isinstance(error, RequestCancelled) or is_passing(attempt, error)):
            self.statistics.failed += 1
        elif submitted:
            self.statistics.cancelled += 1


class PromptStreams:
    """Serves /swarmnode/prompt/1 with whatever `answer(ask, asker)` gives."""

    def __init__(self, answer: Callable[[Ask, str], AbstractAsyncContextManager[AsyncIterator[Reply]]]) -> None:
        self._answer = answer
        self._text_bytes = 0  # of requests that are read or under way
        self._answering = 0
        self._answered = trio.Event()

    def register(self, network: ServesProtocols) -> None:
        network.serve(PROTOCOL, self._handle, max_streams_per_peer=limits.PROMPT_STREAMS_PER_PEER_MAX)

    async def _handle(self, stream: Stream) -> None:
        taken = refused = 0

        def take(header: Header, payload_bytes: int) -> None:
            nonlocal taken, refused
            size = payload_bytes + generated_count(header) * limits.REQUEST_TOKEN_BYTES
            if self._text_bytes + size > limits.REQUEST_TEXTS_BYTES_MAX:
                refused = payload_bytes
                raise Overloaded("this leader holds as much text as it can")
            taken = size
            self._text_bytes += taken

        try:
            with trio.fail_after(limits.IDLE_STREAM_SECONDS_MAX):
                frame = await read_frame(stream, limits.PROMPT_REQUEST, take)
            await self._serve(stream, decode_ask(frame))
        except (Overloaded, UsageError) as error:
            await self._send(stream, Failed(error))
            await self._discard(stream, refused)
        finally:
            self._text_bytes -= taken

    async def _discard(self, stream: Stream, count: int) -> None:
        """Take `count` bytes that the asker still sends: else the stream would end before it read why it is refused."""
        with trio.move_on_after(limits.SEND_SECONDS_MAX), contextlib.suppress(NetworkError):
            while count > 0:
                count -= len(await stream.receive_exactly(min(count, _DISCARD_BYTES)))

    async def wait_idle(self) -> None:
        """Wait until every request has had its last reply, but not for long."""
        with trio.move_on_after(_LAST_WORDS_S):
            while self._answering:
                self._answered = trio.Event()
                await self._answered.wait()

    async def _serve(self, stream: Stream, ask: Ask) -> None:
        self._answering += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_gone, stream, nursery.cancel_scope)
                async with self._answer(ask, str(stream.peer)) as replies:
                    async for reply in replies:
                        await self._send(stream, reply)
                nursery.cancel_scope.cancel()
        finally:
            self._answering -= 1
            self._answered.set()

    async def _send(self, stream: Stream, reply: Reply) -> None:
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(encode_reply(reply))

    async def _until_gone(self, stream: Stream, scope: trio.CancelScope) -> None:
        """The asker sends nothing more: whatever the stream tells now is that it went away."""
        with suppress(NetworkError):
            await stream.receive_exactly(1)
        scope.cancel()


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """An attempt that the engine has."""

    asker: str
    ask: Ask
    sink: _Sink

    @property
    def name(self) -> str:
        return _name(self.ask)


def _name(ask: Ask) -> str:
    """What the engine calls an attempt: effects of an older one must not be taken for this one's.

    No asker's request id has a `#` in it.
    """
    return f"{ask.request_id}#{ask.attempt}" if ask.attempt else ask.request_id


class _Sink:
    """Turns the engine's effects into replies. Called on the event loop."""

    def __init__(
        self,
        send: trio.MemorySendChannel[Reply],
        ask: Ask,
        vocabulary: Vocabulary,
        on_begin: Callable[[str], None],
    ) -> None:
        self._send = send
        self._ask = ask
        self._vocabulary = vocabulary
        self._on_begin = on_begin
        self._full = False

    def __call__(self, effect: Effect) -> None:
        reply: Reply
        match effect:
            case QueuedEffect(_, position):
                reply = Queued(position)
                if position == 0:
                    self._on_begin(self._ask.request_id)
            case TokenEffect(_, index, token, text, logprob, top):
                reply = Token(index, token, text)
                if self._ask.logprobs is not None:
                    shown = self._vocabulary.shown
                    best = tuple((each, value, shown(each)) for each, value in top)
                    reply = replace(reply, logprob=logprob, top=best, bytes=shown(token))
            case FinishedEffect(_, reason, text, usage, timings, mixed, calls, tainted):
                reply = Done(reason, text, usage, timings, mixed, tool_calls=calls, tainted=tainted)
            case FailedEffect(_, error):
                reply = Failed(error)
                if error.details.get("request_id") == _name(self._ask):
                    error.details["request_id"] = self._ask.request_id
        self._put(reply)

    def fail(self, error: SwarmError) -> None:
        """The last reply, whatever the engine says."""
        self._put(Failed(error))
        self._full = True

    def _put(self, reply: Reply) -> None:
        if self._full:
            return
        try:
            if self._send.statistics().current_buffer_used >= EFFECTS_MAX - 1:
                self._full = True
                reply = Failed(Overloaded("the asker reads too slowly"))
            self._send.send_nowait(reply)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
