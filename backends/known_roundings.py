"""Ways to round activations that are coarser than this machine's kernels, and still the model: number by number.

A kernel may round what it multiplies to any of them, at the expert's input, between its two products, or at both:

    8-bit codes      with a step for each block of 16 to 256 values, a whole row or the batch, about zero or with an
                     offset (as KleidiAI's kernels for ARM take them)
    floating point   bfloat16, TF32, and 8 bits (E4M3, E5M2) with no scale, or one for a block, a row or the batch
    four bits        MXFP4 and NVFP4, as matrix units of newer GPUs take them

Sums in bfloat16, one run of products after the other, are here, too.

Each is a function of rows float32 [R, n] that gives float32 [R, n]; a last block may be shorter than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Rounding = Callable[[F32], F32]
Sums = Callable[[F32, F32], F32]
"""A product: a [R, n] times weight [m, n] gives [R, m]."""

_E4M3: Final = (3, -6, 448.0)
_E4M3_AMD: Final = (3, -7, 240.0)
_E5M2: Final = (2, -14, 57344.0)
_E2M1: Final = (1, 0, 6.0)
"""Bits of mantissa, the least exponent of a normal number, and the largest number."""


def to_float(x: F32, bits: int, least: int, largest: float, *, truncates: bool = False) -> F32:
    """The nearest number (or the next one towards zero) with so many bits of mantissa; ties go to the even one."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, least) - bits)
    steps = x / step
    return np.asarray(np.clip((np.trunc if truncates else np.rint)(steps) * step, -largest, largest), np.float32)


def to_codes(x: F32, block: int, levels: int = 127) -> F32:
    """Whole steps of each block's largest value / `levels`. block 0: the row is one."""
    return _blockwise(x, block, partial(_codes, levels=levels))


def to_codes_with_offset(x: F32, block: int) -> F32:
    """256 codes from the least to the largest value of a block, zero among them and exact."""
    return _blockwise(x, block, _codes_with_offset)


def to_codes_from_least(x: F32, block: int) -> F32:
    """256 codes, the first of which is the least value of a block."""
    return _blockwise(x, block, _codes_from_least)


def to_scaled_float(x: F32, block: int, form: tuple[int, int, float]) -> F32:
    """Floating point with a scale for each block, whose largest value becomes the largest number."""
    return _blockwise(x, block, partial(_scaled, form=form))


def to_microscaled(x: F32, form: tuple[int, int, float], *, upwards: bool = False) -> F32:
    """Floating point with a power of two for each block of 32. upwards: so large that nothing is cut off."""
    return _blockwise(x, 32, partial(_microscaled, form=form, upwards=upwards))


def to_nvfp4(x: F32) -> F32:
    """Four bits with a scale in E4M3 for each block of 16, and one in single precision for a row."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    whole = np.where(largest > 0, largest / np.float32(_E2M1[2] * _E4M3[2]), np.float32(1)).astype(np.float32)

    def block(part: F32) -> F32:
        scale = np.abs(part).max(axis=2, keepdims=True) / np.float32(_E2M1[2]) / whole[:, :, None]
        scale = to_float(scale, *_E4M3) * whole[:, :, None]
        return _times(scale, part, lambda values: to_float(values, *_E2M1))

    return _blockwise(x, 16, block)


def by_batch(x: F32, rounding: Rounding) -> F32:
    """As if all rows that are multiplied at a time were one."""
    return rounding(x.reshape(1, -1)).reshape(x.shape)


def _blockwise(x: F32, block: int, function: Rounding) -> F32:
    """function of [R, blocks, block] for rows [R, n], which zeros fill up."""
    width = x.shape[1]
    block = block or width
    filled = np.pad(x, ((0, 0), (0, -width % block))) if width % block else x
    return np.asarray(function(filled.reshape(len(x), -1, block)).reshape(len(x), -1)[:, :width], np.float32)


def _times(scale: F32, part: F32, function: Rounding) -> F32:
    """A function of a block's values / scale, and times that again; zeros where the scale is zero."""
    shares = np.divide(part, scale, out=np.zeros_like(part), where=scale > 0)
    return function(shares) * scale


def _codes(part: F32, levels: int) -> F32:
    scale = np.abs(part).max(axis=2, keepdims=True) / np.float32(levels)
    return _times(scale, part, lambda values: np.clip(np.rint(values), -levels, min(levels, 127)))


def _codes_with_offset(part: F32) -> F32:
    least = np.minimum(part.min(axis=2, keepdims=True), np.float32(0))
    most = np.maximum(part.max(axis=2, keepdims=True), np.float32(0))
    scale = np.where(most > least, (most - least) / np.float32(255), np.float32(1)).astype(np.float32)
    low, high = least / scale, most / scale
    zero = np.rint(np.clip(np.where(-128 + low + 127 + high > 0, -128 - low, 127 - high), -128, 127))
    return np.asarray((np.clip(np.rint(part / scale) + zero, -128, 127) - zero) * scale, np.float32)


