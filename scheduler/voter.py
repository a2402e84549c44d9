"""The part of an election that must never err: what this peer has promised, and which terms it believes in.

A vote is a promise for ever: one a term, whatever the backbone's version, and none for a term that is not beyond the
highest known (`floor`). A term is believed by its certificate alone. Nor does a bare higher number get a vote: a term
may be voted on if the one before it was, by this peer's knowledge or by the signed vote of another member.
"""

from __future__ import annotations

from capabilities.backbone import BackboneSet, Enactment
from capabilities.certificates import Mandate, Vote
from scheduler.backbone_ledger import BackboneLedger, Keys
from scheduler.election_state import Ballot, HardState


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

    def may_vote(self, candidate: str, term: int, version: int, proof: Vote | None) -> bool:
        """Whether the promises so far allow a vote for `candidate` in `term` under that backbone version.

        `proof`: another member's vote, for a term that is further ahead than this peer knows.
        """
        acting = self.ledger.acting
        if acting is None or version != acting.version or not self.ledger.seated or candidate not in acting.peers:
            return False
        if Ballot(version, term, candidate) == self.voted:
            return term > self._settled
        if term <= self.floor:
            return False
        return term == self.floor + 1 or (proof is not None and term <= proof.term + 1 and self.is_genuine(proof))

    def is_genuine(self, vote: Vote) -> bool:
        """Whether a member of the acting backbone cast it."""
        acting = self.ledger.acting
        if acting is None or vote.swarm != acting.swarm or vote.voter not in acting.peers:
            return False
        return self._keys.verify(vote.voter, vote.payload(), vote.signature)

    def vote(self, candidate: str, term: int) -> Vote:
        """This peer's vote, which `may_vote` allowed. It is in the hard state now: store that before sending."""
        ballot = Ballot(self.ledger.version, term, candidate)
        if ballot != self.voted:
            self.voted = ballot
        return self._cast(ballot)

    def last_vote(self, since: int) -> Vote | None:
        """The last vote again, if it was for term `since` or a later one."""
        return None if self.voted is None or self.voted.term < since else self._cast(self.voted)

    def _cast(self, ballot: Ballot) -> Vote:
        return Vote.cast(self.ledger.swarm, ballot.version, ballot.term, ballot.leader, self.peer, self._keys.sign)

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
