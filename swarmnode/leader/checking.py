"""How precisely workers add, asked with crafted rows: of those that round otherwise, before they serve, and of all in
service, among the dispatches of running requests. Answers that overflow tell of themselves.

A check in service has the shape of work: rows of the layer's real activations, some of them turned towards a neuron of
the expert that is checked, mixed with others for other experts that the worker holds. What is found decides who may
hold output ranks, and nothing else: a worker that is unfit goes on with the layers before them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import trio

from backends.activations import quantize_q8_0
from backends.experts import F32
from backends.manifest import LayerExperts, Manifest
from capabilities.agreement import Agreement, one_sided
from capabilities.errors import SwarmError
from capabilities.precision import Precision
from capabilities.row_check import ROWS_MIN
from scheduler.placement import Placement
from scheduler.service_checks import STRIKES, Check, ServiceChecks
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.link import PeerLink
from swarmnode.leader.members import Member, Members
from swarmnode.leader.probe import ProbeReference, ask_rows, something_else
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.net.interface import PeerId

_log = structlog.get_logger(__name__)

ROWS: Final = 2 * ROWS_MIN
_LOOK_S: Final = 0.5
_PACE_S: Final = 0.05  # between dispatches of a single row, about as fast as tokens come
_PROBED: Final = 3  # experts that are asked of a worker before it serves


class Imprecise(SwarmError):
    """A worker computes the model, and not precisely enough for output ranks."""

    type = "imprecise"
    default_hint = (
        "It holds layers before the output ranks. `swarmctl status` shows what was measured of its backend; another"
        " driver, version or device may add in F32."
    )


async def imprecision(
    link: PeerLink, reference: ProbeReference, manifest: Manifest, share: Placement, agreement: Agreement, seed: int
) -> Imprecise | None:
    """Why a worker whose numbers are out of tolerance is unfit; None if only its rounding of activations is another.

    agreement: of what the probe found, all rows together.

    Raises:
        ExpertsUnavailable: it does not round otherwise: it computes something else.
        SwarmError: the worker does not answer, or an expert cannot be had here.
    """
    held = share.held_by(str(link.peer))
    experts = [(layer, expert) for layer, some in held.items() for expert in some]
    draw = random.Random(seed)
    for layer_number, expert in draw.sample(experts, min(_PROBED, len(experts))):
        layer = manifest.experts_of(layer_number)
        ordinary = np.random.default_rng(draw.getrandbits(32)).standard_normal((ROWS, layer.n_in), np.float32)
        crafted = await reference.crafted(layer, expert, link.peer, ordinary, draw.getrandbits(32), rounded=False)
        rows = np.arange(ROWS, dtype=np.int32)
        ids = np.full(ROWS, expert, np.int32)
        answer = await ask_rows(link, crafted.x, rows, ids, layer, share.term, share.epoch, ask_f32=True)
        found = await crafted.judge(answer)
        if found is not Precision.F16 and one_sided(agreement) and not await crafted.explains(answer):
            raise something_else(link, layer, [expert], "rows", agreement)
        if found is not Precision.F32:
            how = "adds in half precision" if found is Precision.F16 else "rounds in a way that is not known here"
            return Imprecise(
                f"peer {link.name} {how}: its rows of layer {layer_number} are out of tolerance",
                layer=layer_number,
                experts=[expert],
                peer=str(link.peer),
            )
    return None


class Owner(Protocol):
    """Whom the checks ask and tell: the placer."""

    @property
    def idle(self) -> bool:
        """No request is running."""

    def found_imprecise(self, member: Member) -> None:
        """A worker was found unfit in service."""

    def found_precise(self, member: Member, precise: bool) -> None:
        """How a worker adds that is unfit."""


class Checking:
    """`run` never ends. output: the output ranks; q8_layers: whose activations travel as Q8_0."""

    def __init__(
        self,
        owner: Owner,
        members: Members,
        coverage: Coverage,
        manifest: Manifest,
        reference: ProbeReference,
        remote: RemoteExperts,
        *,
        output: frozenset[int],
        q8_layers: frozenset[int],
        partial_sums: bool,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """`draw`: for tests, else the system's randomness."""
        self._owner = owner
        self._members = members
        self._coverage = coverage
        self._manifest = manifest
        self._reference = reference
        self._remote = remote
        self._output = output
        self._q8_layers = q8_layers
        self._partial_sums = partial_sums
        self._draw = draw or random.SystemRandom().random
        self._checks = ServiceChecks(self._draw)
        self._asking = trio.Lock()
        self._overflows = WeakKeyDictionary[PeerLink, int]()  # by link, those that it was found unfit for

    async def run(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            self._look_for_overflows()
            if self._owner.idle:
                continue  # there is no work that a check could look like
            check = self._checks.next(self._held(), trio.current_time())
            if check is None:
                continue
            try:
                await self._carry_out(check)
            except SwarmError as error:  # it failed, or the expert cannot be had: others see to that
                _log.info("check.not_made", peer=check.peer, layer=check.layer, reason=error.message)

    def _look_for_overflows(self) -> None:
        """Sums in single precision stay finite: a worker whose answers are not, again and again, is unfit."""
        for peer in self._coverage.answering:
            member = self._members.by_peer.get(PeerId(peer))
            if member is None or member.link is None or member.unfit is not None:
                continue
            count = member.link.statistics.not_finite
            if count - self._overflows.get(member.link, 0) < STRIKES:
                continue
            self._overflows[member.link] = count
            member.unfit = Imprecise(
                f"peer {member.name} answered values that are not finite {STRIKES} times, as sums in half precision do",
                peer=peer,
            )
            _log.warning("check.unfit", peer=peer, name=member.name, error=member.unfit.to_json())
            self._owner.found_imprecise(member)

    async def answered(self) -> None:
        """Wait until what was asked has been answered, or is not waited for any more."""
        async with self._asking:
            pass

    def _held(self) -> Mapping[str, Mapping[int, Sequence[int]]]:
        """The output ranks of those who serve, and all that the unfit hold: they may be right again."""
        held = {}
        for peer, placement in self._coverage.answering.items():
            unfit, share = self._members.by_peer[PeerId(peer)].unfit is not None, placement.held_by(peer)
            held[peer] = {layer: experts for layer, experts in share.items() if unfit or layer in self._output}
        return held

    async def _carry_out(self, check: Check) -> None:
        member, placement = self._members.by_peer[PeerId(check.peer)], self._coverage.answering[check.peer]
        layer = self._manifest.experts_of(check.layer)
        ordinary = await self._remote.sample(check.layer, 2 * ROWS)
        if ordinary is None:
            return
        rounded = member.hello.q8_0 and check.layer in self._q8_layers
        crafted = await self._reference.crafted(
            layer, check.expert, member.peer, ordinary[:ROWS], check.seed, rounded=rounded
        )
        others = placement.held_by(check.peer)[check.layer]
        answer = await self._ask(member, layer, check, crafted.x, ordinary[ROWS:], others, rounded)
        if answer is None:
            return
        found = await crafted.judge(answer)
        _log.debug("check.made", peer=check.peer, layer=check.layer, expert=check.expert, sums=str(found))
        if member.unfit is not None:
            if found is not Precision.UNKNOWN:
                self._owner.found_precise(member, found is Precision.F32)
        elif self._checks.found(check, found, trio.current_time()):
            member.unfit = Imprecise(
                f"peer {member.name} adds in half precision in service, {STRIKES} times in a row, and was measured to"
                " add in F32",
                layer=check.layer,
                experts=[check.expert],
                peer=check.peer,
            )
            _log.warning("check.unfit", peer=check.peer, name=member.name, error=member.unfit.to_json())
            self._owner.found_imprecise(member)

    async def _ask(
        self,
        member: Member,
        layer: LayerExperts,
        check: Check,
        crafted: F32,
        ordinary: F32,
        others: Sequence[int],
        rounded: bool,
    ) -> F32 | None:
        """The expert's rows [ROWS, n_out] for the crafted ones, which go among ordinary ones for other experts; None if
        the worker does not serve them any more."""
        shuffled = random.Random(check.seed)
        x = np.concatenate([crafted, ordinary])
        experts = np.array([check.expert] * len(crafted) + shuffled.choices(others, k=len(ordinary)), np.int32)
        order = np.array(shuffled.sample(range(len(x)), len(x)))
        weights = np.array([shuffled.uniform(0.05, 0.5) for _ in x], np.float32)
        answer = np.empty((len(x), layer.n_out), np.float32)
        for some in order.reshape(-1, 1) if check.alone else [order]:
            rows = x[some]
            async with self._asking:  # an epoch that ends waits for what was asked under its name
                placement, link = self._coverage.answering.get(check.peer), member.link
                held = () if placement is None else placement.held_by(check.peer).get(check.layer, ())
                if placement is None or link is None or not {check.expert, *others} <= set(held):
                    return None
                answer[some] = await ask_rows(
                    link,
                    quantize_q8_0(rows) if rounded else rows,
                    np.arange(len(some), dtype=np.int32),
                    experts[some],
                    layer,
                    placement.term,
                    placement.epoch,
                    ask_f32=True,
                    weights=weights[some] if self._partial_sums else None,
                )
            if check.alone:
                await trio.sleep(2 * _PACE_S * self._draw())
        if self._partial_sums:  # of one row each
            answer /= weights[:, None]
        return answer[: len(crafted)]
