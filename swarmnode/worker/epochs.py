"""The expert sets that a worker holds: the epoch that serves, and at most one that is being prepared.

A dispatch names its term and epoch and is computed only if this worker holds exactly that epoch; anything else is
refused by name, so that a leader of the past, or of another placement, gets an answer and no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backends.experts import ExpertBackend
from backends.manifest import Manifest
from capabilities.errors import PeerMistake
from swarmnode.expert_messages import DispatchHead, HeldLayer


@dataclass(eq=False)
class ExpertSet:
    """The experts of one epoch. `layers` and `backend` grow together while the set loads."""

    term: int
    epoch: int
    manifest: Manifest
    wanted: Mapping[int, tuple[int, ...]]
    backend: ExpertBackend
    layers: dict[int, HeldLayer]
    loaded: bool = False

    @property
    def experts_wanted(self) -> int:
        return sum(len(experts) for experts in self.wanted.values())

    @property
    def experts_held(self) -> int:
        return sum(int(np.count_nonzero(layer.held)) for layer in self.layers.values())

    @property
    def bytes_held(self) -> int:
        sizes = {layer.layer: layer.expert_bytes for layer in self.manifest.layers}
        return sum(sizes[number] * int(np.count_nonzero(held.held)) for number, held in self.layers.items())


class Epochs:
    """At most two expert sets, found by (term, epoch)."""

    def __init__(self) -> None:
        self.current: ExpertSet | None = None
        self.prepared: ExpertSet | None = None

    def prepare(self, expert_set: ExpertSet) -> None:
        """Take the set that loads now; an earlier one that never began is dropped."""
        if self.prepared is not None:
            self.prepared.backend.close()
        self.prepared = expert_set

    def begin(self, term: int, epoch: int) -> None:
        """The prepared epoch serves from now on; the old one is dropped."""
        chosen = self.prepared
        if chosen is None or (chosen.term, chosen.epoch) != (term, epoch):
            return
        old, self.current, self.prepared = self.current, chosen, None
        if old is not None:
            old.backend.close()

    def find(self, term: int, epoch: int) -> ExpertSet | None:
        for held in (self.current, self.prepared):
            if held is not None and (held.term, held.epoch) == (term, epoch):
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

    def close(self) -> None:
        for held in (self.current, self.prepared):
            if held is not None:
                held.backend.close()
        self.current = self.prepared = None


