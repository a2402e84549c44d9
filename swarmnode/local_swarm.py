"""A swarm of real daemons on this machine: what `demo`, `bench` and the tests run.

Each daemon is a process of its own with its own data folder, key and port on loopback. The object owns them: leaving
its context ends every one, whatever happened, unless `kept` hands them over to the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from capabilities.errors import DeadlineExceeded, Internal, NoDaemon
from swarmnode.control_client import Call, request
from swarmnode.local_founding import LocalFounding
from swarmnode.paths import find_paths

START_SECONDS_MAX: Final = 60.0
READY_SECONDS_MAX: Final = 600.0
STOP_SECONDS_MAX: Final = 10.0
_POLL_S: Final = 0.05
_LOG_TAIL_LINES: Final = 12

Progress = Callable[[str, int, int], None]
Settings = Mapping[str, Mapping[str, Any]]  # section -> key -> value, as in the configuration file


def _silent(_step: str, _done: int, _total: int) -> None:
    pass


_ALWAYS: Final[dict[str, dict[str, Any]]] = {"limits": {"on_battery": True, "on_metered": True}}
"""Somebody waits for what such a swarm does."""


@dataclass
class LocalNode:
    """One daemon."""

    name: str
    folder: Path
    settings: dict[str, dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    enter: tuple[str, ...] = ()  # words before the command: where it is to run
    core: int | None = None  # the only one that it may use
    python: tuple[str, ...] = (sys.executable,)  # what runs it: another processor's Python under an emulator, say
    start_s: float = START_SECONDS_MAX
    _peer_id: str = ""

    @property
    def socket(self) -> Path:
        return find_paths(self.folder).socket_to_call()

    @property
    def log(self) -> Path:
        return self.folder / "daemon.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the process; it need not be reachable yet."""
        config = self.write_settings()
        daemon = [*self.python, "-m", "swarmnode", "run", "--config", str(config), "--data-dir", str(self.folder)]
        with self.log.open("ab") as log, _interrupts_held():
            self.process = subprocess.Popen(
                [*self.enter, *daemon],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C at the terminal is for us; we end the daemons in order
            )
            if sys.platform == "linux" and self.core is not None:
                os.sched_setaffinity(self.process.pid, {self.core})  # its threads, which are still to come, inherit it

    @property
    def peer_id(self) -> str:
        """Known once the daemon was up."""
        return self._peer_id

    def keep_port(self) -> str:
        """The first address that the daemon listens on, which it keeps when it is started again."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not (status := self.status())["addresses"]:  # a member's network opens after its control socket
            self.check_alive()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.name} listens nowhere: {status['reason']}", hint=f"See {self.log}.")
            time.sleep(_POLL_S)
        address: str = status["addresses"][0]
        self._peer_id = status["self"]
        port = address.split("/tcp/")[1].split("/")[0]
        self.settings = _merge(self.settings, {"node": {"listen": [f"/ip4/127.0.0.1/tcp/{port}"]}})
        self.write_settings()
        return address

    def write_settings(self) -> Path:
        """The configuration file, as the daemon reads it when it starts (again)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.toml"
        config.write_text(_toml(_merge(_ALWAYS, self.settings)))
        return config

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One method of the control socket; raises every typed error that the daemon answers with."""
        return request(self.socket, method, params)

    def ask(self, prompt: str, **params: Any) -> dict[str, Any]:
        """The whole answer, as `swarmctl ask --json` gives it."""
        return self.call("ask", prompt=prompt, **params)

    @contextlib.contextmanager
    def stream(self, prompt: str, **params: Any) -> Iterator[Call]:
        """An answer under way: iterate over its events. Leaving early cancels it."""
        with Call(self.socket, "ask", {"prompt": prompt, **params}) as call:
            yield call

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def wait_up(self) -> None:
        """Wait until the control socket answers.

        Raises:
            Internal: the daemon ended; the message carries its last words.
        """
        deadline = time.monotonic() + self.start_s
        while True:
            self.check_alive()
            try:
                self.status()
                return
            except NoDaemon:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{self.name} did not start within {self.start_s:g} s", hint=f"See {self.log}."
                    ) from None
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise Internal, with the daemon's last words, unless its process runs."""
        if self.process is None or self.process.poll() is not None:
            status = None if self.process is None else self.process.returncode
            raise Internal(f"{self.name} ended with status {status}: {self.last_words()}", hint=f"See {self.log}.")

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-_LOG_TAIL_LINES:])[-1500:]

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_SECONDS_MAX)


