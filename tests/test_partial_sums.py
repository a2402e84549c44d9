"""Whole models by partial sums, over workers in this process: near llama.cpp's own logits, and always the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.learn import learn
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import PartialSumHook, ServingHook
from capabilities.errors import ExpertsUnavailable, Internal, UnsupportedModel
from scheduler.dispatch import PeerRows
from scheduler.placement import LayerSpec, WorkerSpec, even_split
from swarmnode.local_experts import LocalExperts, load_experts
from tests.expert_models import TakenApart, take_apart, tiny_file
from tests.tiny_architectures import KINDS, write_tiny_model

SETTINGS = LlamaSettings(context_tokens=64, batch_tokens=32)
TOKENS = (np.arange(24, dtype=np.int32) * 37) % 256
# F32 adds in another order: 1e-7 a layer. Where a key or a value then rounds the other way in the cache, which is F16,
# up to 1e-4 comes of it. Experts in the wrong place give 1e-1 and more.
LOGITS_TOLERANCE = 3e-4

Arrival = Callable[[Sequence[PeerRows]], Iterable[PeerRows]]


def split(model: TakenApart, workers: int, arrival: Arrival = iter) -> LocalExperts:
    names = [f"worker-{i}" for i in range(workers)]
    specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in model.manifest.layers]
    placement = even_split(specs, [WorkerSpec(name, 1 << 40) for name in names], term=1, epoch=1)
    backends = {name: GgmlExperts(Device("CPU")) for name in names}
    for name, backend in backends.items():
        load_experts(backend, model.manifest, placement.held_by(name), model.source)
    return LocalExperts(model.manifest, placement, backends, arrival=arrival)


class Watched:
    """Passes sums on; writes down what passes, beside what the rows themselves add up to in float64."""

    def __init__(self, inner: LocalExperts) -> None:
        self.inner = inner
        self.passed: list[tuple[int, I32, F32]] = []  # layer, ids, weights
        self.errors: list[float] = []  # relative L2, of each token's total
        self.on_collect: Callable[[int, F32], F32] = lambda layer, totals: totals

    def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
        self.passed.append((layer, ids, weights))
        self.inner.dispatch(layer, x, ids)
        exact = np.einsum("tk,tkn->tn", weights.astype(np.float64), self.inner.collect(layer).astype(np.float64))
        self.inner.dispatch_sum(layer, x, ids, weights)
        totals = self.inner.collect_sum(layer)
        self.errors += (np.linalg.norm(totals - exact, axis=1) / np.linalg.norm(exact, axis=1)).tolist()
        self.totals = totals

    def collect_sum(self, layer: int) -> F32:
        return self.on_collect(layer, self.totals)


@contextmanager
def summing(kind: str, workers: int = 3, sequences: int = 1) -> Iterator[tuple[LlamaModel, Watched]]:
    model = take_apart(kind)
    watched = Watched(split(model, workers))
    hook = PartialSumHook(model.learned.layers.values(), watched)
    with LlamaModel(model.trunk, replace(SETTINGS, sequences=sequences), hook) as trunk:
        yield trunk, watched


def decode(model: LlamaModel, tokens: I32 = TOKENS, first: int = 0, sequence: int = 0) -> F32:
    n = len(tokens)
    positions = np.arange(first, first + n, dtype=np.int32)
    return model.decode(tokens, positions, np.full(n, sequence, np.int32), np.ones(n, bool))


def undivided(path: Path) -> F32:
    with LlamaModel(path, SETTINGS) as model:
        return decode(model)


def distance(a: F32, b: F32) -> float:
    """Relative L2 of the rows, the largest."""
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())


# -- near the undivided model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_logits_are_near_llama_cpps_own(kind: str) -> None:
    whole = undivided(tiny_file(kind))
    with summing(kind) as (trunk, watched):
        logits = decode(trunk)
        layers = take_apart(kind).learned.layers
        assert [layer for layer, *_ in watched.passed] == sorted(layers)
        for layer, ids, weights in watched.passed:
            assert ids.shape == weights.shape == (len(TOKENS), layers[layer].n_used)
            assert weights.std() > 0.01
        assert max(watched.errors) < 1e-6
    assert distance(logits, whole) < LOGITS_TOLERANCE
    assert np.array_equal(logits.argmax(1), whole.argmax(1))  # each greedy token, at every position


def test_one_worker_differs_from_router_order_by_rounding_alone() -> None:
    """It adds in the router's order too, but not with llama.cpp's kernels, so nobody promises the same bits."""
    model = take_apart("qwen3moe")
    executor = split(model, 1)
    layers = model.learned.layers.values()
    with LlamaModel(model.trunk, SETTINGS, ServingHook(layers, executor)) as trunk:
        by_row = decode(trunk)
        trunk.clear_all()
        trunk.hook = PartialSumHook(layers, executor)
        assert distance(decode(trunk), by_row) < 1e-6


def test_the_weights_matter() -> None:
    """Else none of these tests could fail: a tenth more on one token's weights is seen."""

    class Off(Watched):
        def dispatch_sum(self, layer: int, x: F32, ids: I32, weights: F32) -> None:
            weights = weights.copy()
            weights[5] *= np.float32(1.1)
            super().dispatch_sum(layer, x, ids, weights)

    model = take_apart("olmoe")
    hook = PartialSumHook(model.learned.layers.values(), Off(split(model, 2)))
    with LlamaModel(model.trunk, SETTINGS, hook) as trunk:
        assert distance(decode(trunk), undivided(model.path)) > 10 * LOGITS_TOLERANCE


