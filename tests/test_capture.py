"""Capturing expert blocks: what is replayed is what was captured, and everything unknown is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from backends.capture import OtherBlockError, capture_program, expert_product, split_name
from backends.ggml import TYPE_F32, TYPE_I32, InitParams, Library, library, tensor_at
from backends.program import NODES_MAX, ExpertProgram, Node
from backends.replay import replay
from capabilities.errors import UnsupportedModel
from tests.expert_models import take_apart
from tests.tiny_architectures import KINDS

N, N_EXPERT, N_USED, N_TOKENS = 32, 4, 2, 3
LAYER = 5


@dataclass
class Block:
    """A graph of an expert block under construction, without memory: tensors named as in a model's layer 5."""

    lib: Library
    context: int
    named: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.x = self.lib.ggml_new_tensor_3d(self.context, TYPE_F32, N, 1, N_TOKENS)
        self.ids = self.lib.ggml_new_tensor_2d(self.context, TYPE_I32, N_USED, N_TOKENS)

    def weight(self, name: str, *shape: int, layer: int = LAYER) -> int:
        makers = (self.lib.ggml_new_tensor_1d, self.lib.ggml_new_tensor_2d, self.lib.ggml_new_tensor_3d)
        address = makers[len(shape)](self.context, TYPE_F32, *shape, N_EXPERT)
        self.lib.ggml_set_name(address, f"blk.{layer}.{name}".encode())
        return int(address)

    def product(self, source: int, name: str = "ffn_up_exps.weight", ids: int | None = None, layer: int = LAYER) -> int:
        weight = self.weight(name, N, N, layer=layer)
        return int(self.lib.ggml_mul_mat_id(self.context, weight, source, self.ids if ids is None else ids))

    def capture(self, address: int) -> ExpertProgram:
        return capture_program(self.lib, LAYER, address, self.x, self.ids)


@pytest.fixture
def block() -> Iterator[Block]:
    lib = library()
    context = lib.ggml_init(InitParams(1 << 20, None, True))
    yield Block(lib, context)
    lib.ggml_free(context)


