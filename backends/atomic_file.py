"""Files that are either complete or absent.

A model file of gigabytes takes long enough to be interrupted: it is written beside its target under a hidden name that
carries this process's id, flushed to disk and renamed in one step. Leavings of a killed process are swept by the next
writer of the same target.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".partial"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `target` (durably), on any exception it is removed.

    The parent folder is made if missing. Two processes may write the same target: the last to finish wins, whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk: before that a power cut may take a file's new name back."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove partial files of `target` whose writers are gone."""
    for leftover in target.parent.glob(f".{target.name}.*{_SUFFIX}"):
        writer = leftover.name.removeprefix(f".{target.name}.").removesuffix(_SUFFIX)
        if writer.isdigit() and not process_lives(int(writer)):
            leftover.unlink(missing_ok=True)


def process_lives(pid: int) -> bool:
    """Whether a process of that number runs, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
