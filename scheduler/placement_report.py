"""What a placement means: who holds what, where it falls short and why, and what the loss of a peer would cost.

Everything here is read off a placement and the workers as they are now, so it is as true for a placement that was
adopted from another leader as for one's own, and shows what has become of it since: a holder that is not among the
workers, or may hold nothing any more, does not count as a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from scheduler.layer_cost import ROWS_TYPICAL, PeerSpeed, share_out
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, output_ranks
from scheduler.placing import REPLICAS, place

_WRONG = (
    "",
    "was not seen to accumulate in F32, even when asked",
    "is unfit: its numbers are out of tolerance",
    "is unfit and was not seen to accumulate in F32, even when asked",
)  # by WorkerSpec.tier


@dataclass(frozen=True, slots=True)
class Coverage:
    """The fewest copies of any expert, and the experts that have none, as (layer, expert)."""

    min_copies: int
    missing: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PeerShare:
    """What one worker holds: experts by layer, their bytes, and why none is of an output rank ("" if some are)."""

    peer: str
    held: Mapping[int, tuple[int, ...]]
    nbytes: int
    budget_bytes: int
    why_no_output: str

    @property
    def experts(self) -> int:
        return sum(map(len, self.held.values()))


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """A placement described. The texts are sentences for people; peers in them go by the names given.

    copies         how many experts have so many copies
    degraded       what is not as it should be: output ranks on wrong peers, copies that are lacking
    single_points  the experts that one loss would leave without a copy
    mixed          experts whose copies are not all of one known numeric class
    token_ms       an estimate of one step's layers at ROWS_TYPICAL rows each, without the trunk
    """

    coverage: Coverage
    copies: Mapping[int, int]
    degraded: tuple[str, ...]
    single_points: tuple[str, ...]
    mixed: int
    peers: tuple[PeerShare, ...]
    token_ms: float


@dataclass(frozen=True, slots=True)
class Loss:
    """What the loss of a peer would cost.

    no_copy, one_copy   the experts that would have so many copies left, by layer
    bytes_to_move       what the others would load to make up for it; None if they cannot
    token_ms_after      the estimate of PlacementReport.token_ms once they have; None likewise
    impossible          why they cannot, or ""
    """

    peer: str
    no_copy: Mapping[int, tuple[int, ...]]
    one_copy: Mapping[int, tuple[int, ...]]
    bytes_to_move: int | None
    token_ms_before: float
    token_ms_after: float | None
    impossible: str

    @property
    def slowdown(self) -> float | None:
        """How many times as long a token would take."""
        return None if self.token_ms_after is None else self.token_ms_after / max(self.token_ms_before, 1e-9)


def describe(
    placement: Placement,
    layers: Sequence[LayerSpec],
    workers: Sequence[WorkerSpec],
    *,
    replicas: int = REPLICAS,
    output: Iterable[int] | None = None,
    names: Mapping[str, str] | None = None,
) -> PlacementReport:
    """Describe a placement of these layers on the workers as they are now. names: how to call peers in sentences."""
    ranks = output_ranks(layers) if output is None else frozenset(output)
    there = _holders_there(placement, layers, workers)
    copies = Counter(len(peers) for holders in there.values() for peers in holders)
    call = names or {}
    return PlacementReport(
        coverage=Coverage(
            min(copies, default=0),
            tuple((layer, expert) for layer, holders in there.items() for expert, p in enumerate(holders) if not p),
        ),
        copies=dict(sorted(copies.items())),
        degraded=(
            *_wrong_outputs(there, workers, ranks, call),
            *_lacking(copies, workers, replicas),
            *_on_one_host(copies, workers),
        ),
        single_points=tuple(_single_points(there, call)),
        mixed=_mixed(there, workers),
        peers=tuple(_shares(there, layers, workers, ranks)),
        token_ms=_token_ms(there, layers, workers),
    )


def wrong_outputs(
    placement: Placement,
    layers: Sequence[LayerSpec],
    workers: Sequence[WorkerSpec],
    *,
    output: frozenset[int],
    names: Mapping[str, str],
) -> tuple[str, ...]:
    """That part of `degraded` alone which tells of output ranks on wrong peers: the rest takes longer."""
    ranks = [spec for spec in layers if spec.layer in output]
    return tuple(_wrong_outputs(_holders_there(placement, ranks, workers), workers, output, names))


def without(
    placement: Placement,
    layers: Sequence[LayerSpec],
    workers: Sequence[WorkerSpec],
    peer: str,
    *,
    replicas: int = REPLICAS,
    output: Iterable[int] | None = None,
) -> Loss:
    """What the loss of `peer` would cost if nothing else changed."""
    before = _holders_there(placement, layers, workers)
    rest = [worker for worker in workers if worker.peer != peer]
    left: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    for layer, holders in before.items():
        for expert, peers in enumerate(holders):
            if peer in peers and len(peers) <= 2:
                left[len(peers) - 1].setdefault(layer, []).append(expert)
    moved, after_ms, impossible = None, None, ""
    try:
        after = place(
            layers,
            rest,
            term=placement.term,
            epoch=placement.epoch,
            previous=placement,
            newcomers=(),
            replicas=replicas,
            output=output,
        )
        moved = sum(bytes_to_load(placement, after, layers).values())
        after_ms = _token_ms(after.holders, layers, rest)
    except PlacementImpossible as error:
        impossible = error.message
    return Loss(
        peer=peer,
        no_copy={layer: tuple(experts) for layer, experts in left[0].items()},
        one_copy={layer: tuple(experts) for layer, experts in left[1].items()},
        bytes_to_move=moved,
        token_ms_before=_token_ms(before, layers, workers),
        token_ms_after=after_ms,
        impossible=impossible,
    )


def bytes_to_load(before: Placement | None, after: Placement, layers: Iterable[LayerSpec]) -> dict[str, int]:
    """The bytes that each peer must load that it did not hold before; peers that need none are left out."""
    needed: Counter[str] = Counter()
    for spec in layers:
        had = before.holders.get(spec.layer, ()) if before is not None else ()
        for expert, peers in enumerate(after.holders[spec.layer]):
            for peer in peers:
                if expert >= len(had) or peer not in had[expert]:
                    needed[peer] += spec.expert_bytes
    return dict(needed)


def runs(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: "0-3, 7"."""
    spans = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


