"""Whom a worker obeys: the leader of the newest certified term, and nobody else.

A mandate is checked, stored (fsync), and only then obeyed, so a worker that restarts never obeys an older leader again.
From the moment a newer term is known, older ones are refused. Askers use the same object to know whose tokens to
accept.

    receive(mandate) -> the same to write and fsync, or None if there is nothing new
    stored(mandate)     it is on disk: obey
    check(term, leader) before each order, with the sender's authenticated id
"""

from __future__ import annotations

from capabilities.backbone import Verify, VerifyOwner
from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, SwarmError
from scheduler.election_state import DamagedState, seal, unseal


class StaleTerm(SwarmError):
    """An order of a term that is over. Details: `term`, the newer one."""

    type = "stale_term"
    default_hint = "Another leader was elected since; ask it."


class UncertifiedTerm(SwarmError):
    """An order of a term that this peer has no mandate of, or of a peer that does not lead it.

    Details: `term`, the newest that it has one of.
    """

    type = "uncertified_term"
    default_hint = "A leader shows its term's mandate before it gives orders."


def to_file(mandate: Mandate) -> bytes:
    """What to write into the guard's file."""
    return seal(mandate.to_bytes())


def from_file(data: bytes) -> Mandate:
    """What `to_file` gave.

    Raises:
        DamagedState: it is not that. Without its file a guard knows no term, and may obey an old leader until the
            newest one has shown its mandate.
    """
    try:
        return Mandate.from_bytes(unseal(data))
    except PeerMistake as mistake:
        raise DamagedState(f"the term file is damaged: {mistake.message}") from None


class TermGuard:
    """See the module."""

    def __init__(self, swarm: str, verify: Verify, verify_owner: VerifyOwner, stored: Mandate | None) -> None:
        """`stored`: what the file holds."""
        self._swarm = swarm
        self._verify = verify
        self._verify_owner = verify_owner
        self._known = stored
        self._obeyed = stored

    @property
    def term(self) -> int:
        """The newest certified term that is known, 0 before any."""
        return 0 if self._known is None else self._known.term

    @property
    def known(self) -> Mandate | None:
        """The newest mandate: what to show to an old leader."""
        return self._known

    @property
    def obeyed(self) -> Mandate | None:
        """The newest mandate that is on disk: whose leader is obeyed, unless a newer one is known."""
        return self._obeyed

    def receive(self, mandate: Mandate) -> Mandate | None:
        """A mandate came, from anybody. It is returned to be written, fsynced and confirmed; None: known already.

        Raises:
            StaleTerm: a newer term is known.
            PeerMistake: it is no mandate of this swarm, or contradicts what is known.
        """
        known = self._known
        if mandate.term < self.term:
            raise StaleTerm(f"term {mandate.term} is over: term {self.term} is certified", term=self.term)
        if known is not None and mandate.certificate == known.certificate:
            return None
        mandate.verify(self._swarm, self._verify, self._verify_owner)
        if known is not None:
            mandate.check_after(known)
        if mandate.term == self.term:
            return None
        self._known = mandate
        return mandate

    def stored(self, mandate: Mandate) -> None:
        """The mandate is on disk."""
        if self._obeyed is None or mandate.term > self._obeyed.term:
            self._obeyed = mandate

    def check(self, term: int, leader: str) -> None:
        """Whether to obey an order that `leader` gives in `term`.

        Raises:
            StaleTerm: a newer term is known.
            UncertifiedTerm: there is no stored mandate of this term here, or it names another leader.
        """
        if term < self.term:
            raise StaleTerm(f"term {term} is over: term {self.term} is certified", term=self.term)
        obeyed = self._obeyed
        if obeyed is None or term != obeyed.term:
            newest = 0 if obeyed is None else obeyed.term
            raise UncertifiedTerm(f"no stored mandate of term {term} here", term=newest)
        if leader != obeyed.leader:
            raise UncertifiedTerm(f"term {term} is led by {obeyed.leader}, not by {leader}", term=term)
