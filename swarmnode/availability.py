"""What this machine tells of itself: power, network, whether somebody uses it. scheduler/availability.py decides.

Battery: psutil. Metered: NetworkManager's `Metered` property over D-Bus (1 yes, 3 guessed yes). Use: on Linux logind's
idle hint, which desktops and terminals feed; on macOS the time since the last input, of IOKit. Where there is nothing
to ask, the answer is None and never a guess.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import psutil
import structlog
import trio

from scheduler.availability import Availability, Conditions, Facts
from swarmnode.config_sections import LimitsConfig

_log = structlog.get_logger(__name__)

LOOK_S: Final = 15.0
_COMMAND_S_MAX: Final = 5.0
_METERED: Final = frozenset((1, 3))
_NETWORK_MANAGER: Final = (
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
)
_LOGIND: Final = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def conditions(config: LimitsConfig) -> Conditions:
    """When the configuration lets this machine work."""
    return Conditions(config.windows(), config.on_battery, config.on_metered, config.idle_minutes * 60.0)


def facts(wanted: Conditions) -> Facts:
    """How things are now, as far as the conditions ask for it. Blocks for as long as D-Bus takes."""
    local = time.localtime()
    return Facts(
        weekday=local.tm_wday,
        minute=local.tm_hour * 60 + local.tm_min,
        battery=None if wanted.on_battery else on_battery(),
        metered=None if wanted.on_metered else on_metered(),
        idle_s=idle_s() if wanted.idle_s else None,
    )


def on_battery() -> bool | None:
    """Whether the machine runs on its battery; None where it has none."""
    sensors = getattr(psutil, "sensors_battery", lambda: None)
    try:
        battery = sensors()
    except (OSError, RuntimeError):  # a driver that answers nonsense
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def on_metered() -> bool | None:
    """Whether the way out costs by the byte."""
    value = _property(*_NETWORK_MANAGER, "Metered")
    return value in _METERED if isinstance(value, int) and value else None


def idle_s() -> float | None:
    """Seconds since somebody used the machine; 0 while somebody does."""
    if sys.platform == "darwin":
        found = re.search(r'"HIDIdleTime" = (\d+)', _output(["ioreg", "-c", "IOHIDSystem", "-d", "4"]))
        return int(found[1]) / 1e9 if found else None
    idle, since = _property(*_LOGIND, "IdleHint"), _property(*_LOGIND, "IdleSinceHint")
    if not isinstance(idle, bool) or not isinstance(since, int):
        return None
    return max(0.0, time.time() - since / 1e6) if idle else 0.0


def _property(service: str, path: str, interface: str, name: str) -> Any:
    """A property on the system's D-Bus; None where there is none."""
    words = ["busctl", "--system", "--json=short", "get-property", service, path, interface, name]
    try:
        return json.loads(_output(words))["data"]
    except (ValueError, KeyError, TypeError):
        return None


def _output(words: Sequence[str]) -> str:
    """What a command prints; empty where it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_COMMAND_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


class AvailabilityWatch:
    """Run `run` in a nursery. `reasons` is why this machine does not work now; `changed` is set when that begins or
    ends, and is then another event."""

    def __init__(self, wanted: Conditions, look: Callable[[Conditions], Facts] = facts) -> None:
        self.changed = trio.Event()
        self.last = Facts(0, 0)
        self._wanted = wanted
        self._look = look
        self._availability = Availability(wanted)

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._availability.reasons

    async def run(self) -> None:
        while True:
            await self.look()
            await trio.sleep(LOOK_S)

    async def look(self) -> None:
        """Once, now: before the daemon takes any work."""
        self.last = await trio.to_thread.run_sync(self._look, self._wanted)
        if self._availability.observe(self.last, trio.current_time()):
            _log.info("node.paused" if self.reasons else "node.resumed", reasons=list(self.reasons))
            self.changed.set()
            self.changed = trio.Event()
