"""One node leads, stops, and leads again: everything that others open streams for goes on, and says who leads."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from capabilities.errors import NoLeader
from swarmnode import limits
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leadership import KnownLeader
from swarmnode.member_messages import PROTOCOL as MEMBER
from swarmnode.member_messages import Refuse, decode_from_leader, encode
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import open_memory_hub
from swarmnode.prompt_frames import decode_reply, encode_ask
from swarmnode.prompt_messages import PROTOCOL as PROMPT
from swarmnode.prompt_messages import Failed
from swarmnode.wire import read_frame
from tests.fault_tools import hello
from tests.leading_swarm import Heard, ask, leading_swarm
from tests.net_tools import eventually

SETTINGS = """
[swarm]
workers_expected = 2
[leader]
context_tokens = 256
parallel = 2
"""


async def test_a_node_leads_in_several_terms(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, SETTINGS) as swarm:
        models = []
        for term in (3, 4, 9):
            async with swarm.led(term) as leader:
                await swarm.until_ready()
                await swarm.check(ask(f"req-{term}"))
                models.append(leader.active.model if leader.active else None)
                heard = Heard()
                with trio.move_on_after(5):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(swarm.hear, ask(f"long-{term}", max_tokens=200), heard)
                        await eventually(lambda heard=heard: len(heard.tokens) > 3)  # type: ignore[misc]
                        nursery.cancel_scope.cancel()
                current = swarm.hands[0].worker.epochs.current
                assert current is not None
                assert current.is_called(term, 1)
            assert leader.active is None
            assert leader.members.present() == []
        assert models[0] is models[1] is models[2]  # the trunk was loaded once
        loads = [hand.worker.membership.state.phase for hand in swarm.hands]
        assert loads == ["loaded", "loaded"]


async def test_an_answer_under_way_ends_with_its_leader(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, SETTINGS) as swarm:
        heard = Heard()
        async with trio.open_nursery() as nursery:
            async with swarm.led(1):
                await swarm.until_ready()
                nursery.start_soon(swarm.hear, ask("req-1", max_tokens=200), heard)
                await eventually(lambda: len(heard.tokens) > 3)
            await eventually(lambda: heard.end is not None)
        assert heard.error.type == "no_leader"


async def test_who_does_not_lead_says_who_does() -> None:
    other = KnownLeader(PeerId("12D3KooWOther"), 7)
    known: list[KnownLeader | None] = [None]
    async with open_memory_hub() as hub:
        network, peer = hub.join(), hub.join()
        LeaderProtocols(network, lambda: known[0])
        await peer.connect(network.addresses[0])

        async def told() -> list[NoLeader]:
            stream = await peer.open_stream(network.peer_id, MEMBER)
            await stream.send(encode(hello("w")))
            refused = decode_from_leader(await read_frame(stream, limits.MEMBER_FRAME))
            assert isinstance(refused, Refuse)
            stream = await peer.open_stream(network.peer_id, PROMPT)
            await stream.send(encode_ask(ask("req-1")))
            failed = decode_reply(await read_frame(stream, limits.PROMPT_REPLY))
            assert isinstance(failed, Failed)
            assert isinstance(refused.error, NoLeader)
            assert isinstance(failed.error, NoLeader)
            return [refused.error, failed.error]

        for error in await told():
            assert error.message == "this peer does not lead"
        known[0] = other
        for error in await told():
            assert (error.details["peer"], error.details["term"]) == (other.peer, 7)


async def test_a_node_leads_once_at_a_time(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, SETTINGS, workers=0) as swarm, swarm.led(1):
        await trio.testing.wait_all_tasks_blocked()
        with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
            async with swarm.led(2):
                await trio.sleep(1)
