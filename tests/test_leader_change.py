"""The leader changes in the middle of an answer: real leaders with llama.cpp, over libp2p, and the same tokens.

Each leader computes with the experts of its own node, over its loopback.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from backends.add_model import add_model
from backends.device import Device
from backends.experts import GgmlExperts
from scheduler.sampling import SamplingParams
from scheduler.text_stream import TextStream
from swarmnode import leadership
from swarmnode.asker import FollowingAsker
from swarmnode.config import parse_config
from swarmnode.identity import Identity
from swarmnode.named_swarm import NamedLeaderNode
from swarmnode.net.interface import Network
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.paths import find_paths
from swarmnode.prompt_messages import Ask, Done, Failed, Reply, Token
from swarmnode.shards.store import ShardCache
from swarmnode.undivided import Undivided
from swarmnode.worker.service import Worker
from tests.expert_models import quiet, tiny_file
from tests.fault_tools import hello
from tests.leader_views import SettableView
from tests.net_tools import eventually

CONTEXT = 256
CONFIG = parse_config(f"[swarm]\nsettle_s = 0.1\n[leader]\nparallel = 2\ncontext_tokens = {CONTEXT}")


class SlowExperts(GgmlExperts):
    """Right, and slow enough for a leader to be lost in the middle."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.001)
        return super().compute(*args, **kwargs)


def slow_experts() -> SlowExperts:
    return SlowExperts(Device("CPU", threads=1))


def undivided(ask: Ask) -> tuple[list[int], str]:
    """llama.cpp's own answer: tokens and text."""
    alone = Undivided(tiny_file("olmoe"), context_tokens=CONTEXT)
    tokens = list(alone.answer(ask).tokens)
    stream = TextStream(ask.stop)
    text = "".join(stream.feed(alone.piece(token)).text for token in tokens) + stream.finish().text
    alone.close()
    return tokens, text


@asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[Network]:
    """A node that leads, and is its own only worker."""
    async with open_libp2p_network(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as network:
        node = NamedLeaderNode(network, CONFIG, find_paths(folder), 1)
        cache = ShardCache(folder / "cache", 1 << 30)
        itself = leadership.NamedLeader(network.peer_id)
        worker = Worker(network, itself, lambda: hello("w"), cache, 1 << 30, slow_experts)
        async with trio.open_nursery() as outlives_the_leader:
            outlives_the_leader.start_soon(worker.run)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.run)
                await eventually(lambda: node.leader.refusal() is None)
                yield network
                nursery.cancel_scope.cancel()
            outlives_the_leader.cancel_scope.cancel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for folder in made:
        add_model(tiny_file("olmoe"), folder / "models" / "tiny", "tiny", quiet)
    return made


@pytest.mark.parametrize("how", ["lost", "replaced"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=7, presence_penalty=0.5)],
    ids=["greedy", "sampled"],
)
async def test_the_answer_is_llama_cpps(folders: tuple[Path, Path], params: SamplingParams, how: str) -> None:
    ask = Ask("req-1", params, prompt="It was a dark", max_tokens=60, ignore_eos=True, stop=("never to be said",))
    tokens, text = undivided(ask)
    view, replies = SettableView(), list[Reply]()
    async with (
        leading(folders[1]) as second,
        open_libp2p_network(Identity.generate(), []) as asking,
        trio.open_nursery() as nursery,
    ):

        async def hear() -> None:
            async with FollowingAsker(asking, view).replies(ask) as found:
                async for reply in found:
                    replies.append(reply)

        async with leading(folders[0]) as first:
            for leader in (first, second):
                await asking.connect(leader.addresses[0])
            view.set(first.peer_id, 1)
            nursery.start_soon(hear)
            await eventually(lambda: len(replies) > 12)
            if how == "replaced":  # the first one streams on
                view.set(second.peer_id, 2)
                await eventually(lambda: isinstance(replies[-1], Done | Failed))
        if how == "lost":
            assert not isinstance(replies[-1], Done)
            view.set(None)
            view.set(second.peer_id, 2)
            await eventually(lambda: isinstance(replies[-1], Done | Failed))
    done, found = replies[-1], [reply for reply in replies if isinstance(reply, Token)]
    assert isinstance(done, Done), done
    assert [token.token for token in found] == tokens
    assert "".join(token.text for token in found) + done.text == text
    assert done.leader == str(second.peer_id)
