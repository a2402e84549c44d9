"""The daemon's log in its data folder: JSON lines in a few files, of which the oldest goes when the newest is full.

The daemon writes it (logs.py), `swarmctl logs` reads it, at the same time and without asking the daemon. A disk that is
full costs lines of the log and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, Final

NAME: Final = "daemon.log"
PARTS: Final = 4  # a part is dropped whole, so that with four at least three quarters of what is allowed are there
POLL_S: Final = 0.3
LINE_BYTES_MAX: Final = 1 << 20  # of one line that is read back; those that are written stay far below


class BoundedLogFile(RotatingFileHandler):
    """At most `bytes_max` in all, readable by this user alone. Made when the first line is written."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._failed = False
        super().__init__(
            folder / NAME, maxBytes=bytes_max // PARTS, backupCount=PARTS - 1, encoding="utf-8", delay=True
        )

    def _open(self) -> Any:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)

    def handleError(self, record: LogRecord) -> None:  # noqa: N802 (logging's name)
        """The log is no reason to stop: say it once, where the other log goes."""
        if not self._failed:
            self._failed = True
            print(f"the log file {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def last_lines(folder: Path, count: int) -> tuple[list[dict[str, Any]], int]:
    """The last lines of the log, oldest first, and how far the newest part was read. None of a folder without one."""
    kept: deque[dict[str, Any]] = deque(maxlen=count)
    end = 0
    for number in range(PARTS - 1, -1, -1):
        try:
            with _part(folder, number).open("rb") as file:
                kept.extend(_objects(file))
                end = file.tell()
        except FileNotFoundError:
            end = 0
    return list(kept), end


def follow(folder: Path, offset: int) -> Iterator[dict[str, Any]]:
    """Every line that is written from now on, past `offset` of the newest part. Never ends by itself.

    When a part is full its rest is read before the next one, however long that took to be noticed.
    """
    path = _part(folder, 0)
    while True:
        try:
            with path.open("rb") as file:
                file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)
                offset = 0
                while _is_at(file, path):
                    yield from _objects(file)
                    time.sleep(POLL_S)
                yield from _objects(file)
        except FileNotFoundError:
            time.sleep(POLL_S)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the newest part is still this file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def exists(folder: Path) -> bool:
    return _part(folder, 0).exists()


def _part(folder: Path, number: int) -> Path:
    return folder / (f"{NAME}.{number}" if number else NAME)


def _objects(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The whole lines from here on; half a line that is being written is left for the next time."""
    while line := file.readline(LINE_BYTES_MAX):
        if not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
            file.seek(-len(line), os.SEEK_CUR)
            return
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