Holders = Mapping[int, tuple[tuple[str, ...], ...]]


def _holders_there(placement: Placement, layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec]) -> Holders:
    """The holders that still count, layers in order."""
    there = {worker.peer for worker in workers if worker.may_hold}
    counting = {}
    for spec in sorted(layers, key=lambda spec: spec.layer):
        holders = placement.holders.get(spec.layer, ())
        if len(holders) != spec.n_expert:  # another model's
            holders = ((),) * spec.n_expert
        counting[spec.layer] = tuple(tuple(peer for peer in peers if peer in there) for peers in holders)
    return counting


def _experts(layer: int, experts: Sequence[int]) -> str:
    """ "expert 17 of layer 9", "experts 0-3, 7 of layer 9"."""
    return f"expert{'s' if len(experts) > 1 else ''} {runs(experts)} of layer {layer}"


def _single_points(there: Holders, call: Mapping[str, str]) -> Iterable[str]:
    for layer, holders in there.items():
        by_peer: dict[str, list[int]] = {}
        for expert, peers in enumerate(holders):
            if len(peers) == 1:
                by_peer.setdefault(peers[0], []).append(expert)
        for peer, experts in by_peer.items():
            have = "has" if len(experts) == 1 else "have"
            yield f"{_experts(layer, experts)} {have} one copy, on {call.get(peer, peer)}"


