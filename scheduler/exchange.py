"""One layer's dispatch under way: what is owed, and who takes over when a peer fails, is late, or answers nonsense.

A *share* is a part of the plan: the rows, or one sum a token, that one peer was to answer. If that peer fails, other
holders are asked for what it owes, and at last the leader's own copy. If it is only slow, others of its numeric class
are asked too, once a share, and whoever is first with all of it counts: rows of the two are never mixed. Values go to
the places that the plan gave them, so the result depends on who answered only where numeric classes differ, and that
is told (`mixed`).

    exchange = Exchange(layer, n_out, routing, classes, plans, weights)
    ...send exchange.asked(); then, until exchange.complete, send what these return:
    exchange.answered(asked, values) / exchange.failed(asked, error) / exchange.overdue(now) / exchange.hedge(now)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable, PeerMistake, SwarmError
from scheduler.combine import weighted_sums
from scheduler.dispatch import LayerRouting, PeerRows, Plan, check_reply, retry

F32 = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Share:
    """What a plan gave to one peer. `weights` [R] where it is to be summed by token; `values` once it is there.

    asked are those who together owe all of it; hedges, all of it once more. A share is hedged once at most.
    """

    chunk: int
    part: PeerRows
    weights: F32 | None
    values: F32 | None = None
    asked: list[Asked] = field(default_factory=list)
    hedges: list[Asked] = field(default_factory=list)
    hedged: bool = False
    error: SwarmError | None = None  # the first of its peers' failures


@dataclass(slots=True, eq=False)
class Asked:
    """One peer that was asked for some of a share: rows [R, n_out], or sums by token if there are `weights` [R].

    The asker sets the instants of its clock: when an answer is overdue, and when somebody else is worth asking too.
    """

    share: Share
    part: PeerRows
    weights: F32 | None
    overdue_at: float = math.inf
    hedge_at: float = math.inf
    values: F32 | None = None

    @property
    def owes(self) -> bool:
        return self.values is None


class Exchange:
    """classes: each peer's numeric class, left out where it is not known. plans: one for each chunk of tokens.

    weights: for each chunk the router's weights by slot [T * K], where its shares are to be summed.
    """

    def __init__(
        self,
        layer: int,
        n_out: int,
        routing: LayerRouting,
        classes: Mapping[str, str],
        plans: Sequence[Plan],
        weights: Sequence[F32] | None = None,
    ) -> None:
        self.shares = [
            Share(chunk, part, None if weights is None else weights[chunk][part.slots])
            for chunk, plan in enumerate(plans)
            for part in plan.parts
        ]
        self.mixed = False  # a peer of another class than the epoch's first holder answered
        self.computed: set[str] = set()  # the peers whose values count
        self._layer = layer
        self._n_out = n_out
        self._routing = routing
        self._classes = classes
        self._failed: set[str] = set()
        self._open = len(self.shares)
        for share in self.shares:
            share.asked.append(Asked(share, share.part, share.weights))
            if any(not self._alike(first, share.part.peer) for first in routing.stands_in(share.part)):
                self.mixed = True

    @property
    def complete(self) -> bool:
        return not self._open

    def asked(self) -> list[Asked]:
        """Everybody whose answer still counts and is not here."""
        return [
            asked
            for share in self.shares
            if share.values is None
            for asked in (*share.asked, *share.hedges)
            if asked.owes
        ]

    def next_instant(self) -> float:
        """When `overdue` or `hedge` next has something to do."""
        return min(
            (min(a.overdue_at, math.inf if a.share.hedged else a.hedge_at) for a in self.asked()), default=math.inf
        )

    # Events

    def fault(self, asked: Asked, values: F32) -> ExpertsUnavailable | None:
        """What is wrong with an answer, if anything: such a peer has failed."""
        try:
            check_reply(values, asked.part, self._layer, self._n_out, partial_sums=asked.weights is not None)
        except PeerMistake as mistake:
            experts = sorted(set(asked.part.experts.tolist()))
            return ExpertsUnavailable(
                mistake.message, layer=self._layer, experts=experts, peer=asked.part.peer, cause="bad_reply"
            )
        return None

    def answered(self, asked: Asked, values: F32) -> None:
        """Take an answer without fault. One that nobody waits for any more changes nothing."""
        share = asked.share
        if share.values is None and (asked in share.asked or asked in share.hedges):
            asked.values = values
            self._settle(share)

    def failed(self, asked: Asked, error: SwarmError) -> list[Asked]:
        """A peer will not answer, or has answered nonsense: whom to ask in its place, if anybody.

        Raises the share's first error if nobody is left.
        """
        share = asked.share
        self._failed.add(asked.part.peer)
        share.error = share.error or error
        if share.values is not None:
            return []
        if asked in share.hedges:
            share.hedges = []
        elif asked in share.asked and share.hedges:
            share.asked, share.hedges = share.hedges, []
            self._settle(share)
        elif asked in share.asked:
            try:
                others = self._ask(share, retry(asked.part, self._routing, self._failed))
            except ExpertsUnavailable:
                raise share.error from None
            share.asked.remove(asked)
            share.asked += others
            return others
        return []

    def overdue(self, now: float) -> list[Asked]:
        """Whose answers are too late: they have failed, if the asker says so (`failed`)."""
        return [asked for asked in self.asked() if asked.overdue_at <= now]

    def hedge(self, now: float) -> list[Asked]:
        """Whom to ask too, since others are slow: the result must not depend on who of them is first."""
        more: list[Asked] = []
        for asked in self.asked():
            share = asked.share
            if share.hedged or asked.hedge_at > now:
                continue
            share.hedged = True
            kind = self._classes.get(share.part.peer)
            slow = {each.part.peer for each in share.asked}
            if kind is None or any(self._classes.get(peer) != kind for peer in slow):
                continue
            candidates = self._routing.holders_of(share.part)
            others = {peer for peer in candidates if self._classes.get(peer) != kind}
            try:
                parts = retry(share.part, self._routing, self._failed | slow | others)
            except ExpertsUnavailable:
                continue
            if all(part.peer in candidates for part in parts):  # the leader's own copy waits until it is needed
                share.hedges = self._ask(share, parts)
                more += share.hedges
        return more

    # Inside

    def _alike(self, one: str, other: str) -> bool:
        return one == other or (one in self._classes and self._classes[one] == self._classes.get(other))

    @staticmethod
    def _ask(share: Share, parts: Sequence[PeerRows]) -> list[Asked]:
        """Sums are asked for only from who takes over all of a share; else rows are, and summed here."""
        whole = len(parts) == 1 and len(parts[0].slots) == len(share.part.slots)
        return [Asked(share, part, share.weights if whole else None) for part in parts]

    def _settle(self, share: Share) -> None:
        """Take the values of whoever has given all of a share."""
        for group in (share.asked, share.hedges):
            if not group or any(asked.owes for asked in group):
                continue
            share.values = self._values(share, group)
            share.hedged = True
            self._open -= 1
            self.computed |= {asked.part.peer for asked in group}
            if any(not self._alike(share.part.peer, asked.part.peer) for asked in group):
                self.mixed = True
            return

    def _values(self, share: Share, group: Sequence[Asked]) -> F32:
        first = group[0]
        assert first.values is not None
        if len(group) == 1 and (first.weights is None) == (share.weights is None):
            return first.values
        rows = np.empty((len(share.part.slots), self._n_out), np.float32)
        for asked in group:
            assert asked.values is not None
            rows[share.part.slots.searchsorted(asked.part.slots)] = asked.values
        return rows if share.weights is None else weighted_sums(rows, share.weights, share.part.tokens)
