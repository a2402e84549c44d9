"""Serving manifests, experts and trunks to other peers: the answering side of /swarmnode/shards/1.

Experts come from any ExpertSource (the GGUF that a model was added from, or this node's own cache), a trunk from its
file. Reads may block on the disk, so each chunk is read and framed in a worker thread, a few at a time; between two
chunks of an answer everybody else has a turn. Every wait has a bound: for a turn to read, for the disk, for a peer that
does not take what it asked for, and for one that asks nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import trio

from backends.manifest import ExpertSource, Manifest
from capabilities.errors import Internal, ModelNotFound, Overloaded, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.net.interface import ServesProtocols, Stream, StreamClosed
from swarmnode.shards.messages import PROTOCOL, ExpertRange, TrunkRange, decode_request, encode_chunk, encode_refusal
from swarmnode.shards.pace import Pace
from swarmnode.wire import read_frame

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class ServedModel(NamedTuple):
    """What this node can serve of one model: its manifest, the same as bytes, the experts it has, its trunk's file."""

    manifest: Manifest
    manifest_bytes: bytes
    source: ExpertSource
    trunk: Path | None = None


@dataclass(slots=True)
class ShardServiceStatistics:
    """Since the start, except streams_open."""

    streams_open: int = 0
    requests: int = 0
    refused: int = 0
    """Requests answered with an error, peers' mistakes included."""
    mistakes: int = 0
    bytes_sent: int = 0


class ShardService:
    """Answers for the models that `find(manifest id)` knows at the moment of a request. `find` runs in a thread."""

    def __init__(self, find: Callable[[str], ServedModel | None], uploads: Pace | None = None) -> None:
        """uploads: how fast experts and trunks may go out, to all peers together; None: as they are taken."""
        self._find = find
        self._uploads = Pace() if uploads is None else uploads
        self._reads = trio.CapacityLimiter(limits.SHARD_READS_MAX)
        self.statistics = ShardServiceStatistics()

    def register(self, network: ServesProtocols) -> None:
        """Serve the protocol on `network`."""
        network.serve(PROTOCOL, self.handle, max_streams_per_peer=limits.SHARD_STREAMS_PER_PEER_MAX)

    async def handle(self, stream: Stream) -> None:
        """Answer one request after the other until the peer closes, is idle or breaks the protocol."""
        self.statistics.streams_open += 1
        try:
            while True:
                with trio.move_on_after(limits.IDLE_STREAM_SECONDS_MAX) as idle:
                    frame = await read_frame(stream, limits.SHARDS_REQUEST)
                if idle.cancelled_caught:
                    return
                self.statistics.requests += 1
                if self.statistics.streams_open > limits.SHARD_STREAMS_MAX:
                    await self._refuse(stream, Overloaded("this peer serves as many shard streams as it can"))
                    return
                await self._answer(stream, frame.header)
        except PeerMistake as mistake:  # in the framing: where the next message begins is not known any more
            self.statistics.mistakes += 1
            await self._refuse(stream, mistake)
        except trio.TooSlowError:
            _log.info("shard_peer_does_not_read", peer=stream.peer)
            await stream.reset()
        except StreamClosed as closed:
            if not closed.clean:
                raise
        finally:
            self.statistics.streams_open -= 1

    async def _answer(self, stream: Stream, header: object) -> None:
        try:
            request = decode_request(header)
            model = await self._in_thread(lambda: self._find(request.model))
            if model is None:
                raise ModelNotFound(f"this peer has no model with the manifest {request.model[:16]}")
            if request.wanted is None:
                manifest = model.manifest_bytes
                await self._send(stream, lambda offset, length: manifest[offset : offset + length], 0, len(manifest))
            elif isinstance(request.wanted, TrunkRange):
                await self._send_trunk(stream, model, request.wanted)
            else:
                await self._send_expert(stream, model, request.wanted)
        except SwarmError as error:
            self.statistics.mistakes += isinstance(error, PeerMistake)
            await self._refuse(stream, error)

    async def _send_expert(self, stream: Stream, model: ServedModel, wanted: ExpertRange) -> None:
        model.manifest.experts_of(wanted.layer).check_range(wanted.expert, wanted.offset, wanted.length)
        read = partial(model.source.read, wanted.layer, wanted.expert)
        await self._send(stream, read, wanted.offset, wanted.offset + wanted.length)

    async def _send_trunk(self, stream: Stream, model: ServedModel, wanted: TrunkRange) -> None:
        end, size = wanted.offset + wanted.length, model.manifest.trunk.size
        if end > size:
            raise PeerMistake(f"no {wanted.length} bytes at {wanted.offset} in a trunk of {size}")
        if model.trunk is None:
            raise ModelNotFound(f"this peer does not hold the trunk of {model.manifest.name}")
        await self._send(stream, partial(_read_file, model.trunk), wanted.offset, end)

    async def _send(self, stream: Stream, read: Callable[[int, int], bytes | memoryview], begin: int, end: int) -> None:
        def framed(offset: int) -> bytes:
            try:
                data = read(offset, min(limits.SHARD_CHUNK_BYTES, end - offset))
            except OSError as error:
                raise Internal(f"this peer cannot read its model file: {error.strerror}") from error
            return encode_chunk(offset, end, data)

        for offset in range(begin, end, limits.SHARD_CHUNK_BYTES):
            chunk = await self._in_thread(partial(framed, offset))
            await self._uploads.spend(len(chunk))
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(chunk)
            self.statistics.bytes_sent += len(chunk)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        with trio.move_on_after(limits.SHARD_READ_WAIT_SECONDS_MAX):
            # Abandoned rather than awaited: a disk that hangs holds its thread and its turn, not this handler.
            # (The stubs that trio-typing brings are older than this argument.)
            return await trio.to_thread.run_sync(
                read,
                abandon_on_cancel=True,
                limiter=self._reads,  # type: ignore[call-arg]
            )
        raise Overloaded("this peer's disk is too slow at the moment")

    async def _refuse(self, stream: Stream, error: SwarmError) -> None:
        self.statistics.refused += 1
        _log.info("shard_request_refused", peer=stream.peer, error=error.type, message=error.message)
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(encode_refusal(error))


def _read_file(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:  # opened for each chunk: a removed model leaves nothing open
        data = os.pread(file.fileno(), length, offset)
    if len(data) != length:
        raise Internal(f"the file of this peer's trunk has no {length} bytes at {offset}")
    return data
