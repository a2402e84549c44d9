"""A model's file put together again from its trunk and its experts: llama.cpp computes the same with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.expert_tensors import parse_name, split_shape
from backends.gguf_file import GGUFFile
from backends.gguf_types import tensor_bytes
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import ExpertTensor, LayerExperts, Manifest
from backends.trunk_file import expert_layers, trunk_forms, write_outline, write_trunk
from backends.whole_file import plan_whole
from capabilities.errors import UnsupportedModel
from tests.shard_models import shard_model
from tests.test_trunk_file import loads
from tests.tiny_architectures import KINDS, write_tiny_model


def described(gguf: GGUFFile) -> Manifest:
    """As much of a manifest as the whole file needs; hashes and programs are of no model."""
    layers = []
    for number in expert_layers(gguf):
        tensors, n_expert = [], 0
        for name, info in gguf.tensors.items():
            parts = parse_name(name)
            if parts is not None and parts.layer == number:
                shape, n_expert = split_shape(info)
                tensors.append(ExpertTensor(parts.short, info.type, shape, tensor_bytes(info.type, shape)))
        tensors.sort(key=lambda tensor: tensor.name)
        layers.append(LayerExperts(number, n_expert, 1, 1, 1, 0, tuple(tensors), (b"",) * n_expert))
    return replace(shard_model().manifest, layers=tuple(layers))


def write_whole(gguf: GGUFFile, trunk: Path, target: Path) -> None:
    """From the trunk's file, and experts of the model's own."""
    manifest = described(gguf)
    with GGUFFile.open(trunk) as narrow, target.open("wb") as file:
        plan = plan_whole(narrow, manifest)
        plan.write_trunk(narrow, file.fileno())
        for layer in manifest.layers:
            for expert in range(layer.n_expert):
                for tensor, place in zip(layer.tensors, plan.places(layer, expert), strict=True):
                    info = gguf.tensors[f"blk.{layer.layer}.{tensor.name}"]
                    os.pwrite(file.fileno(), gguf.data(info, expert * tensor.nbytes, tensor.nbytes), place[1])
    assert target.stat().st_size == plan.nbytes


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"llama4"}))
def test_every_kind_of_expert_block_comes_back(tmp_path: Path, kind: str) -> None:
    trunk, whole = tmp_path / "trunk.gguf", tmp_path / "whole.gguf"
    with GGUFFile.open(write_tiny_model(tmp_path / "model.gguf", kind)) as gguf:
        for form in trunk_forms(gguf):
            write_outline(gguf, trunk, form)
            if loads(trunk):
                write_trunk(gguf, trunk, form)
                break
        write_whole(gguf, trunk, whole)
        with GGUFFile.open(whole) as again:
            assert list(again.tensors) == list(gguf.tensors)
            for name, info in gguf.tensors.items():
                assert (again.tensors[name].type, again.data(again.tensors[name])) == (info.type, gguf.data(info))
            write_trunk(again, tmp_path / "trunk2.gguf", form)
        assert (tmp_path / "trunk2.gguf").read_bytes() == trunk.read_bytes()
    assert loads(whole)
    tokens = np.arange(3, 9, dtype=np.int32)
    rows = []
    for path in (tmp_path / "model.gguf", whole):
        model = LlamaModel(path, LlamaSettings(context_tokens=32))
        wants = np.ones(len(tokens), bool)
        rows.append(model.decode(tokens, np.arange(6, dtype=np.int32), np.zeros(6, np.int32), wants).tobytes())
        model.close()
    assert rows[0] == rows[1]


def test_experts_that_no_graph_runs_are_named(tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny_model(tmp_path / "model.gguf", "olmoe")) as gguf:
        manifest = described(gguf)
        write_trunk(gguf, tmp_path / "trunk.gguf", trunk_forms(gguf)[0])
    with (
        GGUFFile.open(tmp_path / "trunk.gguf") as trunk,
        pytest.raises(UnsupportedModel, match=f"in layer {manifest.layers[-1].layer}"),
    ):
        plan_whole(trunk, replace(manifest, layers=manifest.layers[:-1]))
