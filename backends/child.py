"""Child processes that touch files of unknown quality, and how they talk.

llama.cpp aborts the process on some faults of a file. So whatever loads a new file runs in a child of its own, which
writes one JSON object a line: {"progress": [step, done, total]} now and then, and at the end {"result": ...} or
{"error": ...}. `verdict_of_death` turns a child that ended without either into a typed error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

from capabilities.errors import BadModelFile, Internal, SwarmError

LINE_BYTES_MAX: Final = 1 << 20
_ENDLESS_S: Final = 120.0
_SLOWEST_BYTES_S: Final = 2e6  # a model's file from a slow disk, and some thirty tokens computed on one slow core
_PROGRESS_INTERVAL_S: Final = 0.2

Report = Callable[[str, int, int], None]
_is_child = threading.Event()


class ProgressLines:
    """`report(step, done, total)` as lines, at most five a second for each step, the last one always."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last.get(step, 0.0) < _PROGRESS_INTERVAL_S:
            return
        self._last[step] = now
        _write({"progress": [step, done, total]})


def run_child(work: Callable[[Report], Any]) -> int:
    """Main of a child process: run `work`, write its result or its error as the last line, return the exit status.

    SIGTERM ends `work` like an exception, so that it leaves nothing half done. Before llama.cpp aborts it would run a
    debugger over this process, which takes seconds and tells nobody anything.
    """
    _is_child.set()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = work(ProgressLines())
    except SwarmError as error:
        _write({"error": error.to_json()})
        return 1
    except MemoryError:
        _write({"error": Internal("out of memory", hint="Close other programs, or choose a smaller model.").to_json()})
        return 1
    except OSError as error:
        _write({"error": Internal(f"{error.strerror or error}", hint="Check the disk and the permissions.").to_json()})
        return 1
    except Exception as error:  # nobody reads this process's own last words
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        shown = Internal(f"{type(error).__name__} at {where}: {error}", hint="This is a bug: report it with this line.")
        _write({"error": shown.to_json()})
        return 1
    _write({"result": result})
    return 0


@contextlib.contextmanager
def coming_back(nbytes: int) -> Iterator[None]:
    """For what llama.cpp does with `nbytes` of a file: if it does not come back, SIGALRM ends this child process.

    Some headers make its kernels go round for ever. Outside of a child nothing happens.
    """
    if not _is_child.is_set():
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, _ENDLESS_S + nbytes / _SLOWEST_BYTES_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _write(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a child; anything else than a JSON object counts as an empty one (a library wrote to stdout)."""
    try:
        value = json.loads(line[:LINE_BYTES_MAX])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def verdict_of_death(status: int, file: str) -> SwarmError:
    """The error for a child that ended without a result. A signal means that llama.cpp gave up on the file."""
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else str(-status)
        if name == "SIGKILL":
            return Internal(f"reading {os.path.basename(file)} was ended by the system, probably for want of memory")
        if name == "SIGALRM":
            return BadModelFile(f"llama.cpp comes to no end with {os.path.basename(file)}: damaged or unsupported")
        what = f"llama.cpp crashed on {os.path.basename(file)} ({name})"
        return BadModelFile(f"{what}: the file is damaged or unsupported")
    return Internal(f"reading {os.path.basename(file)} ended with status {status}")
