"""Routed experts on one device, computed with ggml's kernels.

A layer's held experts are stacked into one tensor for each weight (in the CPU's repacked layout where llama.cpp would
repack, which gives the same bits), and its program is turned into a ggml graph. One token's graph is built once for
each number of rows and kept: decoding repeats it for every token. Larger batches are cut into slices of bounded memory,
sorted by expert so that each expert's weights are read once a slice.
"""

from __future__ import annotations

import ctypes as ct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.device import Device
from backends.ggml import (
    PREC_F32,
    STATUS_SUCCESS,
    TYPE_F32,
    TYPE_I32,
    InitParams,
    Library,
    library,
    tensor_at,
    write_tensor,
)
from backends.manifest import ExpertTensor, LayerExperts
from backends.program import ExpertProgram, Node
from capabilities.errors import Internal, PeerMistake, UnsupportedModel

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
ReadSlice = Callable[[int, int], "memoryview | bytes"]  # (expert, tensor index) -> the tensor's slice of that expert

SLICE_BYTES_MAX: Final = 48 << 20  # activations of one slice of a batch; a worker's memory is its experts plus 250 MiB
GRAPHS_KEPT: Final = 1024  # one-token graphs, some kilobytes each: layers times rows of ordinary models
_USAGE_WEIGHTS: Final = 1


class ExpertBackend(Protocol):
    """Computes routed experts. Every implementation passes tests/test_expert_conformance.py."""

    name: str

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        """Take the weights of `experts` of one layer; `read` is called once for each (expert, tensor)."""

    def unload_layer(self, layer: int) -> None: ...

    def held(self, layer: int) -> frozenset[int]: ...

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        """Row r of the result [R, n_out] is expert `experts[r]` applied to `x[tokens[r]]`; x is [T, n_in], F32.

        `ask_f32` asks the kernels to accumulate in F32 (ggml_prec_set_acc).

        Raises:
            PeerMistake: an expert that is not held, or indices out of range.
        """

    def close(self) -> None: ...


@dataclass
class _Layer:
    spec: LayerExperts
    program: ExpertProgram
    widths: tuple[int, ...]
    weights: dict[str, int]
    buffers: list[tuple[int, int]]  # (ggml context, its buffer) of each weight
    local: I32  # expert id -> index in the stacked tensors, -1 where not held


@dataclass
class _Graph:
    context: int
    buffer: int
    graph: int
    x: int
    ids: int
    out: int
    host: bool
    x_data: int
    ids_data: int
    out_data: int


