"""Where a daemon keeps its things, so that daemon and command line find the same ones.

One folder (the data folder) names a daemon: `--data-dir`, else SWARMNODE_DATA_DIR, else the user's own data folder. A
named folder holds everything, cache and configuration too, so that several daemons live side by side on one machine;
the user's own daemon spreads over the XDG folders as usual. Only what all daemons of a user share stays outside:
`shared_cache_folder()`, for what is built once (the demo model).

A Unix socket's path has about 100 bytes on every system. Where the data folder's path is too long, the socket goes to a
short path made from a hash, and a file beside it says where, so that a shell with another environment finds it as well.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from capabilities.errors import UsageError
from swarmnode.durable import write_whole

APP = "swarmnode"
DATA_DIR_VARIABLE = "SWARMNODE_DATA_DIR"
# sizeof(sockaddr_un.sun_path) less the closing zero: 108 on Linux, 104 on macOS and the BSDs.
SOCKET_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders of one daemon. All absolute; `make()` creates them, nothing else does."""

    data: Path
    cache: Path
    config_file: Path

    @property
    def identity(self) -> Path:
        """The peer's private key. Whoever copies it clones the peer."""
        return self.data / "identity.key"

    @property
    def models(self) -> Path:
        """Manifests and trunks of the models that this node knows. The models' own files stay where they are."""
        return self.data / "models"

    @property
    def requests(self) -> Path:
        """The last requests that this node asked, with their answers: private."""
        return self.data / "requests"

    @property
    def shards(self) -> Path:
        """Experts fetched from others. All of it can be fetched again."""
        return self.cache / "shards"

    @property
    def logs(self) -> Path:
        """The daemon's log (log_file.py)."""
        return self.data / "logs"

    @property
    def run(self) -> Path:
        """What lives as long as the daemon: the control socket, its lock."""
        return self.data / "run"

    def make(self) -> None:
        """Create the folders, for this user alone. Raises UsageError naming the folder that cannot be made."""
        for folder in (self.data, self.run, self.models, self.cache, self.shards):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                hint = "Choose another place with --data-dir."
                raise UsageError(f"cannot make the folder {folder}: {error.strerror}", hint=hint) from error
        self.run.chmod(0o700)

    def socket_to_bind(self) -> Path:
        """Where the daemon listens for swarmctl. Call after `make()`: writes down a short path where one is needed."""
        if _fits(self._socket):
            self._socket_note.unlink(missing_ok=True)
            return self._socket
        short = _private_folder() / f"{hashlib.sha256(os.fsencode(self.data)).hexdigest()[:16]}.sock"
        if not _fits(short):
            raise UsageError(
                f"no path is short enough for the control socket: {self._socket} and {short} have over"
                f" {SOCKET_PATH_BYTES_MAX} bytes",
                hint="Choose a shorter --data-dir.",
            )
        write_whole(self._socket_note, os.fsencode(short))
        return short

    def socket_to_call(self) -> Path:
        """Where swarmctl finds the daemon. Never fails: a daemon that is not there shows when it is called."""
        if _fits(self._socket):
            return self._socket
        try:
            return Path(self._socket_note.read_text()[:SOCKET_PATH_BYTES_MAX])
        except (OSError, ValueError):
            return self._socket

    @property
    def _socket(self) -> Path:
        return self.run / "control.sock"

    @property
    def _socket_note(self) -> Path:
        return self.run / "control.path"


def find_paths(data_dir: str | Path | None = None) -> Paths:
    """The paths of the daemon that `data_dir`, the environment or the user's own folders name. Creates nothing."""
    if named := data_dir or os.environ.get(DATA_DIR_VARIABLE):
        data = Path(os.path.abspath(Path(named).expanduser()))
        return Paths(data, data / "cache", data / "config.toml")
    folders = platformdirs.PlatformDirs(APP, appauthor=False)
    return Paths(folders.user_data_path, folders.user_cache_path, folders.user_config_path / "config.toml")


def shared_cache_folder() -> Path:
    """What is built once for all daemons of this user. Created on the way."""
    folder = platformdirs.user_cache_path(APP, appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _private_folder() -> Path:
    """A short folder of this user's own. In a folder that all may write to, somebody else may have made it first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK):
        folder = Path(runtime, APP)
    else:
        folder = Path(tempfile.gettempdir(), f"{APP}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder} is not a private folder of this user, so the control socket cannot go there",
            hint="Choose a shorter --data-dir, or remove that folder.",
        )
    return folder
