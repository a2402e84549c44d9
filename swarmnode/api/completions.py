"""/v1/chat/completions and /v1/completions: whole, or as a stream of server-sent events.

A stream's status line waits for the first token, though not for long: what fails at once has its own status, and
whoever waits in the leader's queue sees the place in it, as comments that client libraries pass over.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

import structlog
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from swarmnode.api import limits
from swarmnode.api.access import CLIENT
from swarmnode.api.answering import Choice, Event, Told, Turn, open_answers, swarm_of, usage_of
from swarmnode.api.asking import chat_asks, check_model, completion_asks
from swarmnode.api.errors import Refusal, refusal_of
from swarmnode.api.fair_use import FairUse
from swarmnode.api.metrics import HttpMetrics
from swarmnode.api.schema import ChatBody, CompletionBody, SamplingBody, parse
from swarmnode.api.served import ServedModels
from swarmnode.api.shapes import ChatShape, Shape, TextShape
from swarmnode.asker import Asker
from swarmnode.handlers import Services
from swarmnode.prompt_messages import Alive, Ask, Done, Failed, Queued, Reply, Token, loggable

_log = structlog.get_logger(__name__)

_SSE_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies pass each event on at once


class Completions:
    """The two endpoints."""

    def __init__(self, services: Services, served: ServedModels, fair_use: FairUse, metrics: HttpMetrics) -> None:
        self._services = services
        self._served = served
        self._fair_use = fair_use
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        body = await parse(ChatBody, await request.body())
        return await self._answer(request, body, chat_asks(body), ChatShape())

    async def completion(self, request: Request) -> Response:
        body = await parse(CompletionBody, await request.body())
        asks = completion_asks(body)
        echo = [ask.prompt or "" for ask in asks] if body.echo else []
        return await self._answer(request, body, asks, TextShape(echo, len(asks)))

    async def _answer(self, request: Request, body: SamplingBody, asks: Sequence[Ask], shape: Shape) -> Response:
        asker = self._services.asker
        model = await self._served.now()
        check_model(body.model, model)
        client: str = request.scope[CLIENT]
        self._fair_use.admit(client, len(asks))
        name = body.model or ("" if model is None else model.name)
        id_ = f"{shape.prefix}-{asks[0].request_id}"
        fingerprint = None if model is None else model.fingerprint
        told = Told(shape.chunk_kind if body.stream else shape.kind, id_, name, fingerprint)
        _log.info("request.begin", role="asker", request_id=asks[0].request_id, answers=len(asks))
        job = _Job(asker, asks, told, shape, body.n, partial(self._fair_use.turn, client), self._metrics)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return _Stream(job, with_usage=usage) if body.stream else await _whole(job)


@dataclass(frozen=True)
class _Job:
    """One request; `n` answers to each of its prompts."""

    asker: Asker
    asks: Sequence[Ask]
    told: Told
    shape: Shape
    n: int
    turn: Turn
    metrics: HttpMetrics
    choices: list[Choice] = field(init=False)
    began_s: float = field(default_factory=trio.current_time)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", [Choice() for _ in self.asks])

    def take(self, index: int, reply: Reply) -> str:
        """The text that a reply adds to its answer."""
        choice = self.choices[index]
        if isinstance(reply, Token):
            self.metrics.token()
            if not choice.tokens:
                self.metrics.first_token(trio.current_time() - self.began_s)
        return choice.take(reply)

    def end(self) -> None:
        tokens = sum(len(choice.tokens) for choice in self.choices)
        _log.info("request.end", role="asker", request_id=self.asks[0].request_id, completion_tokens=tokens)

    def fail(self, failed: Failed) -> Refusal:
        error = failed.error
        _log.warning("request.failed", role="asker", request_id=self.asks[0].request_id, error=loggable(error))
        return refusal_of(error, "messages" if self.asks[0].prompt is None else "prompt")


async def _whole(job: _Job) -> Response:
    async with open_answers(job.asker, job.asks, job.turn) as events:
        async for index, reply in events:
            if isinstance(reply, Failed):
                raise job.fail(reply)
            job.take(index, reply)
    job.end()
    choices = [job.shape.whole(index, choice) for index, choice in enumerate(job.choices)]
    swarm = swarm_of(job.asks, job.choices)
    told = {**job.told.head(), "choices": choices, "usage": usage_of(job.choices, job.n), "swarm": swarm}
    return JSONResponse(told, headers=_id_header(job))


def _id_header(job: _Job) -> dict[str, str]:
    """OpenAI's clients show it as the request's id; it stands in the log of every peer that took part."""
    return {"x-request-id": job.asks[0].request_id}


class _Stream(Response):
    """An ASGI response that asks the swarm while it is sent."""

    media_type = "text/event-stream"

    def __init__(self, job: _Job, *, with_usage: bool) -> None:
        super().__init__(headers={**_SSE_HEADERS, **_id_header(job)})
        del self.headers["content-length"]
        self._job = job
        self._with_usage = with_usage
        self._started = False
        self._spoke_at = trio.current_time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        last: Refusal | None = None
        try:
            async with open_answers(self._job.asker, self._job.asks, self._job.turn) as events:
                last = await self._tell_all(events)
        except BaseException:
            if self._started and trio.current_effective_deadline() == -inf:
                with trio.CancelScope(shield=True), trio.move_on_after(limits.LAST_WORD_SECONDS):
                    await self._end(Refusal(503, "the daemon is stopping", "cancelled"))
            raise
        await self._end(last)

    async def _tell_all(self, events: AsyncIterator[Event]) -> Refusal | None:
        """Tell what comes; why it ended early, if it did. Raises that where nothing was told yet."""
        patience = self._spoke_at + limits.STREAM_PATIENCE_SECONDS
        async for index, reply in events:
            if isinstance(reply, Failed):
                refusal = self._job.fail(reply)
                if self._started:
                    return refusal
                raise refusal
            waits = isinstance(reply, Queued | Alive) and not (isinstance(reply, Queued) and reply.position)
            if self._started or not waits or trio.current_time() >= patience:
                await self._start()
                await self._tell(index, reply)
        return None

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for index in range(len(self._job.choices)):
            if (first := self._job.shape.first(index)) is not None:
                await self._chunk([first])

    async def _tell(self, index: int, reply: Reply) -> None:
        choice, shape = self._job.choices[index], self._job.shape
        token = reply if isinstance(reply, Token) and reply.logprob is not None else None
        if (text := self._job.take(index, reply)) or token is not None:
            await self._chunk([shape.piece(index, text, token)])
        match reply:
            case Done():
                await self._chunk([shape.last(index, choice)])
            case Queued(position) if position:
                await self._write(f": place {position} in the queue\n\n")
            case Alive() if trio.current_time() - self._spoke_at >= limits.STREAM_COMMENT_SECONDS:
                await self._write(": the swarm is at it\n\n")

    async def _end(self, refusal: Refusal | None) -> None:
        """The last words: an error, or what the whole took; and the end."""
        if refusal is not None:
            await self._event(refusal.to_json())
        else:
            self._job.end()
            closing = {"choices": [], "swarm": swarm_of(self._job.asks, self._job.choices)}
            if self._with_usage:
                usage = usage_of(self._job.choices, self._job.n)
                await self._event({**self._job.told.head(), **closing, "usage": usage})
            await self._write("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunk(self, choices: list[dict[str, Any]]) -> None:
        usage = {"usage": None} if self._with_usage else {}
        await self._event({**self._job.told.head(), "choices": choices, **usage})

    async def _event(self, value: dict[str, Any]) -> None:
        await self._write(f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n")

    async def _write(self, text: str) -> None:
        self._spoke_at = trio.current_time()
        data = text.encode("utf-8", errors="replace")
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
