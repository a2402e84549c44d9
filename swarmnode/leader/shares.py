"""Which share each worker should hold now: of the epoch that serves, or of the one that is being prepared.

A worker without room for both lets go of the old share first: one after another, as long as others hold what it held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import trio

from backends.manifest import Manifest
from scheduler.placement import Placement
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.members import Member, Members
from swarmnode.member_messages import Assign
from swarmnode.net.interface import PeerId

Sources = Callable[[str], Sequence[str]]
"""Whom a worker is told to fetch from."""


class Owner(Protocol):
    """Whom changing over concerns: the placer."""

    def start_change_over(self, member: Member) -> None:
        """Assign a worker its new share, once what was dispatched to the old one has been answered."""

    def usable_changed(self) -> None:
        """Somebody can be used, or cannot any more."""


class Shares:
    """Everything is on the event loop."""

    def __init__(
        self, owner: Owner, members: Members, coverage: Coverage, manifest: Manifest, sources: Sources
    ) -> None:
        self._owner = owner
        self._members = members
        self._coverage = coverage
        self._manifest = manifest
        self._sources = sources
        self._waiting: set[str] = set()  # they keep their old share until others can do without it

    def of(self, peer: str) -> Placement | None:
        """The placement whose share a worker should hold now, if it should hold any."""
        member = self._members.by_peer.get(PeerId(peer))
        if member is not None and member.quarantined is not None:
            return None
        share = self._coverage.current if peer in self._waiting else self._coverage.target
        return share if share is not None and share.held_by(peer) else None

    def assign(self, member: Member) -> None:
        """Tell a worker what it should hold, if anything."""
        peer = str(member.peer)
        share = self.of(peer)
        if share is None or not member.stream_up or member.resting:
            return
        member.phase, member.progress, member.progress_s = "loading", None, trio.current_time()
        member.tell(
            Assign(
                term=share.term,
                epoch=share.epoch,
                model=self._manifest.name,
                manifest=self._manifest.id,
                sources=tuple(self._sources(peer)),
                held=share.held_by(peer),
            )
        )

    def begin_to_change(self, wanted: Placement) -> None:
        """Another placement is wanted: whoever can hold both shares loads the new one."""
        self._waiting = {peer for peer in wanted.peers() if not self._has_room_for_both(peer, wanted)}
        self._assign_all(peer for peer in wanted.peers() if peer not in self._waiting)

    def changed(self) -> None:
        """The wanted placement serves: nobody waits any more."""
        left, self._waiting = self._waiting, set()
        self._assign_all(left)

    def _assign_all(self, peers: Iterable[str]) -> None:
        for peer in peers:
            if (member := self._members.by_peer.get(PeerId(peer))) is not None:
                self.assign(member)

    def _has_room_for_both(self, peer: str, new: Placement) -> bool:
        """Whether a worker can load its new share beside the one that serves: if not, it frees that first."""
        old, member = self._coverage.current, self._members.by_peer.get(PeerId(peer))
        if old is None or member is None or not self._coverage.is_usable(peer, old):
            return True
        before, after = old.held_by(peer), new.held_by(peer)
        sizes = {layer.layer: layer.expert_bytes for layer in self._manifest.layers}
        held = sum(sizes[layer] * len(experts) for share in (before, after) for layer, experts in share.items())
        return before == after or held <= member.hello.memory_budget_bytes

    def let_go(self) -> None:
        """Have workers without room for both shares change over, as far as others hold what they let go of."""
        wanted = self._coverage.wanted
        if wanted is None or not self._waiting:
            return
        gone = {peer for peer in self._waiting if not self._is_held_back(peer)}
        free = [peer for peer in sorted(self._waiting - gone) if self._coverage.spares(peer)]
        busy = any(not self._coverage.is_usable(p, wanted) for p in wanted.peers() if p not in self._waiting)
        chosen = gone or set(free[:1])
        if not chosen and not busy:
            chosen = {min(self._waiting)}  # what only it holds is missing for a while
        self._waiting -= chosen
        for peer in chosen:
            member = self._members.by_peer.get(PeerId(peer))
            if member is not None:
                member.proven.clear()
                self._owner.start_change_over(member)
        if chosen:
            self._owner.usable_changed()

    def _is_held_back(self, peer: str) -> bool:
        return self._coverage.current is not None and self._coverage.is_usable(peer, self._coverage.current)
