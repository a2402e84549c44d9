"""The swarm against llama.cpp's own RPC split, on this machine: `python -m tests.compare_rpc [--model olmoe-1b-7b]`.

A command and not a test, outside set-up: it builds llama.cpp's RPC server and `llama-bench` (minutes) from the source
that llama-cpp-python's pinned release carries, once, into the user's cache. Then it measures, in turns, llama.cpp on
one thread, llama.cpp split over two one-thread RPC servers, and the swarm with two one-thread workers, on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backends.ggml import LLAMA_CPP_VERSIONS
from swarmnode.bench import find_model, run_bench
from swarmnode.paths import shared_cache_folder

FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_RPC=ON", "-DGGML_NATIVE=ON", "-DGGML_LLAMAFILE=OFF", "-DGGML_OPENMP=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_CURL=OFF",
]  # fmt: skip
ROUNDS = 3
START_S_MAX = 30.0


def build(folder: Path) -> tuple[Path, Path]:
    """(rpc server, llama-bench), built in `folder` if they are not there."""
    binaries = folder / "build" / "bin"
    server, bench = binaries / "ggml-rpc-server", binaries / "llama-bench"
    if not (server.exists() and bench.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        version = LLAMA_CPP_VERSIONS[0]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, f"llama-cpp-python=={version}"], check=True)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        subprocess.run(["cmake", "-S", str(source), "-B", str(folder / "build"), *FLAGS], check=True)
        targets = ["--target", "ggml-rpc-server", "llama-bench"]
        jobs = str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(folder / "build"), "-j", jobs, *targets], check=True)
    return server, bench


@contextlib.contextmanager
def servers(binary: Path, count: int) -> Iterator[list[str]]:
    """One-thread RPC servers on loopback; their addresses."""
    running, addresses = [], []
    try:
        for _ in range(count):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            command = [str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            addresses.append(f"127.0.0.1:{port}")
            _wait_for(port)
        yield addresses
    finally:
        for process in running:
            process.terminate()
            process.wait(10)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def llama_bench(binary: Path, model: Path, prompt: int, tokens: int, rpc: list[str] | None) -> dict[str, float]:
    """Tokens a second for prompt and answer, as llama-bench measures them, one thread."""
    command = [str(binary), "-m", str(model), "-t", "1", "-p", str(prompt), "-n", str(tokens), "-r", "1", "-o", "json"]
    if rpc:
        command += ["--rpc", ",".join(rpc), "-ngl", "99"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(re.sub(r"^[^\[]*", "", output, count=1))
    return {("prefill" if row["n_prompt"] else "decode"): row["avg_ts"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="olmoe-1b-7b")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    model = find_model(options.model, lambda *_: None)
    server, bench = build(shared_cache_folder() / "llama-rpc")
    rows: dict[str, list[dict[str, float]]] = {"one thread": [], "two RPC servers": []}
    for _ in range(ROUNDS):
        rows["one thread"].append(llama_bench(bench, model, options.prompt_tokens, options.tokens, None))
        with servers(server, 2) as addresses:
            rows["two RPC servers"].append(llama_bench(bench, model, options.prompt_tokens, options.tokens, addresses))
    result: dict[str, Any] = {
        name: {key: round(statistics.median(row[key] for row in side), 2) for key in side[0]}
        for name, side in rows.items()
    }
    swarm = run_bench(
        options.model, workers=2, prompt_tokens=options.prompt_tokens, tokens=options.tokens, progress=lambda *_: None
    )
    result["swarm, two workers"] = {
        "prefill": swarm["swarm"]["prefill_tokens_per_s"],
        "decode": swarm["swarm"]["decode_tokens_per_s"],
    }
    result["llama.cpp in the swarm's run"] = {
        "prefill": swarm["llama_cpp"]["prefill_tokens_per_s"],
        "decode": swarm["llama_cpp"]["decode_tokens_per_s"],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
