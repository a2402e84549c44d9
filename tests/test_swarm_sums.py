"""Swarms of real processes that combine by partial sums: near llama.cpp's answers, whoever else is served."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from backends.add_model import add_model
from backends.sum_point import SumSearch
from swarmnode.config import parse_config
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models
from swarmnode.net.memory import open_memory_hub
from tests.expert_models import quiet, tiny_file
from tests.net_tools import eventually
from tests.swarm_tools import Served, ask, at_once, serving

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}


@pytest.fixture(scope="module", params=["gpt-oss", "deepseek2-merged"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sums")
    with serving(folder, request.param, parallel=8, combine="partial-sum") as swarm:
        yield swarm


def test_status_names_the_combine(served: Served) -> None:
    for node in served.swarm.nodes:
        assert node.status()["model"]["combine"] == "partial-sum"


def test_greedy_answers_agree_with_llama_cpp(served: Served) -> None:
    """Rounding may turn a near tie, after which the rest differs, so this asks for most tokens and not for all."""
    params = [ask(f"Prompt number {i} of some", 50, ignore_eos=True) for i in range(4)]
    same = total = 0
    for i, each in enumerate(params):
        answer = served.swarm.nodes[i % 3].call("ask", **each)["tokens"]
        same += sum(a == b for a, b in zip(answer, served.expected(each).tokens, strict=True))
        total += len(answer)
    print(f"{same} of {total} greedy tokens agree with llama.cpp undivided")
    assert same >= 0.8 * total


def test_eight_prompts_at_once_are_each_equal_to_themselves_alone(served: Served) -> None:
    asks = [
        ask(f"{'Prompt ' * 3 ** (i % 4)}number {i}", 15 + 3 * i, ignore_eos=True, **(SAMPLED if i % 2 else {}))
        for i in range(8)
    ]
    nodes = served.swarm.nodes
    alone = [served.leader.call("ask", **params)["tokens"] for params in asks]
    together = at_once([lambda i=i: nodes[i % 3].call("ask", **asks[i])["tokens"] for i in range(8)])
    assert together == alone


def test_one_row_a_token_comes_back(served: Served) -> None:
    def counted(key: str) -> int:
        return sum(int(link[key]) for link in served.leader.call("statistics")["links"])

    keys = ("bytes_back", "tokens", "dispatches", "rows")
    before = {key: counted(key) for key in keys}
    served.leader.call("ask", **ask("Count the bytes", 20, ignore_eos=True))
    grown = {key: counted(key) - before[key] for key in keys}
    assert grown["bytes_back"] <= 4 * 64 * grown["tokens"] + 96 * grown["dispatches"]
    assert grown["rows"] > 1.2 * grown["tokens"]


async def test_a_model_without_sums_is_refused_and_the_leader_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(tiny_file("olmoe"), tmp_path / "models" / "tiny", "tiny", quiet)
    monkeypatch.setattr(SumSearch, "see", lambda *_: None)
    choose = partial(ModelChoice(tmp_path / "model", "").open, Models(tmp_path / "models"))
    for combine, reason in (("partial-sum", "layer 0 does something else"), ("router-order", "")):
        config = parse_config(f'[leader]\nparallel = 1\ncontext_tokens = 64\ncombine = "{combine}"')
        async with open_memory_hub() as hub, trio.open_nursery() as nursery:
            leader = Leader(LeaderProtocols(hub.join()), Trunks(config.leader, 1), choose, config, 1, 1)
            nursery.start_soon(leader.run)
            if reason:
                await eventually(lambda leader=leader, reason=reason: reason in leader.reason)  # type: ignore[misc]
                assert leader.active is None
                refusal = leader.refusal()
                assert refusal is not None
                assert "a usable model: layer 0" in refusal.message
            else:
                await eventually(lambda leader=leader: leader.active is not None)  # type: ignore[misc]
            nursery.cancel_scope.cancel()
