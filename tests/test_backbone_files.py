"""What members keep of elections and leaders: votes, mandates, the backbone, the owner's news, the leader's record."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock

from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, UsageError
from scheduler.election_messages import Message, VoteReply
from scheduler.election_state import BackboneChanged, DamagedState, HardState, LeaderChanged
from scheduler.term_guard import UncertifiedTerm
from swarmnode import limits
from swarmnode.backbone import election_service
from swarmnode.backbone.election_service import NoPart
from swarmnode.backbone.kept import Kept, LeaderRecord
from swarmnode.backbone.leadership_messages import RecordPart
from swarmnode.swarm.bans import Ban
from swarmnode.swarm.founding import with_member, without_member
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.record import ban_news
from swarmnode.swarm.vote_file import load_vote_file
from tests.backbone_nodes import Node, eventually, memory_swarm

# -- files -------------------------------------------------------------------------------------------------------------


async def test_votes_and_mandates_outlive_a_restart_of_all(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3, others=1) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        term = swarm.nodes[3].watch.term
        for node in swarm.nodes:
            await node.stop()
        await swarm.start()
        worker = swarm.nodes[3]
        assert worker.watch.term == term
        with pytest.raises(UncertifiedTerm):
            worker.watch.check(term + 1, swarm.nodes[0].peer)
        assert worker.watch.leader is None
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        assert {node.watch.term for node in swarm.nodes} == {term + 1}


async def test_a_peer_without_its_votes_has_no_seat_says_so_and_still_follows(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        loser = swarm.nodes[2]
        await loser.stop()
        loser.store.files.votes.unlink()
        await swarm.start(loser)
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        leader = swarm.leader()
        assert leader is not None
        for node in swarm.nodes:  # while all is well otherwise, too
            await eventually(lambda node=node: list(node.watch.cannot_vote) == [loser.peer])  # type: ignore[misc]
            assert "remove it from the backbone and add it anew" in node.watch.cannot_vote[loser.peer]
        await leader.stop()
        survivors = [node for node in swarm.nodes if node is not leader]
        await trio.sleep(4)
        assert all(node.watch.leader is None for node in survivors)
        assert loser.election.status().election is not None
        assert "lost the file of its votes" in loser.election.status().why
        other = next(node for node in survivors if node is not loser)
        lost = "lost the file of its votes: remove it from the backbone and add it anew"
        assert other.watch.reason == f"an election is under way; the backbone peer {loser.peer} {lost}"
        assert loser.watch.reason.endswith(f"an election is under way; this peer {lost}")


async def test_a_damaged_vote_file_is_named_and_its_peer_follows(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        damaged = swarm.nodes[0]
        await damaged.stop()
        damaged.store.files.votes.write_bytes(b"not what was written")
        await swarm.start(damaged)
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() is not None) < 4
        assert not damaged.leads
        report = damaged.election.status()
        assert report.election is None
        assert isinstance(report.fault, DamagedState)
        assert str(damaged.store.files.votes) in report.why
        with pytest.raises(NoPart):
            damaged.election.vote_file()
        assert damaged.store.files.votes.read_bytes() == b"not what was written"


async def test_who_cannot_write_its_vote_does_not_send_it_and_takes_no_part_any_more(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 1) as swarm:
        (node,) = swarm.nodes
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(election_service, "write_vote_file", Mock(side_effect=full))
        await swarm.all_may_lead()
        await trio.sleep(2)
        assert node.watch.leader is None
        assert [change for change in node.heard if isinstance(change, LeaderChanged) and change.leader] == []
        assert "No space left on device" in node.watch.reason
        assert load_vote_file(node.store.files.votes).mandate is None  # type: ignore[union-attr]
        with pytest.raises(NoPart):
            await node.election.propose(node.store.need().backbone)


async def test_a_vote_that_is_not_on_disk_elects_nobody(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 2) as swarm:
        candidate, voter = swarm.nodes
        fail_for(voter, monkeypatch)
        await swarm.all_may_lead(candidate)
        await trio.sleep(10)
        assert candidate.watch.leader is None
        assert candidate.watch.reason.startswith("1 of 2 backbone peers answer, and 2 are needed; the backbone peer")
        assert candidate.watch.reason.endswith("votes: Input/output error")


async def test_no_vote_leaves_before_it_is_on_a_slow_disk(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 3, disk_s=0.25) as swarm:
        sent: list[int] = []

        def check(message: Message) -> bytes:
            if isinstance(message, VoteReply) and message.vote is not None:
                state = load_vote_file(swarm.node(message.vote.voter).store.files.votes)
                assert state is not None
                assert state.voted is not None
                sent.append(state.voted.term - message.vote.term)
            return encode(message)

        encode = election_service.encode
        monkeypatch.setattr(election_service, "encode", check)
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() is not None, 10) < 8
        leader = swarm.leader()
        await trio.sleep(10)
        assert swarm.leader() is leader
        assert sent
        assert min(sent) >= 0


async def test_a_leader_whose_disk_fails_stops_leading(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        await swarm.all_may_lead(swarm.nodes[0])
        await eventually(lambda: swarm.leader() is swarm.nodes[0])
        first, *others = swarm.nodes
        fail_for(first, monkeypatch)
        acting = first.store.need().backbone
        after = without_member(acting, others[0].peer, swarm.founder.key.sign)
        with pytest.raises(NoPart, match="Input/output error"):
            await first.election.propose(after)
        assert first.heard[-1] == LeaderChanged(first.watch.term, None, first.watch._guard.obeyed)
        assert first.election.status().election is None
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() in others) < 3


async def test_once_the_disk_takes_its_votes_again_a_peer_votes_and_leads_again(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        node, worker = swarm.nodes
        await swarm.all_may_lead(node)
        await eventually(lambda: worker.sees(node))
        term = node.watch.term
        with monkeypatch.context() as patch:
            fail_for(node, patch)
            acting = node.store.need().backbone
            after = with_member(acting, worker.peer, b"0" * 16, swarm.founder.key.sign)
            with pytest.raises(NoPart, match="Input/output error"):
                await node.election.propose(after)
            await trio.sleep(30)
            assert not node.leads
            assert "votes: Input/output error" in node.election.status().why
        assert await eventually(lambda: node.leads, 12) < 10
        assert node.watch.term > term
        assert node.election.status().fault is None
        await eventually(lambda: worker.sees(node))
        assert node.store.need().backbone.version == acting.version, "what was not stored was not proposed"


async def test_news_that_the_disk_does_not_take_costs_nothing_else(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 1, others=2) as swarm:
        leader, worker, banned = swarm.nodes
        await swarm.all_may_lead(leader)
        await eventually(lambda: worker.sees(leader))
        record = leader.store.need()
        ban = Ban.make(record.swarm, banned.peer, record.bans.next_sequence, True, swarm.founder.key.sign)
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(worker.store, "hear", refused := Mock(side_effect=full))
            leader.store.hear([ban_news(ban)])
            await eventually(lambda: refused.called, 4)
            await trio.sleep(5)
            assert worker.sees(leader)
            assert not worker.store.is_banned(banned.peer)
        another = Ban.make(record.swarm, banned.peer, record.bans.next_sequence + 1, True, swarm.founder.key.sign)
        leader.store.hear([ban_news(another)])
        await eventually(lambda: worker.store.is_banned(banned.peer), 8)


def fail_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's vote file can be written no more."""
    write = election_service.write_vote_file

    def fail(path: Path, state: HardState) -> None:
        if path == node.store.files.votes:
            raise OSError(errno.EIO, "Input/output error")
        write(path, state)

    monkeypatch.setattr(election_service, "write_vote_file", fail)


