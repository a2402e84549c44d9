"""The steps of placing that touch what is there already: making room, exchanging, and giving newcomers their share.

Each says what it may disturb. A first copy may push out second ones, and, for an output rank, move others to workers
that are wrong for output ranks anyway. A second copy disturbs nothing that anybody has loaded. A newcomer takes from
those that have more than their share, never more than its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.placing_table import F64, I64, Bools, Table

NEWCOMER_SLACK = 1.1  # a newcomer loads at most this many times its share in bytes (its share in load it never exceeds)
UNEVEN = 0.1  # who lacks less than this of its share is left alone: evenness is not worth scattering layers
MISSES_MAX = 16  # spaciouss asked in vain before a worker stays as it is
EXCHANGES_MAX = 200  # experts for which an exchange is looked for: each look goes over all copies
SPACIOUS_MAX = 4  # workers with the most room that each of them tries


@dataclass(frozen=True, slots=True)
class Aims:
    """Who should hold what if nothing were held yet.

    near      bool [2, W]   who should hold first copies of other layers (0) and of output ranks (1)
    fan_out   int64 [L]     on how many workers a layer's first copies should be
    fair      float64 [W]   fair load, in layers
    """

    near: Bools
    fan_out: I64
    fair: F64


def make_room(table: Table, expert: int, allowed: Bools) -> int | None:
    """Drop copies that are not the only one from an allowed worker until the expert fits; that worker, or None."""
    gain = np.where(allowed, table.free + table.bytes_held(table.copies >= 2), -1)
    worker = int(gain.argmax())
    held = table.held_by(worker)
    dropped = _least(table, expert, worker, held[table.copies[held] >= 2])
    if gain[worker] < table.size[expert]:
        return None
    table.remove(dropped, worker)
    return worker


def displace(table: Table, expert: int, allowed: Bools) -> int | None:
    """Make room for an expert of an output rank at the expense of other layers' only copies, if those fit elsewhere.

    They are without a copy then, and are dealt with the other layers' experts, which come next.
    """
    others = ~table.output
    gain = np.where(allowed, table.free + table.bytes_held(others & (table.copies == 1)), -1)
    worker = int(gain.argmax())
    if gain[worker] < table.size[expert]:
        return None
    held = table.held_by(worker)
    dropped = _least(table, expert, worker, held[others[held] & (table.copies[held] == 1)])
    homeless = np.concatenate([dropped, (others & (table.copies == 0)).nonzero()[0]])
    largest = int(table.size[homeless].max(initial=1))
    rooms = (table.free + table.bytes_held(others & (table.copies >= 2)))[~allowed] // largest
    if int(table.size[homeless].sum()) > int(rooms.sum()) * largest:
        return None
    table.remove(dropped, worker)
    return worker


def _least(table: Table, expert: int, worker: int, held: I64) -> I64:
    """So many of these copies that the expert fits if the worker drops them: unloaded ones first, then unpopular."""
    loaded = np.array([worker in table.before[other] for other in held.tolist()], np.bool_)
    order: I64 = held[np.lexsort((table.weight[held], loaded))]
    missing = int(table.size[expert] - table.free[worker])
    freed = np.cumsum(table.size[order])
    return order[: int(freed.searchsorted(missing)) + 1] if missing > 0 else order[:0]


def rearrange(table: Table, experts: I64, allowed: Bools) -> None:
    """Find places for further copies that have none although there is room: on a host that has a copy, say.

    If another worker could take the expert but is full, one of its copies that nobody has loaded yet may go to where
    the room is. (Loaded copies stay: a second copy is not worth moving them.)
    """
    for expert in experts[:EXCHANGES_MAX].tolist():
        roomy = (table.free >= table.size.min()).nonzero()[0]
        if not len(roomy):
            break
        able = allowed & ~np.isin(table.host, table.host[table.holders_of(expert)])
        for spacious in roomy[np.argsort(-table.free[roomy], kind="stable")][:SPACIOUS_MAX].tolist():
            if _exchange(table, expert, spacious, able):
                break


def _exchange(table: Table, expert: int, spacious: int, able: Bools) -> bool:
    """Move a copy that nobody has loaded from a worker that could take the expert to `spacious`. True if done."""
    size, host = table.size[expert], table.host[spacious]
    for column in range(table.replicas):
        worker = table.holder[:, column]
        there = (worker >= 0) & able[worker] & (worker != spacious)
        there &= (table.free[worker] + table.size >= size) & (table.size <= table.free[spacious])
        there &= ~table.output | (table.tier[spacious] <= table.tier[worker])
        others = np.where(table.holder >= 0, table.host[table.holder], -1) == host
        others[:, column] = False
        there &= ~others.any(axis=1)
        for other in there.nonzero()[0].tolist():
            taker = int(worker[other])
            if taker not in table.before[other]:
                table.replace(np.array([other]), taker, spacious)
                table.add(np.array([expert]), taker)
                return True
    return False


def balance(table: Table, aims: Aims, newcomers: Bools) -> None:
    """Those with less than their fair share take copies over from those with more, layer by layer.

    Newcomers, who held nothing, may take what others have loaded; everybody what nobody has loaded yet.
    """
    excess = table.load - aims.fair
    for taker in (excess < -UNEVEN * aims.fair).nonzero()[0].tolist():
        _fill_up(table, aims, excess, taker, bool(newcomers[taker]))


def _fill_up(table: Table, aims: Aims, excess: F64, taker: int, newcomer: bool) -> None:
    """Give one worker what it lacks of its share. excess: what everybody has beyond theirs, kept up to date."""
    spare, smallest, least = int(table.free[taker]), int(table.size.min()), float(table.weight.min())
    if newcomer:
        share = aims.fair[taker] * int(table.size.sum()) / float(table.weight.sum())
        spare = min(spare, int(NEWCOMER_SLACK * share) - int(table.size[table.held_by(taker)].sum()))
    refused: list[int] = []
    while len(refused) < MISSES_MAX and excess[taker] <= -least and spare >= smallest:
        donor = int(excess.argmax())
        if excess[donor] < least / 2:
            break
        taken = _offer(table, aims, donor, taker, newcomer)
        half = table.weight[taken] / 2  # a donor may fall short of its share by half an expert
        most = np.minimum(-excess[taker], excess[donor] + half) + 1e-9
        taken = taken[(np.cumsum(table.weight[taken]) <= most) & (np.cumsum(table.size[taken]) <= spare)]
        if len(taken):
            table.replace(taken, donor, taker)
            spare -= int(table.size[taken].sum())
            excess[taker] = table.load[taker] - aims.fair[taker]
            excess[donor] = table.load[donor] - aims.fair[donor]
        else:
            refused.append(donor)
            excess[donor] = -np.inf
    excess[refused] = table.load[refused] - aims.fair[refused]


def _offer(table: Table, aims: Aims, donor: int, taker: int, newcomer: bool) -> I64:
    """Experts of one layer that the taker may have: of its class and in a layer that it is in already, if possible."""
    held: I64 = table.held_by(donor)
    holders = table.holder[held]
    others = (holders >= 0) & (holders != donor)
    able = ~(others & (table.host[holders] == table.host[taker])).any(axis=1)
    able &= ~table.output[held] | (table.tier[taker] <= table.tier[donor])
    able &= aims.near[:, taker][table.output[held].astype(np.int64)] | (holders[:, 0] != donor)
    if not newcomer:
        able &= np.array([donor not in table.before[expert] for expert in held.tolist()], np.bool_)
    most = np.ceil(table.experts_in * table.replicas / aims.fan_out)
    room = (most - table.in_layer[taker])[table.layer[held]]
    able &= room > 0
    held, room = held[able], room[able]
    if not len(held):
        return held
    alike = (~others[able] | (table.kind[holders[able]] == table.kind[taker])).all(axis=1)
    layers = table.layer[held]
    # Most of all a layer that it is in, then one with many experts whose other copies are of its class.
    score = np.bincount(layers, weights=1 + 1e3 * alike, minlength=len(table.layers))
    score[table.in_layer[taker] > 0] *= 1e6
    chosen = layers == int(score.argmax())
    if alike[chosen].any():
        chosen &= alike
    run: I64 = held[chosen][: int(room[chosen][0])]
    return run
