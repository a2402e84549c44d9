"""What all commands share: their common options, one way to print a result or an error, and the exit status.

    0 well      1 the answer is no      2 wrong usage      3 no daemon      130 stopped by Ctrl-C

With --json exactly one object goes to standard output, also on failure (`{"error": {"type", "message", "hint", ...}}`),
wrong usage included. Everything else that is shown to people goes to standard error. Heavy imports wait until a command
needs them, so that `--help` is there at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from capabilities.errors import Internal, NoDaemon, RequestCancelled, SwarmError, UsageError
from swarmnode.printable import printable_text

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Settings:
    """The common options. They are accepted before and after the command; the later one wins."""

    data_dir: Path | None = None
    json: bool = False

    @property
    def socket(self) -> Path:
        """Where the daemon that these options name listens."""
        from swarmnode.paths import find_paths

        return find_paths(self.data_dir).socket_to_call()


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def _set_data_dir(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        context.ensure_object(Settings).data_dir = value


def _set_json(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Settings).json = True


def data_dir_option(command: Command) -> Command:
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        expose_value=False,
        callback=_set_data_dir,
        help="Folder of the daemon that is meant (default: SWARMNODE_DATA_DIR, else the user's own).",
    )(command)


def json_option(command: Command) -> Command:
    return click.option(
        "--json", is_flag=True, expose_value=False, callback=_set_json, help="Print one JSON object, also on failure."
    )(command)


def common_options(command: Command) -> Command:
    """--data-dir and --json, kept in Settings (`@pass_settings`)."""
    return data_dir_option(json_option(command))


def show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """For `--version`."""
    if value:
        from swarmnode.version import VERSION

        click.echo(f"{context.info_name} {VERSION}")
        context.exit()


def print_json(value: object) -> None:
    click.echo(json.dumps(value))


def print_result(settings: Settings, result: dict[str, Any]) -> None:
    """An answer as JSON, or as one line for each of its keys."""
    if settings.json:
        print_json(result)
    else:
        from swarmnode.cli.render import print_fields

        print_fields(result)


def main(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status. Every failure is printed here and nowhere else."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in options
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for an emoji instead of ending the command
    try:
        status = command.main(words, program, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as error:
        return _failed(_cause(error), as_json)
    return status if isinstance(status, int) else 0


def _cause(error: BaseException) -> BaseException:
    """What lies at the bottom of a group, in which trio wraps errors; Ctrl-C before anything that it brought about."""
    if isinstance(error, BaseExceptionGroup):
        return _cause((error.subgroup((KeyboardInterrupt, click.Abort)) or error).exceptions[0])
    return error


def _failed(error: BaseException, as_json: bool) -> int:
    if isinstance(error, KeyboardInterrupt | click.Abort):
        if as_json:
            print_json({"error": RequestCancelled("stopped by the user", hint="Run it again when you like.").to_json()})
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has seen enough. What is left in the buffer must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO
    if isinstance(error, click.ClickException):
        return _print_usage_error(error, as_json)
    if isinstance(error, OSError):
        from swarmnode.durable import storage_failed

        error = storage_failed(error) or error
    if not isinstance(error, SwarmError):
        traceback.print_exception(error)
        hint = "This is a bug: the lines above belong to its report."
        error = Internal(f"{type(error).__name__}: {error}", hint=hint)
    return _print_error(error, as_json)


def _print_error(error: SwarmError, as_json: bool) -> int:
    """For a machine on standard output, or for a person on standard error; returns the exit status."""
    if as_json:
        print_json({"error": error.to_json()})
    else:
        click.echo(f"Error: {printable_text(error.message)}", err=True)
        if error.hint:
            click.echo(printable_text(error.hint), err=True)
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_NO_DAEMON if isinstance(error, NoDaemon) else EXIT_NO


def _print_usage_error(error: click.ClickException, as_json: bool) -> int:
    if as_json:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "swarmctl"
        return _print_error(UsageError(error.format_message(), hint=f"Try `{where} --help`."), as_json)
    error.show()
    return EXIT_USAGE


@contextlib.contextmanager
def without_daemon() -> Iterator[None]:
    """For commands that need no daemon: what they lose on the way is a failure, not the status of a missing daemon."""
    try:
        yield
    except (NoDaemon, ExceptionGroup) as error:
        cause = _cause(error)
        if isinstance(cause, NoDaemon):
            raise Internal(cause.message, hint=cause.hint, **cause.details) from error
        raise
