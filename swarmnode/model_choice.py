"""Which model a leader serves: the configuration's word, else the swarm's, else this node's own choice.

A new leader goes on with the model that the swarm served before, if it holds it: whoever leads, the answers stay those
of one model. `swarmctl model use NAME` on the leader changes it, and is remembered for when the whole swarm restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from capabilities.errors import NotReady
from swarmnode.durable import write_whole
from swarmnode.models import Models, OpenModel

_NAME_BYTES_MAX = 255


def choose(ids: Mapping[str, str], configured: str, swarm_active: str, chosen: str) -> str:
    """The name of the model to lead with.

    `ids`: the manifest's id of each model that this node holds, by name. `configured`: leader.model. `swarm_active`:
    the id that the swarm served last. `chosen`: what was chosen on this node. Empty: nothing is known.

    Raises:
        NotReady: there is none, or no way to tell which; the message says what to do.
    """
    if configured:
        return configured
    for name, manifest_id in sorted(ids.items()):
        if manifest_id == swarm_active:
            return name
    if chosen in ids:
        return chosen
    if len(ids) > 1:
        raise NotReady(f"a choice: `swarmctl model use NAME` with one of {', '.join(sorted(ids))}")
    if not ids:
        raise NotReady("a model to serve: `swarmctl model add FILE`")
    return next(iter(ids))


class ModelChoice:
    """What this node knows of it; one file holds what was chosen here."""

    def __init__(self, file: Path, configured: str) -> None:
        """`file` need not exist. A file that cannot be read counts as no choice: the next one replaces it."""
        self.swarm_active = ""
        """The manifest id that the swarm's leader named last; set it when the leader's word comes."""
        self._file = file
        self._configured = configured
        try:
            self._chosen = file.read_bytes()[:_NAME_BYTES_MAX].decode().strip()
        except (OSError, UnicodeDecodeError):
            self._chosen = ""

    def name(self, ids: Mapping[str, str]) -> str:
        """`choose`, of the models that are here. Raises as it does."""
        return choose(ids, self._configured, self.swarm_active, self._chosen)

    def open(self, models: Models) -> OpenModel:
        """Open the model to lead with. Blocks.

        Raises:
            SwarmError: there is none, no way to tell which, or it cannot be opened.
        """
        return models.open(self.name(models.ids()))

    def use(self, name: str, manifest_id: str) -> None:
        """Choose a model that this node holds, for itself and the swarm. Blocks: it is on disk afterwards."""
        write_whole(self._file, f"{name}\n".encode())
        self._chosen, self.swarm_active = name, manifest_id
