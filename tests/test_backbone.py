"""Who leads, found out by whole members of a swarm: elections on real files, and what everybody hears of them.

With trio's MockClock times are exact; the real network has its turn at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from capabilities.certificates import Certificate, Mandate, Vote
from scheduler.election import Election
from scheduler.election_messages import PreVoteRequest, to_plain
from scheduler.election_state import HandOverFailed, Ready
from scheduler.term_guard import StaleTerm, UncertifiedTerm
from swarmnode.backbone import election_service, leadership_messages
from swarmnode.backbone.leadership_messages import Knows, Proof, encode
from swarmnode.net.interface import NetworkError, Stream
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.wire import encode_frame
from tests.backbone_nodes import Node, Swarm, eventually, memory_swarm
from tests.patience import PATIENCE_S
from tests.swarm_members import quick_keys


async def test_a_swarm_of_one_leads_itself_as_soon_as_it_may(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1) as swarm:
        (node,) = swarm.nodes
        await trio.sleep(3)
        assert node.watch.leader is None
        assert node.watch.reason == "no backbone peer holds a model: `swarmctl model add FILE` on one"
        await swarm.all_may_lead()
        assert await eventually(lambda: node.leads) < 1
        assert node.watch.reason == ""
        assert node.watch.leader is not None
        assert node.watch.leader.term == 1
        node.watch.check(1, node.peer)


async def test_who_is_outside_of_the_backbone_wakes_up_seldom(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, tick = Counter[str](), Election.tick

    def counting(election: Election, now: float) -> Ready:
        ticks[election.peer] += 1
        return tick(election, now)

    monkeypatch.setattr(Election, "tick", counting)
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        ticks.clear()
        await trio.sleep(10)
        member, outsider = (ticks[node.peer] for node in swarm.nodes)
        assert member > 60
        assert 8 <= outsider <= 12


async def test_three_elect_one_and_every_member_hears_of_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3, others=2) as swarm:
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() is not None) < 3
        leader = swarm.leader()
        assert leader in swarm.nodes[:3]


async def test_a_lost_leader_is_replaced_within_three_seconds_for_everybody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 3, others=2) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        rest = [node for node in swarm.nodes if node is not first]
        await first.stop()
        assert await eventually(lambda: swarm.leader(*rest) is not None) < 3
        second = swarm.leader(*rest)
        assert second is not None
        assert second.watch.leader is not None
        assert second.watch.leader.term > 1


# -- partitions, sleepers, old leaders ---------------------------------------------------------------------------------


async def test_a_minority_has_no_leader_and_says_why_and_all_agree_after_healing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 3, others=2) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        worker, other_worker = swarm.nodes[3:]
        minority = [first, worker]
        majority = [node for node in swarm.nodes if node not in minority]
        swarm.cut(minority, majority)
        assert await eventually(lambda: swarm.leader(*majority) is not None) < 3
        assert await eventually(lambda: first.watch.leader is worker.watch.leader is None) < 2.5
        for node in minority:  # who was heard a moment ago counts as answering
            await eventually(lambda node=node: node.watch.reason == "1 of 3 backbone peers answer, and 2 are needed", 2)  # type: ignore[misc]
        assert first.heard[-1].leader is None  # type: ignore[union-attr]
        assert other_worker.watch.leader is not None

        swarm.cut(minority, majority, mend=True)
        assert await eventually(lambda: swarm.leader() is not None) < 15
        assert len({node.watch.term for node in swarm.nodes}) == 1


async def test_an_old_leader_that_wakes_up_is_not_believed_and_steps_down(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Its links are infinitely slow for a while: nothing breaks, and what it said meanwhile arrives afterwards."""
    async with memory_swarm(tmp_path, 3, others=1) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        assert swarm.hub is not None
        others = [node for node in swarm.nodes if node is not first]
        for node in others:
            swarm.hub.set_delay(first.identity.peer_id, node.identity.peer_id, float("inf"))
        assert await eventually(lambda: swarm.leader(*others) not in (None, first), PATIENCE_S) < 3
        assert await eventually(lambda: first.watch.leader is None) < 0.1
        seen: set[str] = set()
        for node in others:
            swarm.hub.set_delay(first.identity.peer_id, node.identity.peer_id, 0.01)
        for _ in range(500):
            await trio.sleep(0.01)
            seen |= {node.watch.leader.peer for node in others if node.watch.leader is not None}
        assert first.peer not in seen
        assert swarm.leader() is not None
        for node in others:
            with pytest.raises(StaleTerm):
                node.watch.check(1, first.peer)


