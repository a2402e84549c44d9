"""What leaders hold of peers, as far as this node has heard: one signed verdict a peer, the newest.

A verdict counts by the leader's signature and by the mandate of its term, which comes with it; so nobody needs to trust
who brought it. Of two on one peer the greater (term, sequence) stands, whatever the order in which they come. Who is
banned, or is no longer in the backbone, may have led once and speaks no more; what it said before stays until the next
leader says it anew in its own name.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from capabilities.backbone import Sign, Verify
from capabilities.certificates import MANDATE_BYTES_MAX, Mandate
from capabilities.errors import PeerMistake
from capabilities.packing import Fields, decode, pack
from capabilities.verdict import VERDICT_BYTES_MAX, Verdict
from scheduler.election_state import DamagedState, seal, unseal
from swarmnode import limits
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.record import SwarmRecord

PIECE_BYTES_MAX: Final = VERDICT_BYTES_MAX + MANDATE_BYTES_MAX + 96
FILE_BYTES_MAX: Final = limits.VERDICTS_MAX * (PIECE_BYTES_MAX + 2) + 64
_FORMAT: Final = 1


class Ignored(StrEnum):
    """Why a verdict was not taken in."""

    MALFORMED = "malformed"
    """No canonical bytes of a signed verdict."""
    OVERSIZED = "oversized"
    FOREIGN = "foreign"
    """Of another swarm."""
    STRANGER = "stranger"
    """By a peer that is not in the backbone, or is banned."""
    FORGED = "forged"
    """The mandate does not hold, is of another term, or the leader did not sign this."""
    KNOWN = "known"
    """The same is here already: an echo of gossip, or a replay."""
    OLDER = "older"
    """A newer one on the same peer is here."""


@dataclass(frozen=True)
class SignedVerdict:
    """A verdict by the leader of its term, with the mandate that shows so."""

    swarm: str
    verdict: Verdict
    signature: bytes
    mandate: Mandate

    @classmethod
    def make(cls, swarm: str, verdict: Verdict, mandate: Mandate, sign: Sign) -> SignedVerdict:
        """By the leader of `mandate`, whose key signs."""
        return cls(swarm, verdict, sign(_payload(swarm, verdict)), mandate)

    @property
    def signer(self) -> str:
        return self.mandate.leader

    def verify(self, record: SwarmRecord, verify: Verify, mandates: Mandates) -> Ignored | None:
        """Why it does not count in the swarm of `record`; None if it does."""
        if self.swarm != record.swarm or self.mandate.certificate.swarm != record.swarm:
            return Ignored.FOREIGN
        if self.signer not in record.backbone.peers or record.bans.is_banned(self.signer):
            return Ignored.STRANGER
        if self.mandate.term != self.verdict.term or not mandates.holds(self.mandate, record):
            return Ignored.FORGED
        if not verify(self.signer, _payload(self.swarm, self.verdict), self.signature):
            return Ignored.FORGED
        return None

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return pack(
            (_FORMAT, bytes.fromhex(self.swarm), self.verdict.to_bytes(), self.signature, self.mandate.to_bytes())
        )

    @classmethod
    def from_bytes(cls, data: object) -> SignedVerdict:
        """PeerMistake unless these are the canonical bytes of one. Nothing is verified."""
        return decode(data, "signed verdict", PIECE_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> SignedVerdict:
        fields = Fields(value, 5, "signed verdict")
        fields.format(_FORMAT)
        return cls(
            fields.blob("swarm", 32, 32).hex(),
            Verdict.from_bytes(fields.blob("verdict", VERDICT_BYTES_MAX)),
            fields.signature(),
            Mandate.from_bytes(fields.blob("mandate", MANDATE_BYTES_MAX)),
        )


class Mandates:
    """Which mandates hold: their signatures (up to ten) are checked once, and the owner's key may change meanwhile.

    Any thread may ask.
    """

    KEPT: Final = 16  # a leader's verdicts share one; those of the last few leaders come mixed

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._held: dict[tuple[bytes, bytes], bool] = {}
        self._turn = threading.Lock()

    def holds(self, mandate: Mandate, record: SwarmRecord) -> bool:
        key = mandate.to_bytes(), record.chain.current
        with self._turn:
            if (known := self._held.get(key)) is not None:
                return known
            try:
                mandate.verify(record.swarm, self._verify, record.chain.verify)
                holds = True
            except PeerMistake:
                holds = False
            while len(self._held) >= self.KEPT:
                del self._held[next(iter(self._held))]
            self._held[key] = holds
            return holds


class VerdictBook:
    """The newest verdict of each peer, VERDICTS_MAX at most; what was not taken in is counted by its reason.

    `hear`, `put_own` and `load` belong to one thread; any may read, and `all` is slow.
    """

    def __init__(self, verify: Verify) -> None:
        self.ignored: Counter[Ignored] = Counter()
        self._verify = verify
        self._mandates = Mandates(verify)
        self._by_peer: dict[str, SignedVerdict] = {}
        self._changes = object()  # another one after each change
        self._told: tuple[tuple[object, ...], tuple[SignedVerdict, ...]] | None = None

    def of(self, peer: str) -> Verdict | None:
        found = self._by_peer.get(peer)
        return None if found is None else found.verdict

    def parse(self, piece: bytes) -> SignedVerdict:
        """PeerMistake, counted, unless these are the bytes of a signed verdict."""
        try:
            return SignedVerdict.from_bytes(piece)
        except PeerMistake:
            self.ignored[Ignored.OVERSIZED if len(piece) > PIECE_BYTES_MAX else Ignored.MALFORMED] += 1
            raise

    def judge(self, signed: SignedVerdict, record: SwarmRecord) -> Ignored | None:
        """Why it would not be taken in. Order comes before signatures: what is old costs nothing."""
        known = self._by_peer.get(signed.verdict.subject)
        if known is not None and _key(signed) <= _key(known):
            return Ignored.KNOWN if signed.verdict == known.verdict else Ignored.OLDER
        return signed.verify(record, self._verify, self._mandates)

    def hear(self, signed: SignedVerdict, record: SwarmRecord) -> Ignored | None:
        """Take it in; why not, counted, if it does not count."""
        if (ignored := self.judge(signed, record)) is not None:
            self.ignored[ignored] += 1
            return ignored
        self._put(signed)
        return None

    def put_own(self, signed: SignedVerdict) -> None:
        """What this node has just signed as the leader."""
        self._put(signed)

    def all(self, record: SwarmRecord) -> tuple[SignedVerdict, ...]:
        """What others could check now, by peer."""
        changes, every = self._changes, dict(self._by_peer)
        state = changes, record.chain, record.enactment, record.bans
        if self._told is None or any(a is not b for a, b in zip(self._told[0], state, strict=True)):
            checked = (each for _, each in sorted(every.items()))
            true = tuple(each for each in checked if each.verify(record, self._verify, self._mandates) is None)
            self._told = state, true
        return self._told[1]

    def signed_before(self, term: int) -> SignedVerdict | None:
        """One of an earlier term, if there is any: the gravest first."""
        older = [each for each in self._by_peer.values() if each.verdict.term < term]
        return min(older, key=lambda each: (_GRAVITY[each.verdict.fitness], each.verdict.subject), default=None)

    def next_sequence(self, term: int) -> int:
        """Greater than any of this term."""
        return 1 + max((s.verdict.sequence for s in self._by_peer.values() if s.verdict.term == term), default=0)

    def __len__(self) -> int:
        return len(self._by_peer)

    def _put(self, signed: SignedVerdict) -> None:
        self._changes = object()
        self._by_peer.pop(signed.verdict.subject, None)
        self._by_peer[signed.verdict.subject] = signed
        if len(self._by_peer) > limits.VERDICTS_MAX:
            least = max(self._by_peer.values(), key=lambda s: (_GRAVITY[s.verdict.fitness], _reverse(s.verdict.order)))
            del self._by_peer[least.verdict.subject]

    # -- as a file ----------------------------------------------------------------------------------------------

    def to_file(self) -> bytes:
        """All of it, with a checksum."""
        return seal(join_blobs(self._by_peer[peer].to_bytes() for peer in sorted(self._by_peer)))

    def load(self, data: bytes, swarm: str) -> None:
        """Add what `to_file` gave, in so far as it is of this swarm: this node checked it when it heard it.

        Raises:
            DamagedState: it is not that.
        """
        try:
            pieces = split_blobs(unseal(data), "verdicts", limits.VERDICTS_MAX)
            signed: Iterable[SignedVerdict] = [SignedVerdict.from_bytes(piece) for piece in pieces]
        except PeerMistake as mistake:
            raise DamagedState(mistake.message) from None
        for each in signed:
            known = self._by_peer.get(each.verdict.subject)
            if each.swarm == swarm and (known is None or _key(each) > _key(known)):
                self._put(each)


_GRAVITY: Final = {"quarantined": 0, "unfit": 1, "fit": 2}


def _payload(swarm: str, verdict: Verdict) -> bytes:
    """What the leader signs."""
    return pack(("swarmnode verdict", _FORMAT, swarm, verdict.to_bytes()))


def _key(signed: SignedVerdict) -> tuple[tuple[int, int], bytes]:
    """The newest is the greatest. No honest leader gives two with one number; all choose alike if one does."""
    return signed.verdict.order, signed.verdict.to_bytes()


def _reverse(order: tuple[int, int]) -> tuple[int, int]:
    return -order[0], -order[1]
