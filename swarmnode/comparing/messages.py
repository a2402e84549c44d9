"""/swarmnode/compare/1: one member has another one compute.

    asker  {"kind": "products", "for": peer, "type", "lengths", "widths"}     products with small given weights
    asker  {"kind": "elements", "for": peer, "widths", "row_widths"}          a gated unit, softmax, a norm
    asker  {"kind": "held", "for": peer}                                      which experts the peer could compute
    asker  {"kind": "rows", "for": peer, "model", "layer", "tokens", "rows"}  x and ids as in a dispatch

Each is answered with a frame of the same kind, or {"error"}. `for` names whom the request is meant for: a backbone peer
passes on what is meant for another one. Operators are named, not sent: weights and inputs follow from the recipe
(equivalence/recipes.py), and the answer holds a hash of the inputs that were used. All numbers are F32, little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.manifest import LayerExperts, Manifest
from capabilities.errors import NoDaemon, NotReady, PeerMistake, SwarmError, UsageError
from capabilities.held_experts import LAYERS_MAX, MODEL_ID_CHARS, HeldExperts
from capabilities.precision import Precision, Verdict
from swarmnode import limits
from swarmnode.equivalence.recipes import (
    GATED_LENGTH,
    ROW_LENGTHS,
    ROW_OPERATORS,
    Recipe,
    bytes_of,
    parted,
    type_of,
)
from swarmnode.expert_messages import DispatchHead
from swarmnode.wire import F32, Fields, Frame, Header, bounded_error, decode_rows, encode_frame

PROTOCOL: Final = "/swarmnode/compare/1"

_PEER_CHARS_MAX: Final = 128
_TYPE_CHARS_MAX: Final = 16
_HASH_CHARS: Final = 64
_NAME_CHARS_MAX: Final = 128
_LAYER: Final = struct.Struct("<H32s")

F32Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators to compute, all on one backend. type: of the weights of products; empty for elements."""

    type: str
    recipes: tuple[Recipe, ...]

    @property
    def bytes(self) -> int:
        """Of the answer."""
        return sum(bytes_of(recipe) for recipe in self.recipes)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one layer's experts. `head` and the payload are those of a dispatch in F32."""

    model: str
    head: DispatchHead
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Held:
    """Which experts are held; asks for nothing more."""


Request = Operators | Rows | Held


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """What a peer could compute now. `layers`: a digest of each layer's experts and program (`layer_digest`)."""

    name: str
    experts: HeldExperts
    layers: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class OperatorsAnswer:
    """What came of `Operators`. results: for each recipe one array a batch width; empty where the peer has no such
    operator. precision: of products over the weight type. inputs: a hash for each recipe."""

    results: tuple[list[F32Rows], ...]
    inputs: tuple[str, ...]
    precision: Verdict
    seconds: float


# -- requests ---------------------------------------------------------------------------------------------------------


def products(peer: str, kind: str, lengths: tuple[int, ...], widths: tuple[int, ...]) -> dict[str, Any]:
    """The header that asks for products."""
    return {"kind": "products", "for": peer, "type": kind, "lengths": list(lengths), "widths": list(widths)}


def elements(peer: str, widths: tuple[int, ...], row_widths: tuple[int, ...]) -> dict[str, Any]:
    """The header that asks for what has no weights; `row_widths`: batches of softmax and norms."""
    return {"kind": "elements", "for": peer, "widths": list(widths), "row_widths": list(row_widths)}


def held(peer: str) -> dict[str, Any]:
    """The header that asks what is held."""
    return {"kind": "held", "for": peer}


def rows(peer: str, model: str, layer: int, tokens: int, count: int) -> dict[str, Any]:
    """The header that asks for `count` expert rows of as many tokens; `rows_payload` goes with it."""
    return {"kind": "rows", "for": peer, "model": model, "layer": layer, "tokens": tokens, "rows": count}


def rows_payload(x: F32Rows, tokens: NDArray[np.int32], experts: NDArray[np.int32]) -> bytes:
    """x [T, n_in] and, for each row, its token (left out where there is one alone) and its expert."""
    ids = [experts] if len(x) == 1 else [tokens, experts]
    return b"".join((np.ascontiguousarray(x, "<f4").tobytes(), *(each.astype("<u2").tobytes() for each in ids)))


def meant_for(header: Header) -> str:
    """Whom a request is meant for. PeerMistake if it says nobody."""
    return Fields(header, "compare request").text("for", _PEER_CHARS_MAX, 1)


def decode_request(frame: Frame) -> Request:
    """What is asked, every count within its limit. PeerMistake for anything else."""
    fields = Fields(frame.header, "compare request")
    kind = fields.text("kind", 16)
    if kind == "rows":
        head = DispatchHead(
            0, 0, 0,
            fields.integer("layer", 0, limits.LAYER_MAX),
            fields.integer("tokens", 1, limits.COMPARE_ROWS_MAX),
            fields.integer("rows", 1, limits.COMPARE_ROWS_MAX),
            F32, 0,
        )  # fmt: skip
        return Rows(fields.text("model", MODEL_ID_CHARS, MODEL_ID_CHARS), head, frame.payload)
    if len(frame.payload):
        raise PeerMistake(f"a request for {kind!r:.20} has a payload")
    match kind:
        case "held":
            return Held()
        case "products":
            return operators_of(fields)
        case "elements":
            return elements_of(fields)
        case _:
            raise PeerMistake(f"compare request: no kind {kind!r:.20}")


