"""What a leader holds of a peer: fit, unfit for output ranks, or quarantined, and the evidence for it.

A verdict is a value with one form of bytes. Who signed it, and whether it is the newest, is for those who keep it
(swarmnode/swarm/verdict_book.py); whoever leads asks and writes a `VerdictBoard`. A release by the swarm's owner takes
back every verdict before it: the peer is then as unknown as a new one, and audited as such.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from capabilities.errors import PeerMistake
from capabilities.packing import INTEGER_MAX, Fields, decode, pack

Fitness = Literal["fit", "unfit", "quarantined"]
EvidenceKind = Literal["audit", "probe", "service", "class", "release"]

EVIDENCE_MAX: Final = 8
"""Pieces of evidence of one verdict: the worst and the latest tell why; the rest is a count."""

TEXT_BYTES_MAX: Final = 240
"""One sentence."""

TYPE_CHARS_MAX: Final = 16
"""A weight type's name, as in a measurement."""

VERDICT_BYTES_MAX: Final = 3_072
"""Eight pieces of evidence of 340 bytes, two names and the counts."""

_FORMAT: Final = 1
_NOWHERE: Final = 0xFFFF  # for the layer and expert of evidence that is of none
_PLACE_MAX: Final = _NOWHERE - 1
_WHAT: Final = "verdict"
_NUMBER: Final = struct.Struct(">d")
_LARGEST: Final = 1.7e308  # for what is not finite: JSON knows no infinity


