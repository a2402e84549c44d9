"""Asks the swarm from any peer: here if this is the leader, else over a prompt stream.

The same replies come either way. An asker hears from its leader at least once a second; four seconds of silence, or a
leader that its pings have given up, end the request with a typed error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import trio

from capabilities.errors import Internal, NoLeader, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.prompt_messages import PROTOCOL, Ask, Done, Failed, Reply, Token, decode_reply, encode_ask
from swarmnode.wire import read_frame


class Asker(Protocol):
    """Where prompts go."""

    @property
    def leader(self) -> str | None:
        """The leader's peer id, if one is known."""

    def replies(self, ask: Ask) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """An async context manager that gives an async iterator of replies, the last one Done or Failed."""


class RemoteAsker:
    """Prompts over the network. `refusal` tells why no leader can be asked now, or None."""

    def __init__(self, network: Network, leader: PeerId, refusal: Callable[[], SwarmError | None]) -> None:
        self._network = network
        self._leader = leader
        self._refusal = refusal

    @property
    def leader(self) -> str | None:
        return str(self._leader)

    @asynccontextmanager
    async def replies(self, ask: Ask) -> AsyncIterator[AsyncIterator[Reply]]:
        """Leaving the context closes the stream, which frees the leader."""
        stream: Stream | None = None
        try:
            if (error := self._refusal()) is not None:
                yield only(Failed(error))
                return
            try:
                with trio.fail_after(limits.PROMPT_SILENCE_SECONDS_MAX):
                    stream = await self._network.open_stream(self._leader, PROTOCOL)
                    await stream.send(encode_ask(ask))
            except (NetworkError, trio.TooSlowError) as error:
                yield only(Failed(self._lost(ask, str(error) or "it does not answer")))
                return
            yield self._receive(stream, ask)
        finally:
            if stream is not None:
                await stream.reset()

    async def _receive(self, stream: Stream, ask: Ask) -> AsyncIterator[Reply]:
        next_index = 0
        while True:
            try:
                with trio.fail_after(limits.PROMPT_SILENCE_SECONDS_MAX):
                    reply = decode_reply(await read_frame(stream, limits.PROMPT_REPLY))
            except trio.TooSlowError:
                yield Failed(self._lost(ask, f"it was silent for {limits.PROMPT_SILENCE_SECONDS_MAX:g} s"))
                return
            except NetworkError as error:
                yield Failed(self._lost(ask, str(error)))
                return
            except PeerMistake as mistake:
                yield Failed(Internal(f"the leader broke the protocol: {mistake.message}", request_id=ask.request_id))
                return
            if isinstance(reply, Token):
                if reply.index != next_index:
                    yield Failed(Internal(f"the leader sent token {reply.index} for {next_index}"))
                    return
                next_index += 1
            yield reply
            if isinstance(reply, Done | Failed):
                return

    def _lost(self, ask: Ask, reason: str) -> NoLeader:
        return NoLeader(
            f"the leader {self._leader} was lost: {reason}", peer=str(self._leader), request_id=ask.request_id
        )


async def only(reply: Reply) -> AsyncIterator[Reply]:
    """An answer that consists of one reply: a refusal."""
    yield reply
