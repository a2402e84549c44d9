"""A numeric class: a fingerprint of a backend's arithmetic for one weight type.

Two backends are of one class if they give the same bits for the same experts and the same rows, over several batch
widths, by default and with F32 asked for. So everything that goes in is hashed bytes, the same on every machine, and
rows are made to fall where kernels part ways: on values half-way between two roundings. Scalar code rounds those away
from zero, SIMD code to the even neighbour, and a scale of 127 / max is not always 1 / (max / 127).

On the way it is seen whether a call gives the same bits twice, and whether a row gives the same bits alone as among
others: whoever serves a model batch-invariantly needs both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from backends.experts import F32, I32, ExpertBackend
from backends.gguf_types import GGML_TYPES
from backends.probe_weights import ProbeLayer, hashed_bytes
from capabilities.measurement import CLASS_CHARS

VERSION: Final = 1  # raise it when inputs or weights change: fingerprints of different versions say nothing
WIDTHS: Final = (1, 2, 5, 9, 33)  # on both sides of the limits at which GPUs change kernels
_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """numeric_class is "" where calls do not repeat: there is nothing to compare."""

    numeric_class: str
    batch_invariant: bool
    repeatable: bool


def fingerprint(backend: ExpertBackend, probe: ProbeLayer, tick: Callable[[], None]) -> Fingerprint:
    """Take the fingerprint of a loaded layer of two experts. `tick` is called between computations and may raise."""
    number, x = probe.layer.layer, rows_on_ties(max(WIDTHS), probe.layer.n_in)
    experts = np.arange(len(x), dtype=np.int32) % 2

    def compute(rows: slice, of_experts: I32, asked: bool) -> F32:
        """The rows, each for its expert; one row for all of them."""
        tick()
        tokens = np.arange(len(of_experts), dtype=np.int32) % len(x[rows])
        return np.ascontiguousarray(backend.compute(number, x[rows], tokens, of_experts, ask_f32=asked), "<f4")

    digest, repeatable, invariant = hashlib.sha256(_header(probe)), True, True
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
    found = digest.hexdigest()[:CLASS_CHARS]
    return Fingerprint(found if repeatable else "", invariant, repeatable)


def rows_on_ties(n_rows: int, width: int) -> F32:
    """Input rows [n_rows, width] of four kinds in turn, the same bits everywhere.

    0: numbers of 24 bits, even over +-2, as a control.
    1: (q + 1/2) * 2^-6 with a largest value of 127 * 2^-6 in each 32: exactly half-way for 8-bit blocks.
    2: the nearest to (q + 1/2) * max / 127 with any max: half-way but for the kernel's own rounding of its scale.
    3: 1 + (2 q + 1) / 2048 and 1 + (2 q + 1) / 256 in turn: half-way for half precision and for bfloat16.
    """
    count = n_rows * width
    raw = np.frombuffer(hashed_bytes(f"rows {VERSION} {n_rows} {width}", 4 * count), "<i4").reshape(n_rows, width)
    q = np.clip(raw >> 24, -126, 125).astype(np.float64)
    first = np.arange(width) % _BLOCK == 0
    largest = 1 + (raw[:, :1] & 0x7FFFFF) / 2**23
    rows = np.empty((n_rows, width), np.float64)
    rows[0::4] = raw[0::4] / 2**30
    rows[1::4] = np.where(first, 127, q[1::4] + 0.5) / 64
    rows[2::4] = np.where(first, largest[2::4], (q[2::4] + 0.5) * (largest[2::4] / 127))
    rows[3::4] = 1 + (2 * q[3::4] + 1) / np.where(np.arange(width) % 2, 2048, 256)
    return rows.astype(np.float32)


def _header(probe: ProbeLayer) -> bytes:
    layer = probe.layer
    types = [(t.name, GGML_TYPES[t.type].name, t.shape) for t in layer.tensors]
    return repr((VERSION, types, WIDTHS)).encode()


def _same_bits(a: F32, b: F32) -> bool:
    return a.tobytes() == b.tobytes()
