"""What every expert backend promises, asked of all of them: ggml's kernels in both layouts, the same in a process of
their own, and the NumPy reference.

A new backend joins BACKENDS and must pass unchanged. Expected values come from the float64 reference, whose weights are
dequantised and whose operators are written independently of ggml's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from backends import experts as experts_module
from backends.device import Device
from backends.experts import F32, I32, ExpertBackend, GgmlExperts
from backends.manifest import LayerExperts
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram, Node
from backends.variant_process import KernelExperts, KernelProcess
from capabilities.agreement import compare
from capabilities.errors import Internal, PeerMistake, UnsupportedModel
from swarmnode.local_experts import load_layer
from tests.expert_models import DOWN_ONLY, TakenApart, made_up_layer, take_apart
from tests.kernel_processes import installed_kernels
from tests.patience import PATIENCE_S


@cache
def cpu() -> Device:
    return Device("CPU")


@cache
def process() -> KernelProcess:
    return KernelProcess(installed_kernels())


BACKENDS: dict[str, Callable[[], ExpertBackend]] = {
    "ggml": lambda: GgmlExperts(cpu(), repack=False),
    "ggml-repacked": lambda: GgmlExperts(cpu(), repack=True),
    "process": lambda: process().experts(),
    "numpy-f64": lambda: NumpyExperts("float64"),
    "numpy-f32": lambda: NumpyExperts("float32"),
}

# Every kind of expert block, and every kind of kernel.
CASES = [
    *((kind, "f32") for kind in ("qwen3moe", "deepseek2-merged", "gpt-oss", "grok", "smallthinker", "nemotron-h-moe")),
    *((kind, "f32") for kind in ("qwen3moe-scales", "gemma4", "step35")),
    *(("qwen3moe", kind) for kind in ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "q4_k", "q6_k")),
    *((kind, "q4_0") for kind in ("deepseek2-merged", "gpt-oss", "grok", "nemotron-h-moe", "gemma4", "step35")),
    *((kind, "q4_k") for kind in ("deepseek2-merged", "gpt-oss")),
]
FEW_CASES = [("gpt-oss", "f32"), ("qwen3moe", "q4_0"), ("deepseek2-merged", "q4_k")]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[ExpertBackend]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


def is_exact(backend: ExpertBackend) -> bool:
    """Whether a row's bits must not depend on the rows around it."""
    return isinstance(backend, GgmlExperts | KernelExperts)


@pytest.fixture(params=FEW_CASES, ids="-".join)
def model(request: pytest.FixtureRequest) -> TakenApart:
    return take_apart(*request.param)


