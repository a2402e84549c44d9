"""Members of a swarm together: who belongs, who is banned, what the owner says; what is wrong, named on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from capabilities.advert_content import Role
from capabilities.membership_certificate import MembershipCertificate
from capabilities.precision import MeasuredPrecision, Precision
from scheduler.advert_book import PeerState
from scheduler.advert_findings import FindingKind
from swarmnode.identity import Identity
from swarmnode.net.interface import DialFailed
from swarmnode.net.memory import open_memory_hub
from swarmnode.swarm import mdns
from swarmnode.swarm.bans import Ban
from swarmnode.swarm.news import topic_of
from swarmnode.swarm.record import ban_news
from tests.advert_tools import MODEL
from tests.net_tools import eventually
from tests.patience import LOADED
from tests.swarm_members import NOW_S, Founder
from tests.swarm_nodes import SwarmNode, connect_all, make_node, memory_swarm, real_swarm


@pytest.fixture
def virtual(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Time that jumps, and threads that take none of it: a deadline would pass while a thread waits for the disk."""

    async def at_once(call: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    return autojump_clock


# -- on real libp2p ----------------------------------------------------------------------------------------------------


async def test_members_know_each_other_and_a_ban_cuts_its_peer_off(tmp_path: Path) -> None:
    async with real_swarm(tmp_path, 3, dht=True) as (founder, (first, second, third)):
        await connect_all([first, second, third])
        await eventually(lambda: first.knows(second, third) and second.knows(first, third))
        assert first.kinds() == second.kinds() == []
        assert second.swarm.addresses_of(third.peer) == third.network.addresses
        holders = await second.swarm.find_holders(MODEL, 3)
        assert {holder.advert.peer for holder in holders if holder.verified} == {first.peer, third.peer}

        ban = founder.ban(third.peer)
        first.swarm.spread([ban])
        await eventually(lambda: third.peer not in first.network.connected_peers())
        await eventually(lambda: second.store.is_banned(third.peer))
        await eventually(lambda: second.news == [ban])
        await eventually(lambda: third.peer not in second.network.connected_peers())
        assert third.peer not in second.states()
        with pytest.raises(DialFailed):
            await second.network.connect(third.network.addresses[0])
        await first.swarm.leave()
        await eventually(lambda: second.states()[first.peer] is PeerState.GONE, LOADED * 4)


# -- in memory, over long times ----------------------------------------------------------------------------------------


async def test_only_members_adverts_count(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (founder, (first, second)):
        other = Founder.make(tmp_path / "other")
        stranger = make_node(founder, tmp_path, hub.join(), Identity.generate())
        own = stranger.store.need()
        forged = MembershipCertificate.issue(
            own.swarm, stranger.peer, first.peer, other.identity.sign, issued_at_s=NOW_S
        )
        object.__setattr__(own, "certificate", forged)
        async with trio.open_nursery() as nursery:
            await nursery.start(stranger.run)
            await connect_all([first, second, stranger])
            await trio.sleep(30)
            assert first.knows(second)
            assert stranger.knows(first, second)
            assert set(first.states()) == {second.peer}
            assert set(second.states()) == {first.peer}
            assert first.swarm.statistics().adverts.ignored["not_a_member"] > 0
            nursery.cancel_scope.cancel()


async def test_news_reaches_everybody_however_far_away_once(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 4) as (founder, nodes):
        for near, far in pairwise(nodes):
            await near.network.connect(far.network.addresses[0])
        await trio.sleep(5)
        nobody = Identity.generate().peer_id
        ban = founder.ban(nobody)
        nodes[0].swarm.spread([ban])
        await trio.sleep(3)
        for node in nodes[1:]:
            assert node.store.is_banned(nobody)
            assert node.news == [ban]
        assert nodes[0].news == [ban], "it acts where it was said, too"


async def test_who_was_away_asks_for_all_news_when_it_connects(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 3) as (founder, (first, second, late)):
        await connect_all([first, second])
        await trio.sleep(5)
        banned = [Identity.generate().peer_id for _ in range(3)]
        first.swarm.spread([founder.ban(peer) for peer in banned])
        await trio.sleep(600)  # no message cache holds it any more
        await late.network.connect(second.network.addresses[0])
        await trio.sleep(5)
        assert all(late.store.is_banned(peer) for peer in banned)
        assert len(late.news) == 3
        assert late.swarm.statistics().news.heard == 3
        exchanges = late.swarm.statistics().news.exchanges
        for _ in range(10):
            await late.network.disconnect(second.network.peer_id)
            await trio.sleep(0.5)
            await late.network.connect(second.network.addresses[0])
            await trio.sleep(0.5)
        assert late.swarm.statistics().news.exchanges <= exchanges + 1, "not at each reconnection"


async def test_false_news_is_not_believed_and_goes_no_further(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 3) as (founder, (liar, near, far)):
        impostor = Founder.make(tmp_path / "impostor")
        hub.cut(liar.network.peer_id, far.network.peer_id)
        await connect_all([near, liar, far])
        await trio.sleep(5)
        victim = Identity.generate().peer_id
        topic = topic_of(founder.record.swarm)
        by_owner, by_impostor = (
            ban_news(Ban.make(founder.record.swarm, victim, 1, True, key.sign)) for key in (founder.key, impostor.key)
        )
        unproven = (by_owner[:-3] + b"xyz", by_impostor, impostor.ban(victim))
        for junk in (b"\1", b"\1junk", b"\1" + by_owner[:40], b"\2later format", *(b"\1" + each for each in unproven)):
            liar.swarm._gossip.publish(topic, junk)
        await trio.sleep(5)
        assert not near.store.is_banned(victim)
        assert not far.store.is_banned(victim)
        heard = near.swarm.statistics().news
        assert (heard.heard, heard.refused, heard.unproven) == (0, 3, 3)
        assert far.swarm.statistics().news.refused == 0
        assert near.swarm.statistics().gossip.handler_errors == 0


async def test_a_banned_node_says_so_itself(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (founder, (first, second)):
        ban = founder.ban(second.peer)
        second.store.hear([ban])
        assert (str(FindingKind.BANNED), second.peer) in second.kinds()
        assert first.kinds() == []


async def test_a_ban_that_another_part_of_the_daemon_heard_acts_as_well(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (founder, (first, second)):
        await connect_all([first, second])
        await trio.sleep(5)
        ban = founder.ban(second.peer)  # into the store, and nobody is told
        await trio.sleep(2)
        assert first.network.connected_peers() == ()
        assert second.peer not in first.states()
        with pytest.raises(DialFailed):
            await second.network.connect(first.network.addresses[0])
        assert ban not in first.news


# -- where peers are ---------------------------------------------------------------------------------------------------


async def test_addresses_are_those_that_a_peer_tells_and_those_remembered(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        foreign = f"/ip4/192.0.2.1/tcp/4100/p2p/{Identity.generate().peer_id}"
        second.content = replace(second.content, addresses=(*second.network.addresses, foreign))
        remembered = f"/ip4/192.0.2.7/tcp/4100/p2p/{first.peer}"
        second.store.learn_addresses([remembered])
        assert second.swarm.addresses_of(first.peer) == (remembered,)
        await connect_all([first, second])
        await trio.sleep(5)
        assert first.swarm.addresses_of(second.peer) == second.network.addresses, "not where somebody else answers"
        assert second.swarm.addresses_of(first.peer) == (*first.network.addresses, remembered)
        assert second.swarm.addresses_of("nobody") == ()
        await trio.sleep(70)
        assert first.network.addresses[0] in second.store.need().addresses


async def test_a_node_that_starts_finds_its_swarm_where_it_was(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        hub.cut(first.network.peer_id, second.network.peer_id)
        second.store.learn_addresses(first.network.addresses)
        await trio.sleep(40)
        hub.mend(first.network.peer_id, second.network.peer_id)
        await trio.sleep(40)
        assert second.knows(first)


# -- what is wrong, named on both sides --------------------------------------------------------------------------------


async def test_two_healthy_members_have_nothing_to_complain_of(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        await connect_all([first, second])
        await trio.sleep(60)
        assert first.kinds() == second.kinds() == []


async def test_a_cloned_identity_is_named_by_both_copies(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, original)):
        copy = SwarmNode(original.identity, hub.join(), original.store, original.content)
        async with trio.open_nursery() as nursery:
            await nursery.start(copy.run)
            await connect_all([first, original, copy])
            await trio.sleep(180)
            for node in (first, original, copy):
                assert ("cloned_identity", original.peer) in node.kinds()
            nursery.cancel_scope.cancel()


async def test_a_skewed_clock_is_named_by_both(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        second.skew_s = 3_600.0
        await trio.sleep(15)
        await connect_all([first, second])
        await trio.sleep(400)
        assert ("skewed_clock", second.peer) in first.kinds()
        assert ("skewed_clock", first.peer) in second.kinds()


async def test_an_unreachable_address_is_named_by_both(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        dead = f"/memory/99/p2p/{second.peer}"
        second.content = replace(second.content, addresses=(dead,))
        await connect_all([first, second])
        await trio.sleep(5)
        first.swarm.unreachable(second.network.peer_id, dead, "nobody listens there")
        await trio.sleep(30)
        assert ("unreachable", second.peer) in first.kinds()
        assert ("unreachable", second.peer) in second.kinds()
        first.swarm.reached(second.network.peer_id)
        await trio.sleep(30)
        assert first.kinds() == second.kinds() == []


async def test_another_wire_version_is_named_by_both(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        second.content = replace(second.content, wire=2)
        await connect_all([first, second])
        await trio.sleep(15)
        assert first.kinds() == [("wire_version", second.peer)]
        assert second.kinds() == [("wire_version", first.peer)]


async def test_a_contradicted_precision_is_named_by_both(tmp_path: Path, virtual: MockClock) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (_, (first, second)):
        (backend,) = second.content.backends
        boast = replace(backend, accumulation=MeasuredPrecision(Precision.F32, Precision.F16, Precision.F16))
        second.content = replace(second.content, backends=(boast,), roles=(Role.WORKER,))
        await connect_all([first, second])
        await trio.sleep(15)
        assert first.kinds() == second.kinds() == [("precision", second.peer)]


async def test_blocked_multicast_is_named_and_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual: MockClock
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(mdns, "Zeroconf", refuse)
    founder = Founder.make(tmp_path / "founder")
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        node = make_node(founder, tmp_path, hub.join(founder.identity.peer_id), founder.identity)
        await nursery.start(lambda **started: node.run(lan=True, **started))
        await trio.sleep(1)
        (finding,) = node.swarm.findings()
        assert (finding.kind, finding.peer) == (FindingKind.MULTICAST, node.peer)
        assert "Network is unreachable" in finding.message
        nursery.cancel_scope.cancel()
