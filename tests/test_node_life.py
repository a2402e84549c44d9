"""A daemon from its first start: outside of any swarm, founding one, alone in it, admitting others, leaving."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.local_swarm import LocalNode
from tests.node_tools import SETTINGS, ctl
from tests.patience import PATIENCE_S
from tests.swarm_tools import ask, failure, wait_until
from tests.tiny_architectures import write_tiny_model


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalNode]]:
    root = tmp_path_factory.mktemp("life")
    settings = {name: {**SETTINGS, "node": {**SETTINGS["node"], "name": name}} for name in ("first", "second")}
    made = {name: LocalNode(name, root / name, settings[name]) for name in settings}
    for node in made.values():
        node.start()
    try:
        for node in made.values():
            node.wait_up()
        yield made
    finally:
        for node in made.values():
            node.kill()


def test_outside_of_a_swarm_a_node_leads_nothing(nodes: dict[str, LocalNode]) -> None:
    status = nodes["first"].status()
    assert (status["leader"], status["ready"], status["swarm"]) == (None, False, {"id": None, "name": None})
    assert "swarmctl init" in status["reason"]
    error = ctl(nodes["first"], "ask", "Anybody?", status=1)["error"]
    assert error["type"] == "not_in_swarm"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = [f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"]
        node = LocalNode("late", tmp_path / "late", {**SETTINGS, "node": {"listen": listen}})
        ctl(node, "init")  # without its daemon
        node.start()
        assert node.process is not None
        assert node.process.wait(PATIENCE_S) == 2
    assert "cannot listen" in node.last_words()
    assert "change node.listen" in node.last_words()
    assert "Traceback" not in node.last_words()


def test_a_swarm_of_one_leads_and_serves_itself(nodes: dict[str, LocalNode], tmp_path: Path) -> None:
    first = nodes["first"]
    made = ctl(first, "init", "--name", "home")
    assert made["daemon"] is True
    wait_until(lambda: first.status()["addresses"])
    status = first.status()
    assert status["swarm"] == {"id": made["swarm"]["id"], "name": "home"}
    assert status["leader"] is None
    assert "model add" in status["reason"]
    ctl(first, "model", "add", str(write_tiny_model(tmp_path / "tiny.gguf", "olmoe")))
    status = wait_until(lambda: (s := first.status())["ready"] and s)
    assert status["leader"] == status["self"]
    assert status["peers"][0]["roles"] == ["leader", "backbone", "worker"]
    assert status["peers"][0]["experts_held"] == status["model"]["experts"]
    assert len(first.call("ask", **ask("Hello", 8, ignore_eos=True))["tokens"]) == 8


def test_an_invited_node_becomes_a_worker(nodes: dict[str, LocalNode]) -> None:
    first, second = nodes.values()
    token = ctl(first, "invite")["token"]
    joined = ctl(second, "join", token, "--yes")
    assert joined["admitted_by"] == first.status()["self"]
    status = wait_until(lambda: (s := second.status())["ready"] and s)
    assert status["leader"] == first.status()["self"]

    def carried() -> bool:
        rows = {row["name"]: row for row in first.status()["peers"]}
        return "second" in rows and rows["second"]["experts_held"] > 0

    wait_until(carried)
    assert len(second.call("ask", **ask("Hello", 8, ignore_eos=True))["tokens"]) == 8
    assert "only its peers lead" in failure(lambda: second.call("model_add", path="/x.gguf")).message


def test_outside_of_its_hours_a_node_holds_nothing_and_asks_on(nodes: dict[str, LocalNode]) -> None:
    first, second = nodes.values()
    hour = (time.localtime().tm_hour + 12) % 24

    def restarted(**limits: Any) -> None:
        second.kill()
        second.settings = {**second.settings, "limits": limits}
        second.start()
        second.wait_up()

    def carries() -> bool:
        rows = {row["name"]: row for row in first.status()["peers"]}
        return first.status()["ready"] and rows["second"]["experts_held"] > 0

    restarted(hours=[f"{hour:02}:00-{hour:02}:01"])
    (found,) = wait_until(lambda: [each for each in second.status()["findings"] if each["kind"] == "paused"])
    assert "not its hours" in found["message"]
    wait_until(lambda: first.status()["ready"] and not carries())
    wait_until(lambda: second.status()["ready"])
    assert len(second.call("ask", **ask("Hello", 8, ignore_eos=True))["tokens"]) == 8
    restarted()
    wait_until(carries)


def test_a_copied_data_folder_is_named_on_all_sides(nodes: dict[str, LocalNode], tmp_path: Path) -> None:
    first, second = nodes["first"], nodes["second"]
    settings = {**second.settings, "node": {**second.settings["node"], "name": "copy"}}
    copy = LocalNode("copy", tmp_path / "copy", settings)
    shutil.copytree(second.folder, copy.folder, ignore=shutil.ignore_patterns("run", "*.log", "*.lock"))
    copy.start()
    try:
        copy.wait_up()
        peer = second.status()["self"]

        def named(node: LocalNode) -> bool:
            found = [(each["kind"], each["peer"]) for each in node.status()["findings"]]
            return ("cloned_identity", peer) in found

        wait_until(lambda: named(first))
        for node in (second, copy):
            wait_until(lambda node=node: named(node))
    finally:
        copy.kill()
    wait_until(lambda: second.status()["ready"])


def test_the_backbone_grows(nodes: dict[str, LocalNode]) -> None:
    first, second = nodes.values()
    peer = second.status()["self"]
    assert ctl(first, "backbone", "add", peer)["version"] == 2
    wait_until(lambda: len(ctl(second, "backbone", "list")["members"]) == 2)
    wait_until(lambda: second.call("model_list")["models"])
    assert ctl(first, "backbone", "remove", peer)["version"] == 3
    wait_until(lambda: len(ctl(second, "backbone", "list")["members"]) == 1)


def test_a_banned_node_is_shut_out(nodes: dict[str, LocalNode]) -> None:
    first, second = nodes.values()
    peer = second.status()["self"]
    assert ctl(first, "ban", peer)["banned"] is True
    wait_until(lambda: second.status()["leader"] is None)
    assert failure(lambda: second.call("ask", **ask("Anybody?"))).type == "no_leader"
    status = wait_until(lambda: (s := first.status())["ready"] and s)  # its experts are the first one's own again
    assert {row["name"]: row["state"] for row in status["peers"]}.get("second", "gone") == "gone"


def test_leaving_makes_a_node_free(nodes: dict[str, LocalNode]) -> None:
    second = nodes["second"]
    ctl(second, "leave", "--yes")
    wait_until(lambda: second.status()["swarm"]["id"] is None)
