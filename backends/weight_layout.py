"""Which weights llama.cpp may hold repacked while a token's bits do not depend on its batch.

On CPUs llama.cpp interleaves the rows of some weights for speed. Its products with those take four tokens at a time and
the rest one by one, and for some types (Q2_K, Q4_K on x86) the two ways add in another order. So each type of a model's
dense weights is tried out here, once a process. If all agree, llama.cpp chooses as it likes. If one does not, dense
weights stay plain; experts are repacked all the same, for products over experts take token by token, and workers
repack theirs.

Chunk experts (`_chexps`) must not be repacked at all: two experts of a token may share one, and ggml's products with
repacked weights have room for each id once a token. What comes twice overwrites another row, or other memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backends.device import Device
from backends.expert_tensors import parse_name
from backends.ggml import STATUS_SUCCESS, TYPE_F32, InitParams, library, read_tensor, write_tensor
from backends.gguf_file import GGUFFile, TensorInfo
from capabilities.errors import Internal

_CHUNK_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_chexps\.weight")
_ROWS, _WIDTH, _TOKENS = 64, 512, 7  # seven tokens: four together and three alone


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """For llama.cpp's loader: may it repack what it likes, and which tensors (by regex) go into which buffer type."""

    may_repack: bool
    overrides: tuple[tuple[bytes, int], ...] = ()


def choose_layout(path: Path, device: Device, *, batch_invariant: bool) -> WeightLayout:
    """The layout for a model's file on a CPU.

    Raises:
        BadModelFile: the file is broken.
    """
    with GGUFFile.open(path) as gguf:
        tensors = list(gguf.tensors.values())
    chunks = any(_CHUNK_EXPERTS.fullmatch(info.name) and _may_repack(info, device) for info in tensors)
    dense = {info.type for info in tensors if len(info.shape) == 2 and _may_repack(info, device)}
    if not chunks and (not batch_invariant or all(_repacks_evenly(device, kind) for kind in sorted(dense))):
        return WeightLayout(may_repack=True)
    return WeightLayout(may_repack=False, overrides=tuple(_repacked_experts(tensors, device)))


def _may_repack(info: TensorInfo, device: Device) -> bool:
    return bool(device.repack_type(info.type, info.shape))


def _repacked_experts(tensors: Iterable[TensorInfo], device: Device) -> Iterable[tuple[bytes, int]]:
    layers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for info in tensors:
        name = parse_name(info.name)
        if name and len(info.shape) == 3 and (buffer_type := device.repack_type(info.type, info.shape)):
            layers[name.short, buffer_type].append(name.layer)
    for (short, buffer_type), numbers in layers.items():
        yield rf"^blk\.({'|'.join(map(str, numbers))})\.{re.escape(short)}$".encode(), buffer_type


@cache
def _repacks_evenly(device: Device, kind: int) -> bool:
    """Whether repacked weights of this type give a token the same bits alone and among others."""
    random = np.random.default_rng(0)
    weights, x = (random.standard_normal((n, _WIDTH), dtype=np.float32) for n in (_ROWS, _TOKENS))
    together = _product(device, kind, weights, x)
    alone = [_product(device, kind, weights, x[i : i + 1]) for i in range(_TOKENS)]
    return np.array_equal(together, np.concatenate(alone))


def _product(device: Device, kind: int, weights: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [T, _WIDTH] times repacked weights [_ROWS, _WIDTH]: [T, _ROWS]."""
    lib = library()
    stored, values = (lib.ggml_init(InitParams(1 << 16, None, True)) for _ in range(2))
    weight = lib.ggml_new_tensor_2d(stored, kind, _WIDTH, _ROWS)
    activations = lib.ggml_new_tensor_2d(values, TYPE_F32, _WIDTH, len(x))
    product = lib.ggml_mul_mat(values, weight, activations)
    graph = lib.ggml_new_graph_custom(values, 8, False)
    lib.ggml_build_forward_expand(graph, product)
    repacked = device.repack_type(kind, (_WIDTH, _ROWS))
    buffers = [
        lib.ggml_backend_alloc_ctx_tensors_from_buft(stored, repacked),
        lib.ggml_backend_alloc_ctx_tensors_from_buft(values, device.buffer_type),
    ]
    try:
        write_tensor(lib, weight, _quantised(kind, weights))
        write_tensor(lib, activations, np.ascontiguousarray(x))
        if lib.ggml_backend_graph_compute(device.backend, graph) != STATUS_SUCCESS:
            raise Internal(f"{device.name} failed to compute a product")
        result: NDArray[np.float32] = read_tensor(lib, product, np.float32)[0, 0]
        return result
    finally:
        for buffer in buffers:
            lib.ggml_backend_buffer_free(buffer)
        for context in (stored, values):
            lib.ggml_free(context)


def _quantised(kind: int, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    lib = library()
    out = np.empty(len(weights) * lib.ggml_row_size(kind, _WIDTH), np.uint8)
    lib.ggml_quantize_chunk(kind, weights.ctypes.data, out.ctypes.data, 0, len(weights), _WIDTH, None)
    return out
