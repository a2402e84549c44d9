"""The muxer between two of its kind, and what it makes of silence. Sockets and encryption are real."""

from __future__ import annotations

import os
import time

import pytest
import trio

from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost, StreamClosed, StreamReset
from swarmnode.net.muxer_stream import MuxerStream
from tests.net_tools import (
    ACK,
    DATA,
    PING,
    SYN,
    WINDOW,
    MuxerPair,
    attacked_muxer,
    eventually,
    frame,
    muxer_pair,
)
from tests.patience import LOADED, PATIENCE_S, turns

FIRST_WINDOW = limits.FIRST_WINDOW_BYTES


async def stream_pair(pair: MuxerPair) -> tuple[MuxerStream, MuxerStream]:
    return pair.near.open_stream(), await pair.far.accept_stream()


# --- Between two muxers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network_key", [None, bytes(range(32))], ids=["open", "private"])
async def test_large_messages_both_ways_at_once(network_key: bytes | None) -> None:
    async with muxer_pair(network_key) as pair:
        near, far = await stream_pair(pair)
        there, back = os.urandom(8 << 20), os.urandom(5 << 20)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(near.send, there)
                nursery.start_soon(far.send, back)
                assert await far.receive_exactly(len(there)) == there
                assert await near.receive_exactly(len(back)) == back


async def test_small_messages_pass_large_ones() -> None:
    """While 64 MiB go out, a small message on another stream must not wait for more than a few frames."""
    async with muxer_pair() as pair:
        large, large_far = await stream_pair(pair)
        small, small_far = await stream_pair(pair)
        progress = 0
        waits: list[int] = []

        async def read() -> None:
            nonlocal progress
            for _ in range(256):
                await large_far.receive_exactly(256 << 10)
                progress += 256 << 10
            nursery.cancel_scope.cancel()

        async def echo() -> None:
            while True:
                await small_far.send(await small_far.receive_exactly(1000))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(large.send, bytes(64 << 20))
                nursery.start_soon(read)
                nursery.start_soon(echo)
                while True:
                    before = progress
                    await small.send(bytes(1000))
                    await small.receive_exactly(1000)
                    waits.append(progress - before)
        assert len(waits) > 8
        assert sorted(waits)[len(waits) // 2] <= 8 << 20


async def test_a_cancelled_write_leaves_the_connection_usable() -> None:
    """Cancelling senders at any moment must never lose a part of a frame: the cipher would fail ever after."""
    async with muxer_pair() as pair:
        steady, steady_far = await stream_pair(pair)

        async def read_all(stream: MuxerStream) -> None:
            try:
                while True:
                    await stream.receive_exactly(1000)
            except (StreamReset, StreamClosed):
                pass

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for step in range(60):
                    near, far = await stream_pair(pair)
                    nursery.start_soon(read_all, far)
                    with trio.move_on_after(step * 0.0001):
                        await near.send(bytes(4 << 20))
                    await near.reset()
                    await steady.send(b"%4d" % step)
                    assert await steady_far.receive_exactly(4) == b"%4d" % step
        assert not pair.near.closed.is_set()
        await eventually(lambda: pair.near.streams_open == pair.far.streams_open == 1)


async def test_streams_over_the_limit_are_reset_and_counted() -> None:
    async with muxer_pair() as pair:
        pairs = [await stream_pair(pair) for _ in range(limits.INBOUND_STREAMS_MAX)]
        for _ in range(3):
            with pytest.raises(StreamReset), trio.fail_after(PATIENCE_S):
                await pair.near.open_stream().receive_exactly(1)
        assert pair.far_counters.streams_refused == 3
        near, far = pairs[0]
        await near.send(b"x")
        assert await far.receive_exactly(1) == b"x"
        await near.reset()
        await eventually(lambda: pair.far.streams_open == limits.INBOUND_STREAMS_MAX - 1)
        near, far = await stream_pair(pair)
        await near.send(b"y")
        assert await far.receive_exactly(1) == b"y"


async def test_streams_opened_here_are_limited() -> None:
    async with attacked_muxer() as attacked:
        for _ in range(limits.OUTBOUND_STREAMS_MAX):
            attacked.muxer.open_stream()
        with pytest.raises(StreamReset, match="are open already"):
            attacked.muxer.open_stream()


async def test_many_streams_one_after_the_other_leave_nothing() -> None:
    async with muxer_pair() as pair:
        for _ in range(2_000):
            near, far = await stream_pair(pair)
            await near.send(b"x")
            await far.receive_exactly(1)
            await near.aclose()
            await far.aclose()
        await eventually(lambda: pair.near.streams_open == pair.far.streams_open == 0)
        assert pair.near_counters.streams_open == pair.far_counters.streams_open == 0
        assert pair.near.buffered == pair.far.buffered == 0


async def test_a_stream_that_the_peer_never_closes_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "LINGER_SECONDS_MAX", 0.5)
    async with muxer_pair() as pair:
        near, far = await stream_pair(pair)
        await near.aclose()
        await turns(10)
        assert pair.near.streams_open == 1
        await eventually(lambda: pair.near.streams_open == pair.far.streams_open == 0)
        with pytest.raises(StreamReset):
            await far.send(b"x")


