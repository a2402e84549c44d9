"""Keeps the swarm's model on a backbone peer, so that it may lead: manifest and trunk, fetched like shards.

Everything is checked before the model counts as here: the manifest against its id, each piece against the manifest, and
the whole in a child process in which llama.cpp loads it for the first time. What breaks off goes on where it was, after
a restart too; what fails is tried again, later each time, except for a model that is bad in itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import structlog
import trio

from backends.add_model import TRUNK
from backends.manifest import Manifest
from capabilities.errors import BadModelFile, DeadlineExceeded, Internal, SwarmError, UnsupportedModel
from swarmnode.models import MODELS_MAX, Models, run_child
from swarmnode.net.interface import Network, PeerId
from swarmnode.shards.fetch import fetch_manifest
from swarmnode.shards.store import CacheError, ShardCache
from swarmnode.shards.trunk import fetch_trunk

_log = structlog.get_logger(__name__)

_RETRY_S_MIN: Final = 1.0
_RETRY_S_MAX: Final = 60.0  # a peer that is back, or room on the disk, is found within a minute

Phase = Literal["waiting", "manifest", "trunk", "checking", "held", "failed"]


@dataclass(frozen=True, slots=True)
class KeeperState:
    """For `status`: which model (its manifest id), how far it is, and why it is not here."""

    wanted: str = ""
    phase: Phase = "waiting"
    done_bytes: int = 0
    total_bytes: int = 0
    error: SwarmError | None = None


class ModelKeeper:
    """`run` in a nursery; everything else is called on the event loop."""

    def __init__(self, network: Network, models: Models, cache: ShardCache, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever `held` gives another answer. Trunks take their part of the cache's budget."""
        self.state = KeeperState()
        self._network = network
        self._models = models
        self._cache = cache
        self._on_change = on_change
        self._wanted = ""
        self._sources: tuple[PeerId, ...] = ()
        self._held: str | None = None
        self._news = trio.Event()
        self._attempt = trio.CancelScope()
        self._bad: dict[str, SwarmError] = {}  # the last one that was; nothing that others send makes it better

    def want(self, manifest_id: str, sources: Iterable[PeerId]) -> None:
        """Have this model, from any of `sources`, the best first; an empty id: none. What is fetched for another one
        is given up.
        """
        others = tuple(peer for peer in sources if peer != self._network.peer_id)
        if manifest_id == self._wanted and set(others) == set(self._sources):
            return
        if manifest_id != self._wanted:
            self._attempt.cancel()
            self.state = KeeperState(manifest_id)
            self._hold(None)
        self._wanted, self._sources = manifest_id, others
        self._news.set()

    def held(self) -> str | None:
        """The name of the wanted model, once it is here whole and checked."""
        return self._held

    def models_changed(self) -> None:
        """A model was added or removed on this node: look again."""
        self._news.set()

    async def run(self) -> None:
        """Never ends."""
        failures = 0
        while True:
            self._news = trio.Event()
            wanted = self._wanted
            name = await trio.to_thread.run_sync(self._find, wanted)
            if wanted != self._wanted:
                continue
            self._hold(name)
            if name is None and wanted in self._bad:
                self.state = KeeperState(wanted, "failed", error=self._bad[wanted])
            if name is not None or not wanted or wanted in self._bad:
                failures = 0
                await self._news.wait()
                continue
            if wanted != self.state.wanted or self.state.phase == "waiting":
                failures = 0
            with trio.CancelScope() as self._attempt:
                if not await self._try(wanted):
                    failures += 1
                    with trio.move_on_after(min(_RETRY_S_MIN * 2 ** min(failures - 1, 16), _RETRY_S_MAX)):
                        await self._news.wait()
                        await trio.sleep(_RETRY_S_MIN)  # sources come and go; each attempt costs requests

    def _hold(self, name: str | None) -> None:
        if name is not None:
            self.state = KeeperState(self._wanted, "held")
        if name != self._held:
            self._held = name
            self._on_change()

    async def _try(self, wanted: str) -> bool:
        """One attempt; False: it failed, and `state` says why."""
        error: SwarmError
        try:
            name = await self._fetch(wanted)
            _log.info("model.fetched", manifest=wanted, name=name)
            return True
        except (BadModelFile, UnsupportedModel) as bad:
            error = bad
            self._bad = {wanted: bad}
            await trio.to_thread.run_sync(self._models.drop_draft, wanted)
        except SwarmError as failure:
            error = failure
        except trio.TooSlowError:
            error = DeadlineExceeded("checking the trunk took too long")
        except OSError as failure:
            error = Internal(f"the model's folder: {failure.strerror or failure}", hint="Check the disk.")
        self.state = replace(self.state, phase="failed", error=error)
        _log.warning("model.fetch_failed", manifest=wanted, error=error.to_json())
        return False

    async def _fetch(self, wanted: str) -> str:
        sources = self._sources
        self.state = KeeperState(wanted, "manifest")
        manifest = await trio.to_thread.run_sync(self._models.drafted, wanted)
        if manifest is None:
            manifest = await fetch_manifest(self._network, sources, wanted)
        folder = await trio.to_thread.run_sync(self._models.begin_draft, manifest)
        budget = await trio.to_thread.run_sync(self._make_room, manifest)

        def progress(done: int, total: int) -> None:
            self.state = KeeperState(wanted, "trunk", done, total)

        trunk, pace = folder / TRUNK, self._cache.downloads
        await fetch_trunk(self._network, sources, manifest, trunk, progress, budget_bytes=budget, pace=pace)
        self.state = KeeperState(wanted, "checking", manifest.trunk.size, manifest.trunk.size)
        command = [sys.executable, "-m", "backends.check_trunk", str(folder)]
        await run_child(command, f"the trunk of {manifest.name}", lambda step, done, total: None)
        return await trio.to_thread.run_sync(self._models.finish_draft, manifest)

    def _find(self, wanted: str) -> str | None:
        with contextlib.suppress(CacheError):  # said when it matters: when a trunk or an expert is fetched
            self._cache.reserve(self._models.trunk_bytes())
        return self._models.find(wanted) if wanted else None

    def _make_room(self, manifest: Manifest) -> int:
        """Take the trunk's bytes off the cache's budget; how many bytes it may have at most.

        Models that came from the swarm and are not wanted any more go, if that makes room for this one.
        """
        others = self._models.trunk_bytes(except_draft=manifest.id)
        missing = others + manifest.trunk.size - self._cache.budget_bytes
        surplus = len(self._models.names()) + 1 - MODELS_MAX
        fetched = self._models.fetched(but=manifest.id)
        if missing <= sum(nbytes for _, nbytes in fetched):
            for name, nbytes in fetched:
                if missing <= 0 and surplus <= 0:
                    break
                self._models.remove(name)
                missing, surplus = missing - nbytes, surplus - 1
                _log.info("model.dropped", name=name, freed_bytes=nbytes)
        others = self._models.trunk_bytes(except_draft=manifest.id)
        budget = self._cache.budget_bytes - others
        if manifest.trunk.size <= budget:
            self._cache.reserve(others + manifest.trunk.size)
        return budget
