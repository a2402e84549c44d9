"""One layer's dispatch: which rows go to which peer, and where its answers belong.

The router chose K experts for each of T tokens; output slot t*K + k belongs to token t's k-th choice. A peer gets each
token's activations once, however many of its experts were chosen, and answers one row for each of its slots, in slot
order. Answers are written to their slots, so the result is the same whoever answers first.

`plan` runs for every layer of every token: owners come from tables (LayerRouting), the rest is a stable sort. If a peer
fails, `retry` sends its part to other holders; the slots stay, so the result is the same whoever computed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import ExpertsUnavailable, PeerMistake
from scheduler.layer_cost import PeerSpeed, share_out

# A failed peer must reach the asker as an error within 5 s: at most 4 s for one dispatch of a decode step leave one for
# the rest of the way. Nothing waits for longer than two minutes: at such a rate a swarm serves nobody.
DECODE_DEADLINE_S_MAX = 4.0
PREFILL_DEADLINE_S_MAX = 120.0
DECODE_ROWS_MAX = 128  # expert rows that count as a decode step: 16 sequences with 8 experts each
# No dispatch has less. On a busy home machine a millisecond's work has been seen to take 0.8 s, and a wrong verdict
# costs a request; a peer that is gone is noticed sooner, by its connection or by pings.
DEADLINE_S_MIN = 3.0
SLACK = 4.0  # a peer may be this much slower than it was measured: another job, a hot phone
ROWS_PER_S_UNMEASURED = 50.0  # an old CPU with large experts
BYTES_PER_S_MIN = 250_000.0  # 2 Mbit/s, the slowest uplink that makes sense
HEDGE_SLACK = 8.0  # so many times as long as it takes as a rule: rarely without a reason
HEDGE_AFTER_S_MIN = 0.25  # about the longest round trip between homes; less would ask twice for nothing on such links
UNMEASURED = PeerSpeed(rtt_s=0.05, rows_per_s=ROWS_PER_S_UNMEASURED)  # chosen only where nobody better is
# Rows that stand for dispatches of 1-2, up to 8, 32, 128, 512 and more: who answers is decided for each magnitude.
ROWS_MAGNITUDES = (2.0, 8.0, 32.0, 128.0, 512.0, 4096.0)
_RATE_MEMORY = 0.9  # of what was measured, kept at each new measurement: the last ten or so count


@dataclass(frozen=True, slots=True, eq=False)
class PeerRows:
    """One peer's part of a dispatch: R rows to answer over Tp rows of activations.

    rows     int32 [Tp]  rows of the layer's activations to send, ascending
    tokens   int32 [R]   for each answer, the index into what was sent
    experts  int32 [R]   and the expert to apply
    slots    int64 [R]   where the answer belongs in the output [T * K], ascending
    """

    peer: str
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    experts: NDArray[np.int32]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A layer's dispatch to all peers; every output slot is in exactly one part. Without tokens it has no parts."""

    layer: int
    n_tokens: int
    n_used: int
    parts: tuple[PeerRows, ...]


