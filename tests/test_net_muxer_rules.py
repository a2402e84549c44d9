"""The muxer against a peer that breaks every rule, and the credit that it grants. Sockets and encryption are real."""

from __future__ import annotations

import contextlib
import os

import pytest
import trio

from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost, StreamClosed
from swarmnode.net.muxer import Muxer, ReceiveBudget
from tests.net_tools import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW,
    RawPeer,
    attacked_muxer,
    eventually,
    frame,
)
from tests.patience import PATIENCE_S, turns

FIRST_WINDOW = limits.FIRST_WINDOW_BYTES

BROKEN_RULES: dict[str, bytes] = {
    "unknown kind": frame(4, 0, 0, 0),
    "unknown version": frame(PING, SYN, 0, 0, version=1),
    "66 bytes of junk": b"\x8f" * 66,
    "stream of this side's parity": frame(WINDOW, SYN, 2, 0),
    "stream number zero": frame(WINDOW, SYN, 0, 0),
    "stream number used twice": frame(WINDOW, SYN, 5, 0) + frame(WINDOW, SYN, 5, 0),
    "stream number going down": frame(WINDOW, SYN, 5, 0) + frame(WINDOW, SYN, 3, 0),
    "data for a stream never opened": frame(DATA, 0, 9, 1, b"x"),
    "data for a stream this side never opened": frame(DATA, 0, 2, 1, b"x"),
    "more than the window": frame(DATA, SYN, 1, FIRST_WINDOW + 1),
    "more than the window, in two": frame(DATA, SYN, 1, FIRST_WINDOW, bytes(FIRST_WINDOW)) + frame(DATA, 0, 1, 1, b"x"),
    "data after the end": frame(DATA, SYN | FIN, 1, 2, b"ok") + frame(DATA, 0, 1, 3, b"bad"),
    "a window of 4 GiB": frame(WINDOW, SYN, 1, 2**32 - 1),
    "windows that add up": frame(WINDOW, SYN, 1, 2**30) + frame(WINDOW, 0, 1, 2**30),
    "data of 4 GiB for a closed stream": frame(WINDOW, SYN | RST, 1, 0) + frame(DATA, 0, 1, 2**32 - 1),
}


async def accept_all(muxer: Muxer) -> None:
    while True:
        await muxer.accept_stream()


async def send_without_end(peer: RawPeer, frames: bytes) -> None:
    while True:
        await peer.send(frames)


