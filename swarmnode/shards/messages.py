"""The messages of /swarmnode/shards/1.

    asks for a manifest      {"model": id}
    for bytes of an expert   {"model": id, "layer", "expert", "offset", "length"}
    for bytes of the trunk   {"model": id, "trunk": 1, "offset", "length"}
    answer                   {"offset", "end"} + bytes, repeated until the range ends
    or instead, at any time  {"error": {...}}

`model` is the manifest's id (sha256 in hex), so both sides know what the bytes must be. A range lies within the
concatenated slices of one expert, or within the trunk's file; `end` is where it ends (for a manifest: its size). Every
chunk is exactly SHARD_CHUNK_BYTES long but the last. A stream carries one request after the other.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from backends.manifest import MANIFEST_BYTES_MAX
from capabilities.errors import PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.wire import Fields, Frame, Header, bounded_error, encode_frame

PROTOCOL: Final = "/swarmnode/shards/1"

_MODEL_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_OBJECT_BYTES_MAX: Final = 2**40


class ShardRequest(NamedTuple):
    """`wanted` is None for the manifest."""

    model: str
    wanted: ExpertRange | TrunkRange | None


class ExpertRange(NamedTuple):
    """`length` bytes from `offset` of one expert."""

    layer: int
    expert: int
    offset: int
    length: int


class TrunkRange(NamedTuple):
    """`length` bytes from `offset` of the trunk's file."""

    offset: int
    length: int


def encode_request(request: ShardRequest) -> bytes:
    """A request frame."""
    header: dict[str, str | int] = {"model": request.model}
    if isinstance(request.wanted, TrunkRange):
        header["trunk"] = 1
    if request.wanted is not None:
        header |= request.wanted._asdict()
    return encode_frame(header)


def decode_request(header: Header) -> ShardRequest:
    """A request's header; ranges are judged against the manifest later. Raises PeerMistake."""
    fields = Fields(header, "shard request")
    model = fields.text("model", 64)
    if not _MODEL_ID.fullmatch(model):
        raise PeerMistake("a shard request names no manifest id")
    of_trunk = fields.has("trunk")
    if not of_trunk and not fields.has("layer"):
        return ShardRequest(model, None)
    offset = fields.integer("offset", 0, _OBJECT_BYTES_MAX)
    length = fields.integer("length", 1, _OBJECT_BYTES_MAX)
    if of_trunk:
        fields.integer("trunk", 1, 1)
        return ShardRequest(model, TrunkRange(offset, length))
    layer = fields.integer("layer", 0, limits.LAYER_MAX)
    expert = fields.integer("expert", 0, limits.EXPERT_ID_MAX)
    return ShardRequest(model, ExpertRange(layer, expert, offset, length))


def encode_chunk(offset: int, end: int, data: bytes | memoryview) -> bytes:
    """One chunk of an answer."""
    return encode_frame({"offset": offset, "end": end}, data)


def encode_refusal(error: SwarmError) -> bytes:
    """An error instead of an answer, or of its rest."""
    return encode_frame({"error": bounded_error(error)})


class RefusalError(Exception):
    """The other side answered with a typed error: `error`. What it says is that peer's word, not this node's."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(f"{error.type}: {error.message}")
        self.error = error


def decode_chunk(frame: Frame, offset: int, end: int | None = None) -> tuple[bytes | memoryview, int]:
    """The bytes at `offset` and where the range ends: at `end`, unless that is None (a manifest, which has a limit).

    Raises RefusalError for an error frame, and PeerMistake unless it is exactly the chunk that comes next.
    """
    fields = Fields(frame.header, "chunk")
    if fields.has("error"):
        raise RefusalError(fields.error("error"))
    fields.integer("offset", offset, offset)
    said = fields.integer("end", 1, MANIFEST_BYTES_MAX) if end is None else fields.integer("end", end, end)
    expected = min(limits.SHARD_CHUNK_BYTES, said - offset)
    if len(frame.payload) != expected:
        raise PeerMistake(f"a chunk has {len(frame.payload)} bytes instead of {expected}")
    return frame.payload, said
