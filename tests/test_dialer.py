"""Connections to a changing set of peers: retries, several addresses, reasons, and peers that come by themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from swarmnode.backbone.dialer import Dialer
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from tests.backbone_nodes import eventually


@dataclass
class Lab:
    hub: MemoryHub
    network: MemoryNetwork
    dialer: Dialer = None  # type: ignore[assignment]  # made right after
    addresses: dict[str, Sequence[str]] = field(default_factory=dict)
    reached: list[str] = field(default_factory=list)
    unreached: list[tuple[str, str, str]] = field(default_factory=list)
    dials: list[tuple[float, str]] = field(default_factory=list)

    def count_dials(self) -> None:
        connect = self.network.connect

        async def counted(address: str) -> object:
            self.dials.append((trio.current_time(), address))
            return await connect(address)

        self.network.connect = counted  # type: ignore[method-assign, assignment]


@asynccontextmanager
async def lab(addresses: Mapping[str, Sequence[str]] | None = None) -> AsyncIterator[Lab]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        made = Lab(hub, hub.join(), addresses=dict(addresses or {}))
        made.count_dials()
        made.dialer = Dialer(
            made.network,
            lambda peer: made.addresses.get(peer, ()),
            on_reached=made.reached.append,
            on_unreached=lambda *what: made.unreached.append(what),
        )
        await nursery.start(made.dialer.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_a_peer_is_dialed_until_it_is_there_and_again_when_it_is_gone(autojump_clock: MockClock) -> None:
    async with lab() as it:
        other = it.hub.join()
        it.addresses[other.peer_id] = other.addresses
        it.hub.cut(it.network.peer_id, other.peer_id)
        it.dialer.keep("test", [other.peer_id, it.network.peer_id])
        await trio.sleep(30)
        assert it.dialer.reason(other.peer_id) == "/memory/2: the link is cut"
        assert it.unreached[0] == (other.peer_id, other.addresses[0], "the link is cut")
        assert 15 < len(it.dials) < 40  # one to two seconds between two tries, less at first
        assert it.dials[1][0] - it.dials[0][0] <= 0.2
        it.hub.mend(it.network.peer_id, other.peer_id)
        assert await eventually(lambda: it.dialer.is_connected(other.peer_id)) <= 2
        assert it.dialer.reason(other.peer_id) == ""
        assert it.reached == [other.peer_id]
        await trio.sleep(3)
        await other.disconnect(it.network.peer_id)
        assert await eventually(lambda: it.dialer.is_connected(other.peer_id)) <= 0.2


async def test_a_peer_that_comes_by_itself_needs_no_dial_and_no_address(autojump_clock: MockClock) -> None:
    async with lab() as it:
        other = it.hub.join()
        it.dialer.keep("test", [other.peer_id])
        await trio.sleep(1)
        assert it.dialer.reason(other.peer_id) == "no address of it is known"
        await other.connect(it.network.addresses[0])
        with trio.fail_after(0.1):
            await it.dialer.wait_connected(other.peer_id)
        it.addresses[other.peer_id] = other.addresses
        await trio.sleep(10)
        assert (it.dials, it.reached, it.unreached) == ([], [], [])


async def test_addresses_are_tried_in_turn_with_a_bound_and_what_worked_comes_first(autojump_clock: MockClock) -> None:
    async with lab() as it:
        silent, other, stranger = it.hub.join(), it.hub.join(), it.hub.join()
        wrong = f"/memory/99/p2p/{other.peer_id}"
        it.addresses[other.peer_id] = (stranger.addresses[0], wrong, *other.addresses)
        it.addresses[silent.peer_id] = silent.addresses
        it.hub.set_delay(it.network.peer_id, silent.peer_id, float("inf"))
        it.dialer.keep("test", [other.peer_id, silent.peer_id])
        assert await eventually(lambda: it.dialer.is_connected(other.peer_id)) < 0.1
        assert [address for _, address in it.dials if address not in silent.addresses] == [wrong, *other.addresses]
        await trio.sleep(4.1)
        assert it.dialer.reason(silent.peer_id) == "/memory/2: no answer for 4 s"
        it.dials.clear()
        await other.disconnect(it.network.peer_id)
        await eventually(lambda: it.dialer.is_connected(other.peer_id))
        assert [address for _, address in it.dials if address not in silent.addresses] == [*other.addresses]


async def test_the_sets_of_all_users_are_kept(autojump_clock: MockClock) -> None:
    async with lab() as it:
        first, second = it.hub.join(), it.hub.join()
        it.addresses |= {first.peer_id: first.addresses, second.peer_id: second.addresses}
        it.dialer.keep("one", [first.peer_id])
        it.dialer.keep("other", [first.peer_id, second.peer_id])
        await eventually(lambda: len(it.network.connected_peers()) == 2)
        it.dialer.keep("other", [])
        await trio.sleep(3)
        assert len(it.network.connected_peers()) == 2  # nothing is closed
        for peer in (first, second):
            await peer.disconnect(it.network.peer_id)
        await trio.sleep(5)
        assert it.network.connected_peers() == (first.peer_id,)


async def test_a_connection_that_breaks_at_once_is_not_dialed_in_a_loop(autojump_clock: MockClock) -> None:
    async with lab() as it:
        other = it.hub.join()
        it.addresses[other.peer_id] = other.addresses

        async def hang_up() -> None:
            while True:
                await trio.sleep(0.01)
                await other.disconnect(it.network.peer_id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang_up)
            it.dialer.keep("test", [other.peer_id])
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert len(it.dials) < 40