def test_one_expert_a_token(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    trunk_path = tmp_path / "trunk.gguf"
    model = take_apart("olmoe")
    write_tiny_model(path, "olmoe")
    trunk_path.write_bytes(model.trunk.read_bytes())
    for file in (path, trunk_path):
        reader = GGUFReader(file, "r+")
        reader.fields["olmoe.expert_used_count"].parts[-1][0] = 1
        reader.data.flush()
    hook = PartialSumHook(learn(trunk_path, ()).layers.values(), split(model, 2))
    with LlamaModel(trunk_path, SETTINGS, hook) as trunk:
        assert distance(decode(trunk), undivided(path)) < LOGITS_TOLERANCE


# -- always the same bits ---------------------------------------------------------------------------------------------


def test_every_order_of_arrival_gives_the_same_bits() -> None:
    model = take_apart("gpt-oss")
    logits = []
    for order in itertools.permutations(range(3)):

        def arrival(parts: Sequence[PeerRows], order: tuple[int, ...] = order) -> Iterable[PeerRows]:
            return (parts[i] for i in order if i < len(parts))

        hook = PartialSumHook(model.learned.layers.values(), split(model, 3, arrival))
        with LlamaModel(model.trunk, SETTINGS, hook) as trunk:
            logits.append(decode(trunk))
    assert len(logits) == 6
    assert all(np.array_equal(each, logits[0]) for each in logits)


@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss", "deepseek2-merged"])
def test_one_batch_chunks_and_token_by_token_give_the_same_bits(kind: str) -> None:
    with summing(kind) as (trunk, _):
        whole = decode(trunk)
        for chunk in (7, 1):
            trunk.clear_all()
            starts = range(0, len(TOKENS), chunk)
            parts = [decode(trunk, TOKENS[start : start + chunk], start) for start in starts]
            assert np.array_equal(np.concatenate(parts), whole)


def test_a_sequence_among_others_equals_itself_alone() -> None:
    with summing("olmoe", sequences=3) as (trunk, _):
        alone = decode(trunk), decode(trunk, TOKENS[:1], len(TOKENS))
        trunk.clear_all()
        prompts = [TOKENS, TOKENS[::-1].copy(), (TOKENS * 3) % 256]
        for sequence, tokens in enumerate(prompts):
            logits = decode(trunk, tokens, 0, sequence)
            assert sequence or np.array_equal(logits, alone[0])
        n = len(TOKENS)
        firsts = np.array([TOKENS[0], 9, 11], np.int32)
        together = trunk.decode(firsts, np.full(3, n, np.int32), np.arange(3, dtype=np.int32), np.ones(3, bool))
        assert np.array_equal(together[:1], alone[1])


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_model_without_a_sum_point_is_refused() -> None:
    layers = learn(tiny_file("llama4"), ()).layers
    with pytest.raises(UnsupportedModel, match=r"layer 1 .* no partial sums"):
        PartialSumHook(layers.values(), split(take_apart("olmoe"), 1))


def test_layers_without_rows_are_passed_over() -> None:
    with summing("olmoe") as (trunk, watched):
        n = len(TOKENS)
        trunk.decode(TOKENS, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.zeros(n, bool))
        assert [layer for layer, *_ in watched.passed] == [0, 1]


@pytest.mark.parametrize(
    "spoil", [lambda layer, y: y[:1], lambda layer, y: y.astype(np.float64), lambda layer, y: y[:, :1]]
)
def test_totals_of_another_shape_are_not_written(spoil: Callable[[int, F32], F32]) -> None:
    with summing("olmoe") as (trunk, watched):
        watched.on_collect = spoil
        with pytest.raises(ValueError, match="not float32"):
            decode(trunk)


def test_weights_that_are_not_seen_are_an_error() -> None:
    model = take_apart("olmoe")
    layers = {
        layer: replace(learned, sum_point=replace(learned.sum_point, weights=b"ffn_moe_weights_norm"))
        for layer, learned in model.learned.layers.items()
        if learned.sum_point
    }
    with (
        LlamaModel(model.trunk, SETTINGS, PartialSumHook(layers.values(), split(model, 1))) as trunk,
        pytest.raises(Internal, match="no weights before the experts of layer 0"),
    ):
        decode(trunk)


def test_an_error_ends_the_step_and_the_next_one_is_right() -> None:
    def fail(layer: int, totals: F32) -> F32:
        if layer == 1:
            raise ExpertsUnavailable("gone", layer=1, cause="timeout")
        return totals

    with summing("olmoe") as (trunk, watched):
        expected = decode(trunk)
        trunk.clear_all()
        watched.on_collect = fail
        with pytest.raises(ExpertsUnavailable, match="gone"):
            decode(trunk)
        trunk.clear_all()
        watched.on_collect = lambda layer, totals: totals
        assert np.array_equal(decode(trunk), expected)
