"""How many answers a worker that begins to cheat in all of them still gives, in a swarm of real daemons.

    python -m tests.measure_cheat [--model demo] [--workers 4] [--honest 1] [--tokens 64]

One worker answers with the rows of another expert from the moment on when the leader has counted so many --honest
answers of it, while prompts are asked one after the other. What counts is the leader's count of its answers from then
until it is quarantined, and the seconds that this takes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from backends.experts import F32, I32
from capabilities.errors import SwarmError
from swarmnode.bench import find_model
from swarmnode.cli.progress import ProgressLine
from swarmnode.experiment.cheats import WrongExpert
from swarmnode.local_swarm import LocalSwarm

WHEN: Final = "SWARMNODE_MEASURED_CHEAT"
"""A file: while it is there, the worker cheats."""


class Awaiting(WrongExpert):
    """WrongExpert, once it is told to be."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return super().wrong(layer, x, tokens, experts, right, ask_f32) if os.path.exists(os.environ[WHEN]) else right


class Watch:
    """Looks at what the leader holds of the cheat, until it is out. begun: once the cheat cheats."""

    def __init__(self, swarm: LocalSwarm, peer: str, told: Path, honest: int) -> None:
        self.begun: tuple[float, dict[str, Any]] | None = None
        self.out: tuple[float, dict[str, Any]] | None = None
        self._swarm, self._peer, self._told, self._honest = swarm, peer, told, honest

    def look(self) -> None:
        row = next(row for row in self._swarm.leader.status()["peers"] if row["peer_id"] == self._peer)
        audits = row["audits"] or {"answers": 0}
        if self.begun is None and audits["answers"] >= self._honest:
            self._told.touch()
            self.begun = time.monotonic(), audits
        if self.out is None and row["fitness"] == "quarantined":
            self.out = time.monotonic(), audits

    def run(self, done: threading.Event) -> None:
        while not done.wait(0.05) and self.out is None:
            try:
                self.look()
            except SwarmError as error:
                print(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--honest", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=100, help="at most, until it counts as missed")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="swarmnode-cheat-"))
    settings = {"leader": {"context_tokens": 512, "parallel": 2}, "swarm": {"replicas": 1}}
    swarm = LocalSwarm(root, options.workers, backbone=1, leader=settings, each={"compute": {"threads": 1}})
    cheat = swarm.workers[0]
    cheat.settings["compute"] = {"threads": 1, "factory": "tests.measure_cheat:Awaiting"}
    cheat.environment = {WHEN: str(root / "now"), "PYTHONPATH": os.getcwd()}
    done = threading.Event()
    try:
        with swarm, ProgressLine() as progress:
            swarm.add_model(find_model(options.model, progress), progress, name="measured")
            swarm.wait_ready(progress)
            watch = Watch(swarm, cheat.peer_id, root / "now", options.honest)
            looking = threading.Thread(target=watch.run, args=(done,))
            looking.start()
            for number in range(options.prompts):
                if watch.out is not None:
                    break
                swarm.workers[-1].ask(f"Story {number}:", raw=True, max_tokens=options.tokens, ignore_eos=True)
            done.set()
            looking.join()
            watch.look()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert watch.begun is not None, "it never answered"
    (began_s, before), out = watch.begun, watch.out
    print(f"begins after {before['answers']} answers, of which {before['audited']} were audited")
    if out is None:
        print(f"missed in {options.prompts} prompts")
    else:
        print(f"out after {out[1]['answers'] - before['answers']} more and {out[0] - began_s:.1f} s")


if __name__ == "__main__":
    main()