async def test_a_sender_gives_up_on_an_application_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "SEND_STALL_SECONDS_MAX", 0.1)
    async with muxer_pair() as pair:
        near, _ = await stream_pair(pair)
        with pytest.raises(StreamReset, match="read nothing"), trio.fail_after(PATIENCE_S):
            await near.send(bytes(FIRST_WINDOW + 1))
        assert not pair.near.closed.is_set()


async def test_two_receivers_on_one_stream_are_a_mistake_of_the_program() -> None:
    async with muxer_pair() as pair, trio.open_nursery() as nursery:
        near, far = await stream_pair(pair)
        nursery.start_soon(near.receive_exactly, 1)
        await turns()
        with pytest.raises(trio.BusyResourceError):
            await near.receive_exactly(1)
        await far.send(b"x")


async def test_a_closed_stream_gives_its_window_back() -> None:
    """Each stream here grows to the largest window: without giving back, the connection's budget ends at the fifth."""
    async with muxer_pair() as pair:
        for _ in range(8):
            near, far = await stream_pair(pair)
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(near.send, bytes(limits.WINDOW_BYTES_MAX))
                    await far.receive_exactly(limits.WINDOW_BYTES_MAX)
            assert far.window == limits.WINDOW_BYTES_MAX
            await near.aclose()
            await far.aclose()


# --- Liveness ---------------------------------------------------------------------------------------------------------


async def test_an_idle_connection_lives_on_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 0.1)
    async with muxer_pair() as pair:
        await trio.sleep(0.4)
        near, far = await stream_pair(pair)
        await near.send(b"x")
        assert await far.receive_exactly(1) == b"x"


async def test_a_peer_that_answers_no_ping_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 0.1)
    async with attacked_muxer() as attacked:
        stream = attacked.muxer.open_stream()
        with pytest.raises(ConnectionLost, match="no sign of life"), trio.fail_after(PATIENCE_S):
            await stream.receive_exactly(1)
        assert attacked.counters.connections_broken == 1
        assert await attacked.peer.skip_to(PING, SYN)


async def test_a_slow_link_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that takes longer to arrive than silence may last."""
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 0.15)
    async with attacked_muxer() as attacked:
        message = attacked.peer.session.seal(frame(DATA, SYN, 1, 3, b"abc"))
        for byte in message:
            await attacked.peer.session.link.send(bytes([byte]))
            await trio.sleep(0.015)
        assert await (await attacked.muxer.accept_stream()).receive_exactly(3) == b"abc"


async def test_the_pause_of_this_process_is_not_held_against_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.05)
    monkeypatch.setattr(limits, "SILENCE_SECONDS_MAX", 0.2)
    async with muxer_pair() as pair:
        await trio.sleep(0.02)
        time.sleep(0.5)  # noqa: ASYNC251 - the laptop's lid
        await trio.sleep(0.3)
        assert not pair.near.closed.is_set()
        assert not pair.far.closed.is_set()


async def test_pings_are_answered() -> None:
    async with attacked_muxer() as attacked:
        await attacked.peer.send(frame(PING, SYN, 0, 77))
        assert (await attacked.peer.skip_to(PING, ACK))[3] == 77


async def test_a_peer_that_stops_reading_its_socket_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_STALL_SECONDS_MAX", 0.2)
    async with attacked_muxer() as attacked:
        stream = attacked.muxer.open_stream()
        await attacked.peer.send(frame(WINDOW, 0, stream.stream_id, 64 << 20))
        with pytest.raises(ConnectionLost), trio.fail_after(PATIENCE_S):
            await stream.send(bytes(64 << 20))
        assert attacked.muxer.closed.is_set()
        assert attacked.counters.connections_broken == 1


async def test_a_sender_with_a_deadline_does_not_wait_for_a_stuck_socket() -> None:
    async with attacked_muxer() as attacked:
        stream = attacked.muxer.open_stream()
        await attacked.peer.send(frame(WINDOW, 0, stream.stream_id, 64 << 20))
        started = trio.current_time()
        with trio.move_on_after(0.2):
            await stream.send(bytes(64 << 20))
        assert trio.current_time() - started < LOADED
