"""The part of an election that must never err: what this peer has promised, and which terms it believes in.

A vote is a promise for ever: one a term, whatever the backbone's version, and none for a term that is not beyond the
highest known (`floor`). A term is believed by its certificate alone.
"""

from __future__ import annotations

from capabilities.backbone import BackboneSet, Enactment
from capabilities.certificates import Mandate, Vote
from scheduler.backbone_ledger import BackboneLedger, Keys
from scheduler.election_state import Ballot, HardState
from scheduler.election_times import TERM_STEP_MAX


class Voter:
    """Holds the hard state. `unsaved` gives it whenever it changed."""

    def __init__(self, peer: str, state: HardState, keys: Keys) -> None:
        self.ledger = BackboneLedger.of(peer, state, keys)
        self.voted = state.voted
        self.mandate = state.mandate
        self.peer = peer
        self._keys = keys
        self._saved = self._parts()
        self.ledger.confirm(self.floor)

    @property
    def term(self) -> int:
        """The newest certified term, 0 before any."""
        return 0 if self.mandate is None else self.mandate.term

    @property
    def floor(self) -> int:
        """No term up to this one can get a new vote of this peer."""
        voted = 0 if self.voted is None else self.voted.term
        return max(voted, self._settled)

    @property
    def _settled(self) -> int:
        """No term up to this one can get a vote of anybody: it has a leader, or an older backbone may have given it."""
        return max(self.term, 0 if self.ledger.enactment is None else self.ledger.enactment.floor)

    def unsaved(self) -> HardState | None:
        """The state to store, once after each change; None if nothing changed."""
        parts = self._parts()
        if all(part is saved for part, saved in zip(parts, self._saved, strict=True)):
            return None
        self._saved = parts
        return HardState(self.ledger.swarm, self.ledger.vote_file, *parts)

    def _parts(self) -> tuple[Ballot | None, Mandate | None, Enactment | None, BackboneSet | None]:
        return self.voted, self.mandate, self.ledger.enactment, self.ledger.pending

    def may_vote(self, candidate: str, term: int, version: int) -> bool:
        """Whether the promises so far allow a vote for `candidate` in `term` under that backbone version."""
        acting = self.ledger.acting
        if acting is None or version != acting.version or not self.ledger.seated or candidate not in acting.peers:
            return False
        if Ballot(version, term, candidate) == self.voted:
            return term > self._settled
        return self.floor < term <= self.floor + TERM_STEP_MAX

    def vote(self, candidate: str, term: int) -> Vote:
        """This peer's vote, which `may_vote` allowed. It is in the hard state now: store that before sending."""
        ballot = Ballot(self.ledger.version, term, candidate)
        if ballot != self.voted:
            self.voted = ballot
        return Vote.cast(self.ledger.swarm, ballot.version, term, candidate, self.peer, self._keys.sign)

    def check(self, vote: Vote) -> None:
        """PeerMistake unless its voter signed it."""
        vote.verify(self._keys.verify)

    def adopt(self, mandate: Mandate) -> bool:
        """Believe in a newer term. False: it is not newer.

        Raises:
            PeerMistake: it is no mandate of this swarm, or contradicts the one that this peer knows.
        """
        known = self.mandate
        if mandate.term < self.term or (known is not None and mandate.certificate == known.certificate):
            return False
        mandate.verify(self.ledger.swarm, self._keys.verify, self._keys.verify_owner)
        if known is not None:
            mandate.check_after(known)
        if mandate.term == self.term:
            return False
        self.mandate = mandate
        return True
