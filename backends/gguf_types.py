"""The GGUF format's numbers, and how much of a file we accept.

The tables are those of llama.cpp's ggml 0.25 (a test compares them with the installed library, which knows types that
the gguf package does not). The bounds keep the time and memory of reading a header small, whoever wrote it; each stands
well above every model that is known and gives its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the two that llama.cpp reads; their layout is the same
DEFAULT_ALIGNMENT = 32

HEADER_BYTES_MAX = 256 << 20  # the largest known vocabularies with their merges take 30 MB
KEYS_MAX = 65_536  # real files have under 200; a key costs us 2 us
KEY_BYTES_MAX = 65_535  # the format's own limit
ARRAY_ELEMENTS_MAX = 1 << 23  # in all arrays: the most known is 262,144 tokens with 515,000 merges; 1 s to scan
TENSORS_MAX = 16_384  # llama.cpp's 512 layers of 32; its own look-ups grow with the square, and here take a second
TENSOR_NAME_BYTES_MAX = 63  # GGML_MAX_NAME - 1
DIMENSIONS_MAX = 4  # GGML_MAX_DIMS
TENSOR_ELEMENTS_MAX = 1 << 40  # 180 times the largest expert tensor known (384 experts of 7168 x 2048)
ALIGNMENT_MIN = 32  # ggml's TENSOR_ALIGNMENT: llama.cpp aborts on mapped tensors that start elsewhere
ALIGNMENT_MAX = 65_536  # the largest page size in use
PARTS_MAX = 256  # a mapped part holds two file descriptors, and some systems stop at 1,024


class ValueType(IntEnum):
    """Type of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# struct code and bytes of each type with a fixed size
SCALARS: dict[int, tuple[str, int]] = {
    ValueType.UINT8: ("B", 1),
    ValueType.INT8: ("b", 1),
    ValueType.UINT16: ("H", 2),
    ValueType.INT16: ("h", 2),
    ValueType.UINT32: ("I", 4),
    ValueType.INT32: ("i", 4),
    ValueType.FLOAT32: ("f", 4),
    ValueType.BOOL: ("?", 1),
    ValueType.UINT64: ("Q", 8),
    ValueType.INT64: ("q", 8),
    ValueType.FLOAT64: ("d", 8),
}


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How a tensor type packs numbers: `block` elements of a row take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


F32, F16 = 0, 1

GGML_TYPES: dict[int, GGMLType] = {
    F32: GGMLType("f32", 1, 4),
    F16: GGMLType("f16", 1, 2),
    2: GGMLType("q4_0", 32, 18),
    3: GGMLType("q4_1", 32, 20),
    6: GGMLType("q5_0", 32, 22),
    7: GGMLType("q5_1", 32, 24),
    8: GGMLType("q8_0", 32, 34),
    9: GGMLType("q8_1", 32, 36),
    10: GGMLType("q2_K", 256, 84),
    11: GGMLType("q3_K", 256, 110),
    12: GGMLType("q4_K", 256, 144),
    13: GGMLType("q5_K", 256, 176),
    14: GGMLType("q6_K", 256, 210),
    15: GGMLType("q8_K", 256, 292),
    16: GGMLType("iq2_xxs", 256, 66),
    17: GGMLType("iq2_xs", 256, 74),
    18: GGMLType("iq3_xxs", 256, 98),
    19: GGMLType("iq1_s", 256, 50),
    20: GGMLType("iq4_nl", 32, 18),
    21: GGMLType("iq3_s", 256, 110),
    22: GGMLType("iq2_s", 256, 82),
    23: GGMLType("iq4_xs", 256, 136),
    24: GGMLType("i8", 1, 1),
    25: GGMLType("i16", 1, 2),
    26: GGMLType("i32", 1, 4),
    27: GGMLType("i64", 1, 8),
    28: GGMLType("f64", 1, 8),
    29: GGMLType("iq1_m", 256, 56),
    30: GGMLType("bf16", 1, 2),
    34: GGMLType("tq1_0", 256, 54),
    35: GGMLType("tq2_0", 256, 66),
    39: GGMLType("mxfp4", 32, 17),
    40: GGMLType("nvfp4", 64, 36),
    41: GGMLType("q1_0", 128, 18),
    42: GGMLType("q2_0", 64, 18),
}


def tensor_bytes(type_id: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` (ggml order). ValueError, in words that follow a name: unknown type, cut blocks."""
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        raise ValueError(f"has tensor type {type_id}, which this ggml does not know")
    row = shape[0] if shape else 1
    if row % kind.block:
        raise ValueError(f"has rows of {row} elements, not whole {kind.name} blocks of {kind.block}")
    rows = 1
    for extent in shape[1:]:
        rows *= extent
    return row // kind.block * kind.nbytes * rows


def padded(offset: int, alignment: int) -> int:
    """The next multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment
