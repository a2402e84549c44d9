"""Five real daemons at 20 ms round trips, three of which may lead: each fault twice, and every answer llama.cpp's own.

The same rounds as `python -m tests.netns`, on a tiny model of four layers. One of the five is behind a router that lets
nobody dial it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.faults import play
from tests.netns.skipping import skipping_without_namespaces
from tests.netns.swarm import Stage, four_layers
from tests.patience import LOADED

MAX_TOKENS = 16
NAP_SECONDS = 15.0
ROUNDS = [(f"{role}-{kind}", n) for n in (0, 1) for kind in ("kill", "stop", "cut") for role in ("worker", "leader")]
LONGER = [("worker-nap", 0), ("worker-part", 0), ("leader-part", 1)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("bed")
    stage = Stage(four_layers(root / "m.gguf"), root)
    try:
        yield stage
    finally:
        stage.drop()


@pytest.mark.timeout(600)  # the first one makes the swarm
@pytest.mark.parametrize(("case", "number"), ROUNDS + LONGER)
def test_an_answer_survives(stage: Stage, case: str, number: int) -> None:
    with skipping_without_namespaces():
        swarm = stage.swarm()
    outcome = play(swarm, case, number, MAX_TOKENS, NAP_SECONDS, LOADED)
    if outcome.back_s is None:
        stage.drop()
    assert outcome.good, outcome
