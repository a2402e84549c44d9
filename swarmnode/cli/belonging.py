"""What the commands about belonging share: the data folder's record, the owner's key, and the way to the daemon.

Whatever the owner's key signs is signed in the command; the daemon gets signed records. Where no daemon runs, commands
that need none work on the data folder themselves, and the daemon finds the result when it starts.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capabilities.errors import NoDaemon
from swarmnode.cli import common
from swarmnode.cli.common import Settings
from swarmnode.cli.passphrase import passphrase
from swarmnode.control_client import request
from swarmnode.printable import printable_line

if TYPE_CHECKING:
    from swarmnode.swarm.owner_key import OwnerKey
    from swarmnode.swarm.store import SwarmStore


def call(settings: Settings, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The daemon's answer, with `daemon` true; without a daemon the command's own, with `daemon` false."""
    try:
        return {**request(settings.socket, method, params), "daemon": True}
    except NoDaemon:
        from swarmnode import logs
        from swarmnode.paths import find_paths
        from swarmnode.swarm.offline import run_offline

        logs.configure("warning", "auto")
        return {**run_offline(find_paths(settings.data_dir), method, params), "daemon": False}


def open_store(settings: Settings) -> SwarmStore:
    """What the data folder knows of its swarm, to be read only: a daemon may be writing it."""
    from swarmnode.paths import find_paths
    from swarmnode.swarm.store import SwarmFiles, SwarmStore

    return SwarmStore.open(SwarmFiles(find_paths(settings.data_dir).data))


def unlock(store: SwarmStore, passphrase_file: Path | None) -> OwnerKey:
    """The owner's key of the swarm. BadOwnerKey if it is not here, or the passphrase is wrong."""
    record = store.need()
    sealed = store.files.owner_key(record.swarm).read(record.chain.current)
    return sealed.unlock(passphrase(passphrase_file))


def publish(settings: Settings, news: Iterable[bytes]) -> dict[str, Any]:
    """Hand over what the owner signed."""
    return call(settings, "swarm_hear", {"news": [base64_text(each) for each in news]})


def show(settings: Settings, result: Mapping[str, Any], text: str) -> None:
    """The result for a machine, or a sentence for a person."""
    if settings.json:
        common.print_json(result)
    else:
        click.echo(printable_line(text))


def base64_text(data: bytes) -> str:
    """For the control channel, which is JSON."""
    return base64.b64encode(data).decode()
