"""What placement is told of the members, and what people are told of a placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler.placement import LayerSpec, Placement, WorkerSpec
from scheduler.placement_report import Loss, PlacementReport, describe, without, wrong_outputs
from scheduler.settling import STALLED_S, Present
from swarmnode.leader.members import Member, Members
from swarmnode.leader.publishing import numeric_class
from swarmnode.net.interface import PeerId

RTT_MS_MIN: Final = 4.0  # below, on one local network, it is the processes that take the time


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who is there at an instant, and since when holders are lost; in how many seconds somebody counts again."""

    present: dict[str, Present]
    lost_since_s: dict[str, float]
    again_s: float


class Specs:
    """Reads members as they are now. output: the layers that are output ranks."""

    def __init__(self, members: Members, layers: Sequence[LayerSpec], replicas: int, output: frozenset[int]) -> None:
        self._members = members
        self._layers = layers
        self._replicas = replicas
        self._output = output

    def of(self, peer: str) -> WorkerSpec:
        """What is known of a member for placing."""
        member = self._members.by_peer[PeerId(peer)]
        hello, default = member.hello, WorkerSpec(peer, member.hello.memory_budget_bytes)
        return replace(
            default,
            host=hello.host,
            rows_per_s=_rate(member) or self._typical_rate() or default.rows_per_s,
            rtt_ms=_magnitude(self._rtt_ms(member) or self._typical_rtt_ms() or default.rtt_ms),
            fitness="quarantined" if member.quarantined else "unfit" if member.unfit else "fit",
            accumulates_f32=hello.accumulates_f32,
            numeric_class=numeric_class(member, self._members.own_classes()),
            draining=member.draining,
        )

    def roll_call(self, holders: frozenset[str], now: float) -> RollCall:
        """Who can be counted on. A holder that fails, or makes no progress, counts as lost."""
        lost = {str(peer): m.lost_s for peer, m in self._members.by_peer.items() if m.lost_s is not None}
        present: dict[str, Present] = {}
        again_s = math.inf
        for member in self._members.present():
            peer, failing_since_s = str(member.peer), _failing_since(member, now)
            if peer in holders and failing_since_s is not None:
                lost[peer] = failing_since_s
            elif peer in holders or member.excluded_until_s <= now:
                present[peer] = Present(member.joined_s, may_hold(member), member.hello.measuring)
            else:
                again_s = min(again_s, member.excluded_until_s - now)
        return RollCall(present, lost, again_s)

    def describe(self, placement: Placement) -> PlacementReport:
        """A placement on the members as they are now."""
        names = {str(peer): member.name for peer, member in self._members.by_peer.items()}
        return describe(
            placement, self._layers, self.there(), replicas=self._replicas, output=self._output, names=names
        )

    def wrong_outputs(self, placement: Placement) -> tuple[str, ...]:
        """The output ranks on members that are not right for them, as sentences."""
        names = {str(peer): member.name for peer, member in self._members.by_peer.items()}
        return wrong_outputs(placement, self._layers, self.there(), output=self._output, names=names)

    def without(self, placement: Placement, peer: str) -> Loss:
        """What the loss of a peer would cost."""
        return without(placement, self._layers, self.there(), peer, replicas=self._replicas, output=self._output)

    def there(self) -> list[WorkerSpec]:
        """The members that are here."""
        return [self.of(str(member.peer)) for member in self._members.present()]

    def _typical_rate(self) -> float | None:
        """What is assumed of a worker that has not computed anything yet: it is like the others."""
        return _median(_rate(member) for member in self._members.present())

    def _typical_rtt_ms(self) -> float | None:
        """The same of one that has not answered a ping yet."""
        return _median(self._rtt_ms(member) or None for member in self._members.present())

    def _rtt_ms(self, member: Member) -> float | None:
        """Not the smoothed one: what a busy machine adds to some of its round trips is no distance."""
        return self._members.watch.rtt_least_ms(member.peer)


def hard_facts(spec: WorkerSpec) -> tuple[object, ...]:
    """What the hard rules of placement look at; a worker that drains is told apart elsewhere."""
    return spec.budget_bytes, spec.host, spec.tier, spec.fitness


def may_hold(member: Member) -> bool:
    return not member.draining and member.quarantined is None


def _failing_since(member: Member, now: float) -> float | None:
    """Since when a worker fails, or should have made progress; None: all is well."""
    if member.failing_since_s is not None:
        return member.failing_since_s
    stalled = member.progress_s + STALLED_S
    return stalled if member.phase == "loading" and now > stalled else None


def _rate(member: Member) -> float | None:
    return None if member.link is None else member.link.kernel_rows_per_s


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _magnitude(rtt_ms: float) -> float:
    """A round trip up to the next power of two: what wavers by less must not move experts."""
    return max(RTT_MS_MIN, 2.0 ** math.ceil(math.log2(rtt_ms))) if rtt_ms > 0 else RTT_MS_MIN
