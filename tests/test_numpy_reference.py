"""The NumPy reference: its formulas against ggml's kernels, its precisions, and its imitation of their roundings."""

from __future__ import annotations

import ctypes as ct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends import numpy_reference
from backends.activations import _traits, dequantize_q8_0, quantize_q8_0
from backends.device import Device
from backends.experts import GgmlExperts
from backends.numpy_functions import round_activations
from backends.numpy_reference import Accumulate, NumpyExperts
from backends.program import GLU, UNARY, ExpertProgram, Node
from capabilities.agreement import compare
from capabilities.errors import UnsupportedModel
from tests.expert_models import DOWN_ONLY, made_up_layer, take_apart
from tests.patience import PATIENCE_S

PRODUCT = (0.0, 0.0)
# Arguments over the whole range where the functions do something, and beyond GELU's table.
ARGUMENTS = np.concatenate([np.linspace(-30, 30, 1001), np.linspace(-3, 3, 1000), [0.0, -0.0, 1e-6, -1e-6, 700, -700]])


def run_both(nodes: tuple[Node, ...], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """(ggml's, the reference's) result of a program over rows x of one value each: x, then 2x in the other half."""
    up = np.array([[[1.0], [2.0]]], np.float32)  # [1 expert, 2, 1]: x becomes (x, 2x)
    tensors = {"ffn_up_exps.weight": up[:, :1], "ffn_gate_up_exps.weight": up}
    layer, read = made_up_layer(tensors, 1, 1)
    zeros = np.zeros(len(x), np.int32)
    results = []
    for backend in (GgmlExperts(Device("CPU")), NumpyExperts("float64", quantize_activations=True)):
        backend.load_layer(layer, ExpertProgram(nodes), [0], read)
        results.append(backend.compute(0, x.astype(np.float32)[:, None], np.arange(len(x), dtype=np.int32), zeros))
        backend.close()
    return results[0][:, 0], results[1][:, 0]


def assert_same_values(name: str, actual: np.ndarray, expected: np.ndarray) -> None:  # type: ignore[type-arg]
    infinite = np.isinf(expected)
    assert np.array_equal(actual[infinite], expected[infinite])
    close = np.isclose(actual[~infinite], expected[~infinite], rtol=4e-6, atol=2e-6)
    if name in ("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"):  # a few of the table's entries rounded the other way
        assert close.mean() > 0.99
        close = np.isclose(actual[~infinite], expected[~infinite], rtol=1e-3, atol=2e-6)
    assert close.all(), np.flatnonzero(~close)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_functions_are_ggmls(name: str) -> None:
    product = Node("mul_mat_id", (0,), "ffn_up_exps.weight", PRODUCT)
    assert_same_values(name, *run_both((Node("x"), product, Node("unary", (1,), name)), ARGUMENTS))


@pytest.mark.parametrize("form", ["merged", "swapped", "split"])
@pytest.mark.parametrize("name", sorted(GLU))
def test_gated_units_are_ggmls(name: str, form: str) -> None:
    parameters = (float(form == "swapped"), 1.702, 7.0) if name in ("SWIGLU_OAI", "SWIGLU_CLAMP") else (
        float(form == "swapped"), 0.0, 0.0
    )  # fmt: skip
    product = Node("mul_mat_id", (0,), "ffn_gate_up_exps.weight", PRODUCT)
    if form == "split":
        halves = (Node("half", (1,), "", (0.0,)), Node("half", (1,), "", (1.0,)))
        nodes = (Node("x"), product, *halves, Node("glu", (2, 3), name, parameters))
    else:
        nodes = (Node("x"), product, Node("glu", (1,), name, parameters))
    assert_same_values(name, *run_both(nodes, ARGUMENTS[np.abs(ARGUMENTS) < 100]))


def test_programs_at_random_run_on_ggml_and_agree() -> None:
    """Any program that passes check_shapes runs: ggml would end the process over operands that do not fit."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_programs_child", "200"],
        cwd=Path(__file__).parents[1], capture_output=True, timeout=PATIENCE_S, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("200 programs agree")


# -- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "total"), [("float64", 2080.0), ("float32", 2080.0), ("float16", 2048.0)])
def test_a_large_term_swallows_small_ones_in_half_precision(precision: Accumulate, total: float) -> None:
    """2048, then 32 sums of one: in half precision the neighbours of 2048 are two apart, and ties go to even."""
    x = np.full((1, 33 * 16), 1 / 16, np.float32)
    x[0, :16] = [2048] + [0] * 15
    layer, read = made_up_layer({"ffn_down_exps.weight": np.ones((1, 1, x.size), np.float32)}, x.size, 1)
    backend = NumpyExperts(precision)
    backend.load_layer(layer, DOWN_ONLY, [0], read)
    zero = np.zeros(1, np.int32)
    assert backend.compute(0, x, zero, zero, ask_f32=True).tolist() == [[total]]


def test_the_half_precision_peer_is_visibly_one() -> None:
    model = take_apart("qwen3moe", "q8_0")
    half, oracle = NumpyExperts("float16"), NumpyExperts("float64")
    random = np.random.default_rng(0)
    x = random.standard_normal((30, model.layer.n_in), dtype=np.float32)
    rows = x, np.arange(30, dtype=np.int32), random.integers(0, 8, 30).astype(np.int32)
    for backend in (half, oracle):
        model.load(backend)
    layer = model.layer.layer
    difference = compare(half.compute(layer, *rows), oracle.compute(layer, *rows))
    assert 1e-4 < difference.median_relative_l2 < 1e-2
    assert difference.min_cosine > 0.9999


def test_half_precision_overflows_quietly() -> None:
    layer, read = made_up_layer({"ffn_down_exps.weight": np.full((1, 1, 32), 60000, np.float32)}, 32, 1)
    backend = NumpyExperts("float16")
    backend.load_layer(layer, DOWN_ONLY, [0], read)
    zero = np.zeros(1, np.int32)
    assert backend.compute(0, np.ones((1, 32), np.float32), zero, zero).tolist() == [[np.inf]]


# -- weights and roundings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "mxfp4", "iq4_nl", "q3_k", "q6_k"]
)
def test_activations_are_rounded_as_the_kernels_round_them(kind: str) -> None:
    """Against ggml's own conversion to the type that its product wants. Values include ties, zeros and one giant."""
    weight = GGMLQuantizationType[kind.upper()]
    random = np.random.default_rng(0)
    x = random.standard_normal((8, 512), dtype=np.float32)
    x[1] = np.rint(x[1] * 8) / 2  # many ties
    x[2], x[3, 5], x[4, :100] = 0, 1e4, 0
    traits = _traits(int(weight))
    assert traits is not None
    target = GGMLQuantizationType(traits.vec_dot_type)
    expected = {
        GGMLQuantizationType.F32: lambda: x,
        GGMLQuantizationType.F16: lambda: x.astype(np.float16).astype(np.float32),
        GGMLQuantizationType.BF16: lambda: (
            convert(x, target).view(np.uint16).astype(np.uint32).__lshift__(16).view(np.float32)
        ),
        GGMLQuantizationType.Q8_0: lambda: dequantize_q8_0(quantize_q8_0(x)),
        GGMLQuantizationType.Q8_1: lambda: dequantize_q8_0(quantize_q8_0(x)),  # the same blocks, and their sums
        GGMLQuantizationType.Q8_K: lambda: dequantize_q8_k(convert(x, target)),
    }[target]()
    assert np.array_equal(round_activations(x, weight), expected)


def convert(x: np.ndarray, target: GGMLQuantizationType) -> np.ndarray:  # type: ignore[type-arg]
    """Rows x [R, n] in ggml's type `target`, uint8 [R, bytes], by the CPU backend's own conversion."""
    per_row = {GGMLQuantizationType.BF16: 2 * x.shape[1], GGMLQuantizationType.Q8_K: x.shape[1] // 256 * 292}[target]
    out = np.empty((len(x), per_row), np.uint8)
    traits = _traits(int(target))
    assert traits is not None
    ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p, ct.c_int64)(traits.from_float)(x.ctypes.data, out.ctypes.data, x.size)
    return out


def dequantize_q8_k(blocks: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """F32 of `block_q8_K`: a scale, 256 signed bytes, and sums of sixteen."""
    view = blocks.view(np.dtype([("scale", "<f4"), ("values", "i1", (256,)), ("sums", "<i2", (16,))]))
    values = view["values"].astype(np.float32) * view["scale"][..., None]
    return values.reshape(len(blocks), -1)


def test_a_type_that_cannot_be_dequantised_is_refused() -> None:
    weight = np.zeros((1, 32, 32), np.float32)
    layer, read = made_up_layer({"ffn_down_exps.weight": weight}, 32, 32, "q8_0")
    for kind, message in ((99, "type 99"), (int(GGMLQuantizationType.Q8_1), "Q8_1")):
        object.__setattr__(layer.tensors[0], "type", kind)
        backend = NumpyExperts("float32")
        with pytest.raises(UnsupportedModel, match=message):
            backend.load_layer(layer, DOWN_ONLY, [0], read)
        assert backend.held(0) == frozenset()


def test_few_experts_stay_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, read = made_up_layer({"ffn_down_exps.weight": np.ones((8, 32, 32), np.float32)}, 32, 32, "q8_0")
    monkeypatch.setattr(numpy_reference, "DEQUANTISED_BYTES_MAX", 3 * 32 * 32 * 4)
    backend = NumpyExperts("float32")
    backend.load_layer(layer, DOWN_ONLY, range(8), read)
    experts = np.array([0, 1, 2, 3, 4, 5, 6, 7, 7, 0], np.int32)
    y = backend.compute(0, np.ones((1, 32), np.float32), experts * 0, experts)
    assert y == pytest.approx(np.full((10, 32), 32), rel=1e-3)
    assert len(backend._dequantised) == 3
    backend.close()
    assert (len(backend._dequantised), backend._dequantised_bytes) == (0, 0)
