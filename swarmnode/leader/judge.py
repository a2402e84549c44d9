"""Has answers of live work recomputed. Nothing else convicts a worker: two volunteers that agree prove nothing.

Here a thread of low priority recomputes, one answer at a time: right where nobody waits for tokens. A leader has a
process of its own do it (judge_process.py), for what a thread does in Python the decode thread has to wait for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import trio

from backends.device import Device
from backends.manifest import ExpertSource, Manifest
from swarmnode.leader.probe import Obtain
from swarmnode.leader.recomputing import Judged, Recomputing, Sample, advance
from swarmnode.net.interface import PeerId

T = TypeVar("T")

_NICE: Final = 10  # a tenth of a token's share where both want a processor


class QuietThread:
    """Runs one job at a time, behind whatever else this machine does."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Cancelling waits for its end: kernels cannot be stopped."""
        done, results, failures = trio.Event(), list[T](), list[Exception]()
        token = trio.lowlevel.current_trio_token()

        def carry_out() -> None:
            try:
                results.append(job())
            except Exception as error:
                failures.append(error)
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        self._jobs.put(carry_out)
        with trio.CancelScope(shield=True):
            await done.wait()
        if failures:
            raise failures[0]
        return results[0]

    def end(self) -> None:
        """After what runs and waits."""
        self._jobs.put(None)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            job()


class Judge:
    """obtain: makes experts readable in `source` for a while (probe.Obtain)."""

    def __init__(
        self, manifest: Manifest, source: ExpertSource, make_device: Callable[[], Device], obtain: Obtain
    ) -> None:
        self._obtain = obtain
        self._recomputing = Recomputing(manifest, source, make_device)
        self._thread: QuietThread | None = None

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Callable[[Sample], Awaitable[Judged]]]:
        """`async with judge.at_work() as judge_one: await judge_one(sample)`."""
        self._thread = thread = QuietThread("judge")

        async def judge_one(sample: Sample) -> Judged:
            return await self._judge(thread, sample)

        try:
            yield judge_one
        finally:
            with trio.CancelScope(shield=True):
                await self.rest()
            self._thread = None
            thread.end()

    async def prepare(self) -> None:
        """A thread is there at once."""

    async def rest(self) -> None:
        """Nothing is to be judged for a while: free what is held. Only at work."""
        assert self._thread is not None
        await self._thread.run(self._recomputing.close)

    async def _judge(self, thread: QuietThread, sample: Sample) -> Judged:
        """Raises SwarmError: an expert cannot be had here."""
        steps = self._recomputing.steps(sample)
        found = await thread.run(partial(advance, steps))
        while not isinstance(found, Judged):
            async with self._obtain(sample.layer, found, PeerId(sample.peer)):
                found = await thread.run(partial(advance, steps))
        return found
