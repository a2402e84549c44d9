"""Recomputing an answer of live work: its rows are computed here, each by itself as batch invariance allows, with
ggml's kernels over experts whose bytes the manifest's hashes vouch for, whoever sent them.

Rows that are further from these kernels than kernels are from each other meet every arithmetic that is known
(capabilities/row_grades.py). That takes long, so an answer shows only some of its experts so.

Nothing here awaits, and nothing here imports what does: it runs in a process of its own, which must start at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.crafted_rows import references
from backends.device import Device
from backends.experts import F32, I32
from backends.manifest import ExpertSource, LayerExperts, Manifest
from backends.program import ExpertProgram
from capabilities.errors import UnsupportedModel
from capabilities.row_check import RowReferences, Rows, Some
from capabilities.row_grades import NEAR, Grade, Graded, grade_rows
from scheduler.combine import weighted_sums
from swarmnode.leader.own_experts import OwnExperts

JUDGE_BYTES_MAX: Final = 128 << 20  # of experts kept: those that many tokens choose come again and again
FAR_EXPERTS_MAX: Final = 2  # of one answer: each is taken apart in NumPy, some tenths of a second for a large one
HALVES: Final = frozenset({1, 30})  # F16, BF16: this node's own kernels may add their products in half precision
_PLAINLY_WRONG: Final = 0.95  # relative L2: zeros are 1; activations of four bits, the coarsest known, 0.86 at most


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An answer of a peer to rows x [T, n_in], as they are before `rounded` ones went as Q8_0.

    tokens, experts int32 [R], as they were asked. weights [R] where it is sums by token [T, n_out], else it is rows
    [R, n_out]. ask_f32: sums in single precision were asked for. whole: nothing of what was asked is left out.
    """

    peer: str
    layer: LayerExperts
    x: F32
    tokens: I32
    experts: I32
    weights: F32 | None
    answer: F32
    rounded: bool
    ask_f32: bool
    whole: bool

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.answer.nbytes

    @property
    def units(self) -> NDArray[np.int64]:
        """For each of the R rows that were computed, which row of the answer it went into."""
        return np.arange(len(self.experts)) if self.weights is None else self.tokens.astype(np.int64)

    def sent(self) -> F32:
        """x as the peer's kernels saw it."""
        return dequantize_q8_0(quantize_q8_0(self.x)) if self.rounded else self.x


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """graded: the rows, or sums, that were looked at. experts: one of each. telling: right ones show precise sums.

    cpu_s: processor time that it took; kernels_s: of that, to compute the answer's rows once.
    """

    graded: Graded
    experts: I32
    telling: bool
    cpu_s: float = 0.0
    kernels_s: float = 0.0


Steps = Generator[list[int], None, Judged]


