"""Stops llama.cpp at each MoE layer, through its public eval callback.

llama.cpp asks about every node of its graph, then shows the wanted ones once they are computed. Two matter in a layer:
the *dispatch point*, its first product over routed experts (activations and router's ids lie in its sources), and the
*collect point*, the node that carries the experts' outputs before the router's weights apply. `LearningHook` finds the
collect points and captures the expert programs in a first decode; `ServingHook` hands activations to an executor and
overwrites the collect points with what it returns, so that llama.cpp's own graph does the combine. `PartialSumHook`
hands over the router's weights too, and overwrites the weighted rows with each token's total.

An exception must not cross the C boundary (llama.cpp would go on with stale numbers): it is kept, the rest of the graph
is stopped, and `LlamaModel.decode` raises it.
"""

from __future__ import annotations

import ctypes as ct
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.capture import OtherBlockError, capture_program, expert_product
from backends.ggml import OP_NONE, Tensor, library, read_tensor, tensor_at, write_tensor
from backends.program import ExpertProgram
from backends.sum_point import SumPoint, SumSearch
from capabilities.errors import Internal, UnsupportedModel

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_COLLECT: Final = re.compile(rb"ffn_moe_down(?:_scaled|_biased)?-(\d+)")
_OP_OFFSET: Final = Tensor.op.offset


class ExpertExecutor(Protocol):
    """Where the experts of a layer are computed. Called from the thread that decodes; an exception aborts the step."""

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        """Take activations x [T, n_in] and the router's choice ids [T, K] of one layer."""

    def collect(self, layer: int) -> F32:
        """The experts' outputs [T, K, n_out] for the last dispatch of this layer, C-contiguous."""


class SumExecutor(Protocol):
    """The same for partial sums: whoever computes experts also weights and adds their rows."""

    def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
        """Take activations x [T, n_in], the router's choice ids [T, K] and its weights [T, K] of one layer."""

    def collect_sum(self, layer: int) -> F32:
        """Each token's total [T, n_out] for the last dispatch of this layer."""


@dataclass(frozen=True, slots=True)
class LearnedLayer:
    """A MoE layer as llama.cpp runs it.

    `occurrence` tells which of the nodes called `collect` is the collect point, counted from 0 after the layer's
    dispatch point: an architecture may run a second block, of other experts, under the same names. Without a
    `sum_point` the layer cannot be served by partial sums.
    """

    layer: int
    collect: bytes
    occurrence: int
    program: ExpertProgram
    n_used: int
    n_in: int
    n_out: int
    sum_point: SumPoint | None = None


class Hook:
    """Base of both hooks: the C callback, and the exception that it kept."""

    def __init__(self) -> None:
        self._lib = library()
        self._wanted_ops = frozenset(
            number for number, name in self._lib.op_names.items() if name in ("MUL_MAT_ID", "ADD_ID", "MUL")
        )
        self.error: BaseException | None = None
        self.timed = False  # measuring costs about a tenth of a millisecond a token
        self.python_s = 0.0  # time spent in the callback while `timed`: everything that is not llama.cpp

    def callback(self, node: int, ask: bool) -> bool:
        """llama.cpp's eval callback: (tensor address, ask) -> wanted, or go on."""
        if not self.timed:
            return self._callback(node, ask)
        started = time.perf_counter()
        wanted = self._callback(node, ask)
        self.python_s += time.perf_counter() - started
        return wanted

    def _callback(self, node: int, ask: bool) -> bool:
        try:
            if self.error is not None:
                return ask  # stop each remaining split at its first node
            if ask:
                return ct.c_int.from_address(node + _OP_OFFSET).value in self._wanted_ops and self.wants(node)
            self.computed(node)
        except BaseException as error:
            self.error = error
            return ask
        return True

    def begin(self) -> None:
        """Called before each decode."""
        self.error = None

    def wants(self, node: int) -> bool:
        raise NotImplementedError

    def computed(self, node: int) -> None:
        raise NotImplementedError

    def _routed(self, tensor: Tensor) -> tuple[F32, I32]:
        """Activations [T, n_in] and ids [T, K] of a product over routed experts."""
        x = read_tensor(self._lib, tensor.src[1], np.float32)[0]
        ids = read_tensor(self._lib, tensor.src[2], np.int32)[0, 0]
        return x[:, 0, :], ids


