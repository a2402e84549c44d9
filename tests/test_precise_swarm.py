"""Measured, not claimed, with real daemons: who adds in half precision holds no output rank, whatever it says.

worker-1 and worker-2 are as they should be, `halves` claims F32 and adds in half precision, and `turncoat` adds in F32
until it is told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swarmnode.local_swarm import LocalSwarm
from tests.half_backends import TURN_FILE
from tests.patience import PATIENCE_S
from tests.swarm_tools import CONTEXT_TOKENS, ask, logged, wait_until
from tests.tiny_architectures import write_olmoe

LAYERS = 8
OUTPUT = {6, 7}  # the last quarter


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    root = tmp_path_factory.mktemp("precise")
    model = write_olmoe(root / "olmoe.gguf", LAYERS, quantisation="q4_0", widths=(512, 256))  # narrower tells less
    settings = {"leader": {"context_tokens": CONTEXT_TOKENS, "batch_tokens": 64}, "swarm": {"workers_expected": 5}}
    made = LocalSwarm(root / "swarm", 4, backbone=1, leader=settings)
    makes = {"halves": "BoastfulHalves", "turncoat": "Turncoat"}
    for node, (name, factory) in zip(made.workers[2:], makes.items(), strict=True):
        node.settings["node"]["name"] = node.settings["node"]["host"] = name
        node.settings["compute"] = {"factory": f"tests.half_backends:{factory}"}
        node.environment[TURN_FILE] = str(root / "turned")
        node.environment["XDG_CACHE_HOME"] = str(root / f"cache-{name}")  # daemons that share one measure in turn
    with made as swarm:
        for node in swarm.workers:  # a busy machine may take longer than the first placement waits for
            wait_until(lambda name=node.settings["node"]["name"]: is_measured(swarm, name))
        swarm.add_model(model)
        swarm.wait_ready(timeout_s=PATIENCE_S)
        yield swarm


def is_measured(swarm: LocalSwarm, name: str) -> bool:
    found = [peer for peer in swarm.leader.status()["peers"] if peer["name"] == name]
    return any(backend["accumulation"]["measured"] != "unknown" for peer in found for backend in peer["backends"])


def row(swarm: LocalSwarm, name: str) -> dict[str, Any]:
    (found,) = [peer for peer in swarm.leader.status()["peers"] if peer["name"] == name]
    return dict(found)


def share(swarm: LocalSwarm, name: str) -> dict[str, Any]:
    (found,) = [peer for peer in swarm.leader.call("placement")["peers"] if peer["name"] == name]
    return dict(found)


def layers(swarm: LocalSwarm, name: str) -> set[int]:
    return {held["layer"] for held in share(swarm, name)["held"]}


def test_a_claim_that_the_probe_contradicts_loses(swarm: LocalSwarm) -> None:
    (backend,) = row(swarm, "halves")["backends"]
    assert backend["accumulation"] == {"declared": "f32", "measured": "f16", "measured_when_asked": "f16"}
    found = [finding for finding in swarm.leader.status()["findings"] if finding["kind"] == "precision"]
    assert {finding["peer"] for finding in found} == {swarm.workers[2].peer_id}
    assert "declares f32 for its accumulation, but f16 was measured" in found[0]["message"]


def test_it_serves_inner_layers_and_gets_no_output_rank(swarm: LocalSwarm) -> None:
    wait_until(lambda: row(swarm, "halves")["fitness"])
    halves = row(swarm, "halves")
    assert (halves["state"], halves["fitness"]) == ("ready", "unfit")
    assert halves["error"]["type"] == "imprecise"
    assert "adds in half precision" in halves["error"]["message"]
    assert layers(swarm, "halves") <= set(range(LAYERS)) - OUTPUT
    assert layers(swarm, "halves")
    assert "was not seen to accumulate in F32" in share(swarm, "halves")["why_no_output_rank"]
    assert {name for name in ("worker-1", "worker-2", "turncoat") if OUTPUT & layers(swarm, name)}
    assert swarm.leader.status()["model"]["degraded"] == []
    answer = swarm.workers[2].call("ask", **ask("Once upon a time", 30, ignore_eos=True))
    assert len(answer["tokens"]) == 30


def test_what_is_found_later_moves_nothing(swarm: LocalSwarm) -> None:
    """One placement, and it was right: the probe's verdict and the measurement of the model's own weights fit it."""
    assert len(logged(swarm.leader, "placement.made")) == 1
    assert swarm.leader.status()["epoch"] == 1


def test_who_adds_worse_in_service_is_found(swarm: LocalSwarm) -> None:
    assert row(swarm, "turncoat")["fitness"] == "fit"
    assert OUTPUT & layers(swarm, "turncoat")
    (swarm.leader.folder.parent.parent / "turned").touch()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            swarm.leader.call("ask", **ask("A story:", 60, ignore_eos=True))

    asking = threading.Thread(target=work)
    asking.start()
    try:
        wait_until(lambda: row(swarm, "turncoat")["fitness"] == "unfit")
        wait_until(lambda: not OUTPUT & layers(swarm, "turncoat"))
    finally:
        done.set()
        asking.join()
    error = row(swarm, "turncoat")["error"]
    assert error["type"] in ("imprecise", "out_of_tolerance")  # by a crafted check or by an audit, whichever was first
    assert error["type"] == "out_of_tolerance" or "adds in half precision" in error["message"]
    assert [row(swarm, name)["fitness"] for name in ("worker-1", "worker-2")] == ["fit", "fit"]


def test_with_nobody_precise_left_the_swarm_serves_and_says_so(swarm: LocalSwarm) -> None:
    for worker in swarm.workers[:2]:
        worker.kill()
    degraded = wait_until(lambda: swarm.leader.status()["model"]["degraded"])
    assert any("output rank 7" in sentence and "is unfit" in sentence for sentence in degraded)
    wait_until(lambda: swarm.leader.status()["ready"])
    answer = swarm.leader.call("ask", **ask("And now?", 20, ignore_eos=True))
    assert len(answer["tokens"]) == 20
