"""What a node knows of its swarm: news in any order, crashes at any instant, damage, and peers that lie."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.backbone import BackboneSet, Enactment, Stored
from capabilities.errors import PeerMistake, UsageError
from capabilities.membership_certificate import MembershipCertificate
from scheduler.election_state import DamagedState
from swarmnode import limits
from swarmnode.identity import Identity
from swarmnode.swarm.bans import Ban, BanList
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.founding import Founding, found, with_member, without_member
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.record import SwarmRecord, backbone_news, ban_news, release_news, rotation_news
from swarmnode.swarm.releases import Release
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import load_vote_file, open_vote_file
from tests.swarm_members import NOW_S, Founder

PEERS = [Identity.generate() for _ in range(4)]
SEATS = {peer.peer_id: bytes([number]) * 16 for number, peer in enumerate(PEERS)}


@pytest.fixture
def founder(tmp_path: Path) -> Founder:
    return Founder.make(tmp_path)


def enacted(previous: BackboneSet, current: BackboneSet, *signers: Identity) -> bytes:
    words = {each.peer_id: Stored.make(current, each.peer_id, 0, each.sign) for each in signers}
    enactment = Enactment.of(previous, current, words)
    assert enactment is not None
    return backbone_news(enactment)


def grown(founder: Founder, *joining: Identity) -> list[bytes]:
    """News of a backbone that grows by one peer after the other."""
    news, acting, members = [], founder.record.backbone, [founder.identity]
    for peer in joining:
        following = with_member(acting, peer.peer_id, SEATS[peer.peer_id], founder.key.sign)
        members.append(peer)
        news.append(enacted(acting, following, *members))
        acting = following
    return news


def certificate_by(founder: Founder, issuer: Identity, peer: Identity) -> MembershipCertificate:
    return MembershipCertificate.issue(
        founder.record.swarm, peer.peer_id, issuer.peer_id, issuer.sign, issued_at_s=NOW_S
    )


# founding


def test_a_founder_leads_a_backbone_of_one(founder: Founder) -> None:
    record = founder.record
    assert record.backbone.peers == (founder.identity.peer_id,)
    record.verify_member(founder.identity.peer_id, record.certificate)
    assert not record.needs_renewal
    votes = load_vote_file(founder.store.files.votes)
    assert votes is not None
    assert record.backbone.seats(record.peer, votes.vote_file)
    assert votes.enactment == record.enactment
    assert record.psk.hex() not in repr(record) + repr(founder.store)


def test_a_founding_must_be_the_owners_and_this_peers(tmp_path: Path) -> None:
    store, me, key = SwarmStore.open(SwarmFiles(tmp_path)), PEERS[0], OwnerKey.generate()
    draft = Founding.draft("attic", me.peer_id, key)
    forged = replace(draft, chain=replace(draft.chain, salt=b"x" * 16))
    with pytest.raises(PeerMistake, match="not signed by the swarm's owner"):
        found(store, me.peer_id, me.sign, forged, NOW_S)
    with pytest.raises(UsageError, match="not this peer alone"):
        found(store, PEERS[1].peer_id, PEERS[1].sign, draft, NOW_S)
    assert list(tmp_path.iterdir()) == []
    found(store, me.peer_id, me.sign, draft, NOW_S)
    with pytest.raises(UsageError, match="belongs to the swarm attic"):
        found(store, me.peer_id, me.sign, Founding.draft("other", me.peer_id, key), NOW_S)


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 64, "\x1b[2J", "é"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 63"):
        Founding.draft(name, PEERS[0].peer_id, OwnerKey.generate())


# the backbone


def test_the_backbone_changes_by_one(founder: Founder) -> None:
    acting, sign = founder.record.backbone, founder.key.sign
    two = with_member(acting, PEERS[0].peer_id, SEATS[PEERS[0].peer_id], sign)
    assert (two.version, len(two.members)) == (2, 2)
    with pytest.raises(UsageError, match="already"):
        with_member(two, PEERS[0].peer_id, SEATS[PEERS[0].peer_id], sign)
    with pytest.raises(UsageError, match="lost the vote file") as lost:
        with_member(two, PEERS[0].peer_id, b"x" * 16, sign)
    assert f"swarmctl backbone remove {PEERS[0].peer_id}" in lost.value.hint
    assert without_member(two, PEERS[0].peer_id, sign).members == acting.members
    with pytest.raises(UsageError, match="is not in the backbone"):
        without_member(two, PEERS[1].peer_id, sign)
    with pytest.raises(UsageError, match="one member at least"):
        without_member(acting, acting.peers[0], sign)


def test_a_vote_file_that_was_lost_gets_another_name(tmp_path: Path, founder: Founder) -> None:
    path, swarm = tmp_path / "votes", founder.record.swarm
    first = open_vote_file(path, swarm, None)
    assert open_vote_file(path, swarm, None) == first
    path.unlink()
    assert open_vote_file(path, swarm, None).vote_file != first.vote_file
    assert open_vote_file(path, "00" * 32, None).swarm == "00" * 32
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedState, match=r"votes: .*damaged"):
        open_vote_file(path, swarm, None)


# news


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_news_in_any_order_and_any_number_lead_to_one_record(founder: Founder, data: st.DataObject) -> None:
    record, key = founder.record, founder.key
    bans = [
        Ban.make(record.swarm, PEERS[peer].peer_id, sequence, banned, key.sign)
        for sequence, (peer, banned) in enumerate([(0, True), (1, True), (0, False), (2, True)], 1)
    ]
    news = [*map(ban_news, bans), *grown(founder, *PEERS[:2])]
    heard = data.draw(st.lists(st.sampled_from(news), max_size=12)) + data.draw(st.permutations(news))
    for each in heard:
        record = record.hear(each)
    assert record.bans.banned == tuple(sorted(PEERS[peer].peer_id for peer in (1, 2)))
    assert record.backbone.version == 3
    assert all(record.hear(each) is record for each in news), "nothing of it is new"


def test_a_newcomer_gets_the_same_record(founder: Founder) -> None:
    founder.ban(PEERS[3].peer_id)
    founder.store.hear(grown(founder, PEERS[0]))
    record, me = founder.record, PEERS[1]
    certificate = certificate_by(founder, founder.identity, me)
    first = replace(record.chain, rotations=())
    copy = SwarmRecord.from_news(record.name, record.psk, first, certificate, record.news())
    assert (copy.chain, copy.enactment, copy.bans) == (record.chain, record.enactment, record.bans)
    with pytest.raises(PeerMistake, match="without a backbone"):
        SwarmRecord.from_news(record.name, record.psk, first, certificate, ())


def release_of(founder: Founder, peer: Identity, number: int, key: OwnerKey | None = None) -> bytes:
    return release_news(Release.make(founder.record.swarm, peer.peer_id, number, NOW_S, (key or founder.key).sign))


def test_a_record_without_releases_is_written_as_before_there_were_any(founder: Founder) -> None:
    assert founder.record.to_bytes()[1] == 1, "its format"
    founder.store.hear([release_of(founder, PEERS[0], 1)])
    assert founder.record.to_bytes()[1] == 2
    assert SwarmStore.open(founder.store.files).need() == founder.record


def test_releases_grow_whatever_the_order(founder: Founder) -> None:
    first, second, third = (release_of(founder, PEERS[0], number) for number in (1, 2, 3))
    founder.store.hear([second, first])
    assert founder.record.releases.number_of(PEERS[0].peer_id) == 2
    assert founder.record.hear(second) is founder.record
    assert founder.record.hear(third).releases.number_of(PEERS[0].peer_id) == 3
    with pytest.raises(PeerMistake, match="not signed by the swarm's owner"):
        founder.record.hear(release_of(founder, PEERS[1], 1, OwnerKey.generate()))


def test_a_release_that_is_signed_anew_is_told_to_newcomers_and_counts_once(founder: Founder) -> None:
    founder.store.hear([release_of(founder, PEERS[0], 2)])
    before, new = founder.record, OwnerKey.generate()
    rotation = before.chain.rotate(new.public, [before.backbone.digest], founder.key.sign)
    after = before.hear(rotation_news(rotation))
    told = len(after.news())
    again, heard = after.hear_all(map(release_news, after.releases.signed_anew(new.sign)))
    assert len(heard) == 1
    assert len(again.news()) == told + 1, "with a signature that anybody can check"
    assert again.releases.number_of(PEERS[0].peer_id) == 2
    assert again.hear(release_of(founder, PEERS[0], 2, founder.key)) is again


def test_after_a_rotation_old_signatures_count_where_they_were_kept(founder: Founder) -> None:
    founder.ban(PEERS[3].peer_id)
    (enactment,) = grown(founder, PEERS[0])
    founder.store.hear([enactment])
    before, new = founder.record, OwnerKey.generate()
    assert before.enactment.previous is not None
    kept = [before.backbone.digest, before.enactment.previous.digest]
    rotation = before.chain.rotate(new.public, kept, founder.key.sign)
    late_ban = ban_news(Ban.make(before.swarm, PEERS[2].peer_id, 9, True, founder.key.sign))
    after = before.hear(rotation_news(rotation))
    with pytest.raises(PeerMistake, match="not signed by the swarm's owner"):
        after.hear(late_ban)
    assert after.bans.is_banned(PEERS[3].peer_id), "a ban does not lapse"
    certificate = certificate_by(founder, founder.identity, PEERS[1])
    first = replace(after.chain, rotations=())
    newcomer = SwarmRecord.from_news("attic", after.psk, first, certificate, after.news())
    assert newcomer.backbone == after.backbone
    assert not newcomer.bans.is_banned(PEERS[3].peer_id), "nobody could check it"
    after, _ = after.hear_all(map(ban_news, after.bans.signed_anew(new.sign)))
    newcomer = SwarmRecord.from_news("attic", after.psk, first, certificate, after.news())
    assert newcomer.bans.banned == (PEERS[3].peer_id,)
    assert SwarmRecord.from_file(after.to_file()) == after


def test_false_news_are_a_peers_mistake_and_change_nothing(founder: Founder) -> None:
    record, thief = founder.record, OwnerKey.generate()
    acting = record.backbone
    following = with_member(acting, PEERS[0].peer_id, bytes(16), thief.sign)
    owners = with_member(acting, PEERS[0].peer_id, bytes(16), founder.key.sign)
    lonely = Enactment(acting, owners, (Stored.make(owners, PEERS[0].peer_id, 0, PEERS[0].sign),))
    elsewhere = Ban.make("00" * 32, PEERS[0].peer_id, 1, True, founder.key.sign)
    for news in (
        ban_news(Ban.make(record.swarm, PEERS[0].peer_id, 1, True, thief.sign)),
        ban_news(elsewhere),
        enacted(acting, following, founder.identity, PEERS[0]),
        backbone_news(lonely),
        rotation_news(record.chain.rotate(thief.public, [], thief.sign)),
        b"",
        b"x123",
    ):
        with pytest.raises(PeerMistake):
            founder.store.hear([ban_news(Ban.make(record.swarm, PEERS[1].peer_id, 1, True, founder.key.sign)), news])
        assert founder.record is record, "all or nothing"


@given(data=st.binary(max_size=300), kind=st.sampled_from([b"b", b"r", b"k"]))
def test_junk_is_no_news(founder: Founder, data: bytes, kind: bytes) -> None:
    with pytest.raises(PeerMistake):
        founder.record.hear(kind + data)


def test_bans_are_bounded(founder: Founder) -> None:
    swarm = founder.record.swarm
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdef"
    names = [f"{a}{b}" for a in alphabet for b in alphabet][: limits.BANS_MAX]
    full = BanList().with_(*(Ban(swarm, name, 1, True, bytes(64)) for name in names))
    assert BanList.from_bytes(full.to_bytes()).by_peer == full.by_peer
    with pytest.raises(PeerMistake, match="1024"):
        full.with_(Ban(swarm, "zzz", 1, True, bytes(64)))
    assert full.with_(Ban(swarm, names[0], 2, False, bytes(64))).is_banned(names[0]) is False
    record = replace(founder.record, bans=full)
    assert SwarmRecord.from_file(record.to_file()) == record


# members


def test_a_members_word_lasts_as_long_as_its_issuers(founder: Founder) -> None:
    """Removed from the backbone: its members renew in peace. Banned: what it said is void."""
    news = grown(founder, PEERS[0])
    founder.store.hear(news)
    member, issuer = PEERS[1], PEERS[0]
    certificate = certificate_by(founder, issuer, member)
    founder.record.verify_member(member.peer_id, certificate)
    acting = founder.record.backbone
    smaller = without_member(acting, issuer.peer_id, founder.key.sign)
    founder.store.hear([enacted(acting, smaller, founder.identity, issuer)])
    assert founder.record.former == (issuer.peer_id,)
    founder.record.verify_member(member.peer_id, certificate)
    assert replace(founder.record, certificate=certificate).needs_renewal
    founder.ban(issuer.peer_id)
    with pytest.raises(PeerMistake, match="not in the backbone"):
        founder.record.verify_member(member.peer_id, certificate)
    founder.ban(member.peer_id)
    with pytest.raises(PeerMistake, match="banned"):
        founder.record.verify_member(member.peer_id, certificate_by(founder, founder.identity, member))


def test_a_certificate_is_replaced_by_a_good_one_only(founder: Founder) -> None:
    foreign = certificate_by(founder, PEERS[0], founder.identity)
    with pytest.raises(PeerMistake, match="not in the backbone"):
        founder.store.renew(foreign)
    later = replace(certificate_by(founder, founder.identity, founder.identity), issued_at_s=NOW_S + 1)
    with pytest.raises(PeerMistake, match="not signed"):
        founder.store.renew(later)


# addresses


def address(number: int, peer: str) -> str:
    return f"/ip4/192.0.2.{number}/tcp/11436/p2p/{peer}"


def test_addresses_are_bounded_whole_and_each_peers_own(founder: Founder) -> None:
    other, third = PEERS[0].peer_id, PEERS[1].peer_id
    flood = [address(number, other) for number in range(40)]
    founder.store.learn_addresses([*flood, address(1, third), address(2, founder.identity.peer_id), "junk", ""])
    assert founder.record.addresses == (*flood[: limits.SWARM_ADDRESSES_PER_PEER_MAX], address(1, third))
    founder.store.learn_addresses([address(9, third)])
    assert founder.record.addresses[0] == address(9, third), "the newest first"
    before = founder.record
    founder.store.learn_addresses([address(9, third)])
    assert founder.record is before, "nothing to write"
    founder.ban(third)
    founder.store.learn_addresses([address(8, third)])
    assert not any(each.endswith(third) for each in founder.record.addresses)
    founder.store.learn_addresses(f"/dns/h/tcp/1/p2p/12D3KooW{a}{b}" for a in "abcdefgh" for b in "abcdefgh")
    assert len(founder.record.addresses) == limits.SWARM_ADDRESSES_MAX


# the file


def test_a_store_without_a_record_says_so(tmp_path: Path) -> None:
    store = SwarmStore.open(SwarmFiles(tmp_path))
    assert store.record is None
    assert not store.is_banned(PEERS[0].peer_id)
    assert not store.verify_owner(b"data", bytes(64))
    for act in (store.need, store.leave, store.invites, lambda: store.hear([])):
        with pytest.raises(NotInSwarm) as error:
            act()
        assert "swarmctl init" in error.value.hint


def test_a_record_comes_back(founder: Founder) -> None:
    founder.ban(PEERS[0].peer_id)
    founder.store.learn_addresses([address(1, PEERS[1].peer_id)])
    again = SwarmStore.open(founder.store.files)
    assert again.record == founder.record
    assert again.is_banned(PEERS[0].peer_id)
    assert founder.store.files.record.stat().st_mode & 0o777 == 0o600


def test_leaving_forgets_the_swarm_but_not_the_votes(founder: Founder) -> None:
    founder.invite(address(1, founder.identity.peer_id))
    founder.store.leave()
    assert founder.store.record is None
    assert SwarmStore.open(founder.store.files).record is None
    assert sorted(path.name for path in founder.store.files.data.iterdir()) == ["votes"]


@given(data=st.data())
def test_any_damage_is_reported_and_nothing_replaced(founder: Founder, data: st.DataObject) -> None:
    path = founder.store.files.record
    whole = founder.record.to_file()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    damaged = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(DamagedState) as error:
        SwarmStore.open(founder.store.files)
    assert error.value.message.startswith(str(path))
    assert "swarmctl join" in error.value.hint
    assert path.read_bytes() == damaged
    path.write_bytes(whole)


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_crash_in_the_middle_leaves_the_record_before(
    founder: Founder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = founder.record

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "replace":
            patch.setattr(Path, "replace", fail)
        else:
            patch.setattr(os, {"open": "open", "write": "fdopen", "fsync": "fsync"}[step], fail)
        with pytest.raises(OSError, match="No space"):
            founder.ban(PEERS[0].peer_id)
    assert founder.record is before, "nobody saw what is not on disk"
    assert SwarmStore.open(founder.store.files).record == before
    founder.ban(PEERS[0].peer_id)
    assert SwarmStore.open(founder.store.files).is_banned(PEERS[0].peer_id)


def test_a_foreign_part_is_found(founder: Founder, tmp_path: Path) -> None:
    other = Founder.make(tmp_path / "other").record
    mixed: list[Callable[[SwarmRecord], SwarmRecord]] = [
        lambda record: replace(record, chain=other.chain),
        lambda record: replace(record, enactment=other.enactment),
        lambda record: replace(record, certificate=other.certificate),
    ]
    for mix in mixed:
        with pytest.raises(DamagedState, match="different swarms"):
            SwarmRecord.from_file(mix(founder.record).to_file())


# blobs


@given(st.lists(st.binary(max_size=50), max_size=9))
def test_blobs_come_back(blobs: list[bytes]) -> None:
    assert split_blobs(join_blobs(blobs), "blobs", 9) == tuple(blobs)


@given(st.binary(max_size=100))
def test_blobs_have_one_form(data: bytes) -> None:
    with contextlib.suppress(PeerMistake):
        assert join_blobs(split_blobs(data, "blobs", 50)) == data
