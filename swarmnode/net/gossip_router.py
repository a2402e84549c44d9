"""py-libp2p's GossipSub router with its surroundings: which neighbours get messages at once, which hear of them.

The router keeps the mesh, prunes and grafts, answers what neighbours ask for. It thinks that it talks to py-libp2p's
Pubsub, of which `Surroundings` is what it uses. Left out are parts that grow without bound, act on peers' word, or are
off by default anyway: peer exchange, scores, spam protection (which drops silently), adaptive parameters (which set a
heartbeat of a minute), IDONTWANT (as large as a heartbeat), signed address records in each RPC.

Telling neighbours outside the mesh which messages there are (IHAVE) goes by turns here. The original draws some at
random each second, none of those that it pruned lately: where workers behind NATs know nobody but a few backbone peers,
most of them would hear little. Here a neighbour that is new, just left the mesh, or asks for messages hears of every
one within a few seconds. One that leaves some such offers unanswered is served elsewhere; now and then it is sounded
with a few messages that it should have by then, and asks if it has not. A hub has a hundred such neighbours, so there
is a limit to how many it sounds a second.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import trio
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.net import limits
from swarmnode.net.gossip_outbox import Outbox
from swarmnode.net.interface import PeerId

PROTOCOL = str(PROTOCOL_ID_V11)
ID_BYTES = 8
"""Of a message's hash. To make others drop a message, one would have to find another with its id within seconds."""

TURN_BEATS = 3
OFFERS = 7  # unanswered in a row. Who hears one peer's heartbeats from here alone asks every 15 s, in every fifth turn
_SOUNDING_BEATS = 4 * TURN_BEATS  # a neighbour that does not ask is not sounded more often
_OFFERED_BEATS = slice(1, 1 + TURN_BEATS)  # what is newer is on its way: it would be asked for in vain
_SETTLED_BEATS = slice(2, 6)  # what everybody had time to get, and will have time to ask for
_HISTORY_BEATS = 8  # longer than a turn, by a slow link's time to ask
_ASKED_MAX = 2
_BACK_OFF_SECONDS_MAX = 600


def message_id(message: rpc_pb2.Message) -> bytes:
    """What makes two messages the same: topic and content."""
    return hashlib.sha256(message.topicIDs[0].encode() + b"\0" + message.data).digest()[:ID_BYTES]


class SeenMessages:
    """Ids of the messages that came in the last minutes."""

    def __init__(self) -> None:
        self._times: dict[bytes, float] = {}

    def has(self, seen_id: bytes) -> bool:
        return seen_id in self._times

    def add(self, seen_id: bytes, now: float) -> None:
        self._times[seen_id] = now
        if len(self._times) > limits.GOSSIP_SEEN_MAX:
            del self._times[next(iter(self._times))]

    def forget(self, now: float) -> None:
        """Drop what is older than GOSSIP_SEEN_SECONDS."""
        for seen_id, then in list(self._times.items()):
            if now - then <= limits.GOSSIP_SEEN_SECONDS:
                return
            del self._times[seen_id]


class Surroundings:
    """The part of py-libp2p's Pubsub that its router uses. Peers are PeerIds: the router only compares them."""

    host = None

    def __init__(self) -> None:
        self.peer_topics: dict[str, set[PeerId]] = {}
        self.peer_queues: dict[PeerId, Outbox] = {}
        self.seen_messages = SeenMessages()

    @property
    def peers(self) -> Mapping[PeerId, Outbox]:
        return self.peer_queues

    def topics_of(self, peer: PeerId) -> list[str]:
        return [topic for topic, peers in self.peer_topics.items() if peer in peers]

    def forget(self, peer: PeerId) -> None:
        for topic in self.topics_of(peer):
            self.unsubscribe(peer, topic)

    def unsubscribe(self, peer: PeerId, topic: str) -> None:
        peers = self.peer_topics.get(topic, set())
        peers.discard(peer)
        if not peers:
            self.peer_topics.pop(topic, None)


