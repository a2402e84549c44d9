"""Newcomers and those who admit them: over the network in memory, and once over the real one with a network key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from capabilities.backbone import BackboneSet, Enactment, Member, Stored
from capabilities.errors import NoDaemon, PeerMistake, UsageError
from capabilities.membership_certificate import MembershipCertificate
from swarmnode import limits
from swarmnode.identity import Identity, verify
from swarmnode.net.interface import PeerId, Stream, StreamReset
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.swarm.admission import AdmissionService, Attempts
from swarmnode.swarm.commands import RunningSwarm, SwarmCommands
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.founding import with_member, without_member
from swarmnode.swarm.invites import Invite
from swarmnode.swarm.join_messages import (
    PROTOCOL,
    Admitted,
    Challenge,
    Join,
    Proof,
    Refused,
    Renew,
    Reply,
    Seat,
    decode_opening,
    decode_proof,
    decode_reply,
    encode,
)
from swarmnode.swarm.joining import ask_seat, join, preview, renew
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.record import backbone_news
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import load_vote_file
from swarmnode.wire import Frame, encode_frame, read_frame, split_frame
from tests.net_tools import eventually
from tests.patience import PATIENCE_S
from tests.swarm_members import NOW_S, OUTLINE, Founder, hub_opener, join_hub


@dataclass
class Admitting:
    """A founder that serves newcomers, and one newcomer beside it."""

    hub: MemoryHub
    founder: Founder
    network: MemoryNetwork
    service: AdmissionService
    newcomer: MemoryNetwork

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    def another(self) -> MemoryNetwork:
        return join_hub(self.hub, Identity.generate())


@asynccontextmanager
async def admitting(folder: Path, clock: Callable[[], float] = lambda: NOW_S) -> AsyncIterator[Admitting]:
    founder = Founder.make(folder)
    async with open_memory_hub() as hub:
        network = join_hub(hub, founder.identity)
        yield Admitting(hub, founder, network, founder.serve(network, clock), join_hub(hub, Identity.generate()))


def cause(error: pytest.ExceptionInfo[NotAdmitted]) -> object:
    return error.value.details.get("cause")


# being admitted


async def test_an_invite_makes_a_member(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        banned = Identity.generate().peer_id
        at.founder.ban(banned)
        record = await join(at.newcomer, at.founder.invite(at.address))
        ours = at.founder.record
        assert (record.swarm, record.name, record.psk) == (ours.swarm, ours.name, ours.psk)
        assert (record.chain, record.enactment, record.bans) == (ours.chain, ours.enactment, ours.bans)
        assert record.addresses == (at.address,)
        assert record.peer == at.newcomer.peer_id
        ours.verify_member(at.newcomer.peer_id, record.certificate)
        assert (record.certificate.issuer, record.certificate.issued_at_s) == (at.network.peer_id, NOW_S)
        assert at.service.statistics.admitted == 1
        assert at.founder.store.invites().listed(NOW_S)[0]["used_by"] == [at.newcomer.peer_id]


async def test_a_look_before_joining_uses_nothing_up_and_needs_the_secret(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        for _ in range(2):
            outline, rtt_s = await preview(at.another(), invite)
            assert outline == OUTLINE
            assert rtt_s >= 0
        await join(at.newcomer, invite)
        with pytest.raises(NotAdmitted) as caught:
            await preview(at.another(), invite)
        assert cause(caught) == "used_up"
        with pytest.raises(NotAdmitted) as caught:
            await preview(at.another(), replace(invite, secret=bytes(16)))
        assert cause(caught) == "unknown"


async def test_uses_are_counted_however_many_ask_at_once(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address, uses=3)
        admitted: list[str] = []
        refused: list[object] = []

        async def ask(network: MemoryNetwork) -> None:
            try:
                admitted.append((await join(network, invite)).peer)
            except NotAdmitted as error:
                refused.append(error.details["cause"])

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask, at.another())
        assert len(admitted) == 3
        assert refused == ["used_up"] * 5
        assert set(at.founder.store.invites().listed(NOW_S)[0]["used_by"]) == set(admitted)


async def test_who_lost_the_answer_asks_again(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        assert (await join(at.newcomer, invite)).certificate == (await join(at.newcomer, invite)).certificate
        with pytest.raises(NotAdmitted) as error:
            await join(at.another(), invite)
        assert cause(error) == "used_up"


async def test_expired_by_the_issuers_clock(tmp_path: Path) -> None:
    async with admitting(tmp_path, clock=lambda: NOW_S + 7_200) as at:
        with pytest.raises(NotAdmitted, match="expired 60 minutes ago, by the inviting peer's clock") as error:
            await join(at.newcomer, at.founder.invite(at.address, lifetime_s=3_600))
        assert cause(error) == "expired"
        assert "That clock says 2027-01-15 10:00 (UTC)" in error.value.hint


async def test_revoked(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        at.founder.store.invites().revoke(invite.invite_id, NOW_S)
        with pytest.raises(NotAdmitted, match="revoked") as error:
            await join(at.newcomer, invite)
        assert cause(error) == "revoked"


async def test_banned_peers_are_refused_before_anything_else(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        at.founder.ban(at.newcomer.peer_id)
        with pytest.raises(NotAdmitted, match="banned") as error:
            await join(at.newcomer, invite)
        assert cause(error) == "banned"
        assert at.founder.store.invites().listed(NOW_S)[0]["used"] == 0
        at.founder.ban(at.newcomer.peer_id, banned=False)
        await join(at.newcomer, invite)


async def test_a_ban_that_comes_in_the_middle_counts(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        stream = await opened(at)
        await stream.send(encode(Join(invite.invite_id, wire_version())))
        challenge = await reply(stream)
        assert isinstance(challenge, Challenge)
        at.founder.ban(at.newcomer.peer_id)
        await stream.send(encode(Proof(invite.prove(challenge.nonce, at.newcomer.peer_id))))
        refusal = await reply(stream)
        assert isinstance(refusal, Refused)
        assert "banned" in refusal.error.message


async def test_only_the_backbone_admits(tmp_path: Path) -> None:
    async with admitting(tmp_path / "founder") as at:
        record = await join(at.newcomer, at.founder.invite(at.address))
        (tmp_path / "member").mkdir()
        store = SwarmStore.open(SwarmFiles(tmp_path / "member"))
        store.enter(record)
        member = Founder(Identity.generate(), at.founder.key, store)
        member.serve(at.newcomer)
        other = at.another()
        with pytest.raises(NotAdmitted, match="not in the backbone") as error:
            await join(other, replace(member.invite(at.newcomer.addresses[0]), issuer=at.newcomer.peer_id))
        assert cause(error) == "not_backbone"


async def test_an_address_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_DIAL_SECONDS_MAX", 0.1)
    async with admitting(tmp_path) as at:
        lost = f"/memory/99/p2p/{at.network.peer_id}"
        invite = replace(at.founder.invite(at.address), addresses=(lost, at.address))
        await join(at.newcomer, invite)
        other = at.another()
        at.hub.cut(at.network.peer_id, other.peer_id)
        with pytest.raises(NotAdmitted, match=r"/memory/99: nobody listens there; /memory/1: the link is cut") as error:
            await join(other, invite)
        assert cause(error) == "unreachable"
        third = at.another()
        at.hub.set_delay(at.network.peer_id, third.peer_id, float("inf"))
        with pytest.raises(NotAdmitted, match="/memory/1: no answer for 0 s"):
            await join(third, replace(invite, addresses=(at.address,)))


async def test_a_peer_that_stops_answering_is_given_up(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        await at.newcomer.connect(at.address)
        at.hub.set_delay(at.network.peer_id, at.newcomer.peer_id, float("inf"))
        with pytest.raises(NotAdmitted) as error:
            await join(at.newcomer, invite)
        assert cause(error) == "unreachable"


async def test_a_peer_without_a_swarm_takes_nobody(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        stranger = at.another()
        invite = replace(at.founder.invite(at.address), addresses=stranger.addresses, issuer=stranger.peer_id)
        with pytest.raises(NotAdmitted, match="takes no newcomers"):
            await join(at.newcomer, invite)


# hostile newcomers


def wire_version() -> int:
    from swarmnode.member_messages import WIRE_VERSION

    return WIRE_VERSION


async def opened(at: Admitting, network: MemoryNetwork | None = None) -> Stream:
    network = network or at.newcomer
    await network.connect(at.address)
    return await network.open_stream(at.network.peer_id, PROTOCOL)


async def reply(stream: Stream) -> Reply:
    with trio.fail_after(PATIENCE_S):
        return decode_reply(await read_frame(stream, limits.JOIN_REPLY))


async def test_a_wrong_proof_is_refused_and_soon_unheard(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        wrong = replace(at.founder.invite(at.address), secret=bytes(16))
        for _ in range(limits.JOIN_FAILURES_MAX):
            with pytest.raises(NotAdmitted, match="does not know this invite"):
                await join(at.newcomer, wrong)
        right = at.founder.invite(at.address)
        with pytest.raises(NotAdmitted, match="5 wrong proofs") as error:
            await join(at.newcomer, right)
        assert cause(error) == "busy"
        assert error.value.details["retry_after_s"] <= limits.JOIN_FAILURE_SECONDS
        await join(at.another(), right)
        assert at.service.statistics.refused == limits.JOIN_FAILURES_MAX + 1


async def test_an_overheard_proof_is_worth_nothing(tmp_path: Path) -> None:
    """Another challenge, or another peer: the proof does not fit."""
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address, uses=9)
        first = await opened(at)
        await first.send(encode(Join(invite.invite_id, wire_version())))
        challenge = await reply(first)
        assert isinstance(challenge, Challenge)
        overheard = Proof(invite.prove(challenge.nonce, at.newcomer.peer_id))
        await first.send(encode(overheard))
        assert isinstance(await reply(first), Admitted)
        for network in (at.newcomer, at.another()):
            stream = await opened(at, network)
            await stream.send(encode(Join(invite.invite_id, wire_version())))
            assert isinstance(await reply(stream), Challenge)
            await stream.send(encode(overheard))
            refusal = await reply(stream)
            assert isinstance(refusal, Refused)
            assert refusal.error.details["cause"] == "unknown"


JUNK = {
    "no msgpack": b"\x05\x00\x00\x00\x00\x00\x00\x00\xc1\xc1\xc1\xc1\xc1",
    "a long header": (10_000).to_bytes(4, "little") + bytes(4),
    "a payload": (2).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little") + b"\x80",
    "an unknown kind": encode_frame({"kind": "let me in"}),
    "no kind": encode_frame([1, 2]),
    "a short id": encode_frame({"kind": "join", "invite": b"123", "wire": 1}),
    "a proof first": encode(Proof(bytes(32))),
    "a junk certificate": encode(Renew(b"junk")),
    "another swarm": encode(Seat("0" * 64)),
    "another wire version": encode(Join(bytes(8), 999)),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_junk_is_refused_and_counted(tmp_path: Path, junk: bytes) -> None:
    async with admitting(tmp_path) as at:
        stream = await opened(at)
        await stream.send(junk)
        assert isinstance(await reply(stream), Refused)
        await join(at.newcomer, at.founder.invite(at.address))
        assert (at.service.statistics.refused, at.network.statistics().handler_errors) == (1, 0)


async def test_junk_in_place_of_a_proof(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        for junk in (encode(Join(bytes(8), 1)), encode_frame({"kind": "proof", "proof": bytes(31)})):
            stream = await opened(at)
            await stream.send(encode(Join(bytes(8), wire_version())))
            assert isinstance(await reply(stream), Challenge)
            await stream.send(junk)
            assert isinstance(await reply(stream), Refused)
        assert at.service.statistics.mistakes == 2


async def test_silent_newcomers_make_room(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        for _ in range(limits.JOIN_CONVERSATIONS_MAX + 4):
            await opened(at, at.another())
        await eventually(lambda: at.service.statistics.given_up == 4)
        await join(at.newcomer, at.founder.invite(at.address))
        assert at.service.statistics.given_up == 5


async def test_a_silent_newcomer_is_given_up(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with admitting(tmp_path) as at:
        stream = await opened(at)
        started = trio.current_time()
        with pytest.raises(StreamReset):
            await stream.receive_exactly(1)
        assert trio.current_time() - started == pytest.approx(limits.JOIN_SECONDS_MAX, abs=0.1)
        assert at.service.statistics.given_up == 1


async def test_a_newcomer_that_vanishes_harms_nobody(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        stream = await opened(at)
        await stream.send(encode(Join(bytes(8), wire_version())))
        await stream.reset()
        await join(at.newcomer, at.founder.invite(at.address))
        assert at.network.statistics().handler_errors == 0


async def test_a_full_disk_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(NotAdmitted, match="cannot write to its disk"):
            await join(at.newcomer, invite)
        monkeypatch.undo()
        await join(at.newcomer, invite)


def test_everybody_together_is_bounded() -> None:
    attempts = Attempts()
    for number in range(limits.JOIN_ATTEMPTS_BURST):
        attempts.check(f"peer {number}", 1_000.0)
    with pytest.raises(NotAdmitted, match="too many newcomers"):
        attempts.check("peer", 1_000.0)
    attempts.check("peer", 1_001.0)
    attempts.check("peer", 1_001.0)
    with pytest.raises(NotAdmitted, match="too many newcomers"):
        attempts.check("peer", 1_001.0)


def test_failures_are_forgotten_after_a_while_and_bounded() -> None:
    attempts = Attempts()
    for at in range(limits.JOIN_FAILURES_MAX):
        attempts.failed("peer", float(at))
    with pytest.raises(NotAdmitted):
        attempts.check("peer", 10.0)
    attempts.check("peer", limits.JOIN_FAILURE_SECONDS + 0.5)
    for number in range(2 * limits.JOIN_FAILING_PEERS_MAX):
        attempts.failed(f"peer {number}", 0.0)
    assert len(attempts.failures) == limits.JOIN_FAILING_PEERS_MAX


# hostile issuers


Falsify = Callable[[Admitted, Admitting], Admitted]


def other_salt(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, salt=bytes(16))


def no_backbone(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, news=())


def anothers_certificate(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, certificate=at.founder.record.certificate.to_bytes())


def certificate_of(issuer: Identity, at: Admitting) -> bytes:
    swarm, peer = at.founder.record.swarm, at.newcomer.peer_id
    return MembershipCertificate.issue(swarm, peer, issuer.peer_id, issuer.sign, issued_at_s=NOW_S).to_bytes()


def strangers_certificate(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, certificate=certificate_of(Identity.generate(), at))


def strangers_backbone(admitted: Admitted, at: Admitting) -> Admitted:
    stranger, thief = Identity.generate(), OwnerKey.generate()
    forged = BackboneSet.make(at.founder.record.swarm, [Member(stranger.peer_id, bytes(16))], thief.sign)
    news = (backbone_news(Enactment.of_first(forged)),)
    return replace(admitted, certificate=certificate_of(stranger, at), news=news)


def forged_ban(admitted: Admitted, at: Admitting) -> Admitted:
    ban = at.founder.ban(Identity.generate().peer_id)
    return replace(admitted, news=(*admitted.news, ban[:-1] + bytes([ban[-1] ^ 1])))


def junk_news(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, news=(*admitted.news, b"junk"))


def own_ban(admitted: Admitted, at: Admitting) -> Admitted:
    return replace(admitted, news=(*admitted.news, at.founder.ban(at.newcomer.peer_id)))


@pytest.mark.parametrize(
    ("falsify", "reason"),
    [
        (other_salt, "another swarm than the invite's"),
        (no_backbone, "without a backbone"),
        (anothers_certificate, "for another peer"),
        (strangers_certificate, "not in the backbone"),
        (strangers_backbone, "not signed by the swarm's owner"),
        (forged_ban, "not signed by the swarm's owner"),
        (junk_news, "news of kind"),
        (own_ban, "banned"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_an_issuer_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, falsify: Falsify, reason: str
) -> None:
    async with admitting(tmp_path) as at:
        true = at.service._admission

        async def false(peer: str) -> Admitted:
            return falsify(await true(peer), at)

        monkeypatch.setattr(at.service, "_admission", false)
        with pytest.raises(PeerMistake, match=reason):
            await join(at.newcomer, at.founder.invite(at.address))


async def test_an_invite_of_another_owner(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        with pytest.raises(PeerMistake, match="another owner"):
            await join(at.newcomer, replace(at.founder.invite(at.address), owner_key=bytes(32)))


# messages


@pytest.mark.parametrize(
    "message",
    [Challenge(b"c" * 32), Admitted(b"certificate", b"k" * 32, b"s" * 16, ("/a/p2p/b", "/c/p2p/d"), (b"n", b"", b"m"))],
)
def test_replies_come_back(message: Reply) -> None:
    frame, _ = split_frame(encode(message), limits.JOIN_REPLY)
    assert decode_reply(frame) == message


values = st.recursive(
    st.none() | st.integers(-5, 70_000) | st.text(max_size=20) | st.binary(max_size=70),
    st.lists,
    max_leaves=5,
)
headers = st.dictionaries(
    st.sampled_from(
        ["kind", "invite", "wire", "proof", "nonce", "addresses", "certificate", "salt", "first_key", "error"]
    ),
    values | st.sampled_from(["join", "proof", "admitted", "challenge", "refused", "renew", "seat"]),
)


@given(headers, st.binary(max_size=60))
def test_any_header_is_read_or_a_peers_mistake(header: dict[str, Any], payload: bytes) -> None:
    for decode in (decode_opening, decode_proof, decode_reply):
        with suppress(PeerMistake):
            decode(Frame(header, payload))


# renewing, and seats


def enlarged(founder: Founder, peer: Identity) -> bytes:
    acting = founder.record.backbone
    following = with_member(acting, peer.peer_id, b"seat" * 4, founder.key.sign)
    words = {each.peer_id: Stored.make(following, each.peer_id, 0, each.sign) for each in (founder.identity, peer)}
    enactment = Enactment.of(acting, following, words)
    assert enactment is not None
    return backbone_news(enactment)


def reduced(founder: Founder, peer: Identity) -> bytes:
    acting = founder.record.backbone
    following = without_member(acting, peer.peer_id, founder.key.sign)
    words = {each.peer_id: Stored.make(following, each.peer_id, 0, each.sign) for each in (founder.identity, peer)}
    enactment = Enactment.of(acting, following, words)
    assert enactment is not None
    return backbone_news(enactment)


async def test_members_outlive_their_issuer(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        record = await join(at.newcomer, at.founder.invite(at.address))
        issuer = Identity.generate()
        at.founder.store.hear([enlarged(at.founder, issuer)])
        old = MembershipCertificate.issue(record.swarm, record.peer, issuer.peer_id, issuer.sign, issued_at_s=NOW_S)
        at.founder.store.hear([reduced(at.founder, issuer)])
        held = replace(record, certificate=old, enactment=at.founder.record.enactment, former=(issuer.peer_id,))
        assert held.needs_renewal
        fresh = held.renewed(await renew(at.newcomer, at.network.peer_id, held))
        assert not fresh.needs_renewal
        assert at.service.statistics.renewed == 1
        at.founder.ban(issuer.peer_id)
        with pytest.raises(NotAdmitted, match="not in the backbone"):
            await renew(at.newcomer, at.network.peer_id, held)
        thief = at.another()
        await thief.connect(at.address)
        with pytest.raises(NotAdmitted, match="of another peer"):
            await renew(thief, at.network.peer_id, fresh)


async def test_a_seats_name_is_told(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        await at.newcomer.connect(at.address)
        votes = load_vote_file(at.founder.store.files.votes)
        assert votes is not None
        swarm = at.founder.record.swarm
        assert await ask_seat(at.newcomer, at.network.peer_id, swarm) == votes.vote_file
        with pytest.raises(NotAdmitted, match="another swarm"):
            await ask_seat(at.newcomer, at.network.peer_id, "0" * 64)
        with pytest.raises(NotAdmitted, match="went away"):
            await ask_seat(at.newcomer, PeerId("12D3KooWNobody"), swarm)


# the commands, as a daemon has them


def commands(at: Admitting, folder: Path, network: MemoryNetwork | None = None, **more: Any) -> SwarmCommands:
    """A daemon's commands for the founder, or for a node of its own that belongs to no swarm."""
    if network is None:
        running = RunningSwarm(at.network, more.pop("propose", no_election), more.pop("spread", lambda news: None))
        identity, store = at.founder.identity, at.founder.store
        return SwarmCommands(
            identity, store, running=lambda: running, open_network=hub_opener(at.hub), clock=lambda: NOW_S, **more
        )
    folder.mkdir()
    store = SwarmStore.open(SwarmFiles(folder))
    return SwarmCommands(Identity.generate(), store, open_network=hub_opener(at.hub), clock=lambda: NOW_S, **more)


