"""The image and the swarm of containers, as far as they can be looked at without a container engine.

hadolint reads the Dockerfile. That compose.yaml says what it means is checked here: names that lead somewhere, commands
that swarmctl takes, a configuration that the daemon takes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmnode.config import load_config
from tests.command_lines import fault_of
from tests.documents import ROOT
from tests.patience import PATIENCE_S

DOCKER = ROOT / "docker"
PEERS = 5


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return content


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_dockerfile_copies_and_calls_is_there() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert "make setup" in text
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (health,) = re.findall(r'"(swarmctl [^">]+) >', text)
    assert fault_of(shlex.split(health), True) is None
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert {".git", ".venv", "build"} <= set(ignored)


def test_every_peer_has_its_data_its_delay_and_its_way_in(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for number in range(1, PEERS + 1):
        assert f"peer-{number}:/data" in services[f"peer-{number}"]["volumes"]
        assert services[f"delay-{number}"]["network_mode"] == f"service:peer-{number}"
        assert services[f"delay-{number}"]["cap_add"] == ["NET_ADMIN"]
        way_in = services["found" if number == 1 else f"join-{number}"]
        assert f"peer-{number}:/data" in way_in["volumes"]
        assert way_in["depends_on"][f"peer-{number}"] == {"condition": "service_healthy"}


def test_names_lead_somewhere(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DOCKER / source).is_file(), volume
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_swarmctl_takes_every_command(compose: dict[str, Any]) -> None:
    scripts = [word for service in compose["services"].values() for word in service.get("command", ())]
    found = [line for script in scripts for line in re.findall(r"swarmctl [a-z][^|;&>)\n]*", script)]
    assert len(found) > PEERS
    for line in found:
        assert fault_of(shlex.split(re.sub(r'"?\$\$\([^)]*\)?"?', "X", line)), True) is None, line


def test_the_daemon_takes_the_configuration() -> None:
    assert load_config(DOCKER / "peer.toml").limits.on_battery