def some_rows(layer: LayerExperts, n_tokens: int, n_rows: int, seed: int = 0) -> tuple[F32, I32, I32]:
    """(x, tokens, experts): experts in no order, tokens with any number of rows, some with none."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((n_tokens, layer.n_in), dtype=np.float32)
    tokens = random.integers(0, n_tokens, n_rows).astype(np.int32)
    return x, tokens, random.integers(0, layer.n_expert, n_rows).astype(np.int32)


def same(backend: ExpertBackend, actual: F32, expected: F32) -> bool:
    """Equal bits where the backend promises them, else equal but for the order of sums."""
    if is_exact(backend):
        return np.array_equal(actual, expected)
    return compare(actual, expected).worst_relative_l2 < 2e-6


@cache
def reference(kind: str, quantisation: str, as_kernels: bool) -> F32:
    model = take_apart(kind, quantisation)
    oracle = NumpyExperts("float64", quantize_activations=as_kernels)
    layer = model.load(oracle)
    return oracle.compute(layer.layer, *some_rows(layer, 30, 120))


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_an_expert_put_in_another_s_place_gives_the_same_bits(model: TakenApart) -> None:
    whole, places = GgmlExperts(cpu()), GgmlExperts(cpu())
    layer = model.load(whole)
    program = ExpertProgram.from_bytes(model.manifest.programs[layer.program])
    places.reserve(replace(layer, n_expert=2), program)
    x, tokens, zeros = np.ones((3, layer.n_in), np.float32), np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    with pytest.raises(PeerMistake, match="not held"):
        places.compute(layer.layer, x, tokens, zeros)

    def read(expert: int, index: int) -> bytes | memoryview:
        return model.source.read(layer.layer, expert, layer.offsets[index], layer.tensors[index].nbytes)

    for expert in (0, layer.n_expert - 1, 1):
        for place in (0, 1):
            places.put(layer.layer, place, partial(read, expert))
            expected = whole.compute(layer.layer, x, tokens, zeros + expert)
            np.testing.assert_array_equal(places.compute(layer.layer, x, tokens, zeros + place), expected)
    with pytest.raises(Internal, match="1 bytes"):
        places.put(layer.layer, 0, lambda index: b"1")
    assert places.held(layer.layer) == {1}  # half of it is another's
    for backend in (whole, places):
        backend.close()


@pytest.mark.parametrize(("kind", "quantisation"), CASES)
def test_rows_agree_with_float64(backend: ExpertBackend, kind: str, quantisation: str) -> None:
    layer = take_apart(kind, quantisation).load(backend)
    y = backend.compute(layer.layer, *some_rows(layer, 30, 120))
    assert y.shape == (120, layer.n_out)
    assert y.dtype == np.float32
    kernels = is_exact(backend)
    exact = compare(y, reference(kind, quantisation, False))
    assert exact.min_cosine > 0.999
    assert exact.worst_relative_l2 < (5e-2 if kernels else 2e-6)
    # What separates a kernel from float64 is the rounding of its activations. With that imitated, the median row has
    # single precision; a few rows hold a value that fell on the other side of a tie.
    alike = compare(y, reference(kind, quantisation, kernels))
    halves_in_sums = quantisation == "q4_1"  # its kernels also round each block's sum to half precision
    assert alike.median_relative_l2 < (3e-3 if halves_in_sums else 2e-6)
    assert alike.worst_relative_l2 < (2e-2 if kernels else 2e-6)
    if quantisation == "f32" and kind not in ("grok", "gemma4"):  # those round in GELU's table
        assert exact.worst_relative_l2 < 2e-6


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_batch_around_it(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend)
    x, tokens, experts = some_rows(layer, 13, 60)
    whole = backend.compute(layer.layer, x, tokens, experts)
    alone = [
        backend.compute(layer.layer, x[t : t + 1], tokens[:1] * 0, experts[r : r + 1]) for r, t in enumerate(tokens)
    ]
    assert same(backend, np.concatenate(alone), whole)
    for start in range(0, 60, 7):
        part = slice(start, start + 7)
        assert same(backend, backend.compute(layer.layer, x, tokens[part], experts[part]), whole[part])
    for token in range(13):  # all rows of one token at once, as in decoding
        rows = np.flatnonzero(tokens == token)
        y = backend.compute(layer.layer, x[token : token + 1], tokens[rows] * 0, experts[rows])
        assert same(backend, y, whole[rows])


def test_the_order_of_rows_is_the_callers(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend)
    x, tokens, experts = some_rows(layer, 9, 40)
    order = np.random.default_rng(1).permutation(40)
    y = backend.compute(layer.layer, x, tokens, experts)
    assert same(backend, backend.compute(layer.layer, x, tokens[order], experts[order]), y[order])
    again = backend.compute(layer.layer, x, tokens, experts)
    assert np.array_equal(again, y)


def test_slices_of_a_large_batch_change_nothing(
    backend: ExpertBackend, model: TakenApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = model.load(backend)
    rows = some_rows(layer, 20, 100)
    one_token = (rows[0][:1], rows[1] * 0, rows[2])
    whole, of_one = backend.compute(layer.layer, *rows), backend.compute(layer.layer, *one_token)
    monkeypatch.setattr(experts_module, "SLICE_BYTES_MAX", 4 * layer.n_in * 40)  # some ten rows
    assert same(backend, backend.compute(layer.layer, *rows), whole)
    assert same(backend, backend.compute(layer.layer, *one_token), of_one)


def test_an_expert_may_come_twice_for_a_token(backend: ExpertBackend, model: TakenApart) -> None:
    """No router chooses so, but a peer may ask: ggml's repacked products would write beyond their memory."""
    layer = model.load(backend)
    x = some_rows(layer, 1, 1)[0]
    experts = np.array([7, 7, 0, 7, 7, 7, 0, 0, 1], np.int32)
    y = backend.compute(layer.layer, x, experts * 0, experts)
    for row, expert in enumerate(experts):
        alone = backend.compute(layer.layer, x, experts[:1] * 0, experts[row : row + 1])
        assert same(backend, y[row : row + 1], alone), f"row {row}, expert {expert}"


