"""One worker's stay with a leader, and what is remembered of it: as swarmnode/leader/members.py keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.dispatch import RowRate
from tests.simulator.messages import Hello
from tests.simulator.streams import End


@dataclass(eq=False)
class Stay:
    """From a hello until the stream ends. Instants are the leader's.

    link_up    dispatches may go there: it has answered them since it last failed
    loaded     the (term, epoch) that it says it holds
    proven     those that a probe found right since
    """

    peer: str
    hello: Hello
    stream: End
    joined_s: float
    up: bool = True
    lost_s: float | None = None
    silent: bool = False
    link_up: bool = True
    resting: bool = False
    loaded: tuple[int, int] | None = None
    proven: set[tuple[int, int]] = field(default_factory=set)
    failing_since_s: float | None = None
    failures: int = 0
    given_up: int = 0
    excluded_until_s: float = -math.inf
    rate: RowRate = field(default_factory=RowRate)

    def is_usable(self, term: int, epoch: int) -> bool:
        return self.up and not self.silent and self.link_up and (term, epoch) in self.proven
