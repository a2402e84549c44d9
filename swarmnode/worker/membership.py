"""Keeps this peer a worker of one leader: reach it, say hello, obey assignments, come back after every break.

The worker dials out, so it needs no open port. What it holds stays in memory while the leader is away: a leader that
comes back, or a new one with the same share, costs a probe and no loading. Whose worker it is, and for how long, is
decided in service.py; each assignment is checked all the same, for a leader of the past may not know yet that it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from capabilities.errors import Internal, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.leadership import KnownLeader, LeaderView
from swarmnode.member_messages import (
    PROTOCOL,
    Arithmetic,
    Assign,
    Begin,
    Hello,
    Phase,
    Policy,
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
IDLE_LOOK_S: Final = 2.0  # how late it is told what was measured anew, while nothing is fetched or loaded
DIAL_SECONDS_MAX: Final = 10.0


@dataclass
class MemberState:
    """What this worker knows of its own membership, for `status`."""

    connected: bool = False
    reason: str = "it has not heard of a leader yet"
    phase: Phase | None = None
    done: int = 0
    total: int = 0
    error: SwarmError | None = None


class Membership:
    """One worker's side of /swarmnode/member/1."""

    def __init__(
        self,
        network: Network,
        watch: PeerWatch,
        view: LeaderView,
        hello: Callable[[], Hello],
        epochs: Epochs,
        loader: Loader,
    ) -> None:
        self.state = MemberState()
        self._network = network
        self._watch = watch
        self._view = view
        self._hello = hello
        self._epochs = epochs
        self._loader = loader
        self._loading: trio.CancelScope | None = None
        self._assigned: Assign | None = None
        self._news = trio.Event()  # for the leader: another phase, another policy
        self._told: Progress | None = None  # what the leader heard of its latest assignment
        self._draining = False
        self._connection_up = trio.Event()
        network.on_connection(self._connection_changed)

    def set_draining(self, draining: bool) -> None:
        """Whether this worker wants to hold nothing more. This leader and every later one is told."""
        self._draining = draining
        self._news.set()

    async def run(self, leader: KnownLeader) -> None:
        """Be a worker of this leader until cancelled."""
        retry_s = RETRY_S_MIN
        self.state.reason = "it has not reached this leader yet"
        try:
            while True:
                started = time.monotonic()
                reason = await self._one_membership(leader)
                if reason != self.state.reason or self.state.connected:
                    _log.warning("member.lost", leader=leader.peer, term=leader.term, reason=reason)
                self.state.connected, self.state.reason = False, reason
                lasted = time.monotonic() - started > STABLE_S
                retry_s = RETRY_S_MIN if lasted else min(retry_s * 1.5, RETRY_S_MAX)
                await trio.sleep(retry_s)
        finally:
            self.state.connected = False

    async def _one_membership(self, leader: KnownLeader) -> str:
        """Be a member until something breaks; returns what did."""
        reason = "the leader closed the connection"
        try:
            with trio.fail_after(DIAL_SECONDS_MAX):
                await self._reach(leader)
            with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
                stream = await self._network.open_stream(leader.peer, PROTOCOL)
            await self._serve(stream, leader)
        except* NetworkError as errors:
            reason = str(errors.exceptions[0])
        except* trio.TooSlowError:
            reason = "the leader does not answer"
        except* PeerMistake as errors:
            reason = f"the leader broke the protocol: {errors.exceptions[0]}"
        except* (_RefusedError, SwarmError) as errors:
            reason = str(errors.exceptions[0])
        finally:
            self._watch.unwatch(leader.peer)
        return reason

    async def _reach(self, leader: KnownLeader) -> None:
        """Have a connection to the leader: dial it, or wait for whoever else does."""
        if leader.address:
            await self._network.connect(leader.address)
            return
        while leader.peer != self._network.peer_id and leader.peer not in self._network.connected_peers():
            self._connection_up = trio.Event()
            await self._connection_up.wait()

    def _connection_changed(self, _: PeerId, up: bool) -> None:
        if up:
            self._connection_up.set()

    async def _serve(self, stream: Stream, leader: KnownLeader) -> None:
        self._watch.watch(leader.peer)
        try:
            hello = replace(self._hello(), holding=self._epochs.names())
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(encode(hello))
            self.state.connected, self.state.reason = True, ""
            _log.info("member.joined", leader=leader.peer, term=leader.term)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report, stream, _arithmetic(hello))
                while True:
                    message = decode_from_leader(await read_frame(stream, limits.MEMBER_FRAME))
                    if not isinstance(message, Refuse):
                        self._view.check(message.term, leader.peer)
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
            self._news.set()
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
            self._news.set()

    async def _report(self, stream: Stream, told: Arithmetic) -> None:
        """Tell the leader of every change of phase at once, and of progress twice a second. The stream's one writer."""
        told_draining = False
        while True:
            self._news = trio.Event()
            if self._draining is not told_draining:
                told_draining = self._draining
                with trio.fail_after(limits.SEND_SECONDS_MAX):
                    await stream.send(encode(Policy(told_draining)))
            if (now := _arithmetic(self._hello())) != told:
                told = now
                with trio.fail_after(limits.SEND_SECONDS_MAX):
                    await stream.send(encode(told))
            progress = None if self._assigned is None else self._progress(self._assigned)
            if progress is not None and progress != self._told:
                self._told = progress
                with trio.fail_after(limits.SEND_SECONDS_MAX):
                    await stream.send(encode(progress))
            busy = told.measuring or self.state.phase in ("fetching", "loading")
            with trio.move_on_after(PROGRESS_INTERVAL_S if busy else IDLE_LOOK_S):
                await self._news.wait()

    def _set_phase(self, phase: Phase, error: SwarmError | None = None) -> None:
        self.state.phase, self.state.error = phase, error

    def _set_progress(self, phase: Phase, done: int, total: int) -> None:
        self.state.phase, self.state.done, self.state.total = phase, done, total

    def _progress(self, assign: Assign) -> Progress:
        s = self.state
        held: ExpertSet | None = self._epochs.find(assign.term, assign.epoch)
        used = held.bytes_held if held is not None else 0
        return Progress(assign.term, assign.epoch, s.phase or "fetching", s.done, s.total, used, s.error)


def _arithmetic(hello: Hello) -> Arithmetic:
    return Arithmetic(hello.numeric_class, hello.accumulates_f32, hello.measuring)


class _RefusedError(Exception):
    """The leader refused this worker."""
