"""A control socket with made-up handlers, served from a thread, and commands run against it on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from swarmnode.control import serve_control
from swarmnode.paths import find_paths
from tests.patience import PATIENCE_S

SWARMCTL: Final = [sys.executable, "-c", "from swarmnode.cli.ctl import main; main()"]


@contextmanager
def control_thread(data_dir: Path, handlers: Mapping[str, Any]) -> Iterator[None]:
    """Serve the handlers where swarmctl looks for the daemon of that folder."""
    started, stop = threading.Event(), trio.Event()
    paths = find_paths(data_dir)
    paths.make()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, paths.socket_to_bind(), handlers)
            token.append(trio.lowlevel.current_trio_token())
            started.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=token[0])
        thread.join(PATIENCE_S)


class Terminal:
    """swarmctl on a terminal of its own, of 24 lines and 80 columns. `shown` is all that it wrote so far."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._main, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        given = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        # A session of its own, whose terminal this is: Ctrl-C then arrives as it does from a keyboard.
        command = ["setsid", "--ctty", *SWARMCTL, *words]
        env = given | {"TERM": "xterm"} | environment
        self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env)
        os.close(end)
        os.set_blocking(self._main, False)
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def wait(self, condition: Callable[[str], Any]) -> None:
        """Until `condition` holds of what was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.shown):
            assert time.monotonic() < deadline, self.shown
            self._read()

    def end(self) -> int:
        """The exit status, once it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self._read()
        self._read()
        os.close(self._main)
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        try:
            self.shown += os.read(self._main, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # its other side is closed
            time.sleep(0.02)


@contextmanager
def terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(*words, **environment)
    try:
        yield made
    finally:
        made.kill()
