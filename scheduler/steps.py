"""What the batcher gives to be decoded, and what it counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
