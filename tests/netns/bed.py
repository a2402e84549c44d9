"""`Bed`: hosts joined by links that a test can slow down, cut and mend while processes run in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.netns import hosts

ONE_WAY_DELAY_MS: Final = 10.0  # 20 ms there and back
END_SECONDS_MAX: Final = 10.0
_ROOT: Final = Path(__file__).parents[2]


class NoNamespaces(Exception):
    """This machine makes no network namespaces; says why."""


class Bed:
    """`n` hosts, 0 to n - 1. Start it as a context manager; leaving it ends every process in its hosts."""

    def __init__(
        self, n: int, *, delay_ms: float = ONE_WAY_DELAY_MS, ipv4: bool = True, ipv6: bool = True, seed: int = 0
    ) -> None:
        self.n = n
        self._spec = {"hosts": n, "ipv4": ipv4, "ipv6": ipv6, "delay_s": delay_ms / 1000, "seed": seed}
        self._bridge: subprocess.Popen[bytes] | None = None
        self._namespaces: list[str] = []

    def __enter__(self) -> Bed:
        if not sys.platform.startswith("linux"):
            raise NoNamespaces("network namespaces are Linux's")
        if os.geteuid() != 0:
            raise NoNamespaces("network namespaces need root")
        if shutil.which("nsenter") is None:
            raise NoNamespaces("nsenter (util-linux) is missing")
        self._bridge = subprocess.Popen(
            [sys.executable, "-m", "tests.netns.bridge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,  # Ctrl-C is for us: the bridge ends with its input
        )
        try:
            self._namespaces = self._tell(self._spec)["namespaces"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if (bridge := self._bridge) is None:
            return
        assert bridge.stdin is not None
        assert bridge.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            bridge.stdin.close()
        try:
            bridge.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            bridge.kill()
            bridge.wait()
        bridge.stdout.close()
        self._bridge = None

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._bridge is not None
        assert self._bridge.stdin is not None
        assert self._bridge.stdout is not None
        self._bridge.stdin.write(json.dumps(command).encode() + b"\n")
        self._bridge.stdin.flush()
        line = self._bridge.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the bridge has ended"}
        if "error" in answer:
            raise (ValueError if self._namespaces else NoNamespaces)(answer["error"])
        return answer

    # -- hosts --------------------------------------------------------------------------------------------------

    def enter(self, host: int) -> tuple[str, ...]:
        """Words before a command that is to run in a host. The process has the id of whoever runs them."""
        return ("nsenter", f"--net={self._namespaces[host]}", "--")

    def addresses(self, host: int) -> list[str]:
        """IPv4 first."""
        return hosts.addresses(host, ipv4=bool(self._spec["ipv4"]), ipv6=bool(self._spec["ipv6"]))

    def shield(self, host: int, on: bool = True) -> None:
        """Let nobody connect to a host, which still can dial: what a router that translates addresses leaves of it."""
        self._tell({"shield": host, "on": on})

    # -- links --------------------------------------------------------------------------------------------------

    def set(self, source: int, to: int, **changes: Any) -> None:
        """One direction: `delay_s`, `loss` (a share), `rate_bytes_s`, `cut`. It has happened when this returns."""
        self._tell({"set": [source, to], **changes})

    def set_both(self, a: int, b: int, **changes: Any) -> None:
        self.set(a, b, **changes)
        self.set(b, a, **changes)

    def cut_off(self, host: int, on: bool = True) -> None:
        """A host without, or again with, any link to the others."""
        for other in range(self.n):
            if other != host:
                self.set_both(host, other, cut=on)

    def part(self, *groups: Collection[int]) -> None:
        """Cut every link between hosts of different groups."""
        for one, another in itertools.combinations(groups, 2):
            for a, b in itertools.product(one, another):
                self.set_both(a, b, cut=True)

    def heal(self) -> None:
        """No link is cut any more."""
        for a, b in itertools.combinations(range(self.n), 2):
            self.set_both(a, b, cut=False)

    def counts(self) -> dict[str, int]:
        """Packets by what became of them: delivered, cut, lost, full, shielded, nowhere."""
        return self._tell({"counts": True})
