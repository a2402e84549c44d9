"""Folders of a daemon, and a control socket that swarmctl finds whatever the length of its path."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from capabilities.errors import UsageError
from swarmnode import paths
from swarmnode.paths import find_paths


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARMNODE_DATA_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A data folder whose own socket path is too long for the system."""
    return tmp_path / ("d" * 90) / "data"


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path in place of /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_user_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    found = find_paths()
    assert found.data == tmp_path / "DATA" / "swarmnode"
    assert found.shards == tmp_path / "CACHE" / "swarmnode" / "shards"
    assert found.config_file == tmp_path / "CONFIG" / "swarmnode" / "config.toml"
    assert list(tmp_path.iterdir()) == [], "looking creates nothing"


def test_named_folder_holds_everything_and_beats_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARMNODE_DATA_DIR", str(tmp_path / "env"))
    assert find_paths().data == tmp_path / "env"
    monkeypatch.chdir(tmp_path)
    named = find_paths("mine")
    assert named.data == tmp_path / "mine"
    for path in (named.cache, named.config_file, named.identity, named.models, named.shards, named.run):
        assert path.is_relative_to(named.data)


def test_folders_are_for_the_user_alone(tmp_path: Path) -> None:
    mine = find_paths(tmp_path / "mine")
    mine.make()
    mine.make()
    for folder in (mine.data, mine.run, mine.models, mine.shards):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the folder .*file"):
        find_paths(tmp_path / "file").make()


def test_socket_lies_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SOCKET_PATH_BYTES_MAX", len(os.fsencode(tmp_path)) + 40)
    mine = find_paths(tmp_path / "mine")
    mine.make()
    assert mine.socket_to_bind() == mine.socket_to_call() == tmp_path / "mine" / "run" / "control.sock"


def test_long_path_falls_back_to_a_short_one_that_a_caller_finds(
    deep: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = find_paths(deep)
    mine.make()
    bound = mine.socket_to_bind()
    assert bound.parent == short_tmp / f"swarmnode-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))  # the caller's environment differs from the daemon's
    assert find_paths(deep).socket_to_call() == bound
    other = find_paths(deep.parent / "other")
    other.make()
    assert other.socket_to_bind() != bound


def test_short_path_prefers_the_runtime_folder(deep: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    mine = find_paths(deep)
    mine.make()
    assert mine.socket_to_bind().parent == short_tmp / "swarmnode"


def test_short_folder_of_somebody_else_is_refused(deep: Path, short_tmp: Path) -> None:
    mine = find_paths(deep)
    mine.make()
    target = short_tmp / "elsewhere"
    target.mkdir(mode=0o700)
    (short_tmp / f"swarmnode-{os.getuid()}").symlink_to(target)
    with pytest.raises(UsageError, match="not a private folder"):
        mine.socket_to_bind()
    (short_tmp / f"swarmnode-{os.getuid()}").unlink()
    (short_tmp / f"swarmnode-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="not a private folder"):
        mine.socket_to_bind()


def test_caller_copes_with_a_note_that_is_missing_or_junk(deep: Path) -> None:
    mine = find_paths(deep)
    assert not mine.socket_to_call().exists()
    mine.make()
    (mine.run / "control.path").write_bytes(b"\xff" * 5000)
    assert not mine.socket_to_call().exists()
