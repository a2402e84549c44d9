"""What a daemon of a swarm costs while nothing happens: processor and memory of whole daemons that hold nothing.

    python -m tests.measure_idle [--nodes 10] [--backbone 3] [--seconds 60] [--settle 60]

Each node is a process of its own, as `swarmnode run` starts it, in an elected swarm without a model, and its kernels
are measured before the figures are taken. Processor time is in percent of one core; private memory is what would come
back if the process ended, shared pages of libraries left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil

from swarmnode.local_swarm import LocalNode, LocalSwarm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--backbone", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=60.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalSwarm(Path(folder), options.nodes - 1, backbone=options.backbone) as swarm,
    ):
        time.sleep(options.settle)
        before, began = [cpu_s(node) for node in swarm.nodes], time.monotonic()
        time.sleep(options.seconds)
        took = time.monotonic() - began
        print(f"{'node':12}{'part':>10}{'cpu %':>8}{'rss MiB':>10}{'private MiB':>13}")
        for number, (node, busy) in enumerate(zip(swarm.nodes, before, strict=True)):
            node.check_alive()
            part = "backbone" if number < options.backbone else "worker"
            rss, private = memory_mib(node)
            print(f"{node.name:12}{part:>10}{100 * (cpu_s(node) - busy) / took:8.2f}{rss:10.1f}{private:13.1f}")


def cpu_s(node: LocalNode) -> float:
    """Processor seconds of the daemon so far, its children that have ended included."""
    times = psutil.Process(node.pid).cpu_times()
    return sum((times.user, times.system, times.children_user, times.children_system))


def memory_mib(node: LocalNode) -> tuple[float, float]:
    """Resident memory of the daemon, and that part of it which no other process shares."""
    memory = psutil.Process(node.pid).memory_full_info()
    return memory.rss / 2**20, memory.uss / 2**20


if __name__ == "__main__":
    main()
