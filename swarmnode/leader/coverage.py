"""What of a placement can be used at this moment: the answers behind `ready`, `status` and each refusal.

Usually that is the current epoch on the members who have proven it. While a new one is prepared, whoever had no room
for both answers under the new one as soon as it has proven that; so each member answers under one name at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backends.manifest import Manifest
from capabilities.errors import NotReady
from scheduler.placement import Placement
from swarmnode.leader.members import Member, Members
from swarmnode.net.interface import PeerId

Holders = Mapping[int, tuple[tuple[str, ...], ...]]


class Coverage:
    """The epoch that serves (`current`), the one that is being prepared (`wanted`), and the members who hold them.

    `refresh` takes note of who can be used now; what is asked afterwards is answered from that. own_copy: the leader
    itself can compute what nobody else does. joined_epochs: experts of both epochs may answer in one layer.
    """

    def __init__(
        self, members: Members, manifest: Manifest, *, own_copy: bool = False, joined_epochs: bool = True
    ) -> None:
        self.current: Placement | None = None
        self.wanted: Placement | None = None
        self.waiting_for = "workers to join"
        self.own_copy = own_copy
        self.answering: dict[str, Placement] = {}
        self.holders: Holders = {}
        self._counts: dict[int, list[int]] = {}
        self._members = members
        self._manifest = manifest
        self._joined_epochs = joined_epochs

    @property
    def target(self) -> Placement | None:
        """What the workers should hold."""
        return self.wanted or self.current

    @property
    def epoch(self) -> int:
        """The epoch that serves, 0 before the first."""
        return 0 if self.current is None else self.current.epoch

    @property
    def complete(self) -> bool:
        """Every expert has a holder that answers."""
        return bool(self._counts) and all(min(counts) > 0 for counts in self._counts.values())

    @property
    def covers(self) -> bool:
        """Every expert can be computed: by a holder, or here."""
        return self.complete or (self.own_copy and self.current is not None)

    @property
    def reached(self) -> bool:
        """Every expert has a holder that is there, whether it serves already or not, or can be computed here.

        What elections go by: another leader could do better only about holders that are not there. One that is there
        and fails is this leader's to mend; if it handed over instead, patience would begin anew with each successor.
        """
        if self.own_copy or self.target is None:
            return self.own_copy
        there = {str(member.peer) for member in self._members.present() if not member.silent}
        return all(not there.isdisjoint(peers) for holders in self.target.holders.values() for peers in holders)

    def refresh(self) -> None:
        """Look at who can be used: `answering` names the placement of each, `holders` who answers for each expert."""
        current, wanted = self.current, self.wanted
        self.answering = {}
        if current is None:
            self.holders, self._counts = {}, {}
            return
        self.answering = {peer: current for peer in current.peers() if self.is_usable(peer, current)}
        moved: set[str] = set()
        if wanted is not None and self._joined_epochs:
            moved = {peer for peer in wanted.peers() if peer not in self.answering and self.is_usable(peer, wanted)}
        self.holders = current.holders
        if wanted is not None and moved:
            self.answering |= dict.fromkeys(moved, wanted)
            self.holders = {
                layer: tuple(
                    (*(p for p in before if p not in moved), *(p for p in after if p in moved))
                    for before, after in zip(holders, wanted.holders[layer], strict=True)
                )
                for layer, holders in current.holders.items()
            }
        self._counts = {
            layer: [sum(peer in self.answering for peer in peers) for peers in holders]
            for layer, holders in self.holders.items()
        }

    def spares(self, peer: str) -> bool:
        """Whether every expert has a holder that answers if this one does not."""
        return self.complete and all(
            count > 1 or peer not in peers
            for layer, counts in self._counts.items()
            for count, peers in zip(counts, self.holders[layer], strict=True)
        )

    def refusal(self) -> NotReady | None:
        """Why no prompt can be served now, or None."""
        if self.current is None:
            return NotReady(f"the swarm is not ready: it waits for {self.waiting_for}{self._troubles()}")
        if self.covers:
            return None
        away: dict[str, None] = {}
        lost = 0
        for layer, counts in self._counts.items():
            for expert, count in enumerate(counts):
                if not count:
                    lost += 1
                    away |= dict.fromkeys(self.current.holders[layer][expert])
        names = ", ".join(self.name(peer) for peer in sorted(away))
        return NotReady(f"the swarm is not ready: {lost} experts wait for {names}{self._troubles()}", peer=min(away))

    def copies(self) -> tuple[int, list[dict[str, int]]]:
        """The fewest usable copies of any expert, and the experts that have none. The leader's own are not counted."""
        if self.current is None:
            layers = self._manifest.layers
            return 0, [{"layer": layer.layer, "expert": e} for layer in layers for e in range(layer.n_expert)]
        counts = self._counts.items()
        missing = [{"layer": layer, "expert": e} for layer, each in counts for e, n in enumerate(each) if not n]
        return min(min(each) for _, each in counts), missing

    def state_of(self, member: Member) -> str:
        """joining, loading, ready, draining, suspect or gone, as `status` names it."""
        if not member.stream_up:
            return "gone"
        if member.silent:
            return "suspect"
        if member.draining:
            return "draining"
        target = self.target
        if target is None or str(member.peer) not in target.peers():
            return "joining"
        return "ready" if member.is_usable(target.term, target.epoch) else "loading"

    def held_now(self, member: Member) -> int:
        """Experts that this member has proven to hold, of the newest epoch that it serves."""
        for placement in (self.wanted, self.current):
            if placement is not None and member.is_usable(placement.term, placement.epoch):
                return sum(map(len, placement.held_by(str(member.peer)).values()))
        return 0

    def name(self, peer: str) -> str:
        member = self._members.by_peer.get(PeerId(peer))
        return member.name if member is not None else peer

    def is_usable(self, peer: str, placement: Placement) -> bool:
        """Whether this peer has proven a placement's share and answers."""
        member = self._members.by_peer.get(PeerId(peer))
        return member is not None and member.is_usable(placement.term, placement.epoch)

    def is_proven(self, placement: Placement, *, whole: bool) -> bool:
        """Whether all its holders can be used, or, unless `whole`, one for each expert."""
        usable = {peer for peer in placement.peers() if self.is_usable(peer, placement)}
        if whole:
            return len(usable) == len(placement.peers())
        return all(not usable.isdisjoint(peers) for holders in placement.holders.values() for peers in holders)

    def _troubles(self) -> str:
        """The first failure among the workers, since whoever waits wants to know the reason."""
        peers = () if self.target is None else self.target.peers()
        for member in self._members.present():
            if member.error is not None and str(member.peer) in peers:
                return f" ({member.name} failed: {member.error.message})"
        return ""


def lacks(placement: Placement, there: Collection[str]) -> bool:
    """Whether some expert has no holder among those."""
    return any(not any(p in there for p in peers) for holders in placement.holders.values() for peers in holders)
