"""Small state files that survive a crash at any instant: written beside, synced, renamed.

A process that is killed in between leaves what it had written beside under a hidden name with its own id; a daemon
sweeps that up when it starts, since it may be a secret or somebody's words.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from backends.atomic_file import process_lives, sync_folder
from capabilities.errors import Internal, SwarmError

_PART: Final = ".part-"
_DISK_FAULTS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}
)


class StorageFailed(SwarmError):
    """The disk did not take or give one of this node's files. What was there before is as it was. Detail: path."""

    type = "storage_failed"
    default_hint = "Free space on that disk, or check the owner and mode of the file and its folder; then try again."


def storage_failed(error: OSError) -> StorageFailed | None:
    """The error for people, if it is the disk's: full, for reading only, broken, or somebody else's; None if not."""
    if error.errno not in _DISK_FAULTS:
        return None
    path = None if error.filename is None else os.fsdecode(error.filename)
    return StorageFailed(f"cannot use {path or 'a file of this node'}: {error.strerror}", path=path)


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file with `data`; afterwards it has the old or the new content, whatever happens.

    Raises OSError, which names `path`.
    """
    part = path.with_name(f".{path.name}{_PART}{os.getpid()}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sweep(folders: Iterable[Path]) -> None:
    """Remove what killed processes left beside the files of these folders. Hold the data folder's lock meanwhile."""
    for folder in folders:
        for part in folder.glob(f".*{_PART}*"):
            writer = part.name.rpartition("-")[2]
            if writer.isdigit() and part.is_file() and (int(writer) == os.getpid() or not process_lives(int(writer))):
                part.unlink(missing_ok=True)


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
