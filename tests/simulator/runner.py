"""Many runs, one after the other; what they found is kept in a file from which the next call goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.simulator.swarm import Outcome, simulate
from tests.simulator.whole import simulate_whole

SAVE_EVERY = 50
KINDS: dict[str, Callable[[int], Outcome]] = {"swarms": simulate_whole, "elections": simulate}
"""What a seed runs: a whole swarm, or its elections alone, which take a fifth of the time."""


@dataclass
class Report:
    """What the seeds from `first` up to (not including) `next_seed` have shown."""

    kind: str = "elections"  # of KINDS
    first: int = 0
    next_seed: int = 0
    breaches: dict[str, str] = field(default_factory=dict)  # seed -> what broke
    recovery_ms: dict[str, int] = field(default_factory=dict)  # milliseconds from healing to a leader -> runs
    terms: int = 0
    orders: int = 0
    mistakes: int = 0
    answers: int = 0
    failures: int = 0
    went_on: int = 0
    replaced: int = 0

    @property
    def runs(self) -> int:
        return self.next_seed - self.first

    def add(self, outcome: Outcome) -> None:
        """The next seed's."""
        assert outcome.seed == self.next_seed
        self.next_seed += 1
        self.terms += outcome.terms
        self.orders += outcome.orders
        self.mistakes += outcome.mistakes
        self.answers += outcome.answers
        self.failures += outcome.failures
        self.went_on += outcome.went_on
        self.replaced += outcome.replaced
        if outcome.breach is not None:
            self.breaches[str(outcome.seed)] = outcome.breach
        if outcome.recovery_s is not None:
            key = str(round(outcome.recovery_s * 1_000))
            self.recovery_ms[key] = self.recovery_ms.get(key, 0) + 1

    def recovery_s(self, share: float) -> float:
        """The recovery time that this share of the runs did not exceed."""
        times = sorted((int(ms), runs) for ms, runs in self.recovery_ms.items())
        left = share * sum(runs for _, runs in times)
        for ms, runs in times:
            left -= runs
            if left <= 0:
                return ms / 1_000
        return 0.0

    def __str__(self) -> str:
        half, most, all_ = (f"{self.recovery_s(share):.2f} s" for share in (0.5, 0.99, 1.0))
        text = (
            f"{self.runs:,} seeds, {len(self.breaches)} breaches; {self.terms:,} terms, {self.orders:,} orders obeyed, "
            f"{self.mistakes:,} forgeries recognised; healed swarms had a leader within {half} (half of them), {most} "
            f"(99 of 100), {all_} (all)"
        )
        if self.kind == "elections":
            return text
        return (
            f"{text}; {self.answers:,} answers, {self.went_on:,} of them by more than one leader, {self.failures:,}"
            f" requests that failed by name, {self.replaced:,} parts of layers that another holder computed"
        )


def load(path: Path, kind: str, first: int) -> Report:
    """The report so far, or a new one. Raises ValueError if it is another kind's."""
    report = Report(**json.loads(path.read_text())) if path.exists() else Report(kind, first, first)
    if report.kind != kind:
        raise ValueError(f"{path} is a report of {report.kind}")
    return report


def save(path: Path, report: Report) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(asdict(report), indent=1))
    os.replace(part, path)


def run(
    report: Report,
    seeds: Iterable[int],
    saved: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the seeds, which go on where the report ends. `saved` is called now and then, and at the end."""
    one = KINDS[report.kind]
    for seed in seeds:
        report.add(one(seed))
        if report.runs % SAVE_EVERY == 0:
            saved(report)
    saved(report)
    return report
