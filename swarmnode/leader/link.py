"""One worker's experts stream, as the leader sees it: numbered dispatches out, checked answers back.

The link lives as long as its peer does what it is asked. Whatever ends it (the peer left, fell silent, refused, broke
the protocol) fails every dispatch that is open, at once: nobody waits for a deadline to learn of a dead peer. A peer
that failed once gets a new link, and must prove itself over it, before it gets work again. An answer with values that
are not finite fails that dispatch alone, for somebody else to compute: half-precision sums overflow now and then. Where
it is more than one in nine for long, the link fails, too.
Everything here is on the event loop; answers come back through a callback of each dispatch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
import trio

from backends.experts import F32, I32
from capabilities.errors import ExpertsUnavailable, PeerMistake, SwarmError
from scheduler.dispatch import RowRate
from swarmnode import limits
from swarmnode.expert_messages import (
    PROTOCOL,
    Activations,
    Expected,
    Failure,
    Reply,
    check_answer,
    decode_answer,
    encode_dispatch,
)
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.wire import Frame, serve_frames

_log = structlog.get_logger(__name__)

OUTBOX_MAX: Final = 256  # frames that wait for the stream: a few layers of a few requests, far below this
NOT_FINITE_MAX: Final = 4.0  # answers in a row; each other one takes back an eighth of one
_TAKEN_BACK: Final = 1 / 8
REPLY_OVERHEAD_BYTES: Final = 29  # lengths and header of a reply, at most (expert_messages.py)

NOT_FINITE: Final = "not_finite"
"""The cause of a failure that ends no link."""

Answer = F32 | SwarmError
OnAnswer = Callable[[Answer], None]


@dataclass
class LinkStatistics:
    """Counters of one link. Bytes are those of frames, before encryption."""

    dispatches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    compute_us: int = 0
    round_trip_us: int = 0
    failures: int = 0
    not_finite: int = 0


@dataclass(slots=True)
class _Open:
    layer: int
    experts: tuple[int, ...]
    rows: int
    sent: float
    on_answer: OnAnswer


class PeerLink:
    """Dispatches to one peer."""

    def __init__(self, peer: PeerId, name: str) -> None:
        self.peer = peer
        self.name = name
        self.statistics = LinkStatistics()
        self.rate = RowRate()
        self.closed: SwarmError | None = None
        self._cause = self._reason = ""
        self._not_finite = 0.0
        self._expected: dict[int, Expected] = {}
        self._open: dict[int, _Open] = {}
        self._sequences = itertools.count(1)
        self._lock = threading.Lock()  # `_open` is filled by whoever sends, and emptied by the network's thread
        self._token = trio.lowlevel.current_trio_token()
        self._stream: Stream | None = None
        self._outbox, self._to_send = trio.open_memory_channel[bytes](OUTBOX_MAX)
        self._up = trio.Event()
        self._scope = trio.CancelScope()

    async def run(self, network: Network) -> None:
        """Open the stream and serve it until it ends; then `closed` says why. Never raises but for cancellation."""
        try:
            with self._scope:
                with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
                    stream = self._stream = await network.open_stream(self.peer, PROTOCOL)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream)
                    self._up.set()
                    await self._read(stream)
        except* trio.TooSlowError:  # before what follows from it: a frame that was cut off resets its stream
            self.fail("timeout", "it takes no data")
        except* NetworkError as errors:
            self.fail("disconnected", str(errors.exceptions[0]) or "the connection broke")
        except* PeerMistake as errors:
            _log.warning("link.peer_mistake", peer=self.peer, error=str(errors.exceptions[0]))
            self.fail("bad_reply", str(errors.exceptions[0]))
        finally:
            self.fail("disconnected", "the link was closed")
            if self._stream is not None:
                await self._stream.reset()

    async def wait_up(self) -> bool:
        """Wait until the stream is open; False if it never will be."""
        await self._up.wait()
        return self.closed is None

    @property
    def kernel_rows_per_s(self) -> float | None:
        """Expert rows a second of its kernels alone, over this link's life; None before the first."""
        s = self.statistics
        return s.rows / (s.compute_us * 1e-6) if s.compute_us else None

    # -- dispatches ---------------------------------------------------------------------------------------------

    def send(
        self,
        *,
        term: int,
        epoch: int,
        layer: int,
        x: Activations,
        tokens: I32,
        experts: I32,
        n_out: int,
        ask_f32: bool,
        on_answer: OnAnswer,
        weights: F32 | None = None,
    ) -> None:
        """Send one dispatch, from any thread. `on_answer` is called once, on any thread.

        It gets rows [R, n_out], or by weights [R] sums [T, n_out], or an error.
        """
        named = tuple(sorted(set(experts.tolist())))
        sequence, rows = next(self._sequences), len(experts)
        frame = encode_dispatch(
            term=term,
            epoch=epoch,
            sequence=sequence,
            layer=layer,
            x=x,
            tokens=tokens,
            experts=experts,
            weights=weights,
            f32_accumulation=ask_f32,
        )
        with self._lock:
            closed = self.closed is not None
            if not closed:
                self._expected[sequence] = Expected(rows if weights is None else len(x), n_out)
                self._open[sequence] = _Open(layer, named, rows, time.perf_counter(), on_answer)
        if closed:
            on_answer(self._unavailable(layer, named))
            return
        s = self.statistics
        s.dispatches += 1
        s.rows += rows
        s.tokens += len(x)
        s.bytes_out += len(frame)
        waiting = self._outbox.statistics().current_buffer_used
        if waiting or self._stream is None or not self._stream.send_from_thread(frame):
            self._token.run_sync_soon(self.send_frame, frame)

    def send_frame(self, frame: bytes) -> None:
        """Send a frame, now or after those that wait; nothing happens on a link that is closed."""
        if self.closed is not None:
            return
        try:
            waiting = self._outbox.statistics().current_buffer_used
            if waiting or self._stream is None or not self._stream.send_nowait(frame):
                self._outbox.send_nowait(frame)
        except trio.WouldBlock:
            self.fail("timeout", f"{OUTBOX_MAX} frames wait for it")
        except NetworkError as error:
            self.fail("disconnected", str(error))

    def fail(self, cause: str, reason: str) -> None:
        """Close the link: open dispatches fail now, later ones at once. The first reason stays."""
        with self._lock:
            if self.closed is None:
                self._cause, self._reason = cause, reason
                self.closed = ExpertsUnavailable(
                    f"peer {self.name} is gone: {reason}", peer=str(self.peer), cause=cause
                )
            opened, self._open = self._open, {}
        self._up.set()
        self._scope.cancel()
        for dispatch in opened.values():
            self.statistics.failures += 1
            dispatch.on_answer(self._unavailable(dispatch.layer, dispatch.experts))

    def _unavailable(self, layer: int, experts: tuple[int, ...]) -> ExpertsUnavailable:
        return self._error(layer, experts, self._cause, self._reason)

    def _error(self, layer: int, experts: tuple[int, ...], cause: str, reason: str) -> ExpertsUnavailable:
        numbers = ", ".join(map(str, experts))
        return ExpertsUnavailable(
            f"experts {numbers} of layer {layer} are unavailable: peer {self.name} {_SAY.get(cause, 'failed')}"
            f" ({reason})",
            layer=layer,
            experts=list(experts),
            peer=str(self.peer),
            cause=cause,
        )

    # -- tasks --------------------------------------------------------------------------------------------------

    async def _write(self, stream: Stream) -> None:
        async for frame in self._to_send:
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(frame)

    async def _read(self, stream: Stream) -> None:
        def check(header: object, payload_bytes: int) -> None:
            check_answer(header, payload_bytes, self._expected)

        def take(frame: Frame) -> None:
            self._take(decode_answer(frame, self._expected), len(frame.payload))

        await serve_frames(stream, limits.EXPERTS_REPLY, take, check)

    def _take(self, answer: Reply | Failure, payload_bytes: int) -> None:
        if isinstance(answer, Failure):
            self.fail("refused", answer.error.message)
            return
        self._expected.pop(answer.sequence)
        dispatch = self._open.pop(answer.sequence, None)
        if dispatch is None:  # the link failed in the same breath, and whoever waited has heard
            return
        elapsed = time.perf_counter() - dispatch.sent
        s = self.statistics
        s.bytes_back += payload_bytes + REPLY_OVERHEAD_BYTES
        s.round_trip_us += int(elapsed * 1e6)
        s.compute_us += answer.compute_us
        self.rate.observe(dispatch.rows, elapsed)
        if np.isfinite(answer.y).all():
            self._not_finite = max(0.0, self._not_finite - _TAKEN_BACK)
            dispatch.on_answer(answer.y)
            return
        s.not_finite += 1
        self._not_finite += 1
        dispatch.on_answer(self._error(dispatch.layer, dispatch.experts, NOT_FINITE, "NaN or infinite"))
        if self._not_finite >= NOT_FINITE_MAX:
            self.fail("bad_reply", "its answers have values that are not finite")


_SAY: Final = {
    "timeout": "did not answer in time",
    "suspended": "fell silent",
    "disconnected": "disconnected",
    "bad_reply": "broke the protocol",
    "refused": "refused a dispatch",
    NOT_FINITE: "answered values that are not finite",
}