def _wrong_outputs(
    there: Holders, workers: Sequence[WorkerSpec], ranks: frozenset[int], call: Mapping[str, str]
) -> Iterable[str]:
    tiers = {worker.peer: worker.tier for worker in workers}
    for layer in sorted(ranks & there.keys()):
        by_peer: dict[str, list[int]] = {}
        for expert, peers in enumerate(there[layer]):
            for peer in peers:
                if tiers[peer]:
                    by_peer.setdefault(peer, []).append(expert)
        for peer, experts in by_peer.items():
            yield (
                f"output rank {layer}: {_experts(layer, experts)} {'is' if len(experts) == 1 else 'are'} on"
                f" {call.get(peer, peer)}, which {_WRONG[tiers[peer]]}; no fit worker that does has the room"
            )


def _lacking(copies: Mapping[int, int], workers: Sequence[WorkerSpec], replicas: int) -> Iterable[str]:
    total = sum(copies.values())
    fewer = sum(n for count, n in copies.items() if count < replicas)
    if fewer:
        hosts = len({worker.host or worker.peer for worker in workers if worker.may_hold})
        machines = f"{hosts} machine{'s' if hosts > 1 else ''}"
        short = "memory on machines that are right for them is short"
        why = f"workers are on {machines}" if hosts < replicas else short
        yield f"{fewer} of {total} experts have fewer than {replicas} copies: {why}"


def _on_one_host(copies: Mapping[int, int], workers: Sequence[WorkerSpec]) -> Iterable[str]:
    able = [worker for worker in workers if worker.may_hold]
    if len(able) > 1 and max(copies, default=0) > 1 and len({worker.host or worker.peer for worker in able}) == 1:
        yield f"all {len(able)} workers are on one machine: an expert's copies are lost together with it"


def _mixed(there: Holders, workers: Sequence[WorkerSpec]) -> int:
    kind = {worker.peer: worker.numeric_class for worker in workers}
    mixed = 0
    for holders in there.values():
        for peers in holders:
            kinds = {kind[peer] for peer in peers}
            mixed += len(peers) > 1 and (len(kinds) > 1 or None in kinds)
    return mixed


def _shares(
    there: Holders, layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec], ranks: frozenset[int]
) -> Iterable[PeerShare]:
    held: dict[str, dict[int, list[int]]] = {worker.peer: {} for worker in workers}
    for layer, holders in there.items():
        for expert, peers in enumerate(holders):
            for peer in peers:
                held[peer].setdefault(layer, []).append(expert)
    sizes = {spec.layer: spec.expert_bytes for spec in layers}
    smallest = min((sizes[layer] for layer in ranks & sizes.keys()), default=0)
    for worker in sorted(workers, key=lambda worker: worker.peer):
        share = {layer: tuple(experts) for layer, experts in held[worker.peer].items()}
        nbytes = sum(sizes[layer] * len(experts) for layer, experts in share.items())
        why = "" if ranks & share.keys() else _why_no_output(worker, nbytes, smallest)
        yield PeerShare(worker.peer, share, nbytes, worker.budget_bytes, why)


def _why_no_output(worker: WorkerSpec, used: int, expert_bytes: int) -> str:
    if worker.fitness == "quarantined":
        return "it is quarantined and holds nothing"
    if worker.draining:
        return "it is draining and holds nothing"
    if worker.tier:
        return f"it {_WRONG[worker.tier]}"
    if worker.budget_bytes < expert_bytes:
        return f"its budget of {worker.budget_bytes} bytes has no room for one of their experts ({expert_bytes} bytes)"
    if worker.budget_bytes - used < expert_bytes:
        return "its memory is full of other layers"
    return "others hold them: by its speed and distance its share is elsewhere"


def _token_ms(there: Holders, layers: Sequence[LayerSpec], workers: Sequence[WorkerSpec]) -> float:
    speeds = {w.peer: PeerSpeed(w.rtt_ms / 1e3, w.rows_per_s) for w in workers}
    seconds = 0.0
    for spec in layers:
        peers = sorted({peer for peers in there[spec.layer] for peer in peers})
        index = {peer: i for i, peer in enumerate(peers)}
        options = [[index[peer] for peer in peers] for peers in there[spec.layer]]
        seconds += share_out(options, [speeds[peer] for peer in peers], ROWS_TYPICAL, spec.popularity)[1]
    return seconds * 1e3
