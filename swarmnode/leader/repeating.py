"""The same rows of a worker once more: does it answer as it did before?

A repeat is a dispatch like any other, while requests run, and never in a token's way. Where an audit looked at a whole
answer, the very dispatch is repeated: kernels may add in another order where there are more rows or fewer. Of a larger
one the rows that were looked at are asked twice, and the two answers compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
import trio

from backends.activations import quantize_q8_0
from backends.experts import F32
from capabilities.errors import SwarmError
from capabilities.verdict import Evidence
from scheduler.audit_choice import Chosen
from scheduler.audit_tests import Found
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.members import Members
from swarmnode.leader.probe import ask_rows
from swarmnode.leader.recomputing import Judged, Sample
from swarmnode.net.interface import PeerId

_log = structlog.get_logger(__name__)

WAITING_MAX: Final = 16  # peers, with one answer of each: some MB at most
_LOOK_S: Final = 0.1  # on average: ten dispatches a second at most, of the hundreds that a swarm makes


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """An answer to ask for again. evidence: what was kept of the audit, if anything."""

    chosen: Chosen
    sample: Sample
    judged: Judged
    found: Found
    evidence: Evidence | None

    @property
    def rows(self) -> int:
        """That are asked in all."""
        return rows_again(self.sample)


def rows_again(sample: Sample) -> int:
    """How many rows it takes to ask for this answer again."""
    return len(sample.experts) * (1 if sample.whole else 2)


class Owner(Protocol):
    """Whom repeats ask: the placer."""

    @property
    def idle(self) -> bool:
        """No request is running."""


class Repeating:
    """`run` never ends."""

    def __init__(self, owner: Owner, members: Members, coverage: Coverage) -> None:
        self._owner = owner
        self._members = members
        self._coverage = coverage
        self._waiting: dict[str, Repeat] = {}  # by peer
        self._asking = trio.Lock()
        self._random = random.SystemRandom()

    def offer(self, repeat: Repeat) -> bool:
        """Whether there is room for it."""
        peer = repeat.chosen.peer
        if peer in self._waiting or len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting[peer] = repeat
        return True

    async def run(self, done: Callable[[Repeat, bool | None], None]) -> None:
        """done: hears of each whether the peer answered the same bits; None: it could not be asked."""
        while True:
            await trio.sleep(2 * _LOOK_S * self._random.random())
            if not self._waiting or self._owner.idle:
                continue  # without requests there is no work that a repeat could look like
            repeat = self._waiting[self._random.choice(list(self._waiting))]
            try:
                same = await self._ask(repeat.sample)
            except SwarmError as error:  # it failed: others see to that
                _log.info("repeat.not_made", peer=repeat.chosen.peer, reason=error.message)
                same = None
            del self._waiting[repeat.chosen.peer]
            done(repeat, same)

    async def answered(self) -> None:
        """Wait until what was asked has been answered, or is not waited for any more."""
        async with self._asking:
            pass

    async def _ask(self, sample: Sample) -> bool | None:
        before = sample.answer if sample.whole else await self._answer(sample)
        again = None if before is None else await self._answer(sample)
        return None if before is None or again is None else before.tobytes() == again.tobytes()

    async def _answer(self, sample: Sample) -> F32 | None:
        """None: it does not serve these experts now. Raises SwarmError if it does not answer."""
        async with self._asking:
            member, placement = (
                self._members.by_peer.get(PeerId(sample.peer)),
                self._coverage.answering.get(str(sample.peer)),
            )
            if member is None or member.link is None or placement is None:
                return None
            held = placement.held_by(str(sample.peer)).get(sample.layer.layer, ())
            if not set(sample.experts.tolist()) <= set(held):
                return None
            return await ask_rows(
                member.link,
                quantize_q8_0(sample.x) if sample.rounded else sample.x,
                sample.tokens,
                sample.experts,
                sample.layer,
                placement.term,
                placement.epoch,
                ask_f32=sample.ask_f32,
                weights=sample.weights,
            )
