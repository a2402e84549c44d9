"""What every Network promises (swarmnode/net/interface.py), tried on libp2p over loopback and in memory.

Each test gets two networks; `left` is connected to `right`. Nothing here may depend on which implementation runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from swarmnode.identity import Identity
from swarmnode.net.interface import (
    ConnectionLost,
    DialFailed,
    Network,
    NetworkError,
    PeerId,
    ProtocolNotSupported,
    Stream,
    StreamClosed,
    StreamReset,
)
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.net.memory import open_memory_hub
from tests.net_tools import eventually

ECHO = "/test/echo/1"
HOLD = "/test/hold/1"
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@asynccontextmanager
async def libp2p_pair() -> AsyncIterator[tuple[Network, Network]]:
    async with (
        open_libp2p_network(Identity.generate(), LOOPBACK) as left,
        open_libp2p_network(Identity.generate(), LOOPBACK) as right,
    ):
        yield left, right


@asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple[Network, Network]]:
    async with open_memory_hub() as hub:
        yield hub.join(), hub.join()


async def echo(stream: Stream) -> None:
    while True:
        n = int.from_bytes(await stream.receive_exactly(4), "little")
        await stream.send(n.to_bytes(4, "little") + await stream.receive_exactly(n))


async def ask(stream: Stream, data: bytes) -> bytes:
    await stream.send(len(data).to_bytes(4, "little") + data)
    n = int.from_bytes(await stream.receive_exactly(4), "little")
    return await stream.receive_exactly(n)


@dataclass
class Pair:
    left: Network
    right: Network
    held: trio.MemoryReceiveChannel[Stream]
    """What `right` got for HOLD: streams that no handler touches, for tests that play both sides."""
    news: list[tuple[PeerId, bool]] = field(default_factory=list)

    async def held_streams(self) -> tuple[Stream, Stream]:
        """The two ends of a new stream."""
        stream = await self.left.open_stream(self.right.peer_id, HOLD)
        return stream, await self.held.receive()


@pytest.fixture(params=[libp2p_pair, memory_pair], ids=["libp2p", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    open_pair: Callable[[], AsyncIterator[tuple[Network, Network]]] = request.param
    to_test, held = trio.open_memory_channel[Stream](100)

    async def hold(stream: Stream) -> None:
        to_test.send_nowait(stream)
        await trio.sleep_forever()

    async with open_pair() as (left, right):  # type: ignore[attr-defined]
        right.serve(ECHO, echo, max_streams_per_peer=50)
        right.serve(HOLD, hold, max_streams_per_peer=50)
        made = Pair(left, right, held)
        left.on_connection(lambda peer, up: made.news.append((peer, up)))
        assert await left.connect(right.addresses[0]) == right.peer_id
        with trio.fail_after(20):
            yield made


async def expect_error(kind: type[NetworkError], action: Callable[[], Awaitable[object]]) -> NetworkError:
    with pytest.raises(kind) as caught, trio.fail_after(5):
        await action()
    return caught.value


# --- Streams ---


async def test_echo_of_many_sizes(pair: Pair) -> None:
    stream = await pair.left.open_stream(pair.right.peer_id, ECHO)
    assert (stream.peer, stream.protocol) == (pair.right.peer_id, ECHO)
    for size in (0, 1, 65_506, 65_507, 65_508, 300_000, 8 << 20):
        data = hashlib.shake_128(str(size).encode()).digest(size)
        assert await ask(stream, data) == data
    await stream.aclose()


async def test_all_kinds_of_bytes_can_be_sent(pair: Pair) -> None:
    near, far = await pair.held_streams()
    await near.send(b"abc")
    await near.send(bytearray(b"def"))
    await near.send(memoryview(b"xghix")[1:4])
    await near.send(memoryview(bytearray(b"\1\0\0\0\2\0\0\0")).cast("I"))
    assert await far.receive_exactly(17) == b"abcdefghi\1\0\0\0\2\0\0\0"


async def test_many_streams_at_once(pair: Pair) -> None:
    async def use(number: int) -> None:
        stream = await pair.left.open_stream(pair.right.peer_id, ECHO)
        for size in (10, 100_000):
            data = number.to_bytes(2, "little") * size
            assert await ask(stream, data) == data
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(use, number)
    await eventually(lambda: pair.left.statistics().streams_open == pair.right.statistics().streams_open == 0)


async def test_one_message_at_a_time_from_many_senders(pair: Pair) -> None:
    near, far = await pair.held_streams()
    size = 200_000
    async with trio.open_nursery() as nursery:
        for letter in b"abcd":
            nursery.start_soon(near.send, bytes([letter]) * size)
        seen = {await far.receive_exactly(size) for _ in range(4)}
    assert seen == {bytes([letter]) * size for letter in b"abcd"}


async def test_clean_end(pair: Pair) -> None:
    near, far = await pair.held_streams()
    await near.send(b"12345678")
    await near.aclose()
    assert await far.receive_exactly(8) == b"12345678"
    error = await expect_error(StreamClosed, lambda: far.receive_exactly(1))
    assert isinstance(error, StreamClosed)
    assert error.clean


async def test_end_inside_a_message_is_not_clean(pair: Pair) -> None:
    near, far = await pair.held_streams()
    await near.send(b"12345")
    await near.aclose()
    error = await expect_error(StreamClosed, lambda: far.receive_exactly(8))
    assert isinstance(error, StreamClosed)
    assert not error.clean


async def test_a_stream_closed_here_cannot_be_used(pair: Pair) -> None:
    near, _ = await pair.held_streams()
    await near.aclose()
    await near.aclose()
    await expect_error(StreamClosed, lambda: near.send(b"x"))
    await expect_error(StreamClosed, lambda: near.receive_exactly(1))


async def test_sending_to_a_closed_stream_is_noticed(pair: Pair) -> None:
    near, far = await pair.held_streams()
    await far.aclose()

    async def keep_sending() -> None:
        while True:
            await near.send(b"x")
            await trio.sleep(0.005)

    await expect_error(StreamReset, keep_sending)


@pytest.mark.parametrize("waiting_for", ["data", "window"])
async def test_reset_wakes_the_other_side(pair: Pair, waiting_for: str) -> None:
    near, far = await pair.held_streams()

    async def wait() -> None:
        if waiting_for == "data":
            await near.receive_exactly(1)
        else:
            await near.send(bytes(9 << 20))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, StreamReset, wait)
        await wait_all_tasks_blocked(0.02)
        await far.reset()
    await expect_error(StreamReset, lambda: near.send(b"x"))
    await expect_error(StreamReset, lambda: far.receive_exactly(1))
    assert await ask(await pair.left.open_stream(pair.right.peer_id, ECHO), b"still up") == b"still up"


async def test_a_cancelled_receive_loses_nothing(pair: Pair) -> None:
    near, far = await pair.held_streams()
    data = hashlib.shake_128(b"receive").digest(6 << 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, data)
        for _ in range(50):
            with trio.move_on_after(0.0005):
                await far.receive_exactly(len(data) + 1)
        assert await far.receive_exactly(len(data)) == data


async def test_a_send_cancelled_before_it_began_leaves_the_stream_usable(pair: Pair) -> None:
    near, far = await pair.held_streams()
    sent = 255 << 10  # nearly the first window
    await near.send(bytes(sent))
    with trio.move_on_after(0.3) as scope:
        while True:
            await near.send(b"\0")
            sent += 1
    assert scope.cancelled_caught
    assert await far.receive_exactly(sent) == bytes(sent)
    await near.send(b"next")
    assert await far.receive_exactly(4) == b"next"


async def test_a_send_cancelled_in_its_middle_resets_its_stream_only(pair: Pair) -> None:
    other = await pair.left.open_stream(pair.right.peer_id, ECHO)
    near, far = await pair.held_streams()
    with trio.move_on_after(0.05) as scope:
        await near.send(bytes(1 << 20))  # four first windows, and nobody reads
    assert scope.cancelled_caught
    await expect_error(StreamReset, lambda: far.receive_exactly(1 << 20))
    await expect_error(StreamReset, lambda: near.send(b"x"))
    for size in (10, 1 << 20):
        assert len(await ask(other, bytes(size))) == size


async def test_a_sender_waits_for_a_reader_that_does_not_read(pair: Pair) -> None:
    near, far = await pair.held_streams()
    with trio.move_on_after(0.3) as scope:
        while True:
            await near.send(bytes(64 << 10))
    assert scope.cancelled_caught
    assert await far.receive_exactly(100) == bytes(100)


# --- Serving ---


async def test_unknown_protocol(pair: Pair) -> None:
    await expect_error(ProtocolNotSupported, lambda: pair.left.open_stream(pair.right.peer_id, "/test/none/1"))
    await eventually(lambda: pair.right.statistics().streams_refused == 1)
    await eventually(lambda: pair.left.statistics().streams_open == pair.right.statistics().streams_open == 0)


async def test_a_protocol_is_served_once(pair: Pair) -> None:
    with pytest.raises(ValueError, match="served already"):
        pair.right.serve(ECHO, echo, max_streams_per_peer=1)


async def test_both_sides_serve_over_one_connection(pair: Pair) -> None:
    pair.left.serve("/test/back/1", echo, max_streams_per_peer=1)
    stream = await pair.right.open_stream(pair.left.peer_id, "/test/back/1")
    assert await ask(stream, b"back") == b"back"
    assert pair.left.statistics().connections_open == 1


async def test_streams_of_a_peer_are_limited(pair: Pair) -> None:
    pair.right.serve("/test/two/1", echo, max_streams_per_peer=2)
    first, second = [await pair.left.open_stream(pair.right.peer_id, "/test/two/1") for _ in range(2)]

    async def ask_on_a_third() -> None:
        await ask(await pair.left.open_stream(pair.right.peer_id, "/test/two/1"), b"no place")

    await expect_error(StreamReset, ask_on_a_third)
    assert pair.right.statistics().streams_refused == 1
    assert await ask(first, b"1") == await ask(second, b"1") == b"1"
    await first.aclose()
    await trio.sleep(0.05)
    assert await ask(await pair.left.open_stream(pair.right.peer_id, "/test/two/1"), b"place") == b"place"


async def test_a_failing_handler_resets_its_stream_and_is_counted(pair: Pair) -> None:
    async def fail(stream: Stream) -> None:
        await stream.receive_exactly(1)
        raise RuntimeError("a bug")

    async def fail_in_a_nursery(stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_exactly, 1)
            raise RuntimeError("a bug")

    pair.right.serve("/test/fail/1", fail, max_streams_per_peer=1)
    pair.right.serve("/test/fail/2", fail_in_a_nursery, max_streams_per_peer=1)
    for number in (1, 2):
        stream = await pair.left.open_stream(pair.right.peer_id, f"/test/fail/{number}")
        await stream.send(b"x")
        await expect_error(StreamReset, lambda stream=stream: stream.receive_exactly(1))  # type: ignore[misc]
        assert pair.right.statistics().handler_errors == number
    assert await ask(await pair.left.open_stream(pair.right.peer_id, ECHO), b"fine") == b"fine"


async def test_a_handler_that_meets_the_networks_errors_is_no_fault(pair: Pair) -> None:
    stream = await pair.left.open_stream(pair.right.peer_id, ECHO)
    await stream.send(b"\xff")
    await stream.aclose()
    await eventually(lambda: pair.right.statistics().streams_open == 0)
    assert pair.right.statistics().handler_errors == 0


async def test_a_handler_that_returns_closes_its_stream(pair: Pair) -> None:
    async def say(stream: Stream) -> None:
        await stream.send(b"said")

    pair.right.serve("/test/say/1", say, max_streams_per_peer=1)
    stream = await pair.left.open_stream(pair.right.peer_id, "/test/say/1")
    await trio.sleep(0.05)
    assert await stream.receive_exactly(4) == b"said"
    error = await expect_error(StreamClosed, lambda: stream.receive_exactly(1))
    assert isinstance(error, StreamClosed)
    assert error.clean


# --- Connections ---


async def test_connecting_twice_keeps_one_connection(pair: Pair) -> None:
    await pair.left.connect(pair.right.addresses[0])
    assert pair.left.connected_peers() == (pair.right.peer_id,)
    assert pair.left.statistics().connections_open == 1
    assert pair.news == [(pair.right.peer_id, True)]


async def test_disconnecting(pair: Pair) -> None:
    echo_stream = await pair.left.open_stream(pair.right.peer_id, ECHO)
    await pair.left.disconnect(pair.right.peer_id)
    assert pair.left.connected_peers() == ()
    assert pair.news == [(pair.right.peer_id, True), (pair.right.peer_id, False)]
    await expect_error(ConnectionLost, lambda: echo_stream.receive_exactly(1))
    await expect_error(ConnectionLost, lambda: echo_stream.send(b"x"))
    await expect_error(ConnectionLost, lambda: pair.left.open_stream(pair.right.peer_id, ECHO))
    await eventually(lambda: pair.right.connected_peers() == ())
    await pair.left.disconnect(pair.right.peer_id)
    await pair.left.connect(pair.right.addresses[0])
    assert await ask(await pair.left.open_stream(pair.right.peer_id, ECHO), b"again") == b"again"
    assert pair.news[2:] == [(pair.right.peer_id, True)]


async def test_the_other_side_disconnects(pair: Pair) -> None:
    near, far = await pair.held_streams()
    await far.send(b"12345678last")
    await trio.sleep(0.05)
    assert await near.receive_exactly(8) == b"12345678"
    await pair.right.disconnect(pair.left.peer_id)
    await eventually(lambda: pair.left.connected_peers() == ())
    assert await near.receive_exactly(4) == b"last"  # it had arrived
    await expect_error(ConnectionLost, lambda: near.receive_exactly(1))


async def test_callbacks_may_fail(pair: Pair) -> None:
    def fail(peer: PeerId, up: bool) -> None:
        raise RuntimeError("a bug")

    pair.right.on_connection(fail)
    await pair.right.disconnect(pair.left.peer_id)
    await eventually(lambda: pair.news[-1] == (pair.right.peer_id, False))


BAD_ADDRESSES = ["", "junk", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1/quic-v1", "/p2p/x", "x" * 9999]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
async def test_bad_addresses(pair: Pair, address: str) -> None:
    error = await expect_error(DialFailed, lambda: pair.left.connect(address))
    assert len(str(error)) < 2000


async def test_nobody_dials_itself(pair: Pair) -> None:
    await expect_error(DialFailed, lambda: pair.left.connect(pair.left.addresses[0]))


async def test_statistics_count_bytes(pair: Pair) -> None:
    before = pair.left.statistics()
    await ask(await pair.left.open_stream(pair.right.peer_id, ECHO), bytes(100_000))
    after = pair.left.statistics()
    assert 100_000 < after.bytes_sent - before.bytes_sent < 110_000
    assert 100_000 < after.bytes_received - before.bytes_received < 110_000
