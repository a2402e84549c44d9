"""`swarmctl`: asks the daemon of this machine; a few commands need none (demo, bench, model check, equivalence)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.equivalence import equivalence
from swarmnode.cli.mesh import COMMANDS as MESH
from swarmnode.cli.models import model
from swarmnode.cli.progress import ProgressLine
from swarmnode.cli.swarm import COMMANDS as BELONGING
from swarmnode.control_client import REQUEST_LINE_BYTES_MAX, Call, request
from swarmnode.printable import printable_text

SEED_MAX = 2**64 - 1
COMBINES = ("router-order", "partial-sum")  # config.Combine, which takes long to import


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def swarmctl() -> None:
    """Talk to a swarm through the daemon of this machine."""


for command in (*BELONGING, *MESH, model, equivalence):
    swarmctl.add_command(command)


@swarmctl.command()
@common_options
@pass_settings
def status(settings: Settings) -> None:
    """Show peers, what they hold, and whether the swarm is ready."""
    answer = request(settings.socket, "status", {})
    if settings.json:
        common.print_json(answer)
    else:
        from swarmnode.cli.render import print_status

        print_status(answer)


@swarmctl.command()
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer. Default: what the context holds.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0: always the likeliest token. Default: 0.8.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="1: off. Default: 0.95.")
@click.option("--top-k", type=click.IntRange(0), help="0: off. Default: 40.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="0: off. Default: 0.05.")
@click.option("--seed", type=click.IntRange(0, SEED_MAX), help="The same seed gives the same answer. Default: drawn.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable.")
@click.option("--system", metavar="TEXT", help="System text for the model's chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the model's chat template.")
@common_options
@pass_settings
def ask(settings: Settings, /, prompt: str, **options: Any) -> None:
    """Ask the swarm; the answer appears as it is made. PROMPT '-' reads standard input.

    The leader reads prompt and answer in plain text, and workers see activations, from which much of the text can be
    reconstructed. Ask a swarm only what its members may know.
    """
    given = {name: value for name, value in options.items() if value is not None}  # the daemon has the defaults
    with Call(settings.socket, "ask", {"prompt": _standard_input() if prompt == "-" else prompt, **given}) as call:
        if settings.json:
            for _ in call:
                pass
            common.print_json(call.result)
        else:
            _show_answer(call)


def _standard_input() -> str:
    data = sys.stdin.buffer.read(REQUEST_LINE_BYTES_MAX + 1)
    if len(data) > REQUEST_LINE_BYTES_MAX:
        raise UsageError(f"standard input has more than {REQUEST_LINE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error


def _show_answer(call: Call) -> None:
    """Write text as it comes; place in the queue and speed go to standard error, if a person looks at it."""
    watched = sys.stderr.isatty()
    clean = printable_text if sys.stdout.isatty() else str
    last = "\n"
    try:
        for event in call:
            if event["event"] == "token" and (text := event.get("text")):
                last = str(text)
                sys.stdout.write(clean(last))
                sys.stdout.flush()
            elif event["event"] == "queued" and watched and (position := event.get("position")):
                click.echo(f"waiting, number {position} in the queue", err=True)
    finally:
        if not last.endswith("\n"):
            click.echo()
    if watched:
        click.echo(_summary(call.result), err=True)


def _summary(result: dict[str, Any]) -> str:
    tokens = result.get("usage", {}).get("completion_tokens", 0)
    timings = result.get("timings", {})
    parts = [f"{tokens} tokens ({result.get('finish_reason', '')})"]
    if first := timings.get("first_token_s"):
        parts.append(f"first after {first:.2f} s")
    if tokens > 1 and (decode := timings.get("decode_s")):
        parts.append(f"{(tokens - 1) / decode:.1f} tokens/s")
    return f"[{', '.join(parts)}]"


@swarmctl.command()
@click.option("--prompt", metavar="TEXT", help="What to ask. Default: a question that the demo model answers well.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--keep", is_flag=True, help="Leave the swarm running and say how to reach it.")
@click.option("--stop", is_flag=True, help="End the swarm that --keep left.")
@common_options
@pass_settings
def demo(settings: Settings, prompt: str | None, max_tokens: int | None, keep: bool, stop: bool) -> int:
    """Start a swarm of four daemons on this machine and let it answer a prompt. Needs no daemon.

    The demo model is a real mixture of experts, made from a small dense model. Its answer is compared, token by token,
    with llama.cpp's own on the undivided model.
    """
    from swarmnode.demo import proof_line, run_demo, stop_kept

    if stop and (keep or prompt is not None or max_tokens is not None):
        raise UsageError("--stop stands alone", hint="It ends the swarm that --keep left.")
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
    "--combine", type=click.Choice(COMBINES), default=COMBINES[0], show_default=True,
    help="Whether workers send a row for each expert, or one sum a token."
)  # fmt: skip
@common_options
@pass_settings
def bench(settings: Settings, /, model: str, **options: Any) -> None:
    """Measure a swarm on this machine against llama.cpp on the undivided model. Needs no daemon."""
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
