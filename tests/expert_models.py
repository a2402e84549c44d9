"""Tiny models taken apart: trunk, manifest and expert bytes, made once for each kind and kept for the test run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from backends.add_model import build_manifest
from backends.expert_source import GGUFExpertSource, hash_file
from backends.experts import ExpertBackend, ReadSlice
from backends.gguf_file import GGUFFile
from backends.learn import LearnedModel, make_trunk
from backends.manifest import ExpertTensor, LayerExperts, Manifest
from backends.program import ExpertProgram, Node
from swarmnode.local_experts import load_layer
from tests.tiny_architectures import write_tiny_model
from tests.tiny_models import quantised

# An expert that is one matrix.
DOWN_ONLY = ExpertProgram((Node("x"), Node("mul_mat_id", (0,), "ffn_down_exps.weight", (0.0, 0.0))))

_folder = tempfile.TemporaryDirectory(prefix="swarmnode-tests-")


@dataclass(frozen=True, eq=False)
class TakenApart:
    """A model and everything that adding it to a swarm makes of it."""

    path: Path
    trunk: Path
    learned: LearnedModel
    manifest: Manifest
    source: GGUFExpertSource

    @property
    def layer(self) -> LayerExperts:
        """The last layer with experts."""
        return self.manifest.layers[-1]

    @property
    def program(self) -> ExpertProgram:
        """What an expert of `layer` computes."""
        return ExpertProgram.from_bytes(self.manifest.programs[self.layer.program])

    def load(self, backend: ExpertBackend, experts: Sequence[int] | None = None) -> LayerExperts:
        """Load experts of `layer`, all by default."""
        wanted = range(self.layer.n_expert) if experts is None else experts
        load_layer(backend, self.manifest, self.layer.layer, list(wanted), self.source)
        return self.layer


def quiet(step: str, done: int, total: int) -> None:
    """A report of progress that nobody reads."""


@cache
def tiny_file(kind: str, quantisation: str = "f32") -> Path:
    """A tiny model's file; not to be changed."""
    return write_tiny_model(Path(_folder.name) / f"{kind}-{quantisation}.gguf", kind, quantisation=quantisation)


@cache
def take_apart(kind: str, quantisation: str = "f32") -> TakenApart:
    path = tiny_file(kind, quantisation)
    gguf = GGUFFile.open(path)  # stays open for its source
    trunk = path.with_name(f"trunk-{path.name}")
    learned = make_trunk(gguf, trunk)
    manifest = build_manifest(gguf, learned, kind, hash_file(trunk), quiet)
    return TakenApart(path, trunk, learned, manifest, GGUFExpertSource(gguf, manifest))


def made_up_layer(
    tensors: Mapping[str, NDArray[np.float32]], n_in: int, n_out: int, quantisation: str = "f32"
) -> tuple[LayerExperts, ReadSlice]:
    """Layer 0 of arrays [n_expert, ...] by tensor name (matrices: [n_expert, rows, row]), and what reads its slices."""
    kinds = dict.fromkeys(tensors, GGMLQuantizationType.F32)
    kinds |= {name: GGMLQuantizationType[quantisation.upper()] for name, values in tensors.items() if values.ndim == 3}
    stored = [np.ascontiguousarray(_stored(values, kinds[name])) for name, values in tensors.items()]
    described = tuple(
        ExpertTensor(name, int(kinds[name]), values.shape[:0:-1], data[0].nbytes)
        for (name, values), data in zip(tensors.items(), stored, strict=True)
    )
    n_expert = len(stored[0])
    layer = LayerExperts(0, n_expert, min(2, n_expert), n_in, n_out, 0, described, (bytes(32),) * n_expert)
    return layer, lambda expert, tensor: stored[tensor][expert].tobytes()


def _stored(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    return values.astype(np.float32) if kind == GGMLQuantizationType.F32 else quantised(values, kind)