class GgmlExperts:
    """ExpertBackend over one ggml device."""

    def __init__(self, device: Device, *, repack: bool = True) -> None:
        self.name = device.name
        self.device = device
        self._lib: Library = library()
        self._repack = repack
        self._layers: dict[int, _Layer] = {}
        self._graphs: OrderedDict[tuple[int, int, bool], _Graph] = OrderedDict()

    # -- weights ------------------------------------------------------------------------------------------------

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        if not experts:
            raise ValueError("a layer without experts is not loaded")
        shapes = {t.name: t.shape for t in layer.tensors}
        widths = program.check_shapes(layer.n_in, layer.n_out, shapes)
        self.unload_layer(layer.layer)
        local = np.full(layer.n_expert, -1, np.int32)
        local[list(experts)] = np.arange(len(experts), dtype=np.int32)
        held = _Layer(layer, program, widths, {}, [], local)
        try:
            for index, tensor in enumerate(layer.tensors):
                if tensor.name in program.weights:
                    self._load_tensor(held, tensor, index, experts, read)
        except BaseException:
            self._free(held)
            raise
        self._layers[layer.layer] = held

    def _load_tensor(
        self, held: _Layer, tensor: ExpertTensor, index: int, experts: Sequence[int], read: ReadSlice
    ) -> None:
        lib = self._lib
        repacked = self._repack_type(tensor, held.spec) if self._repack else None
        # ggml repacks only what has three dimensions, and a tensor of one expert has two: such an expert is held twice,
        # for the plain layout's kernel need not give the same bits.
        stack = list(experts) * 2 if repacked and len(experts) == 1 else list(experts)
        context = lib.ggml_init(InitParams(lib.ggml_tensor_overhead() + 1024, None, True))
        address = self._new_tensor(context, tensor, len(stack))
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, repacked or self.device.buffer_type)
        if not buffer:
            lib.ggml_free(context)
            raise Internal(
                f"{self.name} has no memory for {tensor.name} of layer {held.spec.layer}",
                hint="Lower node.memory_mib in the configuration, or close other programs.",
            )
        held.buffers.append((context, buffer))
        lib.ggml_backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
        held.weights[tensor.name] = address
        if repacked:  # a repacked tensor is written whole, so it is staged once
            whole = np.empty((len(stack), tensor.nbytes), np.uint8)
            for row, expert in zip(whole, stack, strict=True):
                row[:] = np.frombuffer(read(expert, index), np.uint8)
            write_tensor(lib, address, whole)
            return
        for place, expert in enumerate(stack):
            piece = np.frombuffer(read(expert, index), np.uint8)
            if piece.nbytes != tensor.nbytes:
                raise Internal(f"{piece.nbytes} bytes for a slice of {tensor.nbytes}")
            lib.ggml_backend_tensor_set(address, piece.ctypes.data, place * tensor.nbytes, tensor.nbytes)

    def _new_tensor(self, context: int, tensor: ExpertTensor, count: int) -> int:
        lib = self._lib
        makers = {1: lib.ggml_new_tensor_1d, 2: lib.ggml_new_tensor_2d, 3: lib.ggml_new_tensor_3d}
        shape = (*tensor.shape, count)
        if len(shape) not in makers:
            raise UnsupportedModel(f"{tensor.name} has {len(shape)} dimensions")
        return int(makers[len(shape)](context, tensor.type, *shape))

    def _repack_type(self, tensor: ExpertTensor, spec: LayerExperts) -> int | None:
        """The buffer type that llama.cpp would repack this weight into, or None."""
        if len(tensor.shape) != 2:
            return None
        lib, (ne0, ne1) = self._lib, tensor.shape
        for buffer_type in self.device.extra_buffer_types:
            context = lib.ggml_init(InitParams(8 * lib.ggml_tensor_overhead(), None, True))
            weight = lib.ggml_new_tensor_3d(context, tensor.type, ne0, ne1, max(2, spec.n_expert))
            x = lib.ggml_new_tensor_3d(context, TYPE_F32, ne0, 1, 1)
            ids = lib.ggml_new_tensor_2d(context, TYPE_I32, spec.n_used, 1)
            product = lib.ggml_mul_mat_id(context, weight, x, ids)
            # ggml looks at the weight's buffer: one of no size will do, as in llama.cpp's own loader.
            buffer = tensor_at(weight).buffer = self.device.empty_buffer(buffer_type)
            supported = lib.ggml_backend_dev_supports_op(self.device.handle, product)
            lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(context)
            if supported:
                return buffer_type
        return None

    def unload_layer(self, layer: int) -> None:
        held = self._layers.pop(layer, None)
        if held is None:
            return
        for key in [k for k in self._graphs if k[0] == layer]:
            self._free_graph(self._graphs.pop(key))
        self._free(held)

    def _free(self, held: _Layer) -> None:
        for context, buffer in held.buffers:
            self._lib.ggml_backend_buffer_free(buffer)
            self._lib.ggml_free(context)

    def held(self, layer: int) -> frozenset[int]:
        held = self._layers.get(layer)
        return frozenset() if held is None else frozenset(np.flatnonzero(held.local >= 0).tolist())

    def close(self) -> None:
        for layer in list(self._layers):
            self.unload_layer(layer)

    # -- computing ----------------------------------------------------------------------------------------------

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        held = self._layers.get(layer)
        if held is None:
            raise PeerMistake(f"no experts of layer {layer} are held here", layer=layer)
        spec, rows = held.spec, len(experts)
        if x.ndim != 2 or x.shape[1] != spec.n_in or len(tokens) != rows:
            raise PeerMistake(f"layer {layer} takes rows of {spec.n_in} values", layer=layer)
        if rows == 0:
            return np.empty((0, spec.n_out), np.float32)
        if experts.min() < 0 or experts.max() >= spec.n_expert or tokens.min() < 0 or tokens.max() >= len(x):
            raise PeerMistake(f"an expert or token index of layer {layer} is out of range", layer=layer)
        ids = held.local[experts]
        if ids.min() < 0:
            missing = sorted({int(e) for e in experts[ids < 0]})
            raise PeerMistake(f"experts {missing} of layer {layer} are not held here", layer=layer, experts=missing)
        if len(x) == 1:
            return self._one_token(held, x, ids, ask_f32)
        return self._many_tokens(held, x, tokens, ids, ask_f32)

    def _one_token(self, held: _Layer, x: F32, ids: I32, ask_f32: bool) -> F32:
        key = (held.spec.layer, len(ids), ask_f32)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(held, len(ids), 1, ask_f32)
            if len(self._graphs) > GRAPHS_KEPT:
                self._free_graph(self._graphs.popitem(last=False)[1])
        else:
            self._graphs.move_to_end(key)
        return self._run(graph, np.ascontiguousarray(x, np.float32), ids, held.spec.n_out)

    def _many_tokens(self, held: _Layer, x: F32, tokens: I32, ids: I32, ask_f32: bool) -> F32:
        rows, spec = len(ids), held.spec
        order = np.argsort(ids, kind="stable")
        slice_rows = max(1, SLICE_BYTES_MAX // (4 * (sum(held.widths) + spec.n_in)))
        result = np.empty((rows, spec.n_out), np.float32)
        for start in range(0, rows, slice_rows):
            part = order[start : start + slice_rows]
            graph = self._build(held, 1, len(part), ask_f32)
            try:
                result[part] = self._run(graph, x[tokens[part]], np.ascontiguousarray(ids[part]), spec.n_out)
            finally:
                self._free_graph(graph)
        return result

    def _run(self, graph: _Graph, x: F32, ids: I32, n_out: int) -> F32:
        lib = self._lib
        if graph.host:
            ct.memmove(graph.x_data, x.ctypes.data, x.nbytes)
            ct.memmove(graph.ids_data, ids.ctypes.data, ids.nbytes)
        else:
            write_tensor(lib, graph.x, x)
            write_tensor(lib, graph.ids, ids)
        if lib.ggml_backend_graph_compute(self.device.backend, graph.graph) != STATUS_SUCCESS:
            raise Internal(f"{self.name} failed to compute experts")
        out = np.empty((len(ids), n_out), np.float32)
        if graph.host:
            ct.memmove(out.ctypes.data, graph.out_data, out.nbytes)
        else:
            lib.ggml_backend_tensor_get(graph.out, out.ctypes.data, 0, out.nbytes)
        return out

    def _build(self, held: _Layer, n_used: int, n_tokens: int, ask_f32: bool) -> _Graph:
        """A graph for x [n_in, 1, n_tokens] and ids [n_used, n_tokens]; its result is [n_out, n_used, n_tokens]."""
        lib, nodes = self._lib, held.program.nodes
        room = (5 * len(nodes) + 8) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(8 * len(nodes), False)
        context = lib.ggml_init(InitParams(room, None, True))
        x = lib.ggml_new_tensor_3d(context, TYPE_F32, held.spec.n_in, 1, n_tokens)
        ids = lib.ggml_new_tensor_2d(context, TYPE_I32, n_used, n_tokens)
        values = [x]
        for node in nodes[1:]:
            values.append(self._emit(context, node, [values[i] for i in node.inputs], held, ids, ask_f32))
        graph = lib.ggml_new_graph_custom(context, 8 * len(nodes), False)
        lib.ggml_build_forward_expand(graph, values[-1])
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, self.device.buffer_type)
        if not buffer:
            lib.ggml_free(context)
            raise Internal(f"{self.name} has no memory for a batch of {n_tokens} rows")
        host = lib.ggml_backend_buffer_is_host(buffer)
        data = [tensor_at(a).data for a in (x, ids, values[-1])]
        return _Graph(context, buffer, graph, x, ids, values[-1], host, *data)

    def _emit(self, context: int, node: Node, inputs: list[int], held: _Layer, ids: int, ask_f32: bool) -> int:
        address: Any = _EMIT[node.op](self._lib, context, node, inputs, held.weights.get(node.name, 0), ids)
        if node.op == "mul_mat_id":
            accumulation, source = int(node.params[0]), int(node.params[1])
            if accumulation or ask_f32:
                self._lib.ggml_prec_set_acc(address, accumulation or PREC_F32)
            if source:
                self._lib.ggml_prec_set_src(address, source, 1)
        return int(address)

    def _free_graph(self, graph: _Graph) -> None:
        self._lib.ggml_backend_buffer_free(graph.buffer)
        self._lib.ggml_free(graph.context)


