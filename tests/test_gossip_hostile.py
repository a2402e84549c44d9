"""Neighbours that send junk, floods, tricks: they lose the stream or wait, are counted, and nobody falls over."""

from __future__ import annotations

import os

import pytest
import trio
import trio.lowlevel
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.net import limits
from swarmnode.net.gossip_router import ID_BYTES, message_id
from tests.gossip_tools import BYTES_MAX, TOPIC, Listener, attacker, framed, libp2p_listeners, message
from tests.net_tools import eventually
from tests.patience import PATIENCE_S


async def check_service(nodes: list[Listener], data: bytes = b"honest") -> None:
    """The honest still hear each other, soon."""
    with trio.fail_after(PATIENCE_S):
        await eventually(lambda: nodes[0].gossip.statistics().mesh > 0)
        nodes[0].gossip.publish(TOPIC, data)
        await eventually(lambda: data in nodes[1].heard)
    assert all(node.gossip.statistics().handler_errors == 0 for node in nodes)


JUNK = {
    "no protobuf": framed(b"\xff\xff\xff\xff junk"),
    "an RPC over the limit": b"\xff\xff\xff\x7f",
    "a length without end": b"\xff" * 20,
    "too many messages": framed(rpc_pb2.RPC(publish=[message(b"%d" % i) for i in range(600)]).SerializeToString()),
    "text that is none": framed(b"\x12\x05\x22\x03\xff\xfe\xfd"),
    "random bytes": framed(os.urandom(5_000)),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_junk_costs_the_stream_and_is_counted(junk: bytes) -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        await hostile.send_bytes(junk)
        await eventually(
            lambda: (
                nodes[0].gossip.statistics().junk + nodes[0].gossip.statistics().stray > 0
                or nodes[0].network.statistics().peer_mistakes > 0
            )
        )
        await check_service(nodes)
        assert nodes[0].heard == []


async def test_empty_and_half_rpcs_change_nothing() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        await hostile.send(*[rpc_pb2.RPC()] * 20)
        await hostile.send_bytes(b"\x10half")
        await check_service(nodes)


async def test_authors_signatures_and_numbers_of_a_message_mean_nothing() -> None:
    """They cannot raise anything, are not passed on, and do not make a second message of the first."""
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        await check_service(nodes)
        for junk in (b"", b"\0", b"not a peer id", os.urandom(1_000)):
            sent = rpc_pb2.Message(data=b"one", topicIDs=[TOPIC], from_id=junk, seqno=junk, signature=junk, key=junk)
            await hostile.send(rpc_pb2.RPC(publish=[sent], senderRecord=junk))
        await eventually(lambda: b"one" in nodes[1].heard)
        await eventually(lambda: nodes[0].gossip.statistics().duplicates == 3)
        assert nodes[0].heard.count(b"one") == 1
        cached = nodes[0].gossip._router.mcache.get(message_id(message(b"one")))
        assert cached.SerializeToString() == message(b"one").SerializeToString()


async def test_messages_of_other_topics_or_sizes_are_dropped_unseen() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        both = rpc_pb2.Message(data=b"x", topicIDs=[TOPIC, TOPIC])
        none = rpc_pb2.Message(data=b"x")
        large = message(b"x" * (BYTES_MAX + 1))
        await hostile.send(rpc_pb2.RPC(publish=[message(b"x", "other"), both, none, large]))
        await eventually(lambda: nodes[0].gossip.statistics().stray == 4)
        assert nodes[0].heard == []
        await check_service(nodes)


async def test_a_flood_is_read_slowly_and_the_honest_are_heard() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile, trio.open_nursery() as nursery:

        async def flood() -> None:
            number = 0
            while True:
                number += 1
                rpc = rpc_pb2.RPC(publish=[message(b"bad%d-%d" % (number, index)) for index in range(50)])
                await hostile.send(rpc)

        began = trio.current_time()
        nursery.start_soon(flood)
        await eventually(lambda: nodes[0].gossip.statistics().throttled_s > 0)
        for index in range(3):
            await check_service(nodes, b"honest%d" % index)
        await trio.sleep(0.3)
        took = trio.current_time() - began
        most = limits.GOSSIP_MESSAGES_BURST + 50 + limits.GOSSIP_MESSAGES_PER_SECOND * took
        assert nodes[0].gossip.statistics().refused <= most
        assert all(not data.startswith(b"bad") for data in nodes[1].heard)
        nursery.cancel_scope.cancel()


async def test_a_flood_is_not_forgiven_by_connecting_anew() -> None:
    async with libp2p_listeners(1, []) as nodes, attacker(nodes[0]) as hostile:
        await hostile.send(rpc_pb2.RPC(publish=[message(b"bad%d" % index) for index in range(250)]))
        await eventually(lambda: nodes[0].gossip.statistics().refused == 250)
        await hostile.network.disconnect(nodes[0].network.peer_id)
        await eventually(lambda: not nodes[0].network.connected_peers())
        await hostile.network.connect(nodes[0].network.addresses[0])
        stream = await hostile.network.open_stream(nodes[0].network.peer_id, "/meshsub/1.1.0")
        for number in range(4):
            await stream.send(framed(rpc_pb2.RPC(publish=[message(b"bad again%d" % number)]).SerializeToString()))
        await trio.sleep(0.3)
        assert nodes[0].gossip.statistics().refused <= 251


async def test_subscriptions_are_bounded() -> None:
    async with libp2p_listeners(1, []) as nodes, attacker(nodes[0]) as hostile:
        many = [rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"topic{index}") for index in range(30)]
        long = rpc_pb2.RPC.SubOpts(subscribe=True, topicid="x" * 1_000)
        await hostile.send(rpc_pb2.RPC(subscriptions=[long, *many]))
        await eventually(lambda: nodes[0].gossip.statistics().control_dropped >= 1 + 30 - limits.GOSSIP_TOPICS_MAX)
        surroundings = nodes[0].gossip._surroundings
        assert len(surroundings.peer_topics) == limits.GOSSIP_TOPICS_MAX
        away = [rpc_pb2.RPC.SubOpts(subscribe=False, topicid=f"topic{index}") for index in range(30)]
        await hostile.send(rpc_pb2.RPC(subscriptions=away))
        await eventually(lambda: len(surroundings.peer_topics) == 0)
        await hostile.send(rpc_pb2.RPC(subscriptions=many))
        await eventually(lambda: len(surroundings.peer_topics) == limits.GOSSIP_TOPICS_MAX)
        await hostile.network.disconnect(nodes[0].network.peer_id)
        await eventually(lambda: not surroundings.peer_topics)


