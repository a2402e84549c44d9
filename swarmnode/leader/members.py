"""The workers of this leader: who is there, what each is doing, and the links to them.

A member is one peer's stay, from its hello until its stream breaks; what is known of it survives as long as the swarm
may wait for it. Everything here is on the event loop, so state needs no locks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import structlog
import trio

from capabilities.agreement import Agreement
from capabilities.errors import PeerMistake, SwarmError, UsageError
from capabilities.verdict import Fitness
from scheduler.liveness import PeerState
from swarmnode import limits
from swarmnode.leader.link import PeerLink
from swarmnode.member_messages import (
    WIRE_VERSION,
    Arithmetic,
    FromLeader,
    Hello,
    Policy,
    Progress,
    Refuse,
    decode_from_worker,
    encode,
)
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.pinger import PeerWatch
from swarmnode.wire import read_frame

_log = structlog.get_logger(__name__)

OUTBOX_MAX: Final = 16
MEMBERS_MAX: Final = 256  # each costs buffers and a share of every status reply
ABSENT_KEPT_S: Final = 600.0  # how long a worker that left is still shown as gone

VerifyMember = Callable[[PeerId, bytes], None]
"""Who is here, by its proven key, and the certificate that it shows. Raises SwarmError, for it to read: it is no member
of the swarm, or banned."""

INSTANCES_KEPT: Final = 3  # of each peer; a restart makes one more, a copy takes turns with the first
CLONED_SHOWN_S: Final = 120.0

MemberPhase = Literal["joining", "loading", "probing", "ready", "failed"]


@dataclass(eq=False)
class Member:
    """One worker. `stream_up` is false once its stay is over. Instants are trio's, in seconds.

    proven            (term, epoch) of what the probe found right over the present link
    failing_since_s   of the first failure (loading, probing, dispatches) that no success followed
    draining          it asked to hold nothing more
    failures          how many those are; `resting`: it is left alone for a while after the last one
    unfit             why it may hold no output rank: it computes the model, and not precisely enough
    quarantined       why it may hold nothing: it computes something else than the model
    given_up          how often in a row it was; until excluded_until_s it is no newcomer
    instances         processes that said hello as this peer, the present one last
    cloned_s          when one said hello again after another had: two daemons use one identity
                      (what is from given_up on outlives a stay)
    """

    peer: PeerId
    hello: Hello
    joined_s: float
    outbox: trio.MemorySendChannel[FromLeader]
    stream_up: bool = True
    lost_s: float | None = None
    phase: MemberPhase = "joining"
    progress: Progress | None = None
    progress_s: float = 0.0
    link: PeerLink | None = None
    proven: set[tuple[int, int]] = field(default_factory=set)
    agreement: Agreement | None = None
    error: SwarmError | None = None
    unfit: SwarmError | None = None
    quarantined: SwarmError | None = None
    silent: bool = False
    draining: bool = False
    failing_since_s: float | None = None
    failures: int = 0
    resting: bool = False
    given_up: int = 0
    excluded_until_s: float = -math.inf
    instances: tuple[str, ...] = ()
    cloned_s: float = -math.inf

    @property
    def name(self) -> str:
        return self.hello.name

    def tell(self, message: FromLeader) -> None:
        """Queue a message. A worker that takes none any more loses its membership."""
        try:
            self.outbox.send_nowait(message)
        except trio.WouldBlock:
            self.outbox.close()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    @property
    def fitness(self) -> Fitness | None:
        """The verdict on it, None before any. Who fails again and again is left alone for a while; who was convicted by
        audits, until it is released."""
        if self.quarantined is not None:
            return "quarantined"
        if self.error is not None and self.error.details.get("cause") == "bad_reply" and self.given_up:
            return "quarantined"
        if self.unfit is not None:
            return "unfit"
        return "fit" if self.agreement is not None else None

    def is_usable(self, term: int, epoch: int) -> bool:
        """Whether it holds and has proven this epoch, and answers."""
        return (
            self.stream_up
            and not self.silent
            and self.quarantined is None
            and (term, epoch) in self.proven
            and self.link is not None
            and self.link.closed is None
        )


class Members:
    """The leader's side of /swarmnode/member/1: it tells its owner who joins, reports, leaves, falls silent and speaks
    again."""

    def __init__(
        self,
        network: Network,
        on_join: Callable[[Member], None],
        on_progress: Callable[[Member, Progress], None],
        on_leave: Callable[[Member], None],
        on_speech: Callable[[Member], None],
        verify_member: VerifyMember | None = None,
        own_classes: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`verify_member`: who may be a member at all; None: everybody. `own_classes`: what the leader's own kernels
        were measured to be, for the usual weight types and for the model's; none while that is not known."""
        self.by_peer: dict[PeerId, Member] = {}
        self.refused = 0  # hellos
        self.own_classes = own_classes
        self._on_join = on_join
        self._on_progress = on_progress
        self._on_leave = on_leave
        self._on_speech = on_speech
        self._verify_member = verify_member
        self.watch = PeerWatch(network, self._on_state)

    def close(self, reason: str) -> None:
        """End every stay: whoever leads next starts with hellos."""
        for member in self.present():
            self._end(member, reason)

    def present(self) -> list[Member]:
        return [member for member in self.by_peer.values() if member.stream_up]

    def forget_absent(self) -> None:
        """Drop members that left long ago."""
        limit = trio.current_time() - ABSENT_KEPT_S
        for peer in [p for p, m in self.by_peer.items() if m.lost_s is not None and m.lost_s < limit]:
            del self.by_peer[peer]

    def _make_room(self) -> bool:
        """Forget whoever left first, if too many are known. False: all of them are here."""
        if len(self.by_peer) >= MEMBERS_MAX:
            absent = [m for m in self.by_peer.values() if m.lost_s is not None]
            if not absent:
                return False
            del self.by_peer[min(absent, key=lambda m: m.lost_s or 0.0).peer]
        return True

    async def handle(self, stream: Stream) -> None:
        """One worker's stream, from its hello to its end."""
        with trio.fail_after(limits.MEMBER_HELLO_SECONDS_MAX):
            hello = decode_from_worker(await read_frame(stream, limits.MEMBER_REPORT))
        if not isinstance(hello, Hello):
            raise PeerMistake("a worker begins with a hello")
        if (refusal := self._refusal(stream.peer, hello)) is not None:
            self.refused += 1
            _log.warning("member.refused", peer=stream.peer, name=hello.name, error=refusal.message)
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(encode(Refuse(refusal)))
            return
        await self._stay(stream, hello)

    def _refusal(self, peer: PeerId, hello: Hello) -> SwarmError | None:
        if hello.wire != WIRE_VERSION:
            return UsageError(
                f"this leader speaks wire version {WIRE_VERSION}, the worker {hello.wire} (swarmnode {hello.version})",
                hint="Install the same version of swarmnode on both.",
            )
        if self._verify_member is not None:
            try:
                self._verify_member(peer, hello.certificate)
            except SwarmError as error:
                return error
        if peer not in self.by_peer and not self._make_room():
            return UsageError(f"this leader serves at most {MEMBERS_MAX} workers")
        return None

    def cloned(self) -> list[Member]:
        """Whose identity several daemons use, as seen lately."""
        since = trio.current_time() - CLONED_SHOWN_S
        return [member for member in self.by_peer.values() if member.cloned_s > since]

    async def _stay(self, stream: Stream, hello: Hello) -> None:
        """One membership, until its stream breaks."""
        old = self.by_peer.get(stream.peer)
        if old is not None and old.stream_up:  # it came back before its old stream was given up
            self._end(old, "it joined again")
        send, receive = trio.open_memory_channel[FromLeader](OUTBOX_MAX)
        member = Member(stream.peer, hello, trio.current_time(), send)
        if old is not None:
            member.given_up, member.excluded_until_s = old.given_up, old.excluded_until_s
            member.instances, member.cloned_s = old.instances, old.cloned_s
        if hello.instance:
            if hello.instance in member.instances[:-1]:
                member.cloned_s = trio.current_time()
                _log.warning("member.cloned", peer=member.peer, name=member.name)
            others = [each for each in member.instances if each != hello.instance]
            member.instances = (*others[-INSTANCES_KEPT:], hello.instance)
        self.by_peer[stream.peer] = member
        _log.info("member.joined", peer=member.peer, name=member.name, backend=hello.backend)
        self.watch.watch(stream.peer)
        reason = "it closed the connection"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, receive)
                self._on_join(member)
                await self._read(stream, member)
        except* NetworkError as errors:
            reason = str(errors.exceptions[0]) or reason
        except* PeerMistake as errors:
            reason = f"it broke the protocol: {errors.exceptions[0]}"
            raise
        except* trio.TooSlowError:
            reason = "it takes no messages"
        finally:
            self._end(member, reason)
            await stream.reset()

    def _end(self, member: Member, reason: str) -> None:
        if not member.stream_up:
            return
        member.stream_up = False
        member.lost_s = trio.current_time()
        member.outbox.close()
        if self.by_peer.get(member.peer) is member:
            self.watch.unwatch(member.peer)
        if member.link is not None:
            member.link.fail("disconnected", reason)
        _log.warning("member.left", peer=member.peer, name=member.name, reason=reason)
        self._on_leave(member)

    async def _read(self, stream: Stream, member: Member) -> None:
        while member.stream_up:
            message = decode_from_worker(await read_frame(stream, limits.MEMBER_REPORT))
            if isinstance(message, Hello):
                raise PeerMistake("a worker says hello once")
            if isinstance(message, Policy):
                if message.draining != member.draining:
                    member.draining = message.draining
                    _log.info("member.policy", peer=member.peer, name=member.name, draining=member.draining)
                    self._on_speech(member)
                continue
            if isinstance(message, Arithmetic):
                member.hello = replace(
                    member.hello,
                    numeric_class=message.numeric_class,
                    accumulates_f32=message.accumulates_f32,
                    measuring=message.measuring,
                )
                self._on_speech(member)
                continue
            if message != member.progress:
                member.progress_s = trio.current_time()
            member.progress = message
            self._on_progress(member, message)

    async def _write(self, stream: Stream, receive: trio.MemoryReceiveChannel[FromLeader]) -> None:
        async for message in receive:
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(encode(message))
        await stream.reset()  # the outbox was closed: the stay is over

    def _on_state(self, peer: PeerId, state: PeerState) -> None:
        """Pings: two seconds of silence fail what is open with this peer; it is back as soon as it answers again."""
        member = self.by_peer.get(peer)
        if member is None or not member.stream_up:
            return
        if state == PeerState.FAILED:
            member.silent = True
            if member.link is not None:
                member.link.fail("suspended", "its pings stay unanswered")
            self._on_speech(member)
        elif state == PeerState.ALIVE and member.silent:
            member.silent = False
            self._on_speech(member)
