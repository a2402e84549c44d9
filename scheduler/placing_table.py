"""The table that a placement is worked out on: copies, what each worker has left, and how a group of experts is dealt.

Experts are numbered through all layers, workers by nearness; a row of `holder` lists an expert's workers, the preferred
one first. Whatever is added or removed keeps the books (free bytes, load, experts by layer), so that the steps in
scheduler/placing.py read as decisions. Load is in layers: the shares of the rows (layer_cost.row_shares) that go to
the copies a worker holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.layer_cost import ROWS_PER_S_LIMITS, SECONDS_MAX, row_shares
from scheduler.placement import LayerSpec, Placement, WorkerSpec

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

BUDGET_BYTES_MAX = 1 << 50  # a budget counts up to here: sums of ten thousand fit an int64
SORTED_MAX = 512  # among more workers than this quotas are small and alike, and the nearest come first
NOBODY = -1


class Table:
    """Copies of G experts (at most R of each) on W workers."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        workers: Sequence[WorkerSpec],
        replicas: int,
        output: frozenset[int],
        previous: Placement | None,
    ) -> None:
        self.layers = sorted(layers, key=lambda spec: spec.layer)
        self.workers = sorted((w for w in workers if w.may_hold), key=lambda w: (w.rtt_ms, w.peer))
        self._describe_experts(output)
        self._describe_workers()
        n_experts, n_workers = len(self.size), len(self.workers)
        self.replicas = replicas
        self.holder: I64 = np.full((n_experts, replicas), NOBODY, order="F")  # columns are what is searched
        self.copies: I64 = np.zeros(n_experts, np.int64)
        self.load: F64 = np.zeros(n_workers)
        self.in_layer: NDArray[np.int32] = np.zeros((n_workers, len(self.layers)), np.int32)
        index = {worker.peer: i for i, worker in enumerate(self.workers)}
        self.before = self._read(previous, index)  # where each expert was, preferred first

    def _describe_experts(self, output: frozenset[int]) -> None:
        """layer, size in bytes, weight (share of its layer's rows), whether an output rank's: [G]; experts_in [L]."""
        counts = [spec.n_expert for spec in self.layers]
        self.experts_in: I64 = np.array(counts, np.int64)
        self.layer: I64 = np.repeat(np.arange(len(counts)), counts)
        self.size: I64 = np.repeat(np.array([spec.expert_bytes for spec in self.layers], np.int64), counts)
        self.output: Bools = np.repeat(np.array([spec.layer in output for spec in self.layers], np.bool_), counts)
        shares = [row_shares(spec.n_expert, spec.popularity) for spec in self.layers]
        self.weight: F64 = np.concatenate(shares) if shares else np.zeros(0)

    def _describe_workers(self) -> None:
        """host, free (bytes), rate, rtt_s, tier, numeric class (unknown ones all different): each [W]."""
        hosts = {host: i for i, host in enumerate(sorted({w.host or w.peer for w in self.workers}))}
        classes = {name: i for i, name in enumerate(sorted({w.numeric_class or "" for w in self.workers}))}
        self.host: I64 = np.array([hosts[w.host or w.peer] for w in self.workers], np.int64)
        self.free: I64 = np.array([min(w.budget_bytes, BUDGET_BYTES_MAX) for w in self.workers], np.int64)
        self.rate: F64 = np.array([w.rows_per_s for w in self.workers], np.float64).clip(*ROWS_PER_S_LIMITS)
        self.rtt_s: F64 = (np.array([w.rtt_ms for w in self.workers], np.float64) / 1e3).clip(0, SECONDS_MAX)
        self.tier: I64 = np.array([w.tier for w in self.workers], np.int64)
        self.kind: I64 = np.array(
            [classes[w.numeric_class] if w.numeric_class else -1 - i for i, w in enumerate(self.workers)], np.int64
        )

    def _read(self, previous: Placement | None, index: dict[str, int]) -> list[tuple[int, ...]]:
        before: list[tuple[int, ...]] = []
        for spec in self.layers:
            holders = () if previous is None else previous.holders.get(spec.layer, ())
            if len(holders) != spec.n_expert:  # another model's
                holders = ((),) * spec.n_expert
            before += [tuple(index[peer] for peer in peers if peer in index) for peers in holders]
        return before

    # -- one copy -----------------------------------------------------------------------------------------------

    def holders_of(self, expert: int) -> list[int]:
        held: list[int] = self.holder[expert, : self.copies[expert]].tolist()
        return held

    def fits(self, expert: int, worker: int) -> bool:
        """Whether a further copy may go there by memory and hosts. Precision is the caller's."""
        hosts = self.host[self.holder[expert, : self.copies[expert]]]
        return bool(
            self.copies[expert] < self.replicas
            and self.free[worker] >= self.size[expert]
            and self.host[worker] not in hosts
        )

    def add(self, experts: I64, worker: int) -> None:
        """Give the worker copies of these experts of one layer."""
        self.holder[experts, self.copies[experts]] = worker
        self.copies[experts] += 1
        self._count(experts, worker, 1)

    def remove(self, experts: I64, worker: int) -> None:
        """Take them away again; the order of those that are left stays."""
        for expert in experts.tolist():
            rest = [w for w in self.holders_of(expert) if w != worker]
            self.holder[expert] = rest + [NOBODY] * (self.replicas - len(rest))
        self.copies[experts] -= 1
        self._count(experts, worker, -1)

    def replace(self, experts: I64, old: int, new: int) -> None:
        """Move copies from one worker to another, at the same place in the order of preference."""
        held = self.holder[experts]
        self.holder[experts] = np.where(held == old, new, held)
        self._count(experts, old, -1)
        self._count(experts, new, 1)

    def _count(self, experts: I64, worker: int, sign: int) -> None:
        self.free[worker] -= sign * self.size[experts].sum()
        self.load[worker] += sign * self.weight[experts].sum()
        np.add.at(self.in_layer[worker], self.layer[experts], sign)

    # -- many ---------------------------------------------------------------------------------------------------

    def held_by(self, worker: int) -> I64:
        """The experts of which the worker has a copy."""
        found = self.holder[:, 0] == worker
        for column in range(1, self.replicas):
            found |= self.holder[:, column] == worker
        held: I64 = found.nonzero()[0]
        return held

    def bytes_held(self, experts: Bools) -> I64:
        """For each worker [W] the bytes of its copies of these experts [G]."""
        held: F64 = np.zeros(len(self.workers))  # exact below 2**53
        for column in self.holder.T:
            there = (column >= 0) & experts
            held += np.bincount(column[there], weights=self.size[there], minlength=len(held))
        return held.astype(np.int64)

    def groups(self, experts: I64) -> Iterator[I64]:
        """These experts (ascending) by layer and present holders. Large experts first: small ones fit what is left."""
        if not len(experts):
            return
        keys = [*self.holder[experts].T[::-1], self.layer[experts], -self.size[experts]]
        order = np.lexsort(keys)
        ranked = np.stack([key[order] for key in keys])
        starts = (ranked[:, 1:] != ranked[:, :-1]).any(axis=0).nonzero()[0] + 1
        yield from np.split(experts[order], starts)

    def deal(self, experts: I64, allowed: Bools, quota: F64, fan_out: int) -> I64:
        """Give a copy of each of these experts, one group, to few workers that have quota (float64 [W], in layers).

        Takes allowed workers that have memory and quota in this order: the class of the first copy, those that are in
        this layer already, the largest quota, the nearest. The first fan_out of them share the group in proportion to
        their quotas; if those are too small, more of them fill theirs up. Returns the experts that are left over.
        """
        size, layer = int(self.size[experts[0]]), int(self.layer[experts[0]])
        present = self.holders_of(int(experts[0]))
        allowed = allowed & (self.free >= size)
        for holder in present:
            allowed &= self.host != self.host[holder]
        if not allowed.any():
            return experts
        later = np.where(self.in_layer[:, layer] > 0, 0, 1)
        if present:
            later += np.where(self.kind == self.kind[present[0]], 0, 2)
        while len(experts):
            weights = self.weight[experts]
            needed = float(weights.sum())
            able = allowed & (self.free >= size) & (quota >= needed / len(experts) / 2)
            window = self._window(able, later, quota, needed, fan_out)
            if not len(window):
                break
            share = np.cumsum(quota[window])
            if len(window) <= fan_out:
                share *= needed / share[-1]
            piece = share[:-1].searchsorted(np.cumsum(weights) - weights / 2, side="right")
            pieces = np.split(experts, piece.searchsorted(range(1, len(window))))
            experts = self._hand_out(pieces, window, quota)
        return experts

    def _window(self, able: Bools, later: I64, quota: F64, needed: float, fan_out: int) -> I64:
        """The first workers in the order of `deal` whose quotas are enough, and at least fan_out."""
        parts: list[I64] = []
        count, total = 0, 0.0
        for rank in range(4):
            part = (able & (later == rank)).nonzero()[0]
            if not len(part):
                continue
            if len(part) <= SORTED_MAX:
                part = part[np.argsort(-quota[part].round(9), kind="stable")]
            sums = total + np.cumsum(quota[part])
            enough = max(int(sums.searchsorted(needed * (1 - 1e-9))) + 1, fan_out - count)
            parts.append(part[:enough])
            if enough <= len(part):
                break
            count, total = count + len(part), float(sums[-1])
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _hand_out(self, pieces: list[I64], window: I64, quota: F64) -> I64:
        """Each worker of the window takes of its piece what it has room for; the rest is returned."""
        rest: list[I64] = []
        for worker, piece in zip(window.tolist(), pieces, strict=True):
            if len(piece):
                room = int(self.free[worker] // self.size[piece[0]])
                self.add(piece[:room], worker)
                quota[worker] -= self.weight[piece[:room]].sum()
                rest.append(piece[room:])
        return np.concatenate(rest) if rest else np.zeros(0, np.int64)


def water_fill(rate: F64, base: F64, room: F64, host: I64, host_room: F64, amount: float) -> F64:
    """Raise everybody's load to one level of work per rate until `amount` more is taken.

    rate, base (load so far), room (most to add), host: [W]; host_room [H]: most to add to all workers of a host.
    Returns what each takes, float64 [W]; less than amount in all only where there is no room for it.
    """
    takes, open_ = np.zeros(len(rate)), np.ones(len(rate), np.bool_)
    while open_.any() and amount > 0:
        takes[open_] = _raise(rate[open_], base[open_], room[open_], amount)
        total = np.bincount(host[open_], weights=takes[open_], minlength=len(host_room))
        full = total > host_room * (1 + 1e-12)
        if not full.any():
            break
        # The level only rises as hosts drop out, so one that is full stays full: its workers share what it can take.
        closed = open_ & full[host]
        takes[closed] *= host_room[host[closed]] / total[host[closed]]
        amount -= float(host_room[full].sum())
        open_ &= ~closed
        takes[open_] = 0
    return takes


def _raise(rate: F64, base: F64, room: F64, amount: float) -> F64:
    """The same without hosts: sum over workers of clip(level * rate - base, 0, room) is linear between its corners."""
    if amount >= float(room.sum()):
        return room
    corners = np.concatenate([base / rate, (base + room) / rate])
    order = np.argsort(corners, kind="stable")
    slope = np.cumsum(np.concatenate([rate, -rate])[order])
    corners = corners[order]
    taken = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(corners))])
    i = max(int(taken.searchsorted(amount)), 1)
    level = corners[i - 1] + (amount - taken[i - 1]) / max(float(slope[i - 1]), 1e-9)
    takes: F64 = np.clip(level * rate - base, 0, room)
    return takes
