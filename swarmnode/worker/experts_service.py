"""The worker's side of /swarmnode/experts/1: check a dispatch, compute it, answer.

Small dispatches are computed on the event loop: handing one to a thread costs more than a decode step's kernels. Larger
ones go to a thread, so that pings are answered meanwhile. One computation runs at a time, for two would only share the
cores. A dispatch that breaks the protocol gets a typed failure and is counted; bytes that are no frame end the stream.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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
from swarmnode.net.interface import Network, PeerId, Stream, StreamClosed
from swarmnode.wire import Q8_0, Frame, Header, read_frame
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
    """Serves dispatches of `leader` alone. `register` once on the network."""

    epochs: Epochs
    leader: PeerId
    statistics: ExpertsStatistics = field(default_factory=ExpertsStatistics)
    _running: dict[str, _Running] = field(default_factory=dict)

    def register(self, network: Network) -> None:
        network.serve(PROTOCOL, self.handle, max_streams_per_peer=limits.EXPERTS_STREAMS_PER_PEER_MAX)

    async def handle(self, stream: Stream) -> None:
        if stream.peer != self.leader:
            self._refuse(stream.peer, PeerMistake("only the swarm's leader may dispatch", peer=str(stream.peer)))
            await stream.reset()
            return
        try:
            while True:
                frame = await read_frame(stream, limits.EXPERTS_REQUEST, self._check_header)
                answer = await self._answer(frame)
                if answer is not None and not stream.send_nowait(answer):
                    with trio.fail_after(limits.SEND_SECONDS_MAX):
                        await stream.send(answer)
        except StreamClosed:
            return
        except PeerMistake as error:  # the framing itself is broken: nothing after it can be trusted
            self._refuse(stream.peer, error)
            await stream.reset()
        except trio.TooSlowError:
            _log.warning("experts.reply_stuck", peer=stream.peer)
            await stream.reset()

    def _check_header(self, header: Header, payload_bytes: int) -> None:
        """Refuse a large payload before it is read."""
        head = request_head(header)
        if isinstance(head, Notice):
            raise PeerMistake("a notice has no payload")
        held = self.epochs.find(head.term, head.epoch)
        layer = held.layers.get(head.layer) if held is not None else None
        if layer is not None:  # another epoch gets a typed failure, once its bytes are out of the way
            check_dispatch(head, payload_bytes, layer)

    async def _answer(self, frame: Frame) -> bytes | None:
        head = request_head(frame.header)
        if isinstance(head, Notice):
            self._notice(head)
            return None
        try:
            held, layer = self.epochs.layer_of(head)
            dispatch = decode_dispatch(head, frame.payload, layer)
            y, compute_us = await self._compute(held, dispatch)
        except PeerMistake as error:
            self._refuse(self.leader, error)
            return encode_failure(head.sequence, error)
        except SwarmError as error:
            return encode_failure(head.sequence, error)
        except Exception:
            _log.exception("experts.failed", layer=head.layer)
            return encode_failure(head.sequence, Internal("the worker could not compute; its log has the details"))
        self._count(head, compute_us)
        return encode_reply(head.sequence, compute_us, y)

    async def _compute(self, held: ExpertSet, dispatch: Dispatch) -> tuple[F32, int]:
        """The experts' rows [n_rows, n_out] or sums [n_tokens, n_out], and the time that they took, in microseconds."""
        head = dispatch.head

        def run() -> F32:
            x = dequantize_q8_0(cast(U8, dispatch.x)) if head.dtype == Q8_0 else cast(F32, dispatch.x)
            y = held.backend.compute(
                head.layer, x, dispatch.tokens, dispatch.experts, ask_f32=dispatch.f32_accumulation
            )
            return y if dispatch.weights is None else weighted_sums(y, dispatch.weights, dispatch.tokens)

        rate = self.statistics.rows_per_s
        async with self.epochs.computing:
            if not self.epochs.holds(held):
                raise PeerMistake(f"epoch {head.term}.{head.epoch} ended while the dispatch waited", layer=head.layer)
            started = time.perf_counter()
            if rate and head.n_rows / rate < INLINE_SECONDS_MAX:
                y = run()
            else:
                y = await trio.to_thread.run_sync(run)
            return y, int((time.perf_counter() - started) * 1e6)

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

    def _refuse(self, peer: PeerId, error: PeerMistake) -> None:
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
