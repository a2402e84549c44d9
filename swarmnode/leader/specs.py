"""What placement is told of the members, and what people are told of a placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from scheduler.placement import LayerSpec, Placement, WorkerSpec
from scheduler.placement_report import Loss, PlacementReport, describe, without, wrong_outputs
from swarmnode.leader.members import Member, Members
from swarmnode.leader.publishing import numeric_class
from swarmnode.net.interface import PeerId

RTT_MS_MIN: Final = 4.0  # below, on one local network, it is the processes that take the time


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
            rtt_ms=_magnitude(self._members.watch.rtt_ms(member.peer) or default.rtt_ms),
            fitness="quarantined" if member.quarantined else "unfit" if member.unfit else "fit",
            accumulates_f32=hello.accumulates_f32,
            numeric_class=numeric_class(member),
            draining=member.draining,
        )

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
        rates = sorted(rate for member in self._members.present() if (rate := _rate(member)) is not None)
        return rates[len(rates) // 2] if rates else None


def _rate(member: Member) -> float | None:
    return None if member.link is None else member.link.kernel_rows_per_s


def _magnitude(rtt_ms: float) -> float:
    """A round trip up to the next power of two: what wavers by less must not move experts."""
    return max(RTT_MS_MIN, 2.0 ** math.ceil(math.log2(rtt_ms))) if rtt_ms > 0 else RTT_MS_MIN
