"""What precision a backend really has: products whose exact sum is known, and the verdict from what came back.

A product over n values is asked of the very kernels that serve, against weights that are all one value w. The rows of
the probe are made so that what a kernel does to its sums, or to its activations before it multiplies, changes the
result by as much as the result itself. `kept` is that result over the exact one: 1 if nothing was lost, 0 if all was.

**Sums.** A row holds 128 times L, then many times s = L / 2^13, then 128 times -L: its exact sum is that of the s.
With p bits of significand, adding t to A gives A again if t < 2^-(p+1) A: t is then under half of A's last place. From
the first L on, a partial sum that has one is A >= L w, so with p = 11 (half precision) each s w = 2^-13 L w is lost,
the -L take A back to zero, and kept = 0. That holds for N interleaved sums of runs of r products, each run added before
it is rounded, as long as N r <= 128: each sum then starts with r L w at least, and r s w is lost. Beyond that the sums
that got their L still lose all: half of them for N r = 256, a quarter for 512. With p = 24 (single precision) an
addition errs by at most half of the last place of 128 L w, which is 2^-24 * 128 L w = s w / 16. Over all 4096
additions, in any order, that is 256 times s w, of 2048 times s w or more: kept is within 0.13 of 1.

**Activations.** A row holds pairs of a and -1 (or a and -b). What remains of a pair is its difference, which rounding
to fewer bits takes away whole. The values of the rows about sums survive every rounding that is looked for: L and s are
127 * 2^i and alike over 128 neighbours, so that an 8-bit block has an exact scale, and bfloat16 holds 127.

Real backends change kernels with the width of a batch (matrix-vector up to 4 to 8 rows, other tiles beyond 16, 32 and
128), and precision with them. So both are judged at widths on both sides of those limits, and the worst counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import PeerMistake

F32 = NDArray[np.float32]

PROBE_WIDTH: Final = 4096  # values a row
# CUDA's matrix-vector kernels end between 4 and 8 rows by type, Vulkan's at 8, Metal's at 31; larger tiles begin at 17,
# 33, 65 and 129. A worker takes 512 rows of a prefill at once.
BATCH_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 512)

SUMS_TOLERANCE: Final = 0.2  # between the 0.13 and the quarter above
_PAIRS_TOLERANCE: Final = 0.5  # a difference is there or it is not
_BLOCK: Final = 256  # the longest 8-bit block
_RUN: Final = 32  # an 8-bit block
_PAIRS_RUN: Final = 16  # a short one
_LARGE: Final = 127.0
_SMALL: Final = _LARGE * 2.0**-13


class Precision(StrEnum):
    """Of sums or of activations. F32 means that much or more, F16 of sums that much or less; Q8 is for activations."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8 = "q8"
    UNKNOWN = "unknown"

    @staticmethod
    def of(text: object) -> Precision:
        """What another version may have written: a word that is not known here is UNKNOWN. PeerMistake if no word."""
        if not isinstance(text, str):
            raise PeerMistake("a precision is one word")
        try:
            return Precision(text)
        except ValueError:
            return Precision.UNKNOWN


# What is seen to be bad counts before what is not known, and that before what is seen to be good.
_WORST_FIRST: Final = (Precision.Q8, Precision.BF16, Precision.F16, Precision.UNKNOWN, Precision.F32)
_BEST_LAST: Final = tuple(each for each in _WORST_FIRST if each is not Precision.UNKNOWN)


def worst(verdicts: Iterable[Precision]) -> Precision:
    """The worst of several verdicts, over widths or weight types. UNKNOWN of none."""
    return min(verdicts, key=_WORST_FIRST.index, default=Precision.UNKNOWN)


def effective(declared: Precision, measured: Precision) -> Precision:
    """What counts: a claim that the probe contradicts loses. Where it says nothing, only a modest claim stands."""
    if measured is not Precision.UNKNOWN:
        return measured
    return Precision.UNKNOWN if declared is Precision.F32 else declared


@dataclass(frozen=True, slots=True)
class MeasuredPrecision:
    """One property of a backend: what it claims, what the probe saw by default, and what when F32 was asked for."""

    declared: Precision = Precision.UNKNOWN
    measured: Precision = Precision.UNKNOWN
    measured_when_asked: Precision = Precision.UNKNOWN

    @property
    def by_default(self) -> Precision:
        return effective(self.declared, self.measured)

    @property
    def when_asked(self) -> Precision:
        return effective(self.declared, self.measured_when_asked)

    @property
    def contradicted(self) -> bool:
        """Whether the probe saw less than is claimed, by default or when asked. It counts, and the claim does not."""
        return any(
            _BEST_LAST.index(seen) < _BEST_LAST.index(self.declared)
            for seen in (self.measured, self.measured_when_asked)
            if Precision.UNKNOWN not in (seen, self.declared)
        )

    @staticmethod
    def worst(several: Iterable[MeasuredPrecision]) -> MeasuredPrecision:
        columns = list(zip(*((p.declared, p.measured, p.measured_when_asked) for p in several), strict=True))
        return MeasuredPrecision(*map(worst, columns))

    def to_json(self) -> dict[str, str]:
        return {
            "declared": self.declared.value,
            "measured": self.measured.value,
            "measured_when_asked": self.measured_when_asked.value,
        }

    @staticmethod
    def from_json(value: Any) -> MeasuredPrecision:
        """PeerMistake unless all three words are there."""
        try:
            words = [value[key] for key in ("declared", "measured", "measured_when_asked")]
        except (KeyError, TypeError, IndexError):
            raise PeerMistake("a measured precision says what is declared, measured, and measured when asked") from None
        return MeasuredPrecision(*map(Precision.of, words))


