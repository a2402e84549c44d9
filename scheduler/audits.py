"""Audits of live work: which answers are recomputed, and what follows from what was found, by a sequential test a peer.

An answer is chosen after it came, by a keyed hash of its peer and number under a secret of this leader: nobody else
can tell which. A new peer's are all chosen until `AGREED_FIRST` audits agreed; then the share falls as the inverse of
how many agreed in a row, to `SHARE_MIN`. While anything is held against a peer, all of its answers are chosen. What
audits recompute is bounded: at most `BUDGET_SHARE` of all rows that peers computed, and `BURST_ROWS`.

**The test.** Page's cumulative sum of log likelihood ratios, which is Wald's sequential test begun anew whenever it
favours the peer. Each audit of a kind adds log(p1 / p0) if it goes against the peer, and log((1 - p1) / (1 - p0)) if
not; the sum never falls below zero, and convicts at log(1 / ERROR).

    test          counts                        p0, honest   p1     to convict, at least
    wrong         audits with any wrong row     0.001        0.05   6 in a row
    coarse        rows asked for in F32         0.2          0.9    14 in a row; unfit for output ranks
    precise       rows of an unfit peer         0.1          0.8    10 in a row; fit again
    odd           rows                          0.35         0.9    22 in a row, in six audits

**Error bounds.** Of an honest peer, whose audits are wrong with a probability of at most p0, the likelihood ratio
since any one audit is a martingale, which by Ville's inequality ever reaches 1 / ERROR with probability ERROR at most.
Two of the tests convict, so n audits of a peer end in a false quarantine with a probability below 2 n * ERROR: under
4e-4 for an hour of full auditing at fifty audits a second. One audit convicts nobody, nor do five. A peer whose audits
are wrong with probability p is caught in the end if p is above 0.013, where the sum begins to rise by itself.

A peer that always cheats is first audited within 90 answers with probability 1 - (1 - SHARE_MIN)^90 = 0.9901, however
long it was honest before; from then on every answer is audited, and the sixth wrong one convicts: within 95.

**Odd rows.** Coarse rows are those of the right function, as far off as half-precision sums are. A wrong function that
hides among them is further off than such sums, or off by its length alone (capabilities/row_grades.py). Both happen to
honest peers, too, in one row or another. Known sums in half precision have odd rows in a third at the most where
experts are 64 neurons wide, in a fifth from 256 on; of codes at ties one row in nine was seen. An audit's rows count
together, and add no more than ODD_OF_AN_AUDIT, which only takes from the sum. Where more than 0.66 of the rows are odd
it rises by itself, and the peer is out in the end; an error that small in some answers only is not.

**Asked again.** Of answers that were off, and of a few that were not, the peer is asked the same once more. Whether it
gave the same bits is counted, and held against nobody: kernels that add in the order in which threads happen to end
never repeat themselves. A peer is of another numeric class only once SAME_FIRST answers in a row with other bits than
the leader's were each repeated bit for bit, and one more for each time that it ever differed from itself: one that
draws each answer from two results comes to that with a probability of 2^(1 - SAME_FIRST), or 3 %, at the worst. Wrong
rows count as ever, repeated or not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final

from capabilities.verdict import Fitness

SHARE_MIN: Final = 0.05  # so that ninety answers hold an audit with 99 % probability: 0.95^90 = 0.0099
SHARE_UNFIT: Final = 0.25  # so that one that is right again is soon seen to be
AGREED_FIRST: Final = 10
BUDGET_SHARE: Final = 0.10  # twice the least share: half of it is left for new peers and suspects
BURST_ROWS: Final = 4096  # a dozen new peers at once, at ten dispatches of AUDIT_ROWS_MAX each
AUDIT_ROWS_MAX: Final = 32  # of one answer: all of a decode step of four sequences; of a prefill, a sample
ERROR: Final = 1e-9
WRONG: Final = (0.001, 0.05)  # p0: a flipped bit in memory now and then, far above what working machines show
COARSE: Final = (0.2, 0.9)  # p0: rows in which an 8-bit code fell on the other side of a tie, measured up to 0.11
PRECISE: Final = (0.1, 0.8)  # p0: rows of half-precision sums that happen to be right
ODD: Final = (0.35, 0.9)  # p0: the text above says where half-precision sums and ties are
ODD_OF_AN_AUDIT: Final = math.log(1 / ERROR) / 5.5  # so that six are needed, as of wrong ones
CRAFTED_COUNT: Final = 4  # three such checks in a row make a peer fit again, as three others made it unfit
AGAIN_SHARE: Final = 1 / 8  # of audits that agreed: enough to notice, and little beside what audits cost
SELF_DIFFERED_KNOWN: Final = 3  # after so many, further answers that are off are asked again as rarely
SAME_FIRST: Final = 6  # the text above says why
TIMES_COUNTED_MAX: Final = 10  # each time the way back is twice as long: experts must not be moved to and fro
PEERS_MAX: Final = 4096  # as many as a placement record can name
_RESERVED_NEW: Final = 0.5  # of the burst, which new peers leave to suspects, and suspects to everybody
_RESERVED_SUSPECT: Final = 0.25
_SECRET_BYTES_MIN: Final = 16


class Change(StrEnum):
    """What an audit changed about a peer."""

    SUSPECTED = "suspected"  # every answer is audited from now on
    QUARANTINED = "quarantined"  # it computes another function
    UNFIT = "unfit"  # out of tolerance, and the same function
    FIT = "fit"  # back in tolerance
    SPLIT = "split"  # its bits, equal until now, are others, within tolerance


@dataclass(frozen=True, slots=True)
class Chosen:
    """An answer to recompute: the peer's `number`th. rows: how many of its rows; `seed` chooses which."""

    peer: str
    number: int
    rows: int
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """What recomputing an answer showed.

    identical: bit for bit. wrong, coarse: so many of its rows. odd: of these, so many are off as no rounding is, wrong
    ones among them. ask_f32: sums in single precision were asked for. telling: rows that are right show that the sums
    were precise.
    """

    rows: int
    identical: bool = False
    wrong: int = 0
    coarse: int = 0
    odd: int = 0
    ask_f32: bool = True
    telling: bool = True

    @property
    def off(self) -> bool:
        """Some row is wrong or coarse."""
        return self.wrong > 0 or self.coarse > 0


