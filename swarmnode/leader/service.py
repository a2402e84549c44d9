"""The leader of a swarm, for one term: members, one active model, placement, prompts.

A node leads any number of times; each time is a Leader of its own, whose `run` ends by being cancelled.
Workers may join before there is a model. Once one is active its trunk is loaded, its MoE layers are learned again and
compared with the manifest, and the decode thread starts; placement follows as soon as workers are there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import trio

from backends.device import Device
from backends.llama import LlamaModel
from backends.manifest import Manifest
from capabilities.errors import NotReady, SwarmError
from capabilities.verdict import MemoryBoard, VerdictBoard
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from scheduler.placement_record import PlacementRecord
from swarmnode.asker import only
from swarmnode.config import Config
from swarmnode.leader.active_model import ActiveModel
from swarmnode.leader.auditing import Judging
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.judge_process import JudgeProcess
from swarmnode.leader.members import Member, Members, VerifyMember
from swarmnode.leader.own_experts import OwnExperts
from swarmnode.leader.placer import Placer, PlacerSettings
from swarmnode.leader.probe import Obtain, ProbeReference, at_hand
from swarmnode.leader.prompts import PromptService
from swarmnode.leader.protocols import LeaderProtocols
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.leader.report import placement_json
from swarmnode.leader.trunk import Trunks
from swarmnode.member_messages import SOURCES_MAX, Progress
from swarmnode.models import OpenModel
from swarmnode.net.interface import PeerId, Stream
from swarmnode.prompt_messages import Ask, Failed, Reply

_log = structlog.get_logger(__name__)


def _ignore(_covers: bool) -> None:
    pass


def _nobody() -> Sequence[PeerId]:
    return ()


def _keep_nothing(_record: bytes) -> None:
    pass


def _judge_apart(opened: OpenModel, obtain: Obtain) -> Judging:
    return JudgeProcess(opened.manifest, opened.lies_at, obtain)


class Leader:
    """Run `run` in a nursery, once. `reason` says why no model is active yet."""

    def __init__(
        self,
        protocols: LeaderProtocols,
        trunks: Trunks,
        choose: Callable[[], OpenModel],
        config: Config,
        threads: int,
        term: int,
        *,
        borrow: Callable[[Manifest], Obtain] | None = None,
        backbone: Callable[[], Sequence[PeerId]] = _nobody,
        on_covers: Callable[[bool], None] = _ignore,
        inherited: PlacementRecord | None = None,
        on_record: Callable[[bytes], None] = _keep_nothing,
        verify_member: VerifyMember | None = None,
        board: VerdictBoard | None = None,
        own_classes: Callable[[], Collection[str]] = tuple,
        make_judge: Callable[[OpenModel, Obtain], Judging] = _judge_apart,
    ) -> None:
        """term: which leadership this is; it fences what is dispatched.

        choose: opens the model to serve, in a thread; NotReady (or another SwarmError) says what is missing. It is
        asked again whenever `models_changed` was called.

        borrow: how experts are had for a moment, to probe with, of a model whose file is not here.
        backbone: the other peers that may have that file, and to which workers are connected.
        on_covers: called with `covers` whenever that changes.
        inherited: the newest record that a predecessor left. on_record: gets this leader's own, whenever it changes.
        verify_member: who may be a worker (members.Members); None: everybody.
        board: what was held of peers before, and where this leader writes what it finds; None: one of its own.
        own_classes: what ggml's kernels on this machine's processor were measured to be (members.Members).
        make_judge: who recomputes answers of live work.
        """
        network = protocols.network
        self.term = term
        self.active: ActiveModel | None = None
        self.reason = "a model to serve: `swarmctl model add FILE`"
        self.board: VerdictBoard = MemoryBoard() if board is None else board
        self.members = Members(
            network, self._joined, self._progressed, self._left, self._spoke, verify_member, own_classes
        )
        self._network = network
        self._trunks = trunks
        self._choose = choose
        self._borrow = borrow
        self._make_judge = make_judge
        self._backbone = backbone
        self._last_epoch = 0
        self._on_covers = on_covers
        self._covered = False
        self._inherited = inherited
        self._on_record = on_record
        self._config = config
        self._threads = threads
        self._models_changed = trio.Event()
        self._protocols = protocols

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

    @property
    def covers(self) -> bool:
        """Every expert is within reach: on a worker, or here. A leader without that for long should not lead."""
        return self.active is not None and self.active.placer.coverage.reached

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

    async def member(self, stream: Stream) -> None:
        """One worker's stay."""
        await self.members.handle(stream)

    def models_changed(self) -> None:
        """A model was added or removed."""
        self._models_changed.set()

    def placement(self, lost: str | None) -> dict[str, Any]:
        """See report.placement_json. Raises as it does."""
        if self.active is None:
            raise NotReady(f"there is no placement yet: it waits for {self.reason}")
        return placement_json(self.active.placer, lost)

    def outline(self, without: str | None) -> dict[str, Any]:
        """See outline.Outline, but for one peer. NotReady while no model is served."""
        if self.active is None:
            raise NotReady(f"there is nothing to predict yet: the swarm waits for {self.reason}")
        timing = self.active.remote.timing
        ms = timing.decode_round_trip_s / timing.decode_layers * 1e3 if timing.decode_layers else None
        return replace(self.active.placer.outline(without), layer_ms=ms).to_json()

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lead until cancelled. RuntimeError if this node leads already."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.members.watch.run)
            with self._protocols.led_by(self):
                try:
                    while True:
                        await self._serve_one()
                finally:
                    self.members.close("this peer does not lead any more")

    async def _serve_one(self) -> None:
        opened = await self._wait_for_model()
        try:
            await self._serve(opened)
        finally:
            self.active = None
            self._look_at_coverage()
            opened.close()

    async def _wait_for_model(self) -> OpenModel:
        while True:
            self._models_changed = trio.Event()
            try:
                return await trio.to_thread.run_sync(self._choose)
            except SwarmError as error:
                reason = error.message if isinstance(error, NotReady) else f"a usable model: {error.message}"
                if reason != self.reason:
                    _log.info("leader.no_model", reason=reason)
                self.reason = reason
            await self._models_changed.wait()

    async def _until_another_is_chosen(self, manifest_id: str) -> None:
        while True:
            self._models_changed = trio.Event()
            await self._models_changed.wait()
            try:
                opened = await trio.to_thread.run_sync(self._choose)
            except SwarmError:
                continue  # better the model that is served than none
            opened.close()
            if opened.manifest.id != manifest_id:
                return

    async def _serve(self, opened: OpenModel) -> None:
        """Serve a model; returns when another one is chosen, or, if this one cannot be served, when models change."""
        manifest = opened.manifest
        self.reason = f"the trunk of {manifest.name} to load"
        own = None
        if self._config.leader.own_copy and opened.gguf is not None:
            own = OwnExperts(manifest, opened.served.source, partial(Device, threads=self._threads))
        remote = RemoteExperts(manifest.layers, trio.lowlevel.current_trio_token(), own)
        try:
            async with self._trunks.use(opened, remote) as model:
                await self._serve_with(opened, model, remote)
        except SwarmError as error:
            self.reason = f"a usable model: {error.message}"
            _log.error("leader.model_refused", model=manifest.name, error=error.to_json())
            await self._models_changed.wait()

    def _batcher(self, model: LlamaModel) -> Batcher:
        config, vocabulary = self._config.leader, model.vocabulary
        return Batcher(
            config.parallel,
            model.context_tokens,
            max(config.batch_tokens, config.parallel),
            config.queue_limit,
            Vocabulary(vocabulary.n_vocab, vocabulary.piece, vocabulary.is_end),
            park_s=config.park_s,
            can_cut=not model.is_recurrent,
        )

    def _placer_settings(self, remote: RemoteExperts) -> PlacerSettings:
        config, swarm = self._config.leader, self._config.swarm
        return PlacerSettings(
            swarm.workers_expected,
            swarm.settle_s,
            config.activations,
            config.combine == "partial-sum",
            swarm.replicas,
            remote.has_own_copy,
            config.audits,
        )

    async def _serve_with(self, opened: OpenModel, model: LlamaModel, remote: RemoteExperts) -> None:
        manifest, config = opened.manifest, self._config.leader
        engine = DecodeEngine(model, remote, self._batcher(model))
        obtain = at_hand if opened.gguf is not None or self._borrow is None else self._borrow(manifest)
        reference = ProbeReference(manifest, opened.served.source, Device(threads=self._threads), obtain)
        judge = self._make_judge(opened, obtain)
        placer = Placer(
            self._network,
            self.members,
            manifest,
            reference,
            judge,
            remote,
            engine,
            self._placer_settings(remote),
            self.term,
            board=self.board,
            sources=partial(self._sources, opened),
            changed=self._look_at_coverage,
            inherited=self._inherited,
            on_record=self._on_record,
        )
        placer.last_epoch = self._last_epoch  # a worker may still hold another model's under an earlier one
        prompts = PromptService(
            engine,
            model.vocabulary,
            model.context_tokens,
            config.request_deadline_s,
            self.refusal,
            remote.begin_request,
            remote.end_request,
            placer.auditing.settling.settled,
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

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(place)
                try:
                    await self._until_another_is_chosen(manifest.id)
                finally:
                    with trio.CancelScope(shield=True):
                        await engine.stop()
                        await self._protocols.prompts.wait_idle()
                    links.cancel()
        finally:
            self._last_epoch = placer.last_epoch
            with trio.CancelScope(shield=True):
                if await engine.stop():  # without links a step ends, unless llama.cpp itself hangs
                    remote.close()
                else:
                    self._trunks.lose(model)

    def _sources(self, opened: OpenModel, peer: str) -> Sequence[str]:
        """Whom a worker fetches from: this node, and where it has not the model's file, whoever may have experts."""
        own = str(self._network.peer_id)
        if opened.gguf is not None or self.active is None:
            return (own,)
        holders = [other for other in self.active.placer.coverage.answering if other != peer]
        return tuple(dict.fromkeys((own, *self._backbone(), *holders)))[:SOURCES_MAX]

    def _look_at_coverage(self) -> None:
        if self.active is not None:
            self.active.engine.wake()  # who waits for an expert may find it now
        covers = self.covers
        if covers != self._covered:
            self._covered = covers
            self._on_covers(covers)

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

    def measured(self) -> None:
        """This machine's own numeric class is known, or is another one."""
        if self.active is not None:
            self.active.placer.usable_changed()

    def statistics(self) -> dict[str, Any]:
        """Requests and tokens since the start, for `status`."""
        if self.active is None:
            names = ("running", "waiting", "accepted", "finished", "failed", "cancelled", "tokens", "tainted")
            return dict.fromkeys(names, 0)
        s, b = self.active.prompts.statistics, self.active.engine.statistics().batcher
        return {
            "running": b.running,
            "waiting": b.waiting,
            "accepted": s.accepted,
            "finished": s.finished,
            "failed": s.failed,
            "cancelled": s.cancelled,
            "tokens": s.tokens,
            "tainted": s.tainted,
        }
