"""`swarmctl equivalence A B`: how closely two backends of this machine, or two peers, agree, level by level."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from capabilities.errors import ModelNotFound, UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine
from swarmnode.control_client import request

LEVELS = ("op", "layer", "logits", "decisions", "generation", "task")  # capabilities.equivalence, which imports NumPy
TOKENS_MIN = 16
PROMPTS_MAX = 1000
ANSWER_TOKENS_MAX = 256


def _levels(_context: click.Context, _option: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Names as they were given one by one or with commas, each once."""
    named = dict.fromkeys(name.strip() for word in words for name in word.split(","))
    if wrong := [name for name in named if name not in LEVELS]:
        raise click.BadParameter(f"{wrong[0]!r} is not one of {', '.join(LEVELS)}")
    return tuple(named)


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--all", "everybody", is_flag=True, help="Compare all peers of the swarm with each other.")
@click.option(
    "--level", "levels", multiple=True, metavar="LEVEL", callback=_levels,
    help=f"Only this one, of {', '.join(LEVELS)}. Repeatable, or several with commas. Default: all; with --all: op."
)  # fmt: skip
@click.option("--model", metavar="FILE", help="A GGUF file, or `demo`. Default: demo, with usual weights for op.")
@click.option(
    "--tokens", type=click.IntRange(TOKENS_MIN), default=512, show_default=True,
    help="Of the bundled text, for the levels layer, logits, decisions and task."
)  # fmt: skip
@click.option(
    "--prompts", type=click.IntRange(1, PROMPTS_MAX), default=100, show_default=True, help="For the level generation."
)
@click.option(
    "--answer-tokens", type=click.IntRange(1, ANSWER_TOKENS_MAX), default=16, show_default=True,
    help="To generate for each prompt."
)  # fmt: skip
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as one page.")
@common_options
@pass_settings
def equivalence(
    settings: Settings,
    a: str | None,
    b: str | None,
    everybody: bool,
    levels: tuple[str, ...],
    model: str | None,
    tokens: int,
    prompts: int,
    answer_tokens: int,
    page: Path | None,
) -> int:
    """Compare two backends on the same work, level by level. Without peers it needs no daemon.

    A and B are each one of: peer:NAME (a peer of the swarm, by its name, its id or the end of it); ggml-cpu (or another
    device of this machine's ggml); kernels of another build (ggml-cpu:haswell, ggml-vulkan and the others of `swarmctl
    kernels list`; ggml-vulkan:f32 asks for sums in single precision); reference (NumPy, float64 on dequantised
    weights); reference:q8 (the same with activations rounded as ggml's CPU kernels round them); reference:f32 and
    reference:f16 (other widths of accumulation); or an expert backend of your own as module:Class.

    A peer computes operators with its own kernels, and the experts that it holds; the others are computed here. Levels
    that need a model take the file that the swarm serves, unless --model names one.

    The exit status is 0 if every level that could be judged is within its tolerance, 1 if not.
    """
    if (b is not None) == everybody or (a is not None) == everybody:
        raise UsageError("name two targets, or --all", hint="Try `swarmctl equivalence --help`.")
    folder = page and page.absolute().parent
    if folder and not (folder.is_dir() and os.access(folder, os.W_OK)):  # minutes before it is needed
        raise UsageError(f"{page} cannot be written", hint="Choose another --html.")
    # Before NumPy is loaded: with one thread the same machine gives the same bits, and on a busy one sooner.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from swarmnode.equivalence.kept import keep_matrix
    from swarmnode.equivalence.matrix import run_matrix
    from swarmnode.equivalence.peers import Swarm, open_swarm
    from swarmnode.equivalence.run import Effort, run_equivalence
    from swarmnode.paths import find_paths

    effort, own = Effort(tokens, prompts, answer_tokens), model is not None
    with ProgressLine() as progress, _daemon_where_needed(a, b):

        def swarm() -> Swarm:
            return open_swarm(lambda: settings.socket)

        def find() -> Path:
            return _find_model(settings, model, (a, b), progress)

        if a is None or b is None:
            result = run_matrix(
                swarm(), levels=levels or LEVELS[:1], model=find, own_model=own, effort=effort, progress=progress
            )
            with contextlib.suppress(OSError):  # the daemon's page does without it then
                keep_matrix(find_paths(settings.data_dir).data, result)
        else:
            result = run_equivalence(
                a, b, levels=levels or LEVELS, model=find, own_model=own, tokens=tokens, prompts=prompts,
                answer_tokens=answer_tokens, progress=progress, swarm=swarm,
            )  # fmt: skip
    _show(settings, result, page)
    return 0 if result["pass"] else common.EXIT_NO


def _show(settings: Settings, result: dict[str, Any], page: Path | None) -> None:
    if page is not None:
        from swarmnode.equivalence.page import write_page

        write_page(page, result)
    if settings.json:
        common.print_json(result)
    else:
        from swarmnode.cli.render_equivalence import print_equivalence, print_matrix

        (print_matrix if "pairs" in result else print_equivalence)(result)


def _daemon_where_needed(*targets: str | None) -> contextlib.AbstractContextManager[None]:
    """Where a side is a peer, a missing daemon has the exit status of one."""
    return contextlib.nullcontext() if any(map(_is_peer, targets)) else common.without_daemon()


def _is_peer(target: str | None) -> bool:
    """None stands for all peers."""
    return target is None or target.startswith("peer:")


def _find_model(settings: Settings, named: str | None, targets: Sequence[str | None], progress: ProgressLine) -> Path:
    """The file that models are compared on: the one that was named, or the swarm's where a side is a peer, or the demo.

    Raises:
        ModelNotFound: the swarm serves none whose file is here.
        UsageError: there is no such file.
    """
    from swarmnode.bench import find_model

    if named is not None or not any(map(_is_peer, targets)):
        return find_model(named or "demo", progress)
    models = request(settings.socket, "model_list", {})["models"]
    served = next((model for model in models if model["active"] and model["files"] and not model["fault"]), None)
    if served is None:
        raise ModelNotFound(
            "the file of the model that the swarm serves is not on this machine", hint="Name it with --model."
        )
    return Path(served["files"][0])
