"""What of a leader's placements can be used at this moment. As swarmnode/leader/coverage.py.

Usually that is the current epoch on who has proven it. While a new one is prepared, a worker that had no room for both
answers under the new one as soon as it has proven that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.placement import Placement
from tests.simulator.stays import Stays

Holders = Mapping[int, tuple[tuple[str, ...], ...]]


class Coverage:
    """`refresh` looks at who can be used now; what is asked afterwards is answered from that."""

    def __init__(self, stays: Stays, *, own_copy: bool, joined_epochs: bool) -> None:
        self.current: Placement | None = None  # serves
        self.wanted: Placement | None = None  # is being prepared
        self.own_copy = own_copy
        self.answering: dict[str, Placement] = {}
        self.holders: Holders = {}
        self._stays = stays
        self._joined_epochs = joined_epochs

    @property
    def target(self) -> Placement | None:
        return self.wanted or self.current

    @property
    def complete(self) -> bool:
        """Every expert has a holder that answers."""
        return bool(self.holders) and not lacks(self.holders, self.answering)

    @property
    def covers(self) -> bool:
        """Every expert can be computed: by a holder, or here."""
        return self.complete or (self.own_copy and self.current is not None)

    @property
    def reached(self) -> bool:
        """Every expert has a holder that is there, whether it serves already or not, or can be computed here.

        What elections go by: another leader could do better only about holders that are not there.
        """
        there = [stay.peer for stay in self._stays.present() if not stay.silent]
        target = self.target
        return self.own_copy or (target is not None and not lacks(target.holders, there))

    def refresh(self) -> None:
        current, wanted = self.current, self.wanted
        self.answering, self.holders = {}, {}
        if current is None:
            return
        self.answering = {peer: current for peer in current.peers() if self._stays.is_usable(peer, current)}
        self.holders = current.holders
        if wanted is None or not self._joined_epochs:
            return
        moved = [peer for peer in wanted.peers() if peer not in self.answering and self._stays.is_usable(peer, wanted)]
        self.answering |= dict.fromkeys(moved, wanted)
        self.holders = {
            layer: tuple(
                (*(p for p in before if p not in moved), *(p for p in after if p in moved))
                for before, after in zip(holders, wanted.holders[layer], strict=True)
            )
            for layer, holders in current.holders.items()
        }

    def spares(self, peer: str) -> bool:
        """Whether every expert has a holder that answers if this one does not."""
        return bool(self.holders) and not lacks(self.holders, self.answering.keys() - {peer})

    def is_proven(self, placement: Placement, *, whole: bool) -> bool:
        """Whether all its holders can be used, or, unless `whole`, one for each expert."""
        usable = [peer for peer in placement.peers() if self._stays.is_usable(peer, placement)]
        return len(usable) == len(placement.peers()) if whole else not lacks(placement.holders, usable)


def lacks(holders: Holders, there: Collection[str]) -> bool:
    """Whether some expert has no holder among those."""
    return any(not any(peer in there for peer in peers) for each in holders.values() for peers in each)
