"""Which model a leader serves: the configuration's word, else the swarm's, else the only one.

A new leader goes on with the model that the swarm served before: whoever leads, the answers stay those of one model.
Every backbone peer remembers which it is, so a swarm whose daemons all end comes back with it, whoever is there first.
`swarmctl model use NAME` on the leader changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capabilities.errors import NotReady
from swarmnode.durable import write_whole
from swarmnode.models import Models, OpenModel

_FILE_BYTES_MAX = 255


def choose(ids: Mapping[str, str], configured: str, swarm_active: str) -> str:
    """The name of the model to lead with.

    `ids`: the manifest's id of each model that this node holds, by name. `configured`: leader.model. `swarm_active`:
    the id that the swarm serves, or served last; empty: nothing is known.

    Raises:
        NotReady: there is none, or no way to tell which; the message says what to do.
    """
    if configured:
        return configured
    for name, manifest_id in sorted(ids.items()):
        if manifest_id == swarm_active:
            return name
    names = ", ".join(sorted(ids))
    if swarm_active:
        other = f": `swarmctl model use NAME` makes it serve one of {names}" if names else ""
        raise NotReady(f"the swarm's model, which is not here{other}")
    if not ids:
        raise NotReady("a model to serve: `swarmctl model add FILE`")
    if len(ids) > 1:
        raise NotReady(f"a choice: `swarmctl model use NAME` with one of {names}")
    return next(iter(ids))


class ModelChoice:
    """What this node knows of it; one file holds it for the next start."""

    def __init__(self, file: Path, configured: str, swarm: str = "-") -> None:
        """`file` need not exist. One that cannot be read, or is another swarm's, counts as no choice, and is replaced
        by the next one."""
        self.configured = configured
        self.heard = ""
        """What a leader has named since this node's start."""
        self._file = file
        self._swarm = swarm
        self._swarm_active = self._load()

    @property
    def swarm_active(self) -> str:
        """The manifest id that the swarm serves, or served last; empty if that is not known."""
        return self._swarm_active

    def name(self, ids: Mapping[str, str]) -> str:
        """`choose`, of the models that are here. Raises as it does."""
        return choose(ids, self.configured, self.swarm_active)

    def open(self, models: Models) -> OpenModel:
        """Open the model to lead with. Blocks.

        Raises:
            SwarmError: there is none, no way to tell which, or it cannot be opened.
        """
        return models.open(self.name(models.ids()))

    def remember(self, manifest_id: str) -> None:
        """The swarm serves this one from now on. Blocks: it is on disk afterwards.

        Raises:
            OSError: it is not, and is known until this node ends.
        """
        if manifest_id != self._swarm_active:
            self._swarm_active = manifest_id
            write_whole(self._file, f"{self._swarm} {manifest_id}\n".encode())

    def _load(self) -> str:
        try:
            swarm, manifest_id = self._file.read_bytes()[:_FILE_BYTES_MAX].decode("ascii").split()
        except (OSError, ValueError):
            return ""
        return manifest_id if swarm == self._swarm else ""
