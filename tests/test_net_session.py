"""What lies under the muxer: the link, the encrypted session and the agreement on protocols."""

from __future__ import annotations

import os

import pytest
import trio

from swarmnode.net import limits, multistream
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionLost
from tests.net_tools import (
    link_pair,
    session_pair,
)
from tests.patience import PATIENCE_S


async def test_sessions_carry_messages_larger_than_noise_allows() -> None:
    async with session_pair((Counters(), Counters())) as (near, far):
        data = os.urandom(300_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.send, data)
            assert await far.receive_exactly(len(data)) == data


async def test_a_session_whose_peer_stops_reading_gives_up_in_spite_of_its_shield(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "WRITE_STALL_SECONDS_MAX", 0.2)
    async with session_pair((Counters(), Counters())) as (near, _):
        with pytest.raises(ConnectionLost, match="stopped reading"), trio.fail_after(PATIENCE_S):
            await near.send(bytes(64 << 20))


async def test_different_network_keys_understand_nothing() -> None:
    async with link_pair((Counters(), Counters()), (bytes(32), b"x" * 32)) as (near, far):
        await near.send(b"hello")
        assert await far.receive_exactly(5) != b"hello"


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"\xff" * 100, "a line of 32767 bytes"),
        (b"\x00", "a line of 0 bytes"),
        (b"\x81\x02" + b"x" * 300, "a line of 257 bytes"),
        (b"\x05abcde", "a line without its end"),
        (b"\x04abc\n", "does not speak"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100), "a line without its end"),
        (b"\x13/multistream/1.0.0\n" + b"\x03\xff\xfe\n" * 20, "too many"),
    ],
    ids=["varint", "empty line", "long line", "no newline", "another greeting", "HTTP", "many proposals"],
)
async def test_negotiation_survives_any_bytes(junk: bytes, reason: str) -> None:
    async with link_pair((Counters(), Counters())) as (near, far):
        await near.send(junk)
        with pytest.raises(multistream.NegotiationFailed, match=reason), trio.fail_after(PATIENCE_S):
            await multistream.answer(far, ["/a"])


@pytest.mark.parametrize(("offered", "spoken", "agreed"), [("a", "a", "a"), ("ab", "b", "b"), ("abc", "cb", "b")])
async def test_negotiation_agrees_on_the_first_common_name(offered: str, spoken: str, agreed: str) -> None:
    results: list[str] = []
    async with link_pair((Counters(), Counters())) as (near, far):

        async def answer() -> None:
            results.append(await multistream.answer(far, list(spoken)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            results.append(await multistream.propose(near, list(offered)))
    assert results == [agreed, agreed]


async def test_negotiation_without_a_common_name() -> None:
    async with link_pair((Counters(), Counters())) as (near, far), trio.open_nursery() as nursery:

        async def answer() -> None:
            with pytest.raises(ConnectionLost):
                await multistream.answer(far, ["/b"])

        nursery.start_soon(answer)
        with pytest.raises(multistream.NegotiationFailed, match="none of /a"):
            await multistream.propose(near, ["/a"])
        near.close_now()
