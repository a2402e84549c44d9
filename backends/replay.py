"""An ExpertProgram as a ggml graph: the counterpart of capture.py.

ggml checks its operators' operands by ending the process. Nothing here checks anything: a program that
`ExpertProgram.check_shapes` has accepted for the layer breaks none of those rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from backends.ggml import PREC_F32, Library, tensor_at
from backends.program import ExpertProgram, Node


def replay(
    lib: Library,
    context: int,
    program: ExpertProgram,
    weights: Mapping[str, int],
    x: int,
    ids: int,
    *,
    ask_f32: bool = False,
) -> list[int]:
    """The tensor that each node of a program computes; all are addresses.

    Args:
        context: the ggml context that the tensors are made in, without memory.
        weights: the experts' stacked tensors by their names in the program, the expert outermost.
        x: F32 [n_in, 1, n_tokens].
        ids: I32 [n_used, n_tokens], indices into the stacks.
        ask_f32: whether products ask to be accumulated in F32.
    """
    values = [x]
    for node in program.nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        out: Any = _EMIT[node.op](lib, context, node, inputs, weights.get(node.name, 0), ids)
        if node.op == "mul_mat_id":
            accumulation, source = PREC_F32 if ask_f32 else int(node.params[0]), int(node.params[1])
            if accumulation:
                lib.ggml_prec_set_acc(out, accumulation)
            if source:
                lib.ggml_prec_set_src(out, source, 1)
        values.append(int(out))
    return values


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
