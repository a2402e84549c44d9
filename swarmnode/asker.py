"""Asks the swarm from any peer: over a prompt stream to whoever leads, which may be this node itself.

The decisions are scheduler/attempts.py's: which attempt counts, when another leader is asked. This is the shell: one
stream an attempt, and one queue of what happens. An asker hears from its leader at least once a second; four seconds of
silence count as its loss.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final, Protocol

import trio

from capabilities.errors import Internal, PeerMistake, SwarmError, UsageError
from scheduler.attempts import NO_LEADER_S, AttemptEffect, Attempts, Deliver, Fail, Finish, Leading, Submit
from swarmnode import limits
from swarmnode.leadership import LeaderView
from swarmnode.net.groups import without_groups
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.prompt_frames import decode_reply, encode_ask
from swarmnode.prompt_messages import PROTOCOL, Alive, Ask, Done, Failed, Queued, Reply, Token
from swarmnode.wire import read_frame

EVENTS_MAX: Final = 64  # that wait for whoever reads the answer; then its stream is not read


class Asker(Protocol):
    """Where prompts go."""

    @property
    def leader(self) -> str | None:
        """The leader's peer id, if one is known. Who finished an answer, its Done says."""

    def replies(self, ask: Ask) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """An async context manager that gives an async iterator of replies, the last one Done or Failed."""


FIRST_LEADER_S: Final = 2.0  # most elections are over by then; who asks a swarm without a majority hears so soon


class FollowingAsker:
    """Prompts over the network to the leader that `view` knows, and on to the next one if that is lost.

    refusal      why no leader can be asked now, or None; by default, whether one is known
    no_leader_s  how long a request that lost its leader waits for another; 0 where there is only one
    """

    def __init__(
        self,
        network: Network,
        view: LeaderView,
        *,
        refusal: Callable[[], SwarmError | None] = lambda: None,
        no_leader_s: float = NO_LEADER_S,
    ) -> None:
        self._network = network
        self._view = view
        self._refusal = refusal
        self._no_leader_s = no_leader_s
        # A leader takes so many streams of one peer; a request beyond waits here for its turn.
        self._places = trio.CapacityLimiter(limits.PROMPT_STREAMS_PER_PEER_MAX)

    @property
    def leader(self) -> str | None:
        leader = self._view.leader
        return None if leader is None else str(leader.peer)

    @asynccontextmanager
    async def replies(self, ask: Ask) -> AsyncIterator[AsyncIterator[Reply]]:
        """Leaving the context closes the stream, which frees the leader."""
        if (error := self._refusal()) is not None:
            yield only(Failed(error))
            return
        with without_groups():
            async with trio.open_nursery() as nursery:
                request = _Request(self._network, self._view, self._places, ask, self._no_leader_s, nursery)
                async with aclosing(request.replies()) as replies:
                    yield replies
                nursery.cancel_scope.cancel()


class _LeaderChanged:
    """Look at the view again."""


_Event = tuple[int, Reply | NetworkError | SwarmError | trio.TooSlowError] | _LeaderChanged


