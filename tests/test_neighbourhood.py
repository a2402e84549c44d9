"""Finding neighbours, while news of them keeps coming."""

from __future__ import annotations

from typing import cast

import trio
import trio.testing

from scheduler.advert_findings import Unreached
from swarmnode.net.interface import Network, PeerId
from swarmnode.swarm.neighbourhood import Neighbourhood


class Slow:
    """A network on which a dial takes as long as the test wants."""

    def __init__(self) -> None:
        self.dialed: list[str] = []
        self.answer = trio.Event()

    def connected_peers(self) -> list[PeerId]:
        return [PeerId("found")] if self.answer.is_set() else []

    async def connect(self, address: str) -> PeerId:
        self.dialed.append(address)
        await self.answer.wait()
        return PeerId("found")


async def test_a_peer_that_is_found_again_while_it_is_dialed() -> None:
    network = Slow()
    nearby = {"found": ["/ip4/192.0.2.1/tcp/1"]}
    around = Neighbourhood(cast(Network, network), dict, Unreached(), lambda: nearby)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(around.run)
        around.look("found")
        await trio.testing.wait_all_tasks_blocked()
        assert network.dialed
        around.look("found")
        network.answer.set()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
