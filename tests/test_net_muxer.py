"""The muxer, between two of its kind and against a peer that breaks every rule. Sockets and encryption are real."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import trio

from swarmnode.net import limits, multistream
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionLost, StreamClosed, StreamReset
from swarmnode.net.muxer import Muxer, ReceiveBudget
from swarmnode.net.muxer_stream import MuxerStream
from tests.net_tools import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW,
    MuxerPair,
    RawPeer,
    attacked_muxer,
    eventually,
    frame,
    link_pair,
    muxer_pair,
    session_pair,
)

FIRST_WINDOW = limits.FIRST_WINDOW_BYTES


async def stream_pair(pair: MuxerPair) -> tuple[MuxerStream, MuxerStream]:
    return pair.near.open_stream(), await pair.far.accept_stream()


# --- Between two muxers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network_key", [None, bytes(range(32))], ids=["open", "private"])
async def test_large_messages_both_ways_at_once(network_key: bytes | None) -> None:
    async with muxer_pair(network_key) as pair:
        near, far = await stream_pair(pair)
        there, back = os.urandom(8 << 20), os.urandom(5 << 20)
        with trio.fail_after(20):
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

        with trio.fail_after(30):
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

        with trio.fail_after(20):
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
            with pytest.raises(StreamReset), trio.fail_after(5):
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
    monkeypatch.setattr(limits, "LINGER_SECONDS_MAX", 0.1)
    async with muxer_pair() as pair:
        near, far = await stream_pair(pair)
        await near.aclose()
        await trio.sleep(0.05)
        assert pair.near.streams_open == 1
        await eventually(lambda: pair.near.streams_open == pair.far.streams_open == 0)
        with pytest.raises(StreamReset):
            await far.send(b"x")


async def test_a_sender_gives_up_on_an_application_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_TICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "SEND_STALL_SECONDS_MAX", 0.1)
    async with muxer_pair() as pair:
        near, _ = await stream_pair(pair)
        with pytest.raises(StreamReset, match="read nothing"), trio.fail_after(5):
            await near.send(bytes(FIRST_WINDOW + 1))
        assert not pair.near.closed.is_set()


async def test_two_receivers_on_one_stream_are_a_mistake_of_the_program() -> None:
    async with muxer_pair() as pair, trio.open_nursery() as nursery:
        near, far = await stream_pair(pair)
        nursery.start_soon(near.receive_exactly, 1)
        await trio.sleep(0.01)
        with pytest.raises(trio.BusyResourceError):
            await near.receive_exactly(1)
        await far.send(b"x")


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
        with pytest.raises(ConnectionLost, match="no sign of life"), trio.fail_after(5):
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
        with pytest.raises(ConnectionLost), trio.fail_after(5):
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
        assert trio.current_time() - started < 1


# --- Against a peer that breaks the rules -----------------------------------------------------------------------------

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
        with pytest.raises(ConnectionLost), trio.fail_after(5):
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
        with pytest.raises(ConnectionLost), trio.fail_after(20):
            await send_without_end(attacked.peer, frame(WINDOW, 0, 1, 0) * 10_000)
        await eventually(attacked.muxer.closed.is_set)
        assert "flood" in attacked.muxer.reason


async def test_asking_without_reading_the_answers_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SMALL_FRAMES_PER_TICK_MAX", 10**9)
    async with attacked_muxer() as attacked:
        pings = frame(PING, SYN, 0, 0) * 5_000
        with pytest.raises(ConnectionLost), trio.fail_after(20):
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
        await trio.sleep(0.02)
        assert await granted(attacked.peer, 1) == (4 << 20) - FIRST_WINDOW
        nursery.cancel_scope.cancel()


async def test_windows_of_a_connection_do_not_grow_beyond_their_budget() -> None:
    async with attacked_muxer() as attacked, trio.open_nursery() as nursery:
        for n in range(10):
            await attacked.peer.send(frame(WINDOW, SYN, 2 * n + 1, 0))
            stream = await attacked.muxer.accept_stream()
            nursery.start_soon(stream.receive_exactly, 100 << 20)
        await trio.sleep(0.02)
        await attacked.peer.send(frame(PING, SYN, 0, 5))
        total = 0
        while (got := await attacked.peer.frame())[0] != PING:
            total += got[3]
        assert total == limits.CONNECTION_EXTRA_BYTES_MAX
        nursery.cancel_scope.cancel()


async def test_a_closed_stream_gives_its_window_back() -> None:
    """Each stream here grows to the largest window: without giving back, the connection's budget ends at the fifth."""
    async with muxer_pair() as pair:
        for _ in range(8):
            near, far = await stream_pair(pair)
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(near.send, bytes(limits.WINDOW_BYTES_MAX))
                    await far.receive_exactly(limits.WINDOW_BYTES_MAX)
            assert far.window == limits.WINDOW_BYTES_MAX
            await near.aclose()
            await far.aclose()


# --- Underneath: session, link, negotiation ---------------------------------------------------------------------------


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
        with pytest.raises(ConnectionLost, match="stopped reading"), trio.fail_after(5):
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
        with pytest.raises(multistream.NegotiationFailed, match=reason), trio.fail_after(5):
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
