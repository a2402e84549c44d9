"""Looks at the node: what its data folder holds, whether its daemon answers, and what that says. Writes nothing."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from capabilities.errors import NoDaemon, SwarmError
from swarmnode.config import Config, load_config
from swarmnode.control_client import request
from swarmnode.doctor.facts import DaemonState, Facts, Fault, Invitation, Loose, Membership, ModelFault, Node
from swarmnode.doctor.machine import fault_of, look_at_machine
from swarmnode.identity import KEY_FILE, LOCK_FILE, load_or_create_identity
from swarmnode.models import Models
from swarmnode.paths import Paths
from swarmnode.swarm.invites import Invite
from swarmnode.swarm.reachability import LOCAL, scope_of
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import load_vote_file

CONNECT_SECONDS_MAX: Final = 3.0
_ADDRESSES_MAX: Final = 16
_PRIVATE: Final = ("identity.key", "swarm.record", "votes", "invites", "machine-id", "owner/*.key", "logs/*")


def look(paths: Paths, token: str | None = None) -> Facts:
    """Everything. UsageError where `token` is no invite."""
    invite = None if token is None else Invite.parse(token)
    config, fault = _configuration(paths)
    node = look_at_node(config, fault, paths)
    own = next((row for row in _rows(node.status) if row.get("peer_id") == (node.status or {}).get("self")), {})
    memory = own.get("memory") or {}
    machine = look_at_machine(
        config,
        paths,
        daemon_pid=node.daemon_pid,
        held_bytes=int(memory.get("used_bytes") or 0),
        budget_bytes=memory.get("budget_bytes"),
        bound=node.daemon in ("answers", "silent"),
    )
    return Facts(machine, node, None if invite is None else _invitation(invite))


def look_again(facts: Facts, paths: Paths) -> Facts:
    """With the node as it is after something was mended."""
    return replace(facts, node=look_at_node(*_configuration(paths), paths))


def _configuration(paths: Paths) -> tuple[Config, Fault | None]:
    try:
        return load_config(paths.config_file if paths.config_file.exists() else None), None
    except SwarmError as error:
        return Config(), fault_of(error)


def look_at_node(config: Config, fault: Fault | None, paths: Paths) -> Node:
    state, words, status = _daemon(paths)
    record, record_fault = _record(paths)
    files = SwarmFiles(paths.data)
    return Node(
        exists=paths.data.exists(),
        configuration=fault,
        listens=bool(config.node.listen),
        mdns=config.swarm.mdns,
        loose=tuple(loose(paths)),
        identity=_identity(paths),
        record=record_fault,
        owner_key=None if record is None else _owner_key(files, record),
        votes=None if record is None else _votes(files, record),
        membership=None if record is None else _membership(record, time.time()),
        models=tuple(_models(paths, status)),
        daemon=state,
        daemon_pid=_holder(paths) if state in ("answers", "silent") else None,
        daemon_words=words,
        status=status,
        unanswered=tuple(f"{address} ({why})" for address, why in try_all(_own_addresses(status)).items() if why),
    )


# -- the daemon --------------------------------------------------------------------------------------------------------


def _daemon(paths: Paths) -> tuple[DaemonState, str, Mapping[str, Any] | None]:
    try:
        return "answers", "", request(paths.socket_to_call(), "status", {})
    except NoDaemon as error:
        words = error.message
    except SwarmError as error:
        return "silent", error.message, None
    if is_locked(paths.data / LOCK_FILE):
        return "silent", words, None
    return ("stale" if paths.socket_to_call().is_socket() else "absent"), words, None


def is_locked(path: Path) -> bool:
    """Whether a daemon holds the lock. It is held here for an instant, so ask only where no daemon answers."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _holder(paths: Paths) -> int | None:
    try:
        words = (paths.data / LOCK_FILE).read_text()[:32].strip()
    except OSError:
        return None
    return int(words) if words.isdecimal() else None


# -- the data folder ---------------------------------------------------------------------------------------------------


def loose(paths: Paths) -> Iterator[Loose]:
    """Files and folders of this node whose owner or mode lets others in, or keeps this user out."""
    if not paths.data.exists():
        return
    folders = [(folder, wanted) for folder, wanted in ((paths.data, 0o755), (paths.run, 0o700)) if folder.exists()]
    files = [(file, 0o600) for pattern in _PRIVATE for file in sorted(paths.data.glob(pattern))]
    for path, wanted in (*folders, *files):
        found = path.lstat()
        mode, own = stat.S_IMODE(found.st_mode), found.st_uid == os.getuid()
        if not own or mode & ~wanted & 0o077:
            yield Loose(str(path), mode, mode & wanted, own)