def _half(lib: Library, c: int, n: Node, v: list[int], w: int, ids: int) -> Any:
    t = tensor_at(v[0])
    width = t.ne[0] // 2
    return lib.ggml_view_3d(c, v[0], width, t.ne[1], t.ne[2], t.nb[1], t.nb[2], width * 4 * int(n.params[0]))


def _glu(lib: Library, c: int, n: Node, v: list[int], w: int, ids: int) -> Any:
    function = lib.glu_ops[n.name]
    swapped, alpha, limit = n.params
    out = lib.ggml_glu(c, v[0], function, bool(swapped)) if len(v) == 1 else lib.ggml_glu_split(c, *v, function)
    # ggml's builders for the clamped forms store these two floats; writing them here serves every form alike.
    tensor_at(out).op_params[2:4] = np.array([alpha, limit], np.float32).view(np.int32).tolist()
    return out


def _expert_scale(lib: Library, c: int, n: Node, v: list[int], w: int, ids: int) -> Any:
    count, n_tokens = tensor_at(w).ne[0], tensor_at(ids).ne[1]
    rows = lib.ggml_repeat_4d(c, lib.ggml_reshape_3d(c, w, 1, count, 1), 1, count, n_tokens, 1)
    return lib.ggml_mul(c, v[0], lib.ggml_get_rows(c, rows, ids))


_EMIT: Final[dict[str, Callable[[Library, int, Node, list[int], int, int], Any]]] = {
    "mul_mat_id": lambda lib, c, n, v, w, ids: lib.ggml_mul_mat_id(c, w, v[0], ids),
    "add_id": lambda lib, c, n, v, w, ids: lib.ggml_add_id(c, v[0], w, ids),
    "expert_scale": _expert_scale,
    "half": _half,
    "unary": lambda lib, c, n, v, w, ids: lib.ggml_unary(c, v[0], lib.unary_ops[n.name]),
    "glu": _glu,
    "clamp": lambda lib, c, n, v, w, ids: lib.ggml_clamp(c, v[0], n.params[0], n.params[1]),
    "scale": lambda lib, c, n, v, w, ids: lib.ggml_scale_bias(c, v[0], n.params[0], n.params[1]),
    "mul": lambda lib, c, n, v, w, ids: lib.ggml_mul(c, v[0], v[1]),
    "add": lambda lib, c, n, v, w, ids: lib.ggml_add(c, v[0], v[1]),
    "sqr": lambda lib, c, n, v, w, ids: lib.ggml_sqr(c, v[0]),
}
