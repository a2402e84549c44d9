"""`swarmctl logs`: what the daemon wrote into its data folder, whether it runs or not."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings

LINES_MAX = 100_000


@click.command()
@click.option("--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@click.option(
    "--lines", type=click.IntRange(0, LINES_MAX), default=40, show_default=True, help="How many to begin with."
)
@common_options
@pass_settings
def logs(settings: Settings, follow: bool, lines: int) -> None:
    """Show the daemon's log. It never holds prompts, answers or tokens. With --json a line is one object.

    \b
    Examples:
      swarmctl logs --follow
      swarmctl logs --lines 1000 --json | jq 'select(.level == "warning")'
    """
    from swarmnode import log_file
    from swarmnode.paths import find_paths

    folder = find_paths(settings.data_dir).logs
    if not log_file.exists(folder) and not follow:
        raise UsageError(
            f"there is no log in {folder}",
            hint="A daemon writes one unless log.file_mib is 0; started by systemd it is also in its journal.",
            path=str(folder),
        )
    show = common.print_json if settings.json else _printer()
    shown, offset = log_file.last_lines(folder, lines)
    for line in shown:
        show(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for line in log_file.follow(folder, offset):
                show(line)
                sys.stdout.flush()


def _printer() -> Callable[[dict[str, Any]], None]:
    """Prints a line for people, with local times, in colour on a terminal."""
    from datetime import datetime

    import structlog

    from swarmnode.printable import printable_text

    colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def show(line: dict[str, Any]) -> None:
        clean = {printable_text(key): printable_text(v) if isinstance(v, str) else v for key, v in line.items()}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            clean["timestamp"] = datetime.fromisoformat(line["timestamp"]).astimezone().strftime("%m-%d %H:%M:%S")
        click.echo(render(None, "", clean))

    return show
