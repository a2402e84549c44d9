"""Captures one MoE layer's expert block from llama.cpp's graph, as an ExpertProgram.

The walk starts at the node that carries the experts' outputs and follows sources back to the block's input (the
activations that the first expert product reads) and to the router's ids. Operators come from an explicit list; any
other is refused by name, so that a new kind of block is an error message and never a silently different function.
"""

from __future__ import annotations

import ctypes as ct
import re
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from backends.ggml import Library, Tensor, tensor_at
from backends.program import NODES_MAX, ExpertProgram, Node
from backends.trunk_file import is_expert_tensor
from capabilities.errors import UnsupportedModel

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)")


def split_name(name: str) -> tuple[int, str]:
    """`blk.7.ffn_up_exps.weight` -> (7, "ffn_up_exps.weight"); (-1, name) for any other name."""
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else (-1, name)


def expert_product(lib: Library, tensor: Tensor) -> int:
    """The layer of a MUL_MAT_ID over routed experts, or -1 for every other tensor."""
    if lib.op_names.get(tensor.op) != "MUL_MAT_ID" or not tensor.src[0]:
        return -1
    name = tensor_at(tensor.src[0]).name.decode(errors="replace")
    return split_name(name)[0] if is_expert_tensor(name) else -1


class OtherBlockError(Exception):
    """The node's sources do not lead to the layer's routed experts: another block with the same names."""


@dataclass
class _Walk:
    lib: Library
    layer: int
    x: int
    ids: int
    nodes: list[Node] = field(default_factory=lambda: [Node("x")])
    seen: dict[int, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        if len(self.nodes) >= NODES_MAX:
            raise UnsupportedModel(f"the expert block of layer {self.layer} has over {NODES_MAX} operators")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def visit(self, address: int) -> int:
        """Index of the node that computes the tensor at `address`."""
        if address == self.x:
            return 0
        if address not in self.seen:
            self.seen[address] = self._translate(tensor_at(address))
        return self.seen[address]

    def weight(self, address: int) -> str:
        name = tensor_at(address).name.decode(errors="replace")
        layer, short = split_name(name)
        if layer != self.layer or not is_expert_tensor(name):
            raise OtherBlockError(name)
        return short

    def need_ids(self, address: int) -> None:
        if address != self.ids:
            raise UnsupportedModel(f"the expert block of layer {self.layer} uses two lists of expert ids")

    def _translate(self, t: Tensor) -> int:
        op = self.lib.op_names.get(t.op, f"#{t.op}")
        match op:
            case "MUL_MAT_ID":
                name = self.weight(t.src[0])
                self.need_ids(t.src[2])
                precision = (float(t.op_params[0]), float(t.op_params[3]))
                return self.add(Node("mul_mat_id", (self.visit(t.src[1]),), name, precision))
            case "ADD_ID":
                self.need_ids(t.src[2])
                return self.add(Node("add_id", (self.visit(t.src[0]),), self.weight(t.src[1])))
            case "MUL" if (scale := self._expert_scale(t.src[1])) is not None:
                return self.add(Node("expert_scale", (self.visit(t.src[0]),), scale))
            case "MUL" | "ADD":
                return self.add(Node(op.lower(), (self.visit(t.src[0]), self.visit(t.src[1]))))
            case "VIEW":
                return self._half(t)
            case "GLU":
                sources = tuple(self.visit(t.src[i]) for i in range(2) if t.src[i])
                floats = _floats(t)
                return self.add(
                    Node("glu", sources, self._function(t), (float(t.op_params[1]), float(floats[2]), float(floats[3])))
                )
            case "UNARY":
                return self.add(Node("unary", (self.visit(t.src[0]),), self._function(t)))
            case "CLAMP" | "SCALE":
                return self.add(Node(op.lower(), (self.visit(t.src[0]),), "", tuple(float(f) for f in _floats(t)[:2])))
            case "SQR":
                return self.add(Node("sqr", (self.visit(t.src[0]),)))
            case "NONE":
                raise OtherBlockError(t.name.decode(errors="replace"))
            case _:
                raise UnsupportedModel(f"the expert block of layer {self.layer} uses {op}, which is not replayed")

    def _function(self, t: Tensor) -> str:
        return str(self.lib.ggml_op_desc(_address(t)).decode())

    def _half(self, t: Tensor) -> int:
        """One half of a merged gate_up projection."""
        source = tensor_at(t.src[0])
        halves = {0: 0.0, t.ne[0] * 4: 1.0}
        rows_fit = list(t.ne[1:]) == list(source.ne[1:]) and list(t.nb[1:]) == list(source.nb[1:])
        if t.ne[0] * 2 != source.ne[0] or not rows_fit or t.view_offs - source.view_offs not in halves:
            raise UnsupportedModel(f"the expert block of layer {self.layer} takes a view that is no half of a row")
        return self.add(Node("half", (self.visit(t.src[0]),), "", (halves[t.view_offs - source.view_offs],)))

    def _expert_scale(self, address: int) -> str | None:
        """Name of the scale tensor if `address` is get_rows(repeat(reshape(scale)), ids), else None."""
        chain = []
        for op in ("GET_ROWS", "REPEAT", "RESHAPE"):
            t = tensor_at(address)
            if self.lib.op_names.get(t.op) != op:
                return None
            chain.append(t)
            address = t.src[0]
        self.need_ids(chain[0].src[1])
        return self.weight(address)


def _address(t: Tensor) -> int:
    return ct.addressof(t)


def _floats(t: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(list(t.op_params), np.int32).view(np.float32)


def capture_program(lib: Library, layer: int, collect: int, x: int, ids: int) -> ExpertProgram:
    """The program that leads from `x` to the tensor `collect` of a layer. All are tensor addresses.

    Raises:
        UnsupportedModel: an operator or a structure that is not replayed, named.
        OtherBlockError: `collect` belongs to another block of the layer.
    """
    walk = _Walk(lib, layer, x, ids)
    walk.visit(collect)
    return ExpertProgram(tuple(walk.nodes))
