"""Small state files that survive a crash at any instant: written beside, synced, renamed."""

from __future__ import annotations

import os
from pathlib import Path

from capabilities.errors import Internal


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file with `data`; afterwards it has the old or the new content, whatever happens."""
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def next_counter(path: Path) -> int:
    """A number greater than any that this file ever gave: one a leadership.

    Raises:
        Internal: the file is damaged. Guessing a number could repeat one.
    """
    try:
        last = int(path.read_text()) if path.exists() else 0
    except ValueError:
        raise Internal(
            f"{path} is damaged", hint="Write a number into it that is greater than any term in the logs."
        ) from None
    write_whole(path, f"{last + 1}\n".encode())
    return last + 1