async def test_control_about_unknown_topics_leaves_nothing_behind() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        control = rpc_pb2.ControlMessage()
        for index in range(40):
            control.graft.add(topicID=f"g{index}")
            control.prune.add(topicID=f"p{index}", backoff=2**40)
            control.ihave.add(topicID=f"h{index}", messageIDs=[b"x" * ID_BYTES])
            control.iwant.add(messageIDs=[b"short"])
        await hostile.send(*[rpc_pb2.RPC(control=control)] * 5)
        await eventually(lambda: nodes[0].gossip.statistics().control_dropped >= 600)
        router = nodes[0].gossip._router
        assert set(router.back_off) <= {TOPIC}
        assert set(router.mesh) == {TOPIC}
        await check_service(nodes)


async def test_a_prune_names_no_peers_to_connect_to_and_does_not_last_for_ever() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        control = rpc_pb2.ControlMessage()
        prune = control.prune.add(topicID=TOPIC, backoff=2**60)
        prune.peers.add(peerID=nodes[1].network.peer_id.encode(), signedPeerRecord=b"junk")
        await hostile.send(rpc_pb2.RPC(control=control))
        back_off = nodes[0].gossip._router.back_off
        await eventually(lambda: hostile.network.peer_id in back_off.get(TOPIC, {}))
        assert back_off[TOPIC][hostile.network.peer_id] <= trio.current_time() + 600
        await check_service(nodes)


async def test_a_neighbour_that_asks_again_and_again_gets_each_message_once() -> None:
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0]) as hostile:
        large = b"L" * 8_000
        nodes[0].gossip.publish(TOPIC, large)
        control = rpc_pb2.ControlMessage()
        control.iwant.add(messageIDs=[message_id(message(large))] * 100)
        await hostile.send(*[rpc_pb2.RPC(control=control)] * 50)
        await eventually(lambda: len(hostile.received) > len(large))
        await trio.sleep(1)
        assert hostile.received.count(large) == 1
        assert len(hostile.received) < len(large) + 1_000


async def test_offers_of_messages_that_do_not_exist_are_asked_for_once_and_bounded() -> None:
    async with libp2p_listeners(1, []) as nodes, attacker(nodes[0]) as hostile:
        ids = [os.urandom(ID_BYTES) for _ in range(1_000)]
        control = rpc_pb2.ControlMessage()
        control.ihave.add(topicID=TOPIC, messageIDs=ids)
        for _ in range(4):  # longer apart than an outbox waits
            await hostile.send(*[rpc_pb2.RPC(control=control)] * 5)
            await trio.sleep(limits.GOSSIP_RELAY_SECONDS_MAX + 0.1)
        assert ids[0] in hostile.received
        assert hostile.received.count(ids[0]) <= 2
        assert len(hostile.received) <= 2 * limits.GOSSIP_IDS_MAX * (ID_BYTES + 2) + 500


async def test_a_neighbour_that_never_reads_costs_a_bounded_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GOSSIP_OUTBOX_BYTES_MAX", 100_000)
    async with libp2p_listeners(2, [(0, 1)]) as nodes, attacker(nodes[0], reads=False) as hostile:
        await hostile.send(rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC)]))
        peer = hostile.network.peer_id
        await eventually(lambda: nodes[0].gossip._router.in_mesh(peer)(TOPIC))
        for index in range(60):  # 480 KB, of which a stream takes 256 KiB before anybody reads
            nodes[0].gossip.publish(TOPIC, b"%04d" % index + bytes(8_000))
            await trio.sleep(0.005)
        outbox = nodes[0].gossip._surroundings.peer_queues[peer]
        assert outbox._bytes <= 100_000
        assert outbox.dropped > 5
        await eventually(lambda: any(data.startswith(b"0059") for data in nodes[1].heard))
        await check_service(nodes)
