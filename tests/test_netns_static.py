"""A swarm whose leader is configured, over 20 ms round trips: llama.cpp's own tokens, in either family of addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.skipping import bed_or_skip
from tests.netns.swarm import BedSwarm, four_layers, swarm_in_bed
from tests.swarm_tools import ask


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BedSwarm]:
    root = tmp_path_factory.mktemp("bed")
    with bed_or_skip(3) as bed, swarm_in_bed(root, bed, four_layers(root / "m.gguf")) as swarm:
        swarm.form_static()
        yield swarm


def test_an_answer_over_20_ms_round_trips(swarm: BedSwarm) -> None:
    swarm.check(swarm.nodes[2], ask("A story", 12, ignore_eos=True))
    rows = {row["name"]: row["rtt_ms"] for row in swarm.nodes[0].status()["peers"]}
    assert rows["peer-1"] >= 20
    assert rows["peer-2"] >= 20


def test_ipv6_alone_and_a_worker_that_nobody_can_dial(tmp_path: Path) -> None:
    """Behind a router that translates addresses a worker can only dial out. It serves like any other, and may ask."""
    with bed_or_skip(3, ipv4=False) as bed, swarm_in_bed(tmp_path, bed, four_layers(tmp_path / "m.gguf")) as swarm:
        bed.shield(2)
        swarm.form_static()
        held = {row["name"]: row["experts_held"] for row in swarm.nodes[0].status()["peers"]}
        assert held["peer-2"] > 0
        swarm.check(swarm.nodes[2], ask("A story", 8, ignore_eos=True))
