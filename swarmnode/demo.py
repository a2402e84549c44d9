"""`swarmctl demo`: four daemons on this machine, one prompt, and a proof.

It makes the demo model once, starts a swarm of four daemons as processes of their own, three of which may lead, asks
from one that does not, streams the answer, shows the status, and compares the tokens with llama.cpp on the undivided
model. Everything that it started
ends with it, unless `--keep` hands the swarm over; `--stop` ends a kept one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from backends.demo_model import ensure_demo_model
from capabilities.errors import ModelNotFound, UsageError
from scheduler.sampling import SamplingParams
from swarmnode.chat_messages import chat
from swarmnode.control_client import Call
from swarmnode.local_swarm import STOP_SECONDS_MAX, LocalSwarm
from swarmnode.paths import shared_cache_folder
from swarmnode.prompt_messages import Ask, new_request_id
from swarmnode.undivided import Undivided
from swarmnode.verify import first_difference

PROMPT: Final = "Why is sleep important?"
MAX_TOKENS: Final = 120
WORKERS: Final = 3
BACKBONE: Final = 3  # of the four daemons: any one may fail, and another leads
MODEL_NAME: Final = "demo"
CONTEXT_TOKENS: Final = 2048
_KEPT: Final = "demo-swarm.json"

Progress = Callable[[str, int, int], None]


def run_demo(
    *,
    prompt: str | None,
    max_tokens: int | None,
    keep: bool,
    progress: Progress,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Run the demo; the result is what `--json` prints. `show` gets text for the terminal, as it comes.

    Raises:
        SwarmError: whatever went wrong; everything has been stopped then.
    """
    cache = shared_cache_folder()
    if keep:
        _refuse_second(cache)
    model = ensure_demo_model(cache, progress)
    root = Path(tempfile.mkdtemp(prefix="swarmnode-demo-"))
    leader = {"leader": {"context_tokens": CONTEXT_TOKENS}}
    swarm = LocalSwarm(
        root, WORKERS, backbone=BACKBONE, leader=leader, each={"api": {"listen": "127.0.0.1:0"}} if keep else None
    )
    try:
        with _ending_on_sigterm(), swarm:
            progress("starting four daemons", 1, 1)
            swarm.add_model(model, progress, name=MODEL_NAME)
            swarm.wait_ready(progress)
            result = _ask_and_prove(swarm, model, prompt or PROMPT, max_tokens or MAX_TOKENS, progress, show)
            if keep:
                swarm.kept = True
                _remember(cache, root, swarm)
            else:
                progress("stopping the daemons", 0, 1)
            return {**result, "kept": keep, "peers": _peers(swarm) if keep else []}
    finally:
        if not swarm.kept:
            shutil.rmtree(root, ignore_errors=True)


def _ask_and_prove(
    swarm: LocalSwarm, model: Path, prompt: str, max_tokens: int, progress: Progress, show: Callable[[str], None]
) -> dict[str, Any]:
    asker = swarm.workers[-1]
    show(f"\n{asker.name} asks: {prompt}\n\n")
    with Call(asker.socket, "ask", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}) as call:
        for event in call:
            if event.get("event") == "token":
                show(event["text"])
        answer = call.result
    show("\n\n")
    progress("llama.cpp on the undivided model", 0, 1)
    ask = Ask(new_request_id(), SamplingParams(temperature=0.0), messages=chat(prompt, None), max_tokens=max_tokens)
    undivided = Undivided(model, context_tokens=CONTEXT_TOKENS)
    try:
        expected = undivided.answer(ask)
    finally:
        undivided.close()
    progress("llama.cpp on the undivided model", 1, 1)
    status = asker.status()
    return {
        **compared(answer["tokens"], expected.tokens),
        "asked": asker.name,
        "prompt": prompt,
        "answer": answer,
        "undivided_tokens": list(expected.tokens),
        "status": status,
    }


def compared(tokens: Sequence[int], expected: Sequence[int]) -> dict[str, Any]:
    """An answer's tokens beside llama.cpp's own, as the demo tells it."""
    first = first_difference(tokens, expected)
    return {"identical": first is None, "first_difference": None if first is None else first["index"]}


def proof_line(result: dict[str, Any]) -> str:
    """The one line of proof."""
    count = len(result["answer"]["tokens"])
    if result["identical"]:
        return f"Proof: all {count} tokens equal llama.cpp's own on the undivided model."
    return f"NOT EQUAL to llama.cpp on the undivided model: the first difference is token {result['first_difference']}."


def _peers(swarm: LocalSwarm) -> list[dict[str, Any]]:
    rows = {row["name"]: row for row in swarm.leader.status()["peers"]}
    return [
        {
            "name": node.name,
            "peer_id": rows[node.name]["peer_id"],
            "data_dir": str(node.folder),
            "http": node.status()["http"]["url"],
            "pid": node.pid,
        }
        for node in swarm.nodes
    ]


# -- a swarm that was kept ------------------------------------------------------------------------------------------


def _remember(cache: Path, root: Path, swarm: LocalSwarm) -> None:
    nodes = [{"name": n.name, "pid": n.pid, "data_dir": str(n.folder)} for n in swarm.nodes]
    (cache / _KEPT).write_text(json.dumps({"root": str(root), "nodes": nodes}))


def _recall(cache: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads((cache / _KEPT).read_text())
        return kept if isinstance(kept, dict) and isinstance(kept.get("nodes"), list) else None
    except (OSError, ValueError):
        return None


def _processes(node: dict[str, Any]) -> list[psutil.Process]:
    """The daemon of a kept node, found by its data folder: whoever plays with the swarm may have started it again."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "run" in words and "--data-dir" in words and node["data_dir"] in words:
            found.append(process)
    return found


def _refuse_second(cache: Path) -> None:
    kept = _recall(cache)
    if kept is not None and any(map(_processes, kept["nodes"])):
        raise UsageError(f"a demo swarm is kept already in {kept['root']}", hint="End it with `swarmctl demo --stop`.")


def stop_kept() -> dict[str, Any]:
    """End the swarm that `--keep` left.

    Raises:
        ModelNotFound: there is none.
    """
    cache = shared_cache_folder()
    kept = _recall(cache)
    running = {} if kept is None else {n["name"]: found for n in kept["nodes"] if (found := _processes(n))}
    if kept is None or not running:
        (cache / _KEPT).unlink(missing_ok=True)
        raise ModelNotFound("no demo swarm is kept", hint="`swarmctl demo --keep` leaves one running.")
    processes = [process for found in running.values() for process in found]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()  # a suspended one would not hear the request to end
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS_MAX)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_SECONDS_MAX)
    shutil.rmtree(kept["root"], ignore_errors=True)
    (cache / _KEPT).unlink(missing_ok=True)
    return {"stopped": list(running)}


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, so that no daemon is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