async def no_election(_: object) -> None:
    raise AssertionError("nobody votes here")


async def test_invite_and_join_as_commands(tmp_path: Path) -> None:
    async with admitting(tmp_path / "founder") as at:
        changed: list[str] = []
        ours, theirs = (
            commands(at, tmp_path),
            commands(at, tmp_path / "newcomer", at.newcomer, changed=lambda: changed.append("joined")),
        )
        made = await ours.table()["swarm_invite"]({"uses": 1, "lifetime_s": 3_600, "addresses": []}, None)
        assert made["addresses"] == [at.address]
        invite = Invite.parse(made["token"])
        assert (invite.uses, invite.expires_at_s, invite.psk) == (1, NOW_S + 3_600, at.founder.record.psk)
        joined = await theirs.table()["swarm_join"]({"token": made["token"]}, None)
        assert joined["swarm"] == {"id": at.founder.record.swarm, "name": "attic"}
        assert changed == ["joined"]
        with pytest.raises(UsageError, match="belongs to the swarm attic"):
            await theirs.join({"token": made["token"]}, None)
        with pytest.raises(UsageError, match="only a backbone peer"):
            await theirs.invite({"uses": 1, "lifetime_s": 3_600}, None)
        assert (await ours.invite_list({}, None))["invites"][0]["used"] == 1
        revoked = await ours.invite_revoke({"id": made["id"]}, None)
        assert revoked["invite"]["state"] == "revoked"
        assert (await theirs.leave({}, None))["left"]["name"] == "attic"
        assert changed == ["joined"] * 2


