"""Routed experts in NumPy: what ggml's kernels are judged against, and peers of another arithmetic.

Weights are dequantised by gguf's own Python code and the operators written down a second time (numpy_functions.py), so
that no mistake is shared with the kernels. `float64` is the oracle. `float32` stands for a device that dequantises and
multiplies. `float16` stands for one whose multipliers add in half precision: factors in half precision, sums of sixteen
products rounded to half, and those sums added in half, one after the other.

ggml's CPU kernels round activations before they multiply, which is the largest part of their distance to float64.
`quantize_activations` does the same here, and looks GELU up in halves as they do: what then remains is the order of
sums.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from backends.experts import F32, I32, ReadSlice, check_rows, not_held, places_of
from backends.manifest import ExpertTensor, LayerExperts
from backends.numpy_functions import Rows, glu, round_activations, unary
from backends.program import ExpertProgram, Node
from backends.sum_orders import add_in_halves
from capabilities.errors import Internal, UnsupportedModel

Accumulate = Literal["float64", "float32", "float16"]

DEQUANTISED_BYTES_MAX: Final = 64 << 20  # kept between calls; the expert in use may take more
_NAMES: Final = {"float64": "numpy-f64", "float32": "numpy-f32", "float16": "numpy-f16"}
_DECLARES: Final = {"float64": ("f32", "f32"), "float32": ("f32", "f32"), "float16": ("f16", "f16")}


@dataclass
class _Layer:
    spec: LayerExperts
    program: ExpertProgram
    places: I32
    raw: dict[int, dict[str, bytes]]  # expert -> tensor name -> its slice as it is stored
    types: dict[str, GGMLQuantizationType]


class NumpyExperts:
    """ExpertBackend in NumPy, one expert after the other.

    `ask_f32` changes nothing: each precision is there to be the only one that its peer has.
    """

    def __init__(self, accumulate: Accumulate, *, quantize_activations: bool = False) -> None:
        self.name = _NAMES[accumulate]
        self.declares = ("f32", "q8") if quantize_activations else _DECLARES[accumulate]  # see measure.declared_by
        self._accumulate = accumulate
        self._as_kernels = quantize_activations
        # Everything but the products is computed in single precision at least, as on any device.
        self._dtype = np.dtype(np.float64 if accumulate == "float64" else np.float32)
        self._layers: dict[int, _Layer] = {}
        self._dequantised: OrderedDict[tuple[int, int], dict[str, Rows]] = OrderedDict()
        self._dequantised_bytes = 0

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self.unload_layer(layer.layer)
        program.check_shapes(layer.n_in, layer.n_out, {t.name: t.shape for t in layer.tensors})
        held = _Layer(layer, program, places_of(layer, experts), {}, {})
        used = [(i, t) for i, t in enumerate(layer.tensors) if t.name in program.weights]
        for expert in experts:
            slices = held.raw[expert] = {t.name: bytes(read(expert, i)) for i, t in used}
            for _, tensor in used:
                held.types[tensor.name] = _type_of(tensor)
                if len(slices[tensor.name]) != tensor.nbytes:
                    raise Internal(f"{len(slices[tensor.name])} bytes for a slice of {tensor.nbytes}")
        self._layers[layer.layer] = held
        try:
            self._weights(held, experts[0])
        except NotImplementedError:
            self.unload_layer(layer.layer)
            names = sorted({kind.name for kind in held.types.values()})
            raise UnsupportedModel(f"{self.name} cannot dequantise one of {', '.join(names)}") from None

    def unload_layer(self, layer: int) -> None:
        self._layers.pop(layer, None)
        for key in [k for k in self._dequantised if k[0] == layer]:
            self._forget(key)

    def held(self, layer: int) -> frozenset[int]:
        held = self._layers.get(layer)
        return frozenset() if held is None else frozenset(held.raw)

    def close(self) -> None:
        for layer in list(self._layers):
            self.unload_layer(layer)

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        with np.errstate(over="ignore"):
            return self.unrounded(layer, x, tokens, experts).astype(np.float32, copy=False)

    def unrounded(self, layer: int, x: F32, tokens: I32, experts: I32) -> Rows:
        """The same rows [R, n_out] before they are rounded to single precision: float64 from `float64`."""
        held = self._layers.get(layer)
        if held is None:
            raise not_held(layer)
        check_rows(held.spec, held.places, x, tokens, experts)
        out = np.empty((len(experts), held.spec.n_out), self._dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # half precision overflows: that is what it is here to show
            for expert in np.unique(experts).tolist():
                rows = np.flatnonzero(experts == expert)
                values = x[tokens[rows]].astype(np.float32, copy=False)
                out[rows] = self._run(held, self._weights(held, expert), values)
        return out

    def _run(self, held: _Layer, weights: dict[str, Rows], x: F32) -> Rows:
        """One expert's program over rows x [R, n_in]; [R, n_out]."""
        values: list[Rows] = [x.astype(self._dtype)]
        for node in held.program.nodes[1:]:
            inputs = [values[i] for i in node.inputs]
            if node.op == "mul_mat_id":
                values.append(self._multiply(inputs[0], weights[node.name], held.types[node.name]))
            else:
                values.append(_apply(node, inputs, weights, table=self._as_kernels))
        return values[-1]

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        """a [R, n] times weight [m, n]: [R, m]."""
        if self._as_kernels:
            a = round_activations(np.ascontiguousarray(a, np.float32), kind).astype(self._dtype)
        if self._accumulate != "float16":
            return a @ weight.T
        return add_in_halves(a.astype(np.float16).astype(np.float32), weight)

    def _weights(self, held: _Layer, expert: int) -> dict[str, Rows]:
        """One expert's weights, [n_out, n_in] for a matrix, dequantised now or lately."""
        key = held.spec.layer, expert
        if key in self._dequantised:
            self._dequantised.move_to_end(key)
            return self._dequantised[key]
        weights = {}
        for tensor in held.spec.tensors:
            if tensor.name in held.types:
                raw = np.frombuffer(held.raw[expert][tensor.name], np.uint8).reshape(*tensor.shape[:0:-1], -1)
                values = gguf.dequantize(raw, held.types[tensor.name]).reshape(tensor.shape[::-1])
                if self._accumulate == "float16" and len(tensor.shape) == 2:
                    values = values.astype(np.float16)
                weights[tensor.name] = values.astype(self._dtype)
        self._dequantised[key] = weights
        self._dequantised_bytes += _nbytes(weights)
        while self._dequantised_bytes > DEQUANTISED_BYTES_MAX and len(self._dequantised) > 1:
            self._forget(next(iter(self._dequantised)))
        return weights

    def _forget(self, key: tuple[int, int]) -> None:
        self._dequantised_bytes -= _nbytes(self._dequantised.pop(key))


