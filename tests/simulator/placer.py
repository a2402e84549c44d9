"""Which worker holds what, and when an epoch begins: decide, assign, load, probe, begin.

As swarmnode/leader/placer.py and shares.py. The decisions are `scheduler/settling.py`'s and `scheduler/placing.py`'s. A
worker without room for both its old share and the new one lets go of the old one first: one after another, as long as
others hold what it held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from scheduler.audit_tests import Change
from scheduler.audits import Audits
from scheduler.dispatch import LayerRouting
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec
from scheduler.placing import place
from scheduler.settling import Present, decide, exclusion_s
from tests.simulator.checks import Checks
from tests.simulator.coverage import Coverage, lacks
from tests.simulator.dispatching import Dispatching
from tests.simulator.host import Host
from tests.simulator.inheritance import Inheritance
from tests.simulator.messages import Assign, Begin, Loaded
from tests.simulator.proving import Prover
from tests.simulator.stays import Stay, Stays
from tests.simulator.toy import EXPERT_BYTES, EXPERTS, LAYERS, Experts

SETTLE_S = 0.5
AGAIN_S_MAX = 30.0
SPECS = tuple(LayerSpec(layer, EXPERTS, EXPERT_BYTES) for layer in LAYERS)


class Placer:
    """Of one leadership. `changed` hears whenever what can be used may have changed."""

    def __init__(
        self,
        host: Host,
        term: int,
        experts: Experts,
        dispatching: Dispatching,
        inheritance: Inheritance,
        audits: Audits,
        checks: Checks,
        released: Callable[[str], int],
        *,
        own_copy: bool,
    ) -> None:
        """audits: with what was inherited. released: the owner's newest release of a peer."""
        self.changed: Callable[[], None] = lambda: None
        self.stays = Stays(host, self)
        self.coverage = Coverage(self.stays, own_copy=own_copy, joined_epochs=not dispatching.sums)
        self.prover = Prover(host, self.stays, experts, dispatching, self)
        self._host = host
        self._term = term
        self._dispatching = dispatching
        self._epoch = 0
        self._considered: dict[str, WorkerSpec] = {}  # as the last attempt to place took them into account
        self._waiting: set[str] = set()  # they keep their old share until others can do without it
        self._planned = 0
        self._due = math.inf
        self._started = host.now()
        self._inheritance = inheritance
        self._audits = audits
        self._checks = checks
        self._released = released
        if inheritance.record is not None:
            self._epoch = 1
            self.coverage.current = replace(inheritance.record.placement, term=term, epoch=1)
            host.world.note(f"{host.name} inherits what was {inheritance.record.name}")
        self._decide()

    def end(self) -> None:
        """The leadership is over."""
        self.stays.end()

    def rate(self, peer: str) -> float | None:
        stay = self.stays.by_peer.get(peer)
        return None if stay is None else stay.rate.rows_per_s

    def timed(self, peer: str, rows: int, seconds: float) -> None:
        if peer in self.stays.by_peer:
            self.stays.by_peer[peer].rate.observe(rows, seconds)

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, stay: Stay) -> None:
        self._audits.release(stay.peer, self._released(stay.peer))
        stay.quarantined = self._audits.held(stay.peer).quarantined
        if self.share_of(stay.peer) is not None:
            self._considered.setdefault(stay.peer, stay.spec())  # of a placement that was inherited
        self.assign(stay)
        self._decide_in(0.0)

    def left(self, stay: Stay) -> None:
        target = self.coverage.target
        if target is None or stay.peer not in target.peers():
            self._considered.pop(stay.peer, None)
        self._dispatching.lost(stay.peer, "disconnected")
        self.usable_changed()

    def spoke(self, stay: Stay) -> None:
        if stay.silent:
            self._dispatching.lost(stay.peer, "suspended")
        self.usable_changed()
        self.prover.try_to_prove(stay)

    def progressed(self, stay: Stay, message: Loaded) -> None:
        share = self.share_of(stay.peer)
        if share is None or (message.term, message.epoch) != (share.term, share.epoch) or stay.resting:
            return
        if message.well:
            stay.loaded = (message.term, message.epoch)
            self.prover.try_to_prove(stay)
        else:
            self.prover.failed(stay.peer, "it cannot load")

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Place anew if it is time, and look again in time."""
        self._due = math.inf
        if not self.stays.live:
            return
        now, target = self._host.now(), self.coverage.target
        holders = frozenset(target.peers()) if target is not None else frozenset()
        present: dict[str, Present] = {}
        lost = dict.fromkeys(sorted(holders), self._started)  # an inherited holder gets its time to come
        lost |= {peer: stay.lost_s for peer, stay in self.stays.by_peer.items() if stay.lost_s is not None}
        again_s = AGAIN_S_MAX
        for stay in self.stays.present():
            if stay.peer in holders and stay.failing_since_s is not None:
                lost[stay.peer] = stay.failing_since_s
            elif stay.peer in holders or stay.excluded_until_s <= now:
                present[stay.peer] = Present(stay.joined_s, stay.may_hold)
            else:
                again_s = min(again_s, stay.excluded_until_s - now)
        decision = decide(
            holders,
            frozenset(self._considered),
            present,
            lost,
            expected=0,
            settle_s=SETTLE_S,
            now=now,
            uncovered=target is not None and not self.coverage.complete and lacks(target.holders, present),
            outdated=any(self._is_outdated(peer) for peer in sorted(holders & present.keys())),
        )
        if decision.workers is not None:
            self._place(sorted(decision.workers))
            self._give_up(sorted(holders - decision.workers), now)
        self._decide_in(again_s if decision.again_s is None else min(again_s, decision.again_s))

    def _decide_in(self, seconds: float) -> None:
        """Then, unless something happens before."""
        due = self._host.now() + seconds
        if due < self._due:
            self._due = due
            self._planned += 1
            number = self._planned
            self._host.after(seconds, lambda: self._decide() if self._planned == number else None)

    def _is_outdated(self, peer: str) -> bool:
        before, stay = self._considered.get(peer), self.stays.by_peer[peer]
        now = stay.spec()
        return before is not None and (before.budget_bytes, before.fitness) != (now.budget_bytes, now.fitness)

    def _give_up(self, peers: list[str], now: float) -> None:
        for peer in peers:
            stay = self.stays.by_peer.get(peer)
            if stay is not None and stay.up and stay.may_hold:
                stay.given_up += 1
                stay.excluded_until_s = now + exclusion_s(stay.given_up)
                stay.failing_since_s, stay.failures = None, 0

    def _place(self, workers: list[str]) -> None:
        specs = [self.stays.by_peer[peer].spec() for peer in workers]
        newcomers = [peer for peer in workers if peer not in self._considered]
        self._considered = {spec.peer: spec for spec in specs}
        previous = self.coverage.current or self.coverage.wanted
        try:
            placement = place(
                SPECS, specs, term=self._term, epoch=self._epoch + 1, previous=previous, newcomers=newcomers
            )
        except PlacementImpossible as error:
            self._host.world.note(f"{self._host.name} cannot place: {error.message}")
            return
        if self.coverage.target is not None and placement.holders == self.coverage.target.holders:
            return
        self._epoch += 1
        self.coverage.wanted = placement
        self._host.world.note(f"{self._host.name} places epoch {self._epoch} of term {self._term} on {workers}")
        self._waiting = {peer for peer in placement.peers() if not self._has_room_for_both(peer, placement)}
        for peer in placement.peers():
            if peer not in self._waiting:
                self.assign(self.stays.by_peer[peer])
        self.usable_changed()

    def _has_room_for_both(self, peer: str, new: Placement) -> bool:
        old = self.coverage.current
        if old is None or not self.stays.is_usable(peer, old):
            return True
        before, after = old.held_by(peer), new.held_by(peer)
        held = EXPERT_BYTES * sum(len(experts) for share in (before, after) for experts in share.values())
        return before == after or held <= self.stays.by_peer[peer].hello.budget_bytes

    def _let_go(self) -> None:
        """Have workers without room for both shares change over, as far as others hold what they let go of."""
        current, wanted = self.coverage.current, self.coverage.wanted
        if wanted is None or not self._waiting:
            return
        gone = {p for p in self._waiting if current is None or not self.stays.is_usable(p, current)}
        free = [peer for peer in sorted(self._waiting - gone) if self.coverage.spares(peer)]
        busy = any(not self.stays.is_usable(p, wanted) for p in wanted.peers() if p not in self._waiting)
        chosen = gone or set(free[:1])
        if not chosen and not busy:
            chosen = {min(self._waiting)}
        self._waiting -= chosen
        for peer in sorted(chosen):
            stay = self.stays.by_peer.get(peer)
            if stay is not None:
                stay.proven.clear()
                self._change_over(stay)
        if chosen:
            self.usable_changed()

    def _change_over(self, stay: Stay) -> None:
        self._dispatching.when_drained(lambda: self.assign(stay))

    # -- what the prover asks and tells -------------------------------------------------------------------------

    def share_of(self, peer: str) -> Placement | None:
        """The placement whose share a worker should hold now, if it should hold any."""
        stay = self.stays.by_peer.get(peer)
        if stay is not None and stay.quarantined:
            return None
        share = self.coverage.current if peer in self._waiting else self.coverage.target
        return share if share is not None and share.held_by(peer) else None

    def assign(self, stay: Stay) -> None:
        """Tell a worker its share (again)."""
        share = self.share_of(stay.peer)
        if share is not None and stay.up and not stay.resting:
            stay.loaded = None
            self._checks.trusted(self._term, stay.peer)
            stay.stream.send(Assign(share.term, share.epoch, share.held_by(stay.peer)))

    def usable_changed(self) -> None:
        """Somebody can be used, or cannot any more."""
        if self.stays.live:
            self._publish()
            self._let_go()
            self._decide_in(0.0)

    def believes(self, stay: Stay, share: Placement) -> bool:
        return self._inheritance.believes(stay, share)

    def spend(self, stay: Stay) -> None:
        self._inheritance.spend(stay)

    def found_wrong(self, stay: Stay) -> None:
        """The probe found rows of another function: as a wrong audit."""
        if Change.QUARANTINED in self._audits.found_wrong(stay.peer):
            self._host.world.note(f"{self._host.name} quarantines {stay.peer}")
            stay.quarantined = True
            self._checks.convicted(self._term, stay.peer)
            self.usable_changed()
            self._inheritance.leave(self.coverage)

    def owner_released(self, peer: str) -> None:
        """It is as a new one."""
        stay = self.stays.by_peer.get(peer)
        if self._audits.release(peer, self._released(peer)) and stay is not None and stay.quarantined:
            stay.quarantined = False
            stay.excluded_until_s, stay.given_up = -math.inf, 0
            stay.failing_since_s, stay.failures = None, 0
            self.assign(stay)
            self._decide_in(0.0)

    def proven(self) -> None:
        """Begin the wanted epoch once all its workers have proven it, or, where the present one falls short, one for
        each expert."""
        wanted = self.coverage.wanted
        self._publish()
        if wanted is not None and self.coverage.is_proven(wanted, whole=self.coverage.complete):
            self.coverage.current, self.coverage.wanted = wanted, None
            self._host.world.note(f"{self._host.name} begins epoch {wanted.epoch} of term {wanted.term}")
            left, self._waiting = self._waiting, set()
            for peer in sorted(left):
                if peer in self.stays.by_peer:
                    self.assign(self.stays.by_peer[peer])
        self.usable_changed()
        self._inheritance.leave(self.coverage)
        self._dispatching.when_drained(self._tell_begun)

    def _tell_begun(self) -> None:
        current = self.coverage.current
        if current is None or self.coverage.wanted is not None or not self.stays.live:
            return
        for stay in self.stays.present():
            if stay.is_usable(current):
                stay.stream.send(Begin(current.term, current.epoch))

    def _publish(self) -> None:
        """The routing by who is usable now; None if nothing serves."""
        coverage = self.coverage
        coverage.refresh()
        for peer in coverage.answering:
            self._checks.trusted(self._term, peer)
        speeds = {peer: self.stays.speed(peer) for peer in coverage.answering}
        there = {peer for each in coverage.holders.values() for peers in each for peer in peers}
        away = there - coverage.answering.keys()
        routing = {
            layer: LayerRouting(
                layer,
                holders,
                away,
                speeds=speeds,
                shares_load=not self._dispatching.sums,
                fallback=self._host.name if coverage.own_copy else None,
            )
            for layer, holders in coverage.holders.items()
        }
        classes = {peer: kind for peer, speed in speeds.items() if (kind := speed.numeric_class) is not None}
        self._dispatching.route(coverage.current, routing, classes, dict(coverage.answering))
        self.changed()
