"""Where a layer's rows are weighted and added: found in each architecture's graph, and only if nothing else is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader

from backends.ggml import TYPE_F32, InitParams, library, tensor_at
from backends.learn import learn
from backends.moe_hook import sum_point_of
from backends.sum_point import SumPoint, SumSearch
from capabilities.errors import UnsupportedModel
from tests.expert_models import take_apart, tiny_file
from tests.tiny_architectures import KINDS, write_tiny_model

N_OUT, N_USED, N_TOKENS = 6, 3, 4


# -- in llama.cpp's own graphs ----------------------------------------------------------------------------------------

WEIGHTS = {
    "olmoe": b"ffn_moe_weights-%d",
    "qwen3moe": b"ffn_moe_weights_norm-%d (reshaped)",
    "gpt-oss": b"ffn_moe_weights_softmax-%d",
    "deepseek2": b"ffn_moe_weights_scaled-%d",
    "grovemoe": b"ffn_moe_weights_norm-%d (reshaped)",
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_every_layer_has_one(kind: str) -> None:
    for layer, learned in take_apart(kind).learned.layers.items():
        point = sum_point_of(learned)
        assert point.weighted == b"ffn_moe_weighted-%d" % layer
        if kind in WEIGHTS:
            assert point.weights == WEIGHTS[kind] % layer


def test_weights_before_the_experts_leave_none() -> None:
    """llama4's rows are what its experts give for weighted inputs."""
    layers = learn(tiny_file("llama4"), ()).layers
    assert sorted(layers) == [1, 3]
    with pytest.raises(UnsupportedModel, match="layer 1 does something else than weight") as caught:
        sum_point_of(layers[1])
    assert "router-order" in caught.value.hint
    assert caught.value.details == {"layer": 1}


def test_a_single_expert_is_not_added_to_anything(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "one.gguf", "olmoe")
    reader = GGUFReader(path, "r+")
    reader.fields["olmoe.expert_used_count"].parts[-1][0] = 1
    reader.data.flush()
    assert sum_point_of(learn(path, ()).layers[0]).weighted == b"ffn_moe_weighted-0"


