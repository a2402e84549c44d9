"""The leader's side of memberships: who is let in, and what a member may ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from capabilities.errors import NotReady, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.leader.members import CLONED_SHOWN_S, Member, Members
from swarmnode.member_messages import PROTOCOL, Assign, Begin, Policy, Refuse, decode_from_leader, encode
from swarmnode.net.interface import NetworkError, PeerId, Stream, StreamClosed
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.wire import read_frame
from tests.fault_tools import hello


class Lab:
    def __init__(self, hub: MemoryHub, network: MemoryNetwork) -> None:
        self.hub = hub
        self.network = network
        self.news: list[tuple[str, PeerId]] = []
        self.banned: set[PeerId] = set()

    def note(self, event: str, member: Member) -> None:
        self.news.append((event, member.peer))

    def verify(self, peer: PeerId, certificate: bytes) -> None:
        if peer in self.banned:
            raise PeerMistake(f"{peer} is banned from the swarm")
        if certificate != f"of {peer}".encode():
            raise PeerMistake(f"{peer} shows no certificate of this swarm")

    async def join(self, certificate: bytes | None = None) -> Stream:
        peer = self.hub.join()
        await peer.connect(self.network.addresses[0])
        stream = await peer.open_stream(self.network.peer_id, PROTOCOL)
        shown = f"of {peer.peer_id}".encode() if certificate is None else certificate
        await stream.send(encode(replace(hello("w"), certificate=shown)))
        await trio.testing.wait_all_tasks_blocked()
        return stream


@asynccontextmanager
async def lab(*, private: bool) -> AsyncIterator[tuple[Lab, Members]]:
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        made = Lab(hub, hub.join())
        members = Members(
            made.network,
            lambda member: made.note("joined", member),
            lambda member, _: made.note("progressed", member),
            lambda member: made.note("left", member),
            lambda member: made.note("spoke", member),
            made.verify if private else None,
        )
        await nursery.start(members.watch.run)
        made.network.serve(PROTOCOL, members.handle, max_streams_per_peer=limits.MEMBER_STREAMS_PER_PEER_MAX)
        yield made, members
        nursery.cancel_scope.cancel()


async def refusal(stream: Stream) -> SwarmError:
    """Why the worker was turned away; the stream has ended after it."""
    message = decode_from_leader(await read_frame(stream, limits.MEMBER_FRAME))
    assert isinstance(message, Refuse)
    with pytest.raises(StreamClosed):
        await stream.receive_exactly(1)
    return message.error


async def test_a_member_of_the_swarm_joins(autojump_clock: MockClock) -> None:
    async with lab(private=True) as (made, members):
        await made.join()
        assert [event for event, _ in made.news] == ["joined"]
        assert len(members.present()) == 1


@pytest.mark.parametrize("certificate", [b"", b"of somebody else"], ids=["none", "another's"])
async def test_a_stranger_is_told_why_it_may_not(autojump_clock: MockClock, certificate: bytes) -> None:
    async with lab(private=True) as (made, members):
        error = await refusal(await made.join(certificate))
        assert (error.type, "no certificate of this swarm" in error.message) == ("peer_mistake", True)
        assert (made.news, members.present(), members.refused) == ([], [], 1)
    async with lab(private=False) as (made, members):
        await made.join(certificate)
        assert len(members.present()) == 1


async def test_a_banned_peer_does_not_come_back(autojump_clock: MockClock) -> None:
    async with lab(private=True) as (made, members):
        stream = await made.join()
        (member,) = members.present()
        made.banned.add(member.peer)
        await stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        peer = made.hub.network(member.peer)
        assert peer is not None
        again = await peer.open_stream(made.network.peer_id, PROTOCOL)
        await again.send(encode(member.hello))
        assert "banned" in (await refusal(again)).message
        assert members.present() == []


async def test_two_daemons_with_one_identity_are_told_from_one_that_restarts(autojump_clock: MockClock) -> None:
    async with lab(private=False) as (made, members):
        stream = await made.join()
        (member,) = members.present()
        peer = made.hub.network(member.peer)
        assert peer is not None

        async def say_hello(instance: str) -> None:
            nonlocal stream
            await stream.reset()
            stream = await peer.open_stream(made.network.peer_id, PROTOCOL)
            await stream.send(encode(replace(member.hello, instance=instance)))
            await trio.testing.wait_all_tasks_blocked()

        for instance in ("first", "first", "restarted", "again", "and again"):
            await say_hello(instance)
            assert members.cloned() == []
        await say_hello("again")
        assert [each.peer for each in members.cloned()] == [member.peer]
        await trio.sleep(CLONED_SHOWN_S + 1)
        assert members.cloned() == []


async def test_a_member_that_drains_says_so_and_may_think_better_of_it(autojump_clock: MockClock) -> None:
    async with lab(private=False) as (made, members):
        stream = await made.join()
        (member,) = members.present()
        for number, draining in enumerate((True, True, False), 1):
            await stream.send(encode(Policy(draining)))
            await trio.testing.wait_all_tasks_blocked()
            assert member.draining is draining
            assert [event for event, _ in made.news] == ["joined", *["spoke"] * (1 if number < 3 else 2)]
        assert member.stream_up


async def test_who_leads_no_more_lets_its_members_go(autojump_clock: MockClock) -> None:
    async with lab(private=False) as (made, members):
        streams = [await made.join() for _ in range(2)]
        members.close("this node leads no more")
        for stream in streams:
            with pytest.raises(NetworkError):
                await stream.receive_exactly(1)
        assert (members.present(), [event for event, _ in made.news[2:]]) == ([], ["left", "left"])
        await made.join()  # elected again
        assert len(members.present()) == 1


@pytest.mark.parametrize("message", [hello("w"), Begin(1, 1), Assign(1, 1, "m", "0" * 64, ("a",), {}),
                                     Refuse(NotReady("no"))], ids=lambda message: type(message).__name__)  # fmt: skip
async def test_what_no_member_says_ends_the_stay(autojump_clock: MockClock, message: object) -> None:
    async with lab(private=False) as (made, members):
        stream = await made.join()
        await stream.send(encode(message))  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        assert members.present() == []
        assert made.network.statistics().peer_mistakes == 1
