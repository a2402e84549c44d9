"""The invariants that numbers can prove, each with what happens where it is broken.

docs/equivalence.md lists them with these tests and with those of other files.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.device import Device
from backends.expert_source import GGUFExpertSource
from backends.experts import F32, I32, ExpertBackend, GgmlExperts
from backends.gguf_file import GGUFFile
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import ServingHook
from backends.numpy_reference import NumpyExperts
from backends.synthetic import ModelShape, write_random_model
from backends.trace import TracingHook
from capabilities.equivalence import growth_exponent
from capabilities.tolerances import residual_limit
from scheduler.dispatch import PeerRows
from scheduler.placement import Placement
from swarmnode.equivalence.passes import WINDOW, decode, pass_through
from swarmnode.equivalence.splits import split_model
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.text import bundled_text
from swarmnode.local_experts import LocalExperts, load_experts
from tests import invariant_figures as figures
from tests.documents import ROOT, section
from tests.equivalence_backends import IN_STEP
from tests.expert_models import TakenApart, made_up_layer, quiet, take_apart
from tests.invariant_figures import LayerRows
from tests.tiny_architectures import KINDS, write_deep

TOP8_OF_256 = ModelShape("top8-of-256", n_layers=3, n_expert=256, n_used=8, n_embd=128, n_ff=64, n_head=4, n_vocab=320)
SETTINGS = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW)
TOKENS = (np.arange(24, dtype=np.int32) * 37) % 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers choose eight of 256."""
    path = tmp_path_factory.mktemp("wide") / TOP8_OF_256.file_name(0)
    write_random_model(path, TOP8_OF_256)
    return path


def test_the_document_names_tests_that_exist() -> None:
    table = section("equivalence.md", "The invariants and the tests that prove them")
    named = re.findall(r"`(tests/\w+\.py|test_\w+)`", table)
    assert len(named) > 30
    defined: set[str] = set()
    for name in named:
        if name.endswith(".py"):
            tree = ast.walk(ast.parse((ROOT / name).read_text()))
            defined = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        else:
            assert name in defined, name


# -- router authority -------------------------------------------------------------------------------------------------


def test_routers_left_to_themselves_choose_others_at_boundary_tokens(wide: Path) -> None:
    with split_model(wide, find_target("ggml-cpu"), find_target("reference"), quiet) as split:
        a, b = figures.rows_of(split, 2 * WINDOW)
    first, *later = (figures.self_routed(wide, layer, a[layer], b[layer]) for layer in sorted(a))
    assert not first.changed.any()  # before the first experts nothing differs
    changed = np.concatenate([found.changed for found in later])
    gaps, moved = (np.concatenate([getattr(found, name) for found in later]) for name in ("gaps", "moved"))
    print(f"top 8 of 256: {changed.mean():.1%} of {len(changed)} choices are other sets")
    assert 0.02 < changed.mean() < 0.9
    assert not (changed & (gaps > 2 * moved)).any()  # that is arithmetic, as with tokens
    assert np.median(gaps[changed]) < np.median(gaps[~changed])


class Asked:
    """A backend that writes down what it was asked for: layer -> (bits of a row's activations, expert)."""

    def __init__(self, inner: ExpertBackend) -> None:
        self._inner = inner
        self.name, self.held, self.close = inner.name, inner.held, inner.close
        self.load_layer, self.unload_layer = inner.load_layer, inner.unload_layer
        self.rows: dict[int, set[tuple[bytes, int]]] = {}

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        for token, expert in zip(tokens.tolist(), experts.tolist(), strict=True):
            self.rows.setdefault(layer, set()).add((x[token].tobytes(), expert))
        return self._inner.compute(layer, x, tokens, experts, ask_f32=ask_f32)


