"""The checks of the machine: facts in, problems out. A text instead of problems says why there was nothing to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from swarmnode.bootstrap import PYTHON_MIN
from swarmnode.doctor.facts import Facts, Problem
from swarmnode.files_limit import FILES_MIN, FILES_WANTED

MIB: Final = 1 << 20
DAEMON_BYTES: Final = 250 * MIB  # of a worker, besides its experts (NodeConfig.memory_mib)
MEMORY_USEFUL: Final = 256 * MIB  # a few experts of a small model; less is hardly worth a round trip
DISK_MIN: Final = 64 * MIB  # records, logs and votes are written whole, beside the old ones
DISK_USEFUL: Final = 1024 * MIB

Found = Sequence[Problem] | str
Check = Callable[[Facts], Found]


def python(facts: Facts) -> Found:
    version = ".".join(map(str, facts.machine.python[:3]))
    if facts.machine.python < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        mend = f"Set up again with Python {wanted} or newer: `make setup PYTHON=python3.12`."
        return [Problem("fail", f"Python {version} runs this, and {wanted} is the oldest that works", mend)]
    return []


def kernels(facts: Facts) -> Found:
    """Whether there is a backend that computes."""
    machine = facts.machine
    if machine.llama_cpp is None:
        if machine.compilers is not None:
            return [Problem("fail", machine.compilers.cause, machine.compilers.mend)]
        return [Problem("fail", "llama-cpp-python is not installed", "Run `make setup`, which builds it.")]
    if machine.llama_cpp != machine.llama_cpp_known:
        cause = f"llama-cpp-python {machine.llama_cpp} is installed, and this version knows {machine.llama_cpp_known}"
        return [Problem("fail", cause, "Run `make setup`, which installs the version that is known.")]
    if machine.kernels is not None:
        return [Problem("fail", machine.kernels.cause, machine.kernels.mend)]
    return []


def file_descriptors(facts: Facts) -> Found:
    """The daemon raises its own soft limit to the hard one."""
    hard = facts.machine.files_hard
    if hard >= FILES_WANTED:
        return []
    mend = f"Raise it: `LimitNOFILE={FILES_WANTED}` in a systemd unit, or a `nofile` line in /etc/security/limits.conf."
    if hard < FILES_MIN:
        return [Problem("fail", f"at most {hard} files may be open, and the daemon needs {FILES_MIN}", mend)]
    return [Problem("warn", f"at most {hard} files may be open: enough for a small swarm only", mend)]


def memory(facts: Facts) -> Found:
    """Budget against what there is."""
    m = facts.machine.memory
    lower = "Set a smaller node.memory_mib, or leave it out: then it is three quarters of what is available."
    if m.wanted + DAEMON_BYTES > m.limit:
        cause = f"{_mib(m.wanted)} MiB are offered for experts, and this machine has {_mib(m.limit)} MiB in all"
        return [Problem("fail", cause, lower)]
    if m.wanted > m.available + m.held:
        cause = f"{_mib(m.wanted)} MiB are offered for experts, and {_mib(m.available + m.held)} MiB are available now"
        return [Problem("warn", cause, f"Close other programs. {lower}")]
    if m.wanted < MEMORY_USEFUL:
        cause = f"only {_mib(m.wanted)} MiB are left for experts"
        return [Problem("warn", cause, "Close other programs, or take part with another machine.")]
    return []


def disk(facts: Facts) -> Found:
    d = facts.machine.disk
    if d.write_fault is not None:
        mend = "Free some space, or mend the disk or its permissions; records are written whole and were not harmed."
        return [Problem("fail", f"the data folder cannot be written: {d.write_fault}", mend)]
    if d.free < DISK_MIN:
        return [Problem("fail", f"the disk is full: {_mib(d.free)} MiB are free", "Free some space.")]
    if d.wanted > d.free + d.held:
        cause = f"{_mib(d.wanted)} MiB are offered for fetched experts, and {_mib(d.free + d.held)} MiB are there"
        return [Problem("fail", cause, "Free some space, or set a smaller node.disk_mib.")]
    if d.free + d.held < DISK_USEFUL:
        cause = f"{_mib(d.free)} MiB of disk are free: few experts can be kept, and are fetched again at each start"
        return [Problem("warn", cause, "Free some space.")]
    return []


def port(facts: Facts) -> Found:
    ports = facts.machine.ports
    if ports is None:
        http = (facts.node.status or {}).get("http")
        if isinstance(http, Mapping) and http.get("error"):
            cause = f"the daemon cannot listen for HTTP on {http.get('listen')}, since {http['error']}"
            return [Problem("fail", cause, "Stop the other program, or change api.listen; the daemon tries it again.")]
        return "the daemon has its ports"
    return [Problem("fail", each.cause, each.mend) for each in ports]


def interfaces(facts: Facts) -> Found:
    """Whether others can have a way to this machine."""
    others = [each for each in facts.machine.interfaces if not each.loopback]
    if not others:
        return [Problem("warn", "this machine has no address but its own loopback", "Connect it to a network.")]
    if all(each.bridge for each in others):
        cause = f"the only address, {others[0].address}, is of a bridge that containers on this machine use"
        mend = "Connect a real network; in a container, give it the host's network or publish the port of node.listen."
        return [Problem("warn", cause, f"{mend} A worker needs no address: it dials out.")]
    return []


def multicast(facts: Facts) -> Found:
    if not facts.node.mdns:
        return "swarm.mdns is off"
    if facts.machine.multicast is None:
        return []
    mend = "Let UDP port 5353 pass the firewall, or rely on invites: peers are found by their addresses, too."
    return [Problem("warn", f"multicast is blocked: {facts.machine.multicast}", mend)]


def data_folder(facts: Facts) -> Found:
    if not facts.node.exists:
        return "there is no data folder yet: the first command makes it"
    return list(_loose(facts))


def _loose(facts: Facts) -> Iterator[Problem]:
    for each in facts.node.loose:
        if not each.own:
            yield Problem("fail", f"{each.path} belongs to another user", "Run the daemon as its owner, or chown it.")
        else:
            cause = f"others on this machine may read or change {each.path} (mode {each.mode:o})"
            yield Problem("fail", cause, f"`chmod {each.wanted:o} {each.path}`; `swarmctl doctor --fix` does it.")


def _mib(count: int) -> int:
    return count // MIB


MACHINE_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("python", python),
    ("kernels", kernels),
    ("file_descriptors", file_descriptors),
    ("memory", memory),
    ("disk", disk),
    ("data_folder", data_folder),
    ("port", port),
    ("interfaces", interfaces),
    ("multicast", multicast),
)
