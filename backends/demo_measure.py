"""Measures what the demo model's rewriting changed, and how much it hurts to get the experts wrong.

    python -m backends.demo_measure CACHE_FOLDER [--json]

builds the demo model if the folder does not hold it yet. The dense source and the mixture decode the same text, which
the recipe has never seen. Wrong routing is made in the file: a permuted router sends every token to other experts, a
swapped pair of router rows to a wrong twin, and a scale of the weights stands for weights that were forgotten.
Everything runs in plain llama.cpp on one thread and takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from backends.demo_model import demo_source, ensure_demo_model
from backends.demo_recipe import ARCHITECTURE
from backends.dense_forward import DenseModel, feed_forward_activity
from backends.llama import LlamaModel, LlamaSettings

F32 = NDArray[np.float32]
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model on the evaluation text: perplexities, and how far its next-token distribution is from the dense one's."""

    name: str
    perplexity_prose: float
    perplexity_chat: float
    kl_to_dense: float
    top1_agreement: float


def evaluation_tokens(model: LlamaModel) -> dict[str, list[list[int]]]:
    """The bundled evaluation text in tokens: passages of prose, and chats through the model's template."""
    text = json.loads(files("backends.data").joinpath("evaluation.json").read_text())
    vocabulary = model.vocabulary
    chats = [
        vocabulary.render_chat([{"role": "user", "content": question}]) + answer for question, answer in text["chat"]
    ]
    return {
        "prose": [vocabulary.tokenize(passage, parse_special=False) for passage in text["prose"]],
        "chat": [vocabulary.tokenize(chat) for chat in chats],
    }


def compare(dense: Path, demo: Path, report: Callable[[Comparison], None]) -> None:
    """Compare the dense model with itself under other kernels, the demo model, and damaged copies of it."""
    with LlamaModel(dense, LlamaSettings(context_tokens=_CONTEXT, batch_tokens=_CONTEXT)) as model:
        passages = evaluation_tokens(model)
        reference = {kind: [_log_probabilities(model, tokens) for tokens in group] for kind, group in passages.items()}

    def measure(name: str, path: Path, *, fast: bool = False) -> None:
        with LlamaModel(path, LlamaSettings(context_tokens=_CONTEXT, batch_tokens=_CONTEXT, fast=fast)) as model:
            report(_comparison(name, model, passages, reference))

    measure("dense", dense)
    measure("dense, flash attention", dense, fast=True)
    measure("demo model", demo)
    with tempfile.TemporaryDirectory(prefix="demo-measure-", dir=demo.parent) as folder:
        for name, damage in _DAMAGES.items():
            damaged = Path(folder) / "damaged.gguf"
            shutil.copyfile(demo, damaged)
            damage(damaged)
            measure(name, damaged)


def expert_load(dense: Path, demo: Path) -> float:
    """The busiest expert's load over the mean load of its layer, averaged over layers, on the evaluation text."""
    with LlamaModel(dense, LlamaSettings(context_tokens=_CONTEXT, batch_tokens=_CONTEXT)) as model:
        sequences = [tokens for group in evaluation_tokens(model).values() for tokens in group]
    routers = {t.name: np.array(t.data) for t in GGUFReader(demo).tensors if t.name.endswith("ffn_gate_inp.weight")}
    busiest = []
    for activity in feed_forward_activity(DenseModel(dense), sequences):
        scores = activity.inputs @ routers[f"blk.{activity.layer}.ffn_gate_inp.weight"].T
        share = (scores > 0).mean(axis=0)  # one of each pair scores above zero
        busiest.append(share.max() / share.mean())
    return float(np.mean(busiest))


def _log_probabilities(model: LlamaModel, tokens: list[int]) -> F32:
    """Log-probabilities of the next token after each token of a fresh sequence, F32 [tokens, n_vocab]."""
    n = len(tokens)
    model.clear_all()
    positions = np.arange(n, dtype=np.int32)
    logits = model.decode(np.array(tokens, np.int32), positions, np.zeros(n, np.int32), np.ones(n, np.bool_))
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def _comparison(
    name: str, model: LlamaModel, passages: Mapping[str, list[list[int]]], reference: Mapping[str, list[F32]]
) -> Comparison:
    perplexity, divergences, agreements = {}, [], []
    for kind, group in passages.items():
        surprises = []
        for tokens, expected in zip(group, reference[kind], strict=True):
            got = _log_probabilities(model, tokens)
            surprises.append(-got[np.arange(len(tokens) - 1), tokens[1:]])
            divergences.append((np.exp(expected) * (expected - got)).sum(axis=1))
            agreements.append(got.argmax(axis=1) == expected.argmax(axis=1))
        perplexity[kind] = float(np.exp(np.concatenate(surprises).mean()))
    return Comparison(
        name=name,
        perplexity_prose=perplexity["prose"],
        perplexity_chat=perplexity["chat"],
        kl_to_dense=float(np.concatenate(divergences).mean()),
        top1_agreement=float(np.concatenate(agreements).mean()),
    )


def _routers(path: Path) -> Iterator[Any]:
    """Every layer's router in the file, F32 [experts, width]; changes are written back."""
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name.endswith("ffn_gate_inp.weight"):
            yield tensor.data
    reader.data.flush()


def _permute(path: Path) -> None:
    for router in _routers(path):
        router[:] = np.roll(router, 1, axis=0)


def _swap_one_pair(path: Path) -> None:
    for router in _routers(path):
        twin = len(router) // 2
        router[[0, twin]] = router[[twin, 0]]


def _forget_weights(path: Path) -> None:
    reader = GGUFReader(path, "r+")
    n_expert = reader.fields[f"{ARCHITECTURE}.expert_count"].contents()
    field = reader.fields[f"{ARCHITECTURE}.expert_weights_scale"]
    field.parts[field.data[0]][0] = float(n_expert)
    reader.data.flush()


_DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "every id moved to the next": _permute,
    "one of eight ids moved to its twin": _swap_one_pair,
    "weights left out": _forget_weights,
}


def main() -> None:
    """The command: one line, or one JSON object, for each comparison, and the load of the busiest expert."""
    parser = argparse.ArgumentParser(prog="python -m backends.demo_measure")
    parser.add_argument("cache_folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def report(row: Comparison) -> None:
        if options.json:
            values = {name: getattr(row, name) for name in Comparison.__slots__}
            print(json.dumps(values), flush=True)
        else:
            perplexities = f"perplexity prose {row.perplexity_prose:12.2f}  chat {row.perplexity_chat:12.2f}"
            print(f"{row.name:36}{perplexities}  KL {row.kl_to_dense:9.4f}  top-1 {row.top1_agreement:.3f}", flush=True)

    demo = ensure_demo_model(options.cache_folder, _tell)
    dense = demo_source(options.cache_folder, _tell)
    compare(dense, demo, report)
    load = expert_load(dense, demo)
    print(json.dumps({"busiest_expert_load": load}) if options.json else f"busiest expert: {load:.2f} times the mean")


def _tell(step: str, done: int, total: int) -> None:
    print(f"\r{step}: {done}/{total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