async def test_news_of_the_owner_are_spread(tmp_path: Path) -> None:
    from base64 import b64encode

    async with admitting(tmp_path) as at:
        spread: list[tuple[bytes, ...]] = []
        ours = commands(at, tmp_path, spread=lambda news: spread.append(tuple(news)))
        news = at.founder.ban(Identity.generate().peer_id)
        assert await ours.hear({"news": [b64encode(news).decode()]}, None) == {"new": 0}
        later = at.founder.ban(Identity.generate().peer_id)
        SwarmStore.open(at.founder.store.files)
        at.founder.store.update(lambda record: replace(record, bans=type(record.bans)()))
        assert await ours.hear({"news": [b64encode(each).decode() for each in (news, later)]}, None) == {"new": 2}
        assert spread == [(news, later)]


async def test_the_backbone_grows_through_the_election(tmp_path: Path) -> None:
    from base64 import b64encode

    async with admitting(tmp_path / "founder") as at:
        proposed: list[object] = []

        async def propose(backbone: object) -> None:
            proposed.append(backbone)

        ours = commands(at, tmp_path, propose=propose)
        record = await join(at.newcomer, at.founder.invite(at.address))
        (tmp_path / "member").mkdir()
        store = SwarmStore.open(SwarmFiles(tmp_path / "member"))
        store.enter(record)
        Founder(Identity.generate(), at.founder.key, store).serve(at.newcomer)
        seat = await ours.seat({"peer": at.newcomer.peer_id}, None)
        votes = load_vote_file(store.files.votes)
        assert votes is not None
        assert bytes.fromhex(seat["vote_file"]) == votes.vote_file
        grown = with_member(at.founder.record.backbone, at.newcomer.peer_id, votes.vote_file, at.founder.key.sign)
        result = await ours.backbone_propose({"backbone": b64encode(grown.to_bytes()).decode()}, None)
        assert (result["version"], proposed) == (2, [grown])
        forged = replace(grown, signature=bytes(64))
        with pytest.raises(PeerMistake, match="not signed"):
            await ours.backbone_propose({"backbone": b64encode(forged.to_bytes()).decode()}, None)
        with pytest.raises(UsageError, match="no connection"):
            await ours.seat({"peer": Identity.generate().peer_id}, None)


