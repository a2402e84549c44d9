"""From one leader to the next: the placement that a predecessor left, its verdicts, and what this one leaves.

A verdict is believed of a worker that names the very set in its memory, and once: if its stay or its link breaks, it
must prove itself like anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.manifest import Manifest
from capabilities.agreement import Agreement
from scheduler.audit_choice import AGREED_FIRST
from scheduler.audit_tests import PeerAudits
from scheduler.placement import Placement
from scheduler.placement_record import PlacementRecord
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.members import Member, Members
from swarmnode.leader.routing import OWN_CLASS
from swarmnode.net.interface import PeerId


class Inheritance:
    """`record` is what to start from, None if there is nothing that fits. keep: gets what is left, as bytes.

    audits: what audits of live work came to so far.
    """

    def __init__(
        self,
        manifest: Manifest,
        members: Members,
        record: PlacementRecord | None,
        keep: Callable[[bytes], None],
        audits: Callable[[], Mapping[str, PeerAudits]],
    ) -> None:
        self.record = record if record is not None and _fits(record, manifest) else None
        self._manifest = manifest
        self._members = members
        self._keep = keep
        self._audits = audits
        self._spent: set[str] = set()  # whose verdict has been used
        self._audits_left: Mapping[str, PeerAudits] = {}
        self._left: tuple[int, int, frozenset[str], frozenset[str]] | None = None

    def classes(self) -> dict[str, str]:
        """The numeric classes that the record's verdicts tell of."""
        proven = {} if self.record is None else self.record.proven
        return {peer: OWN_CLASS for peer, verdict in proven.items() if verdict.bit_identical}

    def believed(self, member: Member, share: Placement) -> Agreement | None:
        """What the predecessor found of a worker that still has in memory what it held then."""
        record, peer = self.record, str(member.peer)
        if record is None or share.holders != record.placement.holders or record.name not in member.hello.holding:
            return None
        return None if peer in self._spent else record.proven.get(peer)

    def was_unfit(self, member: Member) -> bool:
        """Whether the predecessor found it not precise enough for output ranks."""
        return self.record is not None and str(member.peer) in self.record.unfit

    def spend(self, member: Member) -> None:
        """From now on this worker must prove itself."""
        self._spent.add(str(member.peer))

    def leave(self, coverage: Coverage) -> None:
        """Leave to a successor what serves now, if that is news."""
        current = coverage.current
        if current is None:
            return
        serving = {peer for peer, placement in coverage.answering.items() if placement is current}
        members = {peer: self._members.by_peer[PeerId(peer)] for peer in serving}
        unfit = frozenset(peer for peer, member in members.items() if member.unfit is not None)
        news = current.term, current.epoch, frozenset(serving), unfit
        audits = self._audits()
        if news == self._left and not _is_news(audits, self._audits_left):
            return
        self._left, self._audits_left = news, audits
        proven = {peer: member.agreement for peer, member in members.items() if member.agreement is not None}
        self._keep(PlacementRecord(self._manifest.id, current, proven, unfit, audits).to_bytes())


def _is_news(now: Mapping[str, PeerAudits], before: Mapping[str, PeerAudits]) -> bool:
    """Whether a successor that knew only `before` would audit a peer otherwise, by more than matters."""
    for peer, held in now.items():
        old = before.get(peer, PeerAudits())
        if (held.fitness, held.released, held.wrong_score > 0) != (old.fitness, old.released, old.wrong_score > 0):
            return True
        if held.in_a_row > 2 * old.in_a_row + AGREED_FIRST:
            return True
    return False


def _fits(record: PlacementRecord, manifest: Manifest) -> bool:
    experts = {layer: len(holders) for layer, holders in record.placement.holders.items()}
    return record.manifest == manifest.id and experts == {spec.layer: spec.n_expert for spec in manifest.layers}
