"""An election in words: what a peer knows of it, and why nobody leads if nobody does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from scheduler.election_roles import Role
from scheduler.voter import Voter

LOST_SEAT: Final = "this peer lost the file of its votes: remove it from the backbone and add it anew"


@dataclass(frozen=True, slots=True)
class ElectionStatus:
    """`answering`: members heard lately, this peer among them. `why`: why nobody leads, empty if somebody does.

    `vote_file` names this peer's vote file (16 bytes), as the owner writes it into the next backbone. `lost_seat`: the
    backbone names another one for this peer, which therefore cannot vote.
    """

    role: Role
    term: int
    leader: str | None
    backbone_version: int
    members: tuple[str, ...]
    pending_version: int | None
    vote_file: bytes
    answering: tuple[str, ...]
    why: str
    lost_seat: bool


def describe(role: Role, leader: str | None, voter: Voter, heard: Collection[str], *, eligible: bool) -> ElectionStatus:
    """From an election's parts. `heard`: peers heard lately."""
    ledger = voter.ledger
    members = () if ledger.acting is None else ledger.acting.peers
    answering = tuple(member for member in members if member == voter.peer or member in heard)
    return ElectionStatus(
        role,
        voter.term,
        leader,
        ledger.version,
        members,
        None if ledger.pending is None else ledger.pending.version,
        ledger.vote_file,
        answering,
        "" if leader is not None else _why_none(voter, role, answering, eligible),
        _lost_seat(voter),
    )


def _lost_seat(voter: Voter) -> bool:
    acting = voter.ledger.acting
    return acting is not None and voter.peer in acting.peers and not voter.ledger.seated


def _why_none(voter: Voter, role: Role, answering: tuple[str, ...], eligible: bool) -> str:
    acting = voter.ledger.acting
    if acting is None:
        return "this peer knows no backbone yet"
    if _lost_seat(voter):
        return LOST_SEAT
    if role is Role.OUTSIDER:
        return "this peer is no member of the backbone and hears no leader"
    if not eligible:  # then it says nothing, and hears nothing of others like it
        return "this peer may not lead now, and hears no other leader"
    if len(answering) < acting.quorum:
        return f"{len(answering)} of {len(acting.peers)} backbone peers answer, and {acting.quorum} are needed"
    return "an election is under way"