class _Cache(MessageCache):  # type: ignore[misc]
    """The last seconds' messages, by our ids."""

    def put(self, msg: rpc_pb2.Message) -> None:
        entry = CacheEntry(message_id(msg), msg.topicIDs)
        if entry.mid not in self.msgs:
            self.msgs[entry.mid] = msg
            self.history[0].append(entry)

    def aged(self, topic: str, beats: slice) -> list[bytes]:
        """The messages that came so many heartbeats ago, the newest first."""
        return [each.mid for beat in self.history[beats] for each in reversed(beat) if topic in each.topics]


class Router(GossipSub):  # type: ignore[misc]
    """See the file's head. Its `heartbeat` runs for ever."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(
            [PROTOCOL_ID_V11],
            degree=limits.GOSSIP_DEGREE,
            degree_low=limits.GOSSIP_DEGREE_LOW,
            degree_high=limits.GOSSIP_DEGREE_HIGH,
            heartbeat_interval=1,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
            do_px=False,
        )
        self.scorer = None
        self.mcache = _Cache(TURN_BEATS, _HISTORY_BEATS)
        self.attach(surroundings)
        self._beat = 0
        self._offers: dict[PeerId, int] = {}  # that a neighbour may still leave unanswered
        self._meshed: dict[str, set[PeerId]] = {}  # at the last heartbeat
        self._sounded: dict[str, dict[PeerId, int]] = {}  # by topic: in which beat
        self._asked: dict[bytes, int] = {}

    def receivers(self, topic: str) -> set[PeerId]:
        """The neighbours that get a message of the topic at once."""
        return set(self.mesh.get(topic, ()))

    def first_receivers(self, topic: str) -> set[PeerId]:
        """The same for an own message: all neighbours if few of them are in the mesh, or it might go nowhere."""
        mesh = self.receivers(topic)
        return mesh if len(mesh) >= self.degree_low else mesh | self.pubsub.peer_topics.get(topic, set())

    # --- IHAVE and IWANT ---

    def gossip_heartbeat(self) -> dict[PeerId, dict[str, list[bytes]]]:
        """Which neighbours hear of which messages in this heartbeat."""
        self._beat += 1
        told: dict[PeerId, dict[str, list[bytes]]] = {}
        for topic, mesh in self.mesh.items():
            others = self.pubsub.peer_topics.get(topic, set()).intersection(self.pubsub.peers) - mesh
            for peer in self._meshed.get(topic, set()) & others:
                self.feed(peer)
            self._meshed[topic] = set(mesh)
            hungry = {peer for peer in others if self._offers.get(peer, 0)}
            for peer in hungry:
                if _turn(peer) == self._beat % TURN_BEATS and (offered := self.mcache.aged(topic, _OFFERED_BEATS)):
                    told.setdefault(peer, {})[topic] = offered
                    self._offers[peer] -= 1
            for peer in self._to_sound(topic, others - hungry):
                if settled := self.mcache.aged(topic, _SETTLED_BEATS)[: limits.GOSSIP_SOUNDING_IDS]:
                    told.setdefault(peer, {})[topic] = settled
        return told

    def _to_sound(self, topic: str, fed: set[PeerId]) -> list[PeerId]:
        """Those of the neighbours that were not sounded for longest."""
        before = self._sounded.get(topic, {})
        now = self._sounded[topic] = {peer: before.get(peer, self._beat) for peer in fed}
        due = sorted((beat, peer) for peer, beat in now.items() if self._beat - beat >= _SOUNDING_BEATS)
        chosen = [peer for _, peer in due[: limits.GOSSIP_SOUNDED_MAX]]
        now.update(dict.fromkeys(chosen, self._beat))
        return chosen

    def feed(self, peer: PeerId) -> None:
        """The neighbour is new, left the mesh, or asked for messages: it may depend on being told of them."""
        self._offers[peer] = OFFERS

    def worth_asking(self, offered: bytes) -> bool:
        """Whether to ask a neighbour for a message that it offers. Two are asked, in case that the first one lies."""
        if self.pubsub.seen_messages.has(offered) or self._asked.get(offered, 0) >= _ASKED_MAX:
            return False
        self._asked[offered] = self._asked.pop(offered, 0) + 1
        if len(self._asked) > limits.GOSSIP_SEEN_MAX:
            del self._asked[next(iter(self._asked))]
        return True

    def remove_peer(self, peer_id: PeerId) -> None:
        super().remove_peer(peer_id)
        self._offers.pop(peer_id, None)

    def in_mesh(self, peer: PeerId) -> Callable[[str], bool]:
        return lambda topic: peer in self.mesh.get(topic, ())

    def recent(self, topic: str) -> Iterator[tuple[bytes, rpc_pb2.Message]]:
        """The last seconds' messages, for a newcomer."""
        for cached_id in self.mcache.window(topic):
            message = self.mcache.get(cached_id)
            if message is not None:
                yield cached_id, message

    def forget_old(self) -> None:
        """Drop back-offs that are over."""
        now = trio.current_time()
        for topic, peers in list(self.back_off.items()):
            self.back_off[topic] = {peer: until for peer, until in peers.items() if until > now}

    # --- The original's, on the monotonic clock: the system's may be set ---

    def _add_back_off(self, peer: PeerId, topic: str, is_unsubscribe: bool, backoff_duration: int = 0) -> None:
        usual_s = self.unsubscribe_back_off if is_unsubscribe else self.prune_back_off
        until = trio.current_time() + min(backoff_duration or usual_s, _BACK_OFF_SECONDS_MAX)
        peers = self.back_off.setdefault(topic, {})
        peers[peer] = max(until, peers.get(peer, 0))

    def _check_back_off(self, peer: PeerId, topic: str) -> bool:
        return bool(self.back_off.get(topic, {}).get(peer, 0) > trio.current_time())

    # --- The original's rates, of which the node has stricter ones, and repeats back-off's work ---

    def _check_ihave_rate_limit(self, peer_id: PeerId, topic: str) -> bool:
        return True

    def _check_iwant_rate_limit(self, peer_id: PeerId) -> bool:
        return True

    def _check_graft_flood_protection(self, peer_id: PeerId, topic: str) -> bool:
        return True