class Recomputing:
    """Not thread-safe, and one answer after the other."""

    def __init__(self, manifest: Manifest, source: ExpertSource, make_device: Callable[[], Device]) -> None:
        self._manifest = manifest
        self._source = source
        self._own = OwnExperts(manifest, source, make_device, JUDGE_BYTES_MAX)

    def steps(self, sample: Sample) -> Steps:
        """The verdict on an answer, in steps. Each yields the experts of its layer that the next one reads.

        Raises:
            SwarmError: an expert cannot be read, or there is no memory.
        """
        wanted = sorted(set(sample.experts.tolist()))
        if missing := [expert for expert in wanted if not self._own.holds(sample.layer.layer, expert)]:
            yield missing
        began_s, kernels_s = time.thread_time(), self._own.kernels_s
        compared = self._against_own(sample)
        kernels_s = self._own.kernels_s - kernels_s
        chosen = _choose(sample, np.flatnonzero(compared.doubtful))
        kept = ~compared.doubtful
        if len(chosen) > 0:
            so_far_s = time.thread_time() - began_s
            yield sorted(set(sample.experts[np.isin(sample.units, chosen)].tolist()))
            began_s = time.thread_time() - so_far_s
            graded = self._against_all(sample, compared, chosen)
            kept[chosen] = True
            compared.graded.put(chosen, graded)
        firsts = np.unique(sample.units, return_index=True)[1]
        telling = not HALVES & {tensor.type for tensor in sample.layer.tensors}
        cpu_s = time.thread_time() - began_s
        return Judged(compared.graded.only(kept), sample.experts[firsts][kept], telling, cpu_s, kernels_s)

    def close(self) -> None:
        """Free what is held; the next answer reads anew."""
        self._own.close()

    def _against_own(self, sample: Sample) -> _Compared:
        rows = self._own.compute(
            sample.layer.layer, sample.sent(), sample.tokens, sample.experts, ask_f32=sample.ask_f32
        )
        own = rows if sample.weights is None else weighted_sums(rows, sample.weights, sample.tokens)
        if np.array_equal(sample.answer, own):  # as nearly all are: distances would take longer than narrow experts do
            same = np.full(len(own), Grade.SAME, np.int8)
            none = np.zeros(len(own))
            return _Compared(own, Graded(same, none, none.copy(), none.astype(bool)), none.astype(bool))
        graded = grade_rows(sample.answer, own, lambda _: None, _terms(sample.layer))
        doubtful = (graded.distance > NEAR) & (graded.distance <= _PLAINLY_WRONG)
        return _Compared(own, graded, doubtful)

    def _against_all(self, sample: Sample, compared: _Compared, chosen: NDArray[np.intp]) -> Graded:
        def refer(some: NDArray[np.intp]) -> RowReferences | None:
            try:
                return self._references(sample, chosen[some])
            except UnsupportedModel:
                return None

        agreeing = int((compared.graded.distance <= NEAR).sum())
        return grade_rows(sample.answer[chosen], compared.own[chosen], refer, _terms(sample.layer), agreeing)

    def _references(self, sample: Sample, units: NDArray[np.intp]) -> RowReferences:
        """Every known arithmetic for these rows, or sums, of the answer."""
        rows = np.flatnonzero(np.isin(sample.units, units))
        experts = sample.experts[rows]
        x = sample.sent()[sample.tokens[rows]]
        each = np.unique(experts).tolist()
        parts = {expert: self._references_of(sample.layer, expert, x[experts == expert]) for expert in each}

        def gather(under: Callable[[RowReferences], Rows]) -> NDArray[np.float64]:
            return _gathered(sample, rows, {expert: under(part) for expert, part in parts.items()})

        def rounded(number: int) -> NDArray[np.float64]:
            return gather(lambda part: part.rounded[number])

        def of(some: Some) -> tuple[NDArray[np.intp], dict[int, Some]]:
            """Which rows go into these units, and which of its own they are for each expert."""
            wanted = np.isin(sample.units[rows], units[some])
            of_each = {expert: np.flatnonzero(wanted[experts == expert]) for expert in each}
            return rows[wanted], {expert: those for expert, those in of_each.items() if len(those)}

        def coarse(some: Some, ways: Collection[int] | None) -> Iterator[tuple[int, Rows]]:
            wanted, those = of(some)
            for found in zip(*(parts[e].coarse(those[e], ways) for e in those), strict=True):
                values = dict(zip(those, (part for _, part in found), strict=True))
                yield found[0][0], _gathered(sample, wanted, values)

        def half_sums(some: Some) -> Iterator[Rows]:
            wanted, those = of(some)
            for found in zip(*(parts[e].half_sums(those[e]) for e in those), strict=True):
                yield _gathered(sample, wanted, dict(zip(those, found, strict=True)))

        count = len(parts[each[0]].rounded)
        exact, halves = gather(lambda part: part.exact), gather(lambda part: part.halves)
        return RowReferences(exact, tuple(map(rounded, range(count))), halves, half_sums, coarse)

    def _references_of(self, layer: LayerExperts, expert: int, x: F32) -> RowReferences:
        program = ExpertProgram.from_bytes(self._manifest.programs[layer.program])

        def read(number: int, index: int) -> bytes:
            return bytes(self._source.read(layer.layer, number, layer.offsets[index], layer.tensors[index].nbytes))

        return references(layer, program, expert, read, x)


def advance(steps: Steps) -> list[int] | Judged:
    """The experts that the next step reads, or the verdict. Raises as the steps do."""
    try:
        return next(steps)
    except StopIteration as end:
        judged: Judged = end.value
        return judged


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """own: what this node computes, [U, n_out] for each row or sum of the answer. doubtful: those that must meet every
    known arithmetic, as far as there is time."""

    own: F32
    graded: Graded
    doubtful: NDArray[np.bool_]


def _gathered(sample: Sample, rows: NDArray[np.intp], of: Mapping[int, Rows]) -> NDArray[np.float64]:
    """The sample's answer to these of its rows, from each expert's own rows, in their order."""
    experts, values = sample.experts[rows], np.empty((len(rows), sample.layer.n_out))
    for expert, part in of.items():
        values[experts == expert] = part
    if sample.weights is None:
        return values
    weighted = values * sample.weights[rows, None].astype(np.float64)
    return np.add.reduceat(weighted, np.unique(sample.units[rows], return_index=True)[1], axis=0)


def _choose(sample: Sample, units: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of these rows, or sums, as many as need no more than FAR_EXPERTS_MAX experts; the first in any case."""
    chosen: list[int] = []
    taken: set[int] = set()
    for unit in units.tolist():
        needs = set(sample.experts[sample.units == unit].tolist())
        if not chosen or len(taken | needs) <= FAR_EXPERTS_MAX:
            chosen.append(unit)
            taken |= needs
    return np.array(chosen, np.intp)


def _terms(layer: LayerExperts) -> int:
    """The length of the shortest sum of products of an expert."""
    return min(tensor.shape[0] for tensor in layer.tensors if len(tensor.shape) == 2)
