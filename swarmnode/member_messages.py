"""/swarmnode/member/1: the stream that makes a peer a worker of this leader.

    worker  hello      who it is: name, version, backend, the memory that it offers
    leader  assign     an epoch to prepare: the model's manifest, who serves its shards, the experts to hold
    worker  progress   how far it is: fetching, loading, loaded, or failed with a typed error
    worker  policy     whether it wants to hold nothing more
    leader  begin      the epoch serves from now on; the one before is dropped
    leader  refuse     a typed error, then the stream ends

Experts are named in a payload, as runs: layer uint16, first expert uint16, count uint16, little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from capabilities.errors import PeerMistake, SwarmError
from capabilities.membership_certificate import MEMBERSHIP_BYTES_MAX
from capabilities.numeric_class import CLASS_CHARS
from swarmnode import limits
from swarmnode.wire import Fields, Frame, bounded_error, encode_frame

PROTOCOL: Final = "/swarmnode/member/1"
WIRE_VERSION: Final = 1

NAME_CHARS_MAX: Final = 64
VERSION_CHARS_MAX: Final = 32
BACKEND_CHARS_MAX: Final = 128
HOST_CHARS_MAX: Final = 64
INSTANCE_CHARS_MAX: Final = 32
HOLDING_MAX: Final = 4  # two sets in memory, each with the names of two epochs
SOURCES_MAX: Final = 8  # peer ids of at most 60 characters
SOURCES_CHARS_MAX: Final = 1024
HASH_CHARS: Final = 64
_COUNTER_MAX: Final = 2**63
_BYTES_MAX: Final = 2**50
_RUN: Final = np.dtype("<u2")

Phase = Literal["fetching", "loading", "loaded", "failed"]
_PHASES: Final[tuple[Phase, ...]] = ("fetching", "loading", "loaded", "failed")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself. Older versions say nothing of what has a default.

    q8_0             it takes activations as Q8_0 where that changes no bit of its results
    certificate      of its membership in the swarm (capabilities.membership_certificate); empty: it shows none
    host             a name for its machine that says nothing about it, equal for all peers there; empty: unknown
    numeric_class    fingerprint of its arithmetic; empty: not measured
    accumulates_f32  its kernels were seen to add up in F32 when asked to
    measuring        they are still being measured: what it says of its arithmetic will follow
    instance         drawn when the process starts; empty: unknown. Two that take turns use one identity
    holding          (term, epoch) names of the expert set in its memory that has begun, and so was proven there
    """

    name: str
    version: str
    wire: int
    backend: str
    device: str
    threads: int
    memory_budget_bytes: int
    q8_0: bool
    certificate: bytes = b""
    host: str = ""
    numeric_class: str = ""
    accumulates_f32: bool = True
    measuring: bool = False
    instance: str = ""
    holding: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Assign:
    """Experts to hold: layer -> ascending ids, from the model of `manifest` (its id), served by `sources`."""

    term: int
    epoch: int
    model: str
    manifest: str
    sources: tuple[str, ...]
    held: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is with an epoch. Bytes; `error` where the phase is "failed"."""

    term: int
    epoch: int
    phase: Phase
    done: int
    total: int
    memory_used_bytes: int
    error: SwarmError | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What a worker wants. `draining`: to hold nothing more, so that it can leave without being missed."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a worker has measured of its kernels since its hello: see Hello."""

    numeric_class: str
    accumulates_f32: bool
    measuring: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """The epoch serves from now on; the worker drops every other."""

    term: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why this worker is turned away; the stream ends after it."""

    error: SwarmError


FromWorker = Hello | Progress | Policy | Arithmetic
FromLeader = Assign | Begin | Refuse


def encode(message: FromWorker | FromLeader) -> bytes:
    """The message as one frame."""
    match message:
        case Hello():
            fields = {name: getattr(message, name) for name in Hello.__slots__}
            fields["holding"] = [number for name in message.holding for number in name]
            return encode_frame({"kind": "hello", **fields})
        case Policy(draining):
            return encode_frame({"kind": "policy", "draining": draining})
        case Arithmetic():
            fields = {name: getattr(message, name) for name in Arithmetic.__slots__}
            return encode_frame({"kind": "arithmetic", **fields})
        case Assign():
            header: dict[str, Any] = {
                "kind": "assign",
                "term": message.term,
                "epoch": message.epoch,
                "model": message.model,
                "manifest": message.manifest,
                "sources": ",".join(message.sources),
            }
            return encode_frame(header, _runs(message.held))
        case Progress():
            header = {name: getattr(message, name) for name in Progress.__slots__ if name != "error"}
            if message.error is not None:
                header["error"] = bounded_error(message.error)
            return encode_frame({"kind": "progress", **header})
        case Begin():
            return encode_frame({"kind": "begin", "term": message.term, "epoch": message.epoch})
        case Refuse():
            return encode_frame({"kind": "refuse", "error": bounded_error(message.error)})


def decode_from_worker(frame: Frame) -> FromWorker:
    """A worker's message.

    Raises:
        PeerMistake: it is none.
    """
    fields = Fields(frame.header, "member message")
    match fields.text("kind", 16):
        case "hello":
            return Hello(
                name=_clean(fields.text("name", NAME_CHARS_MAX, 1)),
                version=_clean(fields.text("version", VERSION_CHARS_MAX)),
                wire=fields.integer("wire", 0, 2**16),
                backend=_clean(fields.text("backend", BACKEND_CHARS_MAX)),
                device=_clean(fields.text("device", BACKEND_CHARS_MAX)),
                threads=fields.integer("threads", 0, 2**16),
                memory_budget_bytes=fields.integer("memory_budget_bytes", 0, _BYTES_MAX),
                q8_0=fields.flag("q8_0"),
                certificate=fields.binary("certificate", MEMBERSHIP_BYTES_MAX) if fields.has("certificate") else b"",
                host=_clean(fields.text("host", HOST_CHARS_MAX)) if fields.has("host") else "",
                numeric_class=_clean(fields.text("numeric_class", CLASS_CHARS)) if fields.has("numeric_class") else "",
                accumulates_f32=not fields.has("accumulates_f32") or fields.flag("accumulates_f32"),
                measuring=fields.has("measuring") and fields.flag("measuring"),
                instance=_clean(fields.text("instance", INSTANCE_CHARS_MAX)) if fields.has("instance") else "",
                holding=_holding(fields) if fields.has("holding") else (),
            )
        case "policy":
            return Policy(fields.flag("draining"))
        case "arithmetic":
            return Arithmetic(
                _clean(fields.text("numeric_class", CLASS_CHARS)),
                fields.flag("accumulates_f32"),
                fields.has("measuring") and fields.flag("measuring"),
            )
        case "progress":
            phase = fields.text("phase", 16)
            if phase not in _PHASES:
                raise PeerMistake(f"a worker reports the phase {phase!r}")
            return Progress(
                term=fields.integer("term", 0, _COUNTER_MAX),
                epoch=fields.integer("epoch", 0, _COUNTER_MAX),
                phase=phase,
                done=fields.integer("done", 0, _BYTES_MAX),
                total=fields.integer("total", 0, _BYTES_MAX),
                memory_used_bytes=fields.integer("memory_used_bytes", 0, _BYTES_MAX),
                error=fields.error("error") if fields.has("error") else None,
            )
        case kind:
            raise PeerMistake(f"a worker sent a member message of kind {kind!r}")


def decode_from_leader(frame: Frame) -> FromLeader:
    """A leader's message.

    Raises:
        PeerMistake: it is none.
    """
    fields = Fields(frame.header, "member message")
    match fields.text("kind", 16):
        case "assign":
            sources = fields.text("sources", SOURCES_CHARS_MAX).split(",")
            if len(sources) > SOURCES_MAX:
                raise PeerMistake(f"an assignment names {len(sources)} sources")
            return Assign(
                term=fields.integer("term", 0, _COUNTER_MAX),
                epoch=fields.integer("epoch", 0, _COUNTER_MAX),
                model=_clean(fields.text("model", NAME_CHARS_MAX)),
                manifest=fields.text("manifest", HASH_CHARS, HASH_CHARS),
                sources=tuple(sources),
                held=_held(frame.payload),
            )
        case "begin":
            return Begin(fields.integer("term", 0, _COUNTER_MAX), fields.integer("epoch", 0, _COUNTER_MAX))
        case "refuse":
            return Refuse(fields.error("error"))
        case kind:
            raise PeerMistake(f"a leader sent a member message of kind {kind!r}")


def _clean(text: str) -> str:
    """Printable characters only: names of peers reach terminals."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _holding(fields: Fields) -> tuple[tuple[int, int], ...]:
    numbers = fields.integers("holding", 2 * HOLDING_MAX, 0, _COUNTER_MAX)
    if len(numbers) % 2:
        raise PeerMistake("a hello names half of an expert set")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _runs(held: Mapping[int, tuple[int, ...]]) -> bytes:
    runs: list[tuple[int, int, int]] = []
    for layer in sorted(held):
        for expert in sorted(held[layer]):
            if runs and runs[-1][0] == layer and expert == runs[-1][1] + runs[-1][2]:
                runs[-1] = (layer, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((layer, expert, 1))
    return np.array(runs, _RUN).reshape(-1, 3).tobytes()


def _held(payload: bytes | memoryview) -> dict[int, tuple[int, ...]]:
    if len(payload) % (3 * _RUN.itemsize):
        raise PeerMistake("an assignment's list of experts is cut")
    runs = np.frombuffer(payload, _RUN).reshape(-1, 3).astype(np.int64)
    if len(runs) and (int(runs[:, 2].sum()) > limits.ASSIGNED_EXPERTS_MAX or int(runs[:, 1:].sum(1).max()) > 2**16):
        raise PeerMistake("an assignment names more experts than any model has")
    held: dict[int, set[int]] = {}
    for layer, first, count in runs.tolist():
        held.setdefault(layer, set()).update(range(first, first + count))
    return {layer: tuple(sorted(experts)) for layer, experts in held.items() if experts}
