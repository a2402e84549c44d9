"""Keeps this peer a worker of its leader: dial, say hello, obey assignments, come back after every break.

The worker dials out, so it needs no open port. What it holds stays in memory while the leader is away: a leader that
comes back, or a new term with the same share, costs a probe and no loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from capabilities.errors import Internal, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.member_messages import (
    PROTOCOL,
    Assign,
    Begin,
    Hello,
    Phase,
    Progress,
    Refuse,
    decode_from_leader,
    encode,
)
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.pinger import PeerWatch
from swarmnode.wire import read_frame
from swarmnode.worker.epochs import Epochs, ExpertSet
from swarmnode.worker.loader import Loader

_log = structlog.get_logger(__name__)

RETRY_S_MIN: Final = 0.5
RETRY_S_MAX: Final = 2.0  # a leader that restarts has its workers back within two seconds
STABLE_S: Final = 10.0  # a membership that lasted this long resets the retry interval
PROGRESS_INTERVAL_S: Final = 0.5
DIAL_SECONDS_MAX: Final = 10.0


@dataclass
class MemberState:
    """What this worker knows of its own membership, for `status`."""

    connected: bool = False
    reason: str = "it has not dialed its leader yet"
    phase: Phase | None = None
    done: int = 0
    total: int = 0
    error: SwarmError | None = None


class Membership:
    """One worker's side of /swarmnode/member/1. `run` never ends by itself."""

    def __init__(
        self,
        network: Network,
        watch: PeerWatch,
        leader: PeerId,
        address: str,
        hello: Callable[[], Hello],
        epochs: Epochs,
        loader: Loader,
    ) -> None:
        self.state = MemberState()
        self._network = network
        self._watch = watch
        self._leader = leader
        self._address = address
        self._hello = hello
        self._epochs = epochs
        self._loader = loader
        self._loading: trio.CancelScope | None = None
        self._assigned: Assign | None = None
        self._phase_changed = trio.Event()
        self._told: Progress | None = None  # what the leader heard of its latest assignment
        self._retry_s = RETRY_S_MIN

    async def run(self) -> None:
        while True:
            started = time.monotonic()
            reason = await self._one_membership()
            if reason != self.state.reason or self.state.connected:
                _log.warning("member.lost", leader=self._leader, reason=reason)
            self.state.connected, self.state.reason = False, reason
            self._retry_s = (
                RETRY_S_MIN if time.monotonic() - started > STABLE_S else min(self._retry_s * 1.5, RETRY_S_MAX)
            )
            await trio.sleep(self._retry_s)

    async def _one_membership(self) -> str:
        """Be a member until something breaks; returns what did."""
        reason = "the leader closed the connection"
        try:
            with trio.fail_after(DIAL_SECONDS_MAX):
                await self._network.connect(self._address)
            with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
                stream = await self._network.open_stream(self._leader, PROTOCOL)
            await self._serve(stream)
        except* NetworkError as errors:
            reason = str(errors.exceptions[0])
        except* trio.TooSlowError:
            reason = "the leader does not answer"
        except* PeerMistake as errors:
            reason = f"the leader broke the protocol: {errors.exceptions[0]}"
        except* _RefusedError as errors:
            reason = str(errors.exceptions[0])
        finally:
            self._watch.unwatch(self._leader)
        return reason

    async def _serve(self, stream: Stream) -> None:
        self._watch.watch(self._leader)
        try:
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(encode(self._hello()))
            self.state.connected, self.state.reason = True, ""
            _log.info("member.joined", leader=self._leader)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report, stream)
                while True:
                    message = decode_from_leader(await read_frame(stream, limits.MEMBER_FRAME))
                    match message:
                        case Assign():
                            self._cancel_loading()
                            self._loading = trio.CancelScope()
                            nursery.start_soon(self._prepare, message, self._loading)
                        case Begin():
                            await self._epochs.begin(message.term, message.epoch)
                        case Refuse():
                            raise _RefusedError(message.error.message)
        finally:
            self._cancel_loading()
            await stream.reset()

    def _cancel_loading(self) -> None:
        self._assigned = None
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None

    async def _prepare(self, assign: Assign, scope: trio.CancelScope) -> None:
        """Fetch and load what an assignment names; `_report` tells the leader."""
        with scope:
            self._set_phase("fetching")
            self._assigned, self._told = assign, None
            try:
                held = self._epochs.adopt(assign.term, assign.epoch, assign.manifest, assign.held)
                if held is None:
                    await self._loader.load(assign, self._set_progress)
                self._set_phase("loaded")
                _log.info("member.loaded", term=assign.term, epoch=assign.epoch, adopted=held is not None)
            except SwarmError as error:
                _log.warning("member.load_failed", epoch=assign.epoch, error=error.to_json())
                self._set_phase("failed", error)
            except Exception as error:  # the disk, the backend, or a share that nobody thought of: the leader must know
                _log.exception("member.load_failed")
                self._set_phase("failed", Internal(f"the worker could not load its experts: {error}"))
            self._phase_changed.set()

    async def _report(self, stream: Stream) -> None:
        """Tell the leader of every change of phase at once, and of progress twice a second. The stream's one writer."""
        while True:
            self._phase_changed = trio.Event()
            progress = None if self._assigned is None else self._progress(self._assigned)
            if progress is not None and progress != self._told:
                self._told = progress
                with trio.fail_after(limits.SEND_SECONDS_MAX):
                    await stream.send(encode(progress))
            with trio.move_on_after(PROGRESS_INTERVAL_S):
                await self._phase_changed.wait()

    def _set_phase(self, phase: Phase, error: SwarmError | None = None) -> None:
        self.state.phase, self.state.error = phase, error

    def _set_progress(self, phase: Phase, done: int, total: int) -> None:
        self.state.phase, self.state.done, self.state.total = phase, done, total

    def _progress(self, assign: Assign) -> Progress:
        s = self.state
        held: ExpertSet | None = self._epochs.find(assign.term, assign.epoch)
        used = held.bytes_held if held is not None else 0
        return Progress(assign.term, assign.epoch, s.phase or "fetching", s.done, s.total, used, s.error)


class _RefusedError(Exception):
    """The leader refused this worker."""