class LearningHook(Hook):
    """Finds collect points and captures programs. The values that llama.cpp computes are left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, LearnedLayer] = {}
        self.refused: dict[int, UnsupportedModel] = {}
        self._points: dict[int, tuple[int, int]] = {}  # layer -> addresses of x and ids
        self._seen: dict[bytes, int] = {}  # name -> nodes of that name since their layer's dispatch point, less one
        self._wanted_ops = frozenset(self._lib.op_names)
        self._asked: dict[bytes, int] = {}  # the last node of each name
        self._before: dict[bytes, int] = {}  # the same at the last dispatch point
        self._after: set[bytes] = set()  # names of the nodes since then
        self._search: tuple[int, SumSearch] | None = None  # of the layer of the last collect point

    def begin(self) -> None:
        super().begin()
        self._points.clear()
        self._seen.clear()
        self._asked.clear()
        self._search = None

    def wants(self, node: int) -> bool:
        tensor = tensor_at(node)
        self._look_for_sum(node, tensor)
        self._asked[tensor.name] = node
        self._after.add(tensor.name)
        return _COLLECT.fullmatch(tensor.name) is not None or expert_product(self._lib, tensor) >= 0

    def computed(self, node: int) -> None:
        tensor = tensor_at(node)
        layer = expert_product(self._lib, tensor)
        if layer >= 0 and layer not in self._points:
            self._points[layer] = tensor.src[1], tensor.src[2]
            self._before, self._after = dict(self._asked), set()
        if (found := _COLLECT.fullmatch(tensor.name)) and int(found[1]) in self._points:
            key = tensor.name
            self._seen[key] = self._seen.get(key, -1) + 1
            self._learn(int(found[1]), node, tensor, self._seen[key])

    def _learn(self, layer: int, node: int, tensor: Tensor, occurrence: int) -> None:
        x, ids = self._points[layer]
        x_shape, ids_shape = list(tensor_at(x).ne), list(tensor_at(ids).ne)
        if 0 in x_shape or 0 in ids_shape:
            return
        try:
            if x_shape[1] != 1:
                raise UnsupportedModel(f"layer {layer} applies the router's weights before its experts, not after them")
            program = capture_program(self._lib, layer, node, x, ids)
        except OtherBlockError:
            return
        except UnsupportedModel as error:
            self.refused[layer] = error
            return
        self.refused.pop(layer, None)
        self.layers[layer] = LearnedLayer(
            layer, tensor.name, occurrence, program, ids_shape[0], x_shape[0], tensor.ne[0]
        )
        self._search = layer, SumSearch(self._lib, node, self._before, self._after)

    def _look_for_sum(self, node: int, tensor: Tensor) -> None:
        if self._search is not None:
            layer, search = self._search
            search.see(node, tensor)
            if search.point != self.layers[layer].sum_point:
                self.layers[layer] = replace(self.layers[layer], sum_point=search.point)


@dataclass(slots=True)
class _Pending:
    rows: int
    passed: int = 0
    op: int = OP_NONE  # the collect point's, while it is taken away


class ServingHook(Hook):
    """Hands each MoE layer to an executor.

    llama.cpp computes nothing at the collect points, since they are overwritten: in a trunk that would be thousands of
    products of one number each. They lose their operator until they are shown, as llama.cpp uses a graph again.
    """

    _overwrites = True

    def __init__(self, layers: Iterable[LearnedLayer], executor: ExpertExecutor) -> None:
        super().__init__()
        self._wanted_ops |= {OP_NONE}  # should llama.cpp fail in between, the operator is gone for good
        self.executor = executor
        self._layers = {learned.layer: learned for learned in layers}
        self._collect = {learned.collect: learned for learned in self._layers.values()}
        self._pending: dict[int, _Pending] = {}  # layers between their dispatch and their collect point
        self.dispatched: dict[int, int] = {}  # layer -> rows dispatched since the hook was made

    def begin(self) -> None:
        super().begin()
        self._pending.clear()

    def wants(self, node: int) -> bool:
        tensor = tensor_at(node)
        if (learned := self._collect.get(tensor.name)) and (pending := self._pending.get(learned.layer)):
            pending.passed += 1
            if pending.passed <= learned.occurrence:
                return False
            if self._overwrites:
                pending.op, tensor.op = tensor.op, OP_NONE
            return True
        layer = expert_product(self._lib, tensor)
        return layer in self._layers and layer not in self._pending

    def computed(self, node: int) -> None:
        tensor = tensor_at(node)
        if (learned := self._collect.get(tensor.name)) and learned.layer in self._pending:
            if self._shown(learned.layer, tensor):
                write_tensor(self._lib, node, self.executor.collect(learned.layer))
            return
        layer = expert_product(self._lib, tensor)
        x, ids = self._routed(tensor)
        self._pending[layer] = _Pending(len(x))
        if len(x):  # the last layer has no rows where no logits are wanted
            self.dispatched[layer] = self.dispatched.get(layer, 0) + len(x)
            self.executor.dispatch(layer, x, ids)

    def _shown(self, layer: int, tensor: Tensor) -> int:
        """The rows of a layer whose collect point is shown; that gets its operator back."""
        pending = self._pending.pop(layer)
        if self._overwrites:
            tensor.op = pending.op
        return pending.rows


class PartialSumHook(ServingHook):
    """Hands each MoE layer, with the router's weights, to an executor that returns each token's total.

    Raises:
        UnsupportedModel: a layer has no sum point.
    """

    def __init__(self, layers: Iterable[LearnedLayer], executor: SumExecutor) -> None:
        points = {learned.layer: (learned, sum_point_of(learned)) for learned in layers}
        super().__init__(
            (replace(learned, collect=point.weighted, occurrence=0) for learned, point in points.values()), _Nowhere()
        )
        self._totals = executor
        self._wanted_ops |= {point.weights_op for _, point in points.values()}
        self._weights_of = {(point.weights, point.weights_op): layer for layer, (_, point) in points.items()}
        self._weights: dict[int, int] = {}  # layer -> address of its weights in this graph

    def wants(self, node: int) -> bool:
        tensor = tensor_at(node)
        layer = self._weights_of.get((tensor.name, tensor.op))
        if layer is not None:
            self._weights[layer] = node  # read at the dispatch point: their memory is kept until the rows are weighted
            return False
        return super().wants(node)

    def computed(self, node: int) -> None:
        tensor = tensor_at(node)
        if (learned := self._collect.get(tensor.name)) and learned.layer in self._pending:
            if rows := self._shown(learned.layer, tensor):
                out = np.zeros((rows, tensor.ne[1], tensor.ne[0]), np.float32)
                out[:, 0] = _checked(self._totals.collect_sum(learned.layer), (rows, tensor.ne[0]))
                write_tensor(self._lib, node, out)
            return
        layer = expert_product(self._lib, tensor)
        x, ids = self._routed(tensor)
        self._pending[layer] = _Pending(len(x))
        if len(x):
            self.dispatched[layer] = self.dispatched.get(layer, 0) + len(x)
            address = self._weights.get(layer)
            if address is None:
                raise Internal(f"llama.cpp's graph has no weights before the experts of layer {layer}")
            weights = read_tensor(self._lib, address, np.float32).reshape(ids.shape)
            self._totals.dispatch_sum(layer, x, ids, weights)


def sum_point_of(learned: LearnedLayer) -> SumPoint:
    """Where a layer's rows are weighted and added; UnsupportedModel if that is nowhere, or not all that is done."""
    if learned.sum_point is None:
        raise UnsupportedModel(
            f"layer {learned.layer} does something else than weight its experts' rows and add them up: no partial sums",
            hint='Set leader.combine = "router-order" in the configuration.',
            layer=learned.layer,
        )
    return learned.sum_point


def _checked(totals: F32, shape: tuple[int, int]) -> F32:
    if totals.dtype != np.float32 or totals.shape != shape:
        raise ValueError(f"totals of {totals.dtype} {totals.shape}, not float32 {shape}")
    return totals


class ObservingHook(ServingHook):
    """Leaves a whole model's values as they are and keeps each layer's expert outputs, for comparisons."""

    _overwrites = False

    def __init__(self, layers: Iterable[LearnedLayer]) -> None:
        super().__init__(layers, _Nowhere())
        self.rows: dict[int, list[F32]] = {}  # layer -> outputs [T, K, n_out] of each ubatch

    def computed(self, node: int) -> None:
        tensor = tensor_at(node)
        if (learned := self._collect.get(tensor.name)) and learned.layer in self._pending:
            if self._shown(learned.layer, tensor):
                self.rows.setdefault(learned.layer, []).append(read_tensor(self._lib, node, np.float32)[0])
            return
        super().computed(node)


class _Nowhere:
    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        pass

    def collect(self, layer: int) -> F32:
        raise AssertionError("an observer collects nothing")