class LayerRouting:
    """Which peer answers for each expert of a layer, from a placement and the peers that cannot be reached now.

    holders[expert]: its peers, preferred first. speeds: what is measured of them; without it the first holder that can
    be reached answers. With it the choice is layer_cost.share_out's, among the reachable holders of the same numeric
    class as the first one (bits must not depend on who is busy): few workers for few rows, more for many, so there is
    one table for each magnitude of a dispatch, made when it is first needed. The same numbers give the same choice.
    shares_load: False leaves every expert to the first such holder. fallback: a name, of the leader's own copy, that
    answers for experts which no reachable holder has. avoided: peers that answer only for what nobody else of their
    class holds: they are slow at this moment.

    `groups` is the routing to the first holders, reachable or not, by which partial sums are added (combine.py); None
    where it is this very one. Where answers are to be sums, share no load: rows that others share come back as rows.
    """

    def __init__(
        self,
        layer: int,
        holders: Sequence[Sequence[str]],
        unreachable: Collection[str] = (),
        *,
        speeds: Mapping[str, PeerSpeed] | None = None,
        shares_load: bool = True,
        fallback: str | None = None,
        avoided: Collection[str] = (),
    ) -> None:
        self.layer = layer
        self._holders = tuple(tuple(peers) for peers in holders)
        self._unreachable = frozenset(unreachable)
        self._speeds = speeds
        self._shares_load = shares_load
        self._fallback = fallback if fallback not in self._unreachable else None
        self._avoided = frozenset(avoided)
        options = [self._options(peers) for peers in self._holders]
        self.peers = tuple(sorted({peer for able in options for peer in able}))
        index = {peer: i for i, peer in enumerate(self.peers)}
        self._options_of = [[index[peer] for peer in able] for able in options]
        nobody = len(self.peers)  # sorts behind the peers
        first = np.array([able[0] if able else nobody for able in self._options_of], dtype=np.int64)
        self._replaced = any(
            able and able[0] != peers[0] for able, peers in zip(options, self._holders, strict=True) if peers
        )
        no_choice = speeds is None or all(len(able) < 2 for able in self._options_of)
        self._owner_of: list[NDArray[np.int64] | None] = [first if no_choice else None for _ in ROWS_MAGNITUDES]
        self.groups: LayerRouting | None = LayerRouting(layer, holders) if self._replaced or not no_choice else None

    def _options(self, holders: tuple[str, ...]) -> list[str]:
        """Who of them may answer."""
        able = [peer for peer in holders if peer not in self._unreachable]
        if not able:
            return [] if self._fallback is None else [self._fallback]
        kind = self._speed(able[0]).numeric_class
        able = able[:1] + [peer for peer in able[1:] if kind is not None and self._speed(peer).numeric_class == kind]
        able = [peer for peer in able if peer not in self._avoided] or able
        return able if self._shares_load else able[:1]

    def _speed(self, peer: str) -> PeerSpeed:
        return (self._speeds or {}).get(peer, UNMEASURED)

    def _owners(self, rows: int) -> NDArray[np.int64]:
        magnitude = min(max(rows - 1, 0).bit_length() // 2, len(ROWS_MAGNITUDES) - 1)
        table = self._owner_of[magnitude]
        if table is None:
            speeds = [self._speed(peer) for peer in self.peers]
            table, _ = share_out(self._options_of, speeds, ROWS_MAGNITUDES[magnitude])
            table[table < 0] = len(self.peers)
            self._owner_of[magnitude] = table
        return table

    def owners(self, experts: NDArray[np.int32]) -> NDArray[np.int64]:
        """For each expert [R] the index into `peers`, len(peers) for none. Raises ValueError for an id out of range."""
        table = self._owners(len(experts))
        try:
            owners = table[experts.view(np.uint32)]  # a negative id becomes one that is out of range
        except IndexError:
            raise ValueError(f"layer {self.layer}: an expert id is outside 0..{len(table) - 1}") from None
        return owners

    def without(self, peers: Collection[str], avoided: Collection[str] = ()) -> LayerRouting:
        """The same while these cannot be reached either, and those are slow."""
        return LayerRouting(
            self.layer,
            self._holders,
            self._unreachable | set(peers),
            speeds=self._speeds,
            shares_load=self._shares_load,
            fallback=self._fallback,
            avoided=self._avoided | set(avoided),
        )

    def stands_in(self, part: PeerRows) -> set[str]:
        """The first holders in whose place the peer of this part of a plan answers, since they are away or slow."""
        if not self._replaced:
            return set()
        first = (self._holders[expert][:1] for expert in part.experts.tolist())
        return {peer for peers in first for peer in peers} - {part.peer}

    def holders_of(self, part: PeerRows) -> set[str]:
        """Everybody who holds some of a part's experts, reachable or not."""
        return {peer for expert in part.experts.tolist() for peer in self._holders[expert]}

    def unavailable(self, experts: NDArray[np.int32]) -> ExpertsUnavailable:
        """The error that names those of the experts that nobody answers for, and a peer that held them."""
        missing = sorted({int(expert) for expert in experts if not self._options_of[expert]})
        held = sorted({peer for expert in missing for peer in self._holders[expert]})
        names = ", ".join(map(str, missing))
        return ExpertsUnavailable(
            f"nobody answers for experts {names} of layer {self.layer}: {', '.join(held) or 'no peer'} held them",
            layer=self.layer,
            experts=missing,
            peer=held[0] if held else None,
            cause="disconnected",
        )


def plan(ids: NDArray[np.int32], routing: LayerRouting) -> Plan:
    """Split the router's choice over the peers. ids: int32 [T, K], contiguous or not.

    Raises ExpertsUnavailable if a chosen expert has no peer, ValueError for ids that are none of this layer's.
    """
    n_tokens, n_used = ids.shape
    chosen = np.ascontiguousarray(ids, dtype=np.int32).reshape(-1)
    owners = routing.owners(chosen)
    if n_tokens == 1:
        return Plan(routing.layer, 1, n_used, _parts_of_one_token(routing, owners, chosen))
    order = owners.argsort(kind="stable")  # by peer, then by slot
    return Plan(routing.layer, n_tokens, n_used, _parts(routing, owners[order], order // n_used, chosen[order], order))


def retry(part: PeerRows, routing: LayerRouting, unreachable: Collection[str] = ()) -> tuple[PeerRows, ...]:
    """The same slots on other holders, for when a part's peer fails, is late, or answers wrong.

    The rest of the layer's plan stays as it is; answers are written to the same slots, so nobody can tell. unreachable:
    peers to leave out besides the part's own. Raises ExpertsUnavailable if an expert has no other holder.
    """
    others = routing.without({part.peer, *unreachable})
    owners = others.owners(part.experts)
    order = owners.argsort(kind="stable")  # slots ascend within a part, so they do for each peer
    tokens = part.rows[part.tokens[order]]
    return _parts(others, owners[order], tokens, part.experts[order], part.slots[order])


def _parts_of_one_token(
    routing: LayerRouting, owners: NDArray[np.int64], experts: NDArray[np.int32]
) -> tuple[PeerRows, ...]:
    """The same as `_parts` for a decode step's few experts [K] by slot, dealt out sooner than NumPy has begun."""
    slots_of: dict[int, list[int]] = {}
    for slot, owner in enumerate(owners.tolist()):
        slots_of.setdefault(owner, []).append(slot)
    if len(routing.peers) in slots_of:
        raise routing.unavailable(experts)
    parts = []
    for owner in sorted(slots_of):
        slots = np.array(slots_of[owner])
        zeros = np.zeros(len(slots), np.int32)  # each answer's index into the one row that is sent
        parts.append(PeerRows(routing.peers[owner], zeros[:1], zeros, experts[slots], slots))
    return tuple(parts)


def _parts(
    routing: LayerRouting,
    owners: NDArray[np.int64],
    of_token: NDArray[np.integer],
    experts: NDArray[np.int32],
    slots: NDArray[np.int64],
) -> tuple[PeerRows, ...]:
    """Cut rows that are sorted by owner, then by slot, into one part a peer. All arguments are [R]."""
    n = len(owners)
    if not n:
        return ()
    if owners[-1] == len(routing.peers):
        raise routing.unavailable(experts)
    # A peer's slots ascend, so one token's stand together, and each change of token is one more row to send. (A peer's
    # last token may be the next peer's first: both then read that row.)
    changes = np.ones(n, dtype=np.bool_)
    changes[1:] = of_token[1:] != of_token[:-1]
    send = changes.cumsum(dtype=np.int32) - np.int32(1)
    rows = of_token[changes].astype(np.int32)
    parts = []
    start = 0
    for end in [*((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist(), n]:
        first, last = int(send[start]), int(send[end - 1])
        part = slice(start, end)
        peer = routing.peers[owners[start]]
        parts.append(PeerRows(peer, rows[first : last + 1], send[part] - first, experts[part], slots[part]))
        start = end
    return tuple(parts)


def check_reply(
    values: NDArray[np.float32], part: PeerRows, layer: int, n_out: int, *, partial_sums: bool = False
) -> None:
    """Raise PeerMistake, naming the peer, unless values are float32 [R, n_out] (or [Tp, n_out] sums) and finite."""
    shape = (len(part.rows if partial_sums else part.slots), n_out)
    if values.dtype != np.float32 or values.shape != shape:
        expected = f"float32 {shape}"
        raise _mistake(part, layer, f"answered {values.dtype} {values.shape} instead of {expected}")
    # A sum is finite only if all its terms are; a sum that overflowed needs the second look.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    wrong = int(np.count_nonzero(~np.isfinite(values)))
    if wrong:
        raise _mistake(part, layer, f"answered {wrong} values that are NaN or infinite")


def gather(plan: Plan, replies: Mapping[str, NDArray[np.float32]], out: NDArray[np.float32]) -> None:
    """Write each peer's checked reply, float32 [R, n_out], to its slots of out, float32 [T, K, n_out] (contiguous)."""
    if out.shape[:2] != (plan.n_tokens, plan.n_used) or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous [{plan.n_tokens}, {plan.n_used}, n_out], not {out.shape}")
    for part in plan.parts:
        write_rows(part, replies[part.peer], out)


def write_rows(part: PeerRows, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write one part's checked reply to its slots, wherever it came from. out: float32 [T, K, n_out], contiguous."""
    out.reshape(-1, out.shape[2])[part.slots] = values


class RowRate:
    """Expert rows a second that a peer answered lately, the way there and back included. None before the first."""

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0

    def observe(self, rows: int, elapsed_s: float) -> None:
        self._rows = self._rows * _RATE_MEMORY + rows
        self._seconds = self._seconds * _RATE_MEMORY + max(elapsed_s, 1e-6)

    @property
    def rows_per_s(self) -> float | None:
        return self._rows / self._seconds if self._rows else None


def deadline_s(rows: int, nbytes: int, rows_per_s: float | None) -> float:
    """Seconds to wait for so many expert rows, and bytes out and back, from a peer of that measured rate."""
    expected = SLACK * rows / (rows_per_s or ROWS_PER_S_UNMEASURED) + nbytes / BYTES_PER_S_MIN
    most = DECODE_DEADLINE_S_MAX if rows <= DECODE_ROWS_MAX else PREFILL_DEADLINE_S_MAX
    return min(max(expected, DEADLINE_S_MIN), most)


def hedge_after_s(rows: int, rows_per_s: float | None) -> float:
    """Seconds without an answer to so many expert rows, from a peer of that measured rate, until another is asked too.

    The peer is not given up: whoever answers first counts. It costs the other one work that may be for nothing.
    """
    return max(HEDGE_SLACK * rows / (rows_per_s or ROWS_PER_S_UNMEASURED), HEDGE_AFTER_S_MIN)


def _mistake(part: PeerRows, layer: int, what: str) -> PeerMistake:
    return PeerMistake(f"peer {part.peer} {what} for layer {layer}", peer=part.peer, layer=layer)