def test_no_rows(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend)
    none = np.empty(0, np.int32)
    for n_tokens in (0, 1, 3):
        y = backend.compute(layer.layer, np.empty((n_tokens, layer.n_in), np.float32), none, none)
        assert y.shape == (0, layer.n_out)
        assert y.dtype == np.float32


def test_f32_may_be_asked_for(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend)
    for rows in (some_rows(layer, 9, 40), some_rows(layer, 1, 3)):
        asked = backend.compute(layer.layer, *rows, ask_f32=True)
        # On CPUs the kernels are the same either way.
        assert same(backend, asked, backend.compute(layer.layer, *rows))


def test_x_of_other_strides_and_types(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend)
    x, tokens, experts = some_rows(layer, 6, 20)
    expected = backend.compute(layer.layer, x, tokens, experts)
    for other in (np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], x.astype(np.float64)):
        assert same(backend, backend.compute(layer.layer, other, tokens, experts), expected)
        one = backend.compute(layer.layer, other[2:3], tokens[:1] * 0, experts[:1])
        assert same(backend, one, backend.compute(layer.layer, x[2:3], tokens[:1] * 0, experts[:1]))


# -- what is held -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [[5], [0], [7, 2], [6, 0, 3]])
def test_a_share_gives_the_same_rows_as_the_whole(backend: ExpertBackend, model: TakenApart, held: list[int]) -> None:
    """Also one single expert, which ggml does not repack, and experts in an order of their own."""
    layer = model.load(backend)
    x, tokens, experts = some_rows(layer, 12, 50)
    experts = np.array(held, np.int32)[experts % len(held)]
    whole = backend.compute(layer.layer, x, tokens, experts)
    model.load(backend, held)
    assert backend.held(layer.layer) == frozenset(held)
    assert same(backend, backend.compute(layer.layer, x, tokens, experts), whole)
    one = backend.compute(layer.layer, x[:1], tokens[:2] * 0, experts[:2])
    model.load(backend)
    assert same(backend, one, backend.compute(layer.layer, x[:1], tokens[:2] * 0, experts[:2]))


def test_what_must_not_be_computed(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend, [1, 4])
    x = np.zeros((3, layer.n_in), np.float32)

    def compute(tokens: list[int], experts: list[int], activations: F32 = x, number: int = layer.layer) -> F32:
        return backend.compute(number, activations, np.array(tokens, np.int32), np.array(experts, np.int32))

    with pytest.raises(PeerMistake, match=r"experts \[2, 3\] .* not held") as caught:
        compute([0, 0, 0, 1], [1, 3, 2, 3])
    assert caught.value.details == {"layer": layer.layer, "experts": [2, 3]}
    with pytest.raises(PeerMistake, match="no experts of layer 99"):
        compute([0], [1], number=99)
    for tokens, experts in (([0], [8]), ([0], [-1]), ([3], [1]), ([-1], [1]), ([0], [2**31 - 1]), ([-(2**31)], [4])):
        with pytest.raises(PeerMistake, match="out of range"):
            compute(tokens, experts)
    with pytest.raises(PeerMistake, match="out of range"):
        compute([0], [1], x[:0])
    for wrong in (x[:, :-1], np.zeros((3, layer.n_in + 1), np.float32), x[0], x[None]):
        with pytest.raises(PeerMistake, match="takes rows of"):
            compute([0], [1], wrong)
    with pytest.raises(PeerMistake, match="takes rows of"):
        compute([0, 1], [1])
    assert compute([2, 0], [4, 1]).shape == (2, layer.n_out)  # and goes on as before


@pytest.mark.parametrize("experts", [[], [0, 0], [8], [-1], [1, 2, 1]])
def test_what_cannot_be_held(backend: ExpertBackend, model: TakenApart, experts: list[int]) -> None:
    with pytest.raises(PeerMistake, match="no such set"):
        model.load(backend, experts)
    assert backend.held(model.layer.layer) == frozenset()


def test_loading_again_replaces_and_unloading_forgets(backend: ExpertBackend, model: TakenApart) -> None:
    layer = model.load(backend, [0, 1])
    rows = (np.ones((1, layer.n_in), np.float32), np.zeros(1, np.int32), np.array([1], np.int32))
    before = backend.compute(layer.layer, *rows)
    model.load(backend, [2])
    assert backend.held(layer.layer) == {2}
    with pytest.raises(PeerMistake):
        backend.compute(layer.layer, *rows)
    model.load(backend, [3, 1])
    assert same(backend, backend.compute(layer.layer, *rows), before)
    backend.unload_layer(layer.layer)
    backend.unload_layer(layer.layer)
    assert backend.held(layer.layer) == frozenset()
    with pytest.raises(PeerMistake, match="no experts of layer"):
        backend.compute(layer.layer, *rows)


