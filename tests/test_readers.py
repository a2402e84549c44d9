"""Every command on the pages for owners and volunteers is run here, in the order in which they tell it."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.cli import common
from swarmnode.cli.ctl import swarmctl
from swarmnode.local_swarm import LocalNode
from tests.documents import DOCUMENTS
from tests.swarm_tools import wait_until
from tests.test_node_life import SETTINGS
from tests.tiny_architectures import write_tiny_model

NEEDS_A_SERVICE_MANAGER = ("swarmctl service",)  # tests/test_service.py
RUNS_ALREADY = ("swarmnode run",)
MAY_FIND_FAULTS = ("swarmctl doctor",)  # of the machine that the tests run on


def commands(page: str) -> Iterator[str]:
    for block in DOCUMENTS[page].blocks:
        for line in block.splitlines():
            command = line.split("#")[0].rstrip(" &")
            if command.startswith(("swarmctl ", "swarmnode ")) and not command.startswith(
                (*NEEDS_A_SERVICE_MANAGER, *RUNS_ALREADY)
            ):
                yield command


class Stage:
    """The owner's machine and a volunteer's."""

    def __init__(self, root: Path) -> None:
        self.words = {"MODEL.gguf": str(write_tiny_model(root / "m.gguf", "olmoe")), "OWNER.key": str(root / "copy")}
        self.owner, self.volunteer = (
            LocalNode(name, root / name, {**SETTINGS, "node": {**SETTINGS["node"], "name": name}})
            for name in ("owner", "volunteer")
        )

    def run(self, node: LocalNode, line: str, capsys: pytest.CaptureFixture[str]) -> str:
        """What it prints. Placeholders are words in capitals."""
        words = shlex.split(re.sub(r"\b[A-Z]{3,}(\.\w+)?\b", lambda found: self.words[found[0]], line))[1:]
        needs = {"leave": ["--yes"], "join": ["--yes"]}.get(words[0], [])
        status = common.main(swarmctl, "swarmctl", [*words, *needs, "--data-dir", str(node.folder)])
        out, err = capsys.readouterr()
        allowed = {0, 1} if line.startswith(MAY_FIND_FAULTS) else {0}
        assert status in allowed, f"{line}\n{out}{err}"
        return out

    def until_so_many_may_lead(self, count: int, capsys: pytest.CaptureFixture[str]) -> None:
        def act() -> bool:
            listed = self.run(self.owner, "swarmctl backbone list --json", capsys)
            return len(json.loads(listed)["members"]) == count

        wait_until(act)

    def ready(self, node: LocalNode) -> None:
        wait_until(lambda: node.status()["ready"])


@pytest.mark.timeout(240)
def test_the_pages_tell_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSPHRASE", "correct horse battery staple")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    stage = Stage(tmp_path)
    owner, volunteer = stage.owner, stage.volunteer
    left = commands("volunteer.md")
    try:
        for node in (owner, volunteer):
            node.start()
        for node in (owner, volunteer):
            node.wait_up()
        for line in commands("owner.md"):
            out = stage.run(owner, line, capsys)
            if line.startswith("swarmctl model use"):
                stage.ready(owner)
            if line.startswith(("swarmctl backbone add", "swarmctl backbone remove")):
                stage.until_so_many_may_lead(2 if " add " in line else 1, capsys)
            if line.startswith("swarmctl invite"):
                stage.words["TOKEN"] = out.split()[0]
                join(stage, left, capsys)
        wait_until(lambda: volunteer.status()["leader"])
        for line in left:
            stage.run(volunteer, line, capsys)
    finally:
        for node in (owner, volunteer):
            node.kill()


def join(stage: Stage, lines: Iterator[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The volunteer's page, up to where it leaves."""
    for line in lines:
        stage.run(stage.volunteer, line, capsys)
        if line.startswith("swarmctl join"):
            stage.words["PEER"] = stage.volunteer.status()["self"]
            stage.ready(stage.volunteer)
            wait_until(lambda: len(stage.owner.status()["peers"]) == 2)
        if line.startswith("swarmctl logs"):
            return
