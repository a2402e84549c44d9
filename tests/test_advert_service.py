"""Nodes that say what they are and hear of each other: on real libp2p, with hostile neighbours, and over long times."""

from __future__ import annotations

import contextlib
import os
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from trio.testing import MockClock

from capabilities.advert import ADVERT_BYTES_MAX
from capabilities.advert_content import Phase, Policy
from capabilities.errors import PeerMistake
from capabilities.held_experts import HeldExperts
from scheduler.advert_book import Ignored, PeerState, advert_message
from scheduler.advert_findings import FindingKind
from swarmnode.identity import Identity
from swarmnode.net.interface import StreamReset
from swarmnode.net.memory import open_memory_hub
from swarmnode.swarm.advert_exchange import PROTOCOL, decode_known, encode_known
from swarmnode.swarm.adverts import topic_of
from swarmnode.swarm.dht import AdvertDirectory
from swarmnode.wire import encode_frame
from tests.advert_nodes import SpeakingNode, connect_chain, memory_nodes, real_node
from tests.advert_tools import MODEL, SWARM, Speaking
from tests.gossip_tools import Listener, attacker, message
from tests.net_tools import eventually
from tests.patience import LOADED

TOPIC = topic_of(SWARM)


# -- real libp2p -------------------------------------------------------------------------------------------------------


async def test_five_nodes_in_a_row_hear_each_other_within_seconds_and_of_changes_and_goodbyes() -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(real_node(phase=Phase.READY)) for _ in range(5)]
        await connect_chain(nodes)
        await eventually(lambda: all(node.knows(*(set_without(nodes, node))) for node in nodes), LOADED * 6)
        first, last = nodes[0], nodes[4]
        view = last.service.peers()[first.peer]
        assert view.advert.content == first.content
        assert sum(node.service.statistics().ignored.get(Ignored.SIGNATURE, 0) for node in nodes) == 0

        await first.service.leave()
        await eventually(lambda: last.states()[first.peer] is PeerState.GONE, LOADED * 4)
        assert last.changes[-1].after is PeerState.GONE
        assert all(node.gossip.statistics().handler_errors == 0 for node in nodes)


def set_without(nodes: list[SpeakingNode], one: SpeakingNode) -> list[SpeakingNode]:
    return [node for node in nodes if node is not one]


async def test_a_newcomer_knows_the_swarm_as_soon_as_it_is_connected() -> None:
    async with real_node() as one, real_node() as other:
        await other.network.connect(one.network.addresses[0])
        await eventually(lambda: one.knows(other) and other.knows(one))
        async with real_node() as newcomer:
            await newcomer.network.connect(one.network.addresses[0])
            await eventually(lambda: newcomer.knows(one, other))
            await eventually(lambda: one.knows(newcomer) and other.knows(newcomer))
            await eventually(lambda: newcomer.service.statistics().exchanges >= 1)


async def test_a_newcomer_finds_holders_in_the_dht_that_it_never_heard() -> None:
    """The holder does not gossip at all: nobody can have heard of it."""
    held = (HeldExperts.of(MODEL, {20: range(8)}),)
    async with real_node(dht=True, speaks=False) as holder, real_node(dht=True, held=()) as keeper:
        await holder.network.connect(keeper.network.addresses[0])
        assert holder.dht is not None
        await eventually(lambda: holder.dht.statistics().known_peers > 0)
        speaking = Speaking(holder.peer)
        unsigned = speaking.make(1, held=held)
        advert = replace(unsigned, signature=holder.identity.sign(unsigned.payload))
        await AdvertDirectory(holder.dht, SWARM, holder.peer).publish(advert)
        async with real_node(dht=True, held=()) as newcomer:
            await newcomer.network.connect(keeper.network.addresses[0])
            await eventually(lambda: newcomer.knows(keeper))
            assert newcomer.dht is not None
            await eventually(lambda: newcomer.dht.statistics().known_peers > 0)
            assert holder.peer not in newcomer.states()
            (found,) = await newcomer.service.find_holders(MODEL, 20)
            assert (found.advert.peer, found.verified) == (holder.peer, False)
            assert found.advert.content.held == held
            assert await newcomer.service.find_holders(MODEL, 21) == ()
            assert await newcomer.service.find_holders("77" * 32, 20) == ()


