"""The leader of a swarm: members, one active model, placement, prompts.

Workers may join before there is a model. Once one is active its trunk is loaded, its MoE layers are learned again and
compared with the manifest, and the decode thread starts; placement follows as soon as workers are there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import trio

from backends.check_trunk import check_layers
from backends.device import Device
from backends.learn import run_once
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import Manifest
from backends.moe_hook import LearningHook, PartialSumHook, ServingHook
from capabilities.errors import NotReady, SwarmError
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from swarmnode.asker import only
from swarmnode.config import Combine, Config
from swarmnode.durable import next_counter
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.members import Member, Members
from swarmnode.leader.placer import Placer, PlacerSettings
from swarmnode.leader.probe import ProbeReference
from swarmnode.leader.prompts import PromptService, PromptStreams
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.member_messages import Progress
from swarmnode.models import Models, OpenModel
from swarmnode.net.interface import Network
from swarmnode.prompt_messages import Ask, Failed, Reply

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ActiveModel:
    """Everything that serves one model."""

    open: OpenModel
    model: LlamaModel
    engine: DecodeEngine
    remote: RemoteExperts
    placer: Placer
    prompts: PromptService
    combine: Combine

    @property
    def manifest(self) -> Manifest:
        return self.open.manifest

    def time_callbacks(self, timed: bool) -> None:
        if self.model.hook is not None:
            self.model.hook.timed = timed

    def statistics(self) -> dict[str, Any]:
        """Counters since the start: steps of the engine, layers of the executor, and each link."""
        engine = self.engine.statistics()
        return {
            "steps": engine.steps,
            "decode_s": engine.decode_s,
            "callback_s": 0.0 if self.model.hook is None else self.model.hook.python_s,
            "layers": asdict(self.remote.timing),
            "links": [
                {"peer": str(m.peer), "name": m.name, **asdict(m.link.statistics)}
                for m in self.placer.members.present()
                if m.link is not None
            ],
        }


class Leader:
    """Run `run` in a nursery. `reason` says why no model is active yet."""

    def __init__(self, network: Network, models: Models, config: Config, threads: int, term_file: Path) -> None:
        self.term = next_counter(term_file)
        self.active: ActiveModel | None = None
        self.reason = "a model to serve: `swarmctl model add FILE`"
        self.members = Members(network, self._joined, self._progressed, self._left, self._spoke)
        self._network = network
        self._models = models
        self._config = config
        self._threads = threads
        self._models_changed = trio.Event()
        self._streams = PromptStreams(self.answer)

    # -- what others ask ----------------------------------------------------------------------------------------

    @property
    def leader(self) -> str | None:
        return str(self._network.peer_id)

    def refusal(self) -> NotReady | None:
        """Why no prompt can be served now, or None."""
        if self.active is None:
            return NotReady(f"the swarm is not ready: it waits for {self.reason}")
        if self.active.engine.stopped:
            return NotReady("the leader's decode thread has ended", hint="Its log says why; restart the daemon.")
        return self.active.placer.coverage.refusal()

    def replies(self, ask: Ask) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """Answer a prompt of this node's own user (asker.Asker)."""
        return self.answer(ask, str(self._network.peer_id))

    @asynccontextmanager
    async def answer(self, ask: Ask, asker: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """Answer a prompt of whoever asks."""
        if self.active is None:
            refusal = self.refusal()
            assert refusal is not None
            yield only(Failed(refusal))
            return
        async with self.active.prompts.answer(ask, asker) as replies:
            yield replies

    def models_changed(self) -> None:
        """A model was added or removed."""
        self._models_changed.set()

    def is_active(self, name: str) -> bool:
        return self.active is not None and self.active.manifest.name == name

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.members.watch.run)
            self.members.register()
            self._streams.register(self._network)
            try:
                await self._lead()
            finally:
                self._streams.unregister(self._network)
                self.members.unregister()

    async def _lead(self) -> None:
        while True:
            opened = await self._wait_for_model()
            try:
                await self._serve(opened)
            finally:
                opened.close()

    async def _wait_for_model(self) -> OpenModel:
        while True:
            self._models_changed = trio.Event()
            try:
                return await trio.to_thread.run_sync(self._choose)
            except SwarmError as error:
                if error.message != self.reason:
                    _log.info("leader.no_model", reason=error.message)
                self.reason = error.message
            await self._models_changed.wait()

    def _choose(self) -> OpenModel:
        names, wanted = self._models.names(), self._config.leader.model
        if wanted:
            return self._models.open(wanted)
        if not names:
            raise NotReady("a model to serve: `swarmctl model add FILE`")
        if len(names) > 1:
            raise NotReady(f"a choice: leader.model names one of {', '.join(names)} in the configuration")
        return self._models.open(names[0])

    async def _serve(self, opened: OpenModel) -> None:
        """Serve a model; returns, when models have changed, only if this one cannot be served."""
        manifest, config = opened.manifest, self._config.leader
        self.reason = f"the trunk of {manifest.name} to load"
        remote = RemoteExperts(manifest.layers, trio.lowlevel.current_trio_token())
        try:
            model = await trio.to_thread.run_sync(self._load_trunk, opened, remote)
        except SwarmError as error:
            self.reason = f"a usable model: {error.message}"
            _log.error("leader.model_refused", model=manifest.name, error=error.to_json())
            await self._models_changed.wait()
            return
        batcher = Batcher(
            config.parallel,
            model.context_tokens,
            max(config.batch_tokens, config.parallel),
            config.queue_limit,
            Vocabulary(model.vocabulary.n_vocab, model.vocabulary.piece, model.vocabulary.is_end),
        )
        engine = DecodeEngine(model, remote, batcher)
        reference = ProbeReference(manifest, opened.served.source, Device(threads=self._threads))
        swarm, sums = self._config.swarm, config.combine == "partial-sum"
        settings = PlacerSettings(swarm.workers_expected, swarm.settle_s, config.activations, sums)
        placer = Placer(self._network, self.members, manifest, reference, remote, engine, settings, self.term)
        prompts = PromptService(
            engine,
            model.vocabulary,
            model.context_tokens,
            config.request_deadline_s,
            self.refusal,
            remote.begin_request,
            remote.end_request,
        )
        self.active = ActiveModel(opened, model, engine, remote, placer, prompts, config.combine)
        engine.start()
        _log.info("leader.model_loaded", model=manifest.name, term=self.term, context_tokens=model.context_tokens)
        # When the daemon stops, the decode thread ends first, while its links still live: who asked then hears that the
        # leader stops, and not that innocent workers were lost.
        links = trio.CancelScope(shield=True)

        async def place() -> None:
            with links:
                await placer.run()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(place)
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await engine.stop()
                    await self._streams.wait_idle()
                links.cancel()

    def _load_trunk(self, opened: OpenModel, remote: RemoteExperts) -> LlamaModel:
        """Load the trunk, and check that its layers are those of the manifest and can be combined as configured."""
        config = self._config.leader
        settings = LlamaSettings(
            context_tokens=config.context_tokens,
            sequences=config.parallel,
            batch_tokens=max(config.batch_tokens, config.parallel),
            threads=self._threads,
            fast=config.fast,
        )
        learning = LearningHook()
        model = LlamaModel(opened.trunk, settings, learning)
        try:
            run_once(model)
            model.clear_all()
            check_layers(opened.manifest, learning.layers)
            hook = ServingHook if config.combine == "router-order" else PartialSumHook
            model.hook = hook(learning.layers.values(), remote)
        except BaseException:
            model.close()
            raise
        return model

    # -- members ------------------------------------------------------------------------------------------------

    def _joined(self, member: Member) -> None:
        if self.active is not None:
            self.active.placer.joined(member)

    def _progressed(self, member: Member, progress: Progress) -> None:
        if self.active is not None:
            self.active.placer.progressed(member, progress)

    def _left(self, member: Member) -> None:
        if self.active is not None:
            self.active.placer.left(member)

    def _spoke(self, member: Member) -> None:
        if self.active is not None:
            self.active.placer.spoke(member)

    def statistics(self) -> dict[str, Any]:
        """Requests and tokens since the start, for `status`."""
        if self.active is None:
            return {"running": 0, "waiting": 0, "accepted": 0, "finished": 0, "failed": 0, "cancelled": 0, "tokens": 0}
        s, b = self.active.prompts.statistics, self.active.engine.statistics().batcher
        return {
            "running": b.running,
            "waiting": b.waiting,
            "accepted": s.accepted,
            "finished": s.finished,
            "failed": s.failed,
            "cancelled": s.cancelled,
            "tokens": s.tokens,
        }