class _Request:
    """One request until its end: tasks of `nursery` put what happens into a queue, `replies` takes it from there."""

    def __init__(
        self,
        network: Network,
        view: LeaderView,
        places: trio.CapacityLimiter,
        ask: Ask,
        no_leader_s: float,
        nursery: trio.Nursery,
    ) -> None:
        self._network = network
        self._view = view
        self._places = places
        self._ask = ask
        self._nursery = nursery
        self._no_leader_s = no_leader_s
        self._attempts = Attempts(
            ask.request_id, trio.current_time(), deadline_s=ask.deadline_s, no_leader_s=no_leader_s
        )
        self._send, self._receive = trio.open_memory_channel[_Event](EVENTS_MAX)
        self._scope = trio.CancelScope()  # of the newest attempt

    async def _expect_leader(self) -> None:
        """Where nobody leads, give an election that is under way its time; a swarm without one answers soon after."""
        with trio.move_on_after(FIRST_LEADER_S):
            while self._view.leader is None:
                await self._view.changed()

    async def replies(self) -> AsyncGenerator[Reply, None]:
        """What to show, the last one Done or Failed."""
        attempts = self._attempts
        if self._no_leader_s:
            await self._expect_leader()
        leader = _leading(self._view)
        self._nursery.start_soon(self._watch, leader)
        for reply in self._obey(attempts.begin(leader, self._view.reason, trio.current_time())):
            yield reply
        while not attempts.ended:
            event: _Event | None = None
            with trio.CancelScope(deadline=attempts.next_instant()):
                event = await self._receive.receive()
            for reply in self._take(event):
                yield reply

    def _take(self, event: _Event | None) -> list[Reply]:
        """What an event, or the passing of time, means for whoever asked."""
        attempts, now = self._attempts, trio.current_time()
        match event:
            case None:
                return self._obey(attempts.tick(now))
            case _LeaderChanged():
                view = self._view
                return self._obey(attempts.follow(_leading(view), view.reason, now, parted=view.parted))
            case number, Token(index, token, text) as reply:
                return self._obey(attempts.token(number, index, token, text), token=reply)
            case number, Done() as done:
                return self._obey(attempts.done(number), done)
            case number, Failed(error):
                return self._obey(attempts.failed(number, error, now))
            case number, Queued(_, options) if unknown := sorted(self._ask.options - options):
                return self._obey(attempts.failed(number, _too_old(unknown), now))
            case number, (Queued() | Alive()) as reply:
                return [reply] if attempts.spoke(number) else []
            case number, PeerMistake() as mistake:
                message = f"the leader broke the protocol: {mistake.message}"
                return self._obey(attempts.failed(number, Internal(message, request_id=self._ask.request_id), now))
            case number, SwarmError() as error:  # of this node's own: the request cannot be put into a frame
                return self._obey(attempts.failed(number, error, now))
            case number, trio.TooSlowError():
                silence = f"it was silent for {limits.PROMPT_SILENCE_SECONDS_MAX:g} s"
                return self._obey(attempts.lost(number, silence, now))
            case number, error:
                return self._obey(attempts.lost(number, str(error), now))

    def _obey(
        self, effects: list[AttemptEffect], done: Done | None = None, token: Token | None = None
    ) -> list[Reply]:
        replies: list[Reply] = []
        for effect in effects:
            match effect:
                case Submit():
                    self._scope.cancel()
                    self._scope = trio.CancelScope()
                    self._nursery.start_soon(self._submit, effect, self._scope)
                case Deliver():
                    assert token is not None
                    replies.append(token)
                case Finish(leader):
                    assert done is not None
                    replies.append(replace(done, leader=leader.peer))
                case Fail(error):
                    replies.append(Failed(error))
        return replies

    # -- tasks --------------------------------------------------------------------------------------------------

    async def _watch(self, leader: Leading | None) -> None:
        seen = (leader, False)
        while True:
            while (now := (_leading(self._view), self._view.parted)) == seen:
                await self._view.changed()
            seen = now
            await self._send.send(_LeaderChanged())

    async def _submit(self, submit: Submit, scope: trio.CancelScope) -> None:
        """One attempt, until its last reply or its loss."""
        ask = replace(self._ask, generated=submit.generated, attempt=submit.attempt, deadline_s=submit.deadline_s)
        with scope:
            try:
                async with self._places:
                    await self._hear(ask, PeerId(submit.leader.peer))
            except (NetworkError, SwarmError, trio.TooSlowError) as error:
                await self._send.send((submit.attempt, error))

    async def _hear(self, ask: Ask, leader: PeerId) -> None:
        stream: Stream | None = None
        try:
            with trio.fail_after(limits.PROMPT_SILENCE_SECONDS_MAX):
                stream = await self._network.open_stream(leader, PROTOCOL)
                await stream.send(encode_ask(ask))
            reply: Reply = Alive()
            while not isinstance(reply, Done | Failed):
                with trio.fail_after(limits.PROMPT_SILENCE_SECONDS_MAX):
                    reply = decode_reply(await read_frame(stream, limits.PROMPT_REPLY))
                await self._send.send((ask.attempt, reply))
        finally:
            if stream is not None:
                await stream.reset()


def _leading(view: LeaderView) -> Leading | None:
    leader = view.leader
    return None if leader is None else Leading(str(leader.peer), leader.term)


def _too_old(unknown: Sequence[str]) -> UsageError:
    return UsageError(
        f"the leader runs a version that does not know {', '.join(unknown)}", hint="Upgrade it, or ask without that."
    )


async def only(reply: Reply) -> AsyncIterator[Reply]:
    """An answer that consists of one reply: a refusal."""
    yield reply
