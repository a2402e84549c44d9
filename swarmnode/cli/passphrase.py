"""Where commands get the owner's passphrase: a file, the environment, or the person at the terminal, in this order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from capabilities.errors import UsageError

PASSPHRASE_VARIABLE = "SWARMNODE_OWNER_PASSPHRASE"
NEW_PASSPHRASE_VARIABLE = "SWARMNODE_OWNER_NEW_PASSPHRASE"
_FILE_BYTES_MAX = 8_192

passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Read the owner's passphrase from this file's first line. Default: ${PASSPHRASE_VARIABLE}, else ask.",
)


def passphrase(file: Path | None) -> str:
    """The passphrase of an owner key that exists. UsageError if nobody can be asked."""
    return _given(file, PASSPHRASE_VARIABLE) or _ask("Passphrase of the owner's key", PASSPHRASE_VARIABLE)


def new_passphrase(file: Path | None, variable: str = PASSPHRASE_VARIABLE) -> str:
    """A passphrase for a new key; a person types it twice. UsageError if nobody can be asked."""
    return _given(file, variable) or _ask("Passphrase for the owner's key", variable, twice=True)


def _given(file: Path | None, variable: str) -> str | None:
    if file is None:
        return os.environ.get(variable) or None
    try:
        with file.open("rb") as stream:
            line = stream.readline(_FILE_BYTES_MAX).decode()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", path=str(file)) from error
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8", path=str(file)) from None
    if not (found := line.rstrip("\r\n")):
        raise UsageError(f"{file} holds no passphrase in its first line", path=str(file))
    return found


def _ask(text: str, variable: str, twice: bool = False) -> str:
    if not sys.stdin.isatty():
        hint = f"Give --passphrase-file, set {variable}, or run the command on a terminal."
        raise UsageError("the owner's key needs its passphrase, and there is nobody to ask", hint=hint)
    asked: str = click.prompt(text, hide_input=True, confirmation_prompt=twice, err=True)
    return asked
