"""What a member keeps of its leaders: the newest mandate that it obeys, and what the leader leaves to its successor.

data/mandate         scheduler/term_guard.py's file: on disk before the mandate is obeyed
data/leader.record   the record with its term; a lost one costs a new leader time, and nothing else
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack
import structlog

from capabilities.certificates import MANDATE_BYTES_MAX, Mandate
from capabilities.packing import INTEGER_MAX, SWARM_ID_CHARS
from scheduler.election_state import DamagedState, seal, unseal
from scheduler.term_guard import from_file, to_file
from swarmnode import limits
from swarmnode.backbone.leadership_messages import DIGEST_BYTES
from swarmnode.durable import write_whole

_log = structlog.get_logger(__name__)

_OVERHEAD_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """What the leader of `term` left to its successor: bytes that only leaders read."""

    term: int
    data: bytes

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(b"%d " % self.term + self.data).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Kept:
    """The two files of one swarm's member. Every method waits for the disk, and raises OSError if it fails.

    swarm: its id; of a leader that the configuration names, its own peer id.
    """

    folder: Path
    swarm: str

    @property
    def _mandate(self) -> Path:
        return self.folder / "mandate"

    @property
    def _record(self) -> Path:
        return self.folder / "leader.record"

    def load_mandate(self) -> Mandate | None:
        """The newest mandate that was stored; None if there is none of this swarm.

        A damaged file counts as none: this node may then obey an old leader until it has heard of the newest one, which
        any backbone peer tells it.
        """
        data = _read(self._mandate, MANDATE_BYTES_MAX)
        try:
            mandate = None if data is None else from_file(data)
        except DamagedState as error:
            _log.error("leader.mandate_damaged", path=str(self._mandate), reason=error.message)
            return None
        return None if mandate is None or mandate.certificate.swarm != self.swarm else mandate

    def store_mandate(self, mandate: Mandate) -> None:
        write_whole(self._mandate, to_file(mandate))

    def load_record(self) -> LeaderRecord | None:
        """The newest record; None if there is none of this swarm, or it is damaged."""
        data = _read(self._record, limits.LEADER_RECORD_BYTES_MAX)
        try:
            value = None if data is None else msgpack.unpackb(unseal(data))
        except (DamagedState, ValueError, msgpack.UnpackException):
            _log.error("leader.record_damaged", path=str(self._record))
            return None
        match value:
            case [str(swarm), int(term), bytes(record)] if swarm == self.swarm and 0 < term <= INTEGER_MAX:
                return LeaderRecord(term, record)
        return None

    def store_record(self, record: LeaderRecord) -> None:
        write_whole(self._record, seal(msgpack.packb((self.swarm, record.term, record.data))))


def _read(path: Path, bytes_max: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(bytes_max + SWARM_ID_CHARS + _OVERHEAD_BYTES_MAX)
    except FileNotFoundError:
        return None
