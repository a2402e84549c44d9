"""The doctor on real faults: a port that is taken, a model that changed, few files, a daemon that hangs, and more."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.add_model import add_model
from swarmnode.config import Config, parse_config
from swarmnode.doctor.machine import _of_http, taken_ports, try_kernels, try_multicast, try_to_write
from swarmnode.doctor.node import look_at_node, try_all
from swarmnode.identity import lock_data_folder
from swarmnode.local_founding import LocalFounding
from swarmnode.paths import find_paths
from swarmnode.swarm.store import SwarmFiles
from tests.control_threads import SWARMCTL
from tests.expert_models import quiet, tiny_file
from tests.patience import PATIENCE_S
from tests.schema_checks import conforms


def doctor(data: Path, *words: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Exit status, and the checks by their ids with `mended`."""
    command = [*SWARMCTL, "doctor", "--json", "--data-dir", str(data), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options)
    result = json.loads(done.stdout)
    conforms("doctor", result)
    return done.returncode, {check["id"]: check for check in result["checks"]} | {"mended": result["mended"]}


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


def test_several_faults_at_once_and_what_fix_mends(tmp_path: Path) -> None:
    LocalFounding.of("home", [tmp_path]).enter(tmp_path)
    paths = find_paths(tmp_path)
    (tmp_path / "identity.key").chmod(0o644)
    paths.config_file.write_text("[node]\nmemory_mb = 3\n")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.socket_to_bind()))
    status, found = doctor(tmp_path, preexec_fn=few_files)
    assert status == 1
    assert "at most 128 files" in found["file_descriptors"]["cause"]
    assert "identity.key" in found["data_folder"]["cause"]
    assert "did you mean memory_mib?" in found["configuration"]["cause"]
    assert found["daemon"]["state"] == "warn"
    assert found["kernels"]["state"] == "ok"
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o644, "nothing is mended unasked"
    paths.config_file.unlink()
    status, found = doctor(tmp_path, "--fix")
    assert {name: found[name]["state"] for name in ("data_folder", "configuration", "daemon")} == {
        "data_folder": "ok", "configuration": "ok", "daemon": "warn"
    }  # fmt: skip
    assert found["daemon"]["cause"] == "no daemon runs"
    assert len(found["mended"]) == 2
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600
    assert not paths.socket_to_call().exists()


def test_a_port_that_is_taken_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (fault,) = taken_ports([f"/ip4/127.0.0.1/tcp/{port}", "/ip4/127.0.0.1/tcp/0"])
    assert f"port {port} is taken by {psutil.Process().name()} (process {os.getpid()})" == fault.cause
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        (fault,) = taken_ports(_of_http(f"{host}:{port}"))
        assert "api.listen" in fault.mend
    assert _of_http("[::1]:11435") == ["/ip6/::1/tcp/11435"]
    assert _of_http("off") == []
    (fault,) = taken_ports(["/ip4/192.0.2.77/tcp/4000"])
    assert "no address of this machine" in fault.cause


def test_a_model_that_changed_or_went_is_named(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(tiny_file("olmoe"), model)
    add_model(model, tmp_path / "models" / "tiny", "tiny", quiet)
    paths = find_paths(tmp_path)
    assert look_at_node(Config(), None, paths).models == ()
    os.utime(model, ns=(1, 1))
    (changed,) = look_at_node(Config(), None, paths).models
    assert "changed since it was added" in changed.cause
    model.unlink()
    (lost,) = look_at_node(Config(), None, paths).models
    assert "cannot be read" in lost.cause


def test_files_that_are_lost_or_damaged(tmp_path: Path) -> None:
    LocalFounding.of("home", [tmp_path]).enter(tmp_path)
    paths, files = find_paths(tmp_path), SwarmFiles(tmp_path)
    node = look_at_node(Config(), None, paths)
    assert (node.votes, node.identity, node.record) == (None, None, None)
    assert node.membership is not None
    assert node.membership.quorum == 1
    files.votes.unlink()
    (tmp_path / "identity.key").write_bytes(b"x")
    node = look_at_node(Config(), None, paths)
    assert node.votes is not None
    assert "is lost" in node.votes.cause
    assert node.identity is not None
    files.record.write_bytes(b"junk")
    assert look_at_node(Config(), None, paths).record is not None


def test_a_daemon_that_has_the_folder_and_does_not_answer(tmp_path: Path) -> None:
    with lock_data_folder(tmp_path):
        node = look_at_node(Config(), None, find_paths(tmp_path))
    assert (node.daemon, node.daemon_pid) == ("silent", os.getpid())
    assert look_at_node(Config(), None, find_paths(tmp_path)).daemon == "absent"


def test_an_invite_whose_addresses_do_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_one = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/x"
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            refused = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/x"
            found = try_all([open_one, refused, "/ip4/127.0.0.1/udp/1"])
    assert found == {open_one: None, refused: "Connection refused", "/ip4/127.0.0.1/udp/1": "no TCP address"}


def test_a_folder_that_takes_no_file_and_a_network_without_multicast() -> None:
    assert try_to_write(Path("/proc"))
    assert try_multicast(group="192.0.2.1")  # no multicast address: the system refuses it as it does a forbidden one


def test_a_backend_that_is_not_there_is_found_by_computing() -> None:
    fault = try_kernels(parse_config('[compute]\ndevice = "Abacus0"'))
    assert fault is not None
    assert "Abacus0" in fault.cause
    assert fault.mend


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 200, 200), (64, 10_000, 4096), (5000, 10_000, 5000)])
def test_the_daemon_raises_its_limit_of_files(soft: int, hard: int, then: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"the hard limit of files here is below {hard}")
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "from swarmnode.files_limit import raise_files_limit; print(raise_files_limit())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == then
