"""llama.cpp stopped at its MoE layers: what the executor sees, what it may do wrong, and that the model survives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.ggml import OP_NONE, library, tensor_at
from backends.learn import learn
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import Manifest
from backends.moe_hook import LearningHook, ObservingHook, ServingHook
from capabilities.errors import ExpertsUnavailable, UnsupportedModel
from scheduler.placement import LayerSpec, WorkerSpec, even_split
from swarmnode.local_experts import LocalExperts, load_experts
from tests.expert_models import TakenApart, take_apart, tiny_file
from tests.tiny_architectures import write_tiny_model

SETTINGS = LlamaSettings(context_tokens=64, batch_tokens=32)
TOKENS = (np.arange(20, dtype=np.int32) * 37) % 256


def decode(model: LlamaModel, tokens: I32 = TOKENS, first: int = 0, logits: bool | int = True) -> F32:
    """Logits of all rows, of none (False), or of the last `logits` rows."""
    n = len(tokens)
    wanted = np.full(n, bool(logits))
    if logits is not True and logits:
        wanted[:-logits] = False
    return model.decode(tokens, np.arange(first, first + n, dtype=np.int32), np.zeros(n, np.int32), wanted)


def undivided(path: Path) -> F32:
    with LlamaModel(path, SETTINGS) as model:
        return decode(model)


def split(manifest: Manifest, model: TakenApart, workers: int = 3) -> LocalExperts:
    names = [f"worker-{i}" for i in range(workers)]
    specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers]
    placement = even_split(specs, [WorkerSpec(name, 1 << 40) for name in names], term=1, epoch=1)
    backends = {name: GgmlExperts(Device("CPU")) for name in names}
    for name, backend in backends.items():
        load_experts(backend, manifest, placement.held_by(name), model.source)
    return LocalExperts(manifest, placement, backends)


class Watched:
    """An executor that writes down what passes, and goes wrong where told."""

    def __init__(self, inner: LocalExperts) -> None:
        self.inner = inner
        self.dispatches: list[tuple[int, F32, I32]] = []
        self.collected: dict[int, list[F32]] = {}
        self.on_dispatch: Callable[[int], None] = lambda layer: None
        self.on_collect: Callable[[int, F32], F32] = lambda layer, y: y

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        self.dispatches.append((layer, x.copy(), ids.copy()))
        self.on_dispatch(layer)
        self.inner.dispatch(layer, x, ids)

    def collect(self, layer: int) -> F32:
        y = self.on_collect(layer, self.inner.collect(layer))
        self.collected.setdefault(layer, []).append(y.copy())
        return y


@contextmanager
def served(kind: str) -> Iterator[tuple[LlamaModel, Watched, ServingHook]]:
    model = take_apart(kind)
    watched = Watched(split(model.manifest, model))
    hook = ServingHook(model.learned.layers.values(), watched)
    with LlamaModel(model.trunk, SETTINGS, hook) as trunk:
        yield trunk, watched, hook


# -- learning ---------------------------------------------------------------------------------------------------------


def test_learning_finds_every_layer() -> None:
    learned = take_apart("deepseek2").learned
    assert sorted(learned.layers) == [1, 2]
    assert learned.silent == ()
    layer = learned.layers[2]
    assert (layer.collect, layer.occurrence) == (b"ffn_moe_down-2", 0)
    assert (layer.n_used, layer.n_in, layer.n_out) == (3, 64, 64)
    assert take_apart("gpt-oss").learned.layers[0].collect == b"ffn_moe_down_biased-0"
    assert take_apart("qwen3moe-scales").learned.layers[0].collect == b"ffn_moe_down_scaled-0"


def test_learning_leaves_the_values_alone() -> None:
    path = tiny_file("olmoe")
    with LlamaModel(path, SETTINGS, LearningHook()) as model:
        assert np.array_equal(decode(model), undivided(path))


def test_layers_that_hold_experts_and_never_dispatch_are_silent() -> None:
    model = take_apart("olmoe")
    assert learn(model.trunk, (0, 1, 2, 7)).silent == (7,)


def test_an_unknown_operator_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = take_apart("grok")
    names = library().op_names
    glu = next(number for number, name in names.items() if name == "GLU")
    monkeypatch.setitem(names, glu, "GLU_OF_TOMORROW")
    with pytest.raises(UnsupportedModel, match="expert block of layer 0 uses GLU_OF_TOMORROW"):
        learn(model.trunk, (0, 1))


def test_weights_before_several_experts_are_refused(tmp_path: Path) -> None:
    """llama4 multiplies the experts' input by the weights. With one expert a token that is just another input."""
    path = write_tiny_model(tmp_path / "llama4.gguf", "llama4")
    assert sorted(learn(path, (1, 3)).layers) == [1, 3]
    reader = GGUFReader(path, "r+")
    reader.fields["llama4.expert_used_count"].parts[-1][0] = 2
    reader.data.flush()
    with pytest.raises(UnsupportedModel, match="layer 1 applies the router's weights before its experts"):
        learn(path, (1, 3))