@dataclass(frozen=True, slots=True)
class Evidence:
    """One finding, or `count` of the same kind of which this is the worst.

    layer, expert: where, -1 if it is of none. weight_type: ggml's name, or empty. median_relative_l2,
    extreme_relative_l2: how far the rows were off, and `limit` what was allowed of whichever exceeded it; all 0 where
    nothing was measured. at_s: Unix seconds.
    """

    kind: EvidenceKind
    text: str
    layer: int = -1
    expert: int = -1
    weight_type: str = ""
    median_relative_l2: float = 0.0
    extreme_relative_l2: float = 0.0
    limit: float = 0.0
    count: int = 1
    at_s: int = 0

    def bounded(self) -> Evidence:
        """With texts cut, and numbers brought into what has a form: no NaN, nothing negative, nothing infinite."""
        text = self.text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")
        return replace(
            self,
            text="".join(c if c.isprintable() else " " for c in text),
            layer=self.layer if 0 <= self.layer <= _PLACE_MAX else -1,
            expert=self.expert if 0 <= self.expert <= _PLACE_MAX else -1,
            weight_type=self.weight_type[:TYPE_CHARS_MAX],
            median_relative_l2=_finite(self.median_relative_l2),
            extreme_relative_l2=_finite(self.extreme_relative_l2),
            limit=_finite(self.limit),
            count=min(max(self.count, 0), INTEGER_MAX),
            at_s=min(max(self.at_s, 0), INTEGER_MAX),
        )

    def to_json(self) -> dict[str, Any]:
        """`layer` and `expert` are null where they are of none."""
        return {
            "kind": self.kind,
            "text": self.text,
            "layer": None if self.layer < 0 else self.layer,
            "expert": None if self.expert < 0 else self.expert,
            "weight_type": self.weight_type or None,
            "median_relative_l2": self.median_relative_l2,
            "extreme_relative_l2": self.extreme_relative_l2,
            "limit": self.limit,
            "count": self.count,
            "at_s": self.at_s,
        }

    def _packed(self) -> tuple[int | str | bytes, ...]:
        return (
            self.kind,
            self.text,
            self.layer if self.layer >= 0 else _NOWHERE,
            self.expert if self.expert >= 0 else _NOWHERE,
            self.weight_type,
            _NUMBER.pack(self.median_relative_l2),
            _NUMBER.pack(self.extreme_relative_l2),
            _NUMBER.pack(self.limit),
            self.count,
            self.at_s,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """On `subject`, a peer. Of two verdicts on it the one with the greater (term, sequence) counts.

    audits_agreed, audits_differed: of live work, since the peer was new or released. released: how many releases of the
    peer by the owner were known when it was given; a later release takes it back.
    """

    subject: str
    fitness: Fitness
    evidence: tuple[Evidence, ...]
    audits_agreed: int
    audits_differed: int
    term: int
    sequence: int
    released: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """(term, sequence): the newest is the greatest."""
        return self.term, self.sequence

    def to_json(self) -> dict[str, Any]:
        return {
            "fitness": self.fitness,
            "evidence": [each.to_json() for each in self.evidence],
            "audits_agreed": self.audits_agreed,
            "audits_differed": self.audits_differed,
            "term": self.term,
            "sequence": self.sequence,
        }

    def to_bytes(self) -> bytes:
        return pack(
            (
                _FORMAT,
                self.subject,
                self.fitness,
                tuple(each._packed() for each in self.evidence),
                self.audits_agreed,
                self.audits_differed,
                self.term,
                self.sequence,
                self.released,
            )
        )

    @classmethod
    def from_bytes(cls, data: object) -> Verdict:
        """PeerMistake unless these are the canonical bytes of one, within the bounds above."""
        return decode(data, _WHAT, VERDICT_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Verdict:
        fields = Fields(value, 9, _WHAT)
        fields.format(_FORMAT)
        subject, fitness = fields.peer("subject"), fields.word("fitness", get_args(Fitness))
        return cls(
            subject=subject,
            fitness=fitness,
            evidence=tuple(map(_read_evidence, fields.array("evidence", EVIDENCE_MAX))),
            audits_agreed=fields.integer("audits agreed"),
            audits_differed=fields.integer("audits differed"),
            term=fields.integer("term"),
            sequence=fields.integer("sequence"),
            released=fields.integer("releases"),
        )


OnVerdict: TypeAlias = Callable[[str], object]
"""Called with a peer whose verdict or release is another now. It must not block."""


class VerdictBoard(Protocol):
    """Where whoever leads finds what was held of a peer before, and writes what it finds. Nothing here blocks."""

    def verdict_of(self, peer: str) -> Verdict | None:
        """The newest; None if there was none, or the owner has released the peer since."""

    def publish(
        self, subject: str, fitness: Fitness, evidence: Sequence[Evidence], audits_agreed: int, audits_differed: int
    ) -> None:
        """The leader's own, in place of what was there; of the evidence the last EVIDENCE_MAX are kept."""

    def released(self, peer: str) -> int:
        """The number of the owner's newest release of the peer; 0: never."""

    def on_change(self, callback: OnVerdict) -> AbstractContextManager[None]:
        """Within the context `callback` is called whenever `verdict_of` or `released` of a peer is another."""


class MemoryBoard:
    """A board for a leader that belongs to no swarm of record: what it holds ends with it."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}
        self._releases: dict[str, int] = {}
        self._on_change: list[OnVerdict] = []
        self._sequence = 0

    def verdict_of(self, peer: str) -> Verdict | None:
        return self._verdicts.get(peer)

    def publish(
        self, subject: str, fitness: Fitness, evidence: Sequence[Evidence], audits_agreed: int, audits_differed: int
    ) -> None:
        self._sequence += 1
        kept = tuple(each.bounded() for each in evidence[-EVIDENCE_MAX:])
        self._verdicts[subject] = Verdict(
            subject, fitness, kept, audits_agreed, audits_differed, 0, self._sequence, self.released(subject)
        )
        self._tell(subject)

    def released(self, peer: str) -> int:
        return self._releases.get(peer, 0)

    def release(self, peer: str) -> int:
        """Take back what is held of a peer, for whoever started this leader; the release's number."""
        self._releases[peer] = self.released(peer) + 1
        self._verdicts.pop(peer, None)
        self._tell(peer)
        return self._releases[peer]

    @contextmanager
    def on_change(self, callback: OnVerdict) -> Iterator[None]:
        self._on_change.append(callback)
        try:
            yield
        finally:
            self._on_change.remove(callback)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """By peer."""
        return self._verdicts

    def _tell(self, peer: str) -> None:
        for callback in self._on_change:
            callback(peer)


def _finite(value: float) -> float:
    return min(max(value, 0.0), _LARGEST) if not math.isnan(value) else _LARGEST


def _read_evidence(value: object) -> Evidence:
    fields = Fields(value, 10, "evidence")
    found = Evidence(
        kind=fields.word("kind", get_args(EvidenceKind)),
        text=fields.text("text", TEXT_BYTES_MAX),
        layer=_place(fields.integer("layer", _NOWHERE)),
        expert=_place(fields.integer("expert", _NOWHERE)),
        weight_type=fields.text("weight type", TYPE_CHARS_MAX),
        median_relative_l2=_number(fields.blob("median", _NUMBER.size, _NUMBER.size)),
        extreme_relative_l2=_number(fields.blob("extreme", _NUMBER.size, _NUMBER.size)),
        limit=_number(fields.blob("limit", _NUMBER.size, _NUMBER.size)),
        count=fields.integer("count"),
        at_s=fields.integer("when"),
    )
    if found != found.bounded():
        raise PeerMistake("evidence: a text or number has no such form")
    return found


def _place(value: int) -> int:
    return -1 if value == _NOWHERE else value


def _number(data: bytes) -> float:
    value: float = _NUMBER.unpack(data)[0]
    return value
