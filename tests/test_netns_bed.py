"""The bed itself: hosts that exist, packets that take their time, cuts, and nothing left over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.bed import Bed, NoNamespaces
from tests.netns.skipping import bed_or_skip
from tests.patience import LOADED, PATIENCE_S
from tests.swarm_tools import wait_until

ECHO = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 7), family=family) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
"""
DIAL = """
import socket, sys, time
try:
    with socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])) as connection:
        started = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.perf_counter() - started)
except TimeoutError:
    print("timeout")
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    servers = []
    with bed_or_skip(3) as bed:
        for host in (0, 1):
            for address in bed.addresses(host):
                run = [*bed.enter(host), sys.executable, "-c", ECHO, address]
                server = subprocess.Popen(run, stdout=subprocess.PIPE)
                assert server.stdout is not None
                assert server.stdout.readline() == b"up\n"
                server.stdout.close()
                servers.append(server)
        yield bed
    assert [server.wait(PATIENCE_S) for server in servers] == [-9] * 4


def dial(bed: Bed, source: int, address: str, seconds: float = PATIENCE_S) -> str:
    run = [*bed.enter(source), sys.executable, "-c", DIAL, address, str(seconds)]
    return subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.strip()


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_a_round_trip_takes_twice_the_delay(bed: Bed, family: int) -> None:
    seconds = float(dial(bed, 0, bed.addresses(1)[family]))
    assert 0.02 <= seconds < LOADED  # a busy machine may add to it, nothing may take from it
    assert bed.counts()["delivered"] > 0


def test_a_cut_and_its_end(bed: Bed) -> None:
    address = bed.addresses(1)[0]
    bed.part([0], [1])
    assert dial(bed, 0, address, 0.3) == "timeout"
    assert float(dial(bed, 2, address)) > 0
    bed.heal()
    bed.cut_off(1)
    assert dial(bed, 2, address, 0.3) == "timeout"
    bed.cut_off(1, False)
    assert float(dial(bed, 0, address)) > 0


def test_a_shielded_host_dials_out_and_nobody_dials_in(bed: Bed) -> None:
    bed.shield(1)
    try:
        for address in bed.addresses(1):
            assert dial(bed, 0, address, 0.3) == "timeout"
        assert float(dial(bed, 1, bed.addresses(0)[0])) > 0
    finally:
        bed.shield(1, False)


def test_a_wrong_command_is_refused_and_the_bridge_goes_on(bed: Bed) -> None:
    with pytest.raises(ValueError, match="no link"):
        bed.set(0, 7, cut=True)
    with pytest.raises(ValueError, match="delay_s"):
        bed.set(0, 1, delay_s=-1)
    assert float(dial(bed, 0, bed.addresses(1)[0])) > 0


def test_the_machine_sees_nothing_and_nothing_is_left() -> None:
    before = {name for _, name in socket.if_nameindex()}
    with bed_or_skip(2) as bed:
        process = subprocess.Popen([*bed.enter(0), "sleep", "600"])
        namespace = lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino  # noqa: E731
        wait_until(lambda: namespace() != os.stat("/proc/self/ns/net").st_ino)
        assert {name for _, name in socket.if_nameindex()} == before
    assert process.wait(PATIENCE_S) == -9


def test_hosts_end_with_whoever_made_them() -> None:
    """kill -9 of the process that owns the bed."""
    script = (
        "import subprocess, sys, time\n"
        "from tests.netns.bed import Bed, NoNamespaces\n"
        "try:\n"
        "    bed = Bed(1).__enter__()\n"
        "except NoNamespaces as error:\n"
        "    sys.exit(print('no', error))\n"
        "print(subprocess.Popen([*bed.enter(0), 'sleep', '600']).pid, flush=True)\n"
        "time.sleep(0.3)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    first, _, rest = run.stdout.strip().partition(" ")
    if first == "no":
        pytest.skip(rest)
    wait_until(lambda: not is_running(int(first)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespaces, match="root" if sys.platform.startswith("linux") else "Linux"), Bed(1):
        pass


def test_what_the_kernel_forbids_is_a_reason() -> None:
    """Without the right to make namespaces, as root in most containers."""
    setpriv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    script = "from tests.netns.bed import Bed\nBed(1).__enter__()"
    try:
        run = subprocess.run(
            [*setpriv, sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except FileNotFoundError:
        pytest.skip("setpriv (util-linux) is missing")
    if os.geteuid() == 0:
        assert "NoNamespaces: network namespaces cannot be made here: " in run.stderr
