"""The messages of /swarmnode/experts/1: out go one layer's activations and expert ids, back come the experts' rows.

Headers are msgpack arrays of small integers, because a decode step sends one frame a layer to each worker:

    Dispatch  [1, term, epoch, sequence, layer, n_tokens, n_rows, dtype, flags]
              x [n_tokens, n_in] raw, tokens uint16 [n_rows] (left out for a single token), experts uint16 [n_rows],
              and weights float32 [n_rows] if the flags ask for partial sums
    Begin     [2, term, request_id]     End  [3, term, request_id]      so that workers log the asker's request id
    Reply     [4, sequence, n_rows, compute_us]     y float32 [n_rows, n_out] raw
    Failure   [5, sequence, error]                  a typed error instead of rows

Row r of a dispatch asks for expert experts[r] applied to x[tokens[r]]; row r of the reply is its result. With partial
sums row t of the reply is instead the sum over token t's rows of weights[r] times their results, in F32, in the order
in which the dispatch names them (scheduler/combine.py); tokens then never descend and each has a row. A probe is an
ordinary dispatch. A receiver trusts nothing: sizes must match the header exactly, ids must be held, pairs unique,
values finite, and the product of rows and width can be judged before the payload is read (`check_dispatch`,
`check_answer`).
A dispatch takes 4 * n_in * n_tokens + 4 * n_rows bytes, 4 * n_rows more with weights, and at most 60 for header and
lengths; a reply's are at most 29.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.manifest import LayerExperts
from capabilities.errors import PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.wire import F32, Q8_0, Fields, Frame, Header, bounded_error, decode_rows, encode_frame, row_bytes

PROTOCOL: Final = "/swarmnode/experts/1"

DISPATCH: Final = 1
BEGIN: Final = 2
END: Final = 3
REPLY: Final = 4
FAILURE: Final = 5

F32_ACCUMULATION: Final = 1
"""Flag bit 0: the leader asks the kernels to accumulate in F32 (output ranks)."""

PARTIAL_SUMS: Final = 2
"""Flag bit 1: the worker weights and adds its rows, and answers one row a token. Other bits must be zero."""

_COUNTER_MAX: Final = 2**64 - 1
_REQUEST_ID: Final = re.compile(rf"[0-9A-Za-z_.:-]{{1,{limits.REQUEST_ID_CHARS_MAX}}}", re.ASCII)

Activations = NDArray[np.float32] | NDArray[np.uint8]
"""float32 [n_tokens, n_in], or uint8 [n_tokens, n_in / 32 * 34] for Q8_0."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldLayer:
    """What a worker needs to judge a dispatch: the layer's widths and which of its experts it holds."""

    n_in: int
    n_out: int
    held: NDArray[np.bool_]
    """bool [n_expert]"""

    @staticmethod
    def of(layer: LayerExperts, experts: Iterable[int]) -> HeldLayer:
        """`experts` are the held ids, all below layer.n_expert."""
        held = np.zeros(layer.n_expert, np.bool_)
        held[list(experts)] = True
        return HeldLayer(layer.n_in, layer.n_out, held)


class DispatchHead(NamedTuple):
    """A dispatch's header, types and ranges checked, nothing else."""

    term: int
    epoch: int
    sequence: int
    layer: int
    n_tokens: int
    n_rows: int
    dtype: int
    flags: int


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """A dispatch that passed every check; the arrays are read-only views or copies, never larger than the frame."""

    head: DispatchHead
    x: Activations
    tokens: NDArray[np.int32]
    """int32 [n_rows], each in 0..n_tokens-1"""
    experts: NDArray[np.int32]
    """int32 [n_rows], each held; no pair (tokens[r], experts[r]) twice"""
    weights: NDArray[np.float32] | None = None
    """float32 [n_rows] where partial sums are wanted; then `tokens` never descend and name every token"""

    @property
    def f32_accumulation(self) -> bool:
        return bool(self.head.flags & F32_ACCUMULATION)


class Notice(NamedTuple):
    """A request begins (or, `begins` false, ends): for logs alone."""

    begins: bool
    term: int
    request_id: str


class Expected(NamedTuple):
    """What a leader waits for under one sequence number: a row for each expert row, or for each token in sums."""

    n_rows: int
    n_out: int


class Reply(NamedTuple):
    """A worker's rows: y float32 [n_rows, n_out], finite or not, one for each row asked for, or each token in sums."""

    sequence: int
    compute_us: int
    y: NDArray[np.float32]


class Failure(NamedTuple):
    """A worker's refusal of one dispatch."""

    sequence: int
    error: SwarmError


# --- Leader's side ----------------------------------------------------------------------------------------------------


