"""`swarmctl equivalence A B`: how closely two backends of this machine agree, level by level."""

from __future__ import annotations

import os
from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine

LEVELS = ("op", "layer", "logits", "decisions", "generation", "task")  # capabilities.equivalence, which imports NumPy
TOKENS_MIN = 16
PROMPTS_MAX = 1000
ANSWER_TOKENS_MAX = 256


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--level", "levels", multiple=True, type=click.Choice(LEVELS), help="Only this one. Repeatable. Default: all six."
)
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
    a: str,
    b: str,
    levels: tuple[str, ...],
    model: str | None,
    tokens: int,
    prompts: int,
    answer_tokens: int,
    page: Path | None,
) -> int:
    """Compare two backends of this machine on the same work, level by level. Needs no daemon.

    A and B are each one of: ggml-cpu (or another device of this machine's ggml); reference (NumPy, float64 on
    dequantised weights); reference:q8 (the same with activations rounded as ggml's CPU kernels round them);
    reference:f32 and reference:f16 (other widths of accumulation); or an expert backend of your own as module:Class.

    The exit status is 0 if every level is within its tolerance, 1 if not.
    """
    folder = page and page.absolute().parent
    if folder and not (folder.is_dir() and os.access(folder, os.W_OK)):  # minutes before it is needed
        raise UsageError(f"{page} cannot be written", hint="Choose another --html.")
    # Before NumPy is loaded: with one thread the same machine gives the same bits, and on a busy one sooner.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from swarmnode.equivalence.run import run_equivalence

    def find() -> Path:
        from swarmnode.bench import find_model

        return find_model(model or "demo", progress)

    with ProgressLine() as progress, common.without_daemon():
        result = run_equivalence(
            a, b, levels=levels or LEVELS, model=find, own_model=model is not None,
            tokens=tokens, prompts=prompts, answer_tokens=answer_tokens, progress=progress,
        )  # fmt: skip
    if page is not None:
        from swarmnode.equivalence.page import write_page

        write_page(page, result)
    if settings.json:
        common.print_json(result)
    else:
        from swarmnode.cli.render_equivalence import print_equivalence

        print_equivalence(result)
    return 0 if result["pass"] else common.EXIT_NO
