"""`swarmctl model check FILE`: does the swarm compute this model as llama.cpp does?

The model is split over N in-process workers, and its logits are compared with llama.cpp on the undivided file: a
prefill in one batch, then token by token. It runs as a child process (backends/child.py) and answers before anyone
joins a swarm with the model. Where bits differ, both runs are repeated with their layers recorded, and the first layer
that differs is named.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from backends.add_model import build_manifest
from backends.child import Report, coming_back, run_child
from backends.device import Device
from backends.expert_source import GGUFExpertSource
from backends.experts import F32, I32, GgmlExperts
from backends.gguf_file import GGUFFile
from backends.learn import LearnedModel, make_trunk
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import FileHash, Manifest
from backends.moe_hook import Hook, ObservingHook, ServingHook
from capabilities.errors import BadModelFile, PeerMistake, UnsupportedModel
from scheduler.placement import LayerSpec, WorkerSpec, even_split
from swarmnode.local_experts import LocalExperts, load_experts

PREFILL_TOKENS: Final = 24
DECODE_TOKENS: Final = 8
WORKERS_MAX: Final = 64
_CONTEXT: Final = 64
_SEED: Final = 1

Rows = dict[int, list[F32]]  # layer -> the experts' outputs [T, K, n_out] of each decode


@dataclass
class CheckReport:
    """The verdict. Keys are those of `--json`; null where they do not apply."""

    file: str
    architecture: str | None = None
    moe_layers: int | None = None
    experts: int | None = None
    experts_used: int | None = None
    workers: int | None = None
    bit_identical: bool | None = None
    prefill_bit_identical: bool | None = None
    decode_bit_identical: bool | None = None
    max_abs_diff: float | None = None
    supported: bool = False
    reason: str | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.supported and bool(self.bit_identical)


def check_model(file: Path, workers: int, report: Report) -> CheckReport:
    """Compare a model over `workers` in-process workers with llama.cpp undivided.

    Raises:
        BadModelFile: the file is broken.
    """
    result = CheckReport(file=file.name, workers=workers)
    with GGUFFile.open(file) as gguf, tempfile.TemporaryDirectory(prefix="swarmnode-check-") as folder:
        result.architecture = gguf.architecture
        trunk = Path(folder) / "trunk.gguf"
        try:
            report("llama.cpp on the undivided model", 0, 1)
            whole = _run(file, None, sum(gguf.sizes))
            report("llama.cpp on the undivided model", 1, 1)
            learned = make_trunk(gguf, trunk, lambda done, total: report("writing the trunk", done, total))
            _check_learned(gguf, learned, result)
            if not all(np.isfinite(logits).all() for logits in whole):
                raise UnsupportedModel("llama.cpp's own logits on the undivided model are not finite")
            _compare(gguf, trunk, learned, workers, whole, result, report)
        except UnsupportedModel as error:
            result.reason = error.message
        except BadModelFile as error:
            # The file is well-formed; llama.cpp knows no such architecture, or wants something that it does not have.
            result.reason = error.message
    return result


def _check_learned(gguf: GGUFFile, learned: LearnedModel, result: CheckReport) -> None:
    result.moe_layers = len(learned.layers)
    if learned.layers:
        result.experts_used = max(layer.n_used for layer in learned.layers.values())
    silent = [i for i in learned.silent if i not in _draft_layers(gguf)]
    if silent or not learned.layers:
        names = ", ".join(map(str, silent))
        raise UnsupportedModel(
            f"layers {names} hold routed experts that {gguf.architecture} never dispatches"
            if names
            else "no layer ever dispatched"
        )


def _draft_layers(gguf: GGUFFile) -> range:
    """Multi-token-prediction layers at the end: they hold experts that an ordinary forward pass does not run."""
    blocks = gguf.metadata.get(f"{gguf.architecture}.block_count")
    draft = gguf.metadata.get(f"{gguf.architecture}.nextn_predict_layers")
    if not isinstance(blocks, int) or not isinstance(draft, int):
        return range(0)
    return range(blocks - draft, blocks)


def _compare(
    gguf: GGUFFile,
    trunk: Path,
    learned: LearnedModel,
    workers: int,
    whole: tuple[F32, F32],
    result: CheckReport,
    report: Report,
) -> None:
    size = trunk.stat().st_size
    manifest = build_manifest(gguf, learned, gguf.stem, FileHash(bytes(32), size, ()), report)
    result.experts = max(layer.n_expert for layer in manifest.layers)
    executor, close = _split(gguf, manifest, workers, report)
    try:
        hook = ServingHook(learned.layers.values(), executor)
        result.supported = True
        result.bit_identical = False
        report("the swarm's answer", 0, 1)
        split = _run(trunk, hook, sum(gguf.sizes))
        report("the swarm's answer", 1, 1)
        result.prefill_bit_identical = np.array_equal(whole[0], split[0])
        result.decode_bit_identical = np.array_equal(whole[1], split[1])
        result.bit_identical = result.prefill_bit_identical and result.decode_bit_identical
        result.max_abs_diff = max(_max_abs(a, b) for a, b in zip(whole, split, strict=True))
        if not result.bit_identical:
            result.layers = _compare_layers(gguf, trunk, learned, executor)
            result.reason = _first_difference(result.layers)
    except PeerMistake as error:  # a worker's rows have another shape, or are not finite
        result.reason = error.message
    finally:
        close()


def _split(gguf: GGUFFile, manifest: Manifest, workers: int, report: Report) -> tuple[LocalExperts, Callable[[], None]]:
    names = [f"worker-{i}" for i in range(workers)]
    specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers]
    placement = even_split(specs, [WorkerSpec(name, 1 << 62) for name in names], term=1, epoch=1)
    source, device = GGUFExpertSource(gguf, manifest), Device()
    backends = {name: GgmlExperts(device) for name in names}
    for done, (name, backend) in enumerate(backends.items()):
        report("loading the experts", done, workers)
        load_experts(backend, manifest, placement.held_by(name), source)
    report("loading the experts", workers, workers)

    def close() -> None:
        for backend in backends.values():
            backend.close()

    return LocalExperts(manifest, placement, backends), close


def _run(path: Path, hook: Hook | None, model_bytes: int) -> tuple[F32, F32]:
    """Logits of the prefill [PREFILL_TOKENS, V] and of the tokens that follow one by one [DECODE_TOKENS, V]."""
    settings = LlamaSettings(context_tokens=_CONTEXT, batch_tokens=_CONTEXT)
    with coming_back(model_bytes), LlamaModel(path, settings, hook) as model:
        total = PREFILL_TOKENS + DECODE_TOKENS
        tokens = np.random.default_rng(_SEED).integers(0, model.vocabulary.n_vocab, total).astype(np.int32)
        prefill = _decode(model, tokens[:PREFILL_TOKENS], 0)
        steps = [_decode(model, tokens[i : i + 1], i) for i in range(PREFILL_TOKENS, total)]
        return prefill, np.concatenate(steps)


def _decode(model: LlamaModel, tokens: I32, first: int) -> F32:
    n = len(tokens)
    positions = np.arange(first, first + n, dtype=np.int32)
    return model.decode(tokens, positions, np.zeros(n, np.int32), np.ones(n, bool))


def _max_abs(a: F32, b: F32) -> float:
    """The largest difference; where a value is not finite, the largest number (JSON has no infinity)."""
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    limit = float(np.finfo(np.float32).max)
    return float(np.nan_to_num(difference, nan=limit, posinf=limit).max(initial=0.0))


def _compare_layers(gguf: GGUFFile, trunk: Path, learned: LearnedModel, executor: LocalExperts) -> list[dict[str, Any]]:
    """The largest difference of each layer's expert outputs, both sides observed in the same way."""
    observed = ObservingHook(learned.layers.values())
    _run(gguf.paths[0], observed, sum(gguf.sizes))
    recorder = _Recorder(executor)
    _run(trunk, ServingHook(learned.layers.values(), recorder), sum(gguf.sizes))
    return [
        {"layer": layer, "max_abs_diff": max(_max_abs(a, b) for a, b in zip(rows, recorder.rows[layer], strict=True))}
        for layer, rows in sorted(observed.rows.items())
    ]


class _Recorder:
    """Passes dispatches on and keeps what comes back."""

    def __init__(self, executor: LocalExperts) -> None:
        self._executor = executor
        self.rows: Rows = {}

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        self._executor.dispatch(layer, x, ids)

    def collect(self, layer: int) -> F32:
        y = self._executor.collect(layer)
        self.rows.setdefault(layer, []).append(y.copy())
        return y


def _first_difference(layers: list[dict[str, Any]]) -> str:
    first: Mapping[str, Any] | None = next((row for row in layers if row["max_abs_diff"] > 0), None)
    if first is None:
        return "the logits differ although every layer's expert outputs agree"
    return f"expert outputs differ first at layer {first['layer']}, by up to {first['max_abs_diff']:.3g}"


if __name__ == "__main__":
    _file, _workers = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(run_child(lambda report: asdict(check_model(_file, _workers, report))))
