"""Placing a model on a swarm: replicas on different hosts, output ranks in F32, small budgets, and little movement.

Intuition: start from what is held already, drop what no rule allows any more, and deal out what is missing. Rounds go
over copies, since one copy of everything comes before a second of anything; within a round output ranks go first, since
fewer workers are right for them. A round fills workers up to one level of load by rate (`water_fill`), in runs of
neighbouring experts, a layer on as few workers as its cost suggests (scheduler/layer_cost.py); first copies go to near
workers where that pays. What still has no place gets one by making room (scheduler/placing_repair.py). At last
newcomers take their share from those who have more than theirs; nothing else that is held ever moves.

Placing again with nothing changed changes nothing, and the order of the input does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from scheduler.layer_cost import Spread, choose_spread
from scheduler.placement import (
    LayerSpec,
    Placement,
    PlacementImpossible,
    WorkerSpec,
    check_specs,
    output_ranks,
)
from scheduler.placing_repair import Aims, balance, displace, make_room, rearrange
from scheduler.placing_table import F64, I64, Bools, Table, water_fill

REPLICAS = 2  # one may be lost at any time; a third copy costs as much memory as the second and is needed far less
REPLICAS_MAX = 8
PASSES_MAX = 8  # over experts that lack copies; the second finds little, further ones nearly nothing


def place(
    layers: Sequence[LayerSpec],
    workers: Sequence[WorkerSpec],
    *,
    term: int,
    epoch: int,
    previous: Placement | None = None,
    newcomers: Collection[str] | None = None,
    replicas: int = REPLICAS,
    output: Iterable[int] | None = None,
) -> Placement:
    """Which worker holds which experts. scheduler/placement_report.py says what the result falls short of.

    previous: what is held now, wherever that is known from; None places from nothing. newcomers: the workers that were
    not there when it was made; all that hold nothing of it if not given. replicas: copies wanted of each expert, where
    hosts and memory allow. output: the layers that are output ranks, the last quarter if not given.

    Always: no budget is exceeded; copies of an expert are on different hosts; quarantined and draining workers hold
    nothing; an expert of an output rank is on fit workers that accumulate in F32, unless their memory cannot hold one
    copy of each: then those left over are on the best there is, with no further copy on worse.

    Movement: without newcomers nothing moves but what has lost its holder. A newcomer takes over no more than its share
    of all copies (by rate, memory allowing). Only to give an expert its first copy may others be dropped or moved.

    Raises PlacementImpossible, naming the missing bytes, if not even one copy of each expert has a place; ValueError
    for values out of range.
    """
    check_specs(layers, workers)
    if not 1 <= replicas <= REPLICAS_MAX:
        raise ValueError(f"between 1 and {REPLICAS_MAX} replicas, not {replicas}")
    ranks = output_ranks(layers) if output is None else frozenset(output)
    total = sum(spec.n_expert * spec.expert_bytes for spec in layers)
    able = [worker for worker in workers if worker.may_hold]
    budget = sum(worker.budget_bytes for worker in able)
    if budget < total:
        raise PlacementImpossible(
            f"one copy of the experts takes {total} bytes, the budgets of the {len(able)} workers that may hold some"
            f" add up to {budget}: {total - budget} bytes are missing"
        )
    table = _work_out(Table(layers, workers, replicas, ranks, previous), newcomers)
    if previous is not None and not table.copies.all():
        table = _work_out(Table(layers, workers, replicas, ranks, None), ())  # what is held may stand in the way
    uncovered = table.copies == 0
    if uncovered.any():
        raise PlacementImpossible(
            f"{int(table.size[uncovered].sum())} bytes are missing: no budget has room for one more whole expert"
        )
    return Placement(term, epoch, _holders(table))


def _holders(table: Table) -> dict[int, tuple[tuple[str, ...], ...]]:
    names = [worker.peer for worker in table.workers]
    rows = [tuple([names[w] for w in row if w >= 0]) for row in table.holder.tolist()]
    holders, start = {}, 0
    for spec in table.layers:
        holders[spec.layer] = tuple(rows[start : start + spec.n_expert])
        start += spec.n_expert
    return holders


def _work_out(table: Table, newcomers: Collection[str] | None) -> Table:
    """Fill the table. Experts without a copy are left if there is no place for them; then it is not finished."""
    aims = _aims(table)
    _keep(table, ~table.output, table.tier >= 0)
    _keep(table, table.output, table.tier == 0)
    fresh = np.array([newcomers is None or worker.peer in newcomers for worker in table.workers], np.bool_)
    fresh &= table.load == 0
    _first_copies(table, aims)
    if table.copies.all():
        _further_copies(table, aims)
        balance(table, aims, fresh)
        _further_copies(table, aims)
    return table


def _keep(table: Table, experts: Bools, allowed: Bools) -> None:
    """Leave experts where they were, as far as the rules allow: one copy of each before the second of any."""
    wanted = [(expert, table.before[expert]) for expert in experts.nonzero()[0].tolist() if table.before[expert]]
    for copy in range(1, table.replicas + 1):
        for expert, before in wanted:
            for worker in before:
                if table.copies[expert] == copy:
                    break
                if allowed[worker] and table.fits(expert, worker):
                    table.add(np.array([expert]), worker)


def _aims(table: Table) -> Aims:
    """What would be right if nothing were held yet. Called before anything is."""
    right = table.tier == table.tier.min(initial=3)
    any_tier = table.tier >= 0
    rank = _spread(table, right, table.output)
    rest = _spread(table, any_tier, np.ones(len(table.size), np.bool_))
    near = np.zeros((2, len(table.workers)), np.bool_)
    near[0, any_tier.nonzero()[0][: rest.near]] = True
    near[1, right.nonzero()[0][: rank.near]] = True
    is_rank = np.zeros(len(table.layers), np.bool_)
    is_rank[table.layer[table.output]] = True
    return Aims(near, np.where(is_rank, rank.fan_out, rest.fan_out), _fair(table, near, right))


def _fair(table: Table, near: Bools, right: Bools) -> F64:
    """The load that everybody gets by the rounds of dealing: float64 [W]."""
    room = table.free * (table.weight.sum() / max(int(table.size.sum()), 1))
    hosts = int(table.host.max(initial=-1)) + 1
    loads = np.zeros((2, len(room)))
    for copy in range(table.replicas):
        for rank, allowed in ((1, right), (0, table.tier >= 0)):
            amount = float(table.weight[table.output == bool(rank)].sum())
            for some in (near[rank], allowed) if copy == 0 else (allowed,):
                left = (copy + 1) * amount - float(loads[rank].sum())
                free = np.where(some, np.maximum(room - loads.sum(axis=0), 0), 0)
                host_room = amount - np.bincount(table.host, weights=loads[rank], minlength=hosts)
                loads[rank] += water_fill(
                    table.rate, loads.sum(axis=0), free, table.host, np.maximum(host_room, 0), left
                )
    fair: F64 = loads.sum(axis=0)
    return fair


def _spread(table: Table, allowed: Bools, experts: Bools) -> Spread:
    """How many of the allowed workers, that have to hold at least these experts, to use for first copies."""
    if not allowed.any():
        return Spread(0, 1)
    room = np.cumsum(table.free[allowed])
    near_min = min(int(room.searchsorted(int(table.size[experts].sum()))) + 1, len(room))
    return choose_spread(table.rtt_s[allowed], table.rate[allowed], near_min=near_min)


def _first_copies(table: Table, aims: Aims) -> None:
    for tier in sorted(set(table.tier.tolist())):
        allowed = table.tier == tier
        if tier:
            _keep(table, table.output & (table.copies == 0), allowed)
        _cover(table, aims, table.output, allowed)
    _cover(table, aims, ~table.output, table.tier >= 0)


def _cover(table: Table, aims: Aims, experts: Bools, allowed: Bools) -> None:
    """Give each of these experts that has none its first copy on the allowed workers, making room if there is none."""
    missing = (experts & (table.copies == 0)).nonzero()[0]
    if not len(missing):
        return
    near = aims.near[int(table.output[missing[0]])] & allowed
    missing = _deal(table, aims, missing, near)
    missing = _deal(table, aims, missing, allowed)
    hopeless = int(table.size.max()) + 1  # once an expert found no room, none of that size will
    for expert in missing.tolist():
        if table.size[expert] >= hopeless:
            continue
        worker = make_room(table, expert, allowed)
        if worker is None and table.output[expert]:
            worker = displace(table, expert, allowed)
        if worker is None:
            hopeless = int(table.size[expert])
        else:
            table.add(np.array([expert]), worker)


def _further_copies(table: Table, aims: Aims) -> None:
    """Copies up to the number wanted, again while it helps: what makes room for one may make room for others."""
    for _ in range(PASSES_MAX):
        before = int(table.copies.sum())
        for copy in range(1, table.replicas):
            for urgent in _by_urgency(table, copy):
                _one_more(table, aims, urgent, copy)
        if int(table.copies.sum()) == before:
            break


def _by_urgency(table: Table, copy: int) -> list[Bools]:
    """The experts that have so many copies: all at once, or, where memory is short, the most popular first.

    Among equals it is one worker's after another's, so that at least some workers may be lost without harm.
    """
    missing = (table.copies == copy).nonzero()[0]
    order = missing[np.lexsort((table.holder[missing, 0], -table.weight[missing].round(12)))]
    fits = np.cumsum(table.size[order]) <= table.free.sum()
    everything = np.arange(len(table.size))
    return [np.isin(everything, part) for part in (order[fits], order[~fits]) if len(part)]


def _one_more(table: Table, aims: Aims, experts: Bools, copy: int) -> None:
    """Give these, which have so many copies, one more if hosts and memory allow: output ranks nowhere worse."""
    worst = np.where(table.holder >= 0, table.tier[table.holder], 0).max(axis=1, initial=0)
    for tier in sorted(set(worst[experts & table.output].tolist())):
        allowed, ranks = table.tier <= tier, experts & table.output & (worst == tier)
        if tier:
            _keep(table, ranks, allowed)
        _replicate(table, aims, ranks & (table.copies == copy), allowed)
    _replicate(table, aims, experts & ~table.output, table.tier >= 0)


def _replicate(table: Table, aims: Aims, experts: Bools, allowed: Bools) -> None:
    missing = experts.nonzero()[0]
    if len(missing):
        rearrange(table, _deal(table, aims, missing, allowed), allowed)


def _deal(table: Table, aims: Aims, missing: I64, allowed: Bools) -> I64:
    """Deal a copy of each of these experts: to an even load at first, then wherever there is room. Returns the rest."""
    for level in (True, True, False):
        if not len(missing) or not (allowed & (table.free >= table.size[missing].min())).any():
            break
        if level:
            total = float(table.weight[missing].sum())
            room = np.asarray(table.free * (total / float(table.size[missing].sum())) * allowed, np.float64)
            host_room = _host_room(table, missing)
            quota = water_fill(table.rate, table.load, room, table.host, host_room, total)
        else:
            quota = np.asarray(table.free * (table.weight[missing] / table.size[missing]).max(), np.float64)
        left: list[I64] = []
        for group in table.groups(missing):
            fan_out = int(aims.fan_out[table.layer[group[0]]])
            share = max(1, round(fan_out * float(table.weight[group].sum())))
            left.append(table.deal(group, allowed, quota, share))
        missing = np.sort(np.concatenate(left))
    return missing


def _host_room(table: Table, missing: I64) -> F64:
    """For each host [H] the load that it can take of these experts: those of which it has no copy yet."""
    hosts = int(table.host.max(initial=-1)) + 1
    room = np.full(hosts, table.weight[missing].sum())
    for column in table.holder[missing].T:
        there = column >= 0
        room -= np.bincount(table.host[column[there]], weights=table.weight[missing][there], minlength=hosts)
    return room.clip(0)
