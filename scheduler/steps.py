"""What the batcher gives to be decoded, made of the answers that take part, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scheduler.answer import Answer

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class StepPart:
    """The rows of one request in a step: `rows` consecutive ones in `sequence`."""

    request: str
    sequence: int
    rows: int
    wants_logits: bool  # on the last of its rows


@dataclass(frozen=True, slots=True)
class Step:
    """One decode of the trunk. Rows stand by sequence, then by position; positions go on from what the cache holds.

    clear         sequences to remove from the cache first, whether or not they have rows here
    cut           (sequence, position): what to remove from a sequence then, from that position on
    tokens, positions, sequences    int32 [N]
    wants_logits  bool [N]; step_done takes the logits of these rows in their order
    give_up_at    when the last of its requests has expired
    """

    number: int
    kind: StepKind
    clear: tuple[int, ...]
    parts: tuple[StepPart, ...]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    wants_logits: NDArray[np.bool_]
    cut: tuple[tuple[int, int], ...] = ()
    give_up_at: float = math.inf

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(part.request for part in self.parts)


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """Gauges of this instant (slots, running, waiting, parked), then counters since the start."""

    slots: int
    running: int
    waiting: int
    parked: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    prefill_steps: int
    decode_steps: int
    failed_steps: int
    rows_decoded: int
    tokens_generated: int


def share_rows(answers: list[Answer], limit: int) -> list[tuple[Answer, int]]:
    """Rows for each, at most `limit` in all (at least one each), even but for those that need less; in their order."""
    rows: dict[str, int] = {}
    for n, answer in enumerate(sorted(answers, key=lambda answer: answer.missing)):
        rows[answer.request.id] = min(answer.missing, limit // (len(answers) - n))
        limit -= rows[answer.request.id]
    return [(answer, rows[answer.request.id]) for answer in answers]


def make_step(
    number: int,
    kind: StepKind,
    shares: Sequence[tuple[Answer, int]],
    *,
    clear: Sequence[int],
    cut: Sequence[tuple[int, int]],
) -> Step:
    """A step of the next rows of these answers, each of which has a slot: so many of each as stands beside it."""
    tokens: list[int] = []
    positions: list[int] = []
    parts: list[StepPart] = []
    for answer, rows in shares:
        assert answer.slot is not None
        end = answer.cached + rows
        tokens += answer.tokens[answer.cached : end]
        positions += range(answer.cached, end)
        parts.append(StepPart(answer.request.id, answer.slot, rows, end == len(answer.tokens)))
    lengths = [part.rows for part in parts]
    wants_logits = np.zeros(len(tokens), dtype=np.bool_)
    wants_logits[np.cumsum(lengths) - 1] = [part.wants_logits for part in parts]
    return Step(
        number=number,
        kind=kind,
        clear=tuple(clear),
        cut=tuple(cut),
        parts=tuple(parts),
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequences=np.repeat(np.array([part.sequence for part in parts], dtype=np.int32), lengths),
        wants_logits=wants_logits,
        give_up_at=max(answer.deadline for answer, _ in shares),
    )
