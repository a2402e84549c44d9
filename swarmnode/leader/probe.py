"""The probe that comes before trust: every held expert of every layer, named and compared.

For each layer the worker gets one ordinary dispatch that names all the experts it holds, and its rows are compared with
this node's own computation from the experts' bytes, which a leader without the model's file fetches first (their hashes
say that they are right, whoever sends them). Where the swarm combines by partial sums, the sum of one layer's rows
is asked for and compared too. Only then does an epoch begin, and only then is the swarm ready.

A worker whose kernels round otherwise passes, too, as long as it computes the same function, or rounds activations in
one of the coarse ways that are known; whether it is precise enough for output ranks is then asked with crafted rows
(checking.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import trio

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.coarse_experts import coarse_rows
from backends.crafted_rows import crafted_rows, references
from backends.device import Device
from backends.experts import F32, I32, GgmlExperts, ReadSlice
from backends.manifest import ExpertSource, LayerExperts, Manifest
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram
from capabilities.agreement import MEDIAN_LIMIT, Agreement, compare, same_function, within_tolerance
from capabilities.errors import ExpertsUnavailable, SwarmError
from capabilities.precision import Precision
from capabilities.row_grades import EXPLAINED, unexplained
from scheduler.combine import weighted_sums
from scheduler.dispatch import deadline_s
from swarmnode.expert_messages import Activations, dispatch_rows_max
from swarmnode.leader.link import Answer, PeerLink
from swarmnode.leader.recomputing import HALVES
from swarmnode.local_experts import load_layer
from swarmnode.net.interface import PeerId

REMEMBERED_BYTES_MAX: Final = 64 << 20  # expected rows kept for workers that come back
BATCH_BYTES_MAX: Final = 64 << 20  # experts that are fetched and loaded at a time; a single one may be larger
_SEED: Final = 20_231
_TAKEN_APART: Final = 4  # rows, or experts, that are held against every coarse arithmetic; the others against theirs


class SomethingElse(ExpertsUnavailable):
    """A worker's rows are those of another function."""

    default_hint = "Compare its version and model with the leader's; it gets no work until the probe passes."


class Obtain(Protocol):
    """Makes experts readable for a while."""

    def __call__(
        self, layer: LayerExperts, experts: Sequence[int], holder: PeerId
    ) -> AbstractAsyncContextManager[None]:
        """Within the context the source has these experts; `holder` has them, too.

        Raises:
            SwarmError: they cannot be had.
        """


@asynccontextmanager
async def at_hand(layer: LayerExperts, experts: Sequence[int], holder: PeerId) -> AsyncIterator[None]:
    """Obtain for a source that has every expert: the model's own file."""
    yield


@dataclass(frozen=True, slots=True)
class Probed:
    """The worst agreement over all that was compared, and whether all of it was within tolerance."""

    agreement: Agreement
    within: bool


@dataclass(frozen=True, slots=True)
class Crafted:
    """Rows x [n, n_in] for one expert, as they leave this node, and what to make of the answer [n, n_out].

    explains: whether a coarse arithmetic that is known gives it.
    """

    x: F32
    judge: Callable[[F32], Awaitable[Precision]]
    explains: Callable[[F32], Awaitable[bool]]