async def test_holders_that_are_heard_are_verified_and_named_once() -> None:
    async with real_node(dht=True) as one, real_node(dht=True) as other:
        await other.network.connect(one.network.addresses[0])
        await eventually(lambda: one.knows(other) and other.knows(one))
        (found,) = [each for each in await other.service.find_holders(MODEL, 3) if each.advert.peer == one.peer]
        assert found.verified


async def test_a_node_with_few_connections_makes_more_and_says_whom_it_cannot_reach() -> None:
    async with real_node() as hub, real_node() as one, real_node(addresses=("/ip4/127.0.0.1/tcp/1/p2p/x",)) as other:
        dead = (f"/ip4/127.0.0.1/tcp/1/p2p/{other.peer}",)
        other.content = replace(other.content, addresses=dead)
        await one.network.connect(hub.network.addresses[0])
        await other.network.connect(hub.network.addresses[0])
        await eventually(lambda: one.knows(hub, other) and other.knows(hub, one))
        assert not await one.service._neighbourhood.reach(one.service.peers()[other.peer])
        assert await other.service._neighbourhood.reach(other.service.peers()[one.peer])
        assert one.peer in other.network.connected_peers()
        (finding,) = one.service.findings()
        assert (finding.kind, finding.peer) == (FindingKind.UNREACHABLE, other.peer)
        one.service.reached(other.network.peer_id)
        assert one.service.findings() == ()


async def test_a_peer_that_was_dialed_before_it_ran_is_not_called_unreachable() -> None:
    async with real_node() as one, real_node() as other:
        one.service.unreachable(other.network.peer_id, "/ip4/127.0.0.1/tcp/1", "Connection refused")
        await other.network.connect(one.network.addresses[0])
        await eventually(lambda: one.knows(other) and other.knows(one))
        assert one.service.findings() == ()
        one.service.unreachable(other.network.peer_id, "/ip4/127.0.0.1/tcp/1", "Connection refused")
        assert [finding.peer for finding in one.service.findings()] == [other.peer], "it runs, and does not answer"


# -- hostile neighbours ------------------------------------------------------------------------------------------------


async def test_hostile_adverts_are_ignored_and_counted_and_go_no_further() -> None:
    async with real_node() as node, real_node() as witness:
        await witness.network.connect(node.network.addresses[0])
        await eventually(lambda: node.knows(witness) and witness.knows(node))
        listener = Listener(node.network, node.gossip)
        async with attacker(listener) as hostile:
            mine = Identity.generate()
            victim = node.service.peers()[witness.peer].advert
            speaking = Speaking(mine.peer_id)
            own = speaking.make(5)
            forged = replace(victim, sequence=victim.sequence + 1, signature=mine.sign(victim.payload))
            outsider = replace(own, content=replace(own.content, membership=b""))
            outsider = replace(outsider, signature=mine.sign(outsider.payload))
            other_swarm = replace(own, swarm="77" * 32)
            sent = [
                (b"\0" + os.urandom(200), None),
                (b"\1\0" + os.urandom(200), Ignored.MALFORMED),
                (b"\1\1" + os.urandom(100), Ignored.MALFORMED),
                (advert_message(forged), Ignored.SIGNATURE),
                (advert_message(own), Ignored.SIGNATURE),
                (advert_message(outsider), Ignored.NOT_A_MEMBER),
                (advert_message(replace(other_swarm, signature=mine.sign(other_swarm.payload))), Ignored.OTHER_SWARM),
                (advert_message(victim), None),
                (b"\7\0 a later format", Ignored.OTHER_FORMAT),
            ]
            before = witness.gossip.statistics().received
            await hostile.send(rpc_pb2.RPC(publish=[message(data, TOPIC) for data, _ in sent]))
            await hostile.send(rpc_pb2.RPC(publish=[message(b"x" * (ADVERT_BYTES_MAX + 3), TOPIC)]))
            ignored = node.service.statistics
            await eventually(lambda: ignored().ignored.get("other_format", 0) == 1)
            for _, reason in sent:
                assert reason is None or ignored().ignored[reason.value] >= 1, reason
            await eventually(lambda: node.gossip.statistics().stray == 1)
            assert node.gossip.statistics().duplicates >= 1, "the replay of what was just heard"
            assert mine.peer_id not in node.states()
            await trio.sleep(0.6)
            assert witness.gossip.statistics().received - before <= 1
            node.content = replace(node.content, name="still here")
            node.service.changed()
            await eventually(lambda: witness.service.peers()[node.peer].advert.content.name == "still here")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 8,
        encode_frame([True], b"\1"),
        encode_frame([True], encode_known({"x" * 60: 1}) * 2_000),
        encode_frame({"no": "list"}),
        encode_frame([True], b"\0" * 9),
        pytest.param(os.urandom(100), id="random bytes"),
    ],
)
async def test_junk_in_an_exchange_harms_nobody(data: bytes) -> None:
    async with real_node() as node, real_node() as hostile:
        await hostile.network.connect(node.network.addresses[0])
        stream = await hostile.network.open_stream(node.network.peer_id, PROTOCOL)
        with contextlib.suppress(StreamReset):
            await stream.send(data)
        await trio.sleep(0.1)
        await eventually(lambda: node.knows(hostile))
        assert node.network.statistics().handler_errors == 0


