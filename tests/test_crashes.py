"""Whatever ends a daemon, at whatever moment: it starts again, and has lost nothing that it had said was done."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.add_model import MANIFEST as MANIFEST_FILE
from capabilities.errors import Internal, ModelNotFound, SwarmError, UsageError
from swarmnode.backbone.kept import Kept
from swarmnode.durable import next_counter, sweep, write_whole
from swarmnode.equivalence.kept import read_matrix
from swarmnode.kept_requests import KeptRequests
from swarmnode.local_swarm import LocalNode
from swarmnode.log_file import last_lines
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models
from swarmnode.paths import find_paths
from swarmnode.predicting import foretold
from swarmnode.shards.manifests import ManifestStore
from tests.node_tools import SETTINGS, ctl
from tests.patience import PATIENCE_S
from tests.swarm_tools import ask, wait_until
from tests.tiny_architectures import write_tiny_model

STEPS = ("open", "write", "fsync", "replace", "sync_folder")
DISK_BYTES = 3 << 20  # a trunk and all experts of a tiny model take 1 MB, a log some KB

DYING = """
import os, signal, sys
from pathlib import Path
from swarmnode import durable

step, path = sys.argv[1], Path(sys.argv[2])

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        die()

if step == "write":
    fdopen = os.fdopen
    os.fdopen = lambda *words: Half(fdopen(*words))
elif step == "replace":
    Path.replace = die
else:
    setattr(durable if step == "sync_folder" else os, step, die)
durable.write_whole(path, b"after")
"""


@pytest.mark.parametrize("step", STEPS)
def test_a_file_is_the_one_before_or_the_one_after(tmp_path: Path, step: str) -> None:
    path = tmp_path / "state"
    write_whole(path, b"before")
    killed = subprocess.run([sys.executable, "-c", DYING, step, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == (b"after" if step == "sync_folder" else b"before")
    left = [each.name for each in tmp_path.iterdir()]
    assert len(left) == (2 if step in ("write", "fsync", "replace") else 1)
    sweep([tmp_path])
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    write_whole(path, b"later")
    assert path.read_bytes() == b"later"


# -- kill -9 -----------------------------------------------------------------------------------------------------------


class Doomed:
    """A daemon that is killed while something is done with it."""

    def __init__(self, node: LocalNode, moments: random.Random) -> None:
        self.node = node
        self._moments = moments
        self._peer = ""

    def dies_while(self, what: Callable[[], object], within_s: float) -> bool:
        """Do it, kill -9 at a random moment of the next seconds, start again; whether it had said that it is done.

        Nothing of it may have been forgotten afterwards: the caller looks.
        """
        done: list[object] = []

        def do() -> None:
            with contextlib.suppress(SwarmError, AssertionError):  # of a call, of a command
                done.append(what())

        thread = threading.Thread(target=do)
        thread.start()
        thread.join(self._moments.uniform(0, within_s))
        self.node.kill()
        thread.join()
        self.start()
        return bool(done)

    def start(self) -> None:
        self.node.start()
        self.node.wait_up()
        peer = self.node.status()["self"]
        assert self._peer in ("", peer), "it is another peer now"
        self._peer = peer
        assert "Traceback" not in self.node.log.read_text()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Doomed, Doomed]]:
    seed = random.randrange(2**32)
    print(f"moments drawn from {seed}")
    moments = random.Random(seed)
    names = ("first", "second")
    nodes = [LocalNode(name, tmp_path / name, settings(name)) for name in names]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_up()
        yield Doomed(nodes[0], moments), Doomed(nodes[1], moments)
    finally:
        for node in nodes:
            node.kill()


def settings(name: str) -> dict[str, dict[str, Any]]:
    return {**SETTINGS, "node": {**SETTINGS["node"], "name": name, "host": name}}


def test_a_daemon_that_is_killed_at_any_moment_has_lost_nothing(two: tuple[Doomed, Doomed], tmp_path: Path) -> None:
    first, second = two
    path = write_tiny_model(tmp_path / "tiny.gguf", "olmoe")

    ctl(first.node, "init", "--name", "home")
    swarm = wait_until(lambda: (s := first.node.status())["addresses"] and s["swarm"])
    first.node.keep_port()

    def add() -> object:
        return first.node.call("model_add", path=str(path), name=None)

    if first.dies_while(add, 1.2):
        assert [model["fault"] for model in first.node.call("model_list")["models"]] == [None]
    elif not first.node.call("model_list")["models"]:
        wait_until(lambda: adds(add) or first.node.call("model_list")["models"])
    before = wait_until(lambda: (s := first.node.status())["ready"] and s)
    assert before["swarm"] == swarm
    params = ask("Hello", 8, ignore_eos=True)
    answer = first.node.call("ask", **params)["tokens"]

    token = ctl(first.node, "invite")["token"]
    joined = second.dies_while(lambda: ctl(second.node, "join", token, "--yes"), 1.2)
    if second.node.status()["swarm"]["id"] is None:
        assert not joined
        ctl(second.node, "join", token, "--yes")  # the one use of the invite was its own
    second.dies_while(lambda: wait_until(lambda: second.node.status()["ready"]), 0.8)  # it fetches its experts
    assert second.node.status()["swarm"] == swarm

    first.dies_while(lambda: first.node.call("ask", **ask("Hello", 200, ignore_eos=True)), 0.5)
    for node in (first.node, second.node):
        after = wait_until(lambda node=node: (s := node.status())["ready"] and s)
        assert after["term"] > before["term"]
        assert after["swarm"] == swarm
        assert node.call("ask", **params)["tokens"] == answer
    hidden = [each.name for each in (first.node.folder / "models").iterdir() if each.name.startswith(".")]
    assert not [name for name in hidden if ".part-" in name]


def adds(add: Callable[[], object]) -> bool:
    """The child of a daemon that was killed may be adding the model still: then the name is taken in the end."""
    try:
        return bool(add())
    except SwarmError:
        return False


# -- a full disk -------------------------------------------------------------------------------------------------------


class Disk:
    """A file system of a few megabytes, which can be filled to the last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filling = folder / "filling"

    def fill(self) -> None:
        with self._filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        self._filling.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of its own needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_no_damage(disk: Disk, tmp_path: Path) -> None:
    node = LocalNode("only", disk.folder / "only", settings("only"))
    node.write_settings()
    disk.fill()
    run = [sys.executable, "-m", "swarmnode", "run", "--data-dir", str(node.folder)]
    refused = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert refused.returncode == 1
    assert "identity.key: No space left on device" in refused.stderr
    assert "Traceback" not in refused.stderr

    disk.free()
    node.start()
    try:
        node.wait_up()
        me = node.status()["self"]
        swarm = ctl(node, "init", "--name", "home")["swarm"]
        node.keep_port()
        path = write_tiny_model(tmp_path / "tiny.gguf", "olmoe")
        disk.fill()
        for words in (["invite"], ["model", "add", str(path)]):
            error = ctl(node, *words, status=1 if words == ["invite"] else 2)["error"]
            assert "No space left on device" in error["message"]
            assert "space" in error["hint"]
            assert error["path"].startswith(str(node.folder))
        assert node.call("model_list")["models"] == []
        disk.free()
        node.call("model_add", path=str(path), name=None)
        before = wait_until(lambda: (s := node.status())["ready"] and s)
        params = ask("Hello", 8, ignore_eos=True)
        answer = node.call("ask", **params)["tokens"]

        disk.fill()
        assert node.call("ask", **params)["tokens"] == answer, "what is in memory goes on"
        node.kill()
        disk.fill()
        node.start()
        node.wait_up()
        why = wait_until(lambda: "cannot write" in (reason := str(node.status()["reason"])) and reason)
        assert f"{node.folder / 'votes'}: No space left on device" in why
        disk.free()
        after = wait_until(lambda: (s := node.status())["ready"] and s)
        assert (after["self"], after["swarm"]) == (me, {"id": swarm["id"], "name": "home"})
        assert after["term"] > before["term"]
        assert node.call("ask", **params)["tokens"] == answer
        assert "Traceback" not in node.log.read_text()
    finally:
        node.kill()


