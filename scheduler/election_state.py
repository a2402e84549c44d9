"""What a backbone peer must never forget, and what an election asks of its shell.

`HardState` is the vote file: it is written whole before anything that follows from it leaves the peer. Its bytes carry
their own checksum, since a damaged one must not be taken for an older one: a peer that forgot a vote could vote twice.
A missing or damaged file means a new file with a new name, and no seat until the owner removes and adds the peer.
Never restore one from a backup.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, TypeAlias

from capabilities.backbone import ENACTMENT_BYTES_MAX, SET_BYTES_MAX, VOTE_FILE_BYTES, BackboneSet, Enactment
from capabilities.certificates import MANDATE_BYTES_MAX, Mandate
from capabilities.errors import PeerMistake, SwarmError
from capabilities.packing import Fields, OtherFormat, check_not_newer, decode, pack
from scheduler.election_messages import Message

STATE_BYTES_MAX: Final = ENACTMENT_BYTES_MAX + MANDATE_BYTES_MAX + SET_BYTES_MAX + 512
_CHECKSUM_BYTES: Final = 32
_FORMAT: Final = 1


class DamagedState(SwarmError):
    """A file that must be trusted is not what was written."""

    type = "damaged_state"
    default_hint = (
        "Move the file away, remove this peer from the backbone and add it anew. Never restore it from a backup."
    )

    def of(self, path: str, mend: str | None = None) -> DamagedState:
        """The same, of the file at `path`. mend: what to do about damage to this kind of file."""
        return DamagedState(f"{path}: {self.message}", hint=mend, path=path)


class NewerState(DamagedState):
    """A file that must be trusted is in a format of a later version. It is well, and stays as it is."""

    type = "newer_state"
    default_hint = (
        "A newer version of swarmnode wrote this file: install that version again (`swarmnode version` prints this"
        " one's). Do not remove the file."
    )

    def of(self, path: str, mend: str | None = None) -> DamagedState:
        return NewerState(f"{path}: {self.message}", path=path)


@dataclass(frozen=True, slots=True)
class Ballot:
    """The last vote: who shall lead `term`, under which backbone version."""

    version: int
    term: int
    leader: str


@dataclass(frozen=True, slots=True)
class HardState:
    """The vote file's content. `vote_file` is its random name, `mandate` the newest term's; `enactment` proves the
    backbone that acts, `pending` is the version after it that this peer has stored."""

    swarm: str
    vote_file: bytes
    voted: Ballot | None = None
    mandate: Mandate | None = None
    enactment: Enactment | None = None
    pending: BackboneSet | None = None

    def to_file(self) -> bytes:
        """What to write into the vote file."""
        return seal(self.to_bytes())

    @classmethod
    def from_file(cls, data: bytes) -> HardState:
        """What `to_file` gave.

        Raises:
            DamagedState: it is not that.
        """
        try:
            return decode(unseal(data), "vote file", STATE_BYTES_MAX, cls._read)
        except OtherFormat as other:
            raise NewerState(other.message) from None
        except PeerMistake as mistake:
            raise DamagedState(f"the vote file is damaged: {mistake.message}") from None

    def to_bytes(self) -> bytes:
        voted = () if self.voted is None else (self.voted.version, self.voted.term, self.voted.leader)
        records = (self.mandate, self.enactment, self.pending)
        packed = (b"" if record is None else record.to_bytes() for record in records)
        return pack((_FORMAT, self.swarm, self.vote_file, voted, *packed))

    @classmethod
    def _read(cls, value: object) -> HardState:
        check_not_newer(value, _FORMAT, "vote file")
        fields = Fields(value, 7, "vote file")
        fields.format(_FORMAT)
        swarm, vote_file = fields.swarm(), fields.blob("name", VOTE_FILE_BYTES, VOTE_FILE_BYTES)
        voted = fields.array("voted", 3)
        mandate = fields.blob("mandate", MANDATE_BYTES_MAX)
        enactment = fields.blob("enactment", ENACTMENT_BYTES_MAX)
        pending = fields.blob("pending", SET_BYTES_MAX)
        return cls(
            swarm,
            vote_file,
            _read_ballot(voted) if voted else None,
            Mandate.from_bytes(mandate) if mandate else None,
            Enactment.from_bytes(enactment) if enactment else None,
            BackboneSet.from_bytes(pending) if pending else None,
        )


def _read_ballot(value: object) -> Ballot:
    fields = Fields(value, 3, "ballot")
    return Ballot(fields.integer("version"), fields.integer("term"), fields.peer("leader"))


def seal(body: bytes) -> bytes:
    """A state file's content with its checksum."""
    return body + hashlib.sha256(body).digest()


def unseal(data: bytes) -> bytes:
    """The content of a state file.

    Raises:
        DamagedState: its checksum is not its own.
    """
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() != checksum:
        raise DamagedState(f"a state file of {len(data)} bytes is damaged or cut off")
    return body


# --- What the shell is asked to do ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Who leads, as this peer sees it; None: nobody that it knows of. The mandate is `term`'s, None before any.

    With this peer's own id: from now on it leads the term, and shows the mandate to workers and askers. With anything
    else, or another term: it leads no longer what it led before.
    """

    term: int
    leader: str | None
    mandate: Mandate | None


@dataclass(frozen=True, slots=True)
class BackboneChanged:
    """Another version of the backbone acts. `seated`: this peer is a member of it, with its own vote file."""

    backbone: BackboneSet
    seated: bool


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """This leader was to hand over and still leads: no peer was eligible, or none took over in time."""

    tried: tuple[str, ...]


Change: TypeAlias = LeaderChanged | BackboneChanged | HandOverFailed


@dataclass(frozen=True, slots=True)
class Ready:
    """What an event led to. Act on the fields in their order, and on a whole Ready before anything of the next one."""

    state: HardState | None = None
    """First: write and fsync it, before anything below leaves this peer. None: nothing changed. If writing fails, take
    no further part: drop the election, since it believes what is not on disk."""

    messages: tuple[tuple[str, Message], ...] = ()
    """Second: (peer, message) to send. Any of them may be lost or late."""

    changes: tuple[Change, ...] = ()
    """Third: tell the rest of the daemon."""


NOTHING: Final = Ready()


class Outbox:
    """Collects one Ready while an event is handled."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Message]] = []
        self.changes: list[Change] = []

    def take(self, state: HardState | None) -> Ready:
        """The Ready with what was collected, which is then forgotten."""
        if state is None and not self.messages and not self.changes:
            return NOTHING
        ready = Ready(state, tuple(self.messages), tuple(self.changes))
        self.messages, self.changes = [], []
        return ready
