"""The other side of /swarmnode/join/1: becoming a member with an invite, staying one, and asking for a seat's name.

Nothing that the inviting peer says is believed: the owner's keys must lead from the swarm's id to the invite's key, and
all else is signed by those keys or by the backbone that they vouch for. The record that comes back is not stored.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from capabilities.errors import PeerMistake, SwarmError
from capabilities.membership_certificate import MembershipCertificate
from swarmnode import limits
from swarmnode.identity import verify
from swarmnode.member_messages import WIRE_VERSION
from swarmnode.net.interface import DialFailed, Network, NetworkError, PeerId, ProtocolNotSupported, Stream
from swarmnode.outline import Outline
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.invites import Invite
from swarmnode.swarm.join_messages import (
    PROTOCOL,
    Admitted,
    Challenge,
    Join,
    Opening,
    OutlineIs,
    Preview,
    Proof,
    Refused,
    Renew,
    Reply,
    Seat,
    SeatIs,
    decode_reply,
    encode,
)
from swarmnode.swarm.ownership import OwnerChain
from swarmnode.swarm.record import SwarmRecord
from swarmnode.wire import read_frame

_UNREACHABLE_HINT = (
    "Is the other side's daemon running, and its port open to this machine? "
    "Another network key shows as no answer, too."
)


async def join(network: Network, invite: Invite) -> SwarmRecord:
    """Be admitted, over a network with the invite's key; the record of the new member.

    Raises:
        NotAdmitted: why; `cause` says it in a word.
        PeerMistake: the inviting peer answered with something false.
    """
    issuer = await _reach(network, invite.addresses)
    async with _conversation(network, issuer, "the inviting peer") as stream:
        challenge = await _ask(stream, Join(invite.invite_id, WIRE_VERSION))
        if not isinstance(challenge, Challenge):
            raise PeerMistake("the inviting peer asks for no proof")
        admitted = await _ask(stream, Proof(invite.prove(challenge.nonce, network.peer_id)))
        if not isinstance(admitted, Admitted):
            raise PeerMistake("the inviting peer answers a proof with something else")
    return await trio.to_thread.run_sync(_judge, invite, network.peer_id, admitted)


async def preview(network: Network, invite: Invite) -> tuple[Outline, float]:
    """What the swarm looks like before one joins it, and the round trip in seconds. Raises as `join`."""
    issuer = await _reach(network, invite.addresses)
    async with _conversation(network, issuer, "the inviting peer") as stream:
        began = trio.current_time()
        challenge = await _ask(stream, Preview(invite.invite_id, WIRE_VERSION))
        rtt_s = trio.current_time() - began
        if not isinstance(challenge, Challenge):
            raise PeerMistake("the inviting peer asks for no proof")
        told = await _ask(stream, Proof(invite.prove(challenge.nonce, network.peer_id)))
        if not isinstance(told, OutlineIs):
            raise PeerMistake("the inviting peer answers a proof with something else")
        try:
            return Outline.from_json(json.loads(told.data)), rtt_s
        except (ValueError, RecursionError) as error:
            raise PeerMistake(f"the inviting peer's outline is no JSON: {error!s:.100}") from None


async def renew(network: Network, backbone_peer: PeerId, record: SwarmRecord) -> MembershipCertificate:
    """Another certificate for this member, by a connected backbone peer. Raises as `join`."""
    async with _conversation(network, backbone_peer, "the backbone peer") as stream:
        admitted = await _ask(stream, Renew(record.certificate.to_bytes()))
        if not isinstance(admitted, Admitted):
            raise PeerMistake("the backbone peer answers a renewal with something else")
    certificate = MembershipCertificate.from_bytes(admitted.certificate)
    certificate.verify(record.swarm, record.peer, record.backbone.peers, verify)
    return certificate


async def ask_seat(network: Network, peer: PeerId, swarm: str) -> bytes:
    """The name of a connected peer's vote file (16 bytes), for the backbone set. Raises as `join`."""
    async with _conversation(network, peer, f"the peer {peer}") as stream:
        answer = await _ask(stream, Seat(swarm))
        if not isinstance(answer, SeatIs):
            raise PeerMistake(f"{peer} answers with something else than the name of its vote file")
        return answer.vote_file


def _judge(invite: Invite, newcomer: str, admitted: Admitted) -> SwarmRecord:
    first = OwnerChain(admitted.first_key, admitted.salt)
    if first.swarm != invite.swarm:
        raise PeerMistake("the inviting peer is in another swarm than the invite's")
    certificate = MembershipCertificate.from_bytes(admitted.certificate)
    if certificate.peer != newcomer:
        raise PeerMistake("the inviting peer's certificate is for another peer")
    record = SwarmRecord.from_news(invite.name, invite.psk, first, certificate, admitted.news)
    if invite.owner_key not in record.chain.keys:
        raise PeerMistake("the inviting peer has another owner than the invite's")
    return record.with_addresses((*invite.addresses, *admitted.addresses))


async def _reach(network: Network, addresses: Sequence[str]) -> PeerId:
    """The peer behind the first address that answers. NotAdmitted naming what is wrong with each."""
    faults = []
    for address in addresses:
        fault = f"no answer for {limits.JOIN_DIAL_SECONDS_MAX:.0f} s"
        with trio.move_on_after(limits.JOIN_DIAL_SECONDS_MAX):
            try:
                return await network.connect(address)
            except DialFailed as error:
                fault = error.reason
        faults.append(f"{address.partition('/p2p/')[0]}: {fault}")
    message = f"no address of the inviting peer answers ({'; '.join(faults)})"
    raise NotAdmitted(message, hint=_UNREACHABLE_HINT, cause="unreachable")


@asynccontextmanager
async def _conversation(network: Network, peer: PeerId, who: str) -> AsyncIterator[Stream]:
    """A stream to `peer` with a deadline for all of it; whatever breaks it is a NotAdmitted that names `who`."""
    fault, ended = f"did not answer for {limits.JOIN_SECONDS_MAX:.0f} s", False
    with trio.move_on_after(limits.JOIN_SECONDS_MAX):
        try:
            stream = await network.open_stream(peer, PROTOCOL)
            try:
                yield stream
                ended = True
            finally:
                await stream.aclose()
        except ProtocolNotSupported:
            fault = "takes no newcomers: it belongs to no swarm, or runs another version"
        except NetworkError as error:
            fault = f"went away: {error}"
    if not ended:
        raise NotAdmitted(f"{who} {fault}", hint=_UNREACHABLE_HINT, cause="unreachable")


async def _ask(stream: Stream, message: Opening | Proof) -> Reply:
    """The answer to a message. Raises what the other side refuses with."""
    await stream.send(encode(message))
    reply = decode_reply(await read_frame(stream, limits.JOIN_REPLY))
    if isinstance(reply, Refused):
        raise _as_refusal(reply.error)
    return reply


def _as_refusal(error: SwarmError) -> SwarmError:
    """The other side's words; a PeerMistake of theirs is about us, and no fault of theirs."""
    if isinstance(error, NotAdmitted):
        return error
    return NotAdmitted(f"the other side refuses: {error.message}", hint=error.hint, cause="refused")