# -- serving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss", "deepseek2-merged", "grovemoe", "gemma4", "nemotron-h-moe"])
def test_the_trunk_with_experts_elsewhere_is_the_whole_model(kind: str) -> None:
    with served(kind) as (trunk, watched, hook):
        assert np.array_equal(decode(trunk), undivided(take_apart(kind).path))
        layers = take_apart(kind).learned.layers
        assert hook.dispatched == dict.fromkeys(layers, len(TOKENS))
        for layer, x, ids in watched.dispatches:
            assert x.shape == (20, layers[layer].n_in)
            assert ids.shape == (20, layers[layer].n_used)
            assert all(len(set(row)) == len(row) for row in ids.tolist())
            assert (np.sort(ids) >= 0).all()
            assert (ids < 8).all()


def test_two_blocks_of_experts_in_a_layer_are_told_apart() -> None:
    """Another occurrence of the same name is another block: writing there gives another model."""
    model = take_apart("grovemoe")
    whole = undivided(model.path)
    executor = split(model.manifest, model)
    wrong = [replace(layer, occurrence=1) for layer in model.learned.layers.values()]
    with LlamaModel(model.trunk, SETTINGS, ServingHook(wrong, executor)) as trunk:
        assert not np.array_equal(decode(trunk), whole)


def test_the_last_layer_is_asked_only_for_rows_with_logits() -> None:
    with served("olmoe") as (trunk, watched, hook):
        assert decode(trunk, logits=False).shape == (0, 320)
        assert [(layer, len(x)) for layer, x, _ in watched.dispatches] == [(0, 20), (1, 20)]
        watched.dispatches.clear()
        logits = decode(trunk, TOKENS[:3], first=20, logits=1)
        assert [(layer, len(x)) for layer, x, _ in watched.dispatches] == [(0, 3), (1, 3), (2, 1)]
        assert hook.dispatched == {0: 23, 1: 23, 2: 1}
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        decode(model, logits=False)
        assert np.array_equal(decode(model, TOKENS[:3], first=20, logits=1), logits)


def test_observing_changes_nothing_and_sees_the_experts_rows() -> None:
    model = take_apart("gpt-oss")
    hook = ObservingHook(model.learned.layers.values())
    with LlamaModel(model.path, SETTINGS, hook) as whole:
        logits = decode(whole)
        decode(whole, TOKENS[:1], first=20)
    assert np.array_equal(logits, undivided(model.path))
    with served("gpt-oss") as (trunk, watched, _):
        decode(trunk)
        decode(trunk, TOKENS[:1], first=20)
    assert hook.rows.keys() == watched.collected.keys() == {0, 1}
    for layer, rows in hook.rows.items():
        assert [r.shape for r in rows] == [(20, 3, 64), (1, 3, 64)]
        assert all(np.array_equal(a, b) for a, b in zip(rows, watched.collected[layer], strict=True))


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """Not an Exception, like KeyboardInterrupt and a task's cancellation."""


@pytest.mark.parametrize(
    "error", [ExpertsUnavailable("gone", layer=1, cause="timeout"), Interrupt(), ZeroDivisionError()]
)
@pytest.mark.parametrize("place", ["dispatch", "collect"])
@pytest.mark.parametrize("kind", ["olmoe", "granite-hybrid"])
def test_an_exception_comes_out_of_decode_and_the_model_lives_on(kind: str, place: str, error: BaseException) -> None:
    def fail(layer: int, *_: F32) -> F32:
        if layer == 1:
            raise error
        return _[0] if _ else np.empty(0, np.float32)

    whole = undivided(take_apart(kind).path)
    with served(kind) as (trunk, watched, _):
        if place == "dispatch":
            watched.on_dispatch = fail  # type: ignore[assignment]
        else:
            watched.on_collect = fail
        for _attempt in range(2):
            watched.dispatches.clear()
            with pytest.raises(type(error)) as caught:
                decode(trunk)
            assert caught.value is error
            assert [layer for layer, *_rest in watched.dispatches] == [0, 1], "nothing is sent after an error"
            trunk.clear_all()
        watched.on_dispatch, watched.on_collect = lambda layer: None, lambda layer, y: y
        assert np.array_equal(decode(trunk), whole)


