"""Peers compared in a swarm of real daemons: the leader's machine from a worker, and a worker from the leader's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli import common, ctl
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.peers import open_swarm
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.targets import find_target
from swarmnode.local_swarm import LocalSwarm
from tests.expert_models import quiet
from tests.patience import PATIENCE_S
from tests.swarm_tools import wait_until
from tests.tiny_architectures import write_tiny_model

SMALL = Sizes(("q8_0",), (256,), (1, 40))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    root = tmp_path_factory.mktemp("compared")
    model = write_tiny_model(root / "tiny.gguf", "olmoe", quantisation="q8_0")
    settings = {"leader": {"context_tokens": 256, "batch_tokens": 64}, "swarm": {"replicas": 2}}
    with LocalSwarm(root / "swarm", 2, backbone=1, leader=settings) as made:
        made.add_model(model)
        made.wait_ready(timeout_s=PATIENCE_S)
        yield made


def equivalence(capfd: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    words = ("--data-dir", str(folder), "equivalence", *words, "--json")
    status = common.main(ctl.swarmctl, "swarmctl", words)
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    return status, result


def test_a_worker_compares_the_leaders_machine_with_its_own_by_operators(swarm: LocalSwarm) -> None:
    found = open_swarm(lambda: swarm.workers[0].socket)
    assert {"leader", "worker-1", "worker-2"} <= {row.name for row in found.peers}
    a, b = (find_target(name, lambda: found, SMALL) for name in ("peer:leader", "ggml-cpu"))
    level = op_level(a, b, SMALL, quiet)
    assert level["pass"], level
    assert all(row["bit_identical"] for row in level["ops"])


def test_experts_of_a_peer_are_compared_on_the_swarms_own_model(
    swarm: LocalSwarm, capfd: pytest.CaptureFixture[str]
) -> None:
    holder = wait_until(lambda: next((n for n in swarm.workers if n.call("status")["local"]["experts_held"]), None))
    words = (f"peer:{holder.name}", "reference:q8", "--level", "layer", "--tokens", "64")
    status, result = equivalence(capfd, swarm.leader.folder, *words)
    assert status == 0, result
    share = result["experts"]["a"]
    assert share["peer"] == holder.name
    assert 0 < share["held"] <= share["of"]
    assert 0 < share["rows"] <= share["rows_of"]
    first = result["levels"][0]["divergence"]["first"]
    assert first["layer"] == 0
    assert result["levels"][0]["pinned"]["relative_l2"][0] > 0

    status, result = equivalence(capfd, holder.folder, *words)  # which has no file of the model
    assert status == 1
    assert result["pass"] is None
    assert "--model" in result["levels"][0]["reason"] or "not on this machine" in result["levels"][0]["reason"]

    status, result = equivalence(capfd, holder.folder, "peer:nobody", "reference")
    assert status == 2
    assert "worker-1" in result["error"]["hint"]
