"""Mixture-of-experts models of real shapes with random weights, for measuring speed.

Speed depends on shapes and types, not on what the weights mean. So a model of gigabytes is made in seconds: one pool of
random Q4_0 blocks is drawn, and every matrix is a run of the pool that starts at a random block (each expert at its
own). Scales are chosen so that a layer's output stays of the size of its input and logits are finite. The file is an
ordinary GGUF of architecture `olmoe`: 64 experts or any other number, top-k, softmax routing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from backends.atomic_file import replacing
from backends.byte_vocabulary import add_byte_tokenizer

Bytes = NDArray[np.uint8]
FORMAT_VERSION = 1  # part of the file name: raise it when the same shape and seed give other bytes

_BLOCK, _BLOCK_BYTES = 32, 18  # Q4_0: 32 weights as an f16 scale and 16 bytes of nibbles
_NIBBLE_STD = 4.6098  # of uniform nibbles 0..15
_POOL_BLOCKS = 524_287  # 9.4 MB, and prime, so that rows and experts never fall into step with it


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of an `olmoe` model. Widths are multiples of 32, `n_head` divides `n_embd`."""

    name: str
    n_layers: int
    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    context_length: int = 4096

    def __post_init__(self) -> None:
        uneven = self.n_embd % _BLOCK or self.n_ff % _BLOCK or self.n_embd % self.n_head
        if uneven or not 0 < self.n_used <= self.n_expert:
            raise ValueError(f"impossible shape: {self}")

    def file_name(self, seed: int) -> str:
        """A name that stands for the file's whole content: shape, seed and the generator's version."""
        digest = hashlib.sha256(repr((FORMAT_VERSION, self, seed)).encode()).hexdigest()
        return f"{self.name}-random-{digest[:12]}.gguf"


OLMOE_1B_7B = ModelShape("olmoe-1b-7b", 16, 64, 8, 2048, 1024, 16, 50304)
OLMOE_TINY = ModelShape("olmoe-tiny", 2, 8, 2, 128, 64, 4, 512, 512)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tensor to write: `shape` in ggml order (fan-in first), `std` and `mean` of its weights, Q4_0 or F32."""

    name: str
    shape: tuple[int, ...]
    std: float
    quantised: bool = True
    mean: float = 0.0

    @property
    def n_weights(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.n_weights // _BLOCK * _BLOCK_BYTES if self.quantised else 4 * self.n_weights


def write_random_model(
    path: Path, shape: ModelShape, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a random model of `shape` to `path` (atomically); the same arguments give the same bytes.

    `progress(done, total)` counts bytes of weights. Memory stays under about 100 MB whatever the shape.
    """
    matrices = list(_matrices(shape))
    total = sum(matrix.nbytes for matrix in matrices)
    with replacing(path) as partial, closing(_header(partial, shape, matrices)) as writer:
        out: BinaryIO = writer.fout[0]
        writer.write_padding(out, out.tell())
        source, done = _WeightSource(seed), 0
        for matrix in matrices:
            source.write(out, matrix)
            writer.write_padding(out, matrix.nbytes)
            done += matrix.nbytes
            if progress is not None:
                progress(done, total)


def _matrices(shape: ModelShape) -> Iterator[_Matrix]:
    """Every tensor of the model, in file order, with the standard deviation that keeps activations near one."""
    width, ff, experts = shape.n_embd, shape.n_ff, shape.n_expert
    into, out_of = width**-0.5, ff**-0.5
    yield _Matrix("token_embd.weight", (width, shape.n_vocab), 1.0)
    yield _Matrix("output_norm.weight", (width,), 0.0, quantised=False, mean=1.0)
    yield _Matrix("output.weight", (width, shape.n_vocab), 3 * into)  # logits with a deviation of 3: a clear best token
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield _Matrix(f"{block}{norm}.weight", (width,), 0.05, quantised=False, mean=1.0)
        for projection in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield _Matrix(f"{block}{projection}.weight", (width, width), into)
        yield _Matrix(f"{block}ffn_gate_inp.weight", (width, experts), 2 * into, quantised=False)  # far from uniform
        yield _Matrix(f"{block}ffn_gate_exps.weight", (width, ff, experts), into)
        yield _Matrix(f"{block}ffn_up_exps.weight", (width, ff, experts), into)
        yield _Matrix(f"{block}ffn_down_exps.weight", (ff, width, experts), 2 * out_of)


def _header(path: Path, shape: ModelShape, matrices: list[_Matrix]) -> GGUFWriter:
    """Write everything of the file that comes before the weights."""
    writer = GGUFWriter(path, "olmoe")
    writer.add_name(f"{shape.name} with random weights")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_used)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_quantization_version(2)
    writer.add_file_type(2)  # mostly Q4_0
    add_byte_tokenizer(writer, shape.n_vocab)
    for matrix in matrices:
        kind = GGMLQuantizationType.Q4_0 if matrix.quantised else GGMLQuantizationType.F32
        writer.add_tensor_info(matrix.name, matrix.shape[::-1], np.dtype(np.float32), matrix.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


class _WeightSource:
    """Random weights, drawn once and reused at random offsets."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nibbles: Bytes = self._random.integers(0, 256, (_POOL_BLOCKS, 16), dtype=np.uint8)
        # A block's scale varies and changes sign: nibbles have a mean of -0.5 that would otherwise add up over a row.
        magnitude = self._random.uniform(0.5, 1.5, _POOL_BLOCKS) / (_NIBBLE_STD * 1.04)
        self._scales = magnitude * self._random.choice([-1.0, 1.0], _POOL_BLOCKS)
        self._pools: dict[float, Bytes] = {}

    def write(self, out: BinaryIO, matrix: _Matrix) -> None:
        """Write the matrix's bytes; the slices of its outermost dimension (experts) start at different offsets."""
        if not matrix.quantised:
            values = matrix.mean + matrix.std * self._random.standard_normal(matrix.n_weights, dtype=np.float32)
            out.write(values.astype("<f4").tobytes())
            return
        pool = self._pool(matrix.std)
        slices = matrix.shape[2] if len(matrix.shape) == 3 else 1
        for _ in range(slices):
            self._write_run(out, pool, matrix.n_weights // _BLOCK // slices)

    def _pool(self, std: float) -> Bytes:
        """The pool's blocks [_POOL_BLOCKS, 18] with weights of the given standard deviation."""
        if std not in self._pools:
            scales = (self._scales * std).astype("<f2")
            self._pools[std] = np.concatenate([scales.view(np.uint8).reshape(-1, 2), self._nibbles], axis=1)
        return self._pools[std]

    def _write_run(self, out: BinaryIO, pool: Bytes, n_blocks: int) -> None:
        at = int(self._random.integers(len(pool)))
        while n_blocks:
            chunk = pool[at : at + n_blocks]
            out.write(chunk.data)
            n_blocks -= len(chunk)
            at = 0
