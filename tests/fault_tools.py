"""What breaks swarms on purpose: a proxy that cuts or stalls connections, and peers in the hands of a test."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import trio

from backends.device import Device
from backends.expert_source import GGUFExpertSource
from backends.experts import F32, GgmlExperts
from backends.gguf_file import GGUFFile
from backends.manifest import Manifest
from capabilities.errors import SwarmError
from swarmnode import limits
from swarmnode.expert_messages import PROTOCOL as EXPERTS
from swarmnode.expert_messages import DispatchHead, HeldLayer, decode_dispatch, encode_reply, request_head
from swarmnode.identity import Identity
from swarmnode.local_experts import load_experts
from swarmnode.member_messages import PROTOCOL as MEMBER
from swarmnode.member_messages import (
    WIRE_VERSION,
    Arithmetic,
    Assign,
    Begin,
    Hello,
    Phase,
    Policy,
    Progress,
    decode_from_leader,
    encode,
)
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream, StreamReset
from swarmnode.net.libp2p_host import Libp2pNetwork, open_libp2p_network
from swarmnode.pinger import serve_pings
from swarmnode.wire import encode_frame, read_frame
from tests.patience import PATIENCE_S


class Proxy:
    """Forwards TCP connections to a port of this machine until told otherwise."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forwarding = threading.Event()
        self._forwarding.set()
        self._cut = False
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Bytes no longer arrive, and nobody is told."""
        self._forwarding.clear()

    def resume(self) -> None:
        self._forwarding.set()

    def cut(self) -> None:
        """Close all connections, and new ones at once."""
        self._cut = True
        for pair in self._pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._closed = True
        self.resume()
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((near, far))
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with near, far, contextlib.suppress(OSError):
            while True:
                for sock in select.select([near, far], [], [])[0]:
                    self._forwarding.wait()
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    other[sock].sendall(data)


@asynccontextmanager
async def stranger(*addresses: str) -> AsyncIterator[Libp2pNetwork]:
    """A peer of nobody's, connected to these addresses."""
    async with open_libp2p_network(Identity.generate(), []) as network:
        for address in addresses:
            await network.connect(address)
        yield network


Spoil = Callable[[DispatchHead, F32], bytes | None]
"""What a fake worker answers, given the right rows; None for nothing at all."""


def honest(head: DispatchHead, y: F32) -> bytes:
    return encode_reply(head.sequence, 1, y)


def hello(name: str, memory_budget_bytes: int = 1 << 30) -> Hello:
    return Hello(
        name=name, version="0", wire=WIRE_VERSION, backend="fake", device="fake", threads=1,
        memory_budget_bytes=memory_budget_bytes, q8_0=False,
    )  # fmt: skip


class Rows(Protocol):
    """The truth that a fake worker starts from."""

    def rows(self, head: DispatchHead, payload: bytes | memoryview) -> F32: ...


class RightAnswers:
    """All experts of a model, computed here."""

    def __init__(self, manifest_file: Path, model: Path) -> None:
        self.manifest = Manifest.from_bytes(manifest_file.read_bytes())
        self._backend = GgmlExperts(Device(threads=1))
        everything = {layer.layer: range(layer.n_expert) for layer in self.manifest.layers}
        with GGUFFile.open(model) as gguf:
            load_experts(self._backend, self.manifest, everything, GGUFExpertSource(gguf, self.manifest))
        self._layers = {layer.layer: HeldLayer.of(layer, range(layer.n_expert)) for layer in self.manifest.layers}

    def rows(self, head: DispatchHead, payload: bytes | memoryview) -> F32:
        dispatch = decode_dispatch(head, payload, self._layers[head.layer])
        x = np.asarray(dispatch.x, np.float32)
        return self._backend.compute(head.layer, x, dispatch.tokens, dispatch.experts)


