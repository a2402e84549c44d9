"""The tiny models are what they claim: llama.cpp loads them, their experts are live, their routing varies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from backends.llama import LlamaModel, LlamaSettings
from tests.tiny_architectures import KINDS, write_tiny_model
from tests.tiny_models import N_EXPERT, N_VOCAB

PROMPT = "The swarm answers: 2 + 2 = 4 😀"


def logits_of(path: Path, text: str = PROMPT) -> NDArray[np.float32]:
    """llama.cpp's logits after each token of `text`, F32 [tokens, N_VOCAB]."""
    with LlamaModel(path, LlamaSettings(context_tokens=128, batch_tokens=128)) as model:
        tokens = np.array(model.vocabulary.tokenize(text), np.int32)
        n = len(tokens)
        return model.decode(tokens, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.ones(n, np.bool_))


def zero_expert(path: Path, expert: int) -> set[int]:
    """Zero one expert's down projections in the file, in every layer; returns those layers."""
    reader = GGUFReader(path, "r+")
    layers = set()
    for tensor in reader.tensors:
        if match := re.fullmatch(r"blk\.(\d+)\.ffn_down_exps\.(weight|bias)", tensor.name):
            tensor.data[expert] = 0
            layers.add(int(match[1]))
    reader.data.flush()
    return layers


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_runs_it_and_every_expert_counts(kind: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", kind)
    whole = logits_of(path)
    assert whole.shape[1] == N_VOCAB
    assert np.isfinite(whole).all()
    assert 1.0 < whole.std() < 10.0
    first_effects = set()
    for expert in range(N_EXPERT):
        damaged = write_tiny_model(tmp_path / "damaged.gguf", kind)
        assert zero_expert(damaged, expert)
        changed = np.abs(logits_of(damaged) - whole).max(axis=1) > 1e-3
        assert changed.any(), f"expert {expert} is never chosen"
        first_effects.add(int(changed.argmax()))
    assert len(first_effects) > 1, "every expert is chosen by the same token"


@pytest.mark.parametrize("quantisation", ["q4_0", "q8_0", "q4_k", "f16", "mxfp4"])
@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss", "deepseek2-merged"])
def test_quantised_models_run(kind: str, quantisation: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", kind, quantisation=quantisation)
    experts = {t.tensor_type.name for t in GGUFReader(path).tensors if t.name.endswith("_exps.weight")}
    assert experts == {quantisation.upper()}
    logits = logits_of(path)
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("a", "b", "c"))
    write_tiny_model(first, "olmoe", seed=1)
    write_tiny_model(again, "olmoe", seed=1)
    write_tiny_model(other, "olmoe", seed=2)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_text_survives_the_byte_tokenizer(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "olmoe")
    with LlamaModel(path, LlamaSettings(context_tokens=64, batch_tokens=64)) as model:
        tokens = model.vocabulary.tokenize("😀")
        assert tokens == list("😀".encode())
        assert b"".join(model.vocabulary.piece(t) for t in model.vocabulary.tokenize(PROMPT)) == PROMPT.encode()
