"""A swarm of real daemons, one in each host of a bed, driven as people drive it: by configuration files and swarmctl.

Control sockets are files, so whatever speaks to a daemon does so from outside of its host. Answers and status come over
the control socket itself, which is what `swarmctl ask` and `swarmctl status` read; a process for each would cost more
than the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from capabilities.errors import NoDaemon, SwarmError
from swarmnode.handlers import parse_ask
from swarmnode.local_swarm import LocalNode
from swarmnode.undivided import Undivided
from tests.netns.bed import Bed
from tests.swarm_tools import at_once
from tests.tiny_architectures import write_olmoe

PEERS: Final = 5
BACKBONE: Final = 3
CONTEXT_TOKENS: Final = 1024
PORT: Final = 11436
PASSPHRASE: Final = "correct horse battery staple"
COMMAND_SECONDS_MAX: Final = 120.0
AGREED_SECONDS_MAX: Final = 100.0
FORMED_SECONDS_MAX: Final = 60.0
_POLL_S: Final = 0.1
_SWARMCTL: Final = (sys.executable, "-c", "from swarmnode.cli.ctl import main; main()")

Params = dict[str, Any]


class BedNode(LocalNode):
    """A daemon in a host."""

    host: int = -1

    def swarmctl(self, *words: str) -> dict[str, Any]:
        """What the command prints with `--json`. Raises the typed error that it prints."""
        done = subprocess.run(
            [*_SWARMCTL, *words, "--json", "--data-dir", str(self.folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **self.environment},
            timeout=COMMAND_SECONDS_MAX,
            check=False,
        )
        assert done.stdout, done.stderr.decode(errors="replace")
        answer: dict[str, Any] = json.loads(done.stdout)
        if done.returncode:
            raise SwarmError.from_json(answer["error"])
        return answer

    @property
    def peer(self) -> str:
        return str(self.status()["self"])


class BedSwarm:
    """A daemon for each host of the bed; `form_static` starts them and makes them a swarm."""

    def __init__(self, root: Path, bed: Bed, model: Path) -> None:
        self.bed = bed
        self.model = model
        self.undivided = Undivided(model, context_tokens=CONTEXT_TOKENS)
        self.nodes = [self._node(root, host) for host in range(bed.n)]

    def _node(self, root: Path, host: int) -> BedNode:
        listen = [f"/ip6/::/tcp/{PORT}" if ":" in a else f"/ip4/0.0.0.0/tcp/{PORT}" for a in self.bed.addresses(host)]
        name = f"peer-{host}"
        settings: dict[str, dict[str, Any]] = {
            "node": {"name": name, "listen": listen, "memory_mib": 512},
            "leader": {"context_tokens": CONTEXT_TOKENS, "batch_tokens": 64, "request_deadline_s": 60.0},
            "compute": {"threads": 1},
            "api": {"listen": "off"},
            "log": {"format": "json"},
        }
        node = BedNode(name, root / name, settings, enter=self.bed.enter(host))
        node.environment["SWARMNODE_OWNER_PASSPHRASE"] = PASSPHRASE
        node.host = host
        return node

    def close(self) -> None:
        """Ends every daemon."""
        self.undivided.close()
        for node in self.nodes:
            if node.process is not None:
                node.kill()

    # -- making it a swarm --------------------------------------------------------------------------------------

    def form_static(self) -> None:
        """The first leads because every configuration says so; the others are its workers."""
        first, *others = self.nodes
        first.settings["swarm"] = {"role": "leader", "workers_expected": len(others)}
        start([first])
        address = first.status()["addresses"][0]
        for node in others:
            node.settings["swarm"] = {"role": "worker", "leader": address}
        start(others)
        self._add_model()

    def form(self, backbone: int) -> None:
        """The first founds a swarm and invites the others; so many of them may lead. It serves when this returns."""
        first, *others = self.nodes
        start(self.nodes)
        first.swarmctl("init", "--name", "bed")
        token = first.swarmctl("invite", "--uses", str(max(1, len(others))))["token"]
        at_once([partial(node.swarmctl, "join", token) for node in others])
        for node in others[: backbone - 1]:
            self._enlarge_backbone(node)
        self._add_model()

    def _enlarge_backbone(self, node: BedNode) -> None:
        """`swarmctl backbone add`, once the newcomer is connected, and until it acts."""
        first, peer = self.nodes[0], node.peer
        within(FORMED_SECONDS_MAX, lambda: first.swarmctl("backbone", "add", peer))
        acts = lambda: peer in {each["peer"] for each in first.swarmctl("backbone", "list")["members"]}  # noqa: E731
        within(FORMED_SECONDS_MAX, acts)

    def _add_model(self) -> None:
        self.nodes[0].swarmctl("model", "add", str(self.model), "--name", "m")
        self.wait_ready(self.nodes)

    # -- looking ------------------------------------------------------------------------------------------------

    def can_spare(self, lost: Collection[BedNode]) -> bool:
        """Whether the others have every expert: of their own, or from the first node, which has the model's file."""
        if self.nodes[0] not in lost:
            return True
        held: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
        names = {node.name for node in lost}
        for peer in self.leader.swarmctl("placement")["peers"]:
            experts = {(layer["layer"], expert) for layer in peer["held"] for expert in layer["experts"]}
            held[peer["name"] in names] |= experts
        return held[True] <= held[False]

    @property
    def leader(self) -> BedNode:
        """Whom the others say leads, once some node says so."""
        deadline = time.monotonic() + AGREED_SECONDS_MAX
        while True:
            statuses = {node.name: status_of(node) for node in self.nodes}
            named = {s["leader"] for s in statuses.values() if s and s["leader"]}
            for node in self.nodes:
                status = statuses[node.name]
                if status and status["leader"] == status["self"] and named == {status["self"]}:
                    return node
            assert time.monotonic() < deadline, f"nobody leads: {statuses}"
            time.sleep(_POLL_S)

    def wait_ready(self, nodes: Collection[BedNode], seconds: float = AGREED_SECONDS_MAX) -> float:
        """Wait until these all say ready and name one leader and term; the seconds that it took."""
        started = time.monotonic()
        while True:
            statuses = [status_of(node) for node in nodes]
            if all(s and s["ready"] for s in statuses):
                views = {(s["leader"], s["term"]) for s in statuses if s}
                if len(views) == 1 and None not in next(iter(views)):
                    return time.monotonic() - started
            if (waited := time.monotonic() - started) > seconds:
                said = [f"{n.name}: {_in_short(s)}" for n, s in zip(nodes, statuses, strict=True)]
                raise AssertionError(f"not ready after {waited:.1f} s: {'; '.join(said)}")
            time.sleep(_POLL_S)

    def expected(self, params: Params) -> list[int]:
        """What llama.cpp alone answers."""
        return list(self.undivided.answer(parse_ask(params)).tokens)

    def check(self, node: BedNode, params: Params) -> None:
        """Ask through `node`; the answer must be llama.cpp's own, token by token."""
        assert node.call("ask", **params)["tokens"] == self.expected(params)


