"""`swarmctl service`: units that the service managers themselves take, and what is said where they do not work."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import Internal, UsageError
from swarmnode.service.managers import Done, Launchd, Systemd
from swarmnode.service.units import STEPS_SINCE, Daemon, launchd_plist, systemd_unit
from tests.documents import first_codes, section
from tests.patience import PATIENCE_S

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def daemon(folder: Path) -> Daemon:
    return Daemon(["/usr/bin/python3", "-P", "-m", "swarmnode", "run"], [folder / "my data"], folder / "log")


@needs_systemd
@pytest.mark.parametrize("sandbox", [False, True])
def test_systemd_takes_the_unit(tmp_path: Path, sandbox: bool) -> None:
    unit = tmp_path / "swarmnode.service"
    unit.write_text(systemd_unit(daemon(tmp_path), version=252, sandbox=sandbox))
    done = analyze("verify", "--user", "--man=no", str(unit), home=tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_systemd_calls_the_unit_well_protected(tmp_path: Path) -> None:
    unit = tmp_path / "swarmnode.service"
    unit.write_text(systemd_unit(daemon(tmp_path), version=252, sandbox=True))
    # Exposure from 0 to 10; what stays is what a peer needs: the network, devices, executable memory for ctypes.
    done = analyze("security", "--offline=true", "--threshold=45", str(unit), home=tmp_path)
    assert done.returncode == 0, done.stdout


def analyze(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_RUNTIME_DIR": str(home), "LC_ALL": "C"}
    return subprocess.run(
        ["systemd-analyze", *words], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_newer_systemds_wait_longer_each_time(tmp_path: Path) -> None:
    old, new = (systemd_unit(daemon(tmp_path), version=v, sandbox=False) for v in (STEPS_SINCE - 1, STEPS_SINCE))
    assert "RestartSteps" not in old
    assert "RestartSteps" in new
    assert "RestartMaxDelaySec" in new


@given(st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1, max_size=20))
def test_any_path_reaches_the_daemon_as_it_is(name: str) -> None:
    unit = systemd_unit(Daemon([f"/bin/{name}"], [], Path("/log")), version=252, sandbox=False)
    (line,) = [line for line in unit.split("\n") if line.startswith("ExecStart=")]
    assert unquoted(line.removeprefix("ExecStart=")) == f"/bin/{name}"


def unquoted(word: str) -> str:
    """As systemd.syntax(7) reads it."""
    if word.startswith('"'):
        assert word.endswith('"')
        word = word[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return word.replace("%%", "%").replace("$$", "$")


def test_what_no_unit_can_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="control character"):
        systemd_unit(Daemon(["/bin/a\nb"], [], Path("/log")), version=252, sandbox=False)


def test_the_property_list_says_the_same(tmp_path: Path) -> None:
    content = plistlib.loads(launchd_plist(daemon(tmp_path)))
    assert content["ProgramArguments"] == list(daemon(tmp_path).program)
    assert content["KeepAlive"]
    assert content["SoftResourceLimits"]["NumberOfFiles"] > 1024


class System:
    """A service manager as its commands show it; `answers` are by words in them."""

    def __init__(self, answers: Mapping[str, Done]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, words: Sequence[str]) -> Done:
        line = " ".join(words)
        self.asked.append(line)
        for key, answer in self.answers.items():
            if key in line:
                return answer
        return Done(0, "")


RUNS = "ActiveState=active\nSubState=running\nNRestarts=2\nUnitFileState=enabled\nMainPID=77\nResult=success"
YES = Done(0, "yes")


def test_a_service_that_runs(tmp_path: Path) -> None:
    system = System({"show swarm": Done(0, RUNS), "show-user": YES, "--version": Done(0, "systemd 255 (255.4)")})
    manager = Systemd(tmp_path / "u" / "swarmnode.service", system, "me")
    found = manager.install(daemon(tmp_path))
    assert found == {
        "manager": "systemd",
        "path": str(manager.unit),
        "installed": True,
        "enabled": True,
        "active": True,
        "pid": 77,
        "restarts": 2,
        "survives_logout": True,
        "reason": None,
    }
    assert set(first_codes(section("status.md", "`swarmctl service --json`"))) == set(found)
    assert "RestartSteps" in manager.unit.read_text()
    assert "loginctl enable-linger me" in system.asked
    assert manager.remove()["removed"] == str(manager.unit)
    assert not manager.unit.exists()
    assert any("disable --now" in line for line in system.asked)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"show-user": Done(0, "no"), "show swarm": Done(0, RUNS)}, "log out"),
        ({"show-user": YES, "show swarm": Done(0, RUNS.replace("active", "failed", 1))}, "journalctl"),
        ({"show swarm": Done(1, "Failed to connect to bus")}, "cannot be reached"),
    ],
)
def test_what_is_not_as_it_should_be_has_a_mend(tmp_path: Path, answers: dict[str, Any], reason: str) -> None:
    unit = tmp_path / "swarmnode.service"
    unit.touch()
    assert reason in Systemd(unit, System(answers), "me").status()["reason"]


def test_nothing_is_installed_where_no_session_is(tmp_path: Path) -> None:
    manager = Systemd(tmp_path / "swarmnode.service", System({"show-environment": Done(1, "no bus")}), "me")
    with pytest.raises(Internal, match="no bus") as error:
        manager.install(daemon(tmp_path))
    assert "enable-linger" in error.value.hint
    assert not manager.unit.exists()
    with pytest.raises(UsageError, match="not installed"):
        manager.remove()


def test_launchd(tmp_path: Path) -> None:
    system = System({"print": Done(0, "state = running\n\tpid = 99\n\truns = 3\n")})
    manager = Launchd(tmp_path / "agent.plist", system, 501)
    assert "not installed" in manager.status()["reason"]
    found = manager.install(daemon(tmp_path))
    assert (found["pid"], found["restarts"], found["active"], found["reason"]) == (99, 2, True, None)
    assert f"launchctl bootstrap gui/501 {manager.plist}" in system.asked
    assert manager.remove()["removed"] == str(manager.plist)
