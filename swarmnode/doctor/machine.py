"""Looks at the machine: kernels (in a child, which may crash), files, memory, disk, ports, addresses, multicast."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from backends.child import parse_line
from backends.ggml import LLAMA_CPP_VERSIONS
from backends.gguf_types import GGML_TYPES
from backends.measure import Request
from capabilities.errors import SwarmError
from swarmnode.bootstrap import SetupError, check_compilers
from swarmnode.config import Config
from swarmnode.config_sections import MIB
from swarmnode.doctor.facts import Disk, Fault, Interface, Machine, Memory
from swarmnode.files_limit import unlimited
from swarmnode.http_address import http_address
from swarmnode.measure_child import order
from swarmnode.net.addresses import interface_addresses
from swarmnode.paths import Paths
from swarmnode.version import VERSION

KERNELS_SECONDS_MAX: Final = 60.0
_KERNELS_DEADLINE_S: Final = 1.0  # of the measurement itself; imports and a loaded machine take the rest
_MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_GROUP: Final = "224.0.0.251"  # mDNS's own, on a port of our own: nobody else hears it
_ECHO_S: Final = 1.0
_PROBE_BYTES: Final = 4096


def look_at_machine(
    config: Config, paths: Paths, *, daemon_pid: int | None, held_bytes: int, budget_bytes: int | None, bound: bool
) -> Machine:
    """held_bytes, budget_bytes: of experts, by the daemon's word. bound: a daemon has the ports."""
    soft, hard = _files(daemon_pid)
    installed = _installed("llama-cpp-python")
    known = installed is not None and installed in LLAMA_CPP_VERSIONS
    return Machine(
        python=tuple(sys.version_info[:3]),
        swarmnode=VERSION,
        llama_cpp=installed,
        llama_cpp_known=" or ".join(LLAMA_CPP_VERSIONS),
        kernels=try_kernels(config) if known else None,
        compilers=_compilers() if installed is None else None,
        files_hard=hard,
        files_soft=soft,
        memory=_memory(config, held_bytes, budget_bytes),
        disk=_disk(config, paths),
        interfaces=tuple(Interface(each.address, each.bridge, each.loopback) for each in interface_addresses()),
        multicast=try_multicast() if config.swarm.mdns else None,
        ports=None if bound else tuple(taken_ports([*config.node.listen, *_of_http(config.api.listen)])),
    )


def try_kernels(config: Config) -> Fault | None:
    """Compute a little with the configured backend, in a child process."""
    q8_0 = next(kind for kind, known in GGML_TYPES.items() if known.name == "q8_0")
    with tempfile.TemporaryDirectory(prefix="swarmnode-doctor-") as folder:
        ordered = order(
            config.compute, 1, Path(folder), Request((q8_0,)), fast=config.leader.fast,
            deadline_s=_KERNELS_DEADLINE_S, anew=True,
        )  # fmt: skip
        command = [sys.executable, "-m", "swarmnode.measure_child"]
        try:
            ended = subprocess.run(
                command,
                input=json.dumps(ordered).encode(),
                capture_output=True,
                timeout=KERNELS_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            mend = "Try another compute.device or compute.backend: this one hangs."
            return Fault(f"the backend computed nothing within {KERNELS_SECONDS_MAX:.0f} s", mend)
    for line in reversed(ended.stdout.splitlines()):
        message = parse_line(line)
        if "result" in message:
            return None
        if isinstance(error := message.get("error"), dict):
            return fault_of(SwarmError.from_json(error))
    words = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
    mend = "Run `make setup` again: the kernels were built for another machine, or a library of theirs is missing."
    return Fault(f"the backend cannot compute: {words[0][:300]}", mend)


def fault_of(error: SwarmError) -> Fault:
    return Fault(error.message, error.hint)


def _compilers() -> Fault | None:
    try:
        check_compilers(os.environ)
    except SetupError as error:
        cause, _, mend = str(error).partition(": ")
        return Fault(cause, mend)
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _files(daemon_pid: int | None) -> tuple[int, int]:
    """Soft and hard limit of the daemon that runs, else of this process, from which one would be started."""
    if daemon_pid is not None and hasattr(psutil.Process, "rlimit"):
        with contextlib.suppress(psutil.Error, OSError):
            soft, hard = psutil.Process(daemon_pid).rlimit(psutil.RLIMIT_NOFILE)
            return unlimited(soft), unlimited(hard)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return unlimited(soft), unlimited(hard)


def _memory(config: Config, held_bytes: int, budget_bytes: int | None) -> Memory:
    machine = psutil.virtual_memory()
    limit = machine.total
    with contextlib.suppress(OSError, ValueError):
        limit = min(limit, int(_MEMORY_LIMIT.read_text()))
    available = min(machine.available, limit)
    wanted = budget_bytes if budget_bytes is not None else config.node.memory_bytes(available)
    return Memory(limit, available, wanted, held_bytes)


def _disk(config: Config, paths: Paths) -> Disk:
    there = next(folder for folder in (paths.shards, *paths.shards.parents) if folder.exists())
    held = 0
    for file in paths.shards.rglob("*"):
        with contextlib.suppress(OSError):
            held += file.lstat().st_blocks * 512
    fault = try_to_write(paths.data) if paths.data.exists() else None
    return Disk(psutil.disk_usage(str(there)).free, config.node.disk_mib * MIB, held, fault)


def try_to_write(folder: Path) -> str | None:
    """Why nothing can be written there: full, over a quota, read-only, or another's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def taken_ports(listen: Sequence[str]) -> Iterable[Fault]:
    """What stands in the way of listening at /ip4/HOST/tcp/PORT, the form that the configuration takes."""
    for address in listen:
        _, kind, host, _, port = address.split("/")
        family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, int(port)))
                sock.listen(1)
            except OSError as error:
                yield _port_fault(address, int(port), error)


def _of_http(listen: str) -> list[str]:
    """Where the HTTP interface is to listen, in the form of node.listen."""
    if (address := http_address(listen)) is None:
        return []
    host, port = address
    return [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"]


def _port_fault(address: str, port: int, error: OSError) -> Fault:
    if error.errno == errno.EADDRINUSE:
        holder = _holder_of(port)
        cause = f"port {port} is taken by {holder or 'another program'}"
        return Fault(cause, "End that program, or choose another port in node.listen or api.listen.")
    if error.errno == errno.EACCES:
        return Fault(f"port {port} is for the system's own services", "Choose one above 1023 in node.listen.")
    if error.errno == errno.EADDRNOTAVAIL:
        return Fault(f"{address} is no address of this machine", "Correct node.listen; /ip4/0.0.0.0 means all of them.")
    return Fault(f"{address} cannot be listened on: {error.strerror}", "Correct node.listen.")


def _holder_of(port: int) -> str:
    """The program that listens there, where this user may know it."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def try_multicast(group: str = _GROUP) -> str | None:
    """Why a multicast packet does not come back to the machine that sent it; None if it does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) as sock:
        try:
            sock.bind(("", 0))
            sock.settimeout(_ECHO_S)
            member = socket.inet_aton(group) + socket.inet_aton("0.0.0.0")
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            word = os.urandom(16)
            sock.sendto(word, (group, sock.getsockname()[1]))
            while sock.recv(64) != word:
                pass
        except TimeoutError:
            return "a packet to itself does not come back"
        except OSError as error:
            return error.strerror or str(error)
    return None
