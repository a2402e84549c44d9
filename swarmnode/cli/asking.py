"""`swarmctl ask`: one prompt, one answer, as it is made. What chat shares with it is here, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.control_client import REQUEST_LINE_BYTES_MAX, Call
from swarmnode.printable import printable_text

SEED_MAX: Final = 2**64 - 1
_NO_PROMPT: Final = "Give one as an argument or on standard input; `swarmctl ask --help` has examples."

_SAMPLING: Final = (
    ("--max-tokens", click.IntRange(1), "Longest answer. Default: what the context holds."),
    ("--temperature", click.FloatRange(0, 100), "0: always the likeliest token. Default: 0.8."),
    ("--top-p", click.FloatRange(0, 1), "1: off. Default: 0.95."),
    ("--top-k", click.IntRange(0), "0: off. Default: 40."),
    ("--min-p", click.FloatRange(0, 1), "0: off. Default: 0.05."),
    ("--frequency-penalty", click.FloatRange(-2, 2), "Taken off a token for each time that it was said. Default: 0."),
    ("--presence-penalty", click.FloatRange(-2, 2), "Taken off a token once it was said. Default: 0."),
    ("--seed", click.IntRange(0, SEED_MAX), "The same seed gives the same answer. Default: drawn."),
)

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """What decides how an answer is drawn, as keyword arguments; the daemon has the defaults of those not given."""
    stop = click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable.")
    command = stop(command)
    for name, kind, meaning in reversed(_SAMPLING):
        command = click.option(name, type=kind, help=meaning)(command)
    return command


@click.command()
@click.argument("prompt", required=False)
@sampling_options
@click.option("--json-schema", type=click.File(), metavar="FILE", help="The answer is JSON that obeys this schema.")
@click.option("--grammar", type=click.File(), metavar="FILE", help="The answer is in this GBNF grammar's language.")
@click.option("--logprobs", type=click.IntRange(0, 20), help="With --json: each token's, and of so many alternatives.")
@click.option("--system", metavar="TEXT", help="System text for the model's chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the model's chat template.")
@common_options
@pass_settings
def ask(settings: Settings, /, prompt: str | None, **options: Any) -> None:
    """Ask the swarm; the answer appears as it is made. PROMPT '-', or none in a pipe, reads standard input.

    The leader reads prompt and answer in plain text, and workers see activations, from which much of the text can be
    reconstructed. Ask a swarm only what its members may know.

    \b
    Examples:
      swarmctl ask "Why is the sky blue?"
      git diff | swarmctl ask --system "Review this patch." --temperature 0
      swarmctl ask --json --seed 7 "A haiku" | jq -r .text
      swarmctl ask --json-schema person.json "Invent a person."
    """
    if prompt is None and sys.stdin.isatty():
        raise UsageError("there is no prompt", hint=_NO_PROMPT)
    if prompt is None or prompt == "-":
        prompt = standard_input()
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint=_NO_PROMPT)
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("grammar", "json_schema"):
        if name in given:
            given[name] = given[name].read()
    with Call(settings.socket, "ask", {"prompt": prompt, **given}) as call:
        if settings.json:
            for _ in call:
                pass
            common.print_json(call.result)
        else:
            show_answer(call)


def standard_input() -> str:
    """All of it. UsageError where it is too long for a request, or not UTF-8."""
    data = sys.stdin.buffer.read(REQUEST_LINE_BYTES_MAX + 1)
    if len(data) > REQUEST_LINE_BYTES_MAX:
        hint = "No context holds that much: ask about a part of it."
        raise UsageError(f"standard input has more than {REQUEST_LINE_BYTES_MAX} bytes", hint=hint)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        message = f"standard input is not UTF-8: {error.reason} at byte {error.start}"
        raise UsageError(message, hint="Convert it first, for example with iconv.") from error


def show_answer(call: Call, heard: Callable[[str], object] = lambda _: None) -> None:
    """Write text as it comes; place in the queue and speed go to standard error, if a person looks at it.

    `heard` gets each piece as well, also of an answer that is stopped or fails.
    """
    watched = sys.stderr.isatty()
    clean = printable_text if sys.stdout.isatty() else str
    last = "\n"
    try:
        for event in call:
            if event["event"] == "token" and (text := event.get("text")):
                last = str(text)
                heard(last)
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
    if result.get("tainted"):
        parts.append("tainted: a peer that computed something else, and was found out, had a part in it")
    return f"[{', '.join(parts)}]"
