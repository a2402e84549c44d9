"""What `swarmctl doctor --fix` does: only what cannot lose anything and needs no other user's leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swarmnode.doctor.facts import Facts
from swarmnode.doctor.node import is_locked
from swarmnode.identity import LOCK_FILE
from swarmnode.paths import Paths


def mend(facts: Facts, paths: Paths) -> list[str]:
    """What was done, as sentences: modes that let others in are tightened, a dead daemon's socket is removed."""
    return [*_modes(facts), *_socket(facts, paths)]


def _modes(facts: Facts) -> Iterator[str]:
    for each in facts.node.loose:
        if each.own:
            Path(each.path).chmod(each.wanted)
            yield f"{each.path} is closed to others now (mode {each.wanted:o})"


def _socket(facts: Facts, paths: Paths) -> Iterator[str]:
    path = paths.socket_to_call()
    if facts.node.daemon == "stale" and path.is_socket() and not is_locked(paths.data / LOCK_FILE):
        path.unlink()
        yield f"{path}, which a daemon that died left behind, is removed"
