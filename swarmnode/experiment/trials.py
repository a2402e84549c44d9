"""One peer under a leader's audits, without a network: the leader's own tap, judge and sequential tests.

A peer answers dispatches with its own kernels; the tap chooses which to recompute, by a secret; the judge recomputes
them with this machine's kernels from the model's weights; the tests say what follows. Besides it nine other peers
answer as often, right and long trusted: what may be recomputed is a share of all that is computed.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from backends.experts import F32, ExpertBackend
from capabilities.errors import PeerMistake, SwarmError, UsageError
from capabilities.row_grades import Grade
from scheduler.audit_choice import Chosen, PeerStanding
from scheduler.audit_tests import Change, Found, PeerAudits
from scheduler.audits import Audits
from scheduler.dispatch import check_reply
from swarmnode.experiment.dispatches import PEER, Dispatch, Dispatches
from swarmnode.leader.audit_evidence import found_of
from swarmnode.leader.audit_tap import AuditTap
from swarmnode.leader.recomputing import Judged, Sample

JudgeOne = Callable[[Sample], Awaitable[Judged]]
Standing = Literal["new", "trusted"]

_OTHERS: Final = tuple(f"other {number}" for number in range(9))
_TRUSTED: Final = PeerAudits(agreed=1_000, in_a_row=1_000)  # audited at the least share for long


@dataclass(frozen=True, slots=True)
class Trial:
    """When a cheat was suspected, and out: the number of its dispatch since it began; None: not within `dispatches`."""

    suspected: int | None
    out: int | None
    dispatches: int


@dataclass(slots=True)
class Watch:
    """What full audits of an honest peer showed."""

    audits: int = 0
    refused: int = 0
    """Answers with values that are not finite: another holder's counts in their place, and nobody recomputes them."""
    grades: Counter[Grade] = field(default_factory=Counter)
    """Rows."""
    wrong_audits: int = 0
    changes: Counter[Change] = field(default_factory=Counter)
    worst: float = 0.0
    """Relative L2 of the furthest row."""


class FullAudits(Audits):
    """Every answer is recomputed, whatever is known of its peer."""

    def standing(self, peer: str) -> PeerStanding:
        return PeerStanding()

    def answered(self, peer: str, rows: int) -> Chosen | None:
        self.refill()
        return super().answered(peer, rows)


async def cheat_trial(
    dispatches: Dispatches,
    backend: ExpertBackend,
    judge_one: JudgeOne,
    standing: Standing,
    seed: int,
    dispatches_max: int,
) -> Trial:
    """A peer that cheats from now on, until it is out or has answered `dispatches_max` times."""
    draw = random.Random(seed)
    audits = Audits(_secret(seed))
    audits.adopt(dict.fromkeys(_OTHERS if standing == "new" else (*_OTHERS, PEER), _TRUSTED))
    tap = _tap(audits)
    suspected = None
    for number in range(1, dispatches_max + 1):
        dispatch = draw.choice(dispatches.each)
        _others_answer(audits, len(dispatch.part.experts))
        changes = await _audited(tap, dispatch, backend, judge_one, None)
        if suspected is None and (changes or audits.held(PEER).wrong_score > 0):
            suspected = number
        if Change.QUARANTINED in changes:
            return Trial(suspected, number, number)
    return Trial(suspected, None, dispatches_max)


async def watch_honest(
    dispatches: Dispatches,
    backend: ExpertBackend,
    judge_one: JudgeOne,
    audits: FullAudits,
    seed: int,
    count: int,
) -> Watch:
    """Audit so many answers of a peer that computes right, one and all; fewer where some are refused."""
    draw, watch, tap = random.Random(seed), Watch(), _tap(audits)
    for _ in range(count):
        changes = await _audited(tap, draw.choice(dispatches.each), backend, judge_one, watch)
        watch.changes.update(changes)
        if Change.QUARANTINED in changes:
            break
    return watch


async def _audited(
    tap: AuditTap, dispatch: Dispatch, backend: ExpertBackend, judge_one: JudgeOne, watch: Watch | None
) -> tuple[Change, ...]:
    """The peer answers; what an audit of that changes, if it is chosen."""
    layer, part, answer = dispatch.layer, dispatch.part, _answer(dispatch, backend)
    try:
        check_reply(answer, part, layer.layer, layer.n_out)
    except PeerMistake:
        if watch is not None:
            watch.refused += 1
        return tap.audits.refused(PEER)
    tap.answered(PEER, layer, dispatch.x, part, None, answer, rounded=False, ask_f32=dispatch.ask_f32)
    if (taken := tap.take()) is None:
        return ()
    chosen, sample = taken
    judged = await judge_one(sample)
    found = found_of(sample, judged)
    if watch is not None:
        _note(watch, judged, found)
    return tap.audits.found(chosen, found)


def _answer(dispatch: Dispatch, backend: ExpertBackend) -> F32:
    try:
        return dispatch.answer(backend)
    except SwarmError:
        raise
    except Exception as error:  # whatever a class of somebody's own raises
        name = f"{type(backend).__module__}:{type(backend).__name__}"
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name} cannot compute: {said}", hint="Who fails gives no answer to audit.") from error


def _note(watch: Watch, judged: Judged, found: Found) -> None:
    grades, counts = np.unique(judged.graded.grade, return_counts=True)
    watch.audits += 1
    watch.grades.update({Grade(int(grade)): int(count) for grade, count in zip(grades, counts, strict=True)})
    watch.wrong_audits += found.wrong > 0
    watch.worst = max(watch.worst, float(judged.graded.distance.max()))


def _others_answer(audits: Audits, rows: int) -> None:
    """As often as the peer, right, and audited as they are."""
    for name in _OTHERS:
        if (chosen := audits.answered(name, rows)) is not None:
            audits.found(chosen, Found(chosen.rows, identical=True))


def _tap(audits: Audits) -> AuditTap:
    tap = AuditTap(audits, lambda: None)
    tap.open = True
    return tap


def _secret(seed: int) -> bytes:
    return hashlib.blake2b(b"%d" % seed, digest_size=32).digest()
