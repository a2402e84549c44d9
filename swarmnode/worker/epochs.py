"""The expert sets that a worker holds: the epoch that serves, and at most one that is being prepared.

A dispatch names its term and epoch and is computed only if this worker holds exactly that epoch; anything else is
refused by name, so that a leader of the past, or of another placement, gets an answer and no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import trio

from backends.experts import ExpertBackend
from capabilities.errors import PeerMistake
from swarmnode.expert_messages import DispatchHead, HeldLayer
from swarmnode.member_messages import HOLDING_MAX


@dataclass(eq=False)
class ExpertSet:
    """The experts of one epoch, complete in memory. `manifest` is its id; `wanted` is layer -> expert ids.

    `also` holds other (term, epoch) names of the same set: an assignment with an unchanged share adopts it.
    """

    term: int
    epoch: int
    manifest: str
    wanted: Mapping[int, tuple[int, ...]]
    backend: ExpertBackend
    layers: dict[int, HeldLayer]
    bytes_held: int = 0
    loaded: bool = False
    also: set[tuple[int, int]] = field(default_factory=set)

    def is_called(self, term: int, epoch: int) -> bool:
        return (term, epoch) == (self.term, self.epoch) or (term, epoch) in self.also

    @property
    def experts_held(self) -> int:
        return sum(int(np.count_nonzero(layer.held)) for layer in self.layers.values())


class Epochs:
    """At most two expert sets, found by (term, epoch).

    Who computes holds `computing` and asks `holds` first, for a set may have been dropped while it waited.
    """

    def __init__(self) -> None:
        self.current: ExpertSet | None = None
        self.prepared: ExpertSet | None = None
        self.computing = trio.Lock()  # held while a backend computes, so that none is freed under its kernels

    def holds(self, expert_set: ExpertSet) -> bool:
        return expert_set in (self.current, self.prepared)

    def prepare(self, expert_set: ExpertSet) -> None:
        """Take a set that has just been loaded, after `make_room`."""
        assert self.prepared is None
        self.prepared = expert_set

    def adopt(self, term: int, epoch: int, manifest: str, wanted: Mapping[int, tuple[int, ...]]) -> ExpertSet | None:
        """A set in memory with exactly this share, which from now on also answers to (term, epoch), or None."""
        for held in (self.current, self.prepared):
            if held is not None and held.loaded and held.manifest == manifest and held.wanted == wanted:
                held.also.add((term, epoch))
                return held
        return None

    async def begin(self, term: int, epoch: int) -> None:
        """This epoch serves from now on under this name alone; every other set is dropped."""
        async with self.computing:
            chosen = self.find(term, epoch)
            if chosen is None:
                return
            for held in (self.current, self.prepared):
                if held is not None and held is not chosen:
                    held.backend.close()
            chosen.term, chosen.epoch, chosen.also = term, epoch, set()
            self.current, self.prepared = chosen, None

    def names(self) -> tuple[tuple[int, int], ...]:
        """The newest (term, epoch) names of the set that has begun.

        A leader begins only what it has found right, so this set was proven since it was loaded. One that was loaded
        under the same name after a restart was not, and is not named.
        """
        held = self.current
        names = set() if held is None else {(held.term, held.epoch), *held.also}
        return tuple(sorted(names, reverse=True)[:HOLDING_MAX])

    def find(self, term: int, epoch: int) -> ExpertSet | None:
        for held in (self.current, self.prepared):
            if held is not None and held.is_called(term, epoch):
                return held
        return None

    def layer_of(self, head: DispatchHead) -> tuple[ExpertSet, HeldLayer]:
        """What a dispatch may use.

        Raises:
            PeerMistake: another term or epoch, or a layer that is not held.
        """
        held = self.find(head.term, head.epoch)
        if held is None:
            mine = [f"{s.term}.{s.epoch}" for s in (self.current, self.prepared) if s is not None]
            raise PeerMistake(
                f"a dispatch of term {head.term}, epoch {head.epoch}; this worker holds {', '.join(mine) or 'none'}",
                layer=head.layer,
            )
        layer = held.layers.get(head.layer)
        if layer is None:
            raise PeerMistake(f"no experts of layer {head.layer} are held here", layer=head.layer)
        return held, layer

    async def make_room(self, bytes_needed: int, bytes_max: int) -> None:
        """Before another set is loaded: free the prepared one, and the one that serves if there is no room for both.

        The leader reckons in the same way, and does not count on this worker meanwhile.
        """
        async with self.computing:
            if self.prepared is not None:
                self.prepared.backend.close()
                self.prepared = None
            if self.current is not None and self.current.bytes_held + bytes_needed > bytes_max:
                self.current.backend.close()
                self.current = None

    async def drop(self) -> None:
        """Free every set, once the kernels that run have ended."""
        async with self.computing:
            dropped = (self.current, self.prepared)
            self.current = self.prepared = None
            for held in dropped:
                if held is not None:
                    held.backend.close()
