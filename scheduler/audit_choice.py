"""Which answers of live work are recomputed, and in how many of their rows: a secret draws, a budget of time bounds.

An answer is chosen after it came, by keyed hashes of its peer and number under a secret of this leader: nobody else can
tell which.

- **One of each STRETCH answers of a peer**, at a place in the stretch that the secret draws, whatever else is going on
  and whatever it costs. The next one is at most 2 * STRETCH - 1 answers away; more than 90, 0.8 times in a hundred.
- **All** of a new peer, until AGREED_FIRST audits agreed, and of one that something is held against.
- **A share** of all others that falls as the inverse of how many audits agreed in a row, to SHARE_MIN: those beyond the
  first are glances, at a single row.

The budget is processor time, in rows that this leader's own kernels compute: an audit of n rows counts as n, times what
an audited row has taken of late (an expert that must be read and laid out for the kernels first takes several times as
long as its row), and as no more than COST_MAX. Each answered row earns BUDGET_SHARE of one, up to BURST_ROWS. Who is
new, or merely drawn for its share, leaves some of that: first come suspects, then new peers, then glances. What the
first kind takes is owed, so the others wait; by itself it is one row in 55, and within a budget of a tenth as long
as an audited row takes no more than five and a half times what its computation does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

STRETCH: Final = 55  # who always cheats meets one of these within 90 answers with 99.2 %, and always within 109
SHARE_MIN: Final = 0.05  # of answers, the first kind among them
SHARE_UNFIT: Final = 0.25  # so that one that is right again is soon seen to be
AGREED_FIRST: Final = 10
BUDGET_SHARE: Final = 0.09  # of what peers compute: a tenth, less what the leader does not see of its cost
BURST_ROWS: Final = 8192  # some twenty new peers at once, at ten answers of SOME_ROWS each, at four times a row
AUDIT_ROWS_MAX: Final = 32  # of the one of a stretch: all of a decode step of four sequences; of a prefill, a sample
SOME_ROWS: Final = 8  # of new peers' and suspects': all of a decode step of one or two; of more, each reads an expert
GLANCE_ROWS: Final = 1  # who cheats in every row is seen as well; who cheats in some, by the first kind
AGAIN_SHARE: Final = 1 / 8  # of audits that agreed: enough to notice, and little beside what audits cost
PRICE_FIRST: Final = 4.0  # of wide experts in a layout that the kernels like better than the file's
COST_MAX: Final = BURST_ROWS / 16  # of one audit: six that must meet every known arithmetic still convict a suspect
_PRICE_STEP: Final = 1 / 32  # of the way to what the latest audit took
_ROW_STEP: Final = 1 / 128  # likewise of a row; one by itself takes longer than one of several, and counts less
_RESERVED_SUSPECT: Final = -0.25  # of the burst: these six audits are what all others are for
_RESERVED_NEW: Final = 0.25
_RESERVED_GLANCE: Final = 0.75
_SECRET_BYTES_MIN: Final = 16


@dataclass(frozen=True, slots=True)
class Chosen:
    """An answer to recompute: the peer's `number`th.

    rows: how many of its rows; `seed` chooses which. sure: it is the one of its stretch. cost: what it was taken to
    cost, in rows.
    """

    peer: str
    number: int
    rows: int
    seed: int
    sure: bool = False
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerStanding:
    """What matters of a peer to the choice. in_a_row: audits that agreed since one did not."""

    in_a_row: int = 0
    suspected: bool = False
    unfit: bool = False

    @property
    def share(self) -> float:
        """Of its answers that are audited, if the budget allows."""
        if self.suspected or self.in_a_row < AGREED_FIRST:
            return 1.0
        return max(SHARE_UNFIT if self.unfit else SHARE_MIN, AGREED_FIRST / self.in_a_row)

    @property
    def reserved(self) -> float:
        """Of the burst, what is left for others."""
        if self.suspected:
            return _RESERVED_SUSPECT
        return _RESERVED_NEW if self.unfit or self.in_a_row < AGREED_FIRST else _RESERVED_GLANCE


class AuditChoice:
    """secret: drawn by this leader, and told nobody."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES_MIN:
            raise ValueError(f"a secret has at least {_SECRET_BYTES_MIN} bytes")
        self._key = secret[:64]
        self._rows = 0
        self._spent = 0.0
        self._credit = float(BURST_ROWS)
        self._price = PRICE_FIRST
        self._row_s = 0.0  # 0: not known yet

    @property
    def overhead(self) -> float:
        """Time that audits took, and rows that were asked again, as a share of what peers computed."""
        return self._spent / self._rows if self._rows else 0.0

    def choose(self, peer: str, number: int, rows: int, standing: PeerStanding) -> Chosen | None:
        """A peer gave its `number`th answer, from 1, of so many rows. `settle` or `give_up` must hear of it."""
        self._rows += rows
        self._credit = min(self._credit + BUDGET_SHARE * rows, float(BURST_ROWS))
        stretch, place = divmod(number - 1, STRETCH)
        sure = self._draw(f"{peer}:stretch", stretch) % STRETCH == place
        drawn = self._draw(peer, number)
        share = standing.share
        beyond = (share - 1 / STRETCH) / (1 - 1 / STRETCH)  # of all others, so that the share is of all
        if not sure and (drawn >> 64) / 2**64 >= beyond:
            return None
        most = GLANCE_ROWS if standing.reserved == _RESERVED_GLANCE else SOME_ROWS
        wanted = min(rows, AUDIT_ROWS_MAX if sure else most)
        cost = min(wanted * self._price, COST_MAX)
        if not sure and self._credit - cost < standing.reserved * BURST_ROWS:
            return None
        self._spent += cost
        self._take(cost)
        return Chosen(peer, number, wanted, drawn & (2**64 - 1), sure, cost)

    def refill(self) -> None:
        self._credit = float(BURST_ROWS)

    def settle(self, chosen: Chosen, took_s: float, kernels_s: float) -> None:
        """What was chosen took so much processor time, of it that much to compute its rows once; 0: not measured."""
        cost = float(chosen.rows)
        if kernels_s > 0:
            row_s = kernels_s / chosen.rows
            self._row_s += (row_s - self._row_s) * (min(1.0, chosen.rows * _ROW_STEP) if self._row_s else 1.0)
            cost = took_s / self._row_s
        self._spent += cost - chosen.cost
        cost = min(cost, COST_MAX)
        self._take(cost - chosen.cost)
        self._price += (cost / chosen.rows - self._price) * _PRICE_STEP

    def give_up(self, chosen: Chosen) -> None:
        """It was not recomputed after all."""
        self._spent -= chosen.cost
        self._take(-chosen.cost)

    def takes_again(self, chosen: Chosen, rows: int, unclear: bool) -> bool:
        """Whether to ask the peer so many rows of an answer once more: out of the budget, until `gives_back`."""
        if self._credit < rows:
            return False
        # Not drawn as the answer itself was: it would be among those that are always chosen.
        if not unclear and (self._draw(f"{chosen.peer}:again", chosen.number) >> 64) / 2**64 >= AGAIN_SHARE:
            return False
        self._spent += rows
        self._take(rows)
        return True

    def gives_back(self, rows: int) -> None:
        """So many were not asked again after all."""
        self._spent -= rows
        self._take(-rows)

    def _take(self, rows: float) -> None:
        self._credit = max(self._credit - rows, -float(BURST_ROWS))  # what is owed is bounded, too

    def _draw(self, what: str, number: int) -> int:
        """128 bits that nobody without the secret can foresee."""
        hashed = hashlib.blake2b(f"{what}:{number}".encode(), key=self._key, digest_size=16)
        return int.from_bytes(hashed.digest(), "big")
