"""`swarmctl bench`: a swarm on this machine against llama.cpp on the undivided model, in one run.

Machines differ and are noisy, so the figure that counts is a ratio: both sides answer the same prompt in turns, with
the same number of threads in every process, and each figure is the median over the rounds. The swarm is real: a leader
and its workers as processes, joined by libp2p on loopback, asked over the control socket like by any user. Each worker
keeps to one core, as it would have one to itself on a machine of its own.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from backends.demo_model import ensure_demo_model
from backends.ggml import allow_wide_kernels
from backends.learn import learn
from backends.moe_hook import sum_point_of
from backends.synthetic import OLMOE_1B_7B, write_random_model
from capabilities.errors import UsageError
from scheduler.sampling import SamplingParams
from swarmnode.config_sections import Combine
from swarmnode.local_swarm import LocalSwarm
from swarmnode.paths import shared_cache_folder
from swarmnode.prompt_messages import Ask, new_request_id
from swarmnode.undivided import Undivided

ROUNDS: Final = 3
THREADS: Final = 1
_CONTEXT_ROOM: Final = 64
_SYNTHETIC: Final = {OLMOE_1B_7B.name: OLMOE_1B_7B}
_SEED: Final = 7

Progress = Callable[[str, int, int], None]


def run_bench(
    model: str,
    *,
    workers: int,
    prompt_tokens: int,
    tokens: int,
    progress: Progress,
    rounds: int = ROUNDS,
    fast: bool = False,
    audits: bool = False,
    combine: Combine = "router-order",
) -> dict[str, Any]:
    """Measure; the result is what `--json` prints. `model`: a file, `demo`, or a synthetic shape by name.

    Raises:
        SwarmError: the model cannot be used, or the swarm failed.
    """
    if tokens < 2:
        raise UsageError("a decode rate needs at least two tokens", hint="Raise --tokens.")
    if fast:
        allow_wide_kernels()
    path = find_model(model, progress)
    if combine == "partial-sum":  # a leader would only wait for another model
        for learned in learn(path, ()).layers.values():
            sum_point_of(learned)
    context = prompt_tokens + tokens + _CONTEXT_ROOM
    result: dict[str, Any] = {
        "model": model,
        "workers": workers,
        "threads_per_process": THREADS,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "rounds": rounds,
        "fast": fast,
        "audits": audits,
        "combine": combine,
    }
    root = Path(tempfile.mkdtemp(prefix="swarmnode-bench-"))
    undivided = Undivided(path, context_tokens=context, threads=THREADS, fast=fast)
    try:
        prompt = _prompt(undivided, prompt_tokens)
        leader: dict[str, dict[str, Any]] = {
            "leader": {"context_tokens": context, "parallel": 1, "fast": fast, "combine": combine, "own_copy": False}
            | {"audits": audits},
            "swarm": {"replicas": 1},  # every row from a worker, every worker with its share
        }
        each = {"compute": {"threads": THREADS}}
        with LocalSwarm(root, workers, leader=leader, each=each, own_cores=True) as swarm:
            swarm.add_model(path, progress)
            swarm.wait_ready(progress)
            result.update(_measure(swarm, undivided, prompt, tokens, rounds, progress))
        if not fast:
            result["batch_invariance"] = _invariance_cost(path, context, undivided, prompt, tokens, rounds, progress)
    finally:
        undivided.close()
        shutil.rmtree(root, ignore_errors=True)
    return result


def _invariance_cost(
    path: Path, context: int, invariant: Undivided, prompt: str, tokens: int, rounds: int, progress: Progress
) -> dict[str, Any]:
    """llama.cpp undivided with flash attention and a shared cache, and the share of its speed that invariance takes."""
    fast = Undivided(path, context_tokens=context, threads=THREADS, fast=True)
    try:
        fast.answer(_ask(prompt, 2))
        rows, shares = [], []
        for done in range(rounds):
            progress("what batch invariance costs", done, rounds)
            slow, quick = (_undivided_rates(side, prompt, tokens) for side in (invariant, fast))
            rows.append(quick)
            shares.append({key: 1 - slow[key] / quick[key] for key in quick})
        progress("what batch invariance costs", rounds, rounds)
    finally:
        fast.close()
    return {"llama_cpp_fast": _median(rows), "cost": _median(shares)}


def _undivided_rates(undivided: Undivided, prompt: str, tokens: int) -> dict[str, float]:
    whole = undivided.answer(_ask(prompt, tokens))
    return _rates(whole.prompt_tokens, len(whole.tokens), whole.timings.prefill_s, whole.timings.decode_s)


def find_model(model: str, progress: Progress) -> Path:
    """The file that `--model` means: `demo` and the synthetic shapes are made once and cached.

    Raises:
        UsageError: there is no such file or name.
    """
    if model == "demo":
        return ensure_demo_model(shared_cache_folder(), progress)
    if shape := _SYNTHETIC.get(model):
        folder = shared_cache_folder() / "synthetic"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / shape.file_name(_SEED)
        if not path.exists():
            write_random_model(path, shape, _SEED, lambda done, total: progress(f"writing {model}", done, total))
        return path
    path = Path(model)
    if not path.is_file():
        names = ", ".join(["demo", *_SYNTHETIC])
        raise UsageError(f"there is no file {model}", hint=f"Give a GGUF file, or one of: {names}.")
    return path


def _prompt(undivided: Undivided, count: int) -> str:
    """A text of exactly `count` tokens, or the nearest length that the tokenizer allows."""
    words = np.random.default_rng(_SEED).choice([*"abcdefghijklmnopqrstuvwxyz"], (4 * count, 3))
    text = [" " + "".join(word) for word in words]
    low, high = 1, len(text)
    while low < high:  # the token count grows with the number of words
        middle = (low + high) // 2
        if len(undivided.tokenize(_ask("".join(text[:middle]), 1))) < count:
            low = middle + 1
        else:
            high = middle
    return "".join(text[:low])


def _ask(prompt: str, tokens: int) -> Ask:
    params = SamplingParams(temperature=0.0)
    return Ask(new_request_id(), params, prompt=prompt, max_tokens=tokens, ignore_eos=True)


def _measure(
    swarm: LocalSwarm, undivided: Undivided, prompt: str, tokens: int, rounds: int, progress: Progress
) -> dict[str, Any]:
    sides: dict[str, list[dict[str, float]]] = {"llama_cpp": [], "swarm": []}
    params = {"raw": True, "temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    identical = True
    swarm.leader.call("statistics", timed=True)
    swarm.workers[0].ask(prompt, **{**params, "max_tokens": 2})  # first touch of every graph and page
    undivided.answer(_ask(prompt, 2))
    before = _counters(swarm)
    for done in range(rounds):
        progress("measuring", done, rounds)
        whole = undivided.answer(_ask(prompt, tokens))
        sides["llama_cpp"].append(
            _rates(whole.prompt_tokens, len(whole.tokens), whole.timings.prefill_s, whole.timings.decode_s)
        )
        answer = swarm.workers[0].ask(prompt, **params)
        timings, usage = answer["timings"], answer["usage"]
        sides["swarm"].append(
            _rates(usage["prompt_tokens"], usage["completion_tokens"], timings["prefill_s"], timings["decode_s"])
        )
        identical = identical and answer["tokens"] == list(whole.tokens)
    progress("measuring", rounds, rounds)
    result: dict[str, Any] = {side: _median(rows) for side, rows in sides.items()}
    ratios = [
        {key: ours[key] / theirs[key] for key in ours}
        for ours, theirs in zip(sides["swarm"], sides["llama_cpp"], strict=True)
    ]
    result["ratio"] = _median(ratios)
    result["tokens_identical"] = identical
    result.update(_costs(before, _counters(swarm), rounds * tokens))
    result["bytes_per_token_per_layer"] = _decode_bytes(swarm, prompt, params)
    return result


def _rates(prompt: int, tokens: int, prefill_s: float, decode_s: float) -> dict[str, float]:
    return {"prefill_tokens_per_s": prompt / prefill_s, "decode_tokens_per_s": (tokens - 1) / decode_s}


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}


def _counters(swarm: LocalSwarm) -> dict[str, Any]:
    cpu = 0.0
    for node in swarm.nodes:
        times = psutil.Process(node.pid).cpu_times()
        cpu += times.user + times.system
    return {**swarm.leader.call("statistics"), "cpu_s": cpu}


def _costs(before: Mapping[str, Any], after: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Round trip of a layer, and processor time that no kernel used, from the counters around the measured rounds.

    Kernel time is the workers' own report plus the leader's time inside llama.cpp less its Python callbacks.
    """

    def grown(*keys: str) -> float:
        a: Any = before
        b: Any = after
        for key in keys:
            a, b = a[key], b[key]
        return float(b - a)

    def links(key: str) -> float:
        return float(sum(link[key] for link in after["links"]) - sum(link[key] for link in before["links"]))

    kernels_s = links("compute_us") / 1e6 + grown("decode_s") - grown("callback_s")
    layers = grown("layers", "decode_layers")
    return {
        "layer_rtt_ms": round(1e3 * grown("layers", "decode_round_trip_s") / max(layers, 1), 4),
        "cpu_outside_kernels_ms_per_token": round(1e3 * max(0.0, grown("cpu_s") - kernels_s) / tokens, 3),
    }


def _decode_bytes(swarm: LocalSwarm, prompt: str, params: dict[str, Any]) -> dict[str, float]:
    """Bytes that one worker gets and gives for one token of one layer, frames whole, from decode steps alone."""
    short = {**params, "max_tokens": 1}
    start = swarm.leader.call("statistics")
    swarm.workers[0].ask(prompt, **short)  # the prompt and nothing else
    middle = swarm.leader.call("statistics")
    swarm.workers[0].ask(prompt, **{**params, "max_tokens": 9})  # the same, and eight decode steps
    end = swarm.leader.call("statistics")

    def between(key: str) -> float:
        a, b, c = (sum(link[key] for link in s["links"]) for s in (start, middle, end))
        return float((c - b) - (b - a))

    dispatches = max(between("dispatches"), 1.0)
    return {"out": round(between("bytes_out") / dispatches, 1), "back": round(between("bytes_back") / dispatches, 1)}
