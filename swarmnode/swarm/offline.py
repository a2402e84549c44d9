"""The swarm's commands where no daemon runs: the same methods, on the same files, under the lock that a daemon holds.

So `init` and `join` work before the first start; the daemon finds the record when it comes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from swarmnode.identity import load_or_create_identity, lock_data_folder
from swarmnode.net.groups import without_groups
from swarmnode.paths import Paths
from swarmnode.swarm.commands import SwarmCommands
from swarmnode.swarm.store import SwarmFiles, SwarmStore


def run_offline(paths: Paths, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one of SwarmCommands' methods.

    Raises:
        DataFolderInUse: a daemon runs after all (it starts, stops or hangs).
        NoDaemon: the method needs one.
        SwarmError: whatever the method raises.
    """
    paths.make()
    with lock_data_folder(paths.data):
        commands = SwarmCommands(load_or_create_identity(paths.data), SwarmStore.open(SwarmFiles(paths.data)))
        call = commands.table()[method]
        with without_groups():
            return dict(trio.run(call, dict(params), None))