def test_known_peers_are_read_strictly() -> None:
    known = {"PeerA": 7, "PeerB": 0}
    assert decode_known(encode_known(known)) == known
    for junk in (b"\1", encode_known({"": 1}), encode_known({"x" * 65: 1}), encode_known({"a": 2**60})):
        with pytest.raises(PeerMistake):
            decode_known(junk)


# -- long stories, on simulated time -----------------------------------------------------------------------------------


async def test_a_day_in_the_life_of_a_swarm(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 6) as nodes:
        await connect_chain(nodes)
        await trio.sleep(40)
        assert all(node.knows(*set_without(nodes, node)) for node in nodes)
        assert all(len(node.network.connected_peers()) >= 4 for node in nodes), "neighbours found each other"

        sent = nodes[0].service.statistics()
        await trio.sleep(600)
        after = nodes[0].service.statistics()
        assert 1 <= after.adverts_sent - sent.adverts_sent <= 3
        assert 36 <= after.heartbeats_sent - sent.heartbeats_sent <= 41
        assert all(node.changes[-1].after is PeerState.READY for node in nodes)

        worker = nodes[3]
        worker.content = replace(worker.content, policy=Policy(draining=True))
        await trio.sleep(15)
        assert all(node.states()[worker.peer] is PeerState.DRAINING for node in set_without(nodes, worker))

        worker.cancel.cancel()  # it vanishes: its process hangs
        await trio.sleep(70)
        assert all(node.states()[worker.peer] is PeerState.SUSPECT for node in set_without(nodes, worker))
        await trio.sleep(70)
        assert all(node.states()[worker.peer] is PeerState.GONE for node in set_without(nodes, worker))
        assert all(node.knows(nodes[0]) for node in nodes[1:] if node is not worker)


async def test_a_newcomer_need_not_wait_for_the_next_adverts(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 12) as nodes:
        await connect_chain(nodes[:11])
        await trio.sleep(100)  # no message cache holds their adverts any more
        newcomer = nodes[11]
        await newcomer.network.connect(nodes[5].network.addresses[0])
        await trio.sleep(1)
        assert newcomer.knows(*nodes[:11])
        assert newcomer.service.statistics().exchanges == 1
        await trio.sleep(4)
        assert all(node.knows(newcomer) for node in nodes[:11])


async def test_small_changes_of_memory_are_no_news(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 2) as (one, other):
        await other.network.connect(one.network.addresses[0])
        await trio.sleep(30)
        sent = one.service.statistics().adverts_sent
        for step in range(100):
            one.content = replace(one.content, memory_used=2**33 + step * 1_000)
            await trio.sleep(1)
        assert one.service.statistics().adverts_sent == sent
        one.content = replace(one.content, memory_used=2**34)
        await trio.sleep(3)
        assert one.service.statistics().adverts_sent == sent + 1


