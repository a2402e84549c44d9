"""The reference with switches: one operator, with one thing after another computed as some kernel may compute it.

Where a kernel's numbers are those of one setting of the switches, and not of the others, the switches say what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from backends.numpy_functions import Rows, round_activations, round_q8_plainly
from backends.sum_orders import F32, F64, ORDERS, add_in_halves

Sums = Literal["float64", "float32", "float16"]
Rounded = Literal["", "with vectors", "plainly", "in blocks of 32", "in halves", "in bfloat16"]

_HALF_SUMS: Final = (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_1)
_BLOCK: Final = 32
_LEVELS: Final = 127  # of a signed byte, in both directions
_EPSILON: Final = 1e-5  # row_operators.EPSILON
_AS_FOR: Final = {
    "in blocks of 32": GGMLQuantizationType.Q8_0, "in halves": GGMLQuantizationType.F16,
    "in bfloat16": GGMLQuantizationType.BF16,
}  # fmt: skip
_ORDERS: Final = {order.name: order for order in ORDERS}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is switched. The default is the exact reference.

    rounded: activations are rounded before a product. To the weight type's own as ggml's kernels for CPUs round them:
    with vectors (by the block's steps, ties to even) or plainly (by the inverse of one step, ties away from zero). Or
    as a GPU's may: to 8 bits in blocks of 32 also where weights come in blocks of 256, to halves, or to bfloat16.
    halved: weights are in half precision once they are dequantised, or a block's sum of activations is, where weights
    have an offset in each block. sums: of products, of rows; and the precision of everything that is no product.
    order: of sums in single precision, one of `ORDERS` by its name; empty: as NumPy adds. fused: products are not
    rounded before they are added. powers: precision of the exponential function.
    """

    rounded: Rounded = ""
    halved: Literal["", "weights", "block sums"] = ""
    sums: Sums = "float64"
    order: str = ""
    fused: bool = False
    powers: Literal["float64", "float32"] = "float64"

    @property
    def words(self) -> str:
        """For people."""
        order = f" ({self.order}{', fused' if self.fused else ''})" if self.order else ""
        rounded = f"activations rounded {self.rounded}" if self.rounded else ""
        halved = f"{self.halved} in halves" if self.halved else ""
        powers = "" if self.powers == "float64" else "exp in float32"
        return ", ".join(filter(None, (rounded, halved, f"sums in {self.sums}{order}", powers)))

    @property
    def is_possible(self) -> bool:
        """An order belongs to single precision, and what is fused to an order."""
        return (not self.order or self.sums == "float32") and (not self.fused or bool(self.order))


