"""Who answers for each expert now: an epoch, and the ways around peers that fail before the next routing comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from scheduler.dispatch import LayerRouting
from swarmnode.leader.link import PeerLink

OWN_CLASS: Final = "the leader's"
"""The numeric class of whoever has the bits of the leader's ggml on its processor, where the trunk runs."""

_KEPT_MAX: Final = 1024  # tables of a layer, each around some set of peers


@dataclass(frozen=True, slots=True)
class Routing:
    """One epoch as the decode thread uses it; replaced whole, never changed.

    quantized: for each peer the layers whose activations it gets as Q8_0. classes: each peer's numeric class, the
    leader's own copy (OWN_COPY) included, where it is known. ask_f32: layers whose kernels are asked to accumulate in
    F32. epochs: of peers that answer under another epoch than this one.
    """

    term: int
    epoch: int
    layers: Mapping[int, LayerRouting]
    links: Mapping[str, PeerLink]
    quantized: Mapping[str, frozenset[int]]
    ask_f32: frozenset[int] = frozenset()
    classes: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)

    def is_mixed(self, peers: Iterable[str]) -> bool:
        """Whether any of these is not known to have the bits of the kernels that the trunk runs on."""
        return any(self.classes.get(peer) != OWN_CLASS for peer in peers)


class Detours:
    """The decode thread's own knowledge of peers, until the next routing makes it old.

    Peers that failed answer nothing more, slow ones only what nobody else of their class holds. All methods are the
    decode thread's but `answered`, which the event loop calls.
    """

    def __init__(self) -> None:
        self._routing: Routing | None = None
        self._failed: set[str] = set()
        self._slow: set[str] = set()
        self._tables: dict[tuple[int, frozenset[str], frozenset[str]], LayerRouting] = {}

    def around(self, routing: Routing, layer: int) -> LayerRouting:
        """Who answers for a layer's experts."""
        if routing is not self._routing:
            self._routing = routing
            self._failed.clear()
            self._slow.clear()
            self._tables.clear()
        if not self._failed and not self._slow:
            return routing.layers[layer]
        key = layer, frozenset(self._failed), frozenset(self._slow)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _KEPT_MAX:
                self._tables.clear()
            table = self._tables[key] = routing.layers[layer].without(*key[1:])
        return table

    def failed(self, peer: str) -> bool:
        """Whether that is news."""
        before = len(self._failed)
        self._failed.add(peer)
        return len(self._failed) > before

    def slow(self, peers: Iterable[str]) -> None:
        """They owe answers, and others were asked too."""
        self._slow.update(peers)

    def answered(self, peer: str) -> None:
        """It is not slow any more."""
        self._slow.discard(peer)
