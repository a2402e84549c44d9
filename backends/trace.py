"""What passes through a decode, layer by layer: the residual, and the experts that each router chose.

llama.cpp names the residual after a layer `l_out-N` and the router's order of experts `ffn_moe_argsort-N`. A
TracingHook reads both, over any other hook or none. It can also write the order: then the router of each layer chooses
what it is told to and weighs it by its own probabilities. So two models can be compared with their routing pinned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from backends.ggml import read_tensor, tensor_at, write_tensor
from backends.moe_hook import F32, I32, Hook, LearnedLayer
from capabilities.errors import UnsupportedModel

_RESIDUAL: Final = re.compile(rb"l_out-(\d+)")
_ORDER: Final = re.compile(rb"ffn_moe_argsort-(\d+)")


class TracingHook(Hook):
    """Keeps what the last decode showed.

    residuals: layer -> [T, n_embd]. routes: layer -> chosen experts [T, K], the likeliest first.
    """

    def __init__(self, layers: Iterable[LearnedLayer], inner: Hook | None = None) -> None:
        super().__init__()
        self.residuals: dict[int, F32] = {}
        self.routes: dict[int, I32] = {}
        self.pinned: Mapping[int, I32] | None = None  # layer -> the experts [T, K] that the next decodes choose
        self._inner = inner
        self._n_used = {learned.layer: learned.n_used for learned in layers}
        own = frozenset(number for number, name in self._lib.op_names.items() if name in ("ADD", "ARGSORT"))
        self._of_inner = frozenset() if inner is None else inner._wanted_ops
        self._wanted_ops = own | self._of_inner

    def begin(self) -> None:
        super().begin()
        self.residuals.clear()
        self.routes.clear()
        if self._inner is not None:
            self._inner.begin()

    def wants(self, node: int) -> bool:
        tensor = tensor_at(node)
        if _RESIDUAL.fullmatch(tensor.name) or self._router_of(tensor.name) >= 0:
            return True
        return self._inner is not None and tensor.op in self._of_inner and self._inner.wants(node)

    def computed(self, node: int) -> None:
        tensor = tensor_at(node)
        if found := _RESIDUAL.fullmatch(tensor.name):
            self.residuals[int(found[1])] = read_tensor(self._lib, node, np.float32)[0, 0]
        elif (layer := self._router_of(tensor.name)) >= 0:
            self._routed_at(layer, node)
        elif self._inner is not None:
            self._inner.computed(node)

    def _router_of(self, name: bytes) -> int:
        """The layer whose experts a node puts in order, -1 if none: some architectures run a second router later."""
        found = _ORDER.fullmatch(name)
        layer = int(found[1]) if found else -1
        return layer if layer in self._n_used and layer not in self.routes else -1

    def _routed_at(self, layer: int, node: int) -> None:
        order = read_tensor(self._lib, node, np.int32)[0, 0]
        n_used = self._n_used[layer]
        if self.pinned is not None:
            wanted = self.pinned[layer]
            for row, chosen in zip(order, wanted, strict=True):
                rest = row[~np.isin(row, chosen)]
                row[:n_used], row[n_used:] = chosen, rest
            write_tensor(self._lib, node, np.ascontiguousarray(order))
        self.routes[layer] = order[:, :n_used].copy()

    def check(self) -> None:
        """After a decode of every layer's rows: UnsupportedModel if this architecture names its nodes otherwise."""
        if not self.residuals or set(self.routes) != set(self._n_used):
            raise UnsupportedModel(
                "this architecture's layers and routers cannot be traced: llama.cpp names their nodes otherwise",
                hint="Compare at the levels op, generation and task.",
            )