async def test_a_mandate_is_obeyed_only_once_it_is_on_disk(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, worker = swarm.nodes
        store = Kept.store_mandate

        def fail(kept: Kept, mandate: Mandate) -> None:
            if kept.folder == worker.folder:
                raise OSError(errno.ENOSPC, "No space left on device")
            store(kept, mandate)

        monkeypatch.setattr(Kept, "store_mandate", fail)
        await swarm.all_may_lead()
        await eventually(lambda: leader.leads)
        await trio.sleep(2)
        assert worker.watch.leader is None
        assert worker.watch.reason == "the newest term cannot be stored here: No space left on device"
        with pytest.raises(UncertifiedTerm):
            worker.watch.check(1, leader.peer)
        monkeypatch.setattr(Kept, "store_mandate", store)
        assert await eventually(lambda: worker.sees(leader)) < 1.5
        worker.watch.check(1, leader.peer)


# -- the backbone and the owner's word ---------------------------------------------------------------------------------


async def test_a_backbone_grows_from_one_to_three_and_all_members_know(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 1, others=3) as swarm:
        first, second, third, worker = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is first)
        for version, node in ((2, second), (3, third)):
            acting = first.store.need().backbone
            after = with_member(acting, node.peer, node.election.vote_file(), swarm.founder.key.sign)
            await first.election.propose(after)
            await eventually(lambda: all(n.store.need().backbone.version == version for n in swarm.nodes))  # noqa: B023
        assert first.leads
        assert worker.store.need().backbone.peers == tuple(sorted(node.peer for node in (first, second, third)))
        await first.stop()
        rest = [second, third, worker]
        assert await eventually(lambda: swarm.leader(*rest) is not None) < 3
        assert BackboneChanged in {type(change) for change in second.heard}


async def test_a_set_that_does_not_follow_is_refused(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1, others=2) as swarm:
        first, second, third = swarm.nodes
        acting = first.store.need().backbone
        key = swarm.founder.key
        later = with_member(acting, second.peer, second.election.vote_file(), key.sign)
        with pytest.raises(PeerMistake):
            await first.election.propose(with_member(acting, third.peer, b"0" * 16, OwnerKey.generate().sign))
        with pytest.raises(UsageError):
            await first.election.propose(with_member(later, third.peer, third.election.vote_file(), key.sign))


