"""`swarmctl model fetch`: the model that the swarm serves, whole, in one file on this machine.

For whoever wants to prove answers alone (`swarmctl verify`), on a node that has some of the experts or none. Nothing of
it is trusted: the manifest has the id that the leader names, and everything else the hashes that the manifest has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from backends.whole_file import whole_bytes
from capabilities.errors import NotReady, UsageError
from capabilities.held_experts import HeldExperts
from swarmnode.models import Models, OnProgress
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch import fetch_manifest
from swarmnode.shards.store import ShardCache, disk_errors
from swarmnode.shards.trunk import fetch_trunk
from swarmnode.shards.whole import fetch_whole

_TRUNK: Final = ".trunk"
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Origin:
    """Whence a model comes: its manifest's id, who may have everything (the likeliest first), what others hold."""

    network: Network
    model: str
    sources: Sequence[PeerId]
    holdings: Mapping[PeerId, HeldExperts] = field(default_factory=dict)


async def fetch_model(
    origin: Origin,
    models: Models,
    cache: ShardCache | None,
    target: Path,
    bytes_max: int | None,
    progress: OnProgress,
) -> dict[str, Any]:
    """Have the model at `target`, where there is no file yet; what `--json` prints. bytes_max: of a file that may be
    fetched.

    Raises:
        UsageError: there is a file, this node has the model's own, or the model is larger than `bytes_max`.
        SwarmError: nobody serves a model now, or what fetch_trunk and fetch_whole run into.
    """
    if not origin.model:
        raise NotReady("the swarm serves no model now", hint="Ask again when `swarmctl status` is ready.")
    if await trio.Path(target).exists():
        raise UsageError(f"{target} exists", hint="Name another file, or remove that one.", path=str(target))
    name = await trio.to_thread.run_sync(models.find, origin.model)
    trunk, fetched = await _own(models, name) if name is not None else None, target.with_name(target.name + _TRUNK)
    progress("manifest", 0, 0)
    if name is not None:
        manifest = await trio.to_thread.run_sync(models.manifest, name)
    else:
        manifest = await fetch_manifest(origin.network, origin.sources, origin.model)
    if bytes_max is not None and (nbytes := whole_bytes(manifest)) > bytes_max:
        raise UsageError(
            f"the model {manifest.name} has {nbytes / _GIB:.1f} GiB, over {bytes_max / _GIB:.1f}",
            model_bytes=nbytes,
        )
    pace = None if cache is None else cache.downloads
    with disk_errors("the model", target.parent):
        await trio.Path(target.parent).mkdir(parents=True, exist_ok=True)
    if trunk is None:
        await fetch_trunk(
            origin.network, origin.sources, manifest, fetched,
            lambda done, total: progress("the trunk", done, total), budget_bytes=manifest.trunk.size, pace=pace,
        )  # fmt: skip
    nbytes = await fetch_whole(
        origin.network, origin.sources, manifest, trunk or fetched, target,
        lambda done, total: progress("experts", done, total),
        holdings=origin.holdings, cache=cache, pace=pace,
    )  # fmt: skip
    if trunk is None:
        with disk_errors("the model", target.parent):
            await trio.Path(fetched).unlink()
    return {"path": str(target), "bytes": nbytes, "model": {"name": manifest.name, "id": manifest.id}}


async def _own(models: Models, name: str) -> Path:
    """The trunk of a model that came from the swarm.

    Raises:
        UsageError: it did not: this node has its file.
    """
    opened = await trio.to_thread.run_sync(models.open, name)
    try:
        if opened.gguf is not None:
            raise UsageError(f"this node has the model's file: {opened.lies_at}", path=str(opened.lies_at))
        return opened.trunk
    finally:
        opened.close()
