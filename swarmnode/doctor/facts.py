"""What the doctor looks at, as values. None stands for what could not be looked at, and its check is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

State = Literal["ok", "warn", "fail", "skip"]
DaemonState = Literal["absent", "answers", "silent", "stale"]


class Fault(NamedTuple):
    """What went wrong somewhere, and what to do."""

    cause: str
    mend: str


class Problem(NamedTuple):
    """What a check found. `warn`: the swarm works without it being mended."""

    state: Literal["warn", "fail"]
    cause: str
    mend: str


class Interface(NamedTuple):
    """An address of this machine. `bridge`: of a virtual network that only containers on this machine are in."""

    address: str
    bridge: bool
    loopback: bool


class Loose(NamedTuple):
    """A file or folder that others may read or write, or that is not this user's."""

    path: str
    mode: int
    wanted: int
    own: bool


class ModelFault(NamedTuple):
    name: str
    cause: str
    active: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit`: what this machine, or the container, has. `wanted`: for experts; `held`: by the daemon now."""

    limit: int
    available: int
    wanted: int
    held: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes. `wanted`: for fetched experts by the configuration, 0 for half of what is free; `held`: of it now.

    `write_fault`: why a small file cannot be written into the data folder.
    """

    free: int
    wanted: int
    held: int
    write_fault: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    python: tuple[int, ...]
    swarmnode: str
    llama_cpp: str | None
    llama_cpp_known: str
    kernels: Fault | None
    compilers: Fault | None
    files_hard: int
    files_soft: int
    memory: Memory
    disk: Disk
    interfaces: tuple[Interface, ...]
    multicast: str | None
    ports: tuple[Fault, ...] | None


@dataclass(frozen=True, slots=True)
class Membership:
    """What the data folder knows of its swarm. `loose_issuer`: who vouched for this node has left the backbone."""

    swarm: str
    peer: str
    backbone: tuple[str, ...]
    quorum: int
    banned: bool
    loose_issuer: bool
    expired_s: float | None


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invite that was named. `unreached`: addresses and why they do not answer; `reached`: those that do."""

    name: str
    expired_s: float | None
    reached: tuple[str, ...]
    unreached: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """`configuration`, `identity`, `record`, `owner_key`, `votes`: why each cannot be used. `membership`: None outside
    of a swarm. `status`: the daemon's answer. `unanswered`: addresses of this node that do not answer on this machine.
    """

    exists: bool
    configuration: Fault | None
    listens: bool
    mdns: bool
    loose: tuple[Loose, ...]
    identity: Fault | None
    record: Fault | None
    owner_key: Fault | None
    votes: Fault | None
    membership: Membership | None
    models: tuple[ModelFault, ...]
    daemon: DaemonState
    daemon_pid: int | None
    daemon_words: str
    status: Mapping[str, Any] | None
    unanswered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    machine: Machine
    node: Node
    invitation: Invitation | None = None
    now_s: float = field(default=0.0)
