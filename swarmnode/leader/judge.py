"""Recomputing an answer of live work. Nothing else convicts a worker: two volunteers that agree prove nothing.

The rows are computed here, each by itself as batch invariance allows, with ggml's kernels over experts whose bytes the
manifest's hashes vouch for, whoever sent them. A thread of its own and of low priority does it, one answer at a time,
so that no token waits for it. Rows that are further from these kernels than kernels are from each other meet every
arithmetic that is known (capabilities/row_grades.py); that takes long, so an answer shows only some of its experts so.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import trio
from numpy.typing import NDArray

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.crafted_rows import references
from backends.device import Device
from backends.experts import F32, I32
from backends.manifest import ExpertSource, LayerExperts, Manifest
from backends.program import ExpertProgram
from capabilities.errors import UnsupportedModel
from capabilities.row_check import RowReferences, Rows
from capabilities.row_grades import NEAR, Graded, grade_rows
from scheduler.combine import weighted_sums
from swarmnode.leader.own_experts import OwnExperts
from swarmnode.leader.probe import HALVES, Obtain
from swarmnode.net.interface import PeerId

T = TypeVar("T")

JUDGE_BYTES_MAX: Final = 128 << 20  # of experts kept: those that many tokens choose come again and again
FAR_EXPERTS_MAX: Final = 2  # of one answer: each is taken apart in NumPy, some tenths of a second for a large one
_PLAINLY_WRONG: Final = 0.3  # relative L2: no reference could be nearer than the limit of capabilities/row_grades.py
_NICE: Final = 10  # a tenth of a token's share where both want a processor


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An answer of a peer to rows x [T, n_in], as they are before `rounded` ones went as Q8_0.

    tokens, experts int32 [R], as they were asked. weights [R] where it is sums by token [T, n_out], else it is rows
    [R, n_out]. ask_f32: sums in single precision were asked for. whole: nothing of what was asked is left out.
    """

    peer: PeerId
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
    """graded: the rows, or sums, that were looked at. experts: one of each. telling: right ones show precise sums."""

    graded: Graded
    experts: I32
    telling: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """own: what this node computes, [U, n_out] for each row or sum of the answer. doubtful: those that must meet every
    known arithmetic, as far as there is time."""

    own: F32
    graded: Graded
    doubtful: NDArray[np.bool_]


class QuietThread:
    """Runs one job at a time, behind whatever else this machine does."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Cancelling waits for its end: kernels cannot be stopped."""
        done, results, failures = trio.Event(), list[T](), list[Exception]()
        token = trio.lowlevel.current_trio_token()

        def carry_out() -> None:
            try:
                results.append(job())
            except Exception as error:
                failures.append(error)
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        self._jobs.put(carry_out)
        with trio.CancelScope(shield=True):
            await done.wait()
        if failures:
            raise failures[0]
        return results[0]

    def end(self) -> None:
        """After what runs and waits."""
        self._jobs.put(None)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            job()


class Judge:
    """obtain: makes experts readable in `source` for a while (probe.Obtain)."""

    def __init__(
        self, manifest: Manifest, source: ExpertSource, make_device: Callable[[], Device], obtain: Obtain
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._obtain = obtain
        self._own = OwnExperts(manifest, source, make_device, JUDGE_BYTES_MAX)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Callable[[Sample], Awaitable[Judged]]]:
        """`async with judge.at_work() as judge_one: await judge_one(sample)`."""
        thread = QuietThread("judge")

        async def judge_one(sample: Sample) -> Judged:
            return await self._judge(thread, sample)

        try:
            yield judge_one
        finally:
            with trio.CancelScope(shield=True):
                await thread.run(self._own.close)
            thread.end()

    async def _judge(self, thread: QuietThread, sample: Sample) -> Judged:
        """Raises SwarmError: an expert cannot be had here."""
        wanted = sorted(set(sample.experts.tolist()))
        missing = [expert for expert in wanted if not self._own.holds(sample.layer.layer, expert)]
        async with self._readable(sample, missing):
            compared = await thread.run(lambda: self._against_own(sample))
        chosen = _choose(sample, np.flatnonzero(compared.doubtful))
        if len(chosen) == 0:
            return self._judged(sample, compared, ~compared.doubtful)
        far = sorted(set(sample.experts[np.isin(sample.units, chosen)].tolist()))
        async with self._readable(sample, far):
            graded = await thread.run(lambda: self._against_all(sample, compared, chosen))
        kept = ~compared.doubtful
        kept[chosen] = True
        for mine, theirs in zip(_arrays(compared.graded), _arrays(graded), strict=True):
            mine[chosen] = theirs
        return self._judged(sample, compared, kept)

    def _judged(self, sample: Sample, compared: _Compared, kept: NDArray[np.bool_]) -> Judged:
        grade, distance, ratio = (values[kept] for values in _arrays(compared.graded))
        firsts = np.unique(sample.units, return_index=True)[1]
        telling = not HALVES & {tensor.type for tensor in sample.layer.tensors}
        return Judged(Graded(grade, distance, ratio), sample.experts[firsts][kept], telling)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _against_own(self, sample: Sample) -> _Compared:
        rows = self._own.compute(
            sample.layer.layer, sample.sent(), sample.tokens, sample.experts, ask_f32=sample.ask_f32
        )
        own = rows if sample.weights is None else weighted_sums(rows, sample.weights, sample.tokens)
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
        x, experts = sample.sent()[sample.tokens[rows]], sample.experts[rows]
        parts: dict[int, RowReferences] = {}
        for expert in np.unique(experts).tolist():
            parts[expert] = self._references_of(sample.layer, expert, x[experts == expert])

        def gather(under: Callable[[RowReferences], Rows]) -> NDArray[np.float64]:
            values = np.empty((len(rows), sample.layer.n_out))
            for expert, part in parts.items():
                values[experts == expert] = under(part)
            if sample.weights is None:
                return values
            weighted = values * sample.weights[rows, None].astype(np.float64)
            return np.add.reduceat(weighted, np.unique(sample.units[rows], return_index=True)[1], axis=0)

        def rounded(number: int) -> NDArray[np.float64]:
            return gather(lambda part: part.rounded[number])

        count = len(next(iter(parts.values())).rounded)
        return RowReferences(
            gather(lambda part: part.exact), tuple(map(rounded, range(count))), gather(lambda part: part.halves)
        )

    def _references_of(self, layer: LayerExperts, expert: int, x: F32) -> RowReferences:
        program = ExpertProgram.from_bytes(self._manifest.programs[layer.program])

        def read(number: int, index: int) -> bytes:
            return bytes(self._source.read(layer.layer, number, layer.offsets[index], layer.tensors[index].nbytes))

        return references(layer, program, expert, read, x)

    # -- on the event loop --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _readable(self, sample: Sample, experts: Sequence[int]) -> AsyncIterator[None]:
        if not experts:
            yield
            return
        async with self._obtain(sample.layer, experts, sample.peer):
            yield


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


def _arrays(graded: Graded) -> tuple[NDArray[Any], ...]:
    return graded.grade, graded.distance, graded.ratio
