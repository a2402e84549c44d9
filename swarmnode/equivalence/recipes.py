"""What the level op computes, by name: a recipe says all that another machine needs to compute the same.

Weights are hashed bytes and inputs come from a seeded generator, so a comparison between machines sends a few words one
way and rows the other. That a machine drew the same inputs is checked by their hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from backends.experts import F32, ExpertBackend
from backends.gguf_types import GGML_TYPES
from backends.probe_weights import WEIGHT_TYPES, ProbeLayer, gated_layer, product_layer
from backends.row_operators import RowOperators

Operator = Literal["matmul", "swiglu", "softmax", "rms_norm"]
Make = Callable[[], ExpertBackend]

WIDTHS: Final = (1, 2, 5, 9, 33, 128, 512)  # of batches: on both sides of the limits at which kernels change
AFAR_WIDTHS: Final = (1, 33)  # of softmax and norms where a side is a peer: all widths would be 30 MB to send
LENGTHS: Final = (256, 2048, 8192)  # of sums: a head's, a model's width, a wide feed-forward block's
TYPES: Final = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_K", "q6_K")  # where no model says which
ROW_LENGTHS: Final = (256, 4096)  # of softmax and norms
ROW_OPERATORS: Final[tuple[Operator, ...]] = ("softmax", "rms_norm")
GATED_LENGTH: Final = 256
ROWS_MIN: Final = 32  # that a median is taken of, at any batch width
OUTPUTS: Final = 64  # columns of a product
_EXPERTS: Final = 2
_SEED: Final = 4
_ROW_SCALE: Final = 3  # of inputs to softmax and norms: logits of some size


@dataclass(frozen=True, slots=True)
class Sizes:
    """Weight types by ggml's names, lengths of sums, batch widths."""

    types: tuple[str, ...] = TYPES
    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[int, ...] = WIDTHS


@dataclass(frozen=True, slots=True)
class Recipe:
    """One operator over `length` values, at several batch widths.

    type: ggml's name of the weights' type, empty where there are none.
    """

    op: Operator
    type: str
    length: int
    widths: tuple[int, ...]

    @property
    def probe(self) -> ProbeLayer:
        """The layer that a product or a gated unit is. ValueError for the others, and for unknown types."""
        match self.op:
            case "matmul":
                return product_layer(type_of(self.type), self.length, OUTPUTS, _EXPERTS)
            case "swiglu":
                return gated_layer(self.length, _EXPERTS)
            case _:
                raise ValueError(f"{self.op} is no layer of experts")

    @property
    def values(self) -> int:
        """Of one input row: the length in whole blocks of the type."""
        return self.probe.layer.n_in if self.op in ("matmul", "swiglu") else self.length

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the results, one for each batch width."""
        columns = OUTPUTS if self.op == "matmul" else self.length
        return tuple((rows_at(width), columns) for width in self.widths)

    def inputs(self) -> F32:
        """Rows [widest batch or more, values], drawn from a normal distribution."""
        x = noise_rows(max(self.widths), self.values)
        return x if self.op in ("matmul", "swiglu") else _ROW_SCALE * x


def type_of(name: str) -> int:
    """ggml's number of a weight type that can be measured. ValueError for any other name."""
    for kind in WEIGHT_TYPES:
        if GGML_TYPES[kind].name == name:
            return kind
    raise ValueError(f"{name!r} is no type of weights that can be measured")


def rows_at(width: int) -> int:
    """Rows that are computed in batches of `width`: a median of one row would say little."""
    return max(width, ROWS_MIN // width * width)


def experts_of(width: int) -> NDArray[np.int32]:
    """The expert of each row that is computed in batches of `width`: they take turns within a batch."""
    return np.arange(rows_at(width), dtype=np.int32) % width % _EXPERTS


def noise_rows(rows: int, width: int) -> F32:
    """The same on every machine, by the generator's specification; `inputs_hash` is how to be sure."""
    return np.random.default_rng(_SEED).standard_normal((max(rows, ROWS_MIN), width), np.float32)


def inputs_hash(x: F32) -> str:
    return hashlib.sha256(np.ascontiguousarray(x, "<f4").tobytes()).hexdigest()


def compute(recipe: Recipe, make: Make, rows: RowOperators | None) -> list[F32]:
    """One result for each batch width, of `recipe.shapes`.

    Raises:
        UnsupportedModel: the backend does not know the weight type.
        ValueError: softmax or a norm without `rows`.
    """
    x = recipe.inputs()
    if recipe.op in ("softmax", "rms_norm"):
        if rows is None:
            raise ValueError(f"nothing computes {recipe.op}")
        operator = rows.softmax if recipe.op == "softmax" else rows.rms_norm
        return [_in_batches(x, width, operator) for width in recipe.widths]
    probe = recipe.probe
    number, tokens = probe.layer.layer, np.arange(len(x), dtype=np.int32)
    with _holding(make, probe) as backend:

        def product(part: F32) -> F32:
            which = tokens[: len(part)]
            return backend.compute(number, part, which, which % _EXPERTS)

        return [_in_batches(x, width, product) for width in recipe.widths]


def _in_batches(x: F32, width: int, operator: Callable[[F32], F32]) -> F32:
    """`rows_at(width)` rows in batches of exactly `width`."""
    return np.concatenate([operator(x[start : start + width]) for start in range(0, rows_at(width), width)])


@contextmanager
def _holding(make: Make, probe: ProbeLayer) -> Iterator[ExpertBackend]:
    with ExitStack() as stack:
        backend = make()
        stack.callback(backend.close)
        backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
        yield backend


def joined(results: Sequence[F32]) -> bytes:
    """Results as they travel: all values of one after the other, little-endian."""
    return b"".join(np.ascontiguousarray(result, "<f4").tobytes() for result in results)


def parted(recipe: Recipe, data: bytes | memoryview) -> list[F32]:
    """What `joined` made of a recipe's results. ValueError for another number of bytes."""
    sizes = [rows * columns for rows, columns in recipe.shapes]
    values = np.frombuffer(data, "<f4")
    if len(values) != sum(sizes):
        raise ValueError(f"{len(values)} values, not {sum(sizes)}")
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part.reshape(shape).astype(np.float32) for part, shape in zip(parts, recipe.shapes, strict=True)]


def bytes_of(recipe: Recipe) -> int:
    """What `joined` makes of the results."""
    return 4 * sum(rows * columns for rows, columns in recipe.shapes)