async def test_the_word_of_a_silent_leader_counts_for_three_seconds(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, worker = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: worker.sees(leader))
        assert swarm.hub is not None
        swarm.hub.set_delay(leader.identity.peer_id, worker.identity.peer_id, float("inf"))
        assert 1.5 < await eventually(lambda: worker.watch.leader is None) < 3.5
        assert worker.watch.reason == f"no backbone peer can be reached: {leader.peer}: it does not answer"
        assert leader.leads
        swarm.hub.set_delay(leader.identity.peer_id, worker.identity.peer_id, 0.0)
        assert await eventually(lambda: worker.sees(leader)) < 1


async def test_what_a_member_learns_its_own_election_learns(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        others = [node for node in swarm.nodes if node is not first]
        swarm.cut([first], others)
        await eventually(lambda: swarm.leader(*others) not in (None, first), PATIENCE_S)
        newer = others[0].watch.leader
        assert newer is not None
        assert newer.mandate is not None
        await first.watch.learn(newer.mandate)
        assert first.election.term == newer.term


async def test_a_member_shows_an_old_leader_that_it_is_over(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Only the worker reaches both sides: the old leader's own links to the others are cut."""
    async with memory_swarm(tmp_path, 3, others=1) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        others = [node for node in swarm.nodes[:3] if node is not first]
        swarm.cut([first], others)
        worker = swarm.nodes[3]
        await eventually(lambda: swarm.leader(worker, *others) not in (None, first), PATIENCE_S)
        term = worker.watch.term
        await eventually(lambda: first.watch.term == first.election.term == term)
        assert not first.leads
        assert first.election.status().why.startswith("1 of 3")


async def test_a_leader_hands_over_when_it_is_asked_to(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 2) as swarm:
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        first = swarm.leader()
        assert first is not None
        await trio.sleep(1)
        await first.election.hand_over()
        assert await eventually(lambda: swarm.leader() not in (None, first), PATIENCE_S) < 1
        second = swarm.leader()
        assert second is not None
        await swarm.all_may_lead(first, eligible=False)
        await trio.sleep(1)
        await second.election.hand_over()
        await eventually(lambda: isinstance(second.heard[-1], HandOverFailed))
        assert second.leads


# -- hostile peers -----------------------------------------------------------------------------------------------------


async def test_hostile_frames_cost_their_sender_its_stream_and_nothing_else(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, _ = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: leader.leads)
        assert swarm.hub is not None
        attacker = swarm.hub.join()
        await attacker.connect(leader.network.addresses[0])
        fake = Vote(leader.store.need().swarm, 1, 9, attacker.peer_id, leader.peer, bytes(64))
        mandate = Mandate(Certificate.of([fake]), leader.store.need().backbone)
        frames = [
            (election_service.PROTOCOL, encode_frame([99])),
            (election_service.PROTOCOL, encode_frame({"kind": "vote"})),
            (election_service.PROTOCOL, b"\xff" * 64),
            (leadership_messages.PROTOCOL, encode_frame({"kind": "knows"})),
            (leadership_messages.PROTOCOL, b"\xff" * 64),
            (leadership_messages.PROTOCOL, encode(Proof(None, ()))),
            (leadership_messages.PROTOCOL, encode(Knows(0, bytes(16), b"")) + encode(Proof(mandate, ()))),
            (leadership_messages.PROTOCOL, encode(Knows(0, bytes(16), b"")) + encode(Proof(None, (b"x",)))),
        ]
        for protocol, frame in frames:
            stream = await attacker.open_stream(leader.network.peer_id, protocol)
            await stream.send(frame)
            with pytest.raises(NetworkError), trio.fail_after(30):
                await read_all(stream)
        assert leader.election.status().peer_mistakes == 3
        assert leader.voice.peer_mistakes == 5
        assert leader.network.statistics().handler_errors == 0
        assert leader.leads
        assert leader.election.term == 1


async def read_all(stream: Stream) -> None:
    while True:
        await stream.receive_exactly(1)


async def test_a_peer_that_floods_is_read_slowly_and_elections_go_on(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 3) as swarm:
        assert swarm.hub is not None
        attacker = swarm.hub.join()
        victim = swarm.nodes[0]
        await attacker.connect(victim.network.addresses[0])
        stream = await attacker.open_stream(victim.network.peer_id, election_service.PROTOCOL)
        frame = encode_frame(to_plain(PreVoteRequest(3, 1, None, None)))

        async def flood() -> None:
            while True:
                await stream.send(frame * 100)

        swarm.nursery.start_soon(flood)
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() is not None) < 3
        assert victim.election.status().peer_mistakes == 0


async def test_a_liar_among_the_backbone_is_no_leader(tmp_path: Path, autojump_clock: MockClock) -> None:
    """It says that it leads, in the term that is certified for another one."""
    async with memory_swarm(tmp_path, 3, others=1) as swarm:
        worker = swarm.nodes[3]
        await swarm.all_may_lead()
        await eventually(lambda: swarm.leader() is not None)
        leader = swarm.leader()
        liar = next(node for node in swarm.nodes[:3] if node is not leader)
        word = liar.voice.word
        liar.voice.word = lambda: replace(word(), leader=liar.peer)  # type: ignore[method-assign]
        await trio.sleep(3)
        assert worker.watch.leader is not None
        assert leader is not None
        assert worker.sees(leader)
        await leader.stop()
        await trio.sleep(0.5)
        assert worker.watch.leader is None
        with pytest.raises(UncertifiedTerm):
            worker.watch.check(leader.watch.term, liar.peer)


async def test_who_cannot_be_reached_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with memory_swarm(tmp_path, 1, others=1) as swarm:
        leader, worker = swarm.nodes
        await swarm.all_may_lead()
        await eventually(lambda: worker.sees(leader))
        await leader.stop()
        await eventually(lambda: worker.watch.leader is None, 0.1)
        await eventually(lambda: "nobody listens there" in worker.watch.reason)
        assert worker.watch.reason.startswith(f"no backbone peer can be reached: {leader.peer}: /memory/")


# -- the real network --------------------------------------------------------------------------------------------------


async def test_three_on_libp2p_replace_a_lost_leader(tmp_path: Path) -> None:
    with quick_keys():
        async with trio.open_nursery() as nursery:
            swarm = Swarm.make(tmp_path, 3, 1, None, nursery)
            closed = [await start_real(swarm, node) for node in swarm.nodes]
            await swarm.all_may_lead()
            await eventually(lambda: swarm.leader() is not None, PATIENCE_S)
            first = swarm.leader()
            assert first is not None
            first.voice.set_record(b"x" * 300_000)
            backbone = swarm.nodes[:3]
            await eventually(lambda: all(node.watch.record is not None for node in backbone), PATIENCE_S)
            first.scope.cancel()
            closed[swarm.nodes.index(first)].set()
            rest = [node for node in swarm.nodes if node is not first]
            await eventually(lambda: swarm.leader(*rest) not in (None, first), PATIENCE_S)
            assert swarm.leader(*rest).watch.term >= 2  # type: ignore[union-attr]
            nursery.cancel_scope.cancel()


async def start_real(swarm: Swarm, node: Node) -> trio.Event:
    """Run a node on loopback until the event is set."""
    close = trio.Event()

    async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_libp2p_network(node.identity, ("/ip4/127.0.0.1/tcp/0",)) as network:
            await swarm.start(node, network=network)
            task_status.started()
            await close.wait()
            node.scope.cancel()

    await swarm.nursery.start(run)
    return close