def _type_of(tensor: ExpertTensor) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(tensor.type)
    except ValueError:
        raise UnsupportedModel(f"{tensor.name} has the type {tensor.type}, which gguf does not know") from None


def _nbytes(weights: dict[str, Rows]) -> int:
    return sum(values.nbytes for values in weights.values())


def _apply(node: Node, inputs: list[Rows], weights: dict[str, Rows], *, table: bool) -> Rows:
    """Any operator but the product."""
    a, b = inputs[0], inputs[-1]
    match node.op:
        case "add_id":
            return a + weights[node.name]
        case "expert_scale":
            return a * weights[node.name]
        case "half":
            return np.split(a, 2, axis=1)[int(node.params[0])]
        case "unary":
            return unary(node.name, a, table=table)
        case "glu":
            swapped, alpha, limit = node.params
            if len(inputs) == 1:
                a, b = np.split(a, 2, axis=1)[:: -1 if swapped else 1]
            return glu(node.name, a, b, alpha=alpha, limit=limit, table=table)
        case "clamp":
            return np.maximum(np.minimum(a, node.params[1]), node.params[0])
        case "scale":
            return a * node.params[0] + node.params[1]
        case "mul":
            return a * b
        case "add":
            return a + b
        case "sqr":
            return a * a
        case _:
            raise AssertionError(node.op)
