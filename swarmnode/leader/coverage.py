"""What of a placement can be used at this moment: the answers behind `ready`, `status` and each refusal."""

from __future__ import annotations

from backends.manifest import Manifest
from capabilities.errors import NotReady
from scheduler.placement import Placement
from swarmnode.leader.members import Member, Members
from swarmnode.net.interface import PeerId


class Coverage:
    """The epoch that serves (`current`), the one that is being prepared (`wanted`), and the members who hold them."""

    def __init__(self, members: Members, manifest: Manifest) -> None:
        self.current: Placement | None = None
        self.wanted: Placement | None = None
        self.waiting_for = "workers to join"
        self._members = members
        self._manifest = manifest

    @property
    def target(self) -> Placement | None:
        """What the workers should hold."""
        return self.wanted or self.current

    @property
    def epoch(self) -> int:
        """The epoch that serves, 0 before the first."""
        return 0 if self.current is None else self.current.epoch

    def refusal(self) -> NotReady | None:
        """Why no prompt can be served now, or None."""
        if self.current is None:
            return NotReady(f"the swarm is not ready: it waits for {self.waiting_for}{self._troubles()}")
        away = [peer for peer in self.current.peers() if not self._is_usable(peer)]
        if not away:
            return None
        names = ", ".join(self.name(peer) for peer in away)
        lost = sum(len(experts) for peer in away for experts in self.current.held_by(peer).values())
        return NotReady(f"the swarm is not ready: {lost} experts wait for {names}{self._troubles()}", peer=away[0])

    def copies(self) -> tuple[int, list[dict[str, int]]]:
        """The fewest usable copies of any expert, and the experts that have none."""
        if self.current is None:
            layers = self._manifest.layers
            return 0, [{"layer": layer.layer, "expert": e} for layer in layers for e in range(layer.n_expert)]
        usable = {peer for peer in self.current.peers() if self._is_usable(peer)}
        counts = {
            (layer, expert): sum(peer in usable for peer in peers)
            for layer, holders in self.current.holders.items()
            for expert, peers in enumerate(holders)
        }
        missing = [{"layer": layer, "expert": expert} for (layer, expert), n in counts.items() if not n]
        return min(counts.values()), missing

    def state_of(self, member: Member) -> str:
        """joining, loading, ready, suspect or gone, as `status` names it."""
        if not member.stream_up:
            return "gone"
        if member.silent:
            return "suspect"
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

    def _is_usable(self, peer: str) -> bool:
        member, current = self._members.by_peer.get(PeerId(peer)), self.current
        return current is not None and member is not None and member.is_usable(current.term, current.epoch)

    def _troubles(self) -> str:
        """The first failure among the workers, since whoever waits wants to know the reason."""
        peers = () if self.target is None else self.target.peers()
        for member in self._members.present():
            if member.error is not None and str(member.peer) in peers:
                return f" ({member.name} failed: {member.error.message})"
        return ""