class ProbeReference:
    """What the experts of a model answer to the probe's activations, computed here and remembered within a bound."""

    def __init__(self, manifest: Manifest, source: ExpertSource, device: Device, obtain: Obtain = at_hand) -> None:
        self._manifest = manifest
        self._source = source
        self._device = device
        self._obtain = obtain
        self._rows: dict[tuple[int, int], F32] = {}
        self._limiter = trio.CapacityLimiter(1)

    def activations(self, layer: LayerExperts) -> F32:
        """The probe's input row of a layer [1, n_in]."""
        return np.random.default_rng([_SEED, layer.layer]).standard_normal((1, layer.n_in), np.float32)

    async def expected(self, layer: LayerExperts, experts: Sequence[int], holder: PeerId) -> F32:
        """Rows [len(experts), n_out]. `holder` is one who has these experts.

        Raises:
            SwarmError: this node has not all of them and cannot get them.
        """
        known = {expert: self._rows.get((layer.layer, expert)) for expert in experts}
        missing = [expert for expert, row in known.items() if row is None]
        step = max(1, BATCH_BYTES_MAX // layer.expert_bytes)
        for start in range(0, len(missing), step):
            some = missing[start : start + step]
            async with self._obtain(layer, some, holder):
                rows = await trio.to_thread.run_sync(self._compute, layer, some, limiter=self._limiter)
            known.update(zip(some, rows, strict=True))
            if (len(self._rows) + len(some)) * layer.n_out * 4 <= REMEMBERED_BYTES_MAX:
                self._rows.update(zip([(layer.layer, expert) for expert in some], rows, strict=True))
        return np.stack([row for row in map(known.__getitem__, experts) if row is not None])

    def _compute(self, layer: LayerExperts, experts: Sequence[int]) -> F32:
        ids = np.array(experts, np.int32)
        return self._kernels(layer, self.activations(layer), np.zeros(len(ids), np.int32), ids)

    def _kernels(self, layer: LayerExperts, x: F32, tokens: I32, experts: I32) -> F32:
        backend = GgmlExperts(self._device)
        try:
            load_layer(backend, self._manifest, layer.layer, sorted(set(experts.tolist())), self._source)
            return backend.compute(layer.layer, x, tokens, experts)
        finally:
            backend.close()

    async def crafted(
        self, layer: LayerExperts, expert: int, holder: PeerId, ordinary: F32, seed: int, *, rounded: bool
    ) -> Crafted:
        """Rows made from ordinary ones of the layer [n, n_in] that show how a worker adds (backends/crafted_rows.py).

        rounded: they will travel as Q8_0.

        Raises:
            SwarmError: the expert cannot be had, or its weights cannot be taken apart here.
        """
        async with self._obtain(layer, [expert], holder):
            return await trio.to_thread.run_sync(
                self._craft, layer, expert, ordinary, seed, rounded, limiter=self._limiter
            )

    def _craft(self, layer: LayerExperts, expert: int, ordinary: F32, seed: int, rounded: bool) -> Crafted:
        program = ExpertProgram.from_bytes(self._manifest.programs[layer.program])
        slices = [
            bytes(self._source.read(layer.layer, expert, offset, tensor.nbytes))
            for offset, tensor in zip(layer.offsets, layer.tensors, strict=True)
        ]

        def read(_expert: int, tensor: int) -> bytes:
            return slices[tensor]

        through = _through_q8_0 if rounded else _as_is
        x = crafted_rows(layer, program, expert, read, ordinary, seed, through)
        own = self._kernels(layer, x, np.arange(len(x), dtype=np.int32), np.full(len(x), expert, np.int32))
        trusted = not HALVES & {tensor.type for tensor in layer.tensors}

        def judge(answer: F32) -> Precision:
            if trusted and answer.shape == own.shape and compare(answer, own).median_relative_l2 <= MEDIAN_LIMIT:
                return Precision.F32
            return references(layer, program, expert, read, x).judge(answer)

        def explains(answer: F32) -> bool:
            return bool(_way(layer, program, expert, read, x, answer, None) is not None)

        async def judge_in_thread(answer: F32) -> Precision:
            return await trio.to_thread.run_sync(judge, answer, limiter=self._limiter)

        async def explains_in_thread(answer: F32) -> bool:
            return await trio.to_thread.run_sync(explains, answer, limiter=self._limiter)

        return Crafted(x, judge_in_thread, explains_in_thread)

    async def explains(self, layer: LayerExperts, experts: Sequence[int], rows: F32, holder: PeerId) -> bool:
        """Whether coarse arithmetics that are known give these rows, one for each of the experts.

        Raises:
            SwarmError: this node has not all of them and cannot get them, or cannot take them apart.
        """
        known: set[int] = set()
        first = set(np.linspace(0, len(experts) - 1, _TAKEN_APART).astype(int).tolist())
        for number in sorted(range(len(experts)), key=lambda number: number not in first):
            async with self._obtain(layer, experts[number : number + 1], holder):
                way = await trio.to_thread.run_sync(
                    self._way_of, layer, experts[number], rows[number], known if number not in first else None,
                    limiter=self._limiter,
                )  # fmt: skip
            if way is None:
                return False
            known.add(way)
        return True

    def _way_of(self, layer: LayerExperts, expert: int, row: F32, ways: Collection[int] | None) -> int | None:
        program = ExpertProgram.from_bytes(self._manifest.programs[layer.program])

        def read(number: int, tensor: int) -> bytes:
            return bytes(self._source.read(layer.layer, number, layer.offsets[tensor], layer.tensors[tensor].nbytes))

        return _way(layer, program, expert, read, self.activations(layer), row[None], ways)


def _way(
    layer: LayerExperts,
    program: ExpertProgram,
    expert: int,
    read: ReadSlice,
    x: F32,
    answer: F32,
    ways: Collection[int] | None,
) -> int | None:
    """The number of a coarse arithmetic (of these, or any) that gives the answer to rows x; None if there is none."""
    exact = NumpyExperts("float64")
    exact.load_layer(layer, program, [expert], read)
    rows = np.arange(min(len(x), _TAKEN_APART))
    expected = exact.unrounded(layer.layer, x[rows], rows.astype(np.int32), np.full(len(rows), expert, np.int32))
    for way, coarse in coarse_rows(layer, program, expert, read, x, rows, ways):
        if (unexplained(answer[rows], expected.astype(np.float64), coarse) <= EXPLAINED).all():
            return way
    return None


async def probe(
    link: PeerLink,
    reference: ProbeReference,
    manifest: Manifest,
    held: Mapping[int, Sequence[int]],
    *,
    term: int,
    epoch: int,
    partial_sums: bool = False,
    ask_f32: frozenset[int] = frozenset(),
) -> Probed:
    """Compare every held expert of every layer, and a sum of rows where asked.

    ask_f32: layers whose kernels are asked to accumulate in F32.

    Raises:
        ExpertsUnavailable: the worker did not answer, or computes another function; it names the layer and experts.
    """
    worst = Probed(Agreement(True, 0.0, 0.0, 0.0, 1.0), True)
    for number, experts in held.items():
        layer = manifest.experts_of(number)
        step = dispatch_rows_max(layer.n_out)
        for start in range(0, len(experts), step):
            some = experts[start : start + step]
            expected = await reference.expected(layer, some, link.peer)
            ask = partial(_ask, link, reference.activations(layer), some, layer, term, epoch, number in ask_f32)
            rows = await ask()
            try:
                worst = _worse(worst, _compare(link, layer, some, "rows", rows, expected))
            except SomethingElse:
                if not await reference.explains(layer, some, rows, link.peer):
                    raise
                coarse = replace(compare(rows, expected), gain_excess=0.0)
                worst, expected = _worse(worst, Probed(coarse, False)), rows
            if partial_sums:
                weights = np.random.default_rng(_SEED).random(len(some), np.float32)
                sums = await ask(weights)
                expected = weighted_sums(expected, weights, np.zeros(len(some), np.int32))
                worst = _worse(worst, _compare(link, layer, some, "sums", sums, expected))
                partial_sums = False  # how rows are added does not depend on the layer
    return worst


def _compare(
    link: PeerLink, layer: LayerExperts, experts: Sequence[int], what: str, actual: F32, expected: F32
) -> Probed:
    agreement = compare(actual, expected)
    within = within_tolerance(agreement, frozenset(tensor.type for tensor in layer.tensors))
    if within or same_function(agreement):
        return Probed(agreement, within)
    raise something_else(link, layer, experts, what, agreement)


def something_else(
    link: PeerLink, layer: LayerExperts, experts: Sequence[int], what: str, agreement: Agreement
) -> SomethingElse:
    """The error for a worker whose `what` (rows, sums) are not those of the model."""
    return SomethingElse(
        f"peer {link.name} computes something else than layer {layer.layer} of the model: its {what} differ by"
        f" {agreement.median_relative_l2:.2g} (median relative L2) and {agreement.worst_relative_l2:.2g} at worst",
        layer=layer.layer,
        experts=list(experts),
        peer=str(link.peer),
        cause="bad_reply",
    )


def _worse(one: Probed, other: Probed) -> Probed:
    return Probed(_worse_agreement(one.agreement, other.agreement), one.within and other.within)


def _worse_agreement(a: Agreement, b: Agreement) -> Agreement:
    return Agreement(
        a.bit_identical and b.bit_identical,
        max(a.max_abs_diff, b.max_abs_diff),
        max(a.median_relative_l2, b.median_relative_l2),
        max(a.worst_relative_l2, b.worst_relative_l2),
        min(a.min_cosine, b.min_cosine),
        max(a.gain_excess, b.gain_excess),
    )


def _through_q8_0(x: F32) -> F32:
    return dequantize_q8_0(quantize_q8_0(x))


def _as_is(x: F32) -> F32:
    return x


async def _ask(
    link: PeerLink,
    x: F32,
    experts: Sequence[int],
    layer: LayerExperts,
    term: int,
    epoch: int,
    ask_f32: bool,
    weights: F32 | None = None,
) -> F32:
    """The experts' rows of the one row x, or their sum by weights."""
    ids = np.array(experts, np.int32)
    return await ask_rows(
        link, x, np.zeros(len(ids), np.int32), ids, layer, term, epoch, ask_f32=ask_f32, weights=weights
    )


async def ask_rows(
    link: PeerLink,
    x: Activations,
    tokens: I32,
    experts: I32,
    layer: LayerExperts,
    term: int,
    epoch: int,
    *,
    ask_f32: bool,
    weights: F32 | None = None,
) -> F32:
    """One dispatch outside any request, and its rows [R, n_out], or by weights [R] sums [T, n_out].

    Raises:
        ExpertsUnavailable: the worker did not answer in time, or refused; the link has failed.
    """
    answers: list[Answer] = []
    arrived = trio.Event()

    def on_answer(answer: Answer) -> None:
        answers.append(answer)
        arrived.set()

    link.send(
        term=term,
        epoch=epoch,
        layer=layer.layer,
        x=x,
        tokens=tokens,
        experts=experts,
        weights=weights,
        n_out=layer.n_out,
        ask_f32=ask_f32,
        on_answer=on_answer,
    )
    nbytes = x.nbytes + 4 * layer.n_out * len(experts)
    with trio.move_on_after(deadline_s(len(experts), nbytes, link.rate.rows_per_s)):
        await arrived.wait()
    if not answers:
        link.fail("timeout", "it owes an answer")  # which gives the answer: an error
    if isinstance(answer := answers[0], SwarmError):
        raise answer
    return answer
