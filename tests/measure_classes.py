"""Whether numeric classes say what kernels do: `python -m tests.measure_classes`.

Every built kernel of this machine gets its class for each weight type, and then computes the same experts over rows
that a model really dispatches. Kernels of one class must have the same bits in every row, else the exit status is 1. Of
two classes it is told in how many rows they differ: a class is worth its name where that is one row of many thousands.
Of all of them it is told in how many values their gated units do. One thread.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Final

import click
import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy's first product

from backends.class_inputs import unit_values
from backends.experts import F32, ExpertBackend
from backends.gguf_types import GGML_TYPES
from backends.llama import start_library
from backends.measure import Request, measure_class
from backends.moe_hook import PartialSumHook
from backends.probe_weights import noise_layer, unit_layer
from backends.variants import of_group
from swarmnode.bench import find_model
from swarmnode.cli.progress import ProgressLine
from swarmnode.equivalence.passes import decode, windows_of
from swarmnode.equivalence.recipes import type_of
from swarmnode.equivalence.splits import split_model
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.text import bundled_text
from swarmnode.kernels.matrix import INSTALLED
from swarmnode.kernels.store import is_built
from tests.invariant_figures import SETTINGS, Keeping

TYPES: Final = ("q4_0", "q4_1", "q8_0", "q4_K", "q6_K", "f16")
EXPERTS: Final = 16
BATCH: Final = 256
UNIT_WIDTH: Final = 192
Hashes = NDArray[np.uint64]


def model_rows(model: str, tokens: int) -> tuple[Request, F32]:
    """The model's request, and all activations that its layers dispatch over a text, one after the other."""
    with ProgressLine() as progress:
        file, installed = find_model(model, progress), find_target(INSTALLED)
        with split_model(file, installed, installed, progress) as split:
            keeping = Keeping(split.executors[0])
            with split.open_trunk(SETTINGS, PartialSumHook(split.learned.layers.values(), keeping)) as trunk:
                for window in windows_of(trunk.vocabulary, bundled_text(), tokens):
                    decode(trunk, window)
            kept = [rows.x.ravel() for rows in keeping.rows().values()]
            return Request.of_model(split.manifest), np.concatenate(kept)


def hashes_of(backend: ExpertBackend, kind: int, request: Request, values: F32, rows: int) -> Hashes:
    """A hash of each row that experts of hashed weights make of real activations."""
    probe = noise_layer(kind, request.n_in, request.n_ff, EXPERTS)
    layer, n_in = probe.layer.layer, probe.layer.n_in
    backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
    found: list[int] = []
    for start in range(0, rows, BATCH):
        which = np.arange(start, min(start + BATCH, rows), dtype=np.int32)
        places = np.arange(int(which[0]) * n_in, (int(which[-1]) + 1) * n_in)
        x = np.take(values, places, mode="wrap").reshape(-1, n_in)
        turn = which.astype(np.int64) * n_in // len(values)  # of the values: each time they meet other experts
        y = backend.compute(layer, x, which - start, ((which + turn) % EXPERTS).astype(np.int32))
        found += [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest()) for row in y]
    backend.unload_layer(layer)
    return np.array(found, np.uint64)


def print_units(names: Sequence[str], request: Request) -> None:
    """In how many of the fingerprint's values the gated units of each two kernels differ."""
    values, results = unit_values(), {}
    probe = unit_layer(request.units[0], UNIT_WIDTH)
    x = np.resize(values, (-(-len(values) // (UNIT_WIDTH - 1)), UNIT_WIDTH))
    x[:, 1:], x[:, 0] = np.resize(values, (len(x), UNIT_WIDTH - 1)), 1
    rows = np.arange(len(x), dtype=np.int32)
    for name in names:
        backend = find_target(name).make()
        backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
        results[name] = backend.compute(probe.layer.layer, x, rows, rows % 2).view(np.int32)
        backend.close()
    for one, other in combinations(names, 2):
        print(f"{request.units[0].name}, {one} and {other}: {(results[one] != results[other]).mean():.1%} differ")


def whole_blocks(request: Request, kind: int) -> Request:
    """The same, as wide as weights of a type can be."""
    block = GGML_TYPES[kind].block
    n_in, n_ff = (-(-width // block) * block for width in (request.n_in, request.n_ff))
    return Request((kind,), n_in, n_ff, units=request.units)


def lines_of(kind: str, classes: dict[str, str], hashes: dict[str, Hashes], rows: int) -> Iterator[tuple[bool, str]]:
    """(whether it is as it should be, a line) for each group of one class and each two groups."""
    groups: dict[str, list[str]] = {}
    for name, word in classes.items():
        groups.setdefault(word, []).append(name)
    for word, names in groups.items():
        differ = max((int((hashes[a] != hashes[b]).sum()) for a, b in pairwise(names)), default=0)
        yield differ == 0, f"{kind} class {word[:8]}: {', '.join(names)}: {differ} of {rows:,} rows differ"
    for (_, one), (_, other) in combinations(groups.items(), 2):
        apart = int((hashes[one[0]] != hashes[other[0]]).sum())
        yield True, f"{kind} {one[0]} and {other[0]}: {apart:,} of {rows:,} rows differ"


@click.command()
@click.argument("model", default="demo")
@click.option("--rows", default=100_000, show_default=True)
@click.option("--tokens", default=512, show_default=True, help="Of text, whose activations are used over and over.")
@click.option("--type", "types", multiple=True, default=TYPES, show_default=True)
@click.option("--target", "targets", multiple=True, help="Kernels; all built ones of x86 otherwise.")
@click.option("--widths", nargs=2, type=int, help="Of experts; the model's own otherwise.")
def main(
    model: str, rows: int, tokens: int, types: tuple[str, ...], targets: tuple[str, ...], widths: tuple[int, int] | None
) -> None:
    start_library()
    here = [variant.target for variant in of_group("x86-64") if is_built(variant) and not variant.missing()]
    names = targets or (INSTALLED, *here)
    asked, values = model_rows(model, tokens)
    if widths is not None:
        asked = Request(asked.kinds, *widths, units=asked.units)
    print_units(names, asked)
    good = True
    for kind in types:
        request = whole_blocks(asked, type_of(kind))
        print(f"\n{kind}, experts of {request.n_in} and {request.n_ff} values", flush=True)
        classes, hashes = {}, {}
        for name in names:
            backend = find_target(name).make()
            classes[name] = measure_class(backend, type_of(kind), request).numeric_class
            hashes[name] = hashes_of(backend, type_of(kind), request, values, rows)
            backend.close()
        for fine, line in lines_of(kind, classes, hashes, rows):
            good &= fine
            print(line if fine else f"WRONG: {line}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