def captured_again(block: Block, program: ExpertProgram, shapes: dict[str, tuple[int, ...]]) -> ExpertProgram:
    weights = {name: block.weight(name, *shape) for name, shape in shapes.items()}
    return block.capture(replay(block.lib, block.context, program, weights, block.x, block.ids)[-1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_what_is_replayed_is_what_was_captured(kind: str, block: Block) -> None:
    model = take_apart(kind)
    block.x = block.lib.ggml_new_tensor_3d(block.context, TYPE_F32, model.layer.n_in, 1, N_TOKENS)
    assert captured_again(block, model.program, {t.name: t.shape for t in model.layer.tensors}) == model.program


def test_every_operator_is_captured_as_it_is_replayed(block: Block) -> None:
    nodes = (
        Node("x"),
        Node("mul_mat_id", (0,), "ffn_gate_up_exps.weight", (10.0, 30.0)),
        Node("half", (1,), "", (0.0,)),
        Node("unary", (2,), "GELU_ERF"),
        Node("half", (1,), "", (1.0,)),
        Node("clamp", (4,), "", (-0.25, 0.5)),
        Node("glu", (3, 5), "SWIGLU_CLAMP", (0.0, 0.0, 7.0)),
        Node("mul_mat_id", (6,), "ffn_up_exps.weight", (0.0, 0.0)),
        Node("add_id", (7,), "ffn_up_exps.bias"),
        Node("expert_scale", (8,), "ffn_up_exps.scale"),
        Node("scale", (9,), "", (0.5, 2.0)),
        Node("glu", (10,), "GEGLU_QUICK", (1.0, 0.0, 0.0)),
        Node("sqr", (11,)),
        Node("mul_mat_id", (12,), "ffn_down_exps.weight", (0.0, 0.0)),
        Node("mul", (13, 13)),
        Node("add", (14, 13)),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_gate_up_exps.weight": (N, 2 * N),
        "ffn_up_exps.weight": (N, N),
        "ffn_up_exps.bias": (N,),
        "ffn_up_exps.scale": (),
        "ffn_down_exps.weight": (N // 2, N),
    }
    program = ExpertProgram(nodes)
    program.check_shapes(N, N, shapes)
    assert captured_again(block, program, shapes) == program


def test_an_operator_off_the_list_is_refused_by_name(block: Block) -> None:
    lib, c = block.lib, block.context
    y = block.product(block.x)
    dense = lib.ggml_mul_mat(c, lib.ggml_new_tensor_2d(c, TYPE_F32, N, N), y)
    repeated = lib.ggml_repeat_4d(c, y, N, N_USED, N_TOKENS, 1)
    reshaped = lib.ggml_reshape_2d(c, y, N, N_USED * N_TOKENS)
    for address, name in ((dense, "MUL_MAT"), (repeated, "REPEAT"), (reshaped, "RESHAPE")):
        with pytest.raises(UnsupportedModel, match=rf"layer 5 uses {name},"):
            block.capture(lib.ggml_sqr(c, address))


def test_an_operator_of_a_later_ggml_is_refused_by_number(block: Block) -> None:
    y = block.product(block.x)
    tensor_at(y).op = 999
    with pytest.raises(UnsupportedModel, match="uses #999"):
        block.capture(y)


def test_a_view_that_is_no_half_is_refused(block: Block) -> None:
    lib, c = block.lib, block.context
    y = block.product(block.x)
    t = tensor_at(y)
    views = {
        "a quarter": lib.ggml_view_3d(c, y, N // 4, N_USED, N_TOKENS, t.nb[1], t.nb[2], 0),
        "the middle": lib.ggml_view_3d(c, y, N // 2, N_USED, N_TOKENS, t.nb[1], t.nb[2], N),
        "fewer rows": lib.ggml_view_3d(c, y, N // 2, 1, N_TOKENS, t.nb[1], t.nb[2], 0),
        "close rows": lib.ggml_view_3d(c, y, N // 2, N_USED, N_TOKENS, t.nb[1] // 2, t.nb[2], 0),
    }
    for what, view in views.items():
        with pytest.raises(UnsupportedModel, match="no half"):
            pytest.fail(f"{what}: {block.capture(lib.ggml_sqr(c, view))}")


def test_two_lists_of_ids_are_refused(block: Block) -> None:
    others = block.lib.ggml_new_tensor_2d(block.context, TYPE_I32, N_USED, N_TOKENS)
    second = block.product(block.product(block.x), "ffn_down_exps.weight", ids=others)
    with pytest.raises(UnsupportedModel, match="two lists of expert ids"):
        block.capture(second)
    bias = block.weight("ffn_up_exps.bias", N)
    added = block.lib.ggml_add_id(block.context, block.product(block.x), bias, others)
    with pytest.raises(UnsupportedModel, match="two lists of expert ids"):
        block.capture(added)


def test_another_block_is_not_this_one(block: Block) -> None:
    """Other experts under the same node names, another layer's, or a way that leads past the dispatch point."""
    lib, c = block.lib, block.context
    elsewhere = lib.ggml_new_tensor_3d(c, TYPE_F32, N, 1, N_TOKENS)
    for address in (
        block.product(block.x, "ffn_up_chexps.weight"),
        block.product(block.x, "ffn_up_shexp.weight"),
        block.product(block.x, layer=6),
        block.product(elsewhere),
        lib.ggml_add(c, block.product(block.x), lib.ggml_new_tensor_3d(c, TYPE_F32, N, N_USED, N_TOKENS)),
    ):
        with pytest.raises(OtherBlockError):
            block.capture(address)


def test_an_endless_block_is_refused(block: Block) -> None:
    y = block.product(block.x)
    for _ in range(NODES_MAX - 2):
        y = block.lib.ggml_sqr(block.context, y)
    assert len(block.capture(y).nodes) == NODES_MAX
    with pytest.raises(UnsupportedModel, match="over 64 operators"):
        block.capture(block.lib.ggml_sqr(block.context, y))


def test_shared_values_are_captured_once(block: Block) -> None:
    y = block.product(block.x)
    assert block.capture(block.lib.ggml_mul(block.context, y, y)).nodes[-1] == Node("mul", (1, 1))


def test_the_dispatch_point_is_a_product_over_routed_experts(block: Block) -> None:
    lib = block.lib
    assert expert_product(lib, tensor_at(block.product(block.x))) == LAYER
    for other in (
        block.product(block.x, "ffn_up_chexps.weight"),
        block.product(block.x, "ffn_gate_inp.weight"),
        lib.ggml_sqr(block.context, block.product(block.x)),
        block.x,
    ):
        assert expert_product(lib, tensor_at(other)) == -1


def test_names_are_split() -> None:
    assert split_name("blk.17.ffn_up_exps.weight") == (17, "ffn_up_exps.weight")
    assert split_name("output.weight") == (-1, "output.weight")
