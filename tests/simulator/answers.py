"""What must hold of answers: the right tokens, each once and in order, of no leader of the past; and an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from capabilities.errors import Internal, SwarmError
from scheduler.attempts import Deliver, Leading
from scheduler.placement import Placement
from tests.simulator.checks import Breach, Checks
from tests.simulator.toy import F32, USED, Choice, Experts

if TYPE_CHECKING:
    from tests.simulator.asker import Query
    from tests.simulator.host import Host

LATE_S_MAX = 3.0  # after its deadline, on a clock that may run slow by a tenth


class Answers:
    """Called by askers where it happens. It knows every answer that one machine alone would give.

    `exact`: answers are those. Where workers add their rows the last bits depend on the placement, so there each layer
    is compared with what its placement gives.
    """

    def __init__(self, checks: Checks, experts: Experts, *, exact: bool) -> None:
        self.complete = 0
        self.failures: dict[str, int] = {}  # error type -> how many
        self.went_on = 0  # answers that more than one leader gave
        self.layers = 0
        self.replaced = 0
        self._checks = checks
        self._experts = experts
        self._exact = exact
        self._open: dict[Query, tuple[Host, int]] = {}  # with its host, and that one's boot
        self._terms: dict[Query, int] = {}
        self._leaders: dict[Query, set[Leading]] = {}

    def combined(self, placement: Placement, choice: Choice, result: F32) -> None:
        """A layer is complete: rows [T, USED, WIDTH], or totals [T, WIDTH]."""
        self.layers += 1
        tokens = np.repeat(np.arange(len(choice.x), dtype=np.int32), USED)
        rows = self._experts.rows(choice.layer, choice.x, tokens, choice.ids.reshape(-1)).reshape(*choice.ids.shape, -1)
        if result.ndim == 2:
            rows = _totals([peers[0] for peers in placement.holders[choice.layer]], choice, rows)
        if not np.array_equal(rows, result):
            raise Breach(f"another result: layer {choice.layer} in epoch {placement.epoch} of term {placement.term}")

    def took_over(self, parts: int) -> None:
        """Others compute what a peer owes."""
        self.replaced += parts

    def asked(self, host: Host, query: Query) -> None:
        self._open[query] = (host, host.boots)

    def delivered(self, host: Host, query: Query, token: Deliver, leader: Leading) -> None:
        """A token was accepted."""
        mandate = self._checks.terms.get(leader.term)
        if mandate is None or mandate.leader != leader.peer:
            raise Breach(f"uncertified token: {query.name} took one of {leader}")
        newest = host.behaviours["orders"].guard.term  # type: ignore[attr-defined]
        if leader.term < max(newest, self._terms.get(query, 0)):
            raise Breach(f"token of an old leader: {query.name} took one of {leader} in term {newest}")
        self._terms[query] = leader.term
        self._leaders.setdefault(query, set()).add(leader)
        if token.index != len(query.got):
            raise Breach(f"token {token.index} of {query.name} came after {len(query.got)} tokens")
        query.got.append(token.token)
        query.text += token.text
        if self._exact:
            tokens, text = query.wanted
            if query.got != list(tokens[: len(query.got)]) or not text.startswith(query.text):
                raise Breach(f"another answer: {query.name} got {query.got} {query.text!r} instead of {query.wanted}")

    def finished(self, query: Query, rest: str) -> None:
        """The answer is complete, with the rest of its text."""
        query.finished = True
        query.text += rest
        self._end(query)
        if self._exact and (tuple(query.got), query.text) != query.wanted:
            raise Breach(f"another answer: {query.name} ended with {query.got} {query.text!r}, not {query.wanted}")
        self.complete += 1
        self.went_on += len(self._leaders.pop(query, ())) > 1

    def failed(self, query: Query, error: SwarmError) -> None:
        """It ended without an answer."""
        query.error = error
        self._end(query)
        if type(error) in (Internal, SwarmError):
            raise Breach(f"{query.name} failed by {error.message}")
        self.failures[error.type] = self.failures.get(error.type, 0) + 1

    def _end(self, query: Query) -> None:
        self._open.pop(query, None)
        self._terms.pop(query, None)

    def awaited(self) -> bool:
        """Whether anybody waits for an answer."""
        return any(not query.dropped and host.up and host.boots == boot for query, (host, boot) in self._open.items())

    def nothing_hangs(self, now: float) -> None:
        """Whoever is awake has heard the end of what it asked."""
        for query, (host, boot) in list(self._open.items()):
            if query.dropped or not host.up or host.boots != boot:
                self._end(query)
            elif (
                not host.stopped
                and now - host.awake_since > LATE_S_MAX
                and now - query.asked_at > 1.2 * query.request.deadline_s + LATE_S_MAX
            ):
                raise Breach(f"hangs: {query.name} has heard nothing {now - query.asked_at:.1f} s after it was asked")


def _totals(owners: list[str], choice: Choice, rows: F32) -> F32:
    """Each token's total [T, WIDTH], by first holders: each one's rows in the router's order, then by their names."""
    totals = np.zeros_like(choice.x)
    for token, ids in enumerate(choice.ids.tolist()):
        groups: dict[str, F32] = {}
        for k, expert in enumerate(ids):
            row = rows[token, k] * choice.weights[token, k]
            owner = owners[expert]
            groups[owner] = groups[owner] + row if owner in groups else row
        for owner in sorted(groups):
            totals[token] += groups[owner]
    return totals
