"""What a leader leaves to its successor, kept by every backbone peer. As swarmnode/leader/inheritance.py.

A verdict is believed of a worker that names the very set in its memory, and once: if its stay breaks, it must prove
itself like anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from capabilities.agreement import Agreement
from capabilities.errors import PeerMistake, SwarmError
from scheduler.audits import Audits
from scheduler.election_state import DamagedState, seal, unseal
from scheduler.placement import Placement
from scheduler.placement_record import PlacementRecord
from tests.simulator.coverage import Coverage
from tests.simulator.host import Host
from tests.simulator.member import Member
from tests.simulator.stays import Stay

FILE = "record"
MANIFEST = "00" * 32
ALIKE = Agreement(True, 0.0, 0.0, 0.0, 1.0)
"""The verdict on every worker that passes here."""


@dataclass(frozen=True, slots=True)
class Record:
    """From the leader of a term to the other backbone peers."""

    term: int
    data: bytes


class Keeper:
    """A backbone peer's memory of records: on its disk, the newest counts. Channel "records"."""

    channel = "records"

    def __init__(self, host: Host, member: Member) -> None:
        self.newest: PlacementRecord | None = None
        self.data = b""  # the same
        self._host = host
        self._member = member
        self._writing = False

    def start(self) -> None:
        try:
            self.data = unseal(self._host.disk.files[FILE])
            self.newest = PlacementRecord.from_bytes(self.data)
        except (KeyError, DamagedState, PeerMistake):
            self.newest = None

    def receive(self, sender: str, message: Record) -> None:
        try:
            self._member.guard.check(message.term, sender)
        except SwarmError:
            return
        self.keep(message.data)

    def keep(self, data: bytes) -> None:
        """A record of the leader that is obeyed. While one is written, others are left out: they come again."""
        record = PlacementRecord.from_bytes(data)
        if not self._writing and (self.newest is None or record.name >= self.newest.name):
            self.newest, self.data, self._writing = record, data, True
            self._host.disk.write(FILE, seal(data), self._written)

    def _written(self) -> None:
        self._writing = False


class Inheritance:
    """Of one leadership. `record`: what it starts from. `keep` gets what it leaves. audits: what they came to."""

    def __init__(self, record: PlacementRecord | None, keep: Callable[[bytes], None], audits: Audits) -> None:
        self.record = record
        self._keep = keep
        self._audits = audits
        self._spent: set[str] = set()  # whose verdict has been used

    def believes(self, stay: Stay, share: Placement) -> bool:
        """Whether the predecessor found a worker right that still has in memory what it held then."""
        record = self.record
        if record is None or share.holders != record.placement.holders or record.name not in stay.hello.holding:
            return False
        return stay.peer not in self._spent and stay.peer in record.proven

    def spend(self, stay: Stay) -> None:
        self._spent.add(stay.peer)

    def leave(self, coverage: Coverage) -> None:
        """Leave to a successor what serves now."""
        current = coverage.current
        if current is not None:
            serving = [peer for peer, placement in coverage.answering.items() if placement is current]
            proven, audits = dict.fromkeys(serving, ALIKE), self._audits.records()
            self._keep(PlacementRecord(MANIFEST, current, proven, audits=audits).to_bytes())
