"""The part of an election that must never err: what this peer has promised, and which terms it believes in.

A vote is a promise for ever: one a term, whatever the backbone's version, and none for a term that is not beyond the
highest known (`floor`). A term is believed by its certificate alone.
"""

from __future__ import annotations

from capabilities.backbone import BackboneSet, Enactment
from capabilities.certificates import Certificate, Vote
from capabilities.errors import PeerMistake
from scheduler.backbone_ledger import BackboneLedger, Keys
from scheduler.election_state import Ballot, HardState
from scheduler.election_times import TERM_STEP_MAX


class Voter:
    """Holds the hard state. `unsaved` gives it whenever it changed."""

    def __init__(self, peer: str, state: HardState, keys: Keys) -> None:
        self.ledger = BackboneLedger.of(peer, state, keys)
        self.voted = state.voted
        self.certificate = state.certificate
        self.peer = peer
        self._keys = keys
        self._saved = self._parts()
        self.ledger.confirm(self.floor)

    @property
    def term(self) -> int:
        """The newest certified term, 0 before any."""
        return 0 if self.certificate is None else self.certificate.term

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

    def _parts(self) -> tuple[Ballot | None, Certificate | None, Enactment | None, BackboneSet | None]:
        return self.voted, self.certificate, self.ledger.enactment, self.ledger.pending

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

    def adopt(self, certificate: Certificate) -> bool:
        """Believe in a newer term. False: it is not newer, or of a backbone version that this peer does not know.

        Raises:
            PeerMistake: it is no certificate, or names another leader of the term that this peer knows.
        """
        current = self.certificate
        if certificate.term < self.term or certificate == current:
            return False
        backbone = self.ledger.of_version(certificate.backbone_version)
        if backbone is None:
            return False
        certificate.verify(backbone, self._keys.verify)
        if current is not None and certificate.term == current.term:
            if certificate.leader != current.leader:
                raise PeerMistake(
                    f"term {current.term} is certified for both {current.leader} and {certificate.leader}"
                )
            return False
        if current is not None and certificate.backbone_version < current.backbone_version:
            raise PeerMistake(f"term {certificate.term} is newer than {current.term}, but of an older backbone")
        self.certificate = certificate
        return True