def test_in_a_swarm_of_three_arithmetics_every_row_is_computed_as_the_leader_chose(wide: Path) -> None:
    names = ("ggml-cpu", "reference", "reference:f32")
    holders = tuple((names[expert % 3],) for expert in range(TOP8_OF_256.n_expert))
    with GGUFFile.open(wide) as gguf, split_model(wide, find_target(names[0]), find_target(names[1]), quiet) as split:
        placement = Placement(1, 1, {layer.layer: holders for layer in split.manifest.layers})
        workers = {name: Asked(find_target(name).make()) for name in names}
        for name, worker in workers.items():
            load_experts(worker, split.manifest, placement.held_by(name), GGUFExpertSource(gguf, split.manifest))
        executor = LocalExperts(split.manifest, placement, workers)
        keeping = figures.Keeping(executor)
        layers = split.learned.layers.values()
        hook = TracingHook(layers, figures.PartialSumHook(layers, keeping))
        with split.open_trunk(SETTINGS, hook) as trunk:
            decode(trunk, TOKENS)
    for layer, rows in keeping.rows().items():
        assert np.array_equal(rows.ids, hook.routes[layer])
        asked = set().union(*(worker.rows[layer] for worker in workers.values()))
        assert asked == {(x.tobytes(), int(e)) for x, chosen in zip(rows.x, rows.ids, strict=True) for e in chosen}
        for i, worker in enumerate(workers.values()):
            assert {expert % 3 for _, expert in worker.rows[layer]} == {i}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"llama4"}))
def test_no_worker_gets_a_router(kind: str) -> None:
    """What a worker can fetch are the tensors of the manifest's experts, and programs that read these alone."""
    model = take_apart(kind)
    stored = {tensor.name for layer in model.manifest.layers for tensor in layer.tensors}
    assert stored
    assert not [name for name in stored if "gate_inp" in name or "exp_probs" in name or "_exps" not in name]


# -- rounding authority -----------------------------------------------------------------------------------------------


def codes_by(rule: str, x: F32) -> NDArray[np.float32]:
    """8-bit codes of blocks [R, n]: kernels divide or multiply by the inverse, and break ties in one way or another."""
    blocks = x.reshape(-1, 32)
    highest = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (np.float32(127) / highest) if rule == "even" else blocks / (highest / np.float32(127))
    scaled = np.where(highest == 0, np.float32(0), scaled).astype(np.float32)
    if rule == "even":
        return np.rint(scaled)
    return np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)


def test_two_ways_to_round_agree_once_the_leader_has_rounded() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((4000, 256), np.float32)
    x[::2] = np.rint(x[::2] * 16) / 16  # coarse values, which hit ties
    x[::2, ::32] = 7.9375  # 127 sixteenths: every odd 32nd is then a tie
    x[::4] += np.float32(1 / 32)
    x[::4, ::32] = 7.9375
    raw = [codes_by(rule, x) for rule in ("even", "away")]
    sent = dequantize_q8_0(quantize_q8_0(x))
    told = [codes_by(rule, sent) for rule in ("even", "away")]
    assert (raw[0] != raw[1]).mean() > 1e-3
    assert np.array_equal(*told)


def test_what_is_left_of_a_kernels_distance_is_its_own_second_rounding() -> None:
    """Against exact activations: the leader's rounding is the same for all, the product inside an expert is not."""
    model = take_apart("qwen3moe", "q8_0")
    kernels, exact = GgmlExperts(Device("CPU")), NumpyExperts("float64")
    layer = model.load(kernels)
    model.load(exact)
    x = np.random.default_rng(0).standard_normal((200, layer.n_in), np.float32)
    rows = np.arange(200, dtype=np.int32)
    apart = []
    for given_x in (x, dequantize_q8_0(quantize_q8_0(x))):
        of_kernels, of_exact = (b.compute(layer.layer, given_x, rows, rows % 8) for b in (kernels, exact))
        apart.append(np.linalg.norm(of_kernels - of_exact) / np.linalg.norm(of_exact))
    print(f"relative distance {apart[0]:.2e}, with rounded activations {apart[1]:.2e}")
    assert apart[1] < 0.85 * apart[0]


# -- exactness --------------------------------------------------------------------------------------------------------

EXACT_KINDS = [("olmoe", "q4_0"), ("gpt-oss", "q8_0")]


@cache
def undivided(kind: str, quantisation: str) -> F32:
    with LlamaModel(take_apart(kind, quantisation).path, SETTINGS) as model:
        return decode(model, TOKENS)


def swarm(model: TakenApart, holders: Sequence[Sequence[str]], arrival: object = iter, **others: ExpertBackend) -> F32:
    """Logits [T, V] of a swarm whose workers hold, of every layer, what `holders` says of each expert."""
    placement = Placement(1, 1, {layer.layer: tuple(map(tuple, holders)) for layer in model.manifest.layers})
    workers: dict[str, ExpertBackend] = {}
    for name in placement.peers():
        workers[name] = others.get(name) or GgmlExperts(Device("CPU"))
        load_experts(workers[name], model.manifest, placement.held_by(name), model.source)
    executor = LocalExperts(model.manifest, placement, workers, arrival=arrival)  # type: ignore[arg-type]
    with LlamaModel(model.trunk, SETTINGS, ServingHook(model.learned.layers.values(), executor)) as trunk:
        logits = decode(trunk, TOKENS)
    for worker in workers.values():
        worker.close()
    return logits


