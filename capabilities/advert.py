"""Signed words of a peer about itself: the full advert, and the heartbeat that says that the advert still holds.

An advert is signed by the peer's own key and never exceeds 8 KB; a heartbeat takes some 150 bytes and refers to the
advert by its sequence. `instance` is drawn anew at each start of a daemon: one peer id from which two instances speak
in turn is a copied identity. `stamp_s` is what the peer's clock said; receivers compare it with theirs to name skewed
clocks, and never to judge an advert's age, which runs on their own monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Final

from capabilities.advert_content import CONTENT_FIELDS, AdvertContent, AdvertFields, Phase, Policy
from capabilities.backbone import Sign, Verify
from capabilities.errors import PeerMistake
from capabilities.packing import SIGNATURE_BYTES, SWARM_ID_CHARS, Plain, decode, pack

ADVERT_BYTES_MAX: Final = 8 * 1024
HEARTBEAT_BYTES_MAX: Final = 192
INSTANCE_BYTES: Final = 4
SWARM_PREFIX_BYTES: Final = 8
"""Heartbeats carry so much of the swarm's id: enough to tell swarms apart, and no more is asked of it."""

LIFETIME_S_MIN: Final = 30
LIFETIME_S_MAX: Final = 900
LOAD_MAX: Final = 1_000
SEQUENCE_MAX: Final = 2**53 - 1
_FORMAT: Final = 1
_PHASES: Final = tuple(Phase)


@dataclass(frozen=True)
class Advert:
    """A peer's signed word. Its lifetime runs from when the receiver last heard the peer."""

    swarm: str
    peer: str
    instance: bytes
    sequence: int
    stamp_s: int
    lifetime_s: int
    content: AdvertContent
    signature: bytes

    @classmethod
    def make(
        cls,
        swarm: str,
        peer: str,
        instance: bytes,
        sequence: int,
        stamp_s: int,
        lifetime_s: int,
        content: AdvertContent,
        sign: Sign,
    ) -> Advert:
        """Sign one. If it would exceed ADVERT_BYTES_MAX, it leaves out which experts are held.

        Raises:
            ValueError: no advert may have this content.
        """
        unsigned = cls(swarm, peer, instance, sequence, stamp_s, lifetime_s, content, b"")
        if len(unsigned.payload) > ADVERT_BYTES_MAX - SIGNATURE_BYTES:
            unsigned = replace(unsigned, content=replace(content, held=()))
        made = replace(unsigned, signature=sign(unsigned.payload))
        try:
            return cls.from_bytes(made.to_bytes())
        except PeerMistake as mistake:
            raise ValueError(mistake.message) from None

    @cached_property
    def payload(self) -> bytes:
        """What the peer signs."""
        return pack(("swarmnode advert", _FORMAT, *self._numbers, *self.content.to_plain()))

    @cached_property
    def digest(self) -> bytes:
        """Tells two adverts apart that have one sequence."""
        return sha256(self.payload).digest()

    @property
    def _numbers(self) -> tuple[Plain, ...]:
        return (self.swarm, self.peer, self.instance, self.sequence, self.stamp_s, self.lifetime_s)

    def verify(self, verify: Verify) -> None:
        """PeerMistake unless its peer signed it."""
        if not verify(self.peer, self.payload, self.signature):
            raise PeerMistake(f"not signed by {self.peer}: its advert {self.sequence}")

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return pack((_FORMAT, *self._numbers, *self.content.to_plain(), self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Advert:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "advert", ADVERT_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Advert:
        fields = AdvertFields(value, 8 + CONTENT_FIELDS, "advert")
        fields.format(_FORMAT)
        return cls(
            swarm=fields.swarm(),
            peer=fields.peer("peer"),
            instance=fields.blob("instance", INSTANCE_BYTES, INSTANCE_BYTES),
            sequence=fields.integer("sequence", SEQUENCE_MAX, 1),
            stamp_s=fields.integer("stamp"),
            lifetime_s=fields.integer("lifetime", LIFETIME_S_MAX, LIFETIME_S_MIN),
            content=AdvertContent.read(fields),
            signature=fields.signature(),
        )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The peer lives, and its advert of that sequence holds but for what is here. `load` is in thousandths.

    `counter` counts the heartbeats of an advert, from 1. `leaving`: the last one, the peer says goodbye.
    """

    swarm_prefix: bytes
    peer: str
    instance: bytes
    sequence: int
    counter: int
    phase: Phase
    policy: Policy
    leaving: bool
    load: int
    signature: bytes

    @classmethod
    def make(
        cls,
        swarm: str,
        peer: str,
        instance: bytes,
        sequence: int,
        counter: int,
        *,
        phase: Phase,
        policy: Policy,
        load: int,
        sign: Sign,
        leaving: bool = False,
    ) -> Heartbeat:
        prefix = swarm_prefix(swarm)
        unsigned = cls(prefix, peer, instance, sequence, counter, phase, policy, leaving, load, b"")
        return replace(unsigned, signature=sign(unsigned.payload()))

    def payload(self) -> bytes:
        """What the peer signs."""
        return pack(("swarmnode heartbeat", _FORMAT, *self._plain()))

    def _plain(self) -> tuple[Plain, ...]:
        state = (_PHASES.index(self.phase), self.policy.to_flags(), self.leaving, self.load)
        return (self.swarm_prefix, self.peer, self.instance, self.sequence, self.counter, *state)

    def verify(self, verify: Verify) -> None:
        """PeerMistake unless its peer signed it."""
        if not verify(self.peer, self.payload(), self.signature):
            raise PeerMistake(f"not signed by {self.peer}: its heartbeat")

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, *self._plain(), self.signature))

    @classmethod
    def from_bytes(cls, data: object) -> Heartbeat:
        """PeerMistake unless these are the canonical bytes of one. The signature is not checked."""
        return decode(data, "heartbeat", HEARTBEAT_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Heartbeat:
        fields = AdvertFields(value, 11, "heartbeat")
        fields.format(_FORMAT)
        return cls(
            swarm_prefix=fields.blob("swarm", SWARM_PREFIX_BYTES, SWARM_PREFIX_BYTES),
            peer=fields.peer("peer"),
            instance=fields.blob("instance", INSTANCE_BYTES, INSTANCE_BYTES),
            sequence=fields.integer("sequence", SEQUENCE_MAX, 1),
            counter=fields.integer("counter", SEQUENCE_MAX, 1),
            phase=_PHASES[fields.integer("phase", len(_PHASES) - 1)],
            policy=Policy.from_flags(fields.integer("policy", 7)),
            leaving=fields.flag("leaving"),
            load=fields.integer("load", LOAD_MAX),
            signature=fields.signature(),
        )


def swarm_prefix(swarm: str) -> bytes:
    """The first bytes of a swarm's id (64 hexadecimal digits)."""
    if len(swarm) != SWARM_ID_CHARS:
        raise ValueError(f"a swarm's id has {SWARM_ID_CHARS} digits, not {len(swarm)}")
    return bytes.fromhex(swarm)[:SWARM_PREFIX_BYTES]
