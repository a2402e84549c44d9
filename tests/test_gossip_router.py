"""Whom a hub tells of messages: neighbours outside of its mesh that may depend on it, and of the others a few a second.

The router alone, its heartbeats one after the other, without streams.
"""

from __future__ import annotations

from libp2p.pubsub.pb import rpc_pb2

from scheduler.advert_book import SUSPECT_S
from swarmnode.net import limits
from swarmnode.net.gossip_outbox import Outbox
from swarmnode.net.gossip_router import OFFERS, TURN_BEATS, Router, Surroundings, message_id
from swarmnode.net.interface import PeerId

TOPIC = "t"
MESSAGES_PER_BEAT = 7


class Hub:
    """A router all of whose neighbours listen, with seven new messages in each heartbeat."""

    def __init__(self, neighbours: int, meshed: int = 0) -> None:
        self.surroundings = Surroundings()
        self.router = Router(self.surroundings)
        self.peers = [PeerId(f"peer {number}") for number in range(neighbours)]
        self.surroundings.peer_topics[TOPIC] = set(self.peers)
        self.surroundings.peer_queues = {peer: Outbox(lambda topic: False, message_id) for peer in self.peers}
        self.router.mesh[TOPIC] = set(self.peers[:meshed])
        self.latest: list[bytes] = []
        self._count = 0

    def beat(self, messages: int = MESSAGES_PER_BEAT) -> dict[PeerId, list[bytes]]:
        """Who is told of which messages."""
        self.latest = []
        for _ in range(messages):
            self._count += 1
            message = rpc_pb2.Message(data=b"%d" % self._count, topicIDs=[TOPIC])
            self.router.mcache.put(message)
            self.latest.append(message_id(message))
        told = self.router.gossip_heartbeat()
        self.router.mcache.shift()
        return {peer: topics[TOPIC] for peer, topics in told.items()}


def fed_hub(neighbours: int, meshed: int = 0) -> Hub:
    """All neighbours were new, and asked for nothing."""
    hub = Hub(neighbours, meshed)
    for peer in hub.peers:
        hub.router.feed(peer)
    for _ in range((OFFERS + 1) * TURN_BEATS):  # in the first turn nothing is old enough to be offered
        hub.beat()
    return hub


def test_neighbours_that_do_not_ask_are_sounded_in_turn_with_a_few_messages() -> None:
    hub = fed_hub(neighbours=99, meshed=4)
    sounded: list[PeerId] = []
    for _ in range(int(SUSPECT_S / 2)):
        told = hub.beat()
        assert len(told) <= limits.GOSSIP_SOUNDED_MAX
        assert all(0 < len(ids) <= limits.GOSSIP_SOUNDING_IDS for ids in told.values())
        assert not any(set(ids) & set(hub.latest) for ids in told.values()), "not everybody can have these"
        sounded += told
    beats = int(SUSPECT_S / 2)
    while set(sounded) != set(hub.peers[4:]):
        sounded += hub.beat()
        beats += 1
        assert beats < SUSPECT_S, "who hears nothing more would suspect everybody"


def test_who_asks_is_told_of_everything() -> None:
    hub = fed_hub(neighbours=40)
    hungry = hub.peers[7]
    hub.router.feed(hungry)
    offers: list[list[bytes]] = []
    for _ in range(OFFERS * TURN_BEATS):
        told = hub.beat()
        assert not set(hub.latest) & set(told.get(hungry, [])), "this is on its way, and would be asked for in vain"
        offers += [ids for peer, ids in told.items() if peer == hungry]
    assert [len(ids) for ids in offers] == [TURN_BEATS * MESSAGES_PER_BEAT] * OFFERS
    assert len(set().union(*offers)) == sum(map(len, offers)), "each message once"
    assert all(len(hub.beat().get(hungry, [])) <= limits.GOSSIP_SOUNDING_IDS for _ in range(TURN_BEATS))


def test_an_offer_of_nothing_does_not_count() -> None:
    hub = Hub(neighbours=1)
    hub.router.feed(hub.peers[0])
    for _ in range(3 * OFFERS * TURN_BEATS):
        assert not hub.beat(messages=0)
    offers = [ids for _ in range(2 * TURN_BEATS) for ids in hub.beat().values()]
    assert max(map(len, offers)) == TURN_BEATS * MESSAGES_PER_BEAT


def test_who_leaves_the_mesh_may_depend_on_being_told() -> None:
    hub = fed_hub(neighbours=40)
    peer = hub.peers[7]
    hub.router.mesh[TOPIC].add(peer)
    assert peer not in hub.beat()
    hub.router.mesh[TOPIC].discard(peer)
    offered = [ids for _ in range(TURN_BEATS) for each, ids in hub.beat().items() if each == peer]
    assert [len(ids) for ids in offered] == [TURN_BEATS * MESSAGES_PER_BEAT]
