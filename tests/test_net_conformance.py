"""What every Network promises (swarmnode/net/interface.py), tried on libp2p over loopback and in memory.

Each test gets two networks; `left` is connected to `right`. What streams promise holds for a node's streams to itself,
too: there `left` and `right` are the same. Nothing here may depend on which implementation runs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from tests.patience import PATIENCE_S, stuck, turns

ECHO = "/test/echo/1"
HOLD = "/test/hold/1"
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]

OpenPair = Callable[[], AbstractAsyncContextManager[tuple[Network, Network]]]


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


def alone(open_pair: OpenPair) -> OpenPair:
    """One node, which is both sides."""

    @asynccontextmanager
    async def open_one() -> AsyncIterator[tuple[Network, Network]]:
        async with open_pair() as (left, _):
            yield left, left

    return open_one


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
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with _serving(request.param) as made:
        yield made


@pytest.fixture(
    params=[libp2p_pair, memory_pair, alone(libp2p_pair), alone(memory_pair)],
    ids=["libp2p", "memory", "libp2p-to-itself", "memory-to-itself"],
)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with _serving(request.param) as made:
        yield made


@asynccontextmanager
async def _serving(open_pair: OpenPair) -> AsyncIterator[Pair]:
    to_test, held = trio.open_memory_channel[Stream](100)

    async def hold(stream: Stream) -> None:
        to_test.send_nowait(stream)
        await trio.sleep_forever()

    async with open_pair() as (left, right):
        right.serve(ECHO, echo, max_streams_per_peer=50)
        right.serve(HOLD, hold, max_streams_per_peer=50)
        made = Pair(left, right, held)
        left.on_connection(lambda peer, up: made.news.append((peer, up)))
        assert await left.connect(right.addresses[0]) == right.peer_id
        with trio.fail_after(PATIENCE_S):
            yield made


async def expect_error(kind: type[NetworkError], action: Callable[[], Awaitable[object]]) -> NetworkError:
    with pytest.raises(kind) as caught, trio.fail_after(PATIENCE_S):
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

    async def fill() -> None:
        nonlocal sent
        while True:
            await near.send(b"\0")
            sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await stuck(lambda: sent)
        nursery.cancel_scope.cancel()
    assert await far.receive_exactly(sent) == bytes(sent)
    await near.send(b"next")
    assert await far.receive_exactly(4) == b"next"


async def test_a_send_cancelled_in_its_middle_resets_its_stream_only(pair: Pair) -> None:
    other = await pair.left.open_stream(pair.right.peer_id, ECHO)
    near, far = await pair.held_streams()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, bytes(1 << 20))  # four first windows, and nobody reads
        await eventually(lambda: len(far.peek()) > 0)
        await stuck(lambda: len(far.peek()))
        nursery.cancel_scope.cancel()
    await expect_error(StreamReset, lambda: far.receive_exactly(1 << 20))
    await expect_error(StreamReset, lambda: near.send(b"x"))
    for size in (10, 1 << 20):
        assert len(await ask(other, bytes(size))) == size


async def test_what_is_sent_does_not_arrive_while_it_is_being_sent(pair: Pair) -> None:
    near, far = await pair.held_streams()
    heard: list[bytes] = []

    def take() -> bool:
        heard.append(far.receive_nowait(len(far.peek())))
        return len(b"".join(heard)) < 5

    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.arrivals, take)
        await wait_all_tasks_blocked(0.02)
        assert near.send_nowait(b"12")
        assert near.send_nowait(b"345")
        assert heard == []
    assert b"".join(heard) == b"12345"


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


async def test_both_sides_serve_over_one_connection(two: Pair) -> None:
    two.left.serve("/test/back/1", echo, max_streams_per_peer=1)
    stream = await two.right.open_stream(two.left.peer_id, "/test/back/1")
    assert await ask(stream, b"back") == b"back"
    assert two.left.statistics().connections_open == 1


async def test_streams_of_a_peer_are_limited(pair: Pair) -> None:
    pair.right.serve("/test/two/1", echo, max_streams_per_peer=2)
    first, second = [await pair.left.open_stream(pair.right.peer_id, "/test/two/1") for _ in range(2)]

    async def ask_on_a_third() -> None:
        await ask(await pair.left.open_stream(pair.right.peer_id, "/test/two/1"), b"no place")

    await expect_error(StreamReset, ask_on_a_third)
    assert pair.right.statistics().streams_refused == 1
    assert await ask(first, b"1") == await ask(second, b"1") == b"1"
    await first.aclose()
    await turns()
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
    await turns()
    assert await stream.receive_exactly(4) == b"said"
    error = await expect_error(StreamClosed, lambda: stream.receive_exactly(1))
    assert isinstance(error, StreamClosed)
    assert error.clean


# --- Connections ---


async def test_connecting_twice_keeps_one_connection(two: Pair) -> None:
    await two.left.connect(two.right.addresses[0])
    assert two.left.connected_peers() == (two.right.peer_id,)
    assert two.left.statistics().connections_open == 1
    assert two.news == [(two.right.peer_id, True)]


async def test_disconnecting(two: Pair) -> None:
    echo_stream = await two.left.open_stream(two.right.peer_id, ECHO)
    await two.left.disconnect(two.right.peer_id)
    assert two.left.connected_peers() == ()
    assert two.news == [(two.right.peer_id, True), (two.right.peer_id, False)]
    await expect_error(ConnectionLost, lambda: echo_stream.receive_exactly(1))
    await expect_error(ConnectionLost, lambda: echo_stream.send(b"x"))
    await expect_error(ConnectionLost, lambda: two.left.open_stream(two.right.peer_id, ECHO))
    await eventually(lambda: two.right.connected_peers() == ())
    await two.left.disconnect(two.right.peer_id)
    await two.left.connect(two.right.addresses[0])
    assert await ask(await two.left.open_stream(two.right.peer_id, ECHO), b"again") == b"again"
    assert two.news[2:] == [(two.right.peer_id, True)]


async def test_the_other_side_disconnects(two: Pair) -> None:
    near, far = await two.held_streams()
    await far.send(b"12345678last")
    await turns()
    assert await near.receive_exactly(8) == b"12345678"
    await two.right.disconnect(two.left.peer_id)
    await eventually(lambda: two.left.connected_peers() == ())
    assert await near.receive_exactly(4) == b"last"  # it had arrived
    await expect_error(ConnectionLost, lambda: near.receive_exactly(1))


async def test_refused_peers_are_not_connected_with_whoever_dials(two: Pair) -> None:
    refused = {two.right.peer_id}
    two.left.refuse(lambda peer: peer in refused)
    assert two.left.connected_peers() == (two.right.peer_id,), "connections that are up stay"
    await two.left.disconnect(two.right.peer_id)
    await eventually(lambda: two.right.connected_peers() == ())
    await expect_error(DialFailed, lambda: two.left.connect(two.right.addresses[0]))
    with contextlib.suppress(DialFailed):
        await two.right.connect(two.left.addresses[0])
    await eventually(lambda: two.right.connected_peers() == ())
    assert two.news == [(two.right.peer_id, True), (two.right.peer_id, False)]
    refused.clear()
    await two.right.connect(two.left.addresses[0])
    await eventually(lambda: two.news[-1] == (two.right.peer_id, True))


async def test_callbacks_may_fail(two: Pair) -> None:
    def fail(peer: PeerId, up: bool) -> None:
        raise RuntimeError("a bug")

    two.right.on_connection(fail)
    await two.right.disconnect(two.left.peer_id)
    await eventually(lambda: two.news[-1] == (two.right.peer_id, False))


BAD_ADDRESSES = ["", "junk", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1/quic-v1", "/p2p/x", "x" * 9999]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
async def test_bad_addresses(two: Pair, address: str) -> None:
    error = await expect_error(DialFailed, lambda: two.left.connect(address))
    assert len(str(error)) < 2000


async def test_a_node_needs_no_connection_to_itself(pair: Pair) -> None:
    left = pair.left
    before = left.statistics()
    assert await left.connect(left.addresses[0]) == left.peer_id
    left.serve("/test/self/1", echo, max_streams_per_peer=1)
    stream = await left.open_stream(left.peer_id, "/test/self/1")
    assert stream.peer == left.peer_id
    assert await ask(stream, b"to myself" * 10_000) == b"to myself" * 10_000
    await left.disconnect(left.peer_id)
    assert await ask(stream, b"still there") == b"still there"
    assert left.peer_id not in left.connected_peers()
    after = left.statistics()
    assert after.connections_open == before.connections_open
    assert after.bytes_sent - before.bytes_sent < 10_000  # libp2p introduces itself to its neighbours meanwhile


async def test_ones_own_identity_elsewhere_is_another_node(two: Pair) -> None:
    where = two.right.addresses[0].rpartition("/p2p/")[0]
    await expect_error(DialFailed, lambda: two.left.connect(f"{where}/p2p/{two.left.peer_id}"))


async def test_statistics_count_bytes(two: Pair) -> None:
    before = two.left.statistics()
    await ask(await two.left.open_stream(two.right.peer_id, ECHO), bytes(100_000))
    after = two.left.statistics()
    assert 100_000 < after.bytes_sent - before.bytes_sent < 110_000
    assert 100_000 < after.bytes_received - before.bytes_received < 110_000