def dispatch_rows_max(n_out: int) -> int:
    """The most rows that one dispatch may ask for when each has `n_out` floats, whether it comes back or is added."""
    return min(limits.DISPATCH_ROWS_MAX, limits.REPLY_PAYLOAD_BYTES_MAX // (4 * n_out))


def dispatch_tokens_max(n_in: int) -> int:
    """The most rows of `n_in` floats that one dispatch may carry, with any number of rows asked for and weighted."""
    room = limits.DISPATCH_PAYLOAD_BYTES_MAX - 8 * limits.DISPATCH_ROWS_MAX
    return min(limits.DISPATCH_TOKENS_MAX, room // (4 * n_in))


def encode_dispatch(
    *,
    term: int,
    epoch: int,
    sequence: int,
    layer: int,
    x: Activations,
    tokens: NDArray[np.int32],
    experts: NDArray[np.int32],
    weights: NDArray[np.float32] | None = None,
    f32_accumulation: bool = False,
) -> bytes:
    """A dispatch frame. x: C-contiguous, float32 [n_tokens, n_in] or Q8_0 as uint8 [n_tokens, bytes]; ids [n_rows].

    `weights`, float32 [n_rows], ask for partial sums.

    Raises ValueError beyond `dispatch_rows_max` and `dispatch_tokens_max`: the caller splits, a worker would refuse.
    """
    n_tokens, n_rows = len(x), len(experts)
    if not (0 < n_tokens <= limits.DISPATCH_TOKENS_MAX and 0 < n_rows <= limits.DISPATCH_ROWS_MAX):
        raise ValueError(f"a dispatch of {n_tokens} tokens and {n_rows} rows is empty or over the limits")
    dtype = Q8_0 if x.dtype == np.uint8 else F32
    header = [DISPATCH, term, epoch, sequence, layer, n_tokens, n_rows, dtype, int(f32_accumulation)]
    payload = [x, experts.astype("<u2")] if n_tokens == 1 else [x, tokens.astype("<u2"), experts.astype("<u2")]
    if weights is not None:
        header[-1] |= PARTIAL_SUMS
        payload.append(weights.astype("<f4"))
    return encode_frame(header, *payload)


def encode_notice(term: int, request_id: str, *, begins: bool) -> bytes:
    """A Begin or End frame. Raises ValueError for a request id that a worker would refuse."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise ValueError(f"{request_id!r} is no request id")
    return encode_frame([BEGIN if begins else END, term, request_id])


def check_answer(header: Header, payload_bytes: int, pending: Mapping[int, Expected]) -> tuple[int, int]:
    """(kind, sequence) of an answer that is awaited and has exactly the size that was asked for, else PeerMistake.

    Usable as read_frame's `check` (bind `pending`). A sequence stays in `pending` until its answer came, even when
    nobody wants it any more: a late answer is no mistake.
    """
    fields = Fields(header, "answer", list)
    kind = fields.integer(0, REPLY, FAILURE)
    sequence = fields.integer(1, 0, _COUNTER_MAX)
    expected = pending.get(sequence)
    if expected is None:
        raise PeerMistake(f"an answer to dispatch {sequence}, which is not open")
    if kind == FAILURE:
        expected_bytes = 0
    else:
        fields.integer(2, expected.n_rows, expected.n_rows)
        fields.integer(3, 0, limits.COMPUTE_US_MAX)
        expected_bytes = 4 * expected.n_rows * expected.n_out
    if payload_bytes != expected_bytes:
        raise PeerMistake(f"an answer to dispatch {sequence} has {payload_bytes} bytes instead of {expected_bytes}")
    return kind, sequence


def decode_answer(frame: Frame, pending: Mapping[int, Expected]) -> Reply | Failure:
    """A worker's answer, checked against what was sent, but for values that are not finite. Raises PeerMistake."""
    kind, sequence = check_answer(frame.header, len(frame.payload), pending)
    if kind == FAILURE:
        return Failure(sequence, Fields(frame.header, "failure", list).error(2))
    n_rows, n_out = pending[sequence]
    y: NDArray[Any] = decode_rows(frame.payload, F32, n_rows, n_out, finite=False)
    return Reply(sequence, frame.header[3], y)


# --- Worker's side ----------------------------------------------------------------------------------------------------


def request_head(header: Header) -> DispatchHead | Notice:
    """A request's header, types and ranges checked. Raises PeerMistake.

    The worker then fences by term and epoch, finds the HeldLayer that they name, and goes on with `decode_dispatch`.
    """
    fields = Fields(header, "request", list)
    kind = fields.integer(0, DISPATCH, END)
    if kind != DISPATCH:
        request_id = fields.text(2, limits.REQUEST_ID_CHARS_MAX)
        if not _REQUEST_ID.fullmatch(request_id):
            raise PeerMistake("a notice has no proper request id")
        return Notice(kind == BEGIN, fields.integer(1, 0, _COUNTER_MAX), request_id)
    return DispatchHead(
        fields.integer(1, 0, _COUNTER_MAX),
        fields.integer(2, 0, _COUNTER_MAX),
        fields.integer(3, 0, _COUNTER_MAX),
        fields.integer(4, 0, limits.LAYER_MAX),
        fields.integer(5, 1, limits.DISPATCH_TOKENS_MAX),
        fields.integer(6, 1, limits.DISPATCH_ROWS_MAX),
        fields.integer(7, F32, Q8_0),
        fields.integer(8, 0, F32_ACCUMULATION | PARTIAL_SUMS),
    )


def check_dispatch(head: DispatchHead, payload_bytes: int, layer: HeldLayer) -> None:
    """Raise PeerMistake unless the payload has exactly the size that the header implies and all rows fit a reply.

    For read_frame's `check`, so that a false size is refused before the payload is read.
    """
    if head.n_rows * layer.n_out * 4 > limits.REPLY_PAYLOAD_BYTES_MAX:
        raise PeerMistake(f"{head.n_rows} rows of {layer.n_out} floats do not fit a reply", layer=head.layer)
    ids_bytes = (2 if head.n_tokens == 1 else 4) * head.n_rows
    expected = head.n_tokens * row_bytes(head.dtype, layer.n_in) + ids_bytes
    if head.flags & PARTIAL_SUMS:
        expected += 4 * head.n_rows
    if payload_bytes != expected:
        raise PeerMistake(f"a dispatch has {payload_bytes} bytes of payload instead of {expected}", layer=head.layer)


def decode_dispatch(head: DispatchHead, payload: bytes | memoryview, layer: HeldLayer) -> Dispatch:
    """A dispatch to experts of `layer` that may be computed as it is. Raises PeerMistake for anything wrong with it."""
    check_dispatch(head, len(payload), layer)
    x: NDArray[Any] = decode_rows(payload, head.dtype, head.n_tokens, layer.n_in)
    n_rows = head.n_rows
    if head.n_tokens == 1:
        experts = np.frombuffer(payload, "<u2", n_rows, x.nbytes).astype(np.int32)
        tokens = np.zeros(n_rows, np.int32)
        # A decode step names a few experts, which are looked at one by one sooner than NumPy has begun.
        named = experts.tolist()
        if len(set(named)) < n_rows or max(named) >= len(layer.held) or not all(map(layer.held.item, named)):
            _check_ids(head, tokens, experts, layer)
    else:
        ids = np.frombuffer(payload, "<u2", 2 * n_rows, x.nbytes).astype(np.int32)
        tokens, experts = ids[:n_rows], ids[n_rows:]
        _check_ids(head, tokens, experts, layer)
    if head.flags & PARTIAL_SUMS:
        return Dispatch(head, x, tokens, experts, _weights(head, payload, tokens))
    return Dispatch(head, x, tokens, experts)


def _check_ids(
    head: DispatchHead, tokens: NDArray[np.int32], experts: NDArray[np.int32], layer: HeldLayer
) -> None:
    """Raise PeerMistake unless every row, [n_rows], names a token that is there and another expert that is held."""
    if int(tokens.max()) >= head.n_tokens:
        raise PeerMistake(f"a dispatch of {head.n_tokens} tokens names token {tokens.max()}", layer=head.layer)
    n_expert = len(layer.held)
    if int(experts.max()) >= n_expert:
        raise PeerMistake(f"a dispatch names expert {experts.max()} of {n_expert}", layer=head.layer)
    held = layer.held[experts]
    if not held.all():
        missing = np.unique(experts[~held])[: limits.ERROR_EXPERTS_MAX].tolist()
        raise PeerMistake("a dispatch names experts that are not held here", layer=head.layer, experts=missing)
    pairs = tokens * n_expert + experts  # at most 4,096 * 65,536: int32 is enough
    pairs.sort()
    if (pairs[1:] == pairs[:-1]).any():
        raise PeerMistake("a dispatch names the same expert twice for one token", layer=head.layer)


def _weights(head: DispatchHead, payload: bytes | memoryview, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The weights at the end of a payload of the right size, float32 [n_rows]. PeerMistake unless they can be used."""
    weights = np.frombuffer(payload, "<f4", head.n_rows, len(payload) - 4 * head.n_rows).astype(np.float32)
    if not np.isfinite(weights).all():
        raise PeerMistake("a dispatch has weights that are not finite", layer=head.layer)
    # Each token's rows stand together, and none is without: the answer has a row for each.
    steps = np.diff(tokens, prepend=np.int32(-1), append=np.int32(head.n_tokens))
    if steps[0] != 1 or steps[-1] != 1 or ((steps[1:-1] != 0) & (steps[1:-1] != 1)).any():
        raise PeerMistake("a dispatch for partial sums leaves tokens out, or out of order", layer=head.layer)
    return weights


def encode_reply(sequence: int, compute_us: int, y: NDArray[np.float32]) -> bytes:
    """A Reply frame. y: C-contiguous float32 [n_rows, n_out]; compute_us: time in the kernels, capped at 2^32-1."""
    return encode_frame([REPLY, sequence, len(y), min(compute_us, limits.COMPUTE_US_MAX)], y)


def encode_failure(sequence: int, error: SwarmError) -> bytes:
    """A Failure frame; the error is cut to what a header takes."""
    return encode_frame([FAILURE, sequence, bounded_error(error)])