def test_an_error_in_one_sequence_leaves_the_others_bits_alone() -> None:
    """Attention models: clearing the failed sequence is enough."""
    model = take_apart("olmoe")
    settings = replace(SETTINGS, sequences=2)
    n = len(TOKENS)

    def step(trunk: LlamaModel, sequence: int, tokens: I32, first: int) -> F32:
        positions = np.arange(first, first + len(tokens), dtype=np.int32)
        return trunk.decode(tokens, positions, np.full(len(tokens), sequence, np.int32), np.ones(len(tokens), bool))

    watched = Watched(split(model.manifest, model))
    with LlamaModel(model.trunk, settings, ServingHook(model.learned.layers.values(), watched)) as trunk:
        expected = step(trunk, 0, TOKENS, 0), step(trunk, 0, TOKENS[:4], n)
        trunk.clear_all()
        first = step(trunk, 0, TOKENS, 0)
        watched.on_collect = lambda layer, y: 1 / 0  # type: ignore[assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            step(trunk, 1, TOKENS[::-1].copy(), 0)
        watched.on_collect = lambda layer, y: y
        trunk.clear(1)
        assert np.array_equal(first, expected[0])
        assert np.array_equal(step(trunk, 0, TOKENS[:4], n), expected[1])


@pytest.mark.parametrize(
    "spoil", [lambda layer, y: y[:-1], lambda layer, y: y.astype(np.float64), lambda layer, y: np.asfortranarray(y)]
)
def test_results_of_another_shape_are_not_written(spoil: Callable[[int, F32], F32]) -> None:
    with served("olmoe") as (trunk, watched, _):
        watched.on_collect = spoil
        with pytest.raises(ValueError, match="bytes for a tensor of"):
            decode(trunk)


def test_nothing_more_is_computed_after_an_error() -> None:
    """With several devices llama.cpp goes on to the next part of the graph: that ends at its first node."""

    class Broken(LearningHook):
        def wants(self, node: int) -> bool:
            raise AssertionError("asked again")

    hook = Broken()
    hook.error = ZeroDivisionError()
    assert hook.callback(0, True) is True  # wanted, so that it is shown once computed ...
    assert hook.callback(0, False) is False  # ... and then the rest is not
    assert isinstance(hook.error, ZeroDivisionError)


def test_a_model_may_be_given_another_hook() -> None:
    with served("olmoe") as (trunk, watched, _):
        expected = decode(trunk)
        trunk.clear_all()
        learning = LearningHook()
        trunk.hook = learning
        decode(trunk)
        assert sorted(learning.layers) == [0, 1, 2]
        trunk.clear_all()
        trunk.hook = ServingHook(take_apart("olmoe").learned.layers.values(), watched)
        assert np.array_equal(decode(trunk), expected)


class Operators(ServingHook):
    """Notes the operator of each collect point, when it is shown and afterwards."""

    seen: list[tuple[int, int]]

    def computed(self, node: int) -> None:
        shown = tensor_at(node).op
        super().computed(node)
        if tensor_at(node).name in self._collect:
            self.seen.append((shown, tensor_at(node).op))


def test_what_is_overwritten_is_not_computed_and_the_graph_stays_as_it_was() -> None:
    with served("olmoe") as (trunk, watched, _):
        hook = trunk.hook = Operators(take_apart("olmoe").learned.layers.values(), watched)
        hook.seen = []
        decode(trunk)
        decode(trunk, TOKENS[:1], first=20)
        decode(trunk, TOKENS[:1], first=21)  # over the same graph
    assert len(hook.seen) == 9
    product = next(number for number, name in library().op_names.items() if name == "MUL_MAT_ID")
    assert set(hook.seen) == {(OP_NONE, product)}