def _turn(peer: PeerId) -> int:
    return zlib.crc32(peer.encode()) % TURN_BEATS


def clean_control(
    control: rpc_pb2.ControlMessage,
    topics: Iterable[str],
    worth_asking: Callable[[bytes], bool],
    may_send: Callable[[bytes], bool],
) -> tuple[rpc_pb2.ControlMessage, int]:
    """What of a neighbour's control message the router may see, and how many entries it may not.

    Only topics of this node; no peers to connect to; of offered messages those `worth_asking` for; none that the
    neighbour asked for before (`may_send`), or it could make this node repeat its cache for ever.
    """
    known = frozenset(topics)
    clean = rpc_pb2.ControlMessage()
    most = limits.GOSSIP_CONTROL_MAX
    for graft in control.graft[:most]:
        if graft.topicID in known:
            clean.graft.add(topicID=graft.topicID)
    for prune in control.prune[:most]:
        if prune.topicID in known:
            clean.prune.add(topicID=prune.topicID, backoff=prune.backoff)
    for ihave in control.ihave[:most]:
        if ihave.topicID in known:
            clean.ihave.add(topicID=ihave.topicID, messageIDs=filter(worth_asking, _ids(ihave.messageIDs)))
    for iwant in control.iwant[:most]:
        clean.iwant.add(messageIDs=filter(may_send, _ids(iwant.messageIDs)))
    return clean, _entries(control) - _entries(clean)


def _ids(sent: Sequence[bytes]) -> Iterator[bytes]:
    return (each for each in sent[: limits.GOSSIP_IDS_MAX] if len(each) == ID_BYTES)


def _entries(control: rpc_pb2.ControlMessage) -> int:
    return len(control.graft) + len(control.prune) + len(control.ihave) + len(control.iwant)