async def test_a_lost_advert_is_fetched_when_its_heartbeat_comes(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 2) as (one, other):
        await other.network.connect(one.network.addresses[0])
        await trio.sleep(30)
        publish, lost = one.gossip.publish, []

        def lose(topic: str, data: bytes) -> None:
            if data[1] == 0:
                lost.append(data)
            else:
                publish(topic, data)

        one.gossip.publish = lose  # type: ignore[method-assign]
        one.content = replace(one.content, name="renamed")
        await trio.sleep(20)
        assert len(lost) == 1
        assert other.service.peers()[one.peer].advert.content.name == "renamed"


async def test_two_daemons_with_one_identity_are_named_by_both_and_by_others(autojump_clock: MockClock) -> None:
    identity = Identity.generate()
    async with open_memory_hub() as hub, memory_nodes(hub, 3, [identity, identity]) as (one, copy, witness):
        await connect_chain([one, witness, copy])
        await trio.sleep(180)
        for node in (one, copy, witness):
            cloned = [each.peer for each in node.service.findings() if each.kind is FindingKind.CLONED_IDENTITY]
            assert cloned == [identity.peer_id]
        sent = one.service.statistics().adverts_sent
        await trio.sleep(600)
        assert one.service.statistics().adverts_sent - sent <= 6, "the two do not drive each other"


async def test_a_restart_is_no_clone_and_goes_on_with_higher_numbers(autojump_clock: MockClock) -> None:
    identity, one_day_back = Identity.generate(), {1: -86_400.0}  # numbers begin with the clock: these are too low
    async with (
        open_memory_hub() as hub,
        memory_nodes(hub, 3, [identity, identity], one_day_back) as (before, after, witness),
        trio.open_nursery() as nursery,
    ):
        await connect_chain([before, witness, after])
        await trio.sleep(60)
        before.cancel.cancel()
        await trio.sleep(10)
        nursery.start_soon(after.run)
        await trio.sleep(60)
        view = witness.service.peers()[identity.peer_id]
        assert view.silent_s < 20
        assert view.advert.instance == after.service.advert().instance  # type: ignore[union-attr]
        for node in (after, witness):
            assert FindingKind.CLONED_IDENTITY not in [each.kind for each in node.service.findings()]
        assert FindingKind.SKEWED_CLOCK in [each.kind for each in witness.service.findings()]
        nursery.cancel_scope.cancel()


async def test_after_a_long_absence_too_a_node_jumps_past_its_own_higher_number(autojump_clock: MockClock) -> None:
    identity, one_day_back = Identity.generate(), {1: -86_400.0}
    async with (
        open_memory_hub() as hub,
        memory_nodes(hub, 3, [identity, identity], one_day_back) as (before, after, witness),
        trio.open_nursery() as nursery,
    ):
        await connect_chain([before, witness])
        await trio.sleep(20)
        before.cancel.cancel()
        await trio.sleep(1_000)
        assert witness.states() == {identity.peer_id: PeerState.GONE}
        nursery.start_soon(after.run)
        await connect_chain([witness, after])
        await trio.sleep(20)
        assert witness.states() == {identity.peer_id: PeerState.READY}
        nursery.cancel_scope.cancel()


async def test_who_is_banned_is_forgotten(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 2) as (one, other):
        await other.network.connect(one.network.addresses[0])
        await trio.sleep(5)
        assert other.knows(one)
        other.banned.add(one.peer)
        other.service.recheck()
        assert other.changes[-1].after is PeerState.GONE
        await trio.sleep(60)
        assert one.peer not in other.states()
        assert (
            other.service.statistics().ignored["not_a_member"] > 0
            or other.service.statistics().ignored["unknown_peer"] > 0
        )


async def test_an_advert_that_cannot_be_made_is_reported_and_the_node_lives(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, memory_nodes(hub, 2) as (one, other):
        await other.network.connect(one.network.addresses[0])
        await trio.sleep(5)
        good = one.content
        one.content = replace(good, membership=b"m" * 1_000)
        await trio.sleep(30)
        assert other.service.peers()[one.peer].advert.content == good
        one.content = replace(good, name="again")
        await trio.sleep(30)
        assert other.service.peers()[one.peer].advert.content.name == "again"
