"""A numeric class: a fingerprint of a backend's arithmetic for one weight type.

Two backends are of one class if they give the same bits for the same experts and the same rows, over several batch
widths, by default and with F32 asked for. Besides whole experts, each of their steps is looked at by itself: products
of both lengths, and the gated unit in F32. For between two products activations may be rounded to eight bits, and most
of what two kernels differ in is lost there, until one row in thousands shows it. What goes in is made to fall where
kernels part ways (class_inputs.py).

On the way it is seen whether a call gives the same bits twice, and whether a row gives the same bits alone as among
others: whoever serves a model batch-invariantly needs both.

The last characters of a class say what was computed, the others what came of it. Two classes can be compared only if
these are equal: else types, widths or inputs were different ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from backends.class_inputs import PRODUCT_ROWS, VERSION, product_rows, rows_on_ties, unit_values
from backends.experts import F32, I32, ExpertBackend
from backends.gguf_types import GGML_TYPES
from backends.probe_weights import ProbeLayer
from capabilities.numeric_class import named

WIDTHS: Final = (1, 2, 5, 9, 33)  # on both sides of the limits at which GPUs change kernels
BATCH: Final = 64  # of the rows of single steps: what a computation may take bounds how late a deadline is seen
_UPS: Final = 4  # values that a gate is multiplied by: 1, which rounds nothing, and others

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """numeric_class is "" where calls do not repeat: there is nothing to compare."""

    numeric_class: str
    batch_invariant: bool
    repeatable: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an expert: what was computed, and a digest of what came of it."""

    asked: str
    digest: bytes


def fingerprint(backend: ExpertBackend, probe: ProbeLayer, tick: Tick, steps: Sequence[Step] = ()) -> Fingerprint:
    """Take the fingerprint of a loaded layer of two experts, whose single `steps` were taken before.

    `tick` is called between computations and may raise.
    """
    number, x = probe.layer.layer, rows_on_ties(max(WIDTHS), probe.layer.n_in)
    experts = np.arange(len(x), dtype=np.int32) % 2

    def compute(rows: slice, of_experts: I32, asked: bool) -> F32:
        """The rows, each for its expert; one row for all of them."""
        tick()
        tokens = np.arange(len(of_experts), dtype=np.int32) % len(x[rows])
        return np.ascontiguousarray(backend.compute(number, x[rows], tokens, of_experts, ask_f32=asked), "<f4")

    digest, repeatable, invariant = hashlib.sha256(), True, True
    for asked in (False, True):
        each = [slice(row, row + 1) for row in range(len(x))]
        alone = np.concatenate([compute(row, experts[row], asked) for row in each])
        for width in WIDTHS:
            y = compute(slice(width), experts[:width], asked)
            repeatable &= _same_bits(y, compute(slice(width), experts[:width], asked))
            invariant &= _same_bits(y, alone[:width])
            digest.update(y.tobytes())
        for row in each[:2]:  # all experts of one token at once, as in decoding
            y = compute(row, experts[:2], asked)
            invariant &= _same_bits(y[row], alone[row])
    for step in steps:
        digest.update(step.digest)
    what = repr((VERSION, WIDTHS, _shapes(probe), [step.asked for step in steps]))
    return Fingerprint(named(what, digest.hexdigest()) if repeatable else "", invariant, repeatable)


def step_of_product(backend: ExpertBackend, probe: ProbeLayer, tick: Tick) -> Step:
    """Many rows through a loaded layer of two experts that are one matrix each."""
    x = product_rows(PRODUCT_ROWS, probe.layer.n_in)
    return _step(backend, probe, x, tick)


def step_of_unit(backend: ExpertBackend, probe: ProbeLayer, tick: Tick) -> Step:
    """Values of all sizes through a loaded layer of probe_weights.unit_layer."""
    values, width = unit_values(), probe.layer.n_in
    x = np.resize(values, (-(-len(values) // (width - 1)), width))
    x[:, 1:] = np.resize(values, (len(x), width - 1))
    x[:, 0] = 1
    x[1::2, 0] = 1 + np.arange(len(x) // 2) % _UPS / np.float32(3)
    return _step(backend, probe, x, tick)


def _step(backend: ExpertBackend, probe: ProbeLayer, x: F32, tick: Tick) -> Step:
    digest = hashlib.sha256()
    rows = np.arange(BATCH, dtype=np.int32)
    for asked in (False, True):
        for start in range(0, len(x), BATCH):
            tick()
            part = x[start : start + BATCH]
            which = rows[: len(part)]
            y = backend.compute(probe.layer.layer, part, which, which % 2, ask_f32=asked)
            digest.update(np.ascontiguousarray(y, "<f4").tobytes())
    return Step(repr((_shapes(probe), probe.program.to_bytes(), x.shape, BATCH)), digest.digest())


def _shapes(probe: ProbeLayer) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, GGML_TYPES[tensor.type].name, tensor.shape) for tensor in probe.layer.tensors]


def _same_bits(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()
