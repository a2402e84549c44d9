"""The proof that each worker gives before it gets work, and the rest that it takes when something went wrong.

As swarmnode/leader/proving.py: it rests, is assigned its share again, proves it again, and serves.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np

from capabilities.agreement import compare, within_tolerance
from scheduler.dispatch import deadline_s
from scheduler.placement import Placement
from scheduler.settling import rest_s
from tests.simulator.dispatching import Dispatching
from tests.simulator.host import Host
from tests.simulator.stays import Stay, Stays
from tests.simulator.toy import F32, WIDTH, Experts


class Owner(Protocol):
    """Whom the prover asks and tells: the placer."""

    def share_of(self, peer: str) -> Placement | None: ...
    def assign(self, stay: Stay) -> None: ...
    def usable_changed(self) -> None: ...
    def proven(self) -> None: ...
    def believes(self, stay: Stay, share: Placement) -> bool: ...
    def spend(self, stay: Stay) -> None: ...
    def found_wrong(self, stay: Stay) -> None: ...


class Prover:
    """See the module."""

    def __init__(self, host: Host, stays: Stays, experts: Experts, dispatching: Dispatching, owner: Owner) -> None:
        self._host = host
        self._stays = stays
        self._experts = experts
        self._dispatching = dispatching
        self._owner = owner
        self._proving: set[str] = set()

    def failed(self, peer: str, why: str) -> None:
        """A worker did something wrong, or owes an answer: let it rest, then assign its share again."""
        stay = self._stays.by_peer.get(peer)
        if stay is None or stay.resting or not stay.up or not self._stays.live:
            return
        self._host.world.note(f"{self._host.name} finds {peer} failing: {why}")
        stay.link_up, stay.resting, stay.loaded = False, True, None
        stay.proven.clear()
        stay.failures += 1
        if stay.failing_since_s is None:
            stay.failing_since_s = self._host.now()
        self._host.after(rest_s(stay.failures), lambda: self._rested(stay))
        self._owner.usable_changed()

    def _rested(self, stay: Stay) -> None:
        stay.resting = False
        if self._stays.live:
            self._owner.assign(stay)

    def try_to_prove(self, stay: Stay) -> None:
        """Probe a worker, if it has loaded what it should hold and is there: every held expert of every layer."""
        share = self._owner.share_of(stay.peer)
        if stay.peer in self._proving or stay.resting or not stay.up or stay.silent or share is None:
            return
        if stay.loaded != (share.term, share.epoch) or stay.is_usable(share):
            return
        if self._owner.believes(stay, share):
            self._owner.spend(stay)
            self._passed(stay, share)
            return
        self._probe(stay, share)

    def _probe(self, stay: Stay, share: Placement) -> None:
        self._proving.add(stay.peer)
        held = share.held_by(stay.peer)
        pairs: list[tuple[F32, F32]] = []

        def answered(expected: F32, values: Any) -> None:
            if stay.peer not in self._proving or not self._stays.live:
                return
            if isinstance(values, str) or values.shape != expected.shape or values.dtype != np.float32:
                self._proving.discard(stay.peer)
                self._failed(stay, values if isinstance(values, str) else "no such rows")
                return
            pairs.append((expected, values))
            if len(pairs) == len(held):
                self._proving.discard(stay.peer)
                self._probed(stay, share, pairs)

        for layer, experts in held.items():
            ids = np.array(experts, np.int32)
            tokens = np.arange(len(ids), dtype=np.int32)
            x = np.array([[self._host.random.uniform(-2, 2) for _ in range(WIDTH)] for _ in experts], np.float32)
            expected = self._experts.rows(layer, x, tokens, ids)
            seconds = deadline_s(len(ids), 2 * x.nbytes, stay.rate.rows_per_s)
            number = self._dispatching.send(stay.peer, share, layer, x, tokens, ids, partial(answered, expected))
            self._host.after(seconds, partial(self._dispatching.give_up, number, "timeout"))

    def _failed(self, stay: Stay, why: str) -> None:
        if self._stays.by_peer.get(stay.peer) is stay:
            self.failed(stay.peer, f"probe: {why}")

    def _probed(self, stay: Stay, share: Placement, pairs: list[tuple[F32, F32]]) -> None:
        if not all(within_tolerance(compare(actual, expected), frozenset()) for expected, actual in pairs):
            if all(np.isfinite(actual).all() for _, actual in pairs):  # else the daemon's link refuses the answer
                self._owner.found_wrong(stay)
            self._failed(stay, "it computes another function")
            return
        if stay.up and not stay.silent:
            self._passed(stay, share)

    def _passed(self, stay: Stay, share: Placement) -> None:
        stay.link_up = True
        stay.proven.add((share.term, share.epoch))
        stay.failing_since_s, stay.failures, stay.given_up = None, 0, 0
        if share is not self._owner.share_of(stay.peer):
            self.try_to_prove(stay)
        else:
            self._owner.proven()
