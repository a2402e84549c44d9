"""`swarmctl schema`: what each command prints with --json, as JSON Schema, for programs that read it."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message", "hint"],
            "properties": {name: {"type": "string"} for name in ("type", "message", "hint")},
        }
    },
}
SHORT: Final = {"peer": "peer show", "audit": "audit show"}
"""As people write them: `swarmctl peer NAME`, `swarmctl audit`."""


def commands() -> list[str]:
    """The commands that have a schema, sorted."""
    folder = resources.files("swarmnode") / "schemas"
    return sorted(file.name.removesuffix(".json").replace("-", " ") for file in folder.iterdir())


def schema_of_command(command: str) -> dict[str, Any]:
    """The schema of what a command prints, an error included.

    Raises:
        UsageError: there is none of that name.
    """
    command = SHORT.get(command, command)
    if command not in commands():
        hint = f"There are: {', '.join(commands())}."
        raise UsageError(f"there is no schema of {command!r}", hint=hint)
    file = resources.files("swarmnode") / "schemas" / f"{command.replace(' ', '-')}.json"
    return {
        "$schema": DRAFT,
        "title": f"swarmctl {command} --json",
        "if": {"required": ["error"], "properties": {"error": {"required": ["hint"]}}, "maxProperties": 1},
        "then": ERROR,
        "else": json.loads(file.read_text(encoding="utf-8")),
    }


@click.command()
@click.argument("command", nargs=-1)
@common_options
@pass_settings
def schema(settings: Settings, command: tuple[str, ...]) -> None:
    """Print a JSON Schema of what COMMAND prints with --json; without COMMAND list those that there are.

    \b
    Examples:
      swarmctl schema status
      swarmctl schema model show
    """
    if command:
        common.print_json(schema_of_command(" ".join(command)))
    elif settings.json:
        common.print_json({"commands": commands()})
    else:
        click.echo("\n".join(commands()))
