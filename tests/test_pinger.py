"""Pings between peers, and of a node by itself."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from scheduler.liveness import PeerState
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import open_memory_hub
from swarmnode.pinger import PeerWatch, serve_pings


async def test_a_peer_that_falls_silent_fails_and_comes_back(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        one, other = hub.join(), hub.join()
        heard: list[tuple[PeerId, PeerState]] = []
        watch = PeerWatch(one, lambda peer, state: heard.append((peer, state)))
        await nursery.start(watch.run)
        serve_pings(other)
        await one.connect(other.addresses[0])
        watch.watch(other.peer_id)
        await trio.sleep(10)
        assert (watch.state(other.peer_id), heard) == (PeerState.ALIVE, [])
        hub.set_delay(one.peer_id, other.peer_id, float("inf"))
        await trio.sleep(3)
        assert heard == [(other.peer_id, PeerState.SUSPECT), (other.peer_id, PeerState.FAILED)]
        hub.set_delay(one.peer_id, other.peer_id, 0.1)
        await trio.sleep(3)
        assert (watch.state(other.peer_id), heard[-1]) == (PeerState.ALIVE, (other.peer_id, PeerState.ALIVE))
        assert watch.rtt_ms(other.peer_id) is not None
        assert watch.rtt_least_ms(other.peer_id) == 200.0
        nursery.cancel_scope.cancel()


async def test_a_node_is_always_alive_to_itself(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        network = hub.join()
        watches = [PeerWatch(network), PeerWatch(network)]  # one of its leader's, one of its worker's
        for watch in watches:
            await nursery.start(watch.run)
            watch.watch(network.peer_id)
        await trio.sleep(60)
        for watch in watches:
            assert watch.state(network.peer_id) == PeerState.ALIVE
            assert watch.rtt_ms(network.peer_id) == 0.0
            watch.unwatch(network.peer_id)
            assert watch.state(network.peer_id) == PeerState.ALIVE
        nursery.cancel_scope.cancel()
