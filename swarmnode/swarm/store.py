"""The swarm's record in the data folder: there or not, whole or not, and never half of a change.

A change is made on the value, written beside the old file, synced and renamed, and only then does anybody see it. So a
crash at any instant leaves the record before or after the change. A damaged file is reported, never replaced: losing it
would make this node a stranger to its swarm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capabilities.errors import UsageError
from capabilities.membership_certificate import MembershipCertificate
from scheduler.election_state import DamagedState
from swarmnode.durable import write_whole
from swarmnode.swarm.errors import NotInSwarm
from swarmnode.swarm.invite_book import InviteBook
from swarmnode.swarm.owner_key import OwnerKeyFile
from swarmnode.swarm.record import RECORD_BYTES_MAX, SwarmRecord

DAMAGED_HINT: Final = (
    "Restore the file from a backup; or move it away and join again with a new invite (`swarmctl join TOKEN`)."
)


@dataclass(frozen=True, slots=True)
class SwarmFiles:
    """Where a data folder keeps what belongs to its swarm."""

    data: Path

    @property
    def record(self) -> Path:
        return self.data / "swarm.record"

    @property
    def votes(self) -> Path:
        """The election's state: see vote_file.py. Never restore it from a backup."""
        return self.data / "votes"

    @property
    def verdicts(self) -> Path:
        """What leaders hold of peers: see verdicts.py."""
        return self.data / "verdicts"

    @property
    def invites(self) -> Path:
        return self.data / "invites"

    def owner_key(self, swarm: str) -> OwnerKeyFile:
        """Keys are kept by swarm: one that this node left, or never finished founding, is in nobody's way."""
        return OwnerKeyFile(self.data / "owner" / f"{swarm[:16]}.key")


class SwarmStore:
    """The record and its file. Every method may be called from any thread; those that write wait for the disk."""

    def __init__(self, files: SwarmFiles, record: SwarmRecord | None) -> None:
        self.files = files
        self._record = record
        self._invites: InviteBook | None = None
        self._turn = threading.Lock()

    @classmethod
    def open(cls, files: SwarmFiles) -> SwarmStore:
        """What the folder holds. DamagedState, naming the file and what to do, if it cannot be read."""
        path = files.record
        try:
            with path.open("rb") as file:
                return cls(files, SwarmRecord.from_file(file.read(RECORD_BYTES_MAX + 64)))
        except FileNotFoundError:
            return cls(files, None)
        except OSError as error:
            hint = "Check the file's owner and mode."
            raise DamagedState(f"cannot read {path}: {error.strerror}", hint=hint, path=str(path)) from error
        except DamagedState as error:
            raise error.of(str(path), DAMAGED_HINT) from None

    @property
    def record(self) -> SwarmRecord | None:
        """None while this node belongs to no swarm."""
        return self._record

    def need(self) -> SwarmRecord:
        """The record. NotInSwarm if there is none."""
        if self._record is None:
            raise NotInSwarm("this node belongs to no swarm")
        return self._record

    def check_free(self) -> None:
        """UsageError if this node belongs to a swarm: it can belong to one only."""
        if self._record is not None:
            message = f"this node belongs to the swarm {self._record.name} ({self._record.swarm[:16]}) already"
            raise UsageError(message, hint="`swarmctl leave` first, or use another --data-dir for another node.")

    def enter(self, record: SwarmRecord) -> None:
        """Belong to a swarm from now on. UsageError if this node belongs to one."""
        with self._turn:
            self.check_free()
            self._write(record)

    def leave(self) -> SwarmRecord:
        """Belong to no swarm; what was the record. NotInSwarm.

        The owner's key stays if it is here, and so do the votes: who comes back must not vote twice.
        """
        with self._turn:
            record = self.need()
            self.files.record.unlink(missing_ok=True)
            self._record = self._invites = None
            self.files.invites.unlink(missing_ok=True)
            return record

    def update(self, change: Callable[[SwarmRecord], SwarmRecord]) -> SwarmRecord:
        """Replace the record by what `change` makes of it; written only if that is another one. NotInSwarm."""
        with self._turn:
            record = change(before := self.need())
            if record is not before:
                self._write(record)
            return record

    def hear(self, news: Iterable[bytes]) -> tuple[bytes, ...]:
        """Take in news, all or none of it; which of it was new. PeerMistake if any of it is false, NotInSwarm."""
        new: tuple[bytes, ...] = ()

        def change(record: SwarmRecord) -> SwarmRecord:
            nonlocal new
            changed, new = record.hear_all(news)
            return changed

        self.update(change)
        return new

    def learn_addresses(self, addresses: Iterable[str]) -> None:
        """Remember where the swarm was found, best first."""
        self.update(lambda record: record.with_addresses(addresses))

    def renew(self, certificate: MembershipCertificate) -> None:
        """Keep another certificate of this node's own. PeerMistake if it is none."""
        self.update(lambda record: record.renewed(certificate))

    def invites(self) -> InviteBook:
        """The invites that this node issued for its swarm. NotInSwarm, or DamagedState if their file cannot be read."""
        with self._turn:
            if self._invites is None:
                self._invites = InviteBook(self.files.invites, self.need().swarm)
            return self._invites

    def is_banned(self, peer: str) -> bool:
        """Whether the owner has banned the peer, as far as this node knows."""
        return self._record is not None and self._record.bans.is_banned(peer)

    def verify_owner(self, data: bytes, signature: bytes) -> bool:
        """Whether the swarm's owner signed `data` (capabilities.backbone.VerifyOwner). False outside of a swarm."""
        return self._record is not None and self._record.chain.verify(data, signature)

    def _write(self, record: SwarmRecord) -> None:
        write_whole(self.files.record, record.to_file())
        self._record = record
