"""The command that plays rounds: what is left to do, what was done, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.netns.__main__ import append, read_lines, rounds_left, summary
from tests.netns.faults import CASES, question


def line(case: str, number: int, **changes: Any) -> dict[str, Any]:
    whole = {"complete": True, "equal": True, "pause_s": 1.0, "elected_s": None, "back_s": 2.0, "good": True}
    return {"case": case, "round": number, **whole, **changes}


def test_every_role_meets_every_kind_of_fault() -> None:
    assert set(CASES) == {f"{r}-{k}" for r in ("worker", "leader") for k in ("kill", "stop", "cut", "nap", "part")}


def test_rounds_go_through_all_cases_and_none_is_played_twice() -> None:
    cases = ["worker-kill", "leader-cut"]
    assert list(rounds_left([], cases, 2)) == [(case, number) for number in (0, 1) for case in cases]
    done = [line("worker-kill", 0), line("leader-cut", 1), line("worker-nap", 0)]
    assert list(rounds_left(done, cases, 2)) == [("leader-cut", 0), ("worker-kill", 1)]


def test_a_file_that_was_cut_short_loses_that_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    assert read_lines(file) == []
    whole = json.dumps(line("worker-kill", 0))
    file.write_text(f"{whole}\n{whole[:30]}")
    append(file, line("leader-cut", 1))
    assert read_lines(file) == [line("worker-kill", 0), line("leader-cut", 1)]


def test_the_summary_counts_and_takes_medians() -> None:
    bad = {"complete": False, "good": False, "pause_s": None, "back_s": None}
    lines = [line("leader-cut", n, pause_s=pause, elected_s=1.5) for n, pause in enumerate((1.0, 2.0, 6.0))]
    _, cut, kill = summary([*lines, line("worker-kill", 0, **bad)]).splitlines()
    assert cut.split() == ["leader-cut", "3", "3", "3", "3", "3", "2.00..6.00", "1.50..1.50"]
    assert kill.split() == ["worker-kill", "1", "0", "1", "0", "0", "-", "-"]


def test_questions_are_greedy_and_sampled_in_turn_and_always_the_same() -> None:
    assert question("leader-cut", 2, 9)["temperature"] == 0
    assert question("leader-cut", 3, 9)["temperature"] > 0
    assert question("leader-cut", 3, 9) == question("leader-cut", 3, 9)
    assert len({question("leader-cut", n, 9)["prompt"] for n in range(20)}) > 1