async def test_bans_and_rotations_reach_every_member_from_wherever_they_begin(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 2, others=3) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        worker, banned = swarm.nodes[2], swarm.nodes[4]
        record = worker.store.need()
        ban = Ban.make(record.swarm, banned.peer, record.bans.next_sequence, True, swarm.founder.key.sign)
        worker.store.hear([ban_news(ban)])
        await eventually(lambda: all(node.store.is_banned(banned.peer) for node in swarm.nodes[:4]), 4)
        await eventually(lambda: banned.watch.leader is None, 5)


# -- the leader's record and model -------------------------------------------------------------------------------------


async def test_the_leaders_record_reaches_the_backbone_and_outlives_restarts(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 3, others=1) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        leader = swarm.leader()
        assert leader is not None
        data, term = bytes(range(256)) * 4_000, leader.watch.term
        leader.voice.set_record(b"an older one")
        leader.voice.set_record(data)
        backbone, worker = swarm.nodes[:3], swarm.nodes[3]
        await eventually(lambda: all(node.watch.record == LeaderRecord(term, data) for node in backbone))
        assert worker.watch.record is None
        assert worker.network.statistics().bytes_received < len(data) / 4

        for node in backbone:
            await node.stop()
        await swarm.start(*backbone)
        assert all(node.watch.record == LeaderRecord(term, data) for node in backbone)
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        second = swarm.leader()
        assert second is not None
        second.voice.set_record(b"newer")
        newer = LeaderRecord(second.watch.term, b"newer")
        assert newer.term > term
        await eventually(lambda: all(node.watch.record == newer for node in backbone))
        await second.watch.hear_record(LeaderRecord(term, data))
        assert second.watch.record == newer


async def test_a_record_in_disorder_is_a_mistake(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 2) as swarm:
        leader, other = swarm.nodes
        await swarm.all_may_lead(leader)
        await eventually(lambda: swarm.leader() is leader)
        part = RecordPart(leader.watch.term, 10, 0, b"12345")
        parts = chain([part, replace(part, offset=6, data=b"6789")], repeat(None))
        leader.voice._part_for = Mock(side_effect=parts)  # type: ignore[method-assign]
        leader.voice.set_record(b"anything")
        await eventually(lambda: other.watch.peer_mistakes == 1)
        assert other.watch.record is None


async def test_only_a_leader_leaves_a_record_and_it_is_bounded(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 2) as swarm:
        await swarm.all_may_lead(swarm.nodes[0])
        await eventually(lambda: swarm.leader() is swarm.nodes[0])
        swarm.nodes[1].voice.set_record(b"I do not lead")
        await trio.sleep(2)
        assert [node.watch.record for node in swarm.nodes] == [None, None]
        for data in (b"", bytes(limits.LEADER_RECORD_BYTES_MAX + 1)):
            with pytest.raises(ValueError, match="record of"):
                swarm.nodes[0].voice.set_record(data)


async def test_a_damaged_record_counts_as_none(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1) as swarm:
        (node,) = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: node.leads)
        node.voice.set_record(b"a record")
        await eventually(lambda: node.watch.record is not None)
        await node.stop()
        path = node.folder / "leader.record"
        path.write_bytes(path.read_bytes()[:-1])
        await swarm.start(node)
        assert node.watch.record is None


async def test_all_members_hear_which_model_the_leader_serves(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, worker = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: worker.sees(leader))
        assert worker.watch.model == ""
        leader.voice.set_model("ab" * 32)
        await eventually(lambda: worker.watch.model == leader.watch.model == "ab" * 32, 0.5)
        await eventually(lambda: set(leader.network.addresses) <= set(worker.store.need().addresses))


async def test_whoever_waits_for_a_change_hears_of_each(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        node = swarm.nodes[0]
        seen: list[str | None] = []

        async def follow() -> None:
            while True:
                seen.append(None if node.watch.leader is None else node.watch.leader.peer)
                await node.watch.changed()

        swarm.nursery.start_soon(follow)
        await swarm.all_may_lead(*swarm.nodes[1:])
        await eventually(lambda: node.watch.leader is not None)
        first = swarm.node(node.watch.leader.peer)  # type: ignore[union-attr]
        await first.stop()
        await eventually(lambda: node.watch.leader is not None and node.watch.leader.peer != first.peer)
        assert seen[:3] == [None, first.peer, None]
        assert seen[-1] == node.watch.leader.peer  # type: ignore[union-attr]


async def test_what_is_kept_and_cannot_be_read_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1) as swarm:
        (node,) = swarm.nodes
        (node.folder / "mandate").mkdir()
        with pytest.raises(DamagedState, match="mandate: Is a directory"):
            await node.watch.run()


async def test_a_damaged_mandate_counts_as_none_until_the_newest_is_heard(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, worker = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: worker.sees(leader))
        await worker.stop()
        (worker.folder / "mandate").write_bytes(b"junk")
        await swarm.start(worker)
        await eventually(lambda: worker.sees(leader))
        worker.watch.check(leader.watch.term, leader.peer)
