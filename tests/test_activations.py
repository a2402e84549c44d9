"""Activations as Q8_0: exact where the kernels would round so themselves, and refused where they would not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends import activations
from backends.activations import BLOCK, BLOCK_BYTES, dequantize_q8_0, q8_0_is_exact, quantize_q8_0
from backends.device import Device
from backends.experts import F32, GgmlExperts
from backends.program import ExpertProgram, Node
from tests.expert_models import take_apart

EXACT = ["q4_0", "q8_0", "q5_0", "mxfp4", "iq4_nl"]
INEXACT = ["f32", "f16", "bf16", "q4_1", "q5_1", "q4_k", "q6_k"]


def some_activations(width: int, rows: int = 64) -> F32:
    """Ordinary rows, rows full of ties, outliers, zeros, and values below what a half-precision scale can say."""
    x = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    x[1] = np.rint(x[1] * 4) * 0.5
    x[2], x[3, :BLOCK] = 0, -0.0
    x[4, 7] = 1e3
    x[5] *= 1e-6
    x[6] *= 1e-30
    x[7, :BLOCK] = 127.5
    x[8] *= 64
    return x


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("quantisation", EXACT)
@pytest.mark.parametrize("kind", ["qwen3moe", "deepseek2-merged", "gpt-oss"])
def test_experts_see_the_same_bits(kind: str, quantisation: str, repack: bool) -> None:
    model = take_apart(kind, quantisation)
    assert q8_0_is_exact(model.layer, model.program)
    backend = GgmlExperts(Device("CPU"), repack=repack)
    layer = model.load(backend)
    x = some_activations(layer.n_in)
    sent = dequantize_q8_0(quantize_q8_0(x))
    assert not np.array_equal(sent, x)
    tokens = np.repeat(np.arange(len(x), dtype=np.int32), 2)
    experts = (tokens * 3 + np.arange(len(tokens), dtype=np.int32)) % 8
    whole = backend.compute(layer.layer, x, tokens, experts)
    assert np.array_equal(backend.compute(layer.layer, sent, tokens, experts), whole)
    one_token = np.zeros(2, np.int32), experts[:2]
    assert np.array_equal(backend.compute(layer.layer, sent[:1], *one_token), whole[:2])


@pytest.mark.parametrize("quantisation", INEXACT)
def test_other_weights_want_all_of_the_activations(quantisation: str) -> None:
    model = take_apart("qwen3moe", quantisation)
    assert not q8_0_is_exact(model.layer, model.program)
    backend = GgmlExperts(Device("CPU"))
    layer = model.load(backend)
    x = some_activations(layer.n_in)
    rows = np.arange(len(x), dtype=np.int32)
    sent = dequantize_q8_0(quantize_q8_0(x))
    results = [backend.compute(layer.layer, values, rows, rows % 8) for values in (x, sent)]
    assert not np.array_equal(*results), "the answer no is right: it would change bits"


def test_one_inexact_weight_decides() -> None:
    model = take_apart("qwen3moe", "q4_0")
    tensors = [replace(t, type=1) if t.name == "ffn_up_exps.weight" else t for t in model.layer.tensors]
    assert not q8_0_is_exact(replace(model.layer, tensors=tuple(tensors)), model.program)
    # The second product's input is computed on the worker, whatever its weight's type.
    tensors = [replace(t, type=1) if t.name == "ffn_down_exps.weight" else t for t in model.layer.tensors]
    assert q8_0_is_exact(replace(model.layer, tensors=tuple(tensors)), model.program)


def test_activations_with_another_use_are_sent_whole() -> None:
    model = take_apart("qwen3moe", "q4_0")
    nodes = *model.program.nodes, Node("mul", (4, 0))
    assert not q8_0_is_exact(model.layer, ExpertProgram(nodes))


def test_rows_that_are_no_whole_blocks_are_sent_whole() -> None:
    model = take_apart("qwen3moe", "q4_0")
    assert not q8_0_is_exact(replace(model.layer, n_in=48), model.program)


def test_a_build_without_a_cpu_library_of_its_own_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    model = take_apart("qwen3moe", "q4_0")
    activations._traits.cache_clear()
    monkeypatch.setattr(activations, "cpu_library", lambda: None)
    try:
        assert not q8_0_is_exact(model.layer, model.program)
    finally:
        activations._traits.cache_clear()


def test_rounding_again_changes_nothing() -> None:
    x = some_activations(256, rows=200)
    once = quantize_q8_0(x)
    assert once.shape == (200, 256 // BLOCK * BLOCK_BYTES)
    assert once.nbytes * 3.7 < x.nbytes
    again = quantize_q8_0(dequantize_q8_0(once))
    assert np.array_equal(dequantize_q8_0(again), dequantize_q8_0(once))
    vanished = [5, 6]  # with a scale of zero the bytes say nothing
    assert np.array_equal(np.delete(again, vanished, axis=0), np.delete(once, vanished, axis=0))


def test_a_block_is_a_half_precision_scale_and_32_bytes() -> None:
    x = np.linspace(-1, 1, BLOCK, dtype=np.float32)[None]
    (block,) = quantize_q8_0(x)
    assert block[:2].view(np.float16)[0] == np.float16(1 / 127)
    assert block[2:].view(np.int8).tolist() == np.rint(x[0] * 127).astype(int).tolist()
    assert dequantize_q8_0(block[None]) == pytest.approx(x, abs=1 / 250)


def test_rows_of_other_strides_are_read_as_rows() -> None:
    x = some_activations(64, rows=10)
    expected = quantize_q8_0(x)
    assert np.array_equal(quantize_q8_0(np.asfortranarray(x)), expected)
    assert np.array_equal(quantize_q8_0(np.repeat(x, 2, axis=0)[::2]), expected)
    assert np.array_equal(dequantize_q8_0(np.repeat(expected, 2, axis=0)[::2]), dequantize_q8_0(expected))
    assert quantize_q8_0(x[:0]).shape == (0, 68)
    assert dequantize_q8_0(expected[:0]).shape == (0, 64)
