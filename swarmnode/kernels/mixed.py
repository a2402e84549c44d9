"""`swarmctl kernels swarm`: a swarm whose workers compute with different kernels, and what becomes of an answer.

A leader on the installed kernels and one worker for each word: a kernel's name is a daemon that computes with it, and
`arm64` is a whole daemon of that processor under an emulator, its network, its checks and its kernels included. The
answer is compared with llama.cpp on the undivided model, token by token; it need not be the same, for kernels differ.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from capabilities.errors import UsageError
from scheduler.sampling import SamplingParams
from swarmnode.bench import find_model
from swarmnode.chat_messages import chat
from swarmnode.kernels.arm64 import EMULATOR
from swarmnode.kernels.store import emulated_environ, emulated_python, launch_of
from swarmnode.local_swarm import LocalNode, LocalSwarm
from swarmnode.prompt_messages import Ask, new_request_id
from swarmnode.undivided import Undivided

EMULATED: Final = "arm64"
PROMPT: Final = "Why is sleep important?"
START_S: Final = 300.0  # of an emulated daemon: its imports alone take half a minute
MEASURED_S: Final = 900.0  # both of measuring.DEADLINES_S and their children's starts; then the answer goes on without
READY_S: Final = 1200.0  # experts are hashed and loaded under the emulator as well
CONTEXT_TOKENS: Final = 512
WORKERS_MAX: Final = 8

_OF_PEER: Final = ("name", "state", "fitness", "experts_held", "dispatches", "bit_identical_to_leader", "error")
_OF_BACKEND: Final = ("device", "numeric_class", "rows_per_s")
_LOOK_S: Final = 0.5
_ASK_S: Final = 30.0

Progress = Callable[[str, int, int], None]


def run_mixed(
    words: Sequence[str], *, model: str, prompt: str, max_tokens: int, deadline_s: float, progress: Progress
) -> dict[str, Any]:
    """Run such a swarm once; the result is what `--json` prints.

    Raises:
        SwarmError: a kernel is not there, or what the swarm runs into; everything has been stopped then.
    """
    if not 1 <= len(words) <= WORKERS_MAX:
        raise UsageError(f"{len(words)} workers; from 1 to {WORKERS_MAX} can be made")
    for word in words:  # before anything is started
        check_processor(word) if word.partition(":")[0] == EMULATED else launch_of(word)
    file = find_model(model, progress)
    root = Path(tempfile.mkdtemp(prefix="swarmnode-kernels-"))
    settings = {"leader": {"context_tokens": CONTEXT_TOKENS, "parallel": 1, "request_deadline_s": deadline_s}}
    swarm = LocalSwarm(root, len(words), backbone=1, leader=settings)
    for node, word in zip(swarm.workers, words, strict=True):
        _set_up(node, word)
    try:
        with swarm:
            swarm.add_model(file, progress)
            swarm.wait_ready(progress, READY_S)
            _wait_measured(swarm, progress)
            progress("answering", 0, 1)
            answer = swarm.leader.ask(prompt, max_tokens=max_tokens, temperature=0.0)
            status = swarm.leader.status()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    progress("llama.cpp on the undivided model", 0, 1)
    expected = _undivided(file, prompt, max_tokens)
    pairs = zip(answer["tokens"], expected, strict=False)
    same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {
        "model": file.name,
        "workers": [worker_row(word, status, node.name) for node, word in zip(swarm.workers, words, strict=True)],
        "answer": answer,
        "undivided_tokens": expected,
        "first_difference": None if expected == answer["tokens"] else len(same),
    }


def _set_up(node: LocalNode, word: str) -> None:
    kernel, _, processor = word.partition(":")
    if kernel != EMULATED:
        node.settings.setdefault("compute", {})["kernel"] = word
        return
    node.python, node.start_s = emulated_python(), START_S
    node.environment |= emulated_environ() | ({"QEMU_CPU": processor} if processor else {})


def check_processor(word: str) -> None:
    """UsageError unless the emulator knows the processor that is named behind the colon."""
    emulated_python()
    processor = word.partition(":")[2]
    listed = subprocess.run([EMULATOR, "-cpu", "help"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    known = [line.strip() for line in listed.stdout.splitlines() if line.startswith(" ")]
    if processor and processor not in known:
        raise UsageError(f"{EMULATOR} knows no processor {processor!r}", hint=f"Choose from: {', '.join(known)}.")


def _wait_measured(swarm: LocalSwarm, progress: Progress) -> None:
    """Until every worker has a numeric class for each of the model's weight types, or says why it has none."""
    ends_at, names = time.monotonic() + MEASURED_S, [node.name for node in swarm.workers]
    while time.monotonic() < ends_at:
        rows = [swarm.leader.call("peer", name=name)["backends"] for name in names]
        types = [{weight["type"] for backend in backends for weight in backend["weights"]} for backends in rows]
        found = sum(is_measured(backends, set.union(*types)) for backends in rows)
        if found == len(rows):
            return
        progress("measuring kernels", found, len(rows))
        time.sleep(_LOOK_S)


def is_measured(backends: Sequence[Mapping[str, Any]], types: Collection[str]) -> bool:
    """Whether a peer has told the class of all these weight types, or that it cannot.

    types: all that any worker has told of, since before a model is known others are measured.
    """
    if any(backend["error"] for backend in backends):
        return True
    known = {weight["type"] for each in backends for weight in each["weights"] if weight["numeric_class"]}
    return bool(types) and known == set(types)


def worker_row(word: str, status: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the leader's status says of a worker."""
    row = next(peer for peer in status["peers"] if peer["name"] == name)
    (backend,) = row["backends"]
    return {
        "kernel": word,
        **{key: row[key] for key in _OF_PEER},
        **{key: backend[key] for key in _OF_BACKEND},
        "accumulation": backend["accumulation"]["measured"],
        "source": backend["source"]["measured"],
    }


def _undivided(file: Path, prompt: str, max_tokens: int) -> list[int]:
    ask = Ask(new_request_id(), SamplingParams(temperature=0.0), messages=chat(prompt, None), max_tokens=max_tokens)
    whole = Undivided(file, context_tokens=CONTEXT_TOKENS)
    try:
        return list(whole.answer(ask).tokens)
    finally:
        whole.close()