def within(seconds: float, attempt: Callable[[], Any]) -> Any:
    """The first true value of an attempt that may fail before; its last error where none came in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := attempt():
                return value
        except SwarmError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(_POLL_S)


def start(nodes: Collection[BedNode]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_up()


def status_of(node: BedNode) -> dict[str, Any] | None:
    """None while the daemon does not answer."""
    try:
        return node.status()
    except NoDaemon:
        return None


def _in_short(status: dict[str, Any] | None) -> str:
    if status is None:
        return "no daemon"
    return f"ready {status['ready']}, leader {status['leader']}, term {status['term']}, {status['reason']}"


@contextlib.contextmanager
def swarm_in_bed(root: Path, bed: Bed, model: Path) -> Iterator[BedSwarm]:
    """Daemons that are not yet started."""
    swarm = BedSwarm(root, bed, model)
    try:
        yield swarm
    finally:
        swarm.close()


class Stage:
    """A swarm that serves the model, made anew after a round that did not find back. Its last peer can only dial."""

    def __init__(self, model: Path, root: Path) -> None:
        self._model = model
        self._root = root
        self._made = 0
        self._held = ExitStack()
        self._swarm: BedSwarm | None = None

    def swarm(self) -> BedSwarm:
        if self._swarm is None:
            self._made += 1
            bed = self._held.enter_context(Bed(PEERS))
            swarm = self._held.enter_context(swarm_in_bed(self._root / str(self._made), bed, self._model))
            bed.shield(PEERS - 1)
            swarm.form(BACKBONE)
            self._swarm = swarm
        return self._swarm

    def drop(self) -> None:
        self._swarm = None
        self._held.close()


def four_layers(path: Path) -> Path:
    """A tiny model with four layers of experts."""
    return write_olmoe(path, 4)