async def test_who_is_needed_leaves_by_force_only(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        ours = commands(at, tmp_path)
        at.founder.store.hear([enlarged(at.founder, Identity.generate())])
        with pytest.raises(UsageError, match="in the backbone") as error:
            await ours.leave({}, None)
        assert "backbone remove" in error.value.hint
        assert (await ours.leave({"force": True}, None))["left"]["name"] == "attic"


async def test_parameters_are_judged(tmp_path: Path) -> None:
    async with admitting(tmp_path / "founder") as at:
        ours, theirs = commands(at, tmp_path), commands(at, tmp_path / "newcomer", at.newcomer)
        bad: list[tuple[SwarmCommands, str, dict[str, Any]]] = [
            (theirs, "swarm_join", {}),
            (theirs, "swarm_join", {"token": 5}),
            (theirs, "swarm_join", {"token": "x" * 9_999}),
            (theirs, "swarm_init", {"name": "attic", "chain": "*", "backbone": ""}),
            (ours, "swarm_invite", {"uses": True, "lifetime_s": 3_600}),
            (ours, "swarm_invite", {"uses": 1, "lifetime_s": 10**12}),
            (ours, "swarm_invite", {"uses": 1, "lifetime_s": 3_600, "addresses": ["not an address"]}),
            (ours, "swarm_invite", {"uses": 1, "lifetime_s": 3_600, "addresses": ["/ip4/1.2.3.4/tcp/1/p2p/12D3Koo"]}),
            (ours, "swarm_invite", {"uses": 1, "lifetime_s": 3_600, "addresses": "text"}),
            (ours, "swarm_invite_revoke", {"id": "zz"}),
            (ours, "swarm_hear", {"news": ["*"]}),
            (ours, "swarm_hear", {"news": [5]}),
            (ours, "swarm_backbone_propose", {"backbone": None}),
        ]
        for commands_, method, params in bad:
            with pytest.raises(UsageError):
                await commands_.table()[method](params, None)
        expired = at.founder.invite(at.address, now_s=NOW_S - 7_200)
        with pytest.raises(NotAdmitted, match="this machine's clock"):
            await theirs.join({"token": expired.token}, None)
        alone = SwarmCommands(at.founder.identity, at.founder.store, clock=lambda: NOW_S)
        with pytest.raises(NoDaemon):
            await alone.invite({"uses": 1, "lifetime_s": 3_600}, None)


# the real network


LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def test_over_libp2p_with_the_network_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founder, newcomer = Founder.make(tmp_path), Identity.generate()
    async with open_libp2p_network(founder.identity, LOOPBACK, psk=founder.record.psk) as network:
        service = founder.serve(network)
        invite = founder.invite(network.addresses[0])
        async with open_libp2p_network(newcomer, (), psk=invite.psk) as theirs:
            record = await join(theirs, Invite.parse(invite.token))
        record.certificate.verify(founder.record.swarm, newcomer.peer_id, {founder.identity.peer_id}, verify)
        assert record.addresses == (network.addresses[0],)
        await eventually(lambda: not network.connected_peers())
        monkeypatch.setattr(limits, "JOIN_DIAL_SECONDS_MAX", 1.0)
        other_key = replace(founder.invite(network.addresses[0]), psk=bytes(32))
        async with open_libp2p_network(Identity.generate(), (), psk=other_key.psk) as stranger:
            with pytest.raises(NotAdmitted) as error:
                await join(stranger, other_key)
        assert cause(error) == "unreachable"
        assert service.statistics.admitted == 1


async def test_invite_tries_real_addresses(tmp_path: Path) -> None:
    founder = Founder.make(tmp_path)
    async with open_libp2p_network(founder.identity, LOOPBACK, psk=founder.record.psk) as network:
        founder.serve(network)
        running = RunningSwarm(network, no_election, lambda news: None)
        ours = SwarmCommands(founder.identity, founder.store, running=lambda: running, clock=lambda: NOW_S)
        closed = f"/ip4/127.0.0.1/tcp/9/p2p/{network.peer_id}"
        made = await ours.invite({"uses": 1, "lifetime_s": 3_600, "addresses": [closed]}, None)
        assert made["addresses"] == [closed, network.addresses[0]]
        assert "did not answer" in made["warnings"][0]["reason"]
        theirs_folder = tmp_path / "newcomer"
        theirs_folder.mkdir()
        theirs = SwarmCommands(Identity.generate(), SwarmStore.open(SwarmFiles(theirs_folder)), clock=lambda: NOW_S)
        joined = await theirs.join({"token": made["token"]}, None)
        assert joined["admitted_by"] == founder.identity.peer_id
