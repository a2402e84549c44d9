"""What a leader leaves to its successor: who holds what, and what the probe found of them.

A new leader starts from it: nothing moves, and a worker that names the very set in its memory (term and epoch) needs no
new proof before it serves. Without a record, or with one of another model, a leader starts from nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from capabilities.agreement import Agreement
from capabilities.errors import PeerMistake
from capabilities.packing import INTEGER_MAX, PEER_ID_CHARS_MAX, Fields, Plain, check_not_newer, decode, pack
from scheduler.audit_tests import PeerAudits
from scheduler.audits import PEERS_MAX
from scheduler.placement import Placement

FORMAT: Final = 4
_FORMAT_BEFORE_AUDITS: Final = 2
"""Of a record without audits: versions before them read it, and theirs is read."""

RECORD_BYTES_MAX: Final = 4 << 20  # 48 layers of 256 experts with eight copies each take 0.2 MB
HASH_BYTES: Final = 32
_WHAT: Final = "placement record"
_NOBODY: Final = 0xFFFF
_LAYER: Final = np.dtype([("layer", "<u2"), ("experts", "<u2"), ("copies", "u1")])
_VERDICT: Final = np.dtype([("peer", "<u2"), ("identical", "u1"), ("unfit", "u1"), ("numbers", "<f8", 4)])
_AUDITS: Final = np.dtype(
    [
        ("agreed", "<u4"), ("differed", "<u4"), ("in_a_row", "<u4"), ("wrong_score", "<f8"), ("coarse_score", "<f8"),
        ("unfit", "u1"), ("times_unfit", "<u2"), ("quarantined", "u1"), ("released", "<u4"),
        ("self_differed", "<u4"),
    ]
)  # fmt: skip
_COUNT_MAX: Final = 2**32 - 1
_TIMES_MAX: Final = 2**16 - 1


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The placement of a term and epoch for the model of `manifest` (its id).

    proven: holders with their verdicts. unfit: those of them that are not precise enough for output ranks. audits: of
    live work, whoever's: a peer that is quarantined holds nothing.
    """

    manifest: str
    placement: Placement
    proven: Mapping[str, Agreement]
    unfit: frozenset[str] = frozenset()
    audits: Mapping[str, PeerAudits] = field(default_factory=dict)

    @property
    def name(self) -> tuple[int, int]:
        """Term and epoch: the newest record is the greatest."""
        return self.placement.term, self.placement.epoch

    def to_bytes(self) -> bytes:
        peers = self.placement.peers()
        index = {peer: i for i, peer in enumerate(peers)}
        layers, rows = [], []
        for layer, holders in sorted(self.placement.holders.items()):
            copies = max(map(len, holders))
            layers.append((layer, len(holders), copies))
            table = np.full((len(holders), copies), _NOBODY, "<u2")
            for expert, held_by in enumerate(holders):
                table[expert, : len(held_by)] = [index[peer] for peer in held_by]
            rows.append(table.tobytes())
        verdicts = [
            (index[peer], found.bit_identical, peer in self.unfit, _numbers(found))
            for peer, found in sorted(self.proven.items())
            if peer in index
        ]
        fields: tuple[Plain, ...] = (
            FORMAT if self.audits else _FORMAT_BEFORE_AUDITS,
            self.placement.term,
            self.placement.epoch,
            bytes.fromhex(self.manifest),
            "\n".join(peers).encode(),
            np.array(layers, _LAYER).tobytes(),
            b"".join(rows),
            np.array(verdicts, _VERDICT).tobytes(),
        )
        if not self.audits:
            return pack(fields)
        counts = np.array([_counted(held) for _, held in sorted(self.audits.items())], _AUDITS)
        return pack((*fields, "\n".join(sorted(self.audits)).encode(), counts.tobytes()))

    @classmethod
    def from_bytes(cls, data: object) -> PlacementRecord:
        """Raises PeerMistake if it is none."""
        return decode(data, _WHAT, RECORD_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> PlacementRecord:
        check_not_newer(value, FORMAT, _WHAT)
        audited = isinstance(value, tuple) and value[:1] == (FORMAT,)
        fields = Fields(value, 10 if audited else 8, _WHAT)
        fields.format(FORMAT if audited else _FORMAT_BEFORE_AUDITS)
        term, epoch = fields.integer("term", INTEGER_MAX), fields.integer("epoch", INTEGER_MAX)
        manifest = fields.blob("manifest", HASH_BYTES, HASH_BYTES).hex()
        try:
            peers = fields.blob("peers", PEERS_MAX * (PEER_ID_CHARS_MAX + 1)).decode("ascii").split("\n")
            layers = np.frombuffer(fields.blob("layers", RECORD_BYTES_MAX), _LAYER).tolist()
            holders = _holders(layers, np.frombuffer(fields.blob("holders", RECORD_BYTES_MAX), "<u2"), peers)
            verdicts = np.frombuffer(fields.blob("verdicts", RECORD_BYTES_MAX), _VERDICT).tolist()
            proven = {peers[peer]: Agreement(bool(same), *map(float, numbers)) for peer, same, _, numbers in verdicts}
            unfit = frozenset(peers[peer] for peer, _, bad, _ in verdicts if bad)
            audits = _audits(fields) if audited else {}
        except (ValueError, IndexError) as error:
            raise PeerMistake(f"{_WHAT}: {error!s:.100}") from None
        return cls(manifest, Placement(term, epoch, holders), proven, unfit, audits)


def _numbers(found: Agreement) -> tuple[float, float, float, float]:
    return found.max_abs_diff, found.median_relative_l2, found.worst_relative_l2, found.min_cosine


def _counted(held: PeerAudits) -> tuple[float, ...]:
    return (
        min(held.agreed, _COUNT_MAX),
        min(held.differed, _COUNT_MAX),
        min(held.in_a_row, _COUNT_MAX),
        held.wrong_score,
        held.coarse_score,
        held.unfit,
        min(held.times_unfit, _TIMES_MAX),
        held.quarantined,
        min(held.released, _COUNT_MAX),
        min(held.self_differed, _COUNT_MAX),
    )


def _audits(fields: Fields) -> dict[str, PeerAudits]:
    """Raises ValueError where names and rows do not fit, or a score is none."""
    peers = fields.blob("audited", PEERS_MAX * (PEER_ID_CHARS_MAX + 1), 1).decode("ascii").split("\n")
    rows = np.frombuffer(fields.blob("audits", RECORD_BYTES_MAX), _AUDITS).tolist()
    if not all(0 <= score < np.inf for row in rows for score in row[3:5]):
        raise ValueError("a score is none")
    held = {}
    for peer, row in zip(peers, rows, strict=True):
        agreed, differed, in_a_row, wrong, coarse, unfit, times, out, released, self_differed = row
        held[peer] = PeerAudits(
            agreed, differed, in_a_row, wrong, coarse, bool(unfit), times, bool(out), released, self_differed
        )
    return held


def _holders(
    layers: list[tuple[int, int, int]], table: np.ndarray[tuple[int, ...], np.dtype[np.uint16]], peers: list[str]
) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Raises ValueError or IndexError where the sizes do not fit."""
    holders, start = {}, 0
    for layer, experts, copies in layers:
        rows = table[start : start + experts * copies].reshape(experts, copies).tolist()
        holders[layer] = tuple(tuple(peers[peer] for peer in row if peer != _NOBODY) for row in rows)
        start += experts * copies
    if start != len(table):
        raise ValueError("holders are left over")
    return holders
