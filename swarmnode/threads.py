"""Compute threads are a budget of the machine, counted over all daemons that run on it.

ggml's threads wait for each other by spinning: two that share a core do not take twice as long but five to twenty
times (38 ms a token became 190 to 800). So every daemon takes its threads from one common stock, the machine's cores
less one that stays free for event loops.

The stock is a folder with one file a core; a thread is an exclusive lock (flock) on one of them. The kernel drops locks
with their process, however it dies, so there is nothing to clean up and no number that could be wrong. The folder lies
in the temporary folder where other users write as well, hence: files are never read, never followed through a link,
never waited for, and whatever is not a plain file counts as taken. The worst that a hostile user can do is to take all
of the stock, and then everybody still gets one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

FOLDER_NAME = "swarmnode-threads"
CORES_MAX = 1024  # of files in the folder
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def machine_threads() -> int:
    """The stock: cores that this process may use, less one for event loops, and never below one.

    Cores, not hardware threads: two threads on one core share its arithmetic units, and kernels gain nothing.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(usable, psutil.cpu_count(logical=False) or usable, _container_cores())
    return max(1, min(cores - 1, CORES_MAX))


def _container_cores() -> int:
    """Whole cores that the control group's quota allows; many without one."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    return CORES_MAX


@contextlib.contextmanager
def claim_threads(wanted: int = 0, *, stock: int | None = None, folder: Path | None = None) -> Iterator[int]:
    """Hold up to `wanted` threads (0: all that are left) of the machine's stock while the context lasts.

    Gives the number granted: less than wanted where others hold the rest, and at least one, which is not counted
    against anyone when the stock is empty: a daemon must be able to work, if slowly. Never waits, never raises.
    """
    stock = machine_threads() if stock is None else stock
    folder = _shared_folder() if folder is None else folder
    with contextlib.ExitStack() as held:
        granted = 0
        if _is_folder(folder):
            for index in range(stock):
                if granted < (wanted or stock) and (file := _lock(folder / f"core-{index}")) is not None:
                    held.callback(_release, file)
                    granted += 1
        yield max(1, granted)


def _shared_folder() -> Path:
    # Not TMPDIR first: where it is set it often differs between users, and the stock is the machine's.
    base = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(base, FOLDER_NAME)


def _is_folder(folder: Path) -> bool:
    """Whether the folder is there, made if need be so that all users may add files and none may remove others'."""
    with contextlib.suppress(OSError):
        folder.mkdir()
        folder.chmod(0o1777)
    try:
        return stat.S_ISDIR(folder.lstat().st_mode)
    except OSError:
        return False


def _lock(path: Path) -> int | None:
    """An open file that holds the lock, or None if it is taken or cannot be had."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            # Without O_CREAT: Linux refuses it on other users' files in a sticky folder (fs.protected_regular).
            file = os.open(path, flags)
        except FileNotFoundError:
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444)
            os.fchmod(file, 0o444)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
    except OSError:
        pass
    os.close(file)
    return None


def _release(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would not free it while a forked child has the file, too
    os.close(file)
