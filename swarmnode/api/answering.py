"""A request's answers as they come: one task for each, all into one queue, and the shapes that they are told in."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from swarmnode.api import limits
from swarmnode.asker import Asker
from swarmnode.prompt_messages import Ask, Done, Failed, Queued, Reply, Token

_log = structlog.get_logger(__name__)

Turn = Callable[[Callable[[int], None]], AbstractAsyncContextManager[None]]

Event = tuple[int, Reply]
"""Which of the answers, and its reply."""


@asynccontextmanager
async def open_answers(asker: Asker, asks: Sequence[Ask], turn: Turn) -> AsyncIterator[AsyncIterator[Event]]:
    """The replies to all, as they come, until each had its last. Leaving early frees the leader.

    `turn`: what each waits for before the swarm is asked; it hears the place in the queue meanwhile.

    A reply that is Failed is the last one of all: nobody wants the others' answers then.
    """
    send, receive = trio.open_memory_channel[Event](limits.ANSWER_EVENTS_MAX)

    async def hear(index: int, ask: Ask) -> None:
        def show(place: int) -> None:
            with suppress(trio.WouldBlock):  # a slow client sees fewer places
                send.send_nowait((index, Queued(place)))

        async with turn(show), asker.replies(ask) as replies:
            async for reply in replies:
                await send.send((index, reply))

    async def events() -> AsyncGenerator[Event, None]:
        left = len(asks)
        while left:
            index, reply = await receive.receive()
            left -= isinstance(reply, Done)
            yield index, reply
            if isinstance(reply, Failed):
                return

    async with trio.open_nursery() as nursery:
        for index, ask in enumerate(asks):
            nursery.start_soon(hear, index, ask)
        async with aclosing(events()) as told:
            yield told
        nursery.cancel_scope.cancel()


@dataclass
class Choice:
    """One answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    done: Done | None = None

    @property
    def told_tokens(self) -> list[Token]:
        """Those whose probability was asked for."""
        return [token for token in self.tokens if token.logprob is not None]

    def take(self, reply: Reply) -> str:
        """The text that a reply adds."""
        piece = ""
        if isinstance(reply, Token):
            self.tokens.append(reply)
            piece = reply.text
        elif isinstance(reply, Done):
            self.done = reply
            piece = reply.text
        if piece:
            self.text.append(piece)
        return piece


@dataclass(frozen=True)
class Told:
    """What stands in every object of one answer."""

    kind: str
    id: str
    model: str
    fingerprint: str | None
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Tokens of all answers; a prompt's count once, however many answers (`n`) it got."""
    done = [choice.done for choice in choices if choice.done is not None]
    prompt = sum(d.usage.prompt_tokens for d in done[::n])
    completion = sum(d.usage.completion_tokens for d in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(d.usage.cached_tokens for d in done[::n])},
    }


def swarm_of(asks: Sequence[Ask], choices: Sequence[Choice]) -> dict[str, Any]:
    """What a swarm adds to an answer: how to find it in the logs, to repeat it, and who computed it."""
    done = [choice.done for choice in choices if choice.done is not None]
    timings = [d.timings for d in done]
    return {
        "request_id": asks[0].request_id,
        "seed": asks[0].params.seed,
        "leader": done[0].leader if done else None,
        "mixed_classes": any(d.mixed for d in done),
        "tainted": any(d.tainted for d in done),
        "timings": {
            "queue_s": round(max((t.queue_s for t in timings), default=0.0), 6),
            "prefill_s": round(max((t.prefill_s for t in timings), default=0.0), 6),
            "decode_s": round(max((t.decode_s for t in timings), default=0.0), 6),
        },
    }
