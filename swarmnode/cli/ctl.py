"""`swarmctl`: asks the daemon of this machine; a few commands need none (demo, bench, model check, equivalence,
kernels)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.asking import ask
from swarmnode.cli.audit import audit
from swarmnode.cli.chat import chat
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.completion import completion
from swarmnode.cli.doctor import doctor
from swarmnode.cli.equivalence import equivalence
from swarmnode.cli.kernels import kernels
from swarmnode.cli.logs import logs
from swarmnode.cli.mesh import COMMANDS as MESH
from swarmnode.cli.models import model
from swarmnode.cli.peer import COMMANDS as PEER
from swarmnode.cli.predict import predict
from swarmnode.cli.progress import ProgressLine
from swarmnode.cli.requests import COMMANDS as REQUESTS
from swarmnode.cli.schema import schema
from swarmnode.cli.service import service
from swarmnode.cli.swarm import COMMANDS as BELONGING
from swarmnode.cli.watching import status, top
from swarmnode.printable import printable_text

COMBINES = ("router-order", "partial-sum")  # config.Combine, which takes long to import


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=common.show_version)
@common_options
def swarmctl() -> None:
    """Talk to a swarm through the daemon of this machine.

    \b
    Examples:
      swarmctl demo                     a swarm on this machine, to see one
      swarmctl join TOKEN               enter a swarm with an invite
      swarmctl status                   who is there, and whether it is ready
      swarmctl ask "Why is the sky blue?"
      swarmctl completion bash          so that Tab finishes commands
    """


_COMMANDS = (
    status,
    top,
    ask,
    chat,
    *REQUESTS,
    logs,
    doctor,
    predict,
    *BELONGING,
    *MESH,
    *PEER,
    audit,
    model,
    equivalence,
    kernels,
    service,
    completion,
    schema,
)
for command in _COMMANDS:
    swarmctl.add_command(command)


@swarmctl.command()
@click.option("--prompt", metavar="TEXT", help="What to ask. Default: a question that the demo model answers well.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--keep", is_flag=True, help="Leave the swarm running and say how to reach it.")
@click.option("--stop", is_flag=True, help="End the swarm that --keep left.")
@click.option("--model-only", is_flag=True, help="Make the demo model alone and print its path, for `model add`.")
@common_options
@pass_settings
def demo(
    settings: Settings, prompt: str | None, max_tokens: int | None, keep: bool, stop: bool, model_only: bool
) -> int:
    """Start a swarm of four daemons on this machine and let it answer a prompt. Needs no daemon.

    The demo model is a real mixture of experts, made from a small dense model. Its answer is compared, token by token,
    with llama.cpp's own on the undivided model.

    \b
    Examples:
      swarmctl demo
      swarmctl demo --keep
      swarmctl demo --stop
    """
    from swarmnode.demo import proof_line, run_demo, stop_kept

    if (stop or model_only) and (keep or prompt is not None or max_tokens is not None or (stop and model_only)):
        option = "--stop" if stop else "--model-only"
        raise UsageError(f"{option} stands alone", hint="`swarmctl demo --help` explains it.")
    if model_only:
        return _make_model(settings)
    if stop:
        common.print_result(settings, stop_kept())
        return 0

    def show(text: str) -> None:
        progress.clear()
        if not settings.json:
            click.echo(printable_text(text), nl=False)

    with ProgressLine() as progress, common.without_daemon():
        result = run_demo(prompt=prompt, max_tokens=max_tokens, keep=keep, progress=progress, show=show)
    if settings.json:
        common.print_json(result)
    else:
        from swarmnode.cli.render import print_status

        print_status(result["status"])
        click.echo(f"\n{proof_line(result)}")
        _say_how_to_reach(result["peers"])
    return 0 if result["identical"] else common.EXIT_NO


def _make_model(settings: Settings) -> int:
    from backends.demo_model import ensure_demo_model
    from swarmnode.paths import shared_cache_folder

    with ProgressLine() as progress:
        path = ensure_demo_model(shared_cache_folder(), progress)
    if settings.json:
        common.print_json({"model": str(path)})
    else:
        click.echo(str(path))
    return 0


def _say_how_to_reach(peers: list[dict[str, Any]]) -> None:
    """For a swarm that was kept: the commands, ready to be copied."""
    if not peers:
        return
    called_by_path = Path(sys.argv[0]).name == "swarmctl" and shutil.which("swarmctl") is None
    program = sys.argv[0] if called_by_path else "swarmctl"
    click.echo("\nThe swarm is left running:")
    for peer in peers:
        click.echo(f"  {program} --data-dir {peer['data_dir']} ask PROMPT    # {peer['name']}")
    click.echo(f"  {program} demo --stop")


@swarmctl.command()
@click.option("--model", default="demo", show_default=True, metavar="FILE", help="A GGUF file, or `demo`.")
@click.option("--workers", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens to generate.")
@click.option("--fast", is_flag=True, help="Both without batch invariance, to see what it costs.")
@click.option(
    "--audits/--no-audits", default=False, show_default=True, help="Audit the workers' answers, as a daemon does."
)
@click.option(
    "--combine", type=click.Choice(COMBINES), default=COMBINES[0], show_default=True,
    help="Whether workers send a row for each expert, or one sum a token."
)  # fmt: skip
@common_options
@pass_settings
def bench(settings: Settings, /, model: str, **options: Any) -> None:
    """Measure a swarm on this machine against llama.cpp on the undivided model. Needs no daemon.

    \b
    Examples:
      swarmctl bench
      swarmctl bench --model FILE --workers 3
    """
    from swarmnode.bench import run_bench

    with ProgressLine() as progress, common.without_daemon():
        result = run_bench(model, progress=progress, **options)
    if settings.json:
        common.print_json(result)
    else:
        from swarmnode.cli.render import print_bench

        print_bench(result)


def main() -> None:
    sys.exit(common.main(swarmctl, "swarmctl"))