@dataclass(frozen=True, slots=True)
class PeerAudits:
    """What a leader leaves of a peer's audits to its successor. Scores are sums of the tests above."""

    agreed: int = 0
    differed: int = 0
    in_a_row: int = 0  # agreed, since the last that did not
    wrong_score: float = 0.0
    coarse_score: float = 0.0
    unfit: bool = False
    times_unfit: int = 0
    quarantined: bool = False
    released: int = 0  # the owner's newest release that these counts follow
    self_differed: int = 0  # asked the same again, it answered other bits than before

    @property
    def fitness(self) -> Fitness:
        return "quarantined" if self.quarantined else "unfit" if self.unfit else "fit"


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
    held: PeerAudits = PeerAudits()
    counts: AuditCounts = field(default_factory=AuditCounts)
    precise_score: float = 0.0
    odd_score: float = 0.0
    trusted: int = 0
    identical: bool = False  # every audit so far was, and there was one, but for what is being looked into
    same: int = 0  # answers in a row with other bits than the leader's that it repeated bit for bit

    @property
    def suspected(self) -> bool:
        held = self.held
        return held.wrong_score > 0 or self.odd_score > 0 or held.coarse_score >= _LIMIT / 2


_LIMIT: Final = math.log(1 / ERROR)


def step(score: float, against: bool, odds: tuple[float, float]) -> float:
    """A test's sum after one more observation. odds: p0 and p1."""
    return max(0.0, score + _ratio(odds, against))


def _ratio(odds: tuple[float, float], against: bool) -> float:
    """The log likelihood ratio of one observation."""
    p0, p1 = odds
    return math.log(p1 / p0) if against else math.log((1 - p1) / (1 - p0))


