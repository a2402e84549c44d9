"""Whom a worker obeys: the leader of the newest certified term, and nobody else.

A certificate is checked against the owner-signed backbone set that comes with it, stored (fsync), and only then obeyed,
so a worker that restarts never obeys an older leader again. From the moment a newer term is known, older ones are
refused. Versions of the backbone never go back as terms grow, so members that were removed cannot certify anything
later. Askers use the same object to know whose tokens to accept.

    receive(certificate, backbone) -> GuardState to write and fsync, or None
    stored(state)                     it is on disk: obey
    check(term, leader)               before each order, with the sender's authenticated id
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from capabilities.backbone import SET_BYTES_MAX, BackboneSet, Verify, VerifyOwner
from capabilities.certificates import CERTIFICATE_BYTES_MAX, Certificate
from capabilities.errors import PeerMistake, SwarmError
from capabilities.packing import Fields, decode, pack
from scheduler.election_state import DamagedState, seal, unseal

_FORMAT: Final = 1
_STATE_BYTES_MAX: Final = CERTIFICATE_BYTES_MAX + SET_BYTES_MAX + 64


class StaleTerm(SwarmError):
    """An order of a term that is over. Details: `term`, the newer one."""

    type: ClassVar[str] = "stale_term"
    default_hint: ClassVar[str] = "Another leader was elected since; ask it."


class UncertifiedTerm(SwarmError):
    """An order of a term that this peer has no certificate of, or of a peer that does not lead it.

    Details: `term`, the newest that it has one of.
    """

    type: ClassVar[str] = "uncertified_term"
    default_hint: ClassVar[str] = "A leader shows its term's certificate before it gives orders."


@dataclass(frozen=True, slots=True)
class GuardState:
    """The newest term's certificate, and the backbone set that it was checked against."""

    certificate: Certificate
    backbone: BackboneSet

    def to_file(self) -> bytes:
        """What to write into the guard's file."""
        return seal(self.to_bytes())

    @classmethod
    def from_file(cls, data: bytes) -> GuardState:
        """What `to_file` gave.

        Raises:
            DamagedState: it is not that. Moved away, it is a guard that knows no term: safe for a worker once a
                current leader has shown it its certificate, but until then an old one may.
        """
        try:
            return decode(unseal(data), "term file", _STATE_BYTES_MAX, cls._read)
        except PeerMistake as mistake:
            raise DamagedState(f"the term file is damaged: {mistake.message}") from None

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.certificate.to_bytes(), self.backbone.to_bytes()))

    @classmethod
    def _read(cls, value: object) -> GuardState:
        fields = Fields(value, 3, "term file")
        fields.format(_FORMAT)
        certificate = Certificate.from_bytes(fields.blob("certificate", CERTIFICATE_BYTES_MAX))
        return cls(certificate, BackboneSet.from_bytes(fields.blob("backbone", SET_BYTES_MAX)))


class TermGuard:
    """See the module."""

    def __init__(self, swarm: str, verify: Verify, verify_owner: VerifyOwner, stored: GuardState | None) -> None:
        """`stored`: what the file holds."""
        self._swarm = swarm
        self._verify = verify
        self._verify_owner = verify_owner
        self._known = stored
        self._obeyed = stored

    @property
    def term(self) -> int:
        """The newest certified term that is known, 0 before any."""
        return 0 if self._known is None else self._known.certificate.term

    @property
    def known(self) -> GuardState | None:
        """The newest certificate with its backbone: what to show to an old leader."""
        return self._known

    @property
    def leader(self) -> str | None:
        """Who leads the term that is obeyed."""
        return None if self._obeyed is None else self._obeyed.certificate.leader

    def receive(self, certificate: Certificate, backbone: BackboneSet) -> GuardState | None:
        """A certificate came, from anybody. The state to write, fsync and confirm with `stored`; None: known already.

        Raises:
            StaleTerm: a newer term is known.
            PeerMistake: it is no certificate of this swarm, or contradicts what is known.
        """
        known = self._known
        if certificate.term < self.term:
            raise StaleTerm(f"term {certificate.term} is over: term {self.term} is certified", term=self.term)
        if known is not None and certificate == known.certificate:
            return None
        backbone.verify(self._swarm, self._verify_owner)
        certificate.verify(backbone, self._verify)
        if known is not None:
            if certificate.term == self.term:
                self._check_same(certificate, known.certificate)
                return None
            if backbone.version < known.backbone.version:
                raise PeerMistake(f"term {certificate.term} is newer than {self.term}, but of an older backbone")
        self._known = GuardState(certificate, backbone)
        return self._known

    def stored(self, state: GuardState) -> None:
        """The state is on disk."""
        if self._obeyed is None or state.certificate.term > self._obeyed.certificate.term:
            self._obeyed = state

    def check(self, term: int, leader: str) -> None:
        """Whether to obey an order that `leader` gives in `term`.

        Raises:
            StaleTerm: a newer term is known.
            UncertifiedTerm: this term has no stored certificate here, or names another leader.
        """
        if term < self.term:
            raise StaleTerm(f"term {term} is over: term {self.term} is certified", term=self.term)
        obeyed = 0 if self._obeyed is None else self._obeyed.certificate.term
        if term != obeyed:
            raise UncertifiedTerm(f"no stored certificate of term {term} here", term=obeyed)
        if leader != self.leader:
            raise UncertifiedTerm(f"term {term} is led by {self.leader}, not by {leader}", term=obeyed)

    @staticmethod
    def _check_same(certificate: Certificate, known: Certificate) -> None:
        if certificate.leader != known.leader:
            raise PeerMistake(f"term {known.term} is certified for both {known.leader} and {certificate.leader}")
