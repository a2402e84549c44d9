"""What follows from what audits of a peer found: a sequential test for each way to be off.

**The test.** Page's cumulative sum of log likelihood ratios, which is Wald's sequential test begun anew whenever it
favours the peer. Each audit of a kind adds log(p1 / p0) if it goes against the peer, and log((1 - p1) / (1 - p0)) if
not; the sum never falls below zero, and convicts at log(1 / ERROR).

    test          counts                        p0, honest   p1     to convict, at least
    wrong         audits with any wrong row     0.001        0.05   6 in a row
    coarse        rows asked for in F32         0.2          0.9    14 in a row; unfit for output ranks
    precise       rows of an unfit peer         0.1          0.8    10 in a row; fit again
    odd           rows                          0.35         0.9    22 in a row, in six audits
    refused       answers with values that      0.05         0.5    9 in a row
                  are not finite

**Error bounds.** Of an honest peer, whose audits are wrong with a probability of at most p0, the likelihood ratio
since any one audit is a martingale, which by Ville's inequality ever reaches 1 / ERROR with probability ERROR at most.
Two of the tests convict, so n audits of a peer end in a false quarantine with a probability below 2 n * ERROR: under
4e-4 for an hour of full auditing at fifty audits a second. One audit convicts nobody, nor do five. A peer whose audits
are wrong with probability p is caught in the end if p is above 0.013, where the sum begins to rise by itself.

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

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from capabilities.verdict import Fitness

ERROR: Final = 1e-9
REFUSED: Final = (0.05, 0.5)  # p0: half-precision sums of some tokens overflow; measured up to 0.006 of all answers
WRONG: Final = (0.001, 0.05)  # p0: a flipped bit in memory now and then, far above what working machines show
COARSE: Final = (0.2, 0.9)  # p0: rows in which an 8-bit code fell on the other side of a tie, measured up to 0.11
PRECISE: Final = (0.1, 0.8)  # p0: rows of half-precision sums that happen to be right
ODD: Final = (0.35, 0.9)  # p0: the text above says where half-precision sums and ties are
ODD_OF_AN_AUDIT: Final = math.log(1 / ERROR) / 5.5  # so that six are needed, as of wrong ones
CRAFTED_COUNT: Final = 4  # three such checks in a row make a peer fit again, as three others made it unfit
SAME_FIRST: Final = 6  # the text above says why
TIMES_COUNTED_MAX: Final = 10  # each time the way back is twice as long: experts must not be moved to and fro
_LIMIT: Final = math.log(1 / ERROR)


class Change(StrEnum):
    """What an audit changed about a peer."""

    SUSPECTED = "suspected"  # every answer is audited from now on
    QUARANTINED = "quarantined"  # it computes another function
    UNFIT = "unfit"  # out of tolerance, and the same function
    FIT = "fit"  # back in tolerance
    SPLIT = "split"  # its bits, equal until now, are others, within tolerance


@dataclass(frozen=True, slots=True)
class Found:
    """What recomputing an answer showed.

    identical: bit for bit. wrong, coarse: so many of its rows. odd: of these, so many are off as no rounding is, wrong
    ones among them. ask_f32: sums in single precision were asked for. telling: rows that are right show that the sums
    were precise. took_s: processor time of it all, and kernels_s of computing the answer once; 0: not measured.
    """

    rows: int
    identical: bool = False
    wrong: int = 0
    coarse: int = 0
    odd: int = 0
    ask_f32: bool = True
    telling: bool = True
    took_s: float = 0.0
    kernels_s: float = 0.0

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


def step(score: float, against: bool, odds: tuple[float, float]) -> float:
    """A test's sum after one more observation. odds: p0 and p1."""
    return max(0.0, score + _ratio(odds, against))


def _ratio(odds: tuple[float, float], against: bool) -> float:
    """The log likelihood ratio of one observation."""
    p0, p1 = odds
    return math.log(p1 / p0) if against else math.log((1 - p1) / (1 - p0))