class Audits:
    """All peers of a leader. secret: drawn by it, and told nobody. Calls must not overlap."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES_MIN:
            raise ValueError(f"a secret has at least {_SECRET_BYTES_MIN} bytes")
        self._secret = secret
        self._peers: dict[str, _Peer] = {}
        self._rows = self._recomputed = 0
        self._credit = float(BURST_ROWS)

    # What is audited

    def share(self, peer: str) -> float:
        """Of a peer's answers that are audited now, if the budget allows."""
        state = self._peers.get(peer)
        if state is None or state.suspected or state.held.in_a_row < AGREED_FIRST:
            return 1.0
        return max(SHARE_UNFIT if state.held.unfit else SHARE_MIN, AGREED_FIRST / state.held.in_a_row)

    def answered(self, peer: str, rows: int) -> Chosen | None:
        """A peer answered so many rows; what to recompute of it, if anything. Whoever cannot says `dropped`."""
        state = self._of(peer)
        state.counts.answered += 1
        state.counts.rows += rows
        self._rows += rows
        self._credit = min(self._credit + BUDGET_SHARE * rows, float(BURST_ROWS))
        number = state.counts.answered
        drawn = self._draw(peer, number)
        uniform = (drawn >> 64) / 2**64
        if uniform >= self.share(peer):
            return None
        wanted = min(rows, AUDIT_ROWS_MAX)
        reserved = 0.0
        if uniform >= SHARE_MIN:
            reserved = _RESERVED_SUSPECT if state.suspected else _RESERVED_NEW
        if self._credit - wanted < reserved * BURST_ROWS:
            return None
        self._recomputed += wanted
        self._credit -= wanted
        state.counts.rows_recomputed += wanted
        return Chosen(peer, number, wanted, drawn & (2**64 - 1))

    @property
    def overhead(self) -> float:
        """Rows recomputed, and asked again, so far, as a share of the rows that were computed."""
        return self._recomputed / self._rows if self._rows else 0.0

    def dropped(self, chosen: Chosen) -> None:
        """It was not recomputed after all."""
        state = self._of(chosen.peer)
        state.counts.dropped += 1
        state.counts.rows_recomputed -= chosen.rows
        self._recomputed -= chosen.rows
        self._credit += chosen.rows

    # What is found

    def found(self, chosen: Chosen, found: Found) -> tuple[Change, ...]:
        """An answer was recomputed. Of a peer that is quarantined nothing changes any more."""
        state = self._of(chosen.peer)
        state.counts.audited += 1
        if state.counts.audited == 1:
            state.identical = found.identical
        changes = self._weigh(state, found)
        if not found.wrong and not state.suspected:
            state.trusted = max(state.trusted, chosen.number)
        return changes

    def asks_again(self, chosen: Chosen, found: Found, rows: int) -> bool:
        """Whether to ask the peer so many rows of this answer once more, after `found`. Then `repeated` says what came
        of it, or `not_repeated` that nothing did."""
        state = self._of(chosen.peer)
        if state.held.quarantined or self._credit < rows:
            return False
        unclear = found.off or (state.identical and not found.identical)
        # Not drawn as the answer itself was: it would be among those that are always chosen.
        drawn = (self._draw(f"{chosen.peer}:again", chosen.number) >> 64) / 2**64 < AGAIN_SHARE
        if not drawn and (not unclear or state.held.self_differed >= SELF_DIFFERED_KNOWN):
            return False
        self._recomputed += rows
        self._credit -= rows
        return True

    def not_repeated(self, rows: int) -> None:
        """So many rows were not asked again after all."""
        self._recomputed -= rows
        self._credit += rows

    def repeated(self, chosen: Chosen, found: Found, same: bool) -> tuple[Change, ...]:
        """An answer that was `found` so was asked again. same: it came bit for bit."""
        state = self._of(chosen.peer)
        state.counts.repeated += 1
        if not same:
            state.same = 0
            state.held = replace(state.held, self_differed=state.held.self_differed + 1)
        elif state.identical and not found.identical and not found.off:
            state.same += 1
            if state.same >= SAME_FIRST + state.held.self_differed:
                state.identical = False
                return (Change.SPLIT,)
        return ()

    def found_wrong(self, peer: str) -> tuple[Change, ...]:
        """Rows that the peer gave outside of requests are those of another function: as one wrong audit."""
        return self._weigh(self._of(peer), Found(1, wrong=1))

    def found_precise(self, peer: str, precise: bool) -> tuple[Change, ...]:
        """Crafted rows of an unfit peer showed how it adds: as so many rows of live work."""
        state = self._of(peer)
        for _ in range(CRAFTED_COUNT):
            state.precise_score = step(state.precise_score, precise, PRECISE)
        return self._fitness(state, state.suspected)

    def _weigh(self, state: _Peer, found: Found) -> tuple[Change, ...]:
        held, suspected = state.held, state.suspected
        wrong = found.wrong > 0
        coarse_score = held.coarse_score
        for row in range(found.rows - found.wrong):
            coarse = row < found.coarse
            if found.ask_f32 and not held.unfit:
                coarse_score = step(coarse_score, coarse, COARSE)
            if coarse or found.telling:
                state.precise_score = step(state.precise_score, not coarse, PRECISE)
        imprecise = found.coarse > 0 and found.ask_f32 and coarse_score >= _LIMIT / 2
        odd = max(found.odd, found.wrong)
        says = odd * _ratio(ODD, True) + (found.rows - odd) * _ratio(ODD, False)
        state.odd_score = max(0.0, state.odd_score + min(says, ODD_OF_AN_AUDIT))
        differed = wrong or imprecise or (odd > 0 and state.odd_score > 0)
        state.counts.agreed += not differed
        state.counts.differed += differed
        if held.quarantined:
            return ()
        state.held = held = replace(
            held,
            agreed=held.agreed + (not differed),
            differed=held.differed + differed,
            in_a_row=0 if wrong or imprecise else held.in_a_row + 1,  # a lone odd row says nothing
            wrong_score=step(held.wrong_score, wrong, WRONG),
            coarse_score=min(coarse_score, _LIMIT),
        )
        if max(held.wrong_score, state.odd_score) >= _LIMIT:
            state.held = replace(held, quarantined=True)
            return (Change.QUARANTINED,)
        return self._fitness(state, suspected)

    def _fitness(self, state: _Peer, suspected: bool) -> tuple[Change, ...]:
        held = state.held
        if not held.unfit and held.coarse_score >= _LIMIT:
            self._set_unfit(state)
            return (Change.UNFIT,)
        if held.unfit and state.precise_score >= _LIMIT * 2 ** min(held.times_unfit - 1, TIMES_COUNTED_MAX):
            state.held = replace(held, unfit=False, coarse_score=0.0)
            return (Change.FIT,)
        return (Change.SUSPECTED,) if state.suspected and not suspected else ()

    @staticmethod
    def _set_unfit(state: _Peer) -> None:
        """Decided, so nothing more is held against it: what an unfit peer may do, it is trusted with."""
        if not state.held.unfit:
            times = state.held.times_unfit + 1
            state.held = replace(state.held, unfit=True, times_unfit=times, coarse_score=0.0)
        state.precise_score = 0.0

    # What is known

    def trusted(self, peer: str) -> int:
        """The number of its newest answer that an audit found right while nothing was held against it; 0: none."""
        return self._of(peer).trusted

    def number(self, peer: str) -> int:
        """How many answers it gave."""
        return self._of(peer).counts.answered

    def held(self, peer: str) -> PeerAudits:
        return self._of(peer).held

    def counts(self, peer: str) -> AuditCounts:
        return self._of(peer).counts

    def totals(self) -> AuditCounts:
        """Of all peers together."""
        names = [each.name for each in fields(AuditCounts)]
        sums = {name: sum(getattr(state.counts, name) for state in self._peers.values()) for name in names}
        return AuditCounts(**sums)

    def records(self) -> Mapping[str, PeerAudits]:
        """To leave to a successor: all of whom something is known."""
        return {peer: state.held for peer, state in self._peers.items() if state.held != PeerAudits()}

    # What others decide

    def adopt(self, records: Mapping[str, PeerAudits]) -> None:
        """Go on from what a predecessor left, of peers that are not known here."""
        for peer, held in records.items():
            if peer not in self._peers and len(self._peers) < PEERS_MAX:
                self._peers[peer] = _Peer(held)

    def mark_unfit(self, peer: str) -> None:
        """Found otherwise: by the probe, or by crafted rows."""
        self._set_unfit(self._of(peer))

    def mark_quarantined(self, peer: str) -> None:
        """By a verdict of an earlier leader."""
        state = self._of(peer)
        state.held = replace(state.held, quarantined=True)

    def release(self, peer: str, released: int) -> bool:
        """The owner's newest release of a peer: if it is news, the peer is a new one. Whether it is."""
        state = self._of(peer)
        if released <= state.held.released:
            return False
        self._peers[peer] = _Peer(PeerAudits(released=released), state.counts, trusted=state.trusted)
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

    def _draw(self, peer: str, number: int) -> int:
        """128 bits that nobody without the secret can foresee, for the peer's `number`th answer."""
        hashed = hashlib.blake2b(f"{peer}:{number}".encode(), key=self._secret[:64], digest_size=16)
        return int.from_bytes(hashed.digest(), "big")