@dataclass(frozen=True, eq=False)
class Product:
    """Rows x [R, n] times one of some weights each: `weights[chosen[r]]`, as they are stored, [m, bytes of a row]."""

    x: F32
    chosen: Sequence[int]
    weights: Sequence[NDArray[np.uint8]]
    kind: GGMLQuantizationType

    def compute(self, setting: Setting) -> F32:
        """[R, m]"""
        chosen = np.asarray(self.chosen)
        parts = {expert: self._times(self.x[chosen == expert], self.weights[expert], setting) for expert in set(chosen)}
        out = np.empty((len(self.x), len(self.weights[0])), np.float32)
        for expert, rows in parts.items():
            out[chosen == expert] = rows
        return out

    def _times(self, x: F32, raw: NDArray[np.uint8], setting: Setting) -> F32:
        weight = gguf.dequantize(raw, self.kind).reshape(len(raw), -1)
        a = self._rounded(np.ascontiguousarray(x), setting)
        if setting.halved == "weights":
            weight = weight.astype(np.float16).astype(np.float32)
        if setting.sums == "float16":
            half = [each.astype(np.float16).astype(np.float32) for each in (a, weight)]
            return add_in_halves(half[0], half[1])
        extra = self._half_sums(x, a, raw) if setting.halved == "block sums" else np.float64(0)
        wide_a, wide_weight = a.astype(np.float64), weight.astype(np.float64)
        if setting.order:
            y = _ORDERS[setting.order].multiply(wide_a, wide_weight, fused=setting.fused)
        else:
            y = a @ weight.T if setting.sums == "float32" else (wide_a @ wide_weight.T).astype(np.float32)
        return np.asarray(y + extra, np.float32)

    def _rounded(self, x: F32, setting: Setting) -> F32:
        if not setting.rounded:
            return x
        if setting.rounded == "plainly" and GGML_QUANT_SIZES[self.kind][0] == _BLOCK:
            return round_q8_plainly(x)
        return round_activations(x, _AS_FOR.get(setting.rounded, self.kind))

    def _half_sums(self, x: F32, a: F32, raw: NDArray[np.uint8]) -> F64:
        """What half precision of each block's sum of activations changes, where its weights' offset multiplies it.

        The sum is that of the codes, times the step before that one is rounded to half precision itself.
        """
        step = np.abs(x.reshape(len(x), -1, _BLOCK)).max(axis=2) / np.float32(_LEVELS)
        sums = a.reshape(len(a), -1, _BLOCK).sum(axis=2, dtype=np.float64)
        halved = step.astype(np.float16).astype(np.float64)
        codes = np.rint(np.divide(sums, halved, out=np.zeros_like(sums), where=halved > 0))
        lost = (step * codes).astype(np.float16).astype(np.float64) - sums
        blocks = raw.reshape(len(raw), sums.shape[1], -1)
        offsets = np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2")[:, :, 0].astype(np.float64)
        changed: F64 = lost @ offsets.T
        return changed


@dataclass(frozen=True, eq=False)
class Elements:
    """What has no weights, over rows x [R, n]. A gated unit is silu(x) times x backwards."""

    op: Literal["swiglu", "softmax", "rms_norm"]
    x: F32

    def compute(self, setting: Setting) -> F32:
        """[R, n]"""
        x: Rows = self.x.astype(np.float32 if setting.sums == "float32" else np.float64)
        if self.op == "rms_norm":
            return np.asarray(x / np.sqrt((x * x).mean(axis=1, keepdims=True) + x.dtype.type(_EPSILON)), np.float32)
        if self.op == "softmax":
            powers = _exp(x - x.max(axis=1, keepdims=True), setting)
            return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
        return np.asarray(x / (1 + _exp(-x, setting)) * x[:, ::-1], np.float32)


def _exp(x: Rows, setting: Setting) -> Rows:
    """In the precision of `powers`; the result is of x's type."""
    powers: Rows = np.exp(x.astype(setting.powers)).astype(x.dtype)
    return powers


def settings_of(kind: GGMLQuantizationType | None) -> tuple[tuple[Setting, ...], ...]:
    """What may be tried for products over weights of a type, or for elements (None): one step after another, each on
    top of what has been found before. Fields that a step leaves as they are by default are not part of it."""
    if kind is None:
        return (tuple(Setting(sums=sums, powers=powers) for sums, powers in _OF_ELEMENTS),)
    exact = kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
    halved = () if exact else (Setting(halved="block sums" if kind in _HALF_SUMS else "weights"),)
    orders = [Setting(sums="float32", order=order.name, fused=fused) for order in ORDERS for fused in (False, True)]
    sums = (Setting(sums="float16"), Setting(sums="float32"), *orders)
    others = Setting(rounded="in halves"), Setting(rounded="in bfloat16")
    if kind == GGMLQuantizationType.F32:
        return others, halved, sums
    of_type = Setting(rounded="with vectors"), Setting(rounded="plainly"), Setting(rounded="in blocks of 32")
    return (*(of_type[:1] if exact else of_type), *others), halved, sums


_OF_ELEMENTS: Final[tuple[tuple[Sums, Literal["float64", "float32"]], ...]] = (
    ("float32", "float64"), ("float64", "float32"), ("float32", "float32"),
)  # fmt: skip
