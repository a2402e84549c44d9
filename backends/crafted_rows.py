"""Activations for one held expert that show in its answer how the worker adds, and look like any others.

Take an ordinary row and turn it part of the way towards one neuron's own weights: x = c d + sqrt(1 - c^2) b, with b the
ordinary row and d the sum of the neuron's gate and up weights, both of length one; x gets the length of the ordinary
row. The neuron's sum then runs up steadily over all inputs to some twenty times its usual size, and each addition on
the way is rounded in the last place of an ever larger partial sum: half precision loses there what it does not lose in
short sums of mixed sign. capabilities/row_check.py tells it from everything else that kernels do.

The worker sees rows of ordinary length whose values are spread as usual. That one of its neurons runs hot it can see,
but real models have such neurons; rows, experts and times are the leader's choice, and nothing else marks a check.
Rows must leave the leader as its real ones do: where it sends activations as Q8_0, round them first (`round_row`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from backends.coarse_experts import coarse_rows
from backends.experts import F32, ReadSlice
from backends.manifest import LayerExperts
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram
from capabilities.errors import UnsupportedModel
from capabilities.row_check import RowReferences, Some

HOT_SHARE: Final = 0.5  # c: enough for the neuron to give most of the result; more adds little
_OTHER_ORDERS: Final = 3  # of half-precision sums: with the first, four are seldom all right by luck
_UNROUNDED: Final = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def crafted_rows(
    layer: LayerExperts,
    program: ExpertProgram,
    expert: int,
    read: ReadSlice,
    ordinary: F32,
    seed: int,
    round_row: Callable[[F32], F32] = lambda x: x,
) -> F32:
    """Rows [n, n_in] made from ordinary ones of that shape, each with a hot neuron of its own.

    Send them as one batch: kernels change with its width. Eight rows at least are needed to judge.

    Args:
        read: the expert's slices, as for ExpertBackend.load_layer.
        ordinary: real activations of the layer, or numbers of their size.
        seed: chooses the neurons; one that workers cannot foresee.
        round_row: what activations go through on their way.

    Raises:
        UnsupportedModel: weights that cannot be dequantised here.
    """
    neurons = _neurons(layer, program, expert, read)
    chosen = np.random.default_rng(seed).choice(len(neurons), len(ordinary), replace=len(neurons) < len(ordinary))
    lengths = np.linalg.norm(ordinary, axis=1, keepdims=True)
    x = HOT_SHARE * _unit(neurons[chosen]) + np.sqrt(1 - HOT_SHARE**2) * _unit(ordinary)
    return round_row((x / np.linalg.norm(x, axis=1, keepdims=True) * lengths).astype(np.float32))


def references(layer: LayerExperts, program: ExpertProgram, expert: int, read: ReadSlice, x: F32) -> RowReferences:
    """What the expert gives for rows x [n, n_in] under every arithmetic that is known, computed here.

    Raises:
        UnsupportedModel: weights that cannot be dequantised here.
    """
    every = np.arange(len(x))

    def under(backend: NumpyExperts, some: Some = every) -> F32:
        backend.load_layer(layer, program, [expert], read)
        tokens, experts = np.arange(len(some), dtype=np.int32), np.full(len(some), expert, np.int32)
        return backend.compute(layer.layer, x[some], tokens, experts)

    return RowReferences(
        exact=under(NumpyExperts("float64")),
        rounded=(
            under(_HalfFactors("float32")),
            under(NumpyExperts("float32", quantize_activations=True)),
            under(_ShortBlocks("float32", quantize_activations=True)),
        ),
        halves=under(NumpyExperts("float16")),
        half_sums=lambda some: (under(_OtherOrder(number), some) for number in range(_OTHER_ORDERS)),
        coarse=lambda some, ways: coarse_rows(layer, program, expert, read, x, some, ways),
    )


class _OtherOrder(NumpyExperts):
    """Half-precision sums of the same products in another order."""

    def __init__(self, number: int) -> None:
        super().__init__("float16")
        self._number = number

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        order = np.random.default_rng(self._number).permutation(a.shape[1])
        return super()._multiply(a[:, order], weight[:, order], kind)


class _HalfFactors(NumpyExperts):
    """Both factors in half precision, sums in F32: matrix units of GPUs when F32 is asked for."""

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        return super()._multiply(_half(a), _half(weight), kind)


class _ShortBlocks(NumpyExperts):
    """8-bit blocks of 32 whatever the weights: GPUs, also where CPUs take blocks of 256."""

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        return super()._multiply(a, weight, kind if kind in _UNROUNDED else GGMLQuantizationType.Q8_0)


def _half(values: Rows) -> F32:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _neurons(layer: LayerExperts, program: ExpertProgram, expert: int, read: ReadSlice) -> F32:
    """For each neuron the direction [n_in] that excites it: the sum of its rows in every matrix that x meets."""
    merged = any(n.op == "half" or (n.op == "glu" and len(n.inputs) == 1) for n in program.nodes)
    matrices: list[F32] = []
    for index, tensor in enumerate(layer.tensors):
        if tensor.name in program.first_matmul_weights():
            raw = np.frombuffer(read(expert, index), np.uint8).reshape(tensor.shape[1], -1)
            matrix = _dequantised(raw, tensor.type)
            matrices += np.split(matrix, 2) if merged else [matrix]
    if not matrices:
        raise UnsupportedModel(f"no matrix of layer {layer.layer} meets its activations")
    count = min(len(matrix) for matrix in matrices)
    total: F32 = sum((_unit(matrix[:count]) for matrix in matrices[1:]), start=_unit(matrices[0][:count]))
    return total


def _dequantised(raw: NDArray[np.uint8], kind: int) -> F32:
    try:
        return np.asarray(gguf.dequantize(raw, GGMLQuantizationType(kind)), np.float32)
    except (NotImplementedError, ValueError):
        raise UnsupportedModel(f"weights of type {kind} cannot be dequantised here") from None


def _unit(rows: F32) -> F32:
    """Rows of length one; rows of zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: F32 = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit
