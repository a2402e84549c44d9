"""The judge in a process of its own: a socket pair, one answer at a time, a deadline for every word.

What a leader recomputes must cost its tokens nothing. A thread's Python would hold up the decode thread once a layer,
and a thread that is preempted behind everybody else would do so for milliseconds; a process of low priority takes what
processor time nobody wants. It starts when somebody new is to serve or the first answer waits, and ends when nothing is
to be judged for a while, with the memory that it took. If it dies or hangs it is ended, the answer counts as not
recomputed, and after a pause another one starts.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from backends.manifest import Manifest
from backends.variant_frames import HEAD_BYTES, Header, frame_sizes, pack_head, unpack_header
from capabilities.errors import KernelFailed, SwarmError
from swarmnode.leader.judge_frames import judged_of, sample_frame
from swarmnode.leader.probe import Obtain
from swarmnode.leader.recomputing import Judged, Sample
from swarmnode.net.interface import PeerId

START_S: Final = 60.0  # a third of a second of imports, on a machine that has other things to do
CALL_S: Final = 120.0  # thirty large experts from a slow disk, with what processor time is left over
PAUSE_S: Final = 10.0  # after one that failed: whatever ends it must not start one for every answer
_COMMAND: Final = (sys.executable, "-m", "swarmnode.leader.judge_child")
_ANSWER_BYTES_MAX: Final = 1 << 20  # 32 rows take a kilobyte


class JudgeProcess:
    """lies_at: the model's own file, or the expert cache's folder, into which `obtain` brings experts for a while."""

    def __init__(self, manifest: Manifest, lies_at: Path, obtain: Obtain, command: tuple[str, ...] = _COMMAND) -> None:
        self._manifest = manifest
        self._lies_at = lies_at
        self._obtain = obtain
        self._command = command
        self._running: _Running | None = None
        self._not_before_s = 0.0
        self.started = 0

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.process.pid

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Callable[[Sample], Awaitable[Judged]]]:
        """As judge.Judge's. Answers must come one after the other."""
        try:
            yield self._judge
        finally:
            await self.rest()

    async def prepare(self) -> None:
        """Start the process now. Whoever asks first hears what went wrong."""
        with contextlib.suppress(SwarmError):
            await self._started()

    async def rest(self) -> None:
        """End the process, if it runs."""
        running, self._running = self._running, None
        if running is not None:
            with trio.CancelScope(shield=True):  # it dies at once
                await running.end()

    async def _judge(self, sample: Sample) -> Judged:
        """Raises SwarmError: an expert cannot be had here, or the process failed."""
        running = await self._started()
        header, bodies = sample_frame(sample)
        reply, body = await self._call(running, header, bodies)
        while "needs" in reply:
            async with self._obtain(sample.layer, reply["needs"], PeerId(sample.peer)):
                reply, body = await self._call(running, {"op": "go on"}, [])
        return judged_of(reply, body)

    async def _started(self) -> _Running:
        if self._running is not None:
            return self._running
        if trio.current_time() < self._not_before_s:
            raise KernelFailed("the judge's process failed; another will be started")
        self.started += 1
        try:
            self._running = running = await _Running.start(self._command)
        except OSError as error:
            self._not_before_s = trio.current_time() + PAUSE_S
            raise KernelFailed(f"the judge's process cannot be started: {error}") from error
        opening = {"op": "open", "lies_at": str(self._lies_at)}
        try:
            await self._call(running, opening, [self._manifest.to_bytes()], START_S)
        except SwarmError:
            self._not_before_s = trio.current_time() + PAUSE_S
            await self.rest()
            raise
        return running

    async def _call(
        self, running: _Running, header: Header, bodies: list[bytes], seconds: float = CALL_S
    ) -> tuple[Header, bytes]:
        """A frame and its answer. Whatever ends an exchange in the middle ends the process, too."""
        reply: Header | None = None
        why = f"did not answer within {seconds:.0f} s"
        try:
            with trio.move_on_after(seconds):
                reply, body = await running.exchange(header, bodies)
        except (OSError, EOFError, trio.BrokenResourceError) as error:
            why = f"ended: {error}"
        except ValueError as error:
            why = f"speaks nonsense: {error}"
        finally:
            if reply is None:
                self._not_before_s = trio.current_time() + PAUSE_S
                await self.rest()
        if reply is None:
            raise KernelFailed(f"the judge's process {why}")
        if "error" in reply:
            raise SwarmError.from_json(reply["error"])
        return reply, body


class _Running:
    """One process from its start to its end."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self.process = process
        self._stream = stream

    @classmethod
    async def start(cls, command: tuple[str, ...]) -> _Running:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            process = await trio.lowlevel.open_process(
                [*command], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            on_failure.pop_all()
        ours.setblocking(False)
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    async def exchange(self, header: Header, bodies: list[bytes]) -> tuple[Header, bytes]:
        await self._stream.send_all(b"".join((pack_head(header, *bodies), *bodies)))
        header_bytes, body_bytes = frame_sizes(await self._exactly(HEAD_BYTES), _ANSWER_BYTES_MAX)
        return unpack_header(await self._exactly(header_bytes)), await self._exactly(body_bytes)

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            some = await self._stream.receive_some(count - len(data))
            if not some:
                raise EOFError("it has closed its end")
            data += some
        return data

    async def end(self) -> None:
        """It holds nothing that could be lost."""
        await trio.aclose_forcefully(self._stream)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
