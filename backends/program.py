"""What one expert computes, as a short program that any backend can run.

llama.cpp builds the expert block differently for each architecture. The leader captures the block from llama.cpp's own
graph once (capture.py) and writes it down in this portable form; workers, which have no trunk, replay it over the
experts that they hold. A program is a list of nodes; node 0 is the input row `x`; the last node is the result. All
values are F32 rows: a program says what happens to one (token, expert) row, and backends batch rows as they like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from capabilities.errors import PeerMistake, UnsupportedModel

NODES_MAX: Final = 64  # the longest captured block has 14
NAME_MAX: Final = 64

# operator -> (inputs at least, inputs at most, names a weight of the expert)
OPERATORS: Final[dict[str, tuple[int, int, bool]]] = {
    "x": (0, 0, False),
    "mul_mat_id": (1, 1, True),  # y = W_e a; params: accumulation, source precision (ggml_prec), 0 = not asked
    "add_id": (1, 1, True),  # y = a + b_e
    "expert_scale": (1, 1, True),  # y = a * s_e, s_e a scalar of the expert
    "half": (1, 1, False),  # params: 0 first half of the row, 1 second half
    "unary": (1, 1, False),  # name: ggml's name of the function
    "glu": (1, 2, False),  # name: ggml's name; params: swapped, alpha, limit
    "clamp": (1, 1, False),  # params: low, high
    "scale": (1, 1, False),  # y = a * params[0] + params[1]
    "mul": (2, 2, False),
    "add": (2, 2, False),
    "sqr": (1, 1, False),
}
UNARY: Final = frozenset(
    (
        "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "GELU_ERF", "SILU",
        "HARDSWISH", "HARDSIGMOID", "EXP", "SOFTPLUS",
    )
)  # fmt: skip
GLU: Final = frozenset(("REGLU", "GEGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU", "SWIGLU_OAI", "SWIGLU_CLAMP"))
_PARAM_COUNT: Final = {"mul_mat_id": 2, "half": 1, "glu": 3, "clamp": 2, "scale": 2}
_PRECISION_MAX: Final = 255  # ggml_prec ends at 40


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `inputs` are indices of earlier nodes; `name` is a weight or a function, see OPERATORS."""

    op: str
    inputs: tuple[int, ...] = ()
    name: str = ""
    params: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertProgram:
    """Nodes in an order in which each comes after its inputs. `from_bytes` checks, the constructor trusts."""

    nodes: tuple[Node, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the tensors that the program reads, without the `blk.N.` prefix, in order of first use."""
        return tuple(dict.fromkeys(n.name for n in self.nodes if OPERATORS[n.op][2]))

    def first_matmul_weights(self) -> tuple[str, ...]:
        """Weights that multiply `x` itself: their types decide whether x may travel quantised."""
        return tuple(n.name for n in self.nodes if n.op == "mul_mat_id" and n.inputs == (0,))

    def x_is_only_multiplied(self) -> bool:
        """True if `x` is read by matrix products alone, so that its quantised form says everything."""
        return all(n.op == "mul_mat_id" for n in self.nodes if 0 in n.inputs and n.op != "x")

    def to_bytes(self) -> bytes:
        """Equal programs give equal bytes: a manifest and a trunk are compared by them."""
        packed: bytes = msgpack.packb([[n.op, list(n.inputs), n.name, list(n.params)] for n in self.nodes])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> ExpertProgram:
        """Decode and check.

        Raises:
            PeerMistake: the bytes are no program, or one that a backend must not run.
        """
        try:
            rows: Any = msgpack.unpackb(data, max_array_len=NODES_MAX, max_str_len=NAME_MAX)
            nodes = tuple(_node(index, row) for index, row in enumerate(rows))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException) as error:
            raise PeerMistake(f"this is no expert program: {error}") from None
        if len(nodes) < 2 or nodes[0].op != "x":
            raise PeerMistake("an expert program starts at x and computes something")
        return cls(nodes)

    def check_shapes(self, n_in: int, n_out: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The width of each node's row, given one expert's tensor shapes (ggml order, without the expert dimension).

        Backends trust a program that passes: ggml ends the process over operands that do not fit, and a peer may have
        written this one.

        Raises:
            UnsupportedModel: a weight is missing or the rows do not fit together.
        """
        rows: list[_Rows] = []
        for node in self.nodes:
            weight = OPERATORS[node.op][2]
            if weight and node.name not in shapes:
                raise UnsupportedModel(f"the expert program reads {node.name}, which the model does not have")
            rows.append(_rows(node, [rows[i] for i in node.inputs], n_in, shapes.get(node.name, ())))
        if rows[-1].width != n_out or not rows[-1].of_experts or not rows[-1].dense:
            raise UnsupportedModel(
                f"the expert program ends with {rows[-1].width} values a row, not {n_out} of an expert"
            )
        return tuple(r.width for r in rows)


def _node(index: int, row: Any) -> Node:
    op, inputs, name, params = row
    low, high, _ = OPERATORS[op]
    if not isinstance(name, str):
        raise ValueError("a name that is no text")
    node = Node(op, tuple(int(i) for i in inputs), name, tuple(float(p) for p in params))
    if (op == "x") != (index == 0) or not low <= len(node.inputs) <= high:
        raise ValueError(f"operator {op} with {len(node.inputs)} inputs at place {index}")
    if any(not 0 <= i < index for i in node.inputs):
        raise ValueError("an input that does not come before its node")
    if len(node.params) != _PARAM_COUNT.get(op, 0) or any(math.isnan(p) for p in node.params):
        raise ValueError(f"wrong parameters for {op}")
    switches = {"half": node.params, "glu": node.params[:1]}.get(op, ())
    precisions = node.params if op == "mul_mat_id" else ()
    if not set(switches) <= {0.0, 1.0} or not set(precisions) <= set(range(_PRECISION_MAX + 1)):
        raise ValueError(f"impossible parameters for {op}")
    allowed = {"unary": UNARY, "glu": GLU}.get(op)
    if allowed is not None and node.name not in allowed:
        raise ValueError(f"unknown function {node.name[:NAME_MAX]}")
    return node


@dataclass(frozen=True, slots=True)
class _Rows:
    """What kernels take for granted of a node's rows.

    width: values a row. of_experts: whether there is a row for each expert of a token, or one for all, like x.
    dense: whether a row begins where the one before it ends, which halves do not.
    """

    width: int
    of_experts: bool
    dense: bool = True


def _rows(node: Node, inputs: list[_Rows], n_in: int, shape: tuple[int, ...]) -> _Rows:
    def need(fine: bool) -> None:
        if not fine:
            widths = [r.width for r in inputs]
            raise UnsupportedModel(f"{node.op} {node.name} does not fit rows of {widths} with a weight of {shape}")

    if node.op == "x":
        return _Rows(n_in, of_experts=False)
    first, second = inputs[0], inputs[-1]
    match node.op:
        case "mul_mat_id":
            need(len(shape) == 2 and shape[0] == first.width)
            return _Rows(shape[1], of_experts=True)
        case "add_id":
            need(shape == (first.width,) and first.of_experts)
        case "expert_scale":
            need(shape == () and first.of_experts)
        case "half":
            need(first.width % 2 == 0)
            return _Rows(first.width // 2, first.of_experts, dense=False)
        case "glu" if len(inputs) == 1:
            need(first.width % 2 == 0)
            return _Rows(first.width // 2, first.of_experts)
        case "glu":
            need(first.width == second.width and first.of_experts == second.of_experts)
        case "mul" | "add":  # the second may be one row for all experts, the first not
            need(first.width == second.width and first.of_experts >= second.of_experts)
        case "scale":
            need(first.dense)
        case _:
            pass
    return _Rows(first.width, first.of_experts)
