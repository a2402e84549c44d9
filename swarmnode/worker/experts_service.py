"""The worker's side of /swarmnode/experts/1: check a dispatch, compute it, answer.

Each dispatch is fenced: it is computed only for the leader of the newest certified term, as the LeaderView knows it at
that moment. A leader of the past is told which term is newer, and its stream ends.

Small dispatches are computed on the event loop: handing one to a thread costs more than a decode step's kernels. Larger
ones go to a thread, so that pings are answered meanwhile. One computation runs at a time, for two would only share the
cores. A dispatch that breaks the protocol gets a typed failure and is counted; bytes that are no frame end the stream.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from backends.activations import dequantize_q8_0
from backends.experts import F32
from capabilities.errors import Internal, PeerMistake, SwarmError
from scheduler.combine import weighted_sums
from swarmnode import limits
from swarmnode.expert_messages import (
    PROTOCOL,
    Dispatch,
    DispatchHead,
    Notice,
    check_dispatch,
    decode_dispatch,
    encode_failure,
    encode_reply,
    request_head,
)
from swarmnode.leadership import LeaderView
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream, StreamClosed
from swarmnode.wire import Q8_0, Frame, Header, Later, serve_frames
from swarmnode.worker.epochs import Epochs, ExpertSet

_log = structlog.get_logger(__name__)

U8 = NDArray[np.uint8]

INLINE_SECONDS_MAX: Final = 0.010  # a computation expected to be shorter runs on the event loop
_RATE_SMOOTHING: Final = 0.1
REQUESTS_LOGGED_MAX: Final = 256


@dataclass
class ExpertsStatistics:
    """Counters since the start; `rows_per_s` is smoothed over recent dispatches, 0 before the first."""

    dispatches: int = 0
    rows: int = 0
    compute_us: int = 0
    refused: int = 0
    rows_per_s: float = 0.0
    last_refusal: str = ""


@dataclass
class _Running:
    """What one request took here so far, for the log at its end."""

    started: float
    dispatches: int = 0
    rows: int = 0


@dataclass
class ExpertsService:
    """Serves dispatches of whoever leads. `register` once on the network."""

    epochs: Epochs
    view: LeaderView
    cpu_share: float = 1.0
    """Of the time in which kernels may run: they rest after each dispatch for the remainder."""
    statistics: ExpertsStatistics = field(default_factory=ExpertsStatistics)
    _running: dict[str, _Running] = field(default_factory=dict)
    _rested_at: float = -math.inf

    def register(self, network: Network) -> None:
        network.serve(PROTOCOL, self.handle, max_streams_per_peer=limits.EXPERTS_STREAMS_PER_PEER_MAX)

    async def handle(self, stream: Stream) -> None:
        leader = self.view.leader
        if leader is not None and stream.peer != leader.peer:
            self._refuse(stream.peer, PeerMistake("only the swarm's leader may dispatch", peer=str(stream.peer)))
            await stream.reset()
            return
        take, check = partial(self._take, stream), partial(self._check_header, stream.peer)
        try:
            await serve_frames(stream, limits.EXPERTS_REQUEST, take, check)
        except StreamClosed:
            return
        except _FencedError as fenced:
            self._refuse(stream.peer, fenced.error)
            if isinstance(fenced.head, DispatchHead):
                await self._send(stream, encode_failure(fenced.head.sequence, fenced.error))
                await self._discard(stream, fenced.unread_bytes)
        except PeerMistake as error:  # the framing itself is broken: nothing after it can be trusted
            self._refuse(stream.peer, error)
            await stream.reset()
        except trio.TooSlowError:
            _log.warning("experts.reply_stuck", peer=stream.peer)
            await stream.reset()

    async def _discard(self, stream: Stream, count: int) -> None:
        """Take what the peer still sends: else the stream would end before it read why it is refused."""
        with trio.move_on_after(limits.SEND_SECONDS_MAX), contextlib.suppress(NetworkError):
            while count > 0:
                count -= len(await stream.receive_exactly(min(count, limits.EAGER_PAYLOAD_BYTES)))

    def _fenced_head(self, peer: PeerId, header: Header, unread_bytes: int = 0) -> DispatchHead | Notice:
        """What a frame asks for. Raises PeerMistake if it is none, _FencedError unless `peer` leads its term."""
        head = request_head(header)
        try:
            self.view.check(head.term, peer)
        except SwarmError as error:
            raise _FencedError(head, error, unread_bytes) from None
        return head

    def _check_header(self, peer: PeerId, header: Header, payload_bytes: int) -> None:
        """Refuse a large payload before it is read."""
        head = self._fenced_head(peer, header, payload_bytes)
        if isinstance(head, Notice):
            raise PeerMistake("a notice has no payload")
        held = self.epochs.find(head.term, head.epoch)
        layer = held.layers.get(head.layer) if held is not None else None
        if layer is not None:  # another epoch gets a typed failure, once its bytes are out of the way
            check_dispatch(head, payload_bytes, layer)

    def _take(self, stream: Stream, frame: Frame) -> Later | None:
        """Answer a short dispatch at once; what is left to do for any other is returned."""
        head = self._fenced_head(stream.peer, frame.header)
        if isinstance(head, Notice):
            self._notice(head)
            return None
        if self.epochs.computing.locked() or not self._is_short(head):
            return partial(self._answer_later, stream, head, frame)
        try:
            held, dispatch = self._prepare(head, frame)
            started = time.perf_counter()
            answer = self._reply(head, _compute(held, dispatch), started)
        except Exception as error:
            answer = self._failure(stream.peer, head, error)
        if stream.send_nowait(answer):
            return None
        return partial(self._send, stream, answer)

    def _is_short(self, head: DispatchHead) -> bool:
        if self.cpu_share < 1:
            return False  # it may have to rest first
        held = self.epochs.find(head.term, head.epoch)
        if held is not None and getattr(held.backend, "waits_for_process", False):
            return False  # a call to another process takes as long as that likes
        rate = self.statistics.rows_per_s
        return rate > 0 and head.n_rows / rate < INLINE_SECONDS_MAX

    async def _answer_later(self, stream: Stream, head: DispatchHead, frame: Frame) -> None:
        try:
            held, dispatch = self._prepare(head, frame)
            async with self.epochs.computing:
                await trio.sleep_until(self._rested_at)
                if not self.epochs.holds(held):
                    reason = f"epoch {head.term}.{head.epoch} ended while the dispatch waited"
                    raise PeerMistake(reason, layer=head.layer)
                started = time.perf_counter()
                y = await trio.to_thread.run_sync(_compute, held, dispatch)
                worked = time.perf_counter() - started
                self._rested_at = trio.current_time() + worked * (1 / self.cpu_share - 1)
            answer = self._reply(head, y, started)
        except Exception as error:
            answer = self._failure(stream.peer, head, error)
        await self._send(stream, answer)

    async def _send(self, stream: Stream, answer: bytes) -> None:
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(answer)

    def _prepare(self, head: DispatchHead, frame: Frame) -> tuple[ExpertSet, Dispatch]:
        """Check a dispatch. Raises PeerMistake."""
        held, layer = self.epochs.layer_of(head)
        return held, decode_dispatch(head, frame.payload, layer)

    def _reply(self, head: DispatchHead, y: F32, started: float) -> bytes:
        compute_us = int((time.perf_counter() - started) * 1e6)
        self._count(head, compute_us)
        return encode_reply(head.sequence, compute_us, y)

    def _failure(self, peer: PeerId, head: DispatchHead, error: Exception) -> bytes:
        if isinstance(error, PeerMistake):
            self._refuse(peer, error)
        if isinstance(error, SwarmError):
            return encode_failure(head.sequence, error)
        _log.exception("experts.failed", layer=head.layer, exc_info=error)
        return encode_failure(head.sequence, Internal("the worker could not compute; its log has the details"))

    def _count(self, head: DispatchHead, compute_us: int) -> None:
        s = self.statistics
        s.dispatches += 1
        s.rows += head.n_rows
        s.compute_us += compute_us
        rate = head.n_rows / max(compute_us * 1e-6, 1e-6)
        s.rows_per_s = rate if not s.rows_per_s else s.rows_per_s + _RATE_SMOOTHING * (rate - s.rows_per_s)
        for running in self._running.values():
            running.dispatches += 1
            running.rows += head.n_rows

    def _refuse(self, peer: PeerId, error: SwarmError) -> None:
        self.statistics.refused += 1
        self.statistics.last_refusal = error.message
        _log.warning("experts.refused", peer=peer, requests=list(self._running), error=error.message)

    def _notice(self, notice: Notice) -> None:
        if notice.begins:
            if len(self._running) >= REQUESTS_LOGGED_MAX:
                self._running.pop(next(iter(self._running)))
            self._running[notice.request_id] = _Running(time.monotonic())
            _log.info("request.begin", request_id=notice.request_id, role="worker")
        elif (running := self._running.pop(notice.request_id, None)) is not None:
            _log.info(
                "request.end",
                request_id=notice.request_id,
                role="worker",
                dispatches=running.dispatches,
                rows=running.rows,
                seconds=round(time.monotonic() - running.started, 3),
            )


class _FencedError(Exception):
    """A frame of a peer that does not lead its term: the last that is read. `unread_bytes` of it are on their way."""

    def __init__(self, head: DispatchHead | Notice, error: SwarmError, unread_bytes: int) -> None:
        super().__init__(error.message)
        self.head = head
        self.error = error
        self.unread_bytes = unread_bytes


def _compute(held: ExpertSet, dispatch: Dispatch) -> F32:
    """Rows [n_rows, n_out], or sums [n_tokens, n_out], of a checked dispatch. Blocks while the kernels run."""
    head = dispatch.head
    x = dequantize_q8_0(cast(U8, dispatch.x)) if head.dtype == Q8_0 else cast(F32, dispatch.x)
    y = held.backend.compute(head.layer, x, dispatch.tokens, dispatch.experts, ask_f32=dispatch.f32_accumulation)
    return y if dispatch.weights is None else weighted_sums(y, dispatch.weights, dispatch.tokens)