class LocalSwarm:
    """`leader` and `workers` workers under `root`. Start it as a context manager.

    backbone: 0 makes a swarm whose configuration names the leader. Otherwise so many of the nodes elect it, the one
    called leader among them; who that is in the end may change, so ask `current_leader`.
    own_cores (Linux): each worker stays on one core, in turns, as if that were its machine. Otherwise the kernel wakes
    two of them on the same core every so often, where one waits until the other has computed.
    """

    def __init__(
        self,
        root: Path,
        workers: int,
        *,
        backbone: int = 0,
        leader: Settings | None = None,
        worker: Settings | None = None,
        each: Settings | None = None,
        own_cores: bool = False,
    ) -> None:
        base: dict[str, dict[str, Any]] = {
            "node": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
            "api": {"listen": "off"},
            "log": {"format": "json"},
        }
        merged = _merge(base, each or {})
        leads = _merge({"swarm": {"workers_expected": workers}}, leader or {})
        if backbone:
            merged = _merge(merged, {"swarm": {"role": "member", "mdns": False}}, leads)
        else:
            leads = _merge({"swarm": {"role": "leader", "replicas": 1}}, leads)

        def named(name: str) -> Settings:
            apart = {"host": name} if backbone else {}  # elected, each stands for a machine of its own
            return {"node": {"name": name, **apart}}

        self.leader = LocalNode("leader", root / "leader", _merge(merged, named("leader"), leads))
        names = [f"worker-{i}" for i in range(1, workers + 1)]
        self.workers = [LocalNode(name, root / name, _merge(merged, named(name), worker or {})) for name in names]
        self.backbone = backbone
        if own_cores and sys.platform == "linux":
            cores = sorted(os.sched_getaffinity(0))
            for i, node in enumerate(self.workers):
                node.core = cores[i % len(cores)]
        self.kept = False

    @property
    def nodes(self) -> list[LocalNode]:
        return [self.leader, *self.workers]

    def __enter__(self) -> LocalSwarm:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or not self.kept:
            self.stop()

    def start(self) -> None:
        """Start all daemons and wait until each answers."""
        founding = LocalFounding.of("local", self._backbone_folders()) if self.backbone else None
        if founding is not None:
            founding.enter(self.leader.folder)
        self.leader.start()
        self.leader.wait_up()
        address = self.leader.keep_port()
        for worker in self.workers:
            if founding is not None:
                founding.enter(worker.folder, [address])
            else:
                worker.settings = _merge(worker.settings, {"swarm": {"role": "worker", "leader": address}})
            worker.start()
        for worker in self.workers:
            worker.wait_up()
            if founding is not None:
                worker.keep_port()

    def _backbone_folders(self) -> list[Path]:
        return [node.folder for node in self.nodes[: self.backbone]]

    def current_leader(self) -> LocalNode | None:
        """Who leads now, as the first node sees it that answers and knows."""
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None and (peer := node.status()["leader"]):
                for other in self.nodes:
                    if other.peer_id == peer:
                        return other
        return None

    def add_model(self, path: Path, progress: Progress = _silent, *, name: str | None = None) -> dict[str, Any]:
        """`swarmctl model add` on the leader; its result."""
        with Call(self.leader.socket, "model_add", {"path": str(path), "name": name}) as call:
            for event in call:
                if event.get("event") == "progress":
                    progress(event["step"], event["done"], event["total"])
            return call.result

    def wait_ready(self, progress: Progress = _silent, timeout_s: float = READY_SECONDS_MAX) -> dict[str, Any]:
        """Wait until the leader says ready; the status that said so.

        Raises:
            DeadlineExceeded, Internal: with the reason.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for node in self.nodes:
                node.check_alive()
            status = self.leader.status()
            if status["ready"]:
                return status
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the swarm was not ready after {timeout_s:g} s: {status['reason']}")
            _show_loading(status, progress)
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End every daemon that runs: first asked, then made."""
        running = [n.process for n in self.nodes if n.process is not None and n.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended: a process that is being started must get its owner first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    held: list[int] = []
    before = {number: signal.signal(number, lambda n, _: held.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in held:
            signal.raise_signal(late)


def _show_loading(status: Mapping[str, Any], progress: Progress) -> None:
    rows = [peer["progress"] for peer in status["peers"] if peer.get("progress")]
    done, total = sum(r["done_bytes"] for r in rows), sum(r["total_bytes"] for r in rows)
    progress(str(rows[0]["phase"]) + " experts" if rows else "waiting for the swarm", done, total)


def _merge(*settings: Settings) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for one in settings:
        for section, values in one.items():
            merged.setdefault(section, {}).update(values)
    return merged


def _toml(settings: Settings) -> str:
    """Only what `_merge` makes: sections of texts, numbers, truth values and lists of texts."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    import json

    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value)  # texts, numbers and lists of them are written alike in JSON and TOML
