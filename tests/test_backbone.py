"""Who leads, found out by whole members of a swarm: elections on real files, and what everybody hears of them.

With trio's MockClock times are exact; the real network has its turn at the end.
"""

from __future__ import annotations

from pathlib import Path

import trio
from trio.testing import MockClock

from tests.backbone_nodes import eventually, memory_swarm

AutoClock = MockClock


async def test_a_swarm_of_one_leads_itself_as_soon_as_it_may(tmp_path: Path, autojump_clock: AutoClock) -> None:
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


async def test_three_elect_one_and_every_member_hears_of_it(tmp_path: Path, autojump_clock: AutoClock) -> None:
    async with memory_swarm(tmp_path, 3, others=2) as swarm:
        await swarm.all_may_lead()
        assert await eventually(lambda: swarm.leader() is not None) < 3
        leader = swarm.leader()
        assert leader in swarm.nodes[:3]


async def test_a_lost_leader_is_replaced_within_three_seconds_for_everybody(
    tmp_path: Path, autojump_clock: AutoClock
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
