"""Figures behind the invariants, of the demo model unless another is named: `python -m tests.measure_invariants`.

It prints what docs/equivalence.md says of routers left to themselves, of the leader's rounding, of sums over experts,
of margins, and of depth. One thread, a few minutes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click
import numpy as np

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy's first product

from backends.activations import dequantize_q8_0, quantize_q8_0
from backends.expert_source import GGUFExpertSource
from backends.gguf_file import GGUFFile
from backends.llama import LlamaModel, start_library
from backends.numpy_reference import NumpyExperts
from backends.synthetic import ModelShape, write_random_model
from backends.trace import TracingHook
from swarmnode.bench import find_model
from swarmnode.cli.progress import ProgressLine
from swarmnode.equivalence.passes import decode, pass_through, windows_of
from swarmnode.equivalence.splits import Split, split_model
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.text import bundled_text
from swarmnode.local_experts import load_experts
from tests import invariant_figures as figures
from tests.invariant_figures import LayerRows
from tests.tiny_architectures import write_deep

WIDE = ModelShape("top8-of-256", n_layers=4, n_expert=256, n_used=8, n_embd=512, n_ff=128, n_head=8, n_vocab=320)
NODES = (2, 4, 8)
WOBBLE, DRAWS = 1e-3, 400


@click.command()
@click.argument("model", default="demo")
@click.option("--tokens", default=512, show_default=True)
def main(model: str, tokens: int) -> None:
    start_library()
    with ProgressLine() as progress, tempfile.TemporaryDirectory() as folder:
        file, wide, deep = find_model(model, progress), Path(folder) / "wide.gguf", Path(folder) / "deep.gguf"
        write_random_model(wide, WIDE)
        write_deep(deep)
        print(f"{file.name} and {WIDE.name} (random weights), {tokens} tokens")
        for path in (file, wide):
            print(f"\n== {path.name}")
            with split_model(path, find_target("ggml-cpu"), find_target("reference"), progress) as split:
                a, b = figures.rows_of(split, tokens)
                if path == wide:
                    routers(path, a, b)
                sums(split, path, a)
        print(f"\n== margins of {file.name}")
        margins(file, tokens)
        print("\n== 49 layers")
        depth(deep, progress)


def routers(path: Path, a: dict[int, LayerRows], b: dict[int, LayerRows]) -> None:
    for layer in sorted(a):
        found = figures.self_routed(path, layer, a[layer], b[layer])
        at_boundary = found.gaps <= 2 * found.moved
        beyond = int((found.changed & ~at_boundary).sum())
        print(
            f"layer {layer}: {found.changed.mean():.2%} of {len(found.changed)} sets change; the gap to the next "
            f"expert is reached at {at_boundary.mean():.1%}, beyond it {beyond} change"
        )


def sums(split: Split, path: Path, rows: dict[int, LayerRows]) -> None:
    """Errors of sums over experts, sharded sums, and what the leader's rounding takes away; medians over the layers."""
    oracle, kernels = NumpyExperts("float64"), find_target("ggml-cpu").make()
    found, in_float64, in_f32, rounded = [], [], [], []
    with GGUFFile.open(path) as gguf:
        source = GGUFExpertSource(gguf, split.manifest)
        for spec in split.manifest.layers:
            layer, of_layer = spec.layer, rows[spec.layer]
            for backend in (oracle, kernels):
                load_experts(backend, split.manifest, {layer: range(spec.n_expert)}, source)
            y, exact = of_layer.computed(kernels, layer), of_layer.exact(oracle, layer)
            found.append(figures.errors_of_sums(y, exact))
            for nodes in NODES:
                owners = [f"node-{i}" for i in np.random.default_rng(nodes).integers(0, nodes, spec.n_expert)]
                in_float64.append(figures.sharded_in_float64(of_layer, oracle, layer, owners))
                in_f32.append(figures.sharded_in_f32(of_layer, y, layer, owners))
            sent = LayerRows(dequantize_q8_0(quantize_q8_0(of_layer.x)), of_layer.ids, of_layer.weights)
            of_sent = sent.computed(kernels, layer), sent.exact(oracle, layer)
            rounded.append([np.linalg.norm(p - q) / np.linalg.norm(q) for p, q in ((y, exact), of_sent)])
            for backend in (oracle, kernels):
                backend.unload_layer(layer)
    exponents = [one.exponent for one in found if one.exponent is not None]
    n_used = rows[split.manifest.layers[0].layer].ids.shape[1]
    print(
        f"errors of k of {n_used} experts grow as k^{np.median(exponents):.2f} ({min(exponents):.2f} to "
        f"{max(exponents):.2f} over layers); cosine of two experts' errors {np.median([o.cosine for o in found]):.3f}; "
        f"error of the sum {np.median([o.relative for o in found]):.1e} of it"
    )
    print(
        f"sharded over {NODES} nodes: in float64 {max(s.largest for s in in_float64):.1e} at most (relative "
        f"{max(s.relative for s in in_float64):.1e}), partial sums in F32 relative "
        f"{np.median([s.relative for s in in_f32]):.1e} (largest {max(s.largest for s in in_f32):.1e})"
    )
    before, after = np.median(np.array(rounded), axis=0)
    print(f"kernels to float64: {before:.1e}; with activations that the leader rounded {after:.1e}")


def margins(file: Path, tokens: int) -> None:
    with LlamaModel(file, figures.SETTINGS) as model:
        logits = figures.logits_of(model, tokens)
    two = np.sort(logits, axis=1)[:, -2:]
    quantiles = np.quantile(two[:, 1] - two[:, 0], (0.01, 0.05, 0.1, 0.25, 0.5, 0.9))
    print("quantiles of margins at 1, 5, 10, 25, 50, 90 %:", " ".join(f"{q:.3f}" for q in quantiles))
    for size in (WOBBLE, 1e-2, 1e-1):
        found = figures.wobble(logits, size, DRAWS)
        print(
            f"logits moved by up to {size:g}, {DRAWS} times: {found.below} of {found.positions} margins are below "
            f"twice that; {found.flips} flips, {found.predicted:.1f} predicted, {found.flips_above} above; a rate of "
            f"{found.flips / DRAWS / found.positions:.1e} a token"
        )


def depth(deep: Path, progress: ProgressLine) -> None:
    with split_model(deep, find_target("ggml-cpu"), find_target("reference"), progress) as split:
        (level,) = pass_through(split, bundled_text(), 256, progress).levels(["layer"])
        hook = TracingHook(split.learned.layers.values())
        with LlamaModel(deep, figures.SETTINGS, hook) as model:
            decode(model, windows_of(model.vocabulary, bundled_text(), 64)[0])
    sizes = [float(np.median(np.linalg.norm(rows, axis=1))) for _, rows in sorted(hook.residuals.items())]
    print(f"residual grows {sizes[-1] / sizes[0]:.0f} times; within its band: {level['pass']}")
    for name in ("pinned", "free", "noise_floor"):
        drift = level[name]["relative_l2"]
        print(
            f"{name}: {drift[0]:.1e} {drift[12]:.1e} {drift[24]:.1e} {drift[48]:.1e}, L^{level[name]['exponent']:.2f}"
        )
    print("limits:", " ".join(f"{level['tolerance']['relative_l2'][at]:.1e}" for at in (0, 12, 24, 48)))


if __name__ == "__main__":
    main()
