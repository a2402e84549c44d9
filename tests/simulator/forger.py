"""What strangers and mad members invent: terms, votes, certificates, backbones, orders.

A stranger is a member of the swarm without a seat in the backbone; it signs with its own key and repeats what it has
seen. A mad member says things about terms in its own name that are not so, but signs no false vote: members are trusted
not to (two votes of one member in one term are two leaders, whoever counts them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from capabilities.backbone import BackboneSet, Member, Stored
from capabilities.certificates import Certificate, Mandate, Vote
from scheduler.election_messages import (
    BackboneUpdate,
    Heartbeat,
    HeartbeatReply,
    Message,
    PreVoteReply,
    PreVoteRequest,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from tests.election_tools import SWARM, sign_as
from tests.simulator.election import Order, Show
from tests.simulator.network import Network
from tests.simulator.world import World

STRANGER = "M"
SEEN_MAX = 64
CHANNELS = ("election", "orders", "answers")  # whose messages it knows how to spoil


class Forger:
    """Sends one forged message at a time; `forged` tells them from honest ones."""

    def __init__(self, world: World, network: Network, backbone: list[str], workers: list[str]) -> None:
        self.name = STRANGER
        self._random = world.chance("forger")
        self._network = network
        self._backbone = backbone
        self._workers = workers
        self._seen: list[Any] = []
        self._forged: dict[int, Any] = {}
        network.attach(self)

    def deliver(self, sender: str, channel: str, message: Any) -> None:
        """Nobody needs to send it anything."""

    def forged(self, message: Any) -> bool:
        return id(message) in self._forged

    def overhear(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        """The network's tap."""
        if channel in CHANNELS and self._random.random() < 0.05:
            self._seen.append((channel, message))
            del self._seen[:-SEEN_MAX]

    def strike(self) -> None:
        """Forge one message."""
        random = self._random
        if random.random() < 0.3:  # forged in a member's name, or said by it in madness
            member = random.choice(self._backbone)
            self._send(member, random.choice(self._backbone), "election", self._mad_message())
        elif self._seen and random.random() < 0.4:
            channel, message = random.choice(self._seen)
            receivers = self._workers if channel == "orders" else self._backbone
            self._send(self.name, random.choice(receivers), channel, _spoiled(random, message))
        elif random.random() < 0.5:
            mandate = self._invented_mandate()
            order = random.choice((Show(mandate), Order(mandate.term, 0), Order(random.randrange(1, 99), 0)))
            sender = self.name if isinstance(order, Show) else random.choice([self.name, *self._backbone])
            self._send(sender, random.choice(self._workers), "orders", order)
        else:
            self._send(self.name, random.choice(self._backbone), "election", self._invented_message())

    def order(self, seen: Any) -> None:
        """Repeat an order of a leader that was seen, in another name, perhaps in another term."""
        random = self._random
        term = seen.term + random.choice((0, 0, 1, 1_000))
        sender = random.choice([self.name, *self._backbone])
        self._send(sender, random.choice(self._workers), "dispatch", replace(seen, term=term))

    def _send(self, sender: str, receiver: str, channel: str, message: Any) -> None:
        self._forged[id(message)] = message
        self._network.send(sender, receiver, channel, message)

    def _number(self) -> int:
        random = self._random
        return random.choice((random.randrange(1, 40), random.randrange(1, 2_000), 2**62))

    def _mad_message(self) -> Message:
        """In a member's own name: bare numbers, which must change nothing."""
        term, number = self._number(), self._random.randrange(1_000)
        return self._random.choice(
            (
                Heartbeat(1, term, number, None),
                HeartbeatReply(1, term, number, True, True, None),
                PreVoteRequest(1, term, None, None),
                PreVoteReply(1, self._random.randrange(1, 40), False, None, None),
                VoteRequest(1, term, self._random.random() < 0.5, None, None),
                VoteReply(1, self._random.randrange(1, 40), None, None),
                TimeoutNow(1, term),
            )
        )

    def _invented_mandate(self) -> Mandate:
        random = self._random
        leader = random.choice([self.name, *self._backbone])
        term = self._number()
        voters = random.sample(self._backbone, random.randrange(1, len(self._backbone) + 1))
        votes = [Vote.cast(SWARM, 1, term, leader, voter, sign_as(self.name)) for voter in voters]
        members = [Member(peer, bytes(16)) for peer in sorted({*self._backbone[:8], self.name})]
        backbone = BackboneSet(SWARM, 1, b"", tuple(members), b"")
        return Mandate(Certificate.of(votes), replace(backbone, signature=sign_as(self.name)(backbone.payload)))

    def _invented_message(self) -> Message:
        random, mandate = self._random, self._invented_mandate()
        vote = mandate.certificate.votes[0]
        word = Stored.make(mandate.backbone, self.name, 0, sign_as(self.name))
        return random.choice(
            (
                Heartbeat(1, mandate.term, 1, mandate),
                VoteRequest(1, mandate.term + 1, True, vote, None),
                VoteReply(1, mandate.term, vote, mandate),
                BackboneUpdate(None, mandate.backbone, (word,)),
                TimeoutNow(1, mandate.term),
            )
        )


def _spoiled(random: Any, message: Any) -> Any:
    """A message that was seen, with a higher number in it, or as it was."""
    mandate = getattr(message, "mandate", None)
    if mandate is not None and random.random() < 0.7:
        certificate = mandate.certificate
        worse = random.choice(
            (
                replace(certificate, term=certificate.term + 1),
                replace(certificate, leader=STRANGER),
                replace(certificate, votes=certificate.votes[:1]),
                replace(certificate, backbone_version=certificate.backbone_version + 1),
            )
        )
        return replace(message, mandate=Mandate(worse, mandate.backbone))
    if hasattr(message, "term") and random.random() < 0.5:
        return replace(message, term=message.term + random.randrange(1, 5))
    return replace(message)
