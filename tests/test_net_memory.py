"""What only the network in memory can do: time, cuts and silence at will. The rest is in test_net_conformance.py."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost, DialFailed, PeerId, Stream, StreamReset
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from tests.test_net_conformance import ECHO, ask, echo


async def connected(hub: MemoryHub) -> tuple[MemoryNetwork, MemoryNetwork]:
    left, right = hub.join(), hub.join()
    right.serve(ECHO, echo, max_streams_per_peer=8)
    await left.connect(right.addresses[0])
    return left, right


async def test_a_delay_counts_each_way(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        hub.set_delay(left.peer_id, right.peer_id, 0.010)
        start = trio.current_time()
        stream = await left.open_stream(right.peer_id, ECHO)
        assert trio.current_time() - start == pytest.approx(0.020)
        for size in (1, 100_000):
            start = trio.current_time()
            await ask(stream, bytes(size))
            assert trio.current_time() - start == pytest.approx(0.020)


async def test_a_window_limits_what_a_slow_link_carries(autojump_clock: MockClock) -> None:
    """Flow control is the real one: 8 MiB that nobody waits for yet need several round trips."""
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        hub.set_delay(left.peer_id, right.peer_id, 0.010)

        async def read_in_pieces(stream: Stream) -> None:
            for _ in range(128):
                await stream.receive_exactly(64 << 10)
            await stream.send(b"done")

        right.serve("/test/pieces/1", read_in_pieces, max_streams_per_peer=1)
        stream = await left.open_stream(right.peer_id, "/test/pieces/1")
        start = trio.current_time()
        await stream.send(bytes(8 << 20))
        await stream.receive_exactly(4)
        assert 0.06 < trio.current_time() - start < 0.3


async def test_links_differ(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        third = hub.join()
        third.serve(ECHO, echo, max_streams_per_peer=1)
        await left.connect(third.addresses[0])
        hub.set_delay(left.peer_id, third.peer_id, 1.0)
        start = trio.current_time()
        await ask(await left.open_stream(right.peer_id, ECHO), b"fast")
        assert trio.current_time() == start
        await ask(await left.open_stream(third.peer_id, ECHO), b"slow")
        assert trio.current_time() - start == pytest.approx(4.0)


async def test_bytes_stay_in_order_when_a_link_becomes_faster(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        stream = await left.open_stream(right.peer_id, ECHO)
        hub.set_delay(left.peer_id, right.peer_id, 1.0)
        await stream.send((6).to_bytes(4, "little") + b"abc")
        hub.set_delay(left.peer_id, right.peer_id, 0.0)
        await stream.send(b"def")
        assert await stream.receive_exactly(10) == (6).to_bytes(4, "little") + b"abcdef"
        assert trio.current_time() >= 1.0


async def test_silence_holds_everything_back(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        stream = await left.open_stream(right.peer_id, ECHO)
        hub.set_delay(left.peer_id, right.peer_id, math.inf)
        await stream.send((4).to_bytes(4, "little") + b"held")
        with trio.move_on_after(5) as scope:
            await stream.receive_exactly(1)
        assert scope.cancelled_caught
        assert left.connected_peers() == (right.peer_id,)
        start = trio.current_time()
        with pytest.raises(ConnectionLost):
            await left.open_stream(right.peer_id, ECHO)
        assert trio.current_time() - start == pytest.approx(limits.OPEN_STREAM_SECONDS_MAX)
        hub.set_delay(left.peer_id, right.peer_id, 0.0)
        assert await stream.receive_exactly(8) == (4).to_bytes(4, "little") + b"held"


async def test_nobody_connects_over_a_silent_link(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = hub.join(), hub.join()
        hub.set_delay(left.peer_id, right.peer_id, math.inf)
        start = trio.current_time()
        with pytest.raises(DialFailed, match="no answer"):
            await left.connect(right.addresses[0])
        assert trio.current_time() - start == pytest.approx(limits.CONNECT_SECONDS_MAX)


async def test_a_cut_is_felt_at_once_by_both_and_lasts_until_mended() -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        news: list[tuple[str, PeerId, bool]] = []
        left.on_connection(lambda peer, up: news.append(("left", peer, up)))
        right.on_connection(lambda peer, up: news.append(("right", peer, up)))
        stream = await left.open_stream(right.peer_id, ECHO)
        await stream.send(b"lost")
        hub.cut(left.peer_id, right.peer_id)
        assert sorted(news) == [("left", right.peer_id, False), ("right", left.peer_id, False)]
        with pytest.raises(ConnectionLost, match="cut"):
            await stream.receive_exactly(1)
        with pytest.raises(DialFailed, match="cut"):
            await right.connect(left.addresses[0])
        hub.mend(left.peer_id, right.peer_id)
        await right.connect(left.addresses[0])
        assert await ask(await left.open_stream(right.peer_id, ECHO), b"mended") == b"mended"
        assert left.statistics().connections_open == right.statistics().connections_open == 1


async def test_frames_of_a_lost_connection_do_not_reach_the_next_one(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        hub.set_delay(left.peer_id, right.peer_id, 0.5)
        old = await left.open_stream(right.peer_id, ECHO)
        await old.send((3).to_bytes(4, "little") + b"old")
        hub.cut(left.peer_id, right.peer_id)
        hub.mend(left.peer_id, right.peer_id)
        await left.connect(right.addresses[0])
        assert await ask(await left.open_stream(right.peer_id, ECHO), b"new") == b"new"


async def test_both_dial_at_once(autojump_clock: MockClock) -> None:
    async with open_memory_hub() as hub:
        left, right = hub.join(), hub.join()
        hub.set_delay(left.peer_id, right.peer_id, 0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.connect, right.addresses[0])
            nursery.start_soon(right.connect, left.addresses[0])
        assert left.statistics().connections_open == right.statistics().connections_open == 1


async def test_a_sender_is_not_stuck_for_ever(autojump_clock: MockClock) -> None:
    async def ignore(_: Stream) -> None:
        await trio.sleep_forever()

    async with open_memory_hub() as hub:
        left, right = await connected(hub)
        right.serve("/test/ignore/1", ignore, max_streams_per_peer=1)
        stream = await left.open_stream(right.peer_id, "/test/ignore/1")
        start = trio.current_time()
        with pytest.raises(StreamReset, match="read nothing"):
            await stream.send(bytes(1 << 20))
        waited = trio.current_time() - start
        assert 0 < waited - limits.SEND_STALL_SECONDS_MAX <= 2 * limits.KEEPALIVE_TICK_SECONDS


async def story(seed: int) -> list[str]:
    """Three peers exchange messages over links of different speed; everything that happens, with its time."""
    events: list[str] = []
    async with open_memory_hub() as hub:
        peers = [hub.join() for _ in range(3)]

        def note(text: str) -> None:
            events.append(f"{trio.current_time():.6f} {text}")

        async def relay(number: int, stream: Stream) -> None:
            for _ in range(5):
                data = await stream.receive_exactly(1_000)
                note(f"{number} got {data[0]}")
                await stream.send(data)

        async def talk(number: int, to: MemoryNetwork) -> None:
            stream = await peers[number].open_stream(to.peer_id, "/test/story/1")
            for step in range(5):
                await stream.send(bytes([step]) * 1_000)
                await stream.receive_exactly(1_000)
                note(f"{number} done {step}")

        for number, peer in enumerate(peers):
            peer.on_connection(lambda who, up, number=number: note(f"{number} {who} {up}"))  # type: ignore[misc]
            peer.serve("/test/story/1", lambda s, number=number: relay(number, s), max_streams_per_peer=4)  # type: ignore[misc]
        for a in range(3):
            for b in range(a):
                hub.set_delay(peers[a].peer_id, peers[b].peer_id, 0.001 * (seed * 7 + 3 * a + b) + 0.0001 * a)
                await peers[a].connect(peers[b].addresses[0])
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(talk, number, peers[(number + 1) % 3])
    return events


def test_the_same_program_sees_the_same_events() -> None:
    runs = [trio.run(story, 1, clock=MockClock(autojump_threshold=0)) for _ in range(5)]
    assert len(runs[0]) > 30
    assert all(run == runs[0] for run in runs)
    assert trio.run(story, 2, clock=MockClock(autojump_threshold=0)) != runs[0]


async def test_a_peer_joins_once() -> None:
    async with open_memory_hub() as hub:
        first = hub.join(PeerId("me"))
        assert first.peer_id == "me"
        with pytest.raises(ValueError, match="joined already"):
            hub.join(PeerId("me"))


async def test_errors_inside_come_out_as_themselves() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_memory_hub():
            raise KeyError("mine")


async def test_what_the_end_does_to_a_handlers_tasks_stays_inside(autojump_clock: MockClock) -> None:
    """The network is left while a handler has two tasks: one is cancelled, the other then meets a closed stream."""
    async with open_memory_hub() as hub:
        left, right = await connected(hub)

        async def two_tasks(stream: Stream) -> None:
            async def fail_at_the_end() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise StreamReset("the stream ended with the network")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_at_the_end)
                nursery.start_soon(trio.sleep_forever)
                await stream.send(b"runs")

        right.serve("/test/tasks/1", two_tasks, max_streams_per_peer=1)
        stream = await left.open_stream(right.peer_id, "/test/tasks/1")
        assert await stream.receive_exactly(4) == b"runs"
