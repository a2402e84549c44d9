"""The backbone's side of /swarmnode/join/1: newcomers with an invite become members.

A newcomer proves its invite's secret and gets a membership certificate, counted on disk before it is signed. A member
whose issuer left the backbone has its certificate renewed, without an invite. And every member tells the name of its
vote file, for the owner's next backbone set. Whoever opens a stream may be hostile: places, times and attempts are
bounded, what is wrong with an invite is told to those alone who have it, and a banned peer learns that and no more.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
import trio

from capabilities.backbone import Sign
from capabilities.errors import Internal, PeerMistake, SwarmError
from capabilities.membership_certificate import MembershipCertificate
from swarmnode import limits
from swarmnode.member_messages import WIRE_VERSION
from swarmnode.net.admission import HandshakeGate
from swarmnode.net.interface import Network, Stream
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.invites import CHALLENGE_BYTES
from swarmnode.swarm.join_messages import (
    PROTOCOL,
    Admitted,
    Challenge,
    Join,
    OutlineIs,
    Preview,
    Refused,
    Renew,
    Reply,
    Seat,
    SeatIs,
    decode_opening,
    decode_proof,
    encode,
)
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.store import SwarmStore
from swarmnode.wire import read_frame

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class AdmissionStatistics:
    """Since the start."""

    admitted: int = 0
    renewed: int = 0
    refused: int = 0
    mistakes: int = 0
    """Conversations that broke the protocol. They count as refused, too."""
    given_up: int = 0
    """Newcomers that said nothing for too long, or whose place was needed."""


class AdmissionService:
    """Serves one swarm's newcomers, from start to stop.

    `sign` signs by this peer's key; `addresses` gives where backbone peers can be reached, best first (this one's own
    among them); `seat` gives the name of this peer's vote file; `outline` the swarm's (outline.py), or raises
    SwarmError; `clock` is Unix time.
    """

    def __init__(
        self,
        store: SwarmStore,
        sign: Sign,
        *,
        addresses: Callable[[], Sequence[str]],
        seat: Callable[[], bytes],
        outline: Callable[[], Awaitable[Mapping[str, Any]]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._sign = sign
        self._addresses = addresses
        self._seat = seat
        self._outline = outline
        self._clock = clock
        self._gate = HandshakeGate(limits.JOIN_CONVERSATIONS_MAX)
        self._attempts = Attempts()
        self.statistics = AdmissionStatistics()

    def register(self, network: Network) -> None:
        """Serve the protocol on `network`."""
        network.serve(PROTOCOL, self.handle, max_streams_per_peer=limits.JOIN_STREAMS_PER_PEER_MAX)

    async def handle(self, stream: Stream) -> None:
        """One conversation."""
        with self._gate.place(stream.peer) as scope:
            scope.deadline = trio.current_time() + limits.JOIN_SECONDS_MAX
            await stream.send(encode(await self._outcome(stream)))
        if scope.cancelled_caught:
            self.statistics.given_up += 1
            await stream.reset()

    async def _outcome(self, stream: Stream) -> Reply:
        try:
            return await self._converse(stream)
        except SwarmError as error:
            self.statistics.refused += 1
            self.statistics.mistakes += isinstance(error, PeerMistake)
            _log.info("join.refused", peer=stream.peer, error=error.type, reason=error.message)
            return Refused(error)
        except OSError as error:
            self.statistics.refused += 1
            _log.error("join.failed", peer=stream.peer, reason=error.strerror)
            hint = "Its owner should look at its disk; then try again."
            return Refused(Internal("the inviting peer cannot write to its disk", hint=hint))

    async def _converse(self, stream: Stream) -> Reply:
        opening = decode_opening(await read_frame(stream, limits.JOIN_REQUEST))
        record = self._store.need()
        if record.bans.is_banned(stream.peer):
            raise _banned()
        self._attempts.check(stream.peer, trio.current_time())
        if isinstance(opening, Seat):
            if opening.swarm != record.swarm:
                raise NotAdmitted("this peer belongs to another swarm")
            return SeatIs(await trio.to_thread.run_sync(self._seat))
        if record.peer not in record.backbone.peers:
            raise NotAdmitted("this peer is not in the backbone, and only the backbone admits", cause="not_backbone")
        if isinstance(opening, Preview):
            await self._redeem(stream, record, opening)
            _log.info("join.previewed", peer=stream.peer, invite=opening.invite_id.hex())
            return OutlineIs(json.dumps(await self._outline()).encode())
        if isinstance(opening, Join):
            await self._redeem(stream, record, opening)
            admitted = await self._admission(stream.peer)
            self.statistics.admitted += 1
            _log.info("join.admitted", peer=stream.peer, invite=opening.invite_id.hex())
        else:
            await self._check_old(stream, record, opening)
            admitted = await self._admission(stream.peer)
            self.statistics.renewed += 1
            _log.info("join.renewed", peer=stream.peer)
        return admitted

    async def _redeem(self, stream: Stream, record: SwarmRecord, join: Join | Preview) -> None:
        if join.wire != WIRE_VERSION:
            message = f"the swarm speaks wire version {WIRE_VERSION}, the newcomer {join.wire}"
            raise NotAdmitted(message, hint="Install the version that the swarm uses.", cause="version")
        nonce = secrets.token_bytes(CHALLENGE_BYTES)
        await stream.send(encode(Challenge(nonce)))
        proof = decode_proof(await read_frame(stream, limits.JOIN_REQUEST)).proof
        redeem = partial(
            self._store.invites().redeem,
            join.invite_id,
            stream.peer,
            record.peer,
            nonce,
            proof,
            self._clock,
            count=isinstance(join, Join),
        )
        try:
            await trio.to_thread.run_sync(redeem)
        except NotAdmitted as refusal:
            if refusal.details.get("cause") == "unknown":
                self._attempts.failed(stream.peer, trio.current_time())
            raise

    async def _check_old(self, stream: Stream, record: SwarmRecord, renew: Renew) -> None:
        try:
            certificate = MembershipCertificate.from_bytes(renew.certificate)
            record.verify_member(stream.peer, certificate, now_s=int(self._clock()))
        except PeerMistake:
            self._attempts.failed(stream.peer, trio.current_time())
            raise

    async def _admission(self, peer: str) -> Admitted:
        record = self._store.need()  # anew: a ban may have come while the proof was awaited
        if record.bans.is_banned(peer):
            raise _banned()
        certificate = MembershipCertificate.issue(
            record.swarm, peer, record.peer, self._sign, issued_at_s=int(self._clock())
        )
        known = (*self._addresses(), *record.addresses)
        return Admitted(
            certificate=certificate.to_bytes(),
            first_key=record.chain.first_key,
            salt=record.chain.salt,
            addresses=tuple(dict.fromkeys(known))[: limits.SWARM_ADDRESSES_MAX],
            news=await trio.to_thread.run_sync(record.news),
        )


def _banned() -> NotAdmitted:
    return NotAdmitted("this peer is banned from the swarm", hint="Only its owner can lift that.", cause="banned")


@dataclass(slots=True)
class Attempts:
    """How often strangers may try: all together by a bucket of tokens, and each by its failures."""

    tokens: float = limits.JOIN_ATTEMPTS_BURST
    filled_at: float = 0.0
    failures: OrderedDict[str, list[float]] = field(default_factory=OrderedDict)

    def check(self, peer: str, now: float) -> None:
        """NotAdmitted if the peer, or everybody, has tried too often."""
        gained = max(0.0, now - self.filled_at) * limits.JOIN_ATTEMPTS_PER_SECOND
        self.tokens, self.filled_at = min(limits.JOIN_ATTEMPTS_BURST, self.tokens + gained), now
        recent = [at for at in self.failures.get(peer, ()) if now - at < limits.JOIN_FAILURE_SECONDS]
        if len(recent) >= limits.JOIN_FAILURES_MAX:
            wait_s = limits.JOIN_FAILURE_SECONDS - (now - recent[0])
            message = f"{len(recent)} wrong proofs from this peer"
            raise NotAdmitted(message, hint=f"Try again in {wait_s:.0f} s.", cause="busy", retry_after_s=round(wait_s))
        if self.tokens < 1:
            raise NotAdmitted("too many newcomers at the moment", hint="Try again in a moment.", cause="busy")
        self.tokens -= 1

    def failed(self, peer: str, now: float) -> None:
        """Remember a wrong proof."""
        times = self.failures.pop(peer, [])
        self.failures[peer] = [*times, now][-limits.JOIN_FAILURES_MAX :]
        while len(self.failures) > limits.JOIN_FAILING_PEERS_MAX:
            self.failures.popitem(last=False)
