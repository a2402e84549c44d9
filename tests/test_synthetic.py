"""Random models of real shapes: loadable, sane, reproducible, and written whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from backends.llama import LlamaModel, LlamaSettings
from backends.synthetic import OLMOE_1B_7B, OLMOE_TINY, write_random_model


def test_llama_cpp_runs_it_with_sane_logits(tmp_path: Path) -> None:
    path = tmp_path / OLMOE_TINY.file_name(seed=3)
    write_random_model(path, OLMOE_TINY, seed=3)
    tokens = np.random.default_rng(0).integers(0, OLMOE_TINY.n_vocab, 32).astype(np.int32)
    with LlamaModel(path, LlamaSettings(context_tokens=64, batch_tokens=64)) as model:
        assert model.vocabulary.n_vocab == OLMOE_TINY.n_vocab
        logits = model.decode(tokens, np.arange(32, dtype=np.int32), np.zeros(32, np.int32), np.ones(32, np.bool_))
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    assert len(set(logits.argmax(axis=1))) > 16


def test_weights_have_the_promised_scale_and_experts_differ(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_model(path, OLMOE_TINY)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    gate = dequantize(tensors["blk.0.ffn_gate_exps.weight"].data, tensors["blk.0.ffn_gate_exps.weight"].tensor_type)
    assert gate.shape == (OLMOE_TINY.n_expert, OLMOE_TINY.n_ff, OLMOE_TINY.n_embd)
    assert gate.std() == pytest.approx(OLMOE_TINY.n_embd**-0.5, rel=0.05)
    assert abs(gate.mean()) < gate.std() / 50
    flat = gate.reshape(OLMOE_TINY.n_expert, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(len(flat))).max() < 0.1


def test_name_and_bytes_follow_shape_and_seed(tmp_path: Path) -> None:
    other_shape = dataclasses.replace(OLMOE_TINY, n_ff=96)
    assert len({OLMOE_TINY.file_name(0), OLMOE_TINY.file_name(1), other_shape.file_name(0)}) == 3
    paths = [tmp_path / name for name in "abc"]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write_random_model(path, OLMOE_TINY, seed)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_model(tmp_path / "model.gguf", OLMOE_TINY, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_leavings_of_a_dead_writer_are_swept_and_a_living_one_is_let_be(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, living = (tmp_path / f".model.gguf.{pid}.partial" for pid in (dead.pid, os.getppid()))
    stale.touch()
    living.touch()
    write_random_model(tmp_path / "model.gguf", OLMOE_TINY)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, "model.gguf"])


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_random_model(tmp_path / "model.gguf", OLMOE_TINY, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_impossible_shapes_are_refused() -> None:
    for wrong in ({"n_embd": 100}, {"n_ff": 33}, {"n_head": 3}, {"n_used": 9}):
        with pytest.raises(ValueError, match="impossible shape"):
            dataclasses.replace(OLMOE_TINY, **wrong)
    assert OLMOE_1B_7B.n_expert == 64
