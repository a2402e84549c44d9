"""Products whose sums have a precision and an order: what tells apart kernels that agree in everything else.

A kernel of so many `lanes` adds every lanes-th run of products to the lane's own sum, and at the end the lanes to each
other. What a lane adds of one run it adds exactly, as kernels do that multiply 8-bit codes as integers; kernels of
numbers have runs of one product. A fused sum is rounded once a step, another one also after the product. Both are
emulated in double precision, which holds any product of two single-precision numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_CHUNK_VALUES: Final = 8 << 20  # products that are held at a time: 64 MiB
_HALF_RUN: Final = 16  # products that are added before a sum is rounded to half precision, as matrix units do
_LAST_LANES: Final = 4  # of a vector, which some processors add neighbour by neighbour


@dataclass(frozen=True, slots=True)
class SumOrder:
    """How one kernel adds. neighbours: the last four lanes are added in pairs of neighbours, and not by halves."""

    name: str
    lanes: int
    run: int = 1
    neighbours: bool = False

    def multiply(self, a: F64, weight: F64, *, fused: bool) -> F32:
        """a [R, n] times weight [m, n]: [R, m], by sums in single precision."""
        missing = -a.shape[1] % (self.lanes * self.run)
        a, weight = (np.pad(each, ((0, 0), (0, missing))) for each in (a, weight))
        rows = max(1, _CHUNK_VALUES // weight.size)
        parts = [self._add(a[start : start + rows], weight, fused) for start in range(0, len(a), rows)]
        return np.concatenate(parts) if parts else np.empty((0, len(weight)), np.float32)

    def _add(self, a: F64, weight: F64, fused: bool) -> F32:
        products = a[:, None, :] * weight  # [R, m, n]
        runs = products.reshape(*products.shape[:2], -1, self.lanes, self.run).sum(axis=4)
        total = np.zeros((*runs.shape[:2], self.lanes), np.float32)
        for at in range(runs.shape[2]):
            if fused:
                total = (total + runs[:, :, at]).astype(np.float32)
            else:
                total += runs[:, :, at].astype(np.float32)
        while (lanes := total.shape[2]) > 1:
            pairs = (slice(0, None, 2), slice(1, None, 2))
            halves = (slice(0, lanes // 2), slice(lanes // 2, None))
            one, other = pairs if self.neighbours and lanes <= _LAST_LANES else halves
            total = total[:, :, one] + total[:, :, other]
        return np.asarray(total[:, :, 0], np.float32)


ORDERS: Final = (
    SumOrder("one after the other", 1),
    SumOrder("16 lanes", 16),
    SumOrder("32 lanes", 32),
    SumOrder("32 lanes, neighbours last", 32, neighbours=True),
    SumOrder("64 lanes", 64),
    SumOrder("blocks of 32", 1, 32),
    SumOrder("8 lanes of 4", 8, 4),
    SumOrder("16 lanes of 4", 16, 4),
)
"""Those that ggml's kernels for x86 have been seen to have, and the plainest one. Other processors may have others."""


def add_in_halves(a: F32, weight: F32) -> F32:
    """a [R, n] times weight [m, n]: [R, m], both in half precision, and so the sums of sixteen products each."""
    total = np.zeros((len(a), len(weight)), np.float16)
    for start in range(0, a.shape[1], _HALF_RUN):
        run = slice(start, start + _HALF_RUN)
        total += (a[:, run] @ weight[:, run].T).astype(np.float16)
    return total.astype(np.float32)