@pytest.mark.parametrize(("kind", "quantisation"), EXACT_KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sharding_any_replicas_and_any_order_give_llama_cpps_bits(
    kind: str, quantisation: str, data: st.DataObject
) -> None:
    names = "abcde"[: data.draw(st.integers(1, 5))]
    sets = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    holders = data.draw(st.lists(sets, min_size=8, max_size=8))
    turn = data.draw(st.randoms(use_true_random=False))

    def arrival(parts: Sequence[PeerRows]) -> Iterable[PeerRows]:
        return turn.sample(list(parts), len(parts))

    logits = swarm(take_apart(kind, quantisation), holders, arrival)
    assert np.array_equal(logits, undivided(kind, quantisation))


def test_one_worker_of_another_class_and_the_bits_are_others() -> None:
    """Else the test before could not fail: exactness is promised within one numeric class."""
    kind, quantisation = EXACT_KINDS[0]
    holders = [("a",), *[("b",)] * 7]
    logits = swarm(take_apart(kind, quantisation), holders, a=NumpyExperts("float64"))
    assert not np.array_equal(logits, undivided(kind, quantisation))
    assert np.allclose(logits, undivided(kind, quantisation), atol=1.0)


OF_THE_DEMO_MODEL = 14_380.0  # the largest sum over experts: of so large a float64 the last bit is 2^-39


def some_owners(n_expert: int, nodes: int) -> list[str]:
    return [f"node-{i}" for i in np.random.default_rng(nodes).integers(0, nodes, n_expert)]


@cache
def rows_of_a_layer() -> tuple[LayerRows, NumpyExperts, GgmlExperts, int]:
    model = take_apart("qwen3moe", "q8_0")
    oracle, kernels = NumpyExperts("float64"), GgmlExperts(Device("CPU"))
    layer = model.load(oracle)
    model.load(kernels)
    random = np.random.default_rng(3)
    ids = np.argsort(random.random((200, layer.n_expert)), axis=1)[:, : layer.n_used].astype(np.int32)
    weights = random.random(ids.shape, np.float32)
    return LayerRows(random.standard_normal((200, layer.n_in), np.float32), ids, weights), oracle, kernels, layer.layer


def test_sharding_a_sum_over_nodes_changes_nothing_that_float64_could_see() -> None:
    rows, oracle, kernels, layer = rows_of_a_layer()
    y, exact = rows.computed(kernels, layer), rows.exact(oracle, layer)
    exact *= OF_THE_DEMO_MODEL / np.abs(np.einsum("tk,tkn->tn", rows.weights.astype(np.float64), exact)).max()
    for nodes in (2, 3, 8):
        owners = some_owners(8, nodes)
        assert figures.sharded_in_float64(rows, exact, layer, owners).largest <= 2.0**-38  # 3.64e-12
        single = figures.sharded_in_f32(rows, y, layer, owners)
        assert 1e-9 < single.relative < 3e-7, "partial sums round to F32, about 1e-7"


# -- sums of errors ---------------------------------------------------------------------------------------------------


def alike(share: float) -> tuple[LayerRows, NumpyExperts, GgmlExperts]:
    """Eight experts of which `share` of each weight's variance is the same in all, and rows that all eight compute."""
    random = np.random.default_rng(5)

    def matrix(rows: int, width: int) -> F32:
        common, own = random.standard_normal((1, rows, width)), random.standard_normal((8, rows, width))
        mixed = np.sqrt(share) * common + np.sqrt(1 - share) * own
        return (mixed / np.sqrt(width)).astype(np.float32)

    tensors = {"ffn_gate_exps.weight": matrix(64, 256), "ffn_up_exps.weight": matrix(64, 256)}
    tensors["ffn_down_exps.weight"] = matrix(256, 64)
    layer, read = made_up_layer(tensors, 256, 256, "q8_0")
    program = take_apart("qwen3moe", "q8_0").program
    exact, kernels = NumpyExperts("float64"), GgmlExperts(Device("CPU"))
    for backend in (exact, kernels):
        backend.load_layer(layer, program, range(8), read)
    ids = np.tile(np.arange(8, dtype=np.int32), (100, 1))
    return (
        LayerRows(random.standard_normal((100, 256)).astype(np.float32), ids, np.ones((100, 8), np.float32)),
        exact,
        kernels,
    )


def test_errors_of_experts_add_as_the_root_of_their_number_unless_experts_are_alike() -> None:
    """They share the rounding of x, but each expert turns it in its own direction."""
    found = {}
    for share in (0.0, 0.9):
        rows, exact, kernels = alike(share)
        found[share] = figures.errors_of_sums(rows.computed(kernels, 0), rows.exact(exact, 0))
    print(found)
    apart, together = found[0.0], found[0.9]
    assert apart.exponent == pytest.approx(0.5, abs=0.05)
    assert abs(apart.cosine) < 0.05
    assert together.exponent is not None
    assert together.exponent > 0.75
    assert together.cosine > 0.3
    assert together.relative < 1.1 * apart.relative  # the sum grows in step with its error


# -- margins ----------------------------------------------------------------------------------------------------------


def test_a_wobble_turns_tokens_only_where_the_margin_is_smaller() -> None:
    with LlamaModel(take_apart("olmoe", "q8_0").path, SETTINGS) as model:
        logits = figures.logits_of(model, 12 * WINDOW)
    found = figures.wobble(logits, 1e-3, draws=400)
    print(f"{found.below} of {found.positions} below; {found.flips} flips, {found.predicted:.1f} predicted")
    assert found.flips_above == 0
    assert 0 < found.below < 0.02 * found.positions
    assert found.flips == pytest.approx(found.predicted, rel=0.5)
    large = figures.wobble(logits, 0.05, draws=50)
    assert large.flips_above == 0
    assert large.flips == pytest.approx(large.predicted, rel=0.2)


# -- depth ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deep")
    return {kind: write_deep(folder / f"deep-{kind}.gguf", quantisation=kind) for kind in ("q8_0", "f32")}


def drift(file: Path, b: str) -> dict[str, Any]:
    with split_model(file, find_target("ggml-cpu"), find_target(b), quiet) as split:
        (level,) = pass_through(split, bundled_text(), WINDOW, quiet).levels(["layer"])
    return level


def test_after_49_layers_the_residual_is_within_its_band(deep: dict[str, Path]) -> None:
    with split_model(deep["q8_0"], find_target("ggml-cpu"), find_target("reference"), quiet) as split:
        (level,) = pass_through(split, bundled_text(), WINDOW, quiet).levels(["layer"])
        watching, _ = split.watching_hooks()
        with split.open_whole(SETTINGS, watching) as whole:
            decode(whole, TOKENS)
    sizes = [float(np.median(np.linalg.norm(watching.residuals[layer], axis=1))) for layer in range(49)]
    assert 15 < sizes[-1] / sizes[0] < 40  # the demo model's: 22
    assert all(after > 0.97 * before for before, after in itertools.pairwise(sizes))
    assert level["pass"], level["reason"]
    pinned, free = level["pinned"], level["free"]
    print(f"exponents: pinned {pinned['exponent']:.2f}, free {free['exponent']:.2f}")
    assert level["layers"] == 49
    assert 0.3 < pinned["exponent"] < 0.9
    assert free["relative_l2"][-1] > 1.5 * pinned["relative_l2"][-1]  # what every backend's own routing would add


def test_errors_that_add_up_in_step_leave_the_band_though_no_layers_is_too_large(deep: dict[str, Path]) -> None:
    level = drift(deep["f32"], "tests.equivalence_backends:AlwaysTheSameWay")
    found = level["pinned"]["relative_l2"]
    assert found[0] < residual_limit(1)
    assert not level["pass"]
    assert found[-1] > 3 * residual_limit(49)
    exponent = growth_exponent(found)
    assert exponent is not None
    assert exponent > 0.75
    assert IN_STEP <= 0.01
    assert drift(deep["f32"], "reference")["pass"]


def test_four_times_the_noise_leaves_the_band_where_the_noise_sets_it(deep: dict[str, Path]) -> None:
    level = drift(deep["q8_0"], "tests.equivalence_backends:TwiceTheSameWay")
    found, noise = level["pinned"]["relative_l2"][-1], level["noise_floor"]["pinned"]["relative_l2"][-1]
    assert 3 * noise > residual_limit(49)
    assert level["tolerance"]["relative_l2"][-1] == pytest.approx(3 * noise)
    assert 3 < found / noise < 5
    assert not level["pass"]
