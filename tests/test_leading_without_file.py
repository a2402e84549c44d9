"""A leader that never had the model's file: trunk from a peer, probes from the workers themselves, the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.service import Leader
from swarmnode.model_choice import ModelChoice
from swarmnode.model_keeper import ModelKeeper
from swarmnode.models import Models
from swarmnode.pinger import serve_pings
from swarmnode.shards.borrowing import Borrowing
from swarmnode.shards.service import ShardService
from swarmnode.shards.serving import Serving
from swarmnode.shards.store import ShardCache
from tests.leading_swarm import ask, leading_swarm
from tests.net_tools import eventually

SETTINGS = """
[swarm]
workers_expected = 2
[leader]
context_tokens = 256
parallel = 2
"""


async def test_it_fetches_proves_and_answers(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, SETTINGS, workers=0) as swarm, trio.open_nursery() as nursery:
        original, network = swarm.network, swarm.hub.join()
        serve_pings(network)
        await network.connect(original.addresses[0])
        cache = ShardCache(tmp_path / "cache", 1 << 30)
        models = Models(tmp_path / "fetched", cache)
        ShardService(Serving(models, cache).find).register(network)
        manifest = Models(tmp_path / "models").manifest("tiny")
        keeper = ModelKeeper(network, models, cache, lambda: None)
        nursery.start_soon(keeper.run)
        keeper.want(manifest.id, [original.peer_id])
        await eventually(lambda: keeper.held() == "tiny")

        swarm.network = network
        for _ in range(2):
            hand = swarm.add_worker()
            await hand.network.connect(original.addresses[0])
        leader = Leader(
            LeaderProtocols(network),
            swarm.trunks,
            partial(ModelChoice(tmp_path / "choice", "").open, models),
            swarm.config,
            1,
            7,
            borrow=lambda manifest: Borrowing(network, manifest, cache, list).obtain,
            backbone=lambda: (original.peer_id,),
        )
        swarm.leader = leader
        assert cache.statistics().experts == 0
        nursery.start_soon(leader.run)
        await swarm.until_ready()
        assert cache.statistics().experts == sum(layer.n_expert for layer in manifest.layers)
        await eventually(lambda: all(m.agreement is not None for m in leader.members.present()))
        agreements = [member.agreement for member in leader.members.present()]
        assert [a.bit_identical for a in agreements if a is not None] == [True, True]
        await swarm.check(ask("req-1"))
        nursery.cancel_scope.cancel()
