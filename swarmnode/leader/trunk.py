"""The trunk in memory, kept from one leadership to the next: to load it again would be the longest part of taking over.

A backbone peer may load it before it is elected (`Trunks.load`), so that it can lead at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
import trio

from backends.check_trunk import check_layers
from backends.learn import run_once
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import LearnedLayer, LearningHook, PartialSumHook, ServingHook
from swarmnode.config_sections import LeaderConfig
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.models import OpenModel

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LoadedTrunk:
    """A trunk in llama.cpp whose layers were learned and are those of its manifest."""

    manifest_id: str
    model: LlamaModel
    layers: dict[int, LearnedLayer]


class Trunks:
    """The trunk that was loaded last. One thing at a time: loading another one ends the first."""

    def __init__(self, config: LeaderConfig, threads: int) -> None:
        self._config = config
        self._threads = threads
        self._kept: LoadedTrunk | None = None
        self._turn = trio.Lock()

    @asynccontextmanager
    async def use(self, opened: OpenModel, remote: RemoteExperts) -> AsyncIterator[LlamaModel]:
        """The trunk of a model, its sequences empty, with experts computed by `remote`. Nobody else has it meanwhile.

        Raises:
            SwarmError: it cannot be loaded, or combined as configured.
        """
        async with self._turn:
            trunk = await self._load(opened)
            hook = ServingHook if self._config.combine == "router-order" else PartialSumHook
            trunk.model.hook = hook(trunk.layers.values(), remote)
            trunk.model.clear_all()
            yield trunk.model

    async def load(self, opened: OpenModel) -> None:
        """Load a model's trunk ahead of its use. Raises as `use` does."""
        async with self._turn:
            await self._load(opened)

    def lose(self, model: LlamaModel) -> None:
        """A thread may still be in it: it is neither used nor freed again."""
        if self._kept is not None and self._kept.model is model:
            _log.error("trunk.lost", manifest=self._kept.manifest_id)
            self._kept = None

    async def close(self) -> None:
        async with self._turn:
            await self._drop()

    async def _load(self, opened: OpenModel) -> LoadedTrunk:
        if self._kept is None or self._kept.manifest_id != opened.manifest.id:
            await self._drop()
            self._kept = await trio.to_thread.run_sync(self._load_now, opened)
        return self._kept

    async def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await trio.to_thread.run_sync(kept.model.close)

    def _load_now(self, opened: OpenModel) -> LoadedTrunk:
        config = self._config
        settings = LlamaSettings(
            context_tokens=config.context_tokens,
            sequences=config.parallel,
            batch_tokens=max(config.batch_tokens, config.parallel),
            threads=self._threads,
            fast=config.fast,
        )
        learning = LearningHook()
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(LlamaModel(opened.trunk, settings, learning))
            run_once(model)
            check_layers(opened.manifest, learning.layers)
            stack.pop_all()
        return LoadedTrunk(opened.manifest.id, model, learning.layers)
