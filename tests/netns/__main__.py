"""Many rounds of faults in a bed, as a command that can be stopped and resumed:

    python -m tests.netns --model demo --rounds 20 --resume rounds.jsonl

Each round is appended to the file as it ends and is not played again. The summary is of the whole file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from backends.demo_model import ensure_demo_model
from swarmnode.paths import shared_cache_folder
from tests.netns.bed import NoNamespaces
from tests.netns.faults import CASES, play
from tests.netns.swarm import Stage, four_layers

MAX_TOKENS: Final = 24

Line = Mapping[str, Any]


def rounds_left(lines: list[Line], cases: list[str], rounds: int) -> Iterator[tuple[str, int]]:
    """Round by round through all cases, so that a file that is not finished says something of each."""
    done = {(line["case"], line["round"]) for line in lines}
    for number in range(rounds):
        for case in cases:
            if (case, number) not in done:
                yield case, number


def read_lines(file: Path) -> list[Line]:
    """What earlier runs wrote; a last line that was cut short is left out."""
    lines = []
    if file.exists():
        for text in file.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return lines


def append(file: Path, line: Line) -> None:
    """On a line of its own, whatever the last one was cut short to."""
    cut_short = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a") as out:
        out.write("\n" * cut_short + json.dumps(line) + "\n")


def summary(lines: list[Line]) -> str:
    """A table: rounds, how many were complete, equal, back in time and all of it; seconds of the longest pause in an
    answer, and until the next leader was known."""
    rows = [
        f"{'case':<12}{'rounds':>7}{'complete':>9}{'equal':>6}{'back':>5}{'good':>5}{'pause s':>15}{'elected s':>15}"
    ]
    for case in sorted({line["case"] for line in lines}):
        mine = [line for line in lines if line["case"] == case]
        complete, equal, good = (sum(line[key] for line in mine) for key in ("complete", "equal", "good"))
        back = sum(line["back_s"] is not None for line in mine)
        pause, elected = (_median_and_max(mine, key) for key in ("pause_s", "elected_s"))
        rows.append(f"{case:<12}{len(mine):>7}{complete:>9}{equal:>6}{back:>5}{good:>5}{pause:>15}{elected:>15}")
    return "\n".join(rows)


def _median_and_max(lines: list[Line], key: str) -> str:
    values = [line[key] for line in lines if line[key] is not None]
    return f"{statistics.median(values):.2f}..{max(values):.2f}" if values else "-"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.netns", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, demo, or a GGUF file (default: tiny)")
    parser.add_argument("--rounds", type=int, default=2, help="of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--resume", type=Path, required=True, help="where rounds are kept")
    wanted = parser.parse_args()

    lines = read_lines(wanted.resume)
    with tempfile.TemporaryDirectory(prefix="swarmnode-netns-") as folder:
        stage = Stage(_model(wanted.model, Path(folder)), Path(folder))
        try:
            for case, number in rounds_left(lines, wanted.cases, wanted.rounds):
                outcome = play(stage.swarm(), case, number, MAX_TOKENS)
                lines.append(outcome.to_json())
                append(wanted.resume, lines[-1])
                print(json.dumps(outcome.to_json()), flush=True)
                if outcome.back_s is None:
                    stage.drop()
        except NoNamespaces as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            stage.drop()
    print(summary(lines))
    return 0 if all(line["good"] for line in lines) else 1


def _model(name: str, folder: Path) -> Path:
    if name == "tiny":
        return four_layers(folder / "tiny.gguf")
    if name == "demo":
        return ensure_demo_model(shared_cache_folder(), lambda *_: None)
    return Path(name).resolve()


if __name__ == "__main__":
    sys.exit(main())
