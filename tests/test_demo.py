"""The demo as a stranger runs it: real daemons, the real model (built once in the cache), everything gone after."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from backends.demo_model import ensure_demo_model
from swarmnode.demo import compared
from swarmnode.paths import shared_cache_folder
from tests.patience import PATIENCE_S

COMMAND = [sys.executable, "-c", "from swarmnode.cli.ctl import main; main()", "demo"]
TIMEOUT_S = 240


@pytest.fixture(scope="module", autouse=True)
def _demo_model() -> None:
    ensure_demo_model(shared_cache_folder())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Temporary folders of its own, so that what is left behind can be seen."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def _daemons(folder: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or [])
    ]


@pytest.mark.timeout(TIMEOUT_S)
def test_the_answer_equals_llama_cpp_and_nothing_is_left(environment: dict[str, str], tmp_path: Path) -> None:
    command = [*COMMAND, "--json", "--max-tokens", "24"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    assert result["identical"] is True
    assert len(result["answer"]["tokens"]) == 24
    assert result["answer"]["text"].strip()
    assert result["status"]["ready"] is True
    assert _daemons(tmp_path) == []
    assert list(tmp_path.glob("swarmnode-demo-*")) == []


@pytest.mark.parametrize(("tokens", "first"), [((5, 6), None), ((5,), 1), ((5, 6, 7), 2), ((4, 6), 0)])
def test_the_first_difference_is_where_the_shorter_answer_ends_or_before(
    tokens: tuple[int, ...], first: int | None
) -> None:
    assert compared(tokens, (5, 6)) == {"identical": first is None, "first_difference": first}


@pytest.mark.timeout(TIMEOUT_S)
def test_ctrl_c_in_the_middle_ends_everything(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen([*COMMAND, "--max-tokens", "400"], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT_S / 2
        while len(_daemons(tmp_path)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    assert _daemons(tmp_path) == []


@pytest.mark.timeout(TIMEOUT_S)
def test_a_kept_swarm_answers_and_can_be_stopped(environment: dict[str, str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"  # a kept swarm is remembered in the cache: not in the user's own
    (cache / "swarmnode").mkdir(parents=True)
    for file in shared_cache_folder().glob("*.gguf"):
        shutil.copy2(file, cache / "swarmnode" / file.name)
    environment["XDG_CACHE_HOME"] = str(cache)
    command = [*COMMAND, "--keep", "--json", "--max-tokens", "4"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        assert run.returncode == 0, run.stderr
        peers = json.loads(run.stdout)["peers"]
        assert [set(peer) >= {"name", "peer_id", "data_dir", "http"} for peer in peers] == [True] * 4
        assert [httpx.get(f"{peer['http']}/readyz").text for peer in peers] == ["ready\n"] * 4
        ask = [*COMMAND[:-1], "--data-dir", peers[1]["data_dir"], "ask", "What is 2+2?", "--json", "--temperature", "0"]
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert "4" in json.loads(answer.stdout)["text"]
        again = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert again.returncode == 2
        assert "--stop" in json.loads(again.stdout)["error"]["hint"]
    finally:
        stop = subprocess.run(
            [*COMMAND, "--stop", "--json"], env=environment, capture_output=True, text=True, check=False
        )
    assert json.loads(stop.stdout)["stopped"] == ["leader", "worker-1", "worker-2", "worker-3"]
    assert _daemons(tmp_path) == []
