"""What audits of live work cost in the steady state of decoding: the judge's processor time beside the workers'.

    python -m tests.measure_audits [--model olmoe-1b-7b] [--workers 2] [--tokens 1500] [--before 1000] [--new]

Workers hold a model's experts in memory and compute what tokens choose, one token a step, each expert as likely as any
other; all of them were trusted for long, or are --new. The leader's own tap chooses, and its judge recomputes in the
process that a daemon would start. Activations are random, so every expert is equally cold. The workers' time is that of
their kernels, the judge's that of its whole process; the first is checked against what the leader believes it to be.
"""

from __future__ import annotations

import argparse
import secrets
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import trio

from backends.add_model import build_manifest
from backends.device import Device
from backends.expert_source import GGUFExpertSource
from backends.experts import GgmlExperts
from backends.gguf_file import GGUFFile
from backends.learn import learn
from backends.llama import start_library
from backends.manifest import PIECE_BYTES, FileHash, Manifest
from scheduler.audit_tests import PeerAudits
from scheduler.audits import Audits
from scheduler.dispatch import LayerRouting, plan
from swarmnode.bench import find_model
from swarmnode.cli.progress import ProgressLine
from swarmnode.leader.audit_evidence import found_of
from swarmnode.leader.audit_tap import AuditTap
from swarmnode.leader.judge_process import JudgeProcess
from swarmnode.leader.probe import at_hand
from swarmnode.local_experts import load_layer

TRUSTED = PeerAudits(agreed=1_000, in_a_row=1_000)


class Swarm:
    """Workers by turns: expert e of every layer is worker e % n's."""

    def __init__(self, gguf: GGUFFile, manifest: Manifest, workers: int, new: bool) -> None:
        self.audits = Audits(secrets.token_bytes(32))
        self.peers = [f"worker {number}" for number in range(workers)]
        self.audits.adopt({} if new else dict.fromkeys(self.peers, TRUSTED))
        self.tap = AuditTap(self.audits, lambda: None)
        self.tap.open = True
        self.workers_s = 0.0
        self._manifest = manifest
        self._backend = GgmlExperts(Device("CPU", threads=1))
        self._routing = {}
        source = GGUFExpertSource(gguf, manifest)
        for layer in manifest.layers:
            load_layer(self._backend, manifest, layer.layer, range(layer.n_expert), source)
            holders = [(self.peers[expert % workers],) for expert in range(layer.n_expert)]
            self._routing[layer.layer] = LayerRouting(layer.layer, holders)
        self._random = np.random.default_rng(1)

    def token(self) -> None:
        self.tap.begin_step(["request"])
        for layer in self._manifest.layers:
            x = self._random.standard_normal((1, layer.n_in), np.float32)
            ids = self._random.choice(layer.n_expert, (1, layer.n_used), replace=False).astype(np.int32)
            for part in plan(ids, self._routing[layer.layer]).parts:
                began_s = time.thread_time()
                answer = self._backend.compute(layer.layer, x[part.rows], part.tokens, part.experts)
                self.workers_s += time.thread_time() - began_s
                self.tap.answered(part.peer, layer, x, part, None, answer, rounded=False, ask_f32=False)


async def measure(swarm: Swarm, judge: JudgeProcess, before: int, tokens: int) -> None:
    async with judge.at_work() as judge_one:

        async def audit() -> float:
            """Seconds of the judge's processor, as it says."""
            took_s = 0.0
            while (waiting := swarm.tap.take()) is not None:
                chosen, sample = waiting
                judged = await judge_one(sample)
                took_s += judged.cpu_s
                swarm.audits.found(chosen, found_of(sample, judged))
            return took_s

        async def decode(count: int) -> float:
            took_s = 0.0
            for _ in range(count):
                swarm.token()
                took_s += await audit()
            return took_s

        await decode(before)
        assert judge.pid is not None, "nothing was audited"
        process, counts = psutil.Process(judge.pid), swarm.audits.totals()
        at_first, workers_s = process.cpu_times(), swarm.workers_s
        said_s = await decode(tokens)
        at_last, after, workers_s = process.cpu_times(), swarm.audits.totals(), swarm.workers_s - workers_s
    judge_s = at_last.user + at_last.system - at_first.user - at_first.system
    rows, audited = after.rows - counts.rows, after.audited - counts.audited
    recomputed = after.rows_recomputed - counts.rows_recomputed
    print(f"workers: {rows} rows in {workers_s:.2f} s, {1e3 * workers_s / rows:.3f} ms a row")
    print(f"audited: {audited / (after.answered - counts.answered):.2%} of answers, {recomputed / rows:.2%} of rows")
    print(f"judge: {judge_s:.2f} s ({said_s:.2f} s by its own clock), {1e3 * judge_s / recomputed:.3f} ms a row")
    print(f"overhead: {judge_s / workers_s:.1%} (as the leader counts, since it began: {swarm.audits.overhead:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="olmoe-1b-7b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--before", type=int, default=1000, help="tokens until the burst is spent, not measured")
    parser.add_argument("--new", action="store_true")
    options = parser.parse_args()
    start_library()
    with ProgressLine() as progress:
        path = find_model(options.model, progress)
        with GGUFFile.open(path) as gguf:
            trunk = FileHash(bytes(32), PIECE_BYTES, (bytes(32),))  # which nothing here reads
            manifest = build_manifest(gguf, learn(path, ()), gguf.stem, trunk, progress)
            progress("loading the experts", 0, 1)
            swarm = Swarm(gguf, manifest, options.workers, options.new)
    judge = JudgeProcess(manifest, Path(path), at_hand)
    trio.run(partial(measure, swarm, judge, options.before, options.tokens))


if __name__ == "__main__":
    main()