@pytest.mark.parametrize("operator", ["MUL", "VIEW", "ADD"])
def test_an_operator_that_is_not_expected_leaves_none(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    names = library().op_names
    number = next(number for number, name in names.items() if name == operator)
    monkeypatch.setitem(names, number, f"{operator}_OF_TOMORROW")
    layers = learn(tiny_file("olmoe"), ()).layers
    assert [layer.sum_point for layer in layers.values()] == [None] * 3


# -- in graphs made by hand -------------------------------------------------------------------------------------------


class Graph:
    """Nodes of a layer: rows, weights, and what a test makes of them."""

    def __init__(self, context: int) -> None:
        self.lib = library()
        self.context = context
        self.rows = self.tensor("ffn_moe_down-5", N_OUT, N_USED, N_TOKENS)
        self.weights = self.tensor("ffn_moe_weights-5", 1, N_USED, N_TOKENS)
        self.search = SumSearch(self.lib, self.rows, {b"ffn_moe_weights-5": self.weights}, {b"ffn_moe_down-5"})

    def tensor(self, name: str, *shape: int) -> int:
        return int(self.lib.ggml_set_name(self.lib.ggml_new_tensor_3d(self.context, TYPE_F32, *shape), name.encode()))

    def see(self, node: int, name: str = "") -> int:
        if name:
            self.lib.ggml_set_name(node, name.encode())
        self.search.see(node, tensor_at(node))
        return node

    def weigh(self, rows: int | None = None, weights: int | None = None) -> int:
        product = self.lib.ggml_mul(self.context, rows or self.rows, weights or self.weights)
        return self.see(product, "ffn_moe_weighted-5")

    def slot(self, weighted: int, place: int, tokens: int = N_TOKENS) -> int:
        stride = tensor_at(weighted).nb
        view = self.lib.ggml_view_3d(
            self.context, weighted, N_OUT, tokens, 1, stride[2], stride[2] * tokens, place * stride[1]
        )
        return self.see(view)

    def add(self, a: int, b: int) -> int:
        return self.see(self.lib.ggml_add(self.context, a, b))

    def whole(self, rows: int | None = None, weights: int | None = None) -> list[int]:
        """The tail as llama.cpp builds it."""
        weighted = self.weigh(rows, weights)
        slots = [self.slot(weighted, place) for place in range(N_USED)]
        total = self.add(slots[0], slots[1])
        return [weighted, *slots, total, self.add(total, slots[2])]


@pytest.fixture
def graph() -> Iterator[Graph]:
    lib = library()
    context = lib.ggml_init(InitParams(1 << 20, None, True))
    yield Graph(context)
    lib.ggml_free(context)


def test_the_tail_is_recognised(graph: Graph) -> None:
    graph.add(graph.tensor("shared", N_OUT, N_TOKENS, 1), graph.tensor("other", N_OUT, N_TOKENS, 1))  # nothing of it
    *_, total = graph.whole()
    assert graph.search.point == SumPoint(b"ffn_moe_weights-5", tensor_at(graph.weights).op, b"ffn_moe_weighted-5")
    graph.add(total, graph.tensor("residual", N_OUT, N_TOKENS, 1))  # the total may be read by whoever wants
    assert graph.search.point is not None


def test_a_tail_cut_short_is_none(graph: Graph) -> None:
    weighted = graph.weigh()
    slots = [graph.slot(weighted, place) for place in range(N_USED)]
    graph.add(slots[0], slots[1])
    assert graph.search.point is None


def test_rows_weights_and_slots_are_read_by_nothing_else(graph: Graph) -> None:
    weighted, first, *_ = graph.whole()
    assert graph.search.point is not None
    graph.add(first, graph.tensor("other", N_OUT, N_TOKENS, 1))
    assert graph.search.point is None
    for node in ("rows", "weighted"):
        again = Graph(graph.context)
        weighted, *_ = again.whole()
        again.see(again.lib.ggml_sqr(again.context, again.rows if node == "rows" else weighted))
        assert again.search.point is None, node
        again.whole()
        assert again.search.point is None, "once lost it is lost"


def test_rows_that_go_elsewhere_first_have_none(graph: Graph) -> None:
    graph.see(graph.lib.ggml_sqr(graph.context, graph.rows))
    graph.whole()
    assert graph.search.point is None


def test_slots_in_another_order_have_none(graph: Graph) -> None:
    weighted = graph.weigh()
    slots = [graph.slot(weighted, place) for place in (1, 0, 2)]
    graph.add(graph.add(slots[0], slots[1]), slots[2])
    assert graph.search.point is None


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_adds_in_another_order_have_none(graph: Graph, order: tuple[int, int, int]) -> None:
    weighted = graph.weigh()
    slots = [graph.slot(weighted, place) for place in range(N_USED)]
    graph.add(graph.add(slots[order[0]], slots[order[1]]), slots[order[2]])
    assert graph.search.point is None


def test_a_view_of_some_tokens_is_no_slot(graph: Graph) -> None:
    weighted = graph.weigh()
    slots = [graph.slot(weighted, place, tokens=N_TOKENS - 1) for place in range(N_USED)]
    graph.add(graph.add(slots[0], slots[1]), slots[2])
    assert graph.search.point is None


@pytest.mark.parametrize("shape", [(N_OUT, N_USED, N_TOKENS), (1, 1, N_TOKENS), (1, N_USED, 1)])
def test_weights_must_be_one_for_each_token_and_expert(graph: Graph, shape: tuple[int, int, int]) -> None:
    graph.search.before = {b"other": (other := graph.tensor("other", *shape))}
    graph.whole(weights=other)
    assert graph.search.point is None


def test_weights_must_be_known_before_the_experts(graph: Graph) -> None:
    graph.search.before = {}
    graph.whole()
    assert graph.search.point is None


def test_weights_under_a_name_that_comes_twice_are_not_trusted(graph: Graph) -> None:
    graph.search.before = {b"ffn_moe_weights-5": graph.tensor("ffn_moe_weights-5", 1, N_USED, N_TOKENS)}
    graph.whole()
    assert graph.search.point is None


def test_a_weighted_node_under_a_name_that_came_before_is_not_trusted(graph: Graph) -> None:
    graph.search.after = {b"ffn_moe_weighted-5"}
    graph.whole()
    assert graph.search.point is None


def test_copies_from_another_device_stand_for_what_they_copy(graph: Graph) -> None:
    rows = graph.tensor("CUDA0#ffn_moe_down-5#0", N_OUT, N_USED, N_TOKENS)
    weights = graph.tensor("CUDA0#ffn_moe_weights-5#0", 1, N_USED, N_TOKENS)
    graph.whole(rows, weights)
    assert graph.search.point is not None
    assert graph.search.point.weights == b"ffn_moe_weights-5"
