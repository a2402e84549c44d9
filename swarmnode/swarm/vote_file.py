"""The vote file in the data folder, and its name, which is a peer's seat in the backbone.

Only an election writes the file; here it is made and read. It has a random name inside (16 bytes), which stands in the
backbone set beside the peer. A peer that lost its file gets a new one under a new name, and therefore has no seat: it
cannot vote twice. The owner gives it one again by removing it from the backbone and adding it anew:

    swarmctl backbone remove PEER
    swarmctl backbone add PEER
"""

from __future__ import annotations

import secrets
from pathlib import Path

from capabilities.backbone import VOTE_FILE_BYTES, Enactment
from scheduler.election_state import STATE_BYTES_MAX, DamagedState, HardState
from swarmnode.durable import write_whole


def load_vote_file(path: Path) -> HardState | None:
    """What the file holds; None if there is none. DamagedState if it cannot be trusted or read."""
    try:
        with path.open("rb") as file:
            return HardState.from_file(file.read(STATE_BYTES_MAX + 64))
    except FileNotFoundError:
        return None
    except DamagedState as error:
        raise error.of(str(path)) from None
    except OSError as error:
        raise DamagedState(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def open_vote_file(path: Path, swarm: str, enactment: Enactment | None) -> HardState:
    """The file's content, made under a new random name where there is none or it is of another swarm."""
    found = load_vote_file(path)
    if found is not None and found.swarm == swarm:
        return found
    state = HardState(swarm, secrets.token_bytes(VOTE_FILE_BYTES), enactment=enactment)
    write_vote_file(path, state)
    return state


def reopen_vote_file(path: Path, swarm: str, enactment: Enactment | None) -> HardState:
    """The same after a write that failed: what it left may be in the file and not on the disk, so it is written anew.

    OSError while the disk does not take it.
    """
    state = open_vote_file(path, swarm, enactment)
    write_vote_file(path, state)
    return state


def write_vote_file(path: Path, state: HardState) -> None:
    """Replace the file; when this returns the new state is on disk."""
    write_whole(path, state.to_file())
