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
from backends.experts import F32
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
from swarmnode.kernels.matrix import usual_targets
from swarmnode.local_experts import load_experts
from tests import invariant_figures as figures
from tests.expert_models import made_up_layer, take_apart
from tests.invariant_figures import LayerRows
from tests.tiny_architectures import write_deep

WIDE = ModelShape("top8-of-256", n_layers=4, n_expert=256, n_used=8, n_embd=512, n_ff=128, n_head=8, n_vocab=320)
NODES = (2, 4, 8)
WOBBLE, DRAWS = 1e-3, 400
MARGIN_TOKENS_TIMES = 8  # small margins are rare, and one model alone is quick
SAME_CODES = 1e-5  # relative L2 of a row: sums in another order stay below, a code that rounds otherwise does not


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
                progress("a text through both sides", 0, 1)
                a, b = figures.rows_of(split, tokens)
                if path == wide:
                    routers(path, a, b)
                sums(split, path, a, progress)
        print(f"\n== margins of {file.name}")
        margins(file, MARGIN_TOKENS_TIMES * tokens)
        print("\n== the leader's rounding, across kernels")
        kernels(progress)
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


def sums(split: Split, path: Path, rows: dict[int, LayerRows], progress: ProgressLine) -> None:
    """Errors of sums over experts, sharded sums, and what the leader's rounding takes away; medians over the layers."""
    oracle, kernels = NumpyExperts("float64"), find_target("ggml-cpu").make()
    found, in_float64, in_f32, rounded = [], [], [], []
    with GGUFFile.open(path) as gguf:
        source = GGUFExpertSource(gguf, split.manifest)
        for spec in split.manifest.layers:
            layer, of_layer = spec.layer, rows[spec.layer]
            progress("sums over experts", len(found), len(split.manifest.layers))
            for backend in (oracle, kernels):
                load_experts(backend, split.manifest, {layer: range(spec.n_expert)}, source)
            y, exact = of_layer.computed(kernels, layer), of_layer.exact(oracle, layer)
            found.append(figures.errors_of_sums(y, exact))
            for nodes in NODES:
                owners = [f"node-{i}" for i in np.random.default_rng(nodes).integers(0, nodes, spec.n_expert)]
                in_float64.append(figures.sharded_in_float64(of_layer, exact, layer, owners))
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
        f"sharded over {NODES} nodes: in float64 {max(s.largest for s in in_float64):.3e} at most (relative "
        f"{max(s.relative for s in in_float64):.1e}), partial sums in F32 relative "
        f"{np.median([s.relative for s in in_f32]):.1e} (largest {max(s.largest for s in in_f32):.1e})"
    )
    before, after = np.median(np.array(rounded), axis=0)
    print(f"kernels to float64: {before:.1e}; with activations that the leader rounded {after:.1e}")


def kernels(progress: ProgressLine) -> None:
    """Experts 1024 -> 512 -> 1024 on the same rows, by every kernel that is built for this processor."""
    random = np.random.default_rng(0)
    tensors = {
        f"ffn_{name}_exps.weight": (random.standard_normal((2, *shape)) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in (("gate", (512, 1024)), ("up", (512, 1024)), ("down", (1024, 512)))
    }
    x = random.standard_normal((256, 1024)).astype(np.float32)
    x[::2] = np.rint(x[::2] * 16) / 16  # as coarse as activations that were rounded before: many ties
    sent, tokens = dequantize_q8_0(quantize_q8_0(x)), np.arange(256, dtype=np.int32)
    for kind in ("q4_0", "q8_0"):
        layer, read = made_up_layer(tensors, 1024, 1024, kind)
        results: dict[str, tuple[F32, F32]] = {}
        for name in usual_targets():
            if name.startswith(("ggml-cpu", "reference")):
                progress(f"{kind} on {name}", 0, 1)
                backend = find_target(name).make()
                backend.load_layer(layer, take_apart("qwen3moe", kind).program, range(2), read)
                results[name] = tuple(backend.compute(0, rows, tokens, tokens % 2) for rows in (x, sent))  # type: ignore[assignment]
                backend.close()
        installed = results.pop("ggml-cpu")
        for name, found in results.items():
            of_x, of_sent = (
                np.linalg.norm(p - q, axis=1) / np.linalg.norm(p, axis=1) for p, q in zip(installed, found, strict=True)
            )
            print(
                f"{kind} ggml-cpu, {name}: median {np.median(of_x):.1e} and with rounded activations "
                f"{np.median(of_sent):.1e}, largest {of_x.max():.1e} and {of_sent.max():.1e}, rows with another code "
                f"{(of_x > SAME_CODES).mean():.1%} and {(of_sent > SAME_CODES).mean():.1%}"
            )


def margins(file: Path, tokens: int) -> None:
    """Window by window: a large vocabulary's logits take much memory."""
    sizes = (WOBBLE, 1e-2, 1e-1)
    found: dict[float, list[figures.Wobble]] = {size: [] for size in sizes}
    every = []
    with LlamaModel(file, figures.SETTINGS) as model:
        for number, window in enumerate(windows_of(model.vocabulary, bundled_text(), tokens)):
            logits = decode(model, window)
            two = np.sort(np.partition(logits, -2, axis=1)[:, -2:], axis=1)
            every.append(two[:, 1] - two[:, 0])
            for size in sizes:
                found[size].append(figures.wobble(logits, size, DRAWS, seed=number))
    quantiles = np.quantile(np.concatenate(every), (0.01, 0.05, 0.1, 0.25, 0.5, 0.9))
    print("quantiles of margins at 1, 5, 10, 25, 50, 90 %:", " ".join(f"{q:.3f}" for q in quantiles))
    for size, parts in found.items():
        positions, below, flips, above = (
            sum(getattr(part, name) for part in parts) for name in ("positions", "below", "flips", "flips_above")
        )
        predicted, rate = sum(part.predicted for part in parts), flips / DRAWS / positions
        print(
            f"logits moved by up to {size:g}, {DRAWS} times: {below} of {positions} margins are below twice that; "
            f"{flips} flips, {predicted:.1f} predicted, {above} above; a rate of {rate:.1e} a token"
        )


def depth(deep: Path, progress: ProgressLine) -> None:
    with split_model(deep, find_target("ggml-cpu"), find_target("reference"), progress) as split:
        (level,) = pass_through(split, bundled_text(), 256, progress).levels(["layer"])
        hook = TracingHook(split.learned.layers.values())
        with LlamaModel(deep, figures.SETTINGS, hook) as model:
            decode(model, windows_of(model.vocabulary, bundled_text(), 64)[0])
    sizes = [float(np.median(np.linalg.norm(rows, axis=1))) for _, rows in sorted(hook.residuals.items())]
    print(f"residual grows {sizes[-1] / sizes[0]:.0f} times; within its band: {level['pass']}")
    noise = level["noise_floor"]["pinned"]
    for name, found in (("pinned", level["pinned"]), ("free", level["free"]), ("noise floor", noise)):
        drift = found["relative_l2"]
        print(f"{name}: {drift[0]:.1e} {drift[12]:.1e} {drift[24]:.1e} {drift[48]:.1e}, L^{found['exponent']:.2f}")
    print("limits:", " ".join(f"{level['tolerance']['relative_l2'][at]:.1e}" for at in (0, 12, 24, 48)))


if __name__ == "__main__":
    main()
