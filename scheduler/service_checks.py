"""Which worker to check next while it serves, and what its answers come to: is its arithmetic as good as it was seen?

A check is an ordinary dispatch with crafted activations (backends/crafted_rows.py). It is rare, falls at an instant
that nobody can foresee, on an expert of an output rank that the worker holds, and a worker cannot tell it from work.
One answer never convicts: an answer of half precision brings the next check forward, and so many in a row, each on
other rows, make the worker unfit for output ranks. An answer in single precision takes all of it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from capabilities.precision import Precision

EVERY_S: Final = 30.0  # on average, of each worker: of ten, the leader computes an expert every 3 s
AGAIN_S: Final = 1.0  # after an answer that is not right
STRIKES: Final = 3
_SEEDS: Final = 2**32


@dataclass(frozen=True, slots=True)
class Check:
    """Rows for one expert that a worker holds. seed: of the rows. alone: each in a dispatch of its own, as decode
    steps are; else all in one, as in a prefill."""

    peer: str
    layer: int
    expert: int
    seed: int
    alone: bool


@dataclass
class _Peer:
    due: float
    strikes: int = 0


class ServiceChecks:
    """`draw` gives uniform random numbers in [0, 1) that workers cannot foresee; instants are seconds."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._peers: dict[str, _Peer] = {}

    def next(self, held: Mapping[str, Mapping[int, Sequence[int]]], now: float) -> Check | None:
        """The check that is due, if one is. held: for each worker that is to be checked at all, the experts of the
        output ranks that it holds. Whoever is not among them is forgotten.

        The same worker comes again only after `found`, or when it is due next.
        """
        self._peers = {
            peer: self._peers.get(peer) or _Peer(now + self._draw() * EVERY_S) for peer in sorted(held) if held[peer]
        }
        due = [peer for peer, state in self._peers.items() if state.due <= now]
        if not due:
            return None
        peer = min(due, key=lambda peer: self._peers[peer].due)
        self._peers[peer].due = now + (0.5 + self._draw()) * EVERY_S
        experts = [(layer, expert) for layer, some in sorted(held[peer].items()) for expert in some]
        layer, expert = experts[int(self._draw() * len(experts))]
        return Check(peer, layer, expert, int(self._draw() * _SEEDS), self._draw() < 0.5)

    def found(self, check: Check, sums: Precision, now: float) -> bool:
        """Take note of what the answer showed; whether that makes the worker unfit.

        UNKNOWN says nothing for or against it.
        """
        peer = self._peers.get(check.peer)
        if peer is None or sums is Precision.UNKNOWN:
            return False
        if sums is Precision.F32:
            peer.strikes = 0
            return False
        peer.strikes += 1
        peer.due = now + (0.5 + self._draw()) * AGAIN_S
        return peer.strikes >= STRIKES