def _identity(paths: Paths) -> Fault | None:
    key = paths.data / KEY_FILE
    if not key.exists() or stat.S_IMODE(key.lstat().st_mode) & 0o077:  # reading it would mend its mode unasked
        return None
    try:
        load_or_create_identity(paths.data)
    except SwarmError as error:
        return fault_of(error)
    return None


def _record(paths: Paths) -> tuple[SwarmRecord | None, Fault | None]:
    try:
        return SwarmStore.open(SwarmFiles(paths.data)).record, None
    except SwarmError as error:
        return None, fault_of(error)


def _membership(record: SwarmRecord, now_s: float) -> Membership:
    ends_s = record.certificate.expires_at_s
    return Membership(
        swarm=record.name,
        peer=record.peer,
        backbone=tuple(record.backbone.peers),
        quorum=record.backbone.quorum,
        banned=record.bans.is_banned(record.peer),
        loose_issuer=record.needs_renewal,
        expired_s=now_s - ends_s if ends_s and now_s >= ends_s else None,
    )


def _owner_key(files: SwarmFiles, record: SwarmRecord) -> Fault | None:
    key = files.owner_key(record.swarm)
    if not key.exists:
        return None
    try:
        key.read(record.chain.current)
    except SwarmError as error:
        return fault_of(error)
    return None


def _votes(files: SwarmFiles, record: SwarmRecord) -> Fault | None:
    if record.peer not in record.backbone.peers:
        return None
    again = f"`swarmctl backbone remove {record.peer}`, then `swarmctl backbone add {record.peer}`, by the owner."
    try:
        state = load_vote_file(files.votes)
    except SwarmError as error:
        return Fault(error.message, f"Delete the file, restart the daemon, and: {again}")
    seat = next(each.vote_file for each in record.backbone.members if each.peer == record.peer)
    if state is None or state.swarm != record.swarm:
        return Fault("the file of this backbone peer's votes is lost, so it neither votes nor leads", again)
    if state.vote_file != seat:
        return Fault("the file of this peer's votes is another than the one that the owner signed for", again)
    return None


def _models(paths: Paths, status: Mapping[str, Any] | None) -> Iterator[ModelFault]:
    active = ((status or {}).get("model") or {}).get("id")
    models = Models(paths.models)
    for name in models.names():
        try:
            shown = models.show(name)
        except SwarmError as error:
            yield ModelFault(name, error.message, False)
            continue
        if shown["fault"]:
            yield ModelFault(name, shown["fault"], shown["id"] == active)


# -- addresses ---------------------------------------------------------------------------------------------------------


def _own_addresses(status: Mapping[str, Any] | None) -> list[str]:
    listened = [each for each in (status or {}).get("addresses") or [] if isinstance(each, str)]
    return [each for each in listened if scope_of(each) != LOCAL]


def _invitation(invite: Invite) -> Invitation:
    tried = try_all(invite.addresses)
    late_s = time.time() - invite.expires_at_s
    return Invitation(
        invite.name,
        late_s if late_s >= 0 else None,
        tuple(address for address, why in tried.items() if why is None),
        {address: why for address, why in tried.items() if why is not None},
    )


def try_all(addresses: Iterable[str]) -> dict[str, str | None]:
    """Each address with why no connection comes about, None if one does; all at once."""
    some = list(dict.fromkeys(addresses))[:_ADDRESSES_MAX]
    with ThreadPoolExecutor(max_workers=max(1, len(some))) as pool:
        return dict(zip(some, pool.map(try_to_connect, some), strict=True))


def try_to_connect(address: str) -> str | None:
    """Why no TCP connection to /ip4|ip6|dns/HOST/tcp/PORT[/p2p/ID] comes about. No bytes are exchanged."""
    try:
        _, _, host, kind, port, *_ = address.split("/")
        if kind != "tcp":
            raise ValueError
        socket.create_connection((host, int(port)), CONNECT_SECONDS_MAX).close()
    except TimeoutError:
        return f"silent for {CONNECT_SECONDS_MAX:.0f} s"
    except ValueError:
        return "no TCP address"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _rows(status: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    rows = (status or {}).get("peers")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