@dataclass
class FakeWorker:
    """A worker that joins, claims to have loaded what it is assigned, and answers what `spoil` makes of the truth."""

    network: Network
    leader: str
    name: str = "fake"
    right: Rows | None = None
    spoil: Spoil = honest
    memory_budget_bytes: int = 1 << 30
    host: str = ""
    holding: tuple[tuple[int, int], ...] = ()
    accumulates_f32: bool = True
    measuring: bool = False
    answers_pings: bool = True  # False: somebody else on this node does
    claims_loaded: bool = True
    assigned: list[Assign] = field(default_factory=list)
    begun: list[Begin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network.serve(EXPERTS, self._experts, max_streams_per_peer=8)
        if self.answers_pings:
            serve_pings(self.network)

    async def run(self) -> None:
        """One stay, until the stream breaks."""
        peer = await self.network.connect(self.leader)
        self.stream = await self.network.open_stream(peer, MEMBER)
        said = replace(
            hello(self.name, self.memory_budget_bytes),
            host=self.host,
            holding=self.holding,
            accumulates_f32=self.accumulates_f32,
            measuring=self.measuring,
        )
        await self.stream.send(encode(said))
        with contextlib.suppress(NetworkError):
            while True:
                message = decode_from_leader(await read_frame(self.stream, limits.MEMBER_FRAME))
                if isinstance(message, Assign):
                    self.assigned.append(message)
                    if self.claims_loaded:
                        await self.report("loaded")
                elif isinstance(message, Begin):
                    self.begun.append(message)

    async def measured(self, *, accumulates_f32: bool) -> None:
        await self.stream.send(encode(Arithmetic("", accumulates_f32)))

    async def drain(self, draining: bool) -> None:
        await self.stream.send(encode(Policy(draining)))

    async def report(self, phase: Phase, done: int = 1, error: SwarmError | None = None) -> None:
        """Tell the leader how far the latest assignment is."""
        last = self.assigned[-1]
        await self.stream.send(encode(Progress(last.term, last.epoch, phase, done, 1, 1, error)))

    async def _experts(self, stream: Stream) -> None:
        assert self.right is not None
        while True:
            frame = await read_frame(stream, limits.EXPERTS_REQUEST)
            head = request_head(frame.header)
            if isinstance(head, DispatchHead):
                answer = self.spoil(head, self.right.rows(head, frame.payload))
                if answer is not None:
                    await stream.send(answer)


@asynccontextmanager
async def fake_worker(identity: Identity, leader: str, **fields: object) -> AsyncIterator[FakeWorker]:
    """A fake worker that has joined."""
    async with open_libp2p_network(identity, []) as network, trio.open_nursery() as nursery:
        fake = FakeWorker(network, leader, **fields)  # type: ignore[arg-type]
        nursery.start_soon(fake.run)
        yield fake
        nursery.cancel_scope.cancel()


def bad_frames() -> Iterator[tuple[str, bytes]]:
    """(name, bytes) that no protocol may take."""
    yield "66 bytes of junk", bytes(range(150, 216))
    yield "zeros", bytes(66)
    yield "a header of nothing", encode_frame({})[:0] + (0).to_bytes(4, "little") * 2
    yield "a huge header", (0xFFFF_FFFF).to_bytes(4, "little") + (0).to_bytes(4, "little")
    yield "a huge payload", (1).to_bytes(4, "little") + (0xFFFF_FFFF).to_bytes(4, "little") + b"\x80"
    yield "no msgpack", (4).to_bytes(4, "little") + (0).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1"
    yield "deep nesting", (60).to_bytes(4, "little") + (0).to_bytes(4, "little") + b"\x91" * 59 + b"\x00"
    yield "a false length", (5).to_bytes(4, "little") + (0).to_bytes(4, "little") + b"\xdd\xff\xff\xff\xff"
    yield "an extension", (3).to_bytes(4, "little") + (0).to_bytes(4, "little") + b"\xd4\x01\x00"
    yield "a number", encode_frame(7)
    yield "a list", encode_frame([])
    yield "an empty map", encode_frame({})
    yield "another kind", encode_frame({"kind": "surprise"}, b"payload")
    yield "wrong types", encode_frame({"kind": 5, "id": [], "model": 7, 0: 1})
    yield "a list of wrong types", encode_frame([1, "x", None, -1, 2**63])


async def is_refused(network: Network, peer: str, protocol: str, data: bytes, seconds: float = PATIENCE_S) -> bool:
    """Whether the other side ends the stream after these bytes, or answers with an error."""
    with trio.move_on_after(seconds):
        try:
            stream = await network.open_stream(PeerId(peer), protocol)
        except StreamReset:  # a handler that looks at who opens it may be that quick
            return True
        try:
            await stream.send(data)
            while True:
                header = (await read_frame(stream, limits.SHARDS_REPLY)).header
                if isinstance(header, dict) and "error" in header:
                    return True
        except NetworkError:
            return True
        finally:
            await stream.reset()
    return False
