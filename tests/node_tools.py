"""Daemons that belong to a swarm as people make it: with `swarmctl init`, `invite` and `join`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from swarmnode.local_swarm import LocalNode
from tests.patience import PATIENCE_S

SWARMCTL = [sys.executable, "-c", "from swarmnode.cli.ctl import main; main()"]
SETTINGS = {
    "node": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
    "api": {"listen": "off"},
    "swarm": {"mdns": False, "settle_s": 0.3},
    "leader": {"context_tokens": 256, "parallel": 2},
    "log": {"format": "json"},
}


def ctl(node: LocalNode, *words: str, status: int = 0) -> dict[str, Any]:
    """What a command prints as JSON."""
    environment = {**os.environ, "SWARMNODE_OWNER_PASSPHRASE": "correct horse"}
    command = [*SWARMCTL, "--data-dir", str(node.folder), *words, "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == status, run.stdout + run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result