# -- the probe --------------------------------------------------------------------------------------------------------

# Sums.
START: Final = "start"
"""The large terms first, then all small ones; -L meets the same one of up to 512 interleaved sums as L."""
CYCLES: Final = "cycles"
"""The same within each quarter: a sum of parts that have accumulators of their own shows it too."""
INNER: Final = "inner"
"""The same within 32 neighbours, for kernels that keep short sums in halves. An 8-bit block cannot hold it."""
# Activations.
RANGE: Final = "range"
"""Large values that cancel at once, then small ones: lost if a whole row shares one 8-bit scale."""
STEPS: Final = "steps"
"""127, -127 and pairs of 17 and -16: lost below 8 bits."""
PARTS: Final = "parts"
"""127, -127 and pairs of 1 + 7/16 and -1: lost by an 8-bit block, kept by 5 bits of significand."""
ELEVEN_BITS: Final = "eleven_bits"
"""Pairs of 1 + 3/1024 and -1: lost by bfloat16, which rounds to multiples of 1/128, kept by half precision."""
MORE_BITS: Final = "more_bits"
"""Pairs of 1 + 7/16384 and -1: lost by half precision, which rounds to multiples of 1/1024."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeRow:
    """One input row, x [PROBE_WIDTH], read-only. Against weights w its exact product is w * total."""

    name: str
    x: F32
    total: float


@cache
def probe_rows() -> tuple[ProbeRow, ...]:
    """Every row of the probe, in a fixed order."""
    n = PROBE_WIDTH
    small, zeros = np.full(_BLOCK, _SMALL), np.zeros(_BLOCK)
    large = np.repeat([_LARGE, 0.0], _BLOCK // 2)
    run = np.concatenate([[_LARGE], np.full(_RUN - 2, _SMALL), [-_LARGE]])
    rows: dict[str, list[NDArray[np.float64]]] = {
        START: [large, zeros, *[small] * (n // _BLOCK - 4), -large, zeros],
        CYCLES: [large, small, small, -large] * (n // _BLOCK // 4),
        INNER: [run] * (n // _RUN),
        RANGE: [*_pairs((_LARGE, -_LARGE))[: n // _PAIRS_RUN // 2], *[small] * (n // _BLOCK // 2)],
        STEPS: _pairs((17, -16), peak=_LARGE),
        PARTS: _pairs((1 + 7 / 16, -1), peak=_LARGE),
        ELEVEN_BITS: _pairs((1 + 3 / 1024, -1)),
        MORE_BITS: _pairs((1 + 7 / 16384, -1)),
    }
    made = []
    for name, parts in rows.items():
        values = np.concatenate(parts)
        x = values.astype(np.float32)
        x.flags.writeable = False
        made.append(ProbeRow(name, x, float(values.sum())))
    return tuple(made)


def _pairs(pair: tuple[float, float], peak: float = 0.0) -> list[NDArray[np.float64]]:
    """Runs of 16 that repeat a pair, after one of (peak, -peak) if it is not 0.

    In half of the runs pairs are turned round, by the Thue-Morse sequence: then none of up to 512 interleaved sums
    grows with one half of the pairs, which would lose the difference in sums rather than in activations.
    """
    run = np.array((pair if peak == 0 else (peak, -peak)) + pair * (_PAIRS_RUN // 2 - 1), np.float64)
    turned = run.reshape(-1, 2)[:, ::-1].ravel()
    return [turned if i.bit_count() % 2 else run for i in range(PROBE_WIDTH // _PAIRS_RUN)]


def kept(row: ProbeRow, y: F32, weight: float) -> float:
    """What is left of a row's product: of the results y, any shape, the one farthest from exact, over the exact one."""
    with np.errstate(invalid="ignore", over="ignore"):
        shares = np.nan_to_num(y.astype(np.float64) / (weight * row.total), nan=np.inf).ravel()
        return float(shares[np.abs(shares - 1).argmax()])


@dataclass(frozen=True, slots=True)
class Verdict:
    accumulation: Precision = Precision.UNKNOWN
    source: Precision = Precision.UNKNOWN

    @staticmethod
    def worst(verdicts: Iterable[Verdict]) -> Verdict:
        several = list(verdicts)
        return Verdict(worst(v.accumulation for v in several), worst(v.source for v in several))


def judge(shares: Mapping[str, float]) -> Verdict:
    """The verdict at one width from what each of the probe's rows kept, by the row's name.

    Rows with small sums being right, only the sums can be what a row with large ones has lost.
    """

    def there(name: str) -> bool:
        return abs(shares[name] - 1) < _PAIRS_TOLERANCE

    if not (there(RANGE) and there(STEPS)):  # another function, or coarser than anything that the other rows tell
        return Verdict()
    if there(MORE_BITS):
        source = Precision.F32
    elif there(ELEVEN_BITS):
        source = Precision.F16
    else:
        source = Precision.BF16 if there(PARTS) else Precision.Q8
    large = (START, CYCLES) if source is Precision.Q8 else (START, CYCLES, INNER)
    held = all(abs(shares[name] - 1) <= SUMS_TOLERANCE for name in large)
    return Verdict(Precision.F32 if held else Precision.F16, source)
