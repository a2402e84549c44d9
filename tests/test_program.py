"""Expert programs survive their bytes, hostile ones are a peer's mistake, and shapes are checked before kernels run."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.program import GLU, NODES_MAX, OPERATORS, UNARY, ExpertProgram, Node
from capabilities.errors import PeerMistake, UnsupportedModel
from tests.expert_models import DOWN_ONLY, take_apart
from tests.tiny_architectures import KINDS

UP, GATE_UP, DOWN = "ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    UP: (8, 4),
    GATE_UP: (8, 8),
    DOWN: (4, 6),
    "ffn_up_exps.bias": (4,),
    "ffn_down_exps.bias": (6,),
    "ffn_up_exps.scale": (),
}


def product(source: int, weight: str) -> Node:
    return Node("mul_mat_id", (source,), weight, (0.0, 0.0))


def check(*nodes: Node, n_out: int) -> tuple[int, ...]:
    return ExpertProgram((Node("x"), *nodes)).check_shapes(8, n_out, SHAPES)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_captured_programs_survive_their_bytes(kind: str) -> None:
    model = take_apart(kind)
    for layer in model.learned.layers.values():
        packed = layer.program.to_bytes()
        assert ExpertProgram.from_bytes(packed) == layer.program
        assert len(packed) < 1000


def test_infinite_limits_survive() -> None:
    program = ExpertProgram((*DOWN_ONLY.nodes, Node("clamp", (1,), "", (-math.inf, 7.0))))
    assert ExpertProgram.from_bytes(program.to_bytes()) == program


GOOD: list[list[Any]] = [["x", [], "", []], ["mul_mat_id", [0], DOWN, [0, 0]], ["unary", [1], "SILU", []]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["sub", [1, 0], "", []], "sub"),
        (["x", [], "", []], "operator x"),
        (["unary", [3], "SILU", []], "does not come before"),
        (["unary", [-1], "SILU", []], "does not come before"),
        (["unary", [4], "SILU", []], "does not come before"),
        (["unary", [], "SILU", []], "0 inputs"),
        (["unary", [1, 2], "SILU", []], "2 inputs"),
        (["glu", [1, 2, 1], "SWIGLU", [0, 0, 0]], "3 inputs"),
        (["unary", [1], "XIELU", []], "unknown function XIELU"),
        (["glu", [1], "SILU", [0, 0, 0]], "unknown function SILU"),
        (["glu", [1], "SWIGLU", [0, 0]], "wrong parameters"),
        (["scale", [1], "", [1, math.nan]], "wrong parameters"),
        (["scale", [1], "", []], "wrong parameters"),
        (["half", [1], "", [2]], "impossible parameters"),
        (["half", [1], "", [0.5]], "impossible parameters"),
        (["half", [1], "", [math.inf]], "impossible parameters"),
        (["glu", [1], "SWIGLU", [7, 0, 0]], "impossible parameters"),
        (["mul_mat_id", [1], DOWN, [1e300, 0]], "impossible parameters"),
        (["mul_mat_id", [1], DOWN, [-1, 0]], "impossible parameters"),
        (["mul_mat_id", [1], DOWN, [0, 0.5]], "impossible parameters"),
        (["mul_mat_id", [1], 7, [0, 0]], "no text"),
        (["mul_mat_id", [1], "n" * 65, [0, 0]], "no expert program"),
        (["sqr", [1]], "no expert program"),
        ([["sqr"], [1], "", []], "no expert program"),
        (["sqr", 1, "", []], "no expert program"),
        ("sqr!", "no expert program"),
        (7, "no expert program"),
    ],
)
def test_a_wrong_node_is_a_peers_mistake(row: Any, reason: str) -> None:
    assert len(ExpertProgram.from_bytes(msgpack.packb(GOOD)).nodes) == 3
    with pytest.raises(PeerMistake, match=reason):
        ExpertProgram.from_bytes(msgpack.packb([*GOOD, row]))


@pytest.mark.parametrize(
    "value", [[], GOOD[:1], GOOD[1:], {"nodes": GOOD}, None, GOOD + [["sqr", [1], "", []]] * NODES_MAX, "x" * 100]
)
def test_a_wrong_list_is_a_peers_mistake(value: Any) -> None:
    with pytest.raises(PeerMistake):
        ExpertProgram.from_bytes(msgpack.packb(value))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 4000, msgpack.packb(GOOD) + b"\x00"])
def test_bytes_that_are_no_message_are_a_peers_mistake(data: bytes) -> None:
    with pytest.raises(PeerMistake):
        ExpertProgram.from_bytes(data)


leaves = st.none() | st.booleans() | st.integers(-2, 70) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
functions = st.sampled_from(sorted(UNARY | GLU | {UP, GATE_UP, DOWN, ""}))
rows = st.tuples(
    st.sampled_from(sorted(OPERATORS)) | leaves,
    st.lists(st.integers(-1, 8) | leaves, max_size=3),
    functions | leaves,
    st.lists(st.sampled_from([0, 1, 10]) | leaves, max_size=3),
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(leaves, inner, max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | values.map(msgpack.packb) | st.lists(rows, max_size=8).map(msgpack.packb))
def test_whatever_comes_is_a_program_or_a_peers_mistake(data: bytes) -> None:
    try:
        program = ExpertProgram.from_bytes(data)
    except PeerMistake:
        return
    assert ExpertProgram.from_bytes(program.to_bytes()) == program
    try:
        widths = program.check_shapes(8, 6, SHAPES)
    except UnsupportedModel:
        return
    assert widths[-1] == 6


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_damaged_programs_are_programs_or_peers_mistakes(place: int, junk: bytes) -> None:
    data = take_apart("gpt-oss").program.to_bytes()
    place %= len(data)
    with contextlib.suppress(PeerMistake):
        ExpertProgram.from_bytes(data[:place] + junk + data[place + len(junk) :])


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_widths_follow_the_rows() -> None:
    assert check(product(0, GATE_UP), Node("half", (1,), "", (0.0,)), product(2, DOWN), n_out=6) == (8, 8, 4, 6)
    assert check(product(0, GATE_UP), Node("glu", (1,), "SWIGLU", (0.0,) * 3), product(2, DOWN), n_out=6)[2] == 4
    up = product(0, UP), Node("add_id", (1,), "ffn_up_exps.bias"), Node("expert_scale", (2,), "ffn_up_exps.scale")
    assert check(*up, n_out=4) == (8, 4, 4, 4)
    # What all experts of a token share may be multiplied into their rows, and be worked on before that.
    assert check(Node("sqr", (0,)), product(1, GATE_UP), Node("mul", (2, 0)), n_out=8) == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("nodes", "n_out"),
    [
        ([product(0, DOWN)], 6),  # rows of 8 into a weight for rows of 4
        ([product(0, UP)], 5),  # ends with another width
        ([product(0, "ffn_gate_exps.weight")], 4),  # a weight that is not there
        ([product(0, "ffn_up_exps.bias")], 4),  # a weight that is no matrix
        ([product(0, UP), Node("add_id", (1,), "ffn_down_exps.bias")], 4),
        ([product(0, UP), Node("add_id", (1,), UP)], 4),
        ([product(0, UP), Node("expert_scale", (1,), "ffn_up_exps.bias")], 4),
        ([product(0, UP), Node("add", (1, 0))], 4),
        ([product(0, UP), product(0, GATE_UP), Node("mul", (1, 2))], 4),
        ([product(0, UP), product(0, GATE_UP), Node("glu", (1, 2), "SWIGLU", (0.0,) * 3)], 4),
        # One row for all experts of a token is not a row for each.
        ([Node("sqr", (0,))], 8),
        ([Node("half", (0,), "", (0.0,)), Node("add_id", (1,), "ffn_up_exps.bias"), product(2, DOWN)], 6),
        ([Node("half", (0,), "", (0.0,)), Node("expert_scale", (1,), "ffn_up_exps.scale"), product(2, DOWN)], 6),
        ([product(0, GATE_UP), Node("add", (0, 1))], 8),
        ([product(0, GATE_UP), Node("glu", (1, 0), "SWIGLU", (0.0,) * 3)], 8),
        # Halves of rows lie apart: not everything can be done with them.
        ([product(0, GATE_UP), Node("half", (1,), "", (1.0,))], 4),
        ([product(0, GATE_UP), Node("half", (1,), "", (1.0,)), Node("scale", (2,), "", (1.0, 0.0))], 4),
    ],
)
def test_rows_that_do_not_fit_are_refused(nodes: list[Node], n_out: int) -> None:
    with pytest.raises(UnsupportedModel):
        check(*nodes, n_out=n_out)


def test_an_odd_row_has_no_half() -> None:
    for node in (Node("half", (1,), "", (0.0,)), Node("glu", (1,), "SWIGLU", (0.0,) * 3)):
        program = ExpertProgram((Node("x"), product(0, "w"), node, product(2, "v")))
        with pytest.raises(UnsupportedModel, match="does not fit rows"):
            program.check_shapes(4, 4, {"w": (4, 5), "v": (2, 4)})


# -- questions --------------------------------------------------------------------------------------------------------


def test_what_a_program_reads() -> None:
    program = take_apart("gpt-oss").program
    names = [f"ffn_{p}_exps.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")]
    assert program.weights == tuple(names)
    assert program.first_matmul_weights() == ("ffn_gate_exps.weight", "ffn_up_exps.weight")
    assert program.x_is_only_multiplied()
    assert take_apart("gemma4").program.first_matmul_weights() == (GATE_UP,)
    other = ExpertProgram((Node("x"), product(0, UP), Node("sqr", (0,))))
    assert not other.x_is_only_multiplied()
