"""The whole model on this machine while an answer is proven: a file that is here, or one from the swarm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from backends.atomic_file import process_lives
from capabilities.errors import SwarmError
from swarmnode.cli.common import Settings
from swarmnode.cli.models import call_with_progress
from swarmnode.cli.progress import ProgressLine
from swarmnode.control_client import request
from swarmnode.paths import find_paths
from swarmnode.verify import HEADROOM

FETCH_BYTES: Final = 1 << 30
"""A model of up to so much is fetched without being asked for: minutes on a home's link, and little disk."""

_GIB: Final = 1 << 30
_PREFIX: Final = "verify-"


@contextmanager
def model_at_hand(
    settings: Settings, manifest: str | None, given: Path | None, *, fetch: bool, progress: ProgressLine
) -> Iterator[tuple[Path | None, str | None]]:
    """(a file with the model of this manifest's id, None), or (None, why there is none).

    given: a file that the user names. fetch: also one that is larger than FETCH_BYTES. What is fetched goes when the
    context ends.
    """
    own = given or _own_file(settings, manifest)
    if own is not None:
        yield own, None
        return
    folder = find_paths(settings.data_dir).data
    _sweep(folder)
    target = folder / f"{_PREFIX}{os.getpid()}.gguf"
    try:
        reason = _fetch(settings, manifest, target, fetch=fetch, progress=progress)
        yield (target if reason is None else None), reason
    finally:
        for path in folder.glob(f"{target.name}*"):  # parts of it, too
            path.unlink(missing_ok=True)


def _own_file(settings: Settings, manifest: str | None) -> Path | None:
    """The file of the model that answered, if this node has it."""
    for model in request(settings.socket, "model_list", {})["models"]:
        if model["id"] == manifest and model["files"] and model["fault"] is None:
            return Path(model["files"][0])
    return None


def _fetch(
    settings: Settings, manifest: str | None, target: Path, *, fetch: bool, progress: ProgressLine
) -> str | None:
    """Why it did not come."""
    fits = int(psutil.virtual_memory().available / HEADROOM)
    limit = fits if fetch else min(fits, FETCH_BYTES)
    try:
        result = call_with_progress(settings, "model_fetch", {"path": str(target), "bytes_max": limit}, progress)
    except SwarmError as error:
        nbytes = error.details.get("model_bytes")
        if nbytes is None:
            return f"this node does not have the model's file, and it could not be fetched: {error.message}"
        if nbytes > fits:
            return f"the model has {nbytes / _GIB:.1f} GiB, and this machine's free memory holds {fits / _GIB:.1f} GiB"
        return (
            "this node does not have the model's file: --model names one, --fetch fetches it from the swarm"
            f" ({nbytes / _GIB:.1f} GiB)"
        )
    if result["model"]["id"] != manifest:
        return "the swarm serves another model now, and this node does not have the one that answered"
    return None


def _sweep(folder: Path) -> None:
    """Remove what a command that was killed has left."""
    for path in folder.glob(f"{_PREFIX}*.gguf*"):
        owner = path.name.removeprefix(_PREFIX).split(".")[0]
        if owner.isdigit() and not process_lives(int(owner)):
            path.unlink(missing_ok=True)
