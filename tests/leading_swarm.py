"""Real leaders and workers with a tiny model in llama.cpp, in one process on a network in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from backends.add_model import add_model
from backends.device import Device
from backends.experts import ExpertBackend, GgmlExperts
from scheduler.sampling import SamplingParams
from swarmnode.config import Config, parse_config
from swarmnode.leader.judge import Judge
from swarmnode.leader.probe import Obtain
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.leader.trunk import Trunks
from swarmnode.leadership import NamedLeader
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models, OpenModel
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.pinger import serve_pings
from swarmnode.prompt_messages import Ask, Done, Failed, Reply, Token
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.shards.store import ShardCache
from swarmnode.undivided import Undivided
from swarmnode.worker.service import Worker
from tests.expert_models import quiet, tiny_file
from tests.fault_tools import hello
from tests.net_tools import eventually

CONTEXT_TOKENS = 256
KIND = "olmoe"


def ask(request_id: str, prompt: str = "A story:", max_tokens: int = 40, **params: Any) -> Ask:
    """Greedy, and of a fixed length, unless the parameters say otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 1, **params})
    return Ask(request_id=request_id, params=sampling, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)


@dataclass
class Heard:
    """An answer as it arrives."""

    tokens: list[int] = field(default_factory=list)
    end: Done | Failed | None = None

    def take(self, reply: Reply) -> None:
        if isinstance(reply, Token):
            assert reply.index == len(self.tokens)
            self.tokens.append(reply.token)
        elif isinstance(reply, Done | Failed):
            assert self.end is None
            self.end = reply

    @property
    def error(self) -> Any:
        assert isinstance(self.end, Failed)
        return self.end.error


@dataclass
class Hand:
    """A real worker. `away` ends it, memory and connections; `back` starts it again, with what it has on disk."""

    network: MemoryNetwork
    worker: Worker
    swarm: LeadingSwarm
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def name(self) -> str:
        return str(self.network.peer_id)

    async def run(self) -> None:
        with self.scope:
            await self.worker.run()

    def away(self) -> None:
        self.scope.cancel()
        self.swarm.hub.cut(self.network.peer_id, self.swarm.network.peer_id)

    def back(self) -> None:
        self.swarm.hub.mend(self.network.peer_id, self.swarm.network.peer_id)
        self.scope = trio.CancelScope()
        self.swarm.nursery.start_soon(self.run)


def judge_in_thread(opened: OpenModel, obtain: Obtain) -> Judge:
    """No process for each of hundreds of leaders (tests/test_judge_process.py has them)."""
    return Judge(opened.manifest, opened.served.source, partial(Device, threads=1), obtain)


@dataclass
class LeadingSwarm:
    hub: MemoryHub
    network: MemoryNetwork
    nursery: trio.Nursery
    folder: Path
    config: Config
    protocols: LeaderProtocols
    trunks: Trunks
    undivided: Undivided
    hands: list[Hand] = field(default_factory=list)
    leader: Leader | None = None

    @property
    def leading(self) -> Leader:
        assert self.leader is not None
        return self.leader

    @property
    def ready(self) -> bool:
        return self.leader is not None and self.leader.refusal() is None

    def expected(self, ask: Ask) -> list[int]:
        """What llama.cpp answers alone."""
        return list(self.undivided.answer(ask).tokens)

    async def hear(self, ask: Ask, heard: Heard) -> None:
        async with self.leading.replies(ask) as replies:
            async for reply in replies:
                heard.take(reply)

    async def check(self, ask: Ask) -> None:
        heard = Heard()
        await self.hear(ask, heard)
        assert heard.tokens == self.expected(ask)

    def make_leader(self, term: int, **more: Any) -> Leader:
        choose = partial(ModelChoice(self.folder / "model", "").open, Models(self.folder / "models"))
        more.setdefault("make_judge", judge_in_thread)
        self.leader = Leader(self.protocols, self.trunks, choose, self.config, 1, term, **more)
        return self.leader

    @asynccontextmanager
    async def led(self, term: int, **more: Any) -> AsyncIterator[Leader]:
        """Lead for a while."""
        leader = self.make_leader(term, **more)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.run)
            yield leader
            nursery.cancel_scope.cancel()

    def add_worker(self, make: Callable[[], ExpertBackend] | None = None, **fields: Any) -> Hand:
        number = len(self.hands)
        network = self.hub.join()
        cache = ShardCache(self.folder / f"cache-{number}", 1 << 30)
        made = make or (lambda: GgmlExperts(Device("CPU")))
        serve_pings(network)
        ShardService(Serving(Models(self.folder / f"models-{number}", cache), cache).find).register(network)
        said = hello(f"worker-{number}", **fields)
        view = NamedLeader(self.network.peer_id, self.network.addresses[0])
        worker = Worker(network, view, lambda: said, cache, said.memory_budget_bytes, made)
        hand = Hand(network, worker, self)
        self.hands.append(hand)
        self.nursery.start_soon(hand.run)
        return hand

    async def until_ready(self) -> None:
        await eventually(lambda: self.ready)


@asynccontextmanager
async def leading_swarm(folder: Path, settings: str = "", *, workers: int = 2) -> AsyncIterator[LeadingSwarm]:
    """`settings` are TOML, added to a small context. Nobody leads yet."""
    add_model(tiny_file(KIND), folder / "models" / "tiny", "tiny", quiet)
    config = parse_config(f"{settings}\n")
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        network = hub.join()
        serve_pings(network)
        undivided = Undivided(tiny_file(KIND), context_tokens=CONTEXT_TOKENS)
        trunks = Trunks(config.leader, 1)
        swarm = LeadingSwarm(hub, network, nursery, folder, config, LeaderProtocols(network), trunks, undivided)

        ShardService(Serving(Models(folder / "models"), None).find).register(network)
        for _ in range(workers):
            swarm.add_worker()
        try:
            yield swarm
        finally:
            undivided.close()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trunks.close()
