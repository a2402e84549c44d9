"""A leader's workers: who is there, what each is to hold, and the epochs; as the daemon's placer, in callbacks.

Decide, assign, load, probe, begin. The decisions are `scheduler/settling.py`'s and `scheduler/placing.py`'s, and pings
go by `scheduler/liveness.py`; whatever goes wrong with a worker ends the same way: it rests, is assigned its share
again, and proves it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from capabilities.agreement import compare, within_tolerance
from scheduler.dispatch import LayerRouting, deadline_s
from scheduler.layer_cost import PeerSpeed
from scheduler.liveness import PING_INTERVAL_S, TICK_S, FailureDetector, PeerState
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec
from scheduler.placing import place
from scheduler.settling import Present, decide, exclusion_s, rest_s
from tests.simulator.host import Host
from tests.simulator.messages import Assign, Begin, Hello, Loaded, Ping, Pong
from tests.simulator.stay import Stay
from tests.simulator.streams import End
from tests.simulator.toy import EXPERT_BYTES, EXPERTS, F32, LAYERS, WIDTH, Experts

if TYPE_CHECKING:
    from tests.simulator.dispatching import Dispatching

SETTLE_S = 0.5
AGAIN_S_MAX = 30.0
SPECS = tuple(LayerSpec(layer, EXPERTS, EXPERT_BYTES) for layer in LAYERS)


class Placer:
    """Of one leadership. `changed` hears of each new routing."""

    def __init__(self, host: Host, term: int, experts: Experts, dispatching: Dispatching, *, fallback: bool) -> None:
        self.host = host
        self.term = term
        self.current: Placement | None = None  # serves
        self.wanted: Placement | None = None  # is being prepared
        self.stays: dict[str, Stay] = {}
        self.changed: Callable[[], None] = lambda: None
        self.live = True
        self._experts = experts
        self._dispatching = dispatching
        self._fallback = fallback
        self._epoch = 0
        self._considered: set[str] = set()
        self._detector = FailureDetector(host.now())
        self._pings = 0
        self._proving: set[str] = set()
        self._planned = 0
        self._ping()
        self._tick()
        self._decide()

    def end(self) -> None:
        """The leadership is over."""
        self.live = False
        for stay in self.stays.values():
            if stay.up:
                stay.stream.close()

    @property
    def target(self) -> Placement | None:
        return self.wanted or self.current

    # -- members ------------------------------------------------------------------------------------------------

    def joined(self, stream: End, hello: Hello) -> None:
        """A worker said hello on its stream."""
        old = self.stays.get(stream.peer)
        stay = Stay(stream.peer, hello, stream, self.host.now())
        if old is not None:
            self._end(old)
            old.stream.close()
            stay.given_up, stay.excluded_until_s = old.given_up, old.excluded_until_s
        self.stays[stay.peer] = stay
        stream.on_message = lambda message: self._told(stay, message)
        stream.on_close = lambda: self._end(stay)
        self._detector.add(stay.peer, self.host.now())
        self._assign(stay)
        self._decide()

    def _end(self, stay: Stay) -> None:
        if stay.up and self.live:
            stay.up, stay.lost_s = False, self.host.now()
            if self.stays.get(stay.peer) is stay:
                self._detector.remove(stay.peer)
            self._dispatching.lost(stay.peer, "disconnected")
            self._publish()
            self._decide()

    def _told(self, stay: Stay, message: Any) -> None:
        if not self.live or not stay.up:
            return
        match message:
            case Ping():
                stay.stream.send(Pong(message.number))
            case Pong():
                self._detector.pong(stay.peer, message.number, self.host.now())
            case Loaded():
                target = self.target
                if target is None or (message.term, message.epoch) != (target.term, target.epoch) or stay.resting:
                    return
                if message.well:
                    stay.loaded = (message.term, message.epoch)
                    self._try_to_prove(stay)
                else:
                    self.failed(stay.peer, "it cannot load")

    def failed(self, peer: str, why: str) -> None:
        """A worker did something wrong, or owes an answer: let it rest, then it must prove itself again."""
        stay = self.stays.get(peer)
        if stay is None or stay.resting or not stay.up or not self.live:
            return
        self.host.world.note(f"{self.host.name} finds {peer} failing: {why}")
        stay.link_up = False
        stay.resting, stay.loaded = True, None
        stay.proven.clear()
        stay.failures += 1
        if stay.failing_since_s is None:
            stay.failing_since_s = self.host.now()
        self.host.after(rest_s(stay.failures), lambda: self._rested(stay))
        self._publish()
        self._decide()

    def _rested(self, stay: Stay) -> None:
        stay.resting = False
        if self.live:
            self._assign(stay)

    # -- pings --------------------------------------------------------------------------------------------------

    def _ping(self) -> None:
        if not self.live:
            return
        for stay in self.stays.values():
            if stay.up:
                self._pings += 1
                self._detector.sent(stay.peer, self._pings, self.host.now())
                stay.stream.send(Ping(self._pings))
        self.host.after(PING_INTERVAL_S, self._ping)

    def _tick(self) -> None:
        if not self.live:
            return
        for change in self._detector.tick(self.host.now()):
            stay = self.stays[change.peer]
            if change.after is PeerState.FAILED:
                stay.silent, stay.link_up = True, False
                stay.proven.clear()
                self._dispatching.lost(stay.peer, "suspended")
                self._publish()
            elif change.after is PeerState.ALIVE and stay.silent:
                stay.silent = False
                self._publish()
                self._try_to_prove(stay)
        self.host.after(TICK_S, self._tick)

    # -- placing ------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if not self.live:
            return
        now, target = self.host.now(), self.target
        holders = frozenset(target.peers()) if target is not None else frozenset()
        present: dict[str, Present] = {}
        lost = {peer: stay.lost_s for peer, stay in self.stays.items() if stay.lost_s is not None}
        again_s = AGAIN_S_MAX
        for peer, stay in self.stays.items():
            if not stay.up:
                continue
            if peer in holders and stay.failing_since_s is not None:
                lost[peer] = stay.failing_since_s
            elif peer in holders or stay.excluded_until_s <= now:
                present[peer] = Present(stay.joined_s)
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
            uncovered=target is not None and _uncovered(target, present),
        )
        if decision.workers is not None:
            self._place(sorted(decision.workers))
            self._give_up(sorted(holders - decision.workers), now)
        if decision.again_s is not None:
            again_s = min(again_s, decision.again_s)
        self._planned += 1
        number = self._planned
        self.host.after(max(again_s, 0.01), lambda: self._decide() if self._planned == number else None)

    def _give_up(self, peers: list[str], now: float) -> None:
        for peer in peers:
            stay = self.stays.get(peer)
            if stay is not None and stay.up:
                stay.given_up += 1
                stay.excluded_until_s = now + exclusion_s(stay.given_up)
                stay.failing_since_s, stay.failures = None, 0

    def _place(self, workers: list[str]) -> None:
        self._considered = set(workers)
        specs = [
            WorkerSpec(
                peer, self.stays[peer].hello.budget_bytes, numeric_class=self.stays[peer].hello.numeric_class or None
            )
            for peer in workers
        ]
        try:
            placement = place(SPECS, specs, term=self.term, epoch=self._epoch + 1, previous=self.target)
        except PlacementImpossible as error:
            self.host.world.note(f"{self.host.name} cannot place: {error.message}")
            return
        self._epoch += 1
        self.wanted = placement
        self.host.world.note(f"{self.host.name} places epoch {self._epoch} of term {self.term} on {workers}")
        if not self._has_room_for_both(placement):
            self.current = None
            self._publish()
        for peer in placement.peers():
            self._assign(self.stays[peer])

    def _has_room_for_both(self, new: Placement) -> bool:
        if self.current is None:
            return True
        for peer in new.peers():
            before, after = self.current.held_by(peer), new.held_by(peer)
            held = EXPERT_BYTES * sum(len(some) for share in (before, after) for some in share.values())
            if before != after and held > self.stays[peer].hello.budget_bytes:
                return False
        return True

    def _assign(self, stay: Stay) -> None:
        target = self.target
        if target is not None and stay.peer in target.peers() and stay.up and not stay.resting:
            stay.loaded = None
            stay.stream.send(Assign(target.term, target.epoch, target.held_by(stay.peer)))

    # -- proving ------------------------------------------------------------------------------------------------

    def _try_to_prove(self, stay: Stay) -> None:
        target = self.target
        if stay.peer in self._proving or stay.resting or not stay.up or stay.silent or target is None:
            return
        if stay.loaded != (target.term, target.epoch):
            return
        self._proving.add(stay.peer)
        held = target.held_by(stay.peer)
        pairs: list[tuple[F32, F32]] = []

        def answered(expected: F32, values: Any) -> None:
            if stay.peer not in self._proving or not self.live:
                return
            if isinstance(values, str) or values.shape != expected.shape or values.dtype != np.float32:
                self._proving.discard(stay.peer)
                self.failed(stay.peer, f"probe: {values if isinstance(values, str) else 'no such rows'}")
                return
            pairs.append((expected, values))
            if len(pairs) == len(held):
                self._proving.discard(stay.peer)
                self._probed(stay, target, pairs)

        for layer, experts in held.items():
            ids = np.array(experts, np.int32)
            tokens = np.arange(len(ids), dtype=np.int32)
            x = np.array([[self.host.random.uniform(-2, 2) for _ in range(WIDTH)] for _ in experts], np.float32)
            expected = self._experts.rows(layer, x, tokens, ids)
            seconds = deadline_s(len(ids), 2 * x.nbytes, stay.rate.rows_per_s)
            number = self._dispatching.send(stay.peer, target, layer, x, tokens, ids, partial(answered, expected))
            self.host.after(seconds, partial(self._dispatching.give_up, number, "timeout"))

    def _probed(self, stay: Stay, placement: Placement, pairs: list[tuple[F32, F32]]) -> None:
        if not all(within_tolerance(compare(actual, expected), frozenset()) for expected, actual in pairs):
            self.failed(stay.peer, "probe: it computes another function")
            return
        if not stay.up or stay.silent:
            return
        stay.link_up = True
        stay.proven.add((placement.term, placement.epoch))
        stay.failing_since_s, stay.failures, stay.given_up = None, 0, 0
        if placement is not self.target:
            self._try_to_prove(stay)
        self._begin_if_proven()

    def _begin_if_proven(self) -> None:
        wanted = self.wanted
        if wanted is not None:
            usable = {p for p in wanted.peers() if p in self.stays and self._usable(p, wanted)}
            serves = self.current is not None and self._covered(self.current)
            if usable != set(wanted.peers()) and (serves or not self._covered(wanted)):
                self._publish()
                return
            self.current, self.wanted = wanted, None
            self.host.world.note(f"{self.host.name} begins epoch {wanted.epoch} of term {wanted.term}")
        self._publish()
        self._dispatching.when_drained(self._tell_begun)
        self._decide()

    def _tell_begun(self) -> None:
        current = self.current
        for stay in self.stays.values():
            if self.live and current is not None and stay.is_usable(current.term, current.epoch):
                stay.stream.send(Begin(current.term, current.epoch))

    def _publish(self) -> None:
        """The routing by who is usable now; None if nothing serves."""
        placement = self.current
        if placement is None:
            self._dispatching.route(None, {}, {})
        else:
            usable = [p for p in placement.peers() if p in self.stays and self._usable(p, placement)]
            away = [peer for peer in placement.peers() if peer not in usable]
            speeds = {peer: self._speed(self.stays[peer]) for peer in usable}
            fallback = self.host.name if self._fallback else None
            self._dispatching.route(
                placement,
                {
                    layer: LayerRouting(
                        layer,
                        holders,
                        away,
                        speeds=speeds,
                        shares_load=not self._dispatching.sums,
                        fallback=fallback,
                    )
                    for layer, holders in placement.holders.items()
                },
                {peer: kind for peer in usable if (kind := self.stays[peer].hello.numeric_class)},
            )
        self.changed()

    def _usable(self, peer: str, placement: Placement) -> bool:
        return self.stays[peer].is_usable(placement.term, placement.epoch)

    def rate(self, peer: str) -> float | None:
        stay = self.stays.get(peer)
        return None if stay is None else stay.rate.rows_per_s

    def timed(self, peer: str, rows: int, seconds: float) -> None:
        if peer in self.stays:
            self.stays[peer].rate.observe(rows, seconds)

    def _speed(self, stay: Stay) -> PeerSpeed:
        rtt_s = self._detector.rtt_s(stay.peer) or 0.05
        return PeerSpeed(rtt_s, stay.rate.rows_per_s or 50.0, numeric_class=stay.hello.numeric_class or None)

    @property
    def covers(self) -> bool:
        """Whether somebody usable, or this leader, answers for every expert."""
        return self.current is not None and (self._fallback or self._covered(self.current))

    def _covered(self, placement: Placement) -> bool:
        usable = {peer for peer in placement.peers() if peer in self.stays and self._usable(peer, placement)}
        return all(usable & set(peers) for holders in placement.holders.values() for peers in holders)


def _uncovered(placement: Placement, present: dict[str, Present]) -> bool:
    return any(
        not any(peer in present for peer in peers) for holders in placement.holders.values() for peers in holders
    )