# -- files that are not what was written -------------------------------------------------------------------------------

SWARM = "ab" * 32
MANIFEST = "cd" * 32


def _choice(folder: Path) -> object:
    return ModelChoice(folder / "model", "", SWARM).swarm_active or None


def _request(folder: Path) -> object:
    requests = KeptRequests(folder / "requests", 9)
    assert requests.all() == []
    with pytest.raises(UsageError, match=r"kept\.json is damaged") as error:
        requests.get("kept")
    assert "swarmctl forget kept" in error.value.hint
    assert requests.forget("kept") == 1
    return None


def _term(folder: Path) -> object:
    with pytest.raises(Internal, match="term is damaged") as error:
        next_counter(folder / "term")
    assert "greater than any term" in error.value.hint
    return None


def _model(folder: Path) -> object:
    models = Models(folder / "models")
    for look in (models.show, models.open):
        with pytest.raises(ModelNotFound, match="manifest of tiny is damaged") as error:
            look("tiny")
        assert "swarmctl model remove tiny" in error.value.hint
    models.remove("tiny")
    return models.names() or None


KEPT: dict[str, Callable[[Path], object]] = {
    "mandate": lambda folder: Kept(folder, SWARM).load_mandate(),
    "leader.record": lambda folder: Kept(folder, SWARM).load_record(),
    "model": _choice,
    "term": _term,
    "prediction.json": lambda folder: foretold(find_paths(folder), "tiny"),
    "equivalence.json": read_matrix,
    "requests/kept.json": _request,
    f"shards/manifests/{MANIFEST}": lambda folder: ManifestStore(folder / "shards").get(MANIFEST),
    f"models/tiny/{MANIFEST_FILE}": _model,
    "logs/daemon.log": lambda folder: last_lines(folder / "logs", 9)[0] or None,
}

JUNK = {
    "empty": b"",
    "zeros": bytes(4096),  # what a file system may leave of a file after a power cut
    "other bytes": bytes(range(256)),
    "deep": b"[" * 100_000,
    "half of JSON": b'{"model": "tiny", "predicted": {"tokens_per_s": 1',
    "a lone number": b"\xff1\n",
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_a_file_is_named_or_counts_as_none(tmp_path: Path, name: str, junk: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(JUNK[junk])
    assert KEPT[name](tmp_path) is None
