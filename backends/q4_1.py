"""Surgery on Q4_1 weights without rounding them again.

A Q4_1 block holds 32 weights in 20 bytes: a scale d and an offset m in half precision, then 16 bytes of nibbles.
Weight i is d * q_i + m, where q_i is the low nibble of byte i for i < 16 and the high nibble of byte i - 16 beyond.
Whole blocks can be moved between matrices, multiplied by a power of two or a sign, and single weights replaced, while
every other weight keeps its exact value.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf import dequantize as _dequantize
from gguf import quantize as _quantize
from numpy.typing import NDArray

BLOCK = 32
BLOCK_BYTES = 20
_HALF = BLOCK // 2
_HEADER_BYTES = 4  # d and m

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]


def quantise(values: F32) -> Bytes:
    """[..., n] weights as [..., n / 32 * 20] bytes, rounded as ggml does."""
    return np.asarray(_quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType.Q4_1), np.uint8)


def dequantise(data: Bytes) -> F32:
    """[..., n / 32 * 20] bytes as [..., n] weights, exactly."""
    return np.asarray(_dequantize(data, GGMLQuantizationType.Q4_1), np.float32)


def as_blocks(data: Bytes) -> Bytes:
    """[rows, bytes] as [rows, blocks, 20], without a copy where the layout allows."""
    return data.reshape(data.shape[0], -1, BLOCK_BYTES)


def as_rows(blocks: Bytes) -> Bytes:
    """[rows, blocks, 20] as [rows, bytes]."""
    return blocks.reshape(blocks.shape[0], -1)


def scaled(data: Bytes, factor: float) -> Bytes:
    """A copy of [rows, bytes] with every weight times `factor`, exactly.

    Raises ValueError if half precision cannot hold a product exactly: use signs and powers of two.
    """
    blocks = as_blocks(data).copy()
    header = blocks[..., :_HEADER_BYTES].copy().view(np.float16)
    with np.errstate(over="ignore"):  # an infinity is refused below
        product = header * np.float16(factor)
    if not np.array_equal(product.astype(np.float64), header.astype(np.float64) * factor):
        raise ValueError(f"scaling by {factor} is not exact in half precision")
    blocks[..., :_HEADER_BYTES] = product.view(np.uint8)
    return as_rows(blocks)


def zero_points(blocks: Bytes) -> NDArray[np.uint8]:
    """The nibble of each block [..., 20] that stands nearest to the weight 0, as [...]."""
    header = blocks[..., :_HEADER_BYTES].copy().view(np.float16).astype(np.float32)
    scale, offset = header[..., 0], header[..., 1]
    nearest = np.round(-offset / np.where(scale == 0, np.float32(1), scale))
    return np.asarray(np.clip(nearest, 0, 15), np.uint8)


def replace_weight(blocks: Bytes, position: int, nibbles: NDArray[np.uint8]) -> Bytes:
    """A copy of [..., 20] blocks whose weight at `position` (0..31) has the given nibbles [...] (0..15)."""
    shift = 0 if position < _HALF else 4
    others = np.uint8(0xF0 >> shift)
    result = blocks.copy()
    byte = result[..., _HEADER_BYTES + position % _HALF]
    byte[...] = (byte & others) | (nibbles << np.uint8(shift))
    return result
