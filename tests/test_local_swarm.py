"""The owner of local daemons: whatever interrupts it, no process is left without an owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmnode import local_swarm
from swarmnode.local_swarm import LocalSwarm


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_daemon_is_being_started_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted_popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        signal.raise_signal(number)  # the process runs, and nobody holds it yet
        return started[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        monkeypatch.setattr(local_swarm.subprocess, "Popen", interrupted_popen)
        with pytest.raises(KeyboardInterrupt), LocalSwarm(tmp_path, 1):
            pytest.fail("the interrupt was lost")
        assert len(started) == 1
        assert started[0].poll() is not None
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_setaffinity")
def test_workers_may_have_cores_of_their_own(tmp_path: Path) -> None:
    all_cores = os.sched_getaffinity(0)
    with LocalSwarm(tmp_path, 2, own_cores=True) as swarm:
        leader, *workers = (os.sched_getaffinity(node.pid) for node in swarm.nodes)
    assert leader == all_cores
    assert [len(cores) for cores in workers] == [1, 1]
    assert len(set.union(*workers)) == min(2, len(all_cores))
