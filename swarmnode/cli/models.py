"""`swarmctl model ...`: which models this node knows, and whether one will run here at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine
from swarmnode.control_client import Call, request

FILE = click.Path(path_type=Path)


def call_with_progress(
    settings: Settings, method: str, params: dict[str, Any], progress: ProgressLine
) -> dict[str, Any]:
    """A method of the daemon's that tells how far it is, on a line of the terminal."""
    with Call(settings.socket, method, params) as call:
        for event in call:
            if event["event"] == "progress":
                progress(str(event.get("step", "")), int(event.get("done", 0)), int(event.get("total", 0)))
    return call.result


@click.group()
@common_options
def model() -> None:
    """Add, list, fetch, check and remove models."""


@model.command()
@click.argument("file", type=FILE)
@click.option("--name", help="Name in the swarm. Default: the file's own.")
@common_options
@pass_settings
def add(settings: Settings, file: Path, name: str | None) -> None:
    """Make a model known from its GGUF file (of a split one the first part), which stays where it is.

    \b
    Examples:
      swarmctl model add olmoe-q4_0.gguf --name olmoe
    """
    params = {"path": str(file.absolute()), **({"name": name} if name else {})}
    with ProgressLine() as progress:
        result = call_with_progress(settings, "model_add", params, progress)
    common.print_result(settings, result)


@model.command("list")
@common_options
@pass_settings
def list_models(settings: Settings) -> None:
    """List the models that this node knows."""
    answer = request(settings.socket, "model_list", {})
    if settings.json:
        common.print_json(answer)
    else:
        from swarmnode.cli.render import print_models

        print_models(answer)


@model.command()
@click.argument("name")
@common_options
@pass_settings
def show(settings: Settings, name: str) -> None:
    """Show a model's shape, hashes and sizes."""
    common.print_result(settings, request(settings.socket, "model_show", {"name": name}))


@model.command()
@click.argument("name")
@common_options
@pass_settings
def use(settings: Settings, name: str) -> None:
    """Let the swarm serve this model, on a backbone peer that has it. What runs is ended first.

    \b
    Examples:
      swarmctl model use olmoe
    """
    common.print_result(settings, request(settings.socket, "model_use", {"name": name}))


@model.command()
@click.argument("name")
@common_options
@pass_settings
def remove(settings: Settings, name: str) -> None:
    """Forget a model and delete what was derived from it. Its own file stays."""
    common.print_result(settings, request(settings.socket, "model_remove", {"name": name}))


@model.command()
@click.argument("file", type=FILE)
@common_options
@pass_settings
def fetch(settings: Settings, file: Path) -> None:
    """Fetch the model that the swarm serves, trunk and all experts, into one GGUF file that does not exist yet.

    Everything is checked against the hashes in the model's manifest. What breaks off is resumed by the same command.

    \b
    Examples:
      swarmctl model fetch whole.gguf
      swarmctl verify --model whole.gguf
    """
    with ProgressLine() as progress:
        result = call_with_progress(settings, "model_fetch", {"path": str(file.absolute())}, progress)
    common.print_result(settings, result)


@model.command()
@click.argument("file", type=FILE)
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Over how many to split it.")
@common_options
@pass_settings
def check(settings: Settings, file: Path, workers: int) -> int:
    """Split a model over workers in one process and compare it with llama.cpp on the undivided one. Needs no daemon.

    The exit status is 0 if prefill and decode are bit-identical, 1 if they differ or the model is not supported.

    \b
    Examples:
      swarmctl model check olmoe-q4_0.gguf
    """
    import trio

    from swarmnode.models import run_child

    command = [sys.executable, "-m", "swarmnode.model_check", str(file.absolute()), str(workers)]
    with ProgressLine() as progress:
        result = trio.run(run_child, command, file.name, progress)
    common.print_result(settings, result)
    return 0 if result["supported"] and result["bit_identical"] else common.EXIT_NO
