"""Routed experts on one device, computed with ggml's kernels.

A layer's held experts are stacked into one tensor for each weight (in the CPU's repacked layout where llama.cpp would
repack, which gives the same bits), and its program is turned into a ggml graph. One token's graph is built once for
each number of rows and kept: decoding repeats it for every token. Larger batches are cut into slices of bounded memory,
sorted by expert so that each expert's weights are read once a slice. Who needs other experts every moment reserves room
for some and puts one in another's place.
"""

from __future__ import annotations

import ctypes as ct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.device import Device
from backends.ggml import (
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
from backends.program import ExpertProgram
from backends.replay import replay
from capabilities.errors import Internal, PeerMistake, UnsupportedModel

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
ReadSlice = Callable[[int, int], "memoryview | bytes"]  # (expert, tensor index) -> the tensor's slice of that expert

SLICE_BYTES_MAX: Final = 24 << 20  # activations of one slice of a batch; a worker's memory is its experts plus 250 MiB
# One-token graphs are kept with their activations: 50 kB a row in a wide model, times layers, times numbers of rows.
GRAPH_BYTES_MAX: Final = 64 << 20
_USAGE_WEIGHTS: Final = 1


class ExpertBackend(Protocol):
    """Computes routed experts. Every implementation passes tests/test_expert_conformance.py."""

    name: str

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        """Take the weights of `experts` of one layer, in place of what was held of it.

        `read` is called once or twice for each (expert, tensor that the program reads). After an exception nothing of
        the layer is held.

        Raises:
            PeerMistake: ids that are not the layer's, or twice the same.
            UnsupportedModel: a program that does not fit the weights, or an operator that the device lacks.
        """

    def unload_layer(self, layer: int) -> None:
        """Free a layer's weights. One that is not held is no error."""

    def held(self, layer: int) -> frozenset[int]:
        """The experts of a layer that `compute` takes."""

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        """Row r of the result [R, n_out] is expert `experts[r]` applied to `x[tokens[r]]`; x is [T, n_in], F32.

        `ask_f32` asks the kernels to accumulate in F32 (ggml_prec_set_acc).

        Raises:
            PeerMistake: a layer or an expert that is not held, indices out of range, or rows of another width.
        """

    def close(self) -> None:
        """Free every layer."""


def places_of(layer: LayerExperts, experts: Sequence[int]) -> I32:
    """Expert id -> its place in `experts`, -1 where not held, int32 [n_expert]. PeerMistake for ids that cannot be."""
    if not experts or len(set(experts)) != len(experts) or not 0 <= min(experts) <= max(experts) < layer.n_expert:
        raise PeerMistake(f"layer {layer.layer} has no such set of experts: {list(experts)[:8]}", layer=layer.layer)
    places = np.full(layer.n_expert, -1, np.int32)
    places[list(experts)] = np.arange(len(experts), dtype=np.int32)
    return places


def check_rows(layer: LayerExperts, places: I32, x: F32, tokens: I32, experts: I32) -> I32:
    """The place of each row's expert, int32 [R]. PeerMistake if `compute` must not be called with these arguments."""
    number = layer.layer
    if x.ndim != 2 or x.shape[1] != layer.n_in or tokens.shape != experts.shape or experts.ndim != 1:
        raise PeerMistake(f"layer {number} takes rows of {layer.n_in} values and a token an expert", layer=number)
    if len(experts) == 0:
        return np.empty(0, np.int32)
    try:
        found = places[experts.view(np.uint32)]  # a negative index becomes one that is out of range
    except IndexError:
        found = None
    if found is None or tokens.view(np.uint32).max() >= len(x):
        raise PeerMistake(f"an expert or token index of layer {number} is out of range", layer=number)
    if found.min() < 0:
        missing = sorted({int(e) for e in experts[found < 0]})
        raise PeerMistake(f"experts {missing} of layer {number} are not held here", layer=number, experts=missing)
    return found


def _piece(data: memoryview | bytes, tensor: ExpertTensor) -> NDArray[np.uint8]:
    """An expert's slice of a weight."""
    piece = np.frombuffer(data, np.uint8)
    if piece.nbytes != tensor.nbytes:
        raise Internal(f"{piece.nbytes} bytes for a slice of {tensor.nbytes}")
    return piece


def not_held(layer: int) -> PeerMistake:
    return PeerMistake(f"no experts of layer {layer} are held here", layer=layer)


@dataclass
class _Layer:
    spec: LayerExperts
    program: ExpertProgram
    widths: tuple[int, ...]
    weights: dict[str, int]
    repacked: dict[str, int]  # of the weights, to the tensor of one expert that is laid over its place to write it
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
    nbytes: int
    host: bool
    x_data: int
    ids_data: int
    out_data: int


class GgmlExperts:
    """ExpertBackend over one ggml device."""

    def __init__(self, device: Device, *, repack: bool = True) -> None:
        self.name = device.name
        self.declares = ("f32", "unknown") if device.info.is_cpu else ("unknown", "unknown")  # see measure.declared_by
        self.device = device
        self._lib: Library = library()
        self._repack = repack
        self._layers: dict[int, _Layer] = {}
        self._graphs: OrderedDict[tuple[int, int, bool], _Graph] = OrderedDict()
        self._graph_bytes = 0

    # -- weights ------------------------------------------------------------------------------------------------

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self._take(layer, program, places_of(layer, experts), len(experts), partial(self._load_tensor, experts, read))

    def reserve(self, layer: LayerExperts, program: ExpertProgram) -> None:
        """Make room for all experts of a layer, in place of what was held of it. Each is held once it was `put`.

        Raises UnsupportedModel as `load_layer` does.
        """
        self._take(layer, program, np.full(layer.n_expert, -1, np.int32), layer.n_expert, lambda *_: None)

    def put(self, layer: int, expert: int, read: Callable[[int], memoryview | bytes]) -> None:
        """Hold this expert of a layer that was reserved, in place of what was put there before.

        `read` gives the slice of each tensor that the program reads, by its index. After an exception of it the expert
        is not held.
        """
        held = self._layers[layer]
        held.local[expert] = -1
        for index, tensor in enumerate(held.spec.tensors):
            if tensor.name in held.weights:
                self._write(held, tensor, expert, _piece(read(index), tensor))
        held.local[expert] = expert

    def _take(
        self, layer: LayerExperts, program: ExpertProgram, local: I32, count: int, fill: Callable[[_Layer, int], None]
    ) -> None:
        """Hold a layer with room for `count` experts; `fill` writes one of its tensors."""
        self.unload_layer(layer.layer)
        widths = program.check_shapes(layer.n_in, layer.n_out, {t.name: t.shape for t in layer.tensors})
        held = _Layer(layer, program, widths, {}, {}, [], local)
        try:
            for index, tensor in enumerate(layer.tensors):
                if tensor.name in program.weights:
                    self._make_room(held, tensor, count)
                    fill(held, index)
            self._check_operators(held)
        except BaseException:
            self._free(held)
            raise
        self._layers[layer.layer] = held

    def _make_room(self, held: _Layer, tensor: ExpertTensor, count: int) -> None:
        lib = self._lib
        # Where llama.cpp would repack the whole layer's weight, a share of it is repacked too.
        whole_shape = (*tensor.shape, held.spec.n_expert)
        repacked = self.device.repack_type(tensor.type, whole_shape) if self._repack and len(whole_shape) == 3 else 0
        # ggml repacks only what has three dimensions, and a tensor of one expert has two: there is room for another,
        # for the plain layout's kernel need not give the same bits.
        context = lib.ggml_init(InitParams(2 * lib.ggml_tensor_overhead() + 1024, None, True))
        address = self._new_tensor(context, tensor, max(2, count) if repacked else count)
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
        if repacked:  # ggml repacks a tensor as a whole, row after row
            over, whole = self._new_tensor(context, tensor, 1), tensor_at(address)
            tensor_at(over).buffer, tensor_at(over).extra = whole.buffer, whole.extra
            held.repacked[tensor.name] = over

    def _load_tensor(self, experts: Sequence[int], read: ReadSlice, held: _Layer, index: int) -> None:
        tensor = held.spec.tensors[index]
        for place, expert in enumerate(experts):
            self._write(held, tensor, place, _piece(read(expert, index), tensor))

    def _write(self, held: _Layer, tensor: ExpertTensor, place: int, piece: NDArray[np.uint8]) -> None:
        """One expert's slice of a weight."""
        lib, address = self._lib, held.weights[tensor.name]
        over = held.repacked.get(tensor.name)
        if over is None:
            lib.ggml_backend_tensor_set(address, piece.ctypes.data, place * tensor.nbytes, tensor.nbytes)
            return
        tensor_at(over).data = tensor_at(address).data + place * tensor.nbytes
        lib.ggml_backend_tensor_set(over, piece.ctypes.data, 0, tensor.nbytes)

    def _check_operators(self, held: _Layer) -> None:
        """Build the layer's graph once: ggml ends the process over an operator that its device does not have."""
        lib = self._lib
        context, _, _, values = self._nodes(held, 1, 1, False)
        missing = [a for a in values[1:] if not lib.ggml_backend_dev_supports_op(self.device.handle, a)]
        names = sorted({lib.ggml_op_desc(address).decode() for address in missing})
        lib.ggml_free(context)
        if names:
            raise UnsupportedModel(
                f"{self.name} lacks {', '.join(names)} for the experts of layer {held.spec.layer}",
                hint="Set compute.device to CPU in the configuration.",
            )

    def _new_tensor(self, context: int, tensor: ExpertTensor, count: int) -> int:
        lib = self._lib
        makers = (lib.ggml_new_tensor_1d, lib.ggml_new_tensor_2d, lib.ggml_new_tensor_3d)
        return int(makers[len(tensor.shape)](context, tensor.type, *tensor.shape, count))

    def unload_layer(self, layer: int) -> None:
        held = self._layers.pop(layer, None)
        if held is None:
            return
        for key in [k for k in self._graphs if k[0] == layer]:
            self._drop_graph(key)
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
            raise not_held(layer)
        ids = check_rows(held.spec, held.local, x, tokens, experts)
        if len(ids) == 0:
            return np.empty((0, held.spec.n_out), np.float32)
        # ggml's repacked products have room for each expert once a token, and write beyond it if it comes twice.
        if len(x) == 1 and len(ids) <= self._slice_rows(held) and len(set(ids.tolist())) == len(ids):
            return self._one_token(held, x, ids, ask_f32)
        return self._many_tokens(held, x, tokens, ids, ask_f32)

    def _one_token(self, held: _Layer, x: F32, ids: I32, ask_f32: bool) -> F32:
        key = (held.spec.layer, len(ids), ask_f32)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._build(held, len(ids), 1, ask_f32)
            self._graph_bytes += graph.nbytes
            while self._graph_bytes > GRAPH_BYTES_MAX and len(self._graphs) > 1:
                self._drop_graph(next(iter(self._graphs)))
        else:
            self._graphs.move_to_end(key)
        return self._run(graph, np.ascontiguousarray(x, np.float32), ids, held.spec.n_out)

    def _many_tokens(self, held: _Layer, x: F32, tokens: I32, ids: I32, ask_f32: bool) -> F32:
        rows, spec = len(ids), held.spec
        order = np.argsort(ids, kind="stable")
        slice_rows = self._slice_rows(held)
        result = np.empty((rows, spec.n_out), np.float32)
        for start in range(0, rows, slice_rows):
            part = order[start : start + slice_rows]
            graph = self._build(held, 1, len(part), ask_f32)
            try:
                activations = np.ascontiguousarray(x[tokens[part]], np.float32)
                result[part] = self._run(graph, activations, ids[part], spec.n_out)
            finally:
                self._free_graph(graph)
        return result

    @staticmethod
    def _slice_rows(held: _Layer) -> int:
        return max(1, SLICE_BYTES_MAX // (4 * (sum(held.widths) + held.spec.n_in)))

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
        lib = self._lib
        context, graph, ids, values = self._nodes(held, n_used, n_tokens, ask_f32)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, self.device.buffer_type)
        if not buffer:
            lib.ggml_free(context)
            raise Internal(f"{self.name} has no memory for a batch of {n_tokens} rows")
        nbytes = lib.ggml_backend_buffer_get_size(buffer)
        host = lib.ggml_backend_buffer_is_host(buffer)
        data = [tensor_at(a).data for a in (values[0], ids, values[-1])]
        return _Graph(context, buffer, graph, values[0], ids, values[-1], nbytes, host, *data)

    def _nodes(self, held: _Layer, n_used: int, n_tokens: int, ask_f32: bool) -> tuple[int, int, int, list[int]]:
        """(context, graph, ids, the value of each of the program's nodes), without memory yet."""
        lib, nodes = self._lib, held.program.nodes
        room = (5 * len(nodes) + 8) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(8 * len(nodes), False)
        context = lib.ggml_init(InitParams(room, None, True))
        x = lib.ggml_new_tensor_3d(context, TYPE_F32, held.spec.n_in, 1, n_tokens)
        ids = lib.ggml_new_tensor_2d(context, TYPE_I32, n_used, n_tokens)
        values = replay(lib, context, held.program, held.weights, x, ids, ask_f32=ask_f32)
        graph = lib.ggml_new_graph_custom(context, 8 * len(nodes), False)
        lib.ggml_build_forward_expand(graph, values[-1])
        return context, graph, ids, values

    def _drop_graph(self, key: tuple[int, int, bool]) -> None:
        graph = self._graphs.pop(key)
        self._graph_bytes -= graph.nbytes
        self._free_graph(graph)

    def _free_graph(self, graph: _Graph) -> None:
        self._lib.ggml_backend_buffer_free(graph.buffer)
        self._lib.ggml_free(graph.context)
