"""A peer or a file of another version: understood where the format allows it, else told why not, and never damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgpack
import pytest

from capabilities.agreement import Agreement
from capabilities.errors import PeerMistake
from capabilities.packing import OtherFormat, pack
from scheduler.audit_tests import PeerAudits
from scheduler.election_messages import VoteRequest, from_plain, to_plain
from scheduler.election_state import DamagedState, NewerState, seal, unseal
from scheduler.placement import Placement
from scheduler.placement_record import PlacementRecord
from scheduler.sampling import SamplingParams
from swarmnode import member_messages
from swarmnode.backbone import leadership_messages
from swarmnode.identity import Identity
from swarmnode.net.interface import ProtocolNotSupported
from swarmnode.prompt_frames import decode_ask, decode_reply, encode_ask, encode_reply
from swarmnode.prompt_messages import Ask, Queued
from swarmnode.shards.messages import ShardRequest, TrunkRange, decode_request, encode_request
from swarmnode.swarm import join_messages, joining
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.invite_book import InviteBook
from swarmnode.swarm.record import release_news
from swarmnode.swarm.releases import Release
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.vote_file import load_vote_file, open_vote_file
from swarmnode.wire import Frame, FrameLimits, split_frame
from tests.swarm_members import Founder
from tests.test_admission import admitting

LATER: Final = {"of_a_later_version": ["anything", 1]}
DIGEST: Final = bytes(leadership_messages.DIGEST_BYTES)

Decode = Callable[[Frame], object]


def _shard_request(frame: Frame) -> object:
    return decode_request(frame.header)


FRAMES: Final[dict[str, tuple[bytes, Decode]]] = {
    "policy": (member_messages.encode(member_messages.Policy(True)), member_messages.decode_from_worker),
    "begin": (member_messages.encode(member_messages.Begin(2, 3)), member_messages.decode_from_leader),
    "assign": (
        member_messages.encode(member_messages.Assign(2, 3, "m", "0" * 64, ("p",), {1: (0, 1)})),
        member_messages.decode_from_leader,
    ),
    "ask": (encode_ask(Ask("request", SamplingParams(), prompt="Hello")), decode_ask),
    "queued": (encode_reply(Queued(0)), decode_reply),
    "shards": (encode_request(ShardRequest("0" * 64, TrunkRange(0, 9))), _shard_request),
    "knows": (
        leadership_messages.encode(leadership_messages.Knows(2, DIGEST, b"")),
        leadership_messages.decode_from_member,
    ),
    "still": (leadership_messages.encode(leadership_messages.Still()), leadership_messages.decode_from_backbone),
    "join": (join_messages.encode(join_messages.Join(bytes(8), 1)), join_messages.decode_opening),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_what_a_later_version_says_besides_is_left_out(kind: str) -> None:
    data, decode = FRAMES[kind]
    frame, _ = split_frame(data, FrameLimits(8192, 8192))
    assert isinstance(frame.header, dict)
    assert decode(Frame({**frame.header, **LATER}, frame.payload)) == decode(frame)


def test_messages_without_names_have_no_room_for_more() -> None:
    plain = to_plain(VoteRequest(1, 2, False, None, None))
    assert isinstance(plain, tuple)
    for later in ((*plain, 1), (99, *plain[1:])):
        with pytest.raises(PeerMistake):
            from_plain(later)


async def test_a_newcomer_of_another_wire_version_is_told_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with admitting(tmp_path) as at:
        invite = at.founder.invite(at.address)
        with monkeypatch.context() as patch:
            patch.setattr(joining, "WIRE_VERSION", 2)
            with pytest.raises(NotAdmitted, match="the swarm speaks wire version 1, the newcomer 2") as error:
                await joining.join(at.newcomer, invite)
        assert error.value.details["cause"] == "version"
        assert "version" in error.value.hint
        assert at.service.statistics.refused == 1
        await joining.join(at.newcomer, invite)  # nothing of the invite was used up


async def test_a_protocol_that_the_other_side_lacks_is_named(tmp_path: Path) -> None:
    async with admitting(tmp_path) as at:
        await at.newcomer.connect(at.address)
        with pytest.raises(ProtocolNotSupported, match="/swarmnode/join/2"):
            await at.newcomer.open_stream(at.network.peer_id, "/swarmnode/join/2")


# -- files -------------------------------------------------------------------------------------------------------------

BEFORE_AUDITS: Final = bytes.fromhex(
    "98020307c4200f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0fc413313244334b6f6f57610a313244334b6f6f57"
    "62c4050000020002c408000001000100ffffc42400000101000000000000000000000000000000000000000000000000000000000000f03f"
)
"""What the version before this format wrote: two experts of layer 0 on two peers, one of them proven and unfit."""


def test_a_successor_reads_what_a_leader_of_the_version_before_left() -> None:
    holders = {0: (("12D3KooWa", "12D3KooWb"), ("12D3KooWb",))}
    expected = PlacementRecord(
        "0f" * 32,
        Placement(3, 7, holders),
        {"12D3KooWa": Agreement(True, 0.0, 0.0, 0.0, 1.0)},
        frozenset({"12D3KooWa"}),
    )
    assert PlacementRecord.from_bytes(BEFORE_AUDITS) == expected
    assert expected.to_bytes() == BEFORE_AUDITS, "as long as nothing new is in it the version before reads it, too"
    audited = replace(expected, audits={"12D3KooWb": PeerAudits(4)})
    with pytest.raises(OtherFormat, match="format 5; this version reads format 4 and older"):
        PlacementRecord.from_bytes(later(audited.to_bytes()))


def later(data: bytes) -> bytes:
    """A record as the next version might write it: another number, another field."""
    number, *fields = msgpack.unpackb(data, use_list=False)
    return pack((number + 1, *fields, b"more"))


def _open_store(founder: Founder) -> object:
    return SwarmStore.open(founder.store.files)


def _open_votes(founder: Founder) -> object:
    return load_vote_file(founder.store.files.votes)


def _open_invites(founder: Founder) -> object:
    return InviteBook(founder.store.files.invites, founder.record.swarm)


STATE: Final[dict[str, Callable[[Founder], object]]] = {
    "swarm.record": _open_store, "votes": _open_votes, "invites": _open_invites,
}  # fmt: skip


@pytest.mark.parametrize("name", STATE)
def test_a_newer_file_is_told_from_a_damaged_one_and_kept(tmp_path: Path, name: str) -> None:
    founder = Founder.make(tmp_path)
    founder.store.hear(
        [release_news(Release.make(founder.record.swarm, Identity.generate().peer_id, 1, 1, founder.key.sign))]
    )
    open_vote_file(founder.store.files.votes, founder.record.swarm, None)
    founder.invite("/ip4/127.0.0.1/tcp/1/p2p/" + founder.identity.peer_id)
    path = tmp_path / name
    STATE[name](founder)
    newer = seal(later(unseal(path.read_bytes())))
    path.write_bytes(newer)
    with pytest.raises(NewerState, match=name) as error:
        STATE[name](founder)
    assert error.value.type == "newer_state"
    assert "this version reads format" in error.value.message
    assert "install that version again" in error.value.hint
    assert "Do not remove the file" in error.value.hint
    assert path.read_bytes() == newer
    path.write_bytes(newer[:-1])
    with pytest.raises(DamagedState) as damaged:
        STATE[name](founder)
    assert damaged.value.type == "damaged_state"
