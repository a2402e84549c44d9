"""Whether a command line of ours can be typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from swarmnode.cli.ctl import swarmctl
from swarmnode.cli.daemon import swarmnode

COMMANDS: Final = {"swarmctl": swarmctl, "swarmnode": swarmnode}


def fault_of(words: Sequence[str], whole: bool) -> str | None:
    """What is wrong with a command line, or None. Values are not looked at: they may be placeholders."""
    command: click.Command = COMMANDS[words[0]]
    context, rest = click.Context(command, info_name=words[0]), list(words[1:])
    try:
        while isinstance(command, click.Group):
            _, rest, _ = command.make_parser(context).parse_args(rest)
            if not rest:
                return None if not whole else "no command is named"
            _, found, rest = command.resolve_command(context, rest)
            assert found is not None
            command, context = found, click.Context(found, parent=context)
        values, extra, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    if extra:
        return f"too many arguments: {extra}"
    arguments = [p for p in command.params if isinstance(p, click.Argument) and p.required and p.nargs == 1]
    needed = [] if values.get("everybody") else arguments  # --all
    missing = [p.name for p in needed if not isinstance(values[p.name], str)]
    return f"arguments are missing: {missing}" if missing and (whole or rest) else None