@pytest.mark.parametrize("junk", BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
async def test_a_broken_rule_ends_the_connection(junk: bytes) -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.send(junk)
        assert await attacked.peer.closed()
        assert attacked.muxer.closed.is_set()
        assert attacked.counters.connections_broken == 1
        assert attacked.counters.connections_open == 0
        with pytest.raises(ConnectionLost):
            attacked.muxer.open_stream()
        with pytest.raises(ConnectionLost), trio.fail_after(PATIENCE_S):
            await accept_all(attacked.muxer)


@pytest.mark.parametrize("cut", [1, 5, 11, 13])
async def test_frames_may_be_cut_anywhere(cut: int) -> None:
    async with attacked_muxer() as attacked:
        sent = frame(DATA, SYN, 1, 3, b"abc") + frame(WINDOW, 0, 1, 10) + frame(DATA, FIN, 1, 2, b"de")
        for start in range(0, len(sent), cut):
            await attacked.peer.send(sent[start : start + cut])
        stream = await attacked.muxer.accept_stream()
        assert await stream.receive_exactly(5) == b"abcde"
        with pytest.raises(StreamClosed):
            await stream.receive_exactly(1)


async def test_bytes_that_do_not_decrypt_end_the_connection() -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.session.link.send(b"\x00\x40" + os.urandom(64))
        assert await attacked.peer.closed()
        assert "authenticate" in attacked.muxer.reason


@pytest.mark.parametrize("length", [0, 1, 15, 16])
async def test_messages_too_short_for_a_tag(length: int) -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.session.link.send(length.to_bytes(2, "big") + bytes(length))
        assert await attacked.peer.closed()


async def test_a_reset_of_an_unknown_or_finished_stream_is_ignored() -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.send(frame(WINDOW, SYN, 1, 0), frame(WINDOW, RST, 1, 0), frame(WINDOW, RST, 1, 0))
        await attacked.peer.send(frame(DATA, 0, 1, 3, b"abc"), frame(WINDOW, FIN, 1, 0), frame(PING, SYN, 0, 1))
        assert await attacked.peer.skip_to(PING, ACK)


async def test_goodbye_ends_the_connection_without_blame() -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.send(frame(GO_AWAY, 0, 0, 0))
        assert await attacked.peer.closed()
        assert attacked.counters.connections_broken == 0


async def test_a_flood_of_small_frames_ends_the_connection() -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.send(frame(WINDOW, SYN, 1, 0))
        with pytest.raises(ConnectionLost), trio.fail_after(PATIENCE_S):
            await send_without_end(attacked.peer, frame(WINDOW, 0, 1, 0) * 10_000)
        await eventually(attacked.muxer.closed.is_set)
        assert "flood" in attacked.muxer.reason


async def test_asking_without_reading_the_answers_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SMALL_FRAMES_PER_TICK_MAX", 10**9)
    async with attacked_muxer() as attacked:
        pings = frame(PING, SYN, 0, 0) * 5_000
        with pytest.raises(ConnectionLost), trio.fail_after(PATIENCE_S):
            await send_without_end(attacked.peer, pings)
        await eventually(attacked.muxer.closed.is_set)
        assert "does not read" in attacked.muxer.reason


async def test_a_flood_of_streams_is_refused_without_memory() -> None:
    async with attacked_muxer() as attacked:
        async with trio.open_nursery() as nursery:

            async def read_all() -> None:
                while True:
                    await attacked.peer.frame()

            nursery.start_soon(read_all)
            for start in range(0, 5_000, 100):
                await attacked.peer.send(*(frame(WINDOW, SYN, 2 * n + 1, 0) for n in range(start, start + 100)))
            await eventually(lambda: attacked.counters.streams_refused == 5_000 - limits.INBOUND_STREAMS_MAX)
            nursery.cancel_scope.cancel()
        assert attacked.muxer.streams_open == limits.INBOUND_STREAMS_MAX


async def test_opening_and_resetting_without_end_is_refused() -> None:
    """The streams are gone, but wait in the queue to be accepted: it is bounded, too."""
    async with attacked_muxer() as attacked:
        opened = (frame(WINDOW, SYN, 2 * n + 1, 0) + frame(WINDOW, RST, 2 * n + 1, 0) for n in range(1_000))
        await attacked.peer.send(*opened)
        await eventually(lambda: attacked.counters.streams_refused == 1_000 - limits.INBOUND_STREAMS_MAX)
        assert attacked.muxer.streams_open == 0


async def fill(peer: RawPeer, streams: int) -> None:
    for n in range(streams):
        await peer.send(frame(DATA, SYN, 2 * n + 1, FIRST_WINDOW, bytes(FIRST_WINDOW)))


async def test_unread_data_is_bounded_by_windows() -> None:
    async with attacked_muxer() as attacked:
        await fill(attacked.peer, 20)
        await eventually(lambda: attacked.muxer.buffered == 20 * FIRST_WINDOW)
        for _ in range(20):
            await (await attacked.muxer.accept_stream()).reset()
        assert attacked.muxer.buffered == 0


async def test_the_connection_with_most_unread_data_goes_first() -> None:
    budget = ReceiveBudget(12 * FIRST_WINDOW)
    async with attacked_muxer(budget) as modest, attacked_muxer(budget) as greedy:
        await fill(modest.peer, 4)
        await eventually(lambda: modest.muxer.buffered == 4 * FIRST_WINDOW)
        with contextlib.suppress(ConnectionLost):
            await fill(greedy.peer, 12)
        assert await greedy.peer.closed()
        assert "unread" in greedy.muxer.reason
        assert not modest.muxer.closed.is_set()
        await fill_one_more(modest.peer)


async def fill_one_more(peer: RawPeer) -> None:
    await peer.send(frame(DATA, SYN, 1_001, FIRST_WINDOW, bytes(FIRST_WINDOW)), frame(PING, SYN, 0, 3))
    assert await peer.skip_to(PING, ACK)


async def granted(peer: RawPeer, stream_id: int) -> int:
    """Credit beyond the first window that the muxer grants for a stream before it answers a ping."""
    await peer.send(frame(PING, SYN, 0, 5))
    total = 0
    while True:
        kind, flags, of, value, _ = await peer.frame()
        if kind == WINDOW and of == stream_id:
            total += value
        if kind == PING and flags & ACK:
            return total


async def test_credit_is_granted_for_what_was_read_only() -> None:
    async with attacked_muxer() as attacked:
        await fill(attacked.peer, 1)
        assert await granted(attacked.peer, 1) == 0
        stream = await attacked.muxer.accept_stream()
        await stream.receive_exactly(FIRST_WINDOW // 4)
        assert await granted(attacked.peer, 1) == 0
        await stream.receive_exactly(FIRST_WINDOW // 4)
        assert await granted(attacked.peer, 1) == FIRST_WINDOW // 2


async def test_a_reader_that_expects_much_grants_it_at_once() -> None:
    async with attacked_muxer() as attacked, trio.open_nursery() as nursery:
        await attacked.peer.send(frame(WINDOW, SYN, 1, 0))
        stream = await attacked.muxer.accept_stream()
        nursery.start_soon(stream.receive_exactly, 4 << 20)
        await turns()
        assert await granted(attacked.peer, 1) == (4 << 20) - FIRST_WINDOW
        nursery.cancel_scope.cancel()


async def test_windows_of_a_connection_do_not_grow_beyond_their_budget() -> None:
    async with attacked_muxer() as attacked, trio.open_nursery() as nursery:
        for n in range(10):
            await attacked.peer.send(frame(WINDOW, SYN, 2 * n + 1, 0))
            stream = await attacked.muxer.accept_stream()
            nursery.start_soon(stream.receive_exactly, 100 << 20)
        await turns()
        await attacked.peer.send(frame(PING, SYN, 0, 5))
        total = 0
        while (got := await attacked.peer.frame())[0] != PING:
            total += got[3]
        assert total == limits.CONNECTION_EXTRA_BYTES_MAX
        nursery.cancel_scope.cancel()