def operators_of(fields: Fields) -> Operators:
    kind, widths = fields.text("type", _TYPE_CHARS_MAX), _widths(fields, "widths")
    lengths = fields.integers("lengths", limits.COMPARE_LENGTHS_MAX, 1, limits.COMPARE_LENGTH_MAX)
    try:
        type_of(kind)
    except ValueError as error:
        raise PeerMistake(f"compare request: {error}") from None
    return _bounded(Operators(kind, tuple(Recipe("matmul", kind, length, widths) for length in lengths)))


def elements_of(fields: Fields) -> Operators:
    gated = Recipe("swiglu", "", GATED_LENGTH, _widths(fields, "widths"))
    row_widths = _widths(fields, "row_widths")
    of_rows = [Recipe(op, "", length, row_widths) for length in ROW_LENGTHS for op in ROW_OPERATORS]
    return _bounded(Operators("", (gated, *of_rows)))


def _widths(fields: Fields, key: str) -> tuple[int, ...]:
    found = fields.integers(key, limits.COMPARE_WIDTHS_MAX, 1, limits.COMPARE_WIDTH_MAX)
    if not found:
        raise PeerMistake("compare request: no batch width")
    return tuple(found)


def _bounded(asked: Operators) -> Operators:
    if not asked.recipes or asked.bytes > limits.COMPARE_PAYLOAD_BYTES_MAX:
        raise PeerMistake(f"compare request: {asked.bytes} bytes of results, not 1 to the limit")
    return asked


# -- answers ----------------------------------------------------------------------------------------------------------


def encode_error(error: SwarmError) -> bytes:
    return encode_frame({"error": bounded_error(error)})


def check_error(frame: Frame) -> Fields:
    """An answer's fields. Raises the typed error that it may hold instead, and PeerMistake."""
    fields = Fields(frame.header, "compare answer")
    if fields.has("error"):
        error = fields.error("error")
        if isinstance(error, UsageError | NoDaemon):  # the peer's own configuration, nothing that was asked for here
            error = NotReady(error.message, hint=error.hint)
        raise error
    return fields


def encode_operators(head: Mapping[str, Any], payload: bytes) -> bytes:
    """`head` is what the child says (child.py)."""
    return encode_frame({"kind": "operators", **head}, payload)


def decode_operators(frame: Frame, asked: Operators) -> OperatorsAnswer:
    """Results for what was asked. Raises PeerMistake, and the error that the peer answered with."""
    fields = check_error(frame)
    done = fields.integers("done", len(asked.recipes), 0, 1)
    if len(done) != len(asked.recipes):
        raise PeerMistake("compare answer: not every recipe is spoken of")
    results: list[list[F32Rows]] = []
    at = 0
    for recipe, is_done in zip(asked.recipes, done, strict=True):
        size = bytes_of(recipe) if is_done else 0
        try:
            results.append(parted(recipe, frame.payload[at : at + size]) if is_done else [])
        except ValueError as error:
            raise PeerMistake(f"compare answer: {error}") from None
        at += size
    if at != len(frame.payload):
        raise PeerMistake("compare answer: bytes left over")
    hashes = tuple(fields.text(f"inputs_{index}", _HASH_CHARS, _HASH_CHARS) for index in range(len(asked.recipes)))
    accumulation, source = (Precision.of(fields.text(key, 16)) for key in ("accumulation", "source"))
    return OperatorsAnswer(
        tuple(results), hashes, Verdict(accumulation, source), fields.number("seconds", 0, limits.COMPARE_SECONDS_MAX)
    )


def layer_digest(manifest: Manifest, layer: LayerExperts) -> bytes:
    """Names a layer's experts and what is computed with them, 32 bytes."""
    digest = hashlib.sha256(manifest.programs[layer.program])
    for each in layer.hashes:
        digest.update(each)
    return digest.digest()


def encode_held(answer: HeldAnswer) -> bytes:
    layers = b"".join(_LAYER.pack(layer, digest) for layer, digest in sorted(answer.layers.items()))
    head = {"kind": "held", "model": answer.experts.model, "name": answer.name[:_NAME_CHARS_MAX]}
    return encode_frame({**head, "layers": len(answer.layers)}, layers, answer.experts.to_blob())


def decode_held(frame: Frame) -> HeldAnswer:
    """Raises PeerMistake, and the error that the peer answered with."""
    fields = check_error(frame)
    count = fields.integer("layers", 0, LAYERS_MAX)
    data = bytes(frame.payload)
    if len(data) < count * _LAYER.size:
        raise PeerMistake("compare answer: cut off within its layers")
    layers = dict(_LAYER.iter_unpack(data[: count * _LAYER.size]))
    model = fields.text("model", MODEL_ID_CHARS, MODEL_ID_CHARS)
    return HeldAnswer(
        fields.text("name", _NAME_CHARS_MAX), HeldExperts.from_blob(model, data[count * _LAYER.size :]), layers
    )


def encode_rows(y: F32Rows) -> bytes:
    return encode_frame({"kind": "rows", "rows": len(y)}, np.ascontiguousarray(y, "<f4"))


def decode_rows_answer(frame: Frame, count: int, n_out: int) -> F32Rows:
    """y [count, n_out]. Raises PeerMistake (also for values that are not finite), and the error that was answered."""
    check_error(frame).integer("rows", count, count)
    if len(frame.payload) != 4 * count * n_out:
        raise PeerMistake(f"compare answer: {len(frame.payload)} bytes for {count} rows of {n_out} values")
    y: NDArray[Any] = decode_rows(frame.payload, F32, count, n_out)
    return y.astype(np.float32)
