"""Gossip: everybody hears, whatever the shape of the swarm, and the budget of a hundred peers holds.

The router is py-libp2p's own; in memory it runs on simulated time with the very streams and RPCs of the real network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmnode.limits import NEIGHBOURS_WANTED
from swarmnode.net import limits
from swarmnode.net.gossip import MessageTooLarge, Verdict
from swarmnode.net.gossip_router import OFFERS, TURN_BEATS
from swarmnode.net.interface import PeerId
from swarmnode.net.memory_gossip import GossipHub, MemoryGossip
from tests.gossip_tools import BYTES_MAX, LISTENERS, TOPIC, Listener, chatter, memory_listeners, meshed, spent
from tests.net_tools import eventually

CHAIN = [(index, index + 1) for index in range(4)]

both = pytest.mark.parametrize("listeners", LISTENERS.values(), ids=LISTENERS)


async def settled(listeners: list[Listener]) -> None:
    await eventually(lambda: all(each.gossip.statistics().mesh > 0 for each in listeners))


# -- on both networks --------------------------------------------------------------------------------------------------


@both
async def test_everybody_hears_once_however_far_away(listeners: Callable[..., Any]) -> None:
    async with listeners(5, CHAIN) as nodes:
        await settled(nodes)
        nodes[0].gossip.publish(TOPIC, b"from one end")
        nodes[4].gossip.publish(TOPIC, b"from the other")
        await eventually(lambda: [len(each.heard) for each in nodes] == [1, 2, 2, 2, 1])
        assert nodes[0].heard == [b"from the other"]
        assert nodes[4].heard == [b"from one end"]
        await trio.sleep(0.5)
        assert [len(each.heard) for each in nodes] == [1, 2, 2, 2, 1]
        assert sum(each.gossip.statistics().handler_errors for each in nodes) == 0


@both
async def test_only_what_is_good_is_passed_on(listeners: Callable[..., Any]) -> None:
    async with listeners(3, [(0, 1), (1, 2)]) as nodes:
        await settled(nodes)
        for data in (b"bad signature", b"old news", b"good"):
            nodes[0].gossip.publish(TOPIC, data)
        await eventually(lambda: b"good" in nodes[2].heard)
        assert sorted(nodes[1].heard) == [b"bad signature", b"good", b"old news"]
        assert nodes[2].heard == [b"good"]
        middle = nodes[1].gossip.statistics()
        assert (middle.refused, middle.ignored, middle.relayed) == (1, 1, 1)


@both
async def test_a_handler_that_raises_harms_nobody(listeners: Callable[..., Any]) -> None:
    async with listeners(3, [(0, 1), (1, 2)]) as nodes:
        await settled(nodes)
        nodes[1].raises = True
        nodes[0].gossip.publish(TOPIC, b"first")
        await eventually(lambda: nodes[1].gossip.statistics().handler_errors == 1)
        nodes[1].raises = False
        nodes[0].gossip.publish(TOPIC, b"second")
        await eventually(lambda: nodes[2].heard == [b"second"])


@both
async def test_a_newcomer_gets_the_last_seconds_messages(listeners: Callable[..., Any]) -> None:
    async with listeners(3, [(0, 1)]) as nodes:
        await settled(nodes[:2])
        nodes[0].gossip.publish(TOPIC, b"before")
        await eventually(lambda: nodes[1].heard == [b"before"])
        await nodes[2].network.connect(nodes[1].network.addresses[0])
        await eventually(lambda: nodes[2].heard == [b"before"])


@both
async def test_what_is_too_large_is_an_error_before_it_is_sent(listeners: Callable[..., Any]) -> None:
    async with listeners(2, [(0, 1)]) as nodes:
        await settled(nodes)
        with pytest.raises(MessageTooLarge, match="8,195 bytes"):
            nodes[0].gossip.publish(TOPIC, b"x" * (BYTES_MAX + 1))
        with pytest.raises(KeyError):
            nodes[0].gossip.publish("another", b"x")
        with pytest.raises(ValueError, match="cannot listen"):
            await nodes[0].gossip.subscribe(TOPIC, nodes[0].hear, bytes_max=1)
        with pytest.raises(ValueError, match="no message has"):
            await nodes[0].gossip.subscribe("t", nodes[0].hear, bytes_max=limits.GOSSIP_MESSAGE_BYTES_MAX + 1)
        nodes[0].gossip.publish(TOPIC, b"x" * BYTES_MAX)
        await eventually(lambda: len(nodes[1].heard) == 1)


@both
async def test_a_neighbour_that_leaves_and_comes_back_hears_again(listeners: Callable[..., Any]) -> None:
    async with listeners(2, [(0, 1)]) as nodes:
        await settled(nodes)
        await nodes[0].network.disconnect(nodes[1].network.peer_id)
        await eventually(lambda: not nodes[0].gossip.neighbours() and not nodes[1].gossip.neighbours())
        nodes[0].gossip.publish(TOPIC, b"unheard, but in the cache")
        await nodes[0].network.connect(nodes[1].network.addresses[0])
        await eventually(lambda: len(nodes[1].heard) == 1)
        await settled(nodes)
        nodes[1].gossip.publish(TOPIC, b"back")
        await eventually(lambda: nodes[0].heard == [b"back"])


# -- many nodes, on simulated time -------------------------------------------------------------------------------------

PEERS = 100


async def test_a_hundred_peers_hear_each_other_within_the_budget(autojump_clock: MockClock) -> None:
    """The first is a hub: all the others are its neighbours, most of them outside of its mesh."""
    chance, seconds = random.Random(7), 9.0
    async with memory_listeners(PEERS, meshed(chance, PEERS, 1, NEIGHBOURS_WANTED), chance) as nodes:
        for second in range((OFFERS + 1) * TURN_BEATS):  # nobody is new after that
            nodes[1].gossip.publish(TOPIC, b"%d" % second)
            await trio.sleep(1)
        before = [node.gossip.statistics() for node in nodes]
        sent = await chatter(nodes, chance, seconds)
        after = [node.gossip.statistics() for node in nodes]
        await trio.sleep(3)

        assert after[0].neighbours == PEERS - 1
        assert max(spent(*each, seconds) for each in zip(before, after, strict=True)) < 8_000, "sent by one peer"
        received = [late.bytes_received - early.bytes_received for early, late in zip(before, after, strict=True)]
        assert max(received) / seconds < 8_000, "received by one peer"
        assert limits.GOSSIP_DEGREE_LOW <= sum(each.mesh for each in after) / PEERS <= limits.GOSSIP_DEGREE_HIGH
        assert len(sent) >= 0.8 * PEERS * seconds / 15
        for data in sent:
            heard = [node.times[data] for node in nodes if data in node.times]
            assert len(heard) == PEERS - 1
            assert max(heard) - sent[data] < 3
        assert sum(each.handler_errors + each.outbox_dropped + each.refused for each in after) == 0


@pytest.mark.parametrize("backbone", [1, 3])
async def test_workers_that_can_reach_the_backbone_alone_hear_everything(
    backbone: int, autojump_clock: MockClock
) -> None:
    chance = random.Random(3)
    async with memory_listeners(PEERS, meshed(chance, PEERS, backbone, backbone), chance) as nodes:
        await trio.sleep(5)
        sent = await chatter(nodes, chance, 6)
        await trio.sleep(6)
        for data in sent:
            assert sum(data in node.times for node in nodes) == PEERS - 1


async def test_meshes_grow_together_again_after_a_partition(autojump_clock: MockClock) -> None:
    half = [(a, b) for a in range(6) for b in range(a)]
    other = [(a + 6, b + 6) for a, b in half]
    async with memory_listeners(12, half + other) as nodes:
        await settled(nodes)
        nodes[0].gossip.publish(TOPIC, b"one half")
        await trio.sleep(2)
        assert not any(node.heard for node in nodes[6:])
        await nodes[0].network.connect(nodes[6].network.addresses[0])
        await nodes[1].network.connect(nodes[7].network.addresses[0])
        await trio.sleep(2)
        nodes[11].gossip.publish(TOPIC, b"both halves")
        await trio.sleep(TURN_BEATS + 3)
        assert all(b"both halves" in node.heard for node in nodes[:11])


# -- the memory implementation -----------------------------------------------------------------------------------------


class Ear:
    def __init__(self, gossip: MemoryGossip) -> None:
        self.gossip = gossip
        self.heard: list[bytes] = []

    def hear(self, data: bytes, neighbour: PeerId) -> Verdict:
        self.heard.append(data)
        return Verdict.REFUSE if data == b"bad" else Verdict.PASS_ON


async def test_memory_gossip_hands_over_at_once_or_loses() -> None:
    hub = GossipHub()
    ears = [Ear(hub.join(PeerId(name))) for name in "abc"]
    for ear in ears:
        await ear.gossip.subscribe("t", ear.hear, bytes_max=10)
    ears[0].gossip.publish("t", b"one")
    hub.loses = lambda sender, receiver: receiver == "b"
    ears[0].gossip.publish("t", b"bad")
    hub.leave(PeerId("c"))
    ears[0].gossip.publish("t", b"three")
    assert [ear.heard for ear in ears] == [[], [b"one"], [b"one", b"bad"]]
    assert ears[2].gossip.statistics().refused == 1
    assert ears[0].gossip.neighbours() == ("b",)
    assert ears[2].gossip.neighbours() == ()
    with pytest.raises(MessageTooLarge):
        ears[0].gossip.publish("t", b"x" * 11)
    with pytest.raises(KeyError):
        ears[0].gossip.publish("u", b"x")
    with pytest.raises(ValueError, match="cannot listen"):
        await ears[0].gossip.subscribe("t", ears[0].hear, bytes_max=1)
