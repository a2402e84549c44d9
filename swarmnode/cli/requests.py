"""`swarmctl requests`, `verify`, `forget`: what this node asked last, whether the answers hold, and an end to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capabilities.errors import SwarmError, UsageError
from swarmnode.cli import common
from swarmnode.cli.asking import sampling_options
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.control_client import Call, request

if TYPE_CHECKING:
    from swarmnode.cli.progress import ProgressLine


@click.command("requests")
@common_options
@pass_settings
def requests_(settings: Settings) -> None:
    """List the requests that this node asked last and keeps, the newest first. Their text is not shown."""
    answer = request(settings.socket, "requests", {})
    if settings.json:
        common.print_json(answer)
    else:
        from swarmnode.cli.render_requests import print_requests

        print_requests(answer)


@click.command()
@click.argument("request_id", required=False)
@click.option("--prompt", metavar="TEXT", help="Ask this first, then verify the answer.")
@sampling_options
@click.option("--model", type=click.Path(dir_okay=False, path_type=Path), help="The model's GGUF file on this machine.")
@click.option("--fetch", is_flag=True, help="Fetch the model from the swarm, even if it is larger than 1 GiB.")
@common_options
@pass_settings
def verify(
    settings: Settings,
    /,
    request_id: str | None,
    prompt: str | None,
    model: Path | None,
    fetch: bool,
    **sampling: Any,
) -> int:
    """Prove an answer: ask the swarm again, ask llama.cpp alone on this machine, compare the tokens.

    Without REQUEST_ID or --prompt the last request is meant. llama.cpp needs the whole model: the file that this node
    has added, --model, or one that is fetched from the swarm for this and removed again, up to 1 GiB without being
    asked for. Without it the report says whether the swarm repeats itself, and proves no more.

    \b
    Examples:
      swarmctl verify
      swarmctl verify req-6c1f0d9f2a7b3e84
      swarmctl verify --prompt "Why is the sky blue?" --model model.gguf
    """
    given = {name: value for name, value in sampling.items() if value not in (None, ())}
    if prompt is None and given:
        raise UsageError("options of an answer belong to --prompt", hint="A kept request has its own.")
    if prompt is not None and request_id is not None:
        raise UsageError("there is a request and a --prompt", hint="Give one of them.")
    from swarmnode.cli.progress import ProgressLine

    with ProgressLine() as progress:
        if prompt is not None:
            progress("asking", 0, 1)
            request_id = _answer(settings, "ask", {"prompt": prompt, **given})["request_id"]
        report = _report(settings, request_id, model, fetch, progress)
    if settings.json:
        common.print_json(report)
    else:
        from swarmnode.cli.render_requests import print_verdict

        print_verdict(report)
    return common.EXIT_NO if report["verified"] is False else 0


def _report(
    settings: Settings, request_id: str | None, model: Path | None, fetch: bool, progress: ProgressLine
) -> dict[str, Any]:
    from swarmnode.cli.model_at_hand import model_at_hand
    from swarmnode.kept_requests import KeptRequest
    from swarmnode.verify import asked_undivided, compared, kernels_differ, verdict

    named = {} if request_id is None else {"request_id": request_id}
    kept = KeptRequest.from_json(request(settings.socket, "request", named))
    progress("asking the swarm again", 0, 1)
    prompt_tokens = kept.prompt_tokens
    try:
        again = _answer(settings, "replay", {"request_id": kept.ask.request_id})
        swarm = compared(kept, again["tokens"], None)
        prompt_tokens = again["usage"]["prompt_tokens"]
    except SwarmError as error:
        swarm = compared(kept, None, error.message)
    if prompt_tokens is None:
        undivided = compared(kept, None, "the answer broke off, and the swarm does not answer now")
    else:
        with model_at_hand(settings, kept.model, model, fetch=fetch, progress=progress) as (file, reason):
            progress("llama.cpp on the undivided model", 0, 1)
            undivided = asked_undivided(kept, file, reason, prompt_tokens)
    differ = kernels_differ(request(settings.socket, "status", {}), kept.leader)
    return verdict(kept, swarm, undivided, other_kernels=differ)


def _answer(settings: Settings, method: str, params: dict[str, Any]) -> dict[str, Any]:
    with Call(settings.socket, method, params) as call:
        for _ in call:
            pass
        return call.result


@click.command()
@click.argument("request_id", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove all that are kept, and do not ask.")
@common_options
@pass_settings
def forget(settings: Settings, request_id: str | None, everything: bool) -> None:
    """Remove a request and its answer from this machine; all of them, if none is named (a terminal is asked first).

    \b
    Examples:
      swarmctl forget req-6c1f0d9f2a7b3e84
      swarmctl forget --all
    """
    if everything and request_id is not None:
        raise UsageError("there is a request and --all", hint="Give one of them.")
    if request_id is None and not everything and sys.stdin.isatty() and not settings.json:
        click.confirm("Remove all requests that this node keeps?", abort=True, err=True)
    named = {} if request_id is None else {"request_id": request_id}
    common.print_result(settings, request(settings.socket, "forget", named))


COMMANDS = (requests_, verify, forget)
"""For `swarmctl.add_command`."""