def test_layers_are_apart(backend: ExpertBackend) -> None:
    model = take_apart("olmoe", "q4_0")
    first, *_, last = model.manifest.layers
    for layer in (first, last):
        load_layer(backend, model.manifest, layer.layer, [0, 1], model.source)
    rows = some_rows(first, 4, 9)
    rows = (rows[0], rows[1], rows[2] % 2)
    of_first, of_last = backend.compute(first.layer, *rows), backend.compute(last.layer, *rows)
    assert not np.array_equal(of_first, of_last)
    backend.unload_layer(first.layer)
    assert np.array_equal(backend.compute(last.layer, *rows), of_last)


def test_a_failed_load_holds_nothing(backend: ExpertBackend) -> None:
    layer, read = made_up_layer({"ffn_down_exps.weight": np.ones((4, 32, 32), np.float32)}, 32, 32, "q4_0")

    def torn(expert: int, tensor: int) -> bytes:
        if expert == 2:
            raise OSError("the disk is gone")
        return bytes(read(expert, tensor))

    with pytest.raises(OSError, match="the disk is gone"):
        backend.load_layer(layer, DOWN_ONLY, [0, 1, 2], torn)
    for cut in (1, -1):  # a slice of one byte would otherwise be spread over the whole
        with pytest.raises(Internal, match="bytes for a slice of"):
            backend.load_layer(layer, DOWN_ONLY, [0, 1], lambda e, t, cut=cut: bytes(read(e, t))[:cut])
    wrong = ExpertProgram((Node("x"), Node("mul_mat_id", (0,), "ffn_up_exps.weight", (0.0, 0.0))))
    with pytest.raises(UnsupportedModel, match="which the model does not have"):
        backend.load_layer(layer, wrong, [0, 1], read)
    assert backend.held(0) == frozenset()
    backend.load_layer(layer, DOWN_ONLY, [0, 1], read)
    y = backend.compute(0, np.ones((1, 32), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert y == pytest.approx(np.full((1, 32), 32), rel=1e-2)


def test_only_what_the_program_reads_is_loaded(backend: ExpertBackend) -> None:
    tensors = {"ffn_down_exps.weight": np.eye(32, dtype=np.float32)[None], "ffn_up_exps.input_scale": np.ones(1)}
    layer, read = made_up_layer(tensors, 32, 32)
    asked = []

    def watched(expert: int, tensor: int) -> bytes:
        asked.append(tensor)
        return bytes(read(expert, tensor))

    backend.load_layer(layer, DOWN_ONLY, [0], watched)
    assert set(asked) == {0}


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "process"])
def test_unloading_gives_memory_back(name: str) -> None:
    """RssAnon of a child that loads and unloads 42 MiB of experts three times."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.expert_memory_child", name],
        cwd=Path(__file__).parents[1], capture_output=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    kept = 42 if name.startswith("ggml") else 42 + 64  # the reference also keeps some experts dequantised
    for loaded, unloaded in zip(report["loaded_mib"], report["unloaded_mib"], strict=True):
        assert 40 < loaded < kept + 16
        assert unloaded < 12


def test_kept_graphs_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = take_apart("qwen3moe", "f32")
    bound = 20_000
    monkeypatch.setattr(experts_module, "GRAPH_BYTES_MAX", bound)
    backend = GgmlExperts(cpu())
    layer = model.load(backend)
    x = some_rows(layer, 1, 1)[0]
    rows = {n: (x, np.zeros(n, np.int32), np.arange(n, dtype=np.int32)) for n in range(1, 9)}
    first = {n: backend.compute(layer.layer, *r) for n, r in rows.items()}
    again = {n: backend.compute(layer.layer, *r) for n, r in reversed(rows.items())}
    assert all(np.array_equal(first[n], again[n]) for n in rows)
    assert 0 < len(backend._graphs) < len(rows)
    assert backend._graph_bytes <= bound
    assert backend._graph_bytes == sum(graph.nbytes for graph in backend._graphs.values())
    backend.close()
    assert backend._graph_bytes == 0
