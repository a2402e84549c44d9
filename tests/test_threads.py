"""The machine's stock of compute threads, shared by real processes that die in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarmnode import threads
from swarmnode.threads import claim_threads, machine_threads
from tests.patience import PATIENCE_S

HOLDER = """
import sys
from pathlib import Path
from swarmnode.threads import claim_threads
with claim_threads(int(sys.argv[2]), stock=int(sys.argv[3]), folder=Path(sys.argv[1])) as granted:
    print(granted, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, wanted: int, stock: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds threads until its standard input closes."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(wanted), str(stock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, int(child.stdout.readline())
        finally:
            child.kill()


def test_stock_leaves_a_core_and_is_never_empty() -> None:
    assert 1 <= machine_threads() <= max(1, (os.cpu_count() or 1) - 1)


def test_container_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_CPU_QUOTA", quota)
    unlimited = machine_threads()
    for text, most in (("150000 100000", 1), ("max 100000", unlimited), ("", unlimited), ("1 0", unlimited)):
        quota.write_text(text)
        assert machine_threads() == min(most, unlimited)


def test_processes_share_the_stock(tmp_path: Path) -> None:
    folder = tmp_path / "stock"
    with holder(folder, 3, 5) as (_, first):
        assert first == 3
        with claim_threads(stock=5, folder=folder) as second:
            assert second == 2
            with claim_threads(4, stock=5, folder=folder) as third:
                assert third == 1, "a daemon can always work"
    with claim_threads(stock=5, folder=folder) as all_of_it:
        assert all_of_it == 5


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_dead_process_leaves_nothing_behind(tmp_path: Path, sig: signal.Signals) -> None:
    with holder(tmp_path, 0, 4) as (child, granted):
        assert granted == 4
        child.send_signal(sig)
        child.wait(timeout=PATIENCE_S)
        with claim_threads(stock=4, folder=tmp_path) as now:
            assert now == 4


def test_a_child_process_does_not_inherit_the_claim(tmp_path: Path) -> None:
    with claim_threads(stock=2, folder=tmp_path):
        held = {(tmp_path / "core-0").stat().st_ino, (tmp_path / "core-1").stat().st_ino}
        files = [file for file in range(3, 256) if _inode(file) in held]
        # Even one that has the very files, as a forked child does until it runs a program of its own.
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=files)
    with child, claim_threads(stock=2, folder=tmp_path) as granted:
        child.kill()
        assert len(files) == 2
        assert granted == 2


def _inode(file: int) -> int | None:
    try:
        return os.fstat(file).st_ino
    except OSError:
        return None


def test_wanting_more_than_there_is_gives_what_there_is(tmp_path: Path) -> None:
    with claim_threads(100, stock=2, folder=tmp_path) as granted:
        assert granted == 2


def test_folder_is_for_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with claim_threads(stock=1, folder=tmp_path / "stock"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "stock").stat().st_mode & 0o7777 == 0o1777
    assert (tmp_path / "stock" / "core-0").stat().st_mode & 0o777 == 0o444


def test_hostile_content_counts_as_taken(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    folder = tmp_path / "stock"
    folder.mkdir()
    (folder / "core-0").symlink_to(target)
    os.mkfifo(folder / "core-1")
    (folder / "core-2").mkdir()
    (folder / "core-3").symlink_to(tmp_path / "would be made")
    (folder / "core-4").write_bytes(b"\0" * 10_000)
    with claim_threads(stock=6, folder=folder) as granted:
        assert granted == 2, "core-4, whatever it holds, and core-5"
    assert not (tmp_path / "would be made").exists()


@pytest.mark.parametrize("kind", ["file", "link", "nowhere"])
def test_folder_that_is_none_still_gives_one(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "stock"
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder = tmp_path / "missing" / "stock"
    with claim_threads(stock=4, folder=folder) as granted:
        assert granted == 1
