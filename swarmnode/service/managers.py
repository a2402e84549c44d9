"""systemd's user manager and launchd: install, ask, remove. Commands have a deadline, failures say what to do."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from capabilities.errors import Internal, UsageError
from swarmnode.durable import write_whole
from swarmnode.service.units import LABEL, NAME, Daemon, launchd_plist, systemd_unit

_COMMAND_S_MAX: Final = 60.0  # a stop waits for the daemon, which has 30
_OUTPUT_CHARS: Final = 300

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command came to."""

    status: int
    output: str


Runner = Callable[[Sequence[str]], Done]


def run(words: Sequence[str]) -> Done:
    """Run a command of the system's. 127 where there is none of that name."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S_MAX, check=False
        )
    except FileNotFoundError:
        return Done(127, f"{words[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Done(124, f"{words[0]} did not end within {_COMMAND_S_MAX:g} s")
    return Done(done.returncode, (done.stdout + done.stderr).strip())


class Manager(Protocol):
    """One of the two. `status` has the keys that docs/status.md lists."""

    def install(self, daemon: Daemon) -> Json: ...

    def status(self) -> Json: ...

    def remove(self) -> Json: ...


def manager_of_this_system(runner: Runner = run) -> Manager:
    """UsageError where there is none of them."""
    if sys.platform == "darwin":
        return Launchd(Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist", runner)
    if shutil.which("systemctl"):
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return Systemd(folder / "systemd" / "user" / f"{NAME}.service", runner)
    hint = "Let whatever starts programs here run `swarmnode run`; it needs no terminal and ends at SIGTERM."
    raise UsageError("neither systemd nor launchd is here to run a service", hint=hint)


@dataclass
class Systemd:
    """`unit`: where the unit file goes."""

    unit: Path
    runner: Runner = run
    user: str = field(default_factory=getpass.getuser)

    def _ctl(self, *words: str) -> Done:
        return self.runner(["systemctl", "--user", *words])

    def install(self, daemon: Daemon) -> Json:
        _need(self._ctl("show-environment"), "systemd's user manager cannot be reached", _NO_SESSION)
        text = systemd_unit(daemon, version=self._version(), sandbox=self._may_sandbox())
        self.unit.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.unit, text.encode(), 0o644)
        hint = f"`systemd-analyze verify --user {self.unit}` says why."
        _need(self._ctl("daemon-reload"), "systemd did not read the unit", hint)
        _need(self._ctl("enable", NAME), "the service cannot be enabled", _STATUS)
        _need(self._ctl("restart", NAME), "the service does not start", _STATUS)
        self.runner(["loginctl", "enable-linger", self.user])  # `status` says whether it was allowed
        return self.status()

    def status(self) -> Json:
        installed = self.unit.exists()
        shown = self._ctl("show", NAME, "--property=ActiveState,SubState,NRestarts,UnitFileState,MainPID,Result")
        values = dict(line.split("=", 1) for line in shown.output.splitlines() if "=" in line)
        linger = self.runner(["loginctl", "show-user", self.user, "--property=Linger", "--value"]).output == "yes"
        active = values.get("ActiveState") == "active"
        return {
            "manager": "systemd",
            "path": str(self.unit),
            "installed": installed,
            "enabled": values.get("UnitFileState") == "enabled",
            "active": active,
            "pid": int(values.get("MainPID") or 0) or None,
            "restarts": int(values["NRestarts"]) if values.get("NRestarts", "").isdigit() else None,
            "survives_logout": linger,
            "reason": self._reason(installed, active, linger, shown, values),
        }

    def _reason(self, installed: bool, active: bool, linger: bool, shown: Done, values: dict[str, str]) -> str | None:
        if not installed:
            return "it is not installed: `swarmctl service install`"
        if shown.status:
            return f"systemd's user manager cannot be reached: {shown.output[:_OUTPUT_CHARS]}"
        if not active:
            state = f"{values.get('ActiveState')} ({values.get('SubState')}, {values.get('Result')})"
            return f"it is {state}: `journalctl --user -u {NAME}` says why"
        if not linger:
            return f"it ends when you log out: `sudo loginctl enable-linger {self.user}` lets it stay"
        return None

    def remove(self) -> Json:
        if not self.unit.exists():
            raise UsageError("the service is not installed", hint="`swarmctl service install` installs it.")
        self._ctl("disable", "--now", NAME)
        self.unit.unlink(missing_ok=True)
        self._ctl("daemon-reload")
        return {"removed": str(self.unit), "manager": "systemd"}

    def _version(self) -> int:
        found = re.match(r"systemd (\d+)", self.runner(["systemctl", "--version"]).output)
        return int(found[1]) if found else 0

    def _may_sandbox(self) -> bool:
        return self.runner(["unshare", "--user", "--mount", "true"]).status == 0


_NO_SESSION: Final = "Log in as this user, not with su; or run `sudo loginctl enable-linger USER` and log in again."
_STATUS: Final = f"`systemctl --user status {NAME}` and `journalctl --user -u {NAME}` say why."


@dataclass
class Launchd:
    """`plist`: where the property list goes."""

    plist: Path
    runner: Runner = run
    uid: int = field(default_factory=os.getuid)

    @property
    def _domain(self) -> str:
        return f"gui/{self.uid}"

    def install(self, daemon: Daemon) -> Json:
        self.plist.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.plist, launchd_plist(daemon), 0o644)
        self.runner(["launchctl", "bootout", f"{self._domain}/{LABEL}"])  # an older one
        hint = "Log in at the screen of this machine: agents belong to a session."
        _need(self.runner(["launchctl", "bootstrap", self._domain, str(self.plist)]), "launchd refused it", hint)
        return self.status()

    def status(self) -> Json:
        shown = self.runner(["launchctl", "print", f"{self._domain}/{LABEL}"])
        pid = re.search(r"^\s*pid = (\d+)", shown.output, re.MULTILINE)
        runs = re.search(r"^\s*runs = (\d+)", shown.output, re.MULTILINE)
        installed = self.plist.exists()
        reason = None
        if not installed:
            reason = "it is not installed: `swarmctl service install`"
        elif pid is None:
            reason = f"it does not run: `launchctl print {self._domain}/{LABEL}` says why"
        return {
            "manager": "launchd",
            "path": str(self.plist),
            "installed": installed,
            "enabled": installed and shown.status == 0,
            "active": pid is not None,
            "pid": int(pid[1]) if pid else None,
            "restarts": max(0, int(runs[1]) - 1) if runs else None,
            "survives_logout": False,  # an agent of a session; a daemon of the system's would need root
            "reason": reason,
        }

    def remove(self) -> Json:
        if not self.plist.exists():
            raise UsageError("the service is not installed", hint="`swarmctl service install` installs it.")
        self.runner(["launchctl", "bootout", f"{self._domain}/{LABEL}"])
        self.plist.unlink(missing_ok=True)
        return {"removed": str(self.plist), "manager": "launchd"}


def _need(done: Done, what: str, hint: str) -> None:
    if done.status:
        raise Internal(f"{what}: {done.output[:_OUTPUT_CHARS]}", hint=hint)