class PeerTests:
    """The tests of one peer. `held` is what is known of it; nothing changes of one that is quarantined."""

    __slots__ = ("_audited", "_identical", "_odd_score", "_precise_score", "_refused_score", "_same", "held")

    def __init__(self, held: PeerAudits | None = None) -> None:
        self.held = held or PeerAudits()
        self._precise_score = self._odd_score = self._refused_score = 0.0
        self._audited = False
        self._identical = False  # every audit so far was, and there was one, but for what is being looked into
        self._same = 0  # answers in a row with other bits than the leader's that it repeated bit for bit

    @property
    def suspected(self) -> bool:
        held = self.held
        return held.wrong_score > 0 or self._odd_score > 0 or held.coarse_score >= _LIMIT / 2

    def unclear(self, found: Found) -> bool:
        """Whether to ask for an answer again that was `found` so: it is off, or its bits are news."""
        return found.off or (self._identical and not found.identical)

    def audited(self, found: Found) -> tuple[tuple[Change, ...], bool]:
        """An answer was recomputed. What changes, and whether it agreed."""
        if not self._audited:
            self._audited, self._identical = True, found.identical
        return self.weigh(found)

    def weigh(self, found: Found) -> tuple[tuple[Change, ...], bool]:
        """The same of rows that the peer gave outside of requests."""
        held, suspected = self.held, self.suspected
        wrong = found.wrong > 0
        coarse_score = held.coarse_score
        for row in range(found.rows - found.wrong):
            coarse = row < found.coarse
            if found.ask_f32 and not held.unfit:
                coarse_score = step(coarse_score, coarse, COARSE)
            if coarse or found.telling:
                self._precise_score = step(self._precise_score, not coarse, PRECISE)
        imprecise = found.coarse > 0 and found.ask_f32 and coarse_score >= _LIMIT / 2
        odd = max(found.odd, found.wrong)
        says = odd * _ratio(ODD, True) + (found.rows - odd) * _ratio(ODD, False)
        self._odd_score = max(0.0, self._odd_score + min(says, ODD_OF_AN_AUDIT))
        differed = wrong or imprecise or (odd > 0 and self._odd_score > 0)
        if held.quarantined:
            return (), not differed
        self.held = held = replace(
            held,
            agreed=held.agreed + (not differed),
            differed=held.differed + differed,
            in_a_row=0 if wrong or imprecise else held.in_a_row + 1,  # a lone odd row says nothing
            wrong_score=step(held.wrong_score, wrong, WRONG),
            coarse_score=min(coarse_score, _LIMIT),
        )
        if max(held.wrong_score, self._odd_score) >= _LIMIT:
            self.held = replace(held, quarantined=True)
            return (Change.QUARANTINED,), False
        return self._fitness(suspected), not differed

    def answered(self, finite: bool) -> tuple[Change, ...]:
        """It answered, and its values were finite, or refused."""
        if finite and self._refused_score == 0:
            return ()
        self._refused_score = step(self._refused_score, not finite, REFUSED)
        if self.held.quarantined or self._refused_score < _LIMIT:
            return ()
        self.mark_quarantined()
        return (Change.QUARANTINED,)

    def repeated(self, found: Found, same: bool) -> tuple[Change, ...]:
        """An answer that was `found` so was asked again. same: it came bit for bit."""
        if not same:
            self._same = 0
            self.held = replace(self.held, self_differed=self.held.self_differed + 1)
        elif self._identical and not found.identical and not found.off:
            self._same += 1
            if self._same >= SAME_FIRST + self.held.self_differed:
                self._identical = False
                return (Change.SPLIT,)
        return ()

    def found_precise(self, precise: bool) -> tuple[Change, ...]:
        """Crafted rows of an unfit peer showed how it adds: as so many rows of live work."""
        for _ in range(CRAFTED_COUNT):
            self._precise_score = step(self._precise_score, precise, PRECISE)
        return self._fitness(self.suspected)

    def _fitness(self, suspected: bool) -> tuple[Change, ...]:
        held = self.held
        if not held.unfit and held.coarse_score >= _LIMIT:
            self.mark_unfit()
            return (Change.UNFIT,)
        if held.unfit and self._precise_score >= _LIMIT * 2 ** min(held.times_unfit - 1, TIMES_COUNTED_MAX):
            self.held = replace(held, unfit=False, coarse_score=0.0)
            return (Change.FIT,)
        return (Change.SUSPECTED,) if self.suspected and not suspected else ()

    def mark_unfit(self) -> None:
        """Decided, so nothing more is held against it: what an unfit peer may do, it is trusted with."""
        if not self.held.unfit:
            times = self.held.times_unfit + 1
            self.held = replace(self.held, unfit=True, times_unfit=times, coarse_score=0.0)
        self._precise_score = 0.0

    def mark_quarantined(self) -> None:
        self.held = replace(self.held, quarantined=True)
