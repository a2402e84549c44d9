"""Audits of live work: every peer's answers, which of them are recomputed (audit_choice.py), and what follows from what
was found (audit_tests.py).

A peer that cheats in every answer is first found out by one of the first 90, with a probability of 99.2 %, however long
it was honest before, and by one of the first 109 for certain: one of each stretch of 55 is audited. From then on every
answer is, and the sixth wrong audit convicts: within 95 and 114. Of a new peer all are from the first. These are
numbers of answers; what a peer gives until the judge has come to them is on top, and audit_queue.py bounds how many
audits come before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from scheduler.audit_choice import AuditChoice, Chosen, PeerStanding
from scheduler.audit_tests import Change, Found, PeerAudits, PeerTests

SELF_DIFFERED_KNOWN: Final = 3  # after so many, further answers that are off are asked again as rarely
PEERS_MAX: Final = 4096  # as many as a placement record can name


@dataclass(slots=True)
class AuditCounts:
    """Of one peer at this leader, or of all: answers, rows in them, and what became of audits."""

    answered: int = 0
    rows: int = 0
    audited: int = 0
    agreed: int = 0
    differed: int = 0
    dropped: int = 0
    rows_recomputed: int = 0
    repeated: int = 0


@dataclass(slots=True)
class _Peer:
    tests: PeerTests = field(default_factory=PeerTests)
    counts: AuditCounts = field(default_factory=AuditCounts)
    trusted: int = 0


class Audits:
    """All peers of a leader. secret: drawn by it, and told nobody. Calls must not overlap."""

    def __init__(self, secret: bytes) -> None:
        self._choice = AuditChoice(secret)
        self._peers: dict[str, _Peer] = {}

    # What is audited

    def standing(self, peer: str) -> PeerStanding:
        """Of a peer, as far as it matters to what is audited of it."""
        state = self._peers.get(peer)
        if state is None:
            return PeerStanding()
        held = state.tests.held
        return PeerStanding(held.in_a_row, state.tests.suspected, held.unfit)

    def suspected(self, peer: str) -> bool:
        """Something is held against it, and it is not quarantined yet."""
        state = self._peers.get(peer)
        return state is not None and state.tests.suspected and not state.tests.held.quarantined

    def answered(self, peer: str, rows: int) -> Chosen | None:
        """A peer answered so many rows; what to recompute of it, if anything. Whoever cannot says `dropped`."""
        state = self._of(peer)
        state.counts.answered += 1
        state.counts.rows += rows
        state.tests.answered(finite=True)
        chosen = self._choice.choose(peer, state.counts.answered, rows, self.standing(peer))
        if chosen is not None:
            state.counts.rows_recomputed += chosen.rows
        return chosen

    def refused(self, peer: str) -> tuple[Change, ...]:
        """A peer's answer had values that are not finite, and went into no request."""
        return self._of(peer).tests.answered(finite=False)

    def refill(self) -> None:
        """Let the budget be full again, for an experiment in which it is no matter."""
        self._choice.refill()

    @property
    def overhead(self) -> float:
        """What audits took so far, and rows that were asked again, as a share of what peers computed."""
        return self._choice.overhead

    def dropped(self, chosen: Chosen) -> None:
        """It was not recomputed after all."""
        state = self._of(chosen.peer)
        state.counts.dropped += 1
        state.counts.rows_recomputed -= chosen.rows
        self._choice.give_up(chosen)

    # What is found

    def found(self, chosen: Chosen, found: Found) -> tuple[Change, ...]:
        """An answer was recomputed. Of a peer that is quarantined nothing changes any more."""
        state = self._of(chosen.peer)
        state.counts.audited += 1
        self._choice.settle(chosen, found.took_s, found.kernels_s)
        changes = self._counted(state, state.tests.audited(found))
        if not found.wrong and not state.tests.suspected:
            state.trusted = max(state.trusted, chosen.number)
        return changes

    def asks_again(self, chosen: Chosen, found: Found, rows: int) -> bool:
        """Whether to ask the peer so many rows of this answer once more, after `found`. Then `repeated` says what came
        of it, or `not_repeated` that nothing did."""
        tests = self._of(chosen.peer).tests
        unclear = tests.unclear(found) and tests.held.self_differed < SELF_DIFFERED_KNOWN
        return not tests.held.quarantined and self._choice.takes_again(chosen, rows, unclear)

    def not_repeated(self, rows: int) -> None:
        """So many rows were not asked again after all."""
        self._choice.gives_back(rows)

    def repeated(self, chosen: Chosen, found: Found, same: bool) -> tuple[Change, ...]:
        """An answer that was `found` so was asked again. same: it came bit for bit."""
        state = self._of(chosen.peer)
        state.counts.repeated += 1
        return state.tests.repeated(found, same)

    def found_wrong(self, peer: str) -> tuple[Change, ...]:
        """Rows that the peer gave outside of requests are those of another function: as one wrong audit."""
        state = self._of(peer)
        return self._counted(state, state.tests.weigh(Found(1, wrong=1)))

    def found_precise(self, peer: str, precise: bool) -> tuple[Change, ...]:
        """Crafted rows of an unfit peer showed how it adds: as so many rows of live work."""
        return self._of(peer).tests.found_precise(precise)

    @staticmethod
    def _counted(state: _Peer, weighed: tuple[tuple[Change, ...], bool]) -> tuple[Change, ...]:
        changes, agreed = weighed
        state.counts.agreed += agreed
        state.counts.differed += not agreed
        return changes

    # What is known

    def trusted(self, peer: str) -> int:
        """The number of its newest answer that an audit found right while nothing was held against it; 0: none."""
        return self._of(peer).trusted

    def number(self, peer: str) -> int:
        """How many answers it gave."""
        return self._of(peer).counts.answered

    def held(self, peer: str) -> PeerAudits:
        return self._of(peer).tests.held

    def counts(self, peer: str) -> AuditCounts:
        return self._of(peer).counts

    def totals(self) -> AuditCounts:
        """Of all peers together."""
        names = [each.name for each in fields(AuditCounts)]
        sums = {name: sum(getattr(state.counts, name) for state in self._peers.values()) for name in names}
        return AuditCounts(**sums)

    def records(self) -> Mapping[str, PeerAudits]:
        """To leave to a successor: all of whom something is known."""
        held = {peer: state.tests.held for peer, state in self._peers.items()}
        return {peer: each for peer, each in held.items() if each != PeerAudits()}

    # What others decide

    def adopt(self, records: Mapping[str, PeerAudits]) -> None:
        """Go on from what a predecessor left, of peers that are not known here."""
        for peer, held in records.items():
            if peer not in self._peers and len(self._peers) < PEERS_MAX:
                self._peers[peer] = _Peer(PeerTests(held))

    def mark_unfit(self, peer: str) -> None:
        """Found otherwise: by the probe, or by crafted rows."""
        self._of(peer).tests.mark_unfit()

    def mark_quarantined(self, peer: str) -> None:
        """By a verdict of an earlier leader."""
        self._of(peer).tests.mark_quarantined()

    def release(self, peer: str, released: int) -> bool:
        """The owner's newest release of a peer: if it is news, the peer is a new one. Whether it is."""
        state = self._of(peer)
        if released <= state.tests.held.released:
            return False
        state.tests = PeerTests(PeerAudits(released=released))
        return True

    # Inside

    def _of(self, peer: str) -> _Peer:
        state = self._peers.get(peer)
        if state is None:
            if len(self._peers) >= PEERS_MAX:  # whoever said least is forgotten
                least = min(self._peers, key=lambda name: self._peers[name].counts.answered)
                del self._peers[least]
            state = self._peers[peer] = _Peer()
        return state