def _codes_from_least(part: F32) -> F32:
    least = part.min(axis=2, keepdims=True)
    scale = (part.max(axis=2, keepdims=True) - least) / np.float32(255)
    return np.asarray(_times(scale, part - least, np.rint) + least, np.float32)


def _scaled(part: F32, form: tuple[int, int, float]) -> F32:
    scale = np.abs(part).max(axis=2, keepdims=True) / np.float32(form[2])
    return _times(scale, part, lambda values: to_float(values, *form))


def _microscaled(part: F32, form: tuple[int, int, float], upwards: bool) -> F32:
    largest = np.abs(part).max(axis=2, keepdims=True)
    if upwards:
        mantissa, exponent = np.frexp(largest / np.float32(form[2]))
        exponent = exponent - (mantissa == 0.5)
    else:
        exponent = np.frexp(largest)[1] - np.frexp(np.float32(form[2]))[1]
    scale = np.where(largest > 0, np.ldexp(np.float32(1), exponent), np.float32(0))
    return _times(scale, part, lambda values: to_float(values, *form))


def _floats() -> Iterator[tuple[str, Rounding]]:
    for name, form in (("e4m3", _E4M3), ("e5m2", _E5M2)):
        yield name, partial(to_float, bits=form[0], least=form[1], largest=form[2])
        for block in (0, 16, 32, 64, 128):
            yield f"{name} by {block or 'row'}", partial(to_scaled_float, block=block, form=form)
        yield f"{name} by batch", partial(by_batch, rounding=partial(to_scaled_float, block=0, form=form))
        yield f"mx {name}", partial(to_microscaled, form=form)
        yield f"mx {name} upwards", partial(to_microscaled, form=form, upwards=True)
    yield "e4m3 of 240 by row", partial(to_scaled_float, block=0, form=_E4M3_AMD)
    yield "mxfp4", partial(to_microscaled, form=_E2M1)
    yield "mxfp4 upwards", partial(to_microscaled, form=_E2M1, upwards=True)
    yield "nvfp4", to_nvfp4


def _integers() -> Iterator[tuple[str, Rounding]]:
    for block in (0, 16, 32, 64, 128, 256):
        yield f"codes by {block or 'row'}", partial(to_codes, block=block)
    yield "codes by batch", partial(by_batch, rounding=partial(to_codes, block=0))
    yield "codes of 128 by row", partial(to_codes, block=0, levels=128)
    for block in (0, 32, 64, 128):
        yield f"codes with offset by {block or 'row'}", partial(to_codes_with_offset, block=block)
    yield "codes with offset by batch", partial(by_batch, rounding=partial(to_codes_with_offset, block=0))
    yield "codes from least by row", partial(to_codes_from_least, block=0)


ROUNDINGS: Final[dict[str, Rounding]] = {
    **dict(_integers()),
    "f16": partial(to_float, bits=10, least=-14, largest=65504.0),
    "bf16": partial(to_float, bits=7, least=-126, largest=np.inf),
    "bf16 cut off": partial(to_float, bits=7, least=-126, largest=np.inf, truncates=True),
    "tf32 cut off": partial(to_float, bits=10, least=-126, largest=np.inf, truncates=True),
    **dict(_floats()),
}
"""By what they are called in the docs."""
BY_BATCH: Final = frozenset(name for name in ROUNDINGS if name.endswith("by batch"))


def _bf16(values: F32) -> F32:
    """In place."""
    bits = values.view(np.uint32)
    bits += np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    bits &= np.uint32(0xFFFF0000)
    return values


def _add_in_bf16(a: F32, weight: F32, run: int, *, fused: bool = False) -> F32:
    """Runs of products are added exactly, and then one after the other, each sum rounded. fused: and no run alone."""
    a, weight = np.ascontiguousarray(a.T), np.ascontiguousarray(weight.T)
    total = np.zeros((a.shape[1], weight.shape[1]), np.float32)
    for start in range(0, len(a), run):
        part = a[start : start + run].T @ weight[start : start + run]
        total += part if fused else _bf16(part)
        _bf16(total)
    return total


BF16_SUMS: Final[tuple[Sums, ...]] = (
    *(partial(_add_in_bf16, run=run) for run in (64, 32, 16, 8, 4, 1)),
    partial(_add_in_bf16, run=1, fused=True),
)
"""Of longer runs bfloat16 does no more harm than half-precision sums do."""
