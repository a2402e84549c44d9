"""`swarmctl kernels`: kernels of other builds, to compare with and to compute with."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import click

from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings


@click.group()
@common_options
def kernels() -> None:
    """Kernels beside the installed ones: of other processors, of ARM64 under an emulator, of Vulkan."""


@kernels.command()
@click.option("--arm64", is_flag=True, help="Also ARM64's, with a Python that runs under qemu.")
@click.option("--vulkan", is_flag=True, help="Also Vulkan's shaders.")
@common_options
@pass_settings
def build(settings: Settings, arm64: bool, vulkan: bool) -> None:
    """Build this processor's kernels, from no SIMD to AVX-512, once. Minutes; needs a C++ compiler.

    They go into the user's cache, by version and flags. Nothing that is installed is touched. What is there already is
    not built again, and an interrupted build goes on where it stopped.
    """
    from backends.variants import Group
    from swarmnode.bootstrap import Console
    from swarmnode.kernels.build import Builder
    from swarmnode.kernels.store import kernels_folder, listing

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the compiler ends with us
    groups: list[Group] = ["x86-64"]
    if arm64:
        groups.append("arm64")
    if vulkan:
        groups.append("vulkan")
    folder = kernels_folder()
    with contextlib.redirect_stdout(sys.stderr):  # progress is no result
        built = Builder(folder, Console(folder / "logs"), os.environ).build(groups)
    result = {"built": list(built), "folder": str(folder), "kernels": listing()}
    if settings.json:
        common.print_json(result)
    else:
        click.echo(f"built: {', '.join(built)}" if built else "all of it is there")


@kernels.command("list")
@common_options
@pass_settings
def list_kernels(settings: Settings) -> None:
    """List the kernels that there can be, which are built, and which this processor can run."""
    from swarmnode.kernels.store import kernels_folder, listing

    found = listing()
    if settings.json:
        common.print_json({"folder": str(kernels_folder()), "kernels": found})
        return
    for row in found:
        state = f"cannot run here: {', '.join(row['missing'])}" if row["missing"] else ""
        state = state or ("built" if row["built"] else "not built")
        click.echo(f"{row['target']:24} {row['meaning']}; {state}")


@kernels.command()
@click.argument("targets", nargs=-1)
@click.option("--type", "types", multiple=True, help="Only weights of this type, for example q4_0. Repeatable.")
@common_options
@pass_settings
def compare(settings: Settings, targets: tuple[str, ...], types: tuple[str, ...]) -> None:
    """Compare every kernel with every other on the same products, and print tables in Markdown.

    TARGETS are those of `swarmctl equivalence`; the tables start with distances to the first. Default: the installed
    kernels, all built ones that run here, and the references.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded, as `swarmctl equivalence` does
    from swarmnode.cli.progress import ProgressLine
    from swarmnode.kernels.matrix import compare_all, tables, usual_targets

    names = targets or usual_targets()
    with ProgressLine() as progress, common.without_daemon():
        result = compare_all(names, types, progress)
    if settings.json:
        common.print_json(result)
    else:
        click.echo(tables(result, names[0]))


@kernels.command()
@click.argument("workers", nargs=-1)
@click.option("--model", default="demo", show_default=True, help="A GGUF file, or `demo`.")
@click.option("--prompt", metavar="TEXT", help="What to ask. Default: a question that the demo model answers well.")
@click.option("--max-tokens", type=click.IntRange(1, 256), default=32, show_default=True)
@click.option("--deadline", type=click.FloatRange(1, 86_400), default=1800, show_default=True, help="In seconds.")
@common_options
@pass_settings
def swarm(
    settings: Settings, workers: tuple[str, ...], model: str, prompt: str | None, max_tokens: int, deadline: float
) -> None:
    """Start a swarm whose WORKERS have different kernels, let it answer, and compare with the undivided model.

    A worker is named by its kernels (haswell, vulkan and the others of `swarmctl kernels list`), or is a whole daemon
    of another processor under an emulator: arm64, or arm64:cortex-a53 and the like for a processor without
    half-precision arithmetic. Default: haswell x64.
    """
    from swarmnode.cli.progress import ProgressLine
    from swarmnode.cli.render_equivalence import CLASS_CHARS
    from swarmnode.kernels.mixed import PROMPT, run_mixed

    with ProgressLine() as progress, common.without_daemon():
        result = run_mixed(
            workers or ("haswell", "x64"), model=model, prompt=prompt or PROMPT, max_tokens=max_tokens,
            deadline_s=deadline, progress=progress,
        )  # fmt: skip
    if settings.json:
        common.print_json(result)
        return
    for row in result["workers"]:
        found = f"class {(row['numeric_class'] or 'not known')[:CLASS_CHARS]}, sums {row['accumulation']}"
        found += f", activations {row['source']}, {row['experts_held']} experts"
        same = "the leader's bits" if row["bit_identical_to_leader"] else "other bits than the leader's"
        click.echo(f"{row['kernel']:20} {row['state']}; {found}; {row['dispatches']} dispatches; {same}")
    count, first = len(result["answer"]["tokens"]), result["first_difference"]
    click.echo(
        f"all {count} tokens equal llama.cpp's on the undivided model"
        if first is None
        else f"{first} of {count} tokens are those of llama.cpp on the undivided model; then the answers part"
    )
