"""Peers that sign adverts without real keys, and adverts of every kind, for tests of what is made of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from capabilities.advert import Advert, Heartbeat
from capabilities.advert_content import AdvertContent, BackendAdvert, Phase, Policy, Role, WeightSpeed
from capabilities.errors import PeerMistake
from capabilities.held_experts import HeldExperts
from capabilities.precision import MeasuredPrecision, Precision
from scheduler.advert_book import AdvertBook, advert_message, heartbeat_message
from scheduler.own_word import OwnWord

SWARM = "5a" * 32
MODEL = "ab" * 32
START = 1_000.0
WALL = 1_800_000_000.0


def sign_as(peer: str, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=peer.encode(), digest_size=64).digest()


def verify(peer: str, data: bytes, signature: bytes) -> bool:
    return sign_as(peer, data) == signature


def admit_all(advert: Advert) -> None:
    return


def admit_certified(advert: Advert) -> None:
    if advert.content.membership != b"member":
        raise PeerMistake("no member")


def usual_content(**changes: Any) -> AdvertContent:
    """What a worker with one backend and shards of a 48-layer model says."""
    precision = MeasuredPrecision(Precision.F16, Precision.F16, Precision.F32)
    weights = tuple(WeightSpeed(name, "0123456789abcdef", 12_345) for name in ("F16", "Q4_K", "Q6_K", "Q8_0"))
    content = AdvertContent(
        name="laptop-of-ann",
        roles=(Role.BACKBONE, Role.WORKER),
        version="0.1.0",
        wire=2,
        phase=Phase.READY,
        addresses=("/ip4/192.168.1.7/tcp/4100/p2p/12D3KooWDtLgRHdCpFmP2UcdWrLqcWPfz8VFDvhDcUHiTJgpE7Ax",),
        backends=(BackendAdvert("ggml-cpu", "AMD Ryzen 7 5800X", precision, precision, True, True, weights),),
        memory_budget=2**34,
        memory_used=2**33,
        held=(HeldExperts.of(MODEL, dict.fromkeys(range(48), range(10, 42))),),
        host="0123456789abcdef",
        membership=b"member",
    )
    return replace(content, **changes)


@dataclass
class Speaking:
    """A peer that speaks; one object is one instance of its daemon."""

    peer: str
    instance: bytes = b"inst"
    sequence: int = 0
    beat: int = 0
    content: AdvertContent = field(default_factory=usual_content)
    lifetime_s: int = 120
    clock_s: float = WALL
    swarm: str = SWARM

    def make(self, sequence: int, **changes: Any) -> Advert:
        content = replace(self.content, **changes)
        stamp_s = int(self.clock_s)
        return Advert.make(self.swarm, self.peer, self.instance, sequence, stamp_s, self.lifetime_s, content, self.sign)

    def advert(self, **changes: Any) -> bytes:
        """The next advert, as a gossip message."""
        self.sequence, self.beat = self.sequence + 1, 0
        return advert_message(self.make(self.sequence, **changes))

    def heartbeat(self, *, leaving: bool = False, policy: Policy | None = None, load: int = 0) -> bytes:
        """The next heartbeat, as a gossip message."""
        self.beat += 1
        return heartbeat_message(
            Heartbeat.make(
                self.swarm,
                self.peer,
                self.instance,
                self.sequence,
                self.beat,
                phase=self.content.phase,
                policy=self.content.policy if policy is None else policy,
                load=load,
                sign=self.sign,
                leaving=leaving,
            )
        )

    def sign(self, data: bytes) -> bytes:
        return sign_as(self.peer, data)


def new_book(me: str = "Me", admit: Any = admit_all) -> AdvertBook:
    return AdvertBook(SWARM, OwnWord(me, b"mine", 100), verify, admit, START)
