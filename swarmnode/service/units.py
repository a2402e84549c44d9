"""What service managers are told: pure text.

The daemon runs as the user, below the user's own programs: lower priority for processor and disk. It may write to its
own folders alone, gains no privileges and needs few system calls. Devices stay visible, since GPUs are some. Memory may
be made executable, since ctypes makes its callbacks so. systemd.exec(5), systemd.service(5), launchd.plist(5).
"""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capabilities.errors import UsageError

NAME: Final = "swarmnode"
LABEL: Final = "org.swarmnode.daemon"
STEPS_SINCE: Final = 254  # the systemd that can wait longer after each restart

_RESTART_S: Final = 5
_RESTART_S_MAX: Final = 300
_RESTART_STEPS: Final = 6  # from the first wait to the longest
_STOP_S: Final = 30  # a leader hands over and says goodbye in three seconds; a step in llama.cpp may take many
_FILES: Final = 65_536  # connections, streams and the shards that are mapped; many systems give 1,024
_NICE: Final = 10
_WRONG_USAGE: Final = 2  # swarmnode's exit status where the configuration is wrong: starting again does not mend it


@dataclass(frozen=True, slots=True)
class Daemon:
    """What is to run. All paths are absolute.

    program   the interpreter and what makes it the daemon
    writable  the folders that the daemon writes to
    """

    program: Sequence[str]
    writable: Sequence[Path]
    log: Path


def systemd_unit(daemon: Daemon, *, version: int, sandbox: bool) -> str:
    """A unit for systemd's user manager.

    version  systemd's; sandbox: whether users may make namespaces here, without which a user's manager cannot hide
             files from a service
    """
    lines = [
        "[Unit]",
        "Description=swarmnode, a peer of a swarm that runs one language model",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word) for word in daemon.program)}",
        "Environment=PYTHONUNBUFFERED=1",
        "Restart=always",
        f"RestartPreventExitStatus={_WRONG_USAGE}",
        f"RestartSec={_RESTART_S}",
        *_steps(version),
        f"TimeoutStopSec={_STOP_S}",
        "KillMode=mixed",
        f"LimitNOFILE={_FILES}",
        f"Nice={_NICE}",
        "IOSchedulingClass=idle",
        "CPUWeight=20",
        "UMask=0077",
        "OOMScoreAdjust=500",
        *_HARDENED,
        *(_sandboxed(daemon) if sandbox else []),
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


_HARDENED: Final = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictNamespaces=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "KeyringMode=private",
)


def _steps(version: int) -> list[str]:
    if version < STEPS_SINCE:
        return []
    return [f"RestartSteps={_RESTART_STEPS}", f"RestartMaxDelaySec={_RESTART_S_MAX}"]


def _sandboxed(daemon: Daemon) -> list[str]:
    return [
        "PrivateUsers=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={_quoted(str(folder))}" for folder in daemon.writable),
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "ProtectProc=invisible",
    ]


def _quoted(word: str) -> str:
    """A word of a unit file; systemd.syntax(7). UsageError for what no unit file can hold."""
    if any(ord(character) < 32 for character in word):
        raise UsageError(f"{word!r:.80} has a control character, which no service can be given")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word or "'" in word or ";" in word else word


def launchd_plist(daemon: Daemon) -> bytes:
    """A property list for a user's launchd (an agent)."""
    content = {
        "Label": LABEL,
        "ProgramArguments": list(daemon.program),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _RESTART_S * 2,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": _NICE,
        "ExitTimeOut": _STOP_S,
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": _FILES},
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1"},
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": str(daemon.log),
    }
    return plistlib.dumps(content, sort_keys=False)
