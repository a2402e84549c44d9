"""What others open streams for on whoever leads: served once on a network, by the leader of the moment.

A node may lead many times, and not lead in between. Then it says so: which peer leads, if it knows, and in which term.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import trio

from capabilities.errors import NoLeader
from swarmnode import limits
from swarmnode.asker import only
from swarmnode.leader.prompts import PromptStreams
from swarmnode.leadership import KnownLeader
from swarmnode.member_messages import PROTOCOL as MEMBER
from swarmnode.member_messages import Refuse, encode
from swarmnode.net.interface import Network, ServesProtocols, Stream
from swarmnode.prompt_messages import Ask, Failed, Reply
from swarmnode.wire import read_frame


class Serves(Protocol):
    """What a leader does for others."""

    async def member(self, stream: Stream) -> None:
        """One worker's stay."""

    def answer(self, ask: Ask, asker: str) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """One prompt."""


def _nobody() -> KnownLeader | None:
    return None


class LeaderProtocols:
    """Make one for each network. `elsewhere` tells who leads while nobody does here; `askers`: who may ask comes by it,
    anybody by default. A worker shows its certificate in its hello."""

    def __init__(
        self,
        network: Network,
        elsewhere: Callable[[], KnownLeader | None] = _nobody,
        askers: ServesProtocols | None = None,
    ) -> None:
        self.network = network
        self.prompts = PromptStreams(self._answer)
        self._elsewhere = elsewhere
        self._leader: Serves | None = None
        network.serve(MEMBER, self._member, max_streams_per_peer=limits.MEMBER_STREAMS_PER_PEER_MAX)
        self.prompts.register(askers or network)

    @contextmanager
    def led_by(self, leader: Serves) -> Iterator[None]:
        """Within it this leader serves. RuntimeError if another one does."""
        if self._leader is not None:
            raise RuntimeError("a node leads once at a time")
        self._leader = leader
        try:
            yield
        finally:
            self._leader = None

    def refusal(self) -> NoLeader:
        """What is said while nobody leads here."""
        other = self._elsewhere()
        if other is None or other.peer == self.network.peer_id:
            return NoLeader("this peer does not lead", hint="Ask again once a leader is elected.")
        return NoLeader(
            f"this peer does not lead: {other.peer} does, in term {other.term}",
            hint="Ask it.",
            peer=str(other.peer),
            term=other.term,
        )

    async def _member(self, stream: Stream) -> None:
        if self._leader is not None:
            await self._leader.member(stream)
            return
        with trio.fail_after(limits.MEMBER_HELLO_SECONDS_MAX):
            await read_frame(stream, limits.MEMBER_REPORT)  # if unread, it would reset the stream
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(encode(Refuse(self.refusal())))

    @asynccontextmanager
    async def _answer(self, ask: Ask, asker: str) -> AsyncIterator[AsyncIterator[Reply]]:
        if self._leader is None:
            yield only(Failed(self.refusal()))
            return
        async with self._leader.answer(ask, asker) as replies:
            yield replies
