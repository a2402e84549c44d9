"""python -m tests.simulator --seeds 20000 --resume FILE: interrupt it at will, and call it again to go on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.simulator.runner import KINDS, Report, load, run, save

RECOVERY_S_P99_MAX = 3.0


def main(arguments: list[str] | None = None) -> int:
    """0: nothing broke; 1: something did, or leaders took too long."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--only", choices=list(KINDS), default="swarms", help="whole swarms, or elections alone")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many in all")
    parser.add_argument("--first", type=int, default=0, help="where a new report begins")
    parser.add_argument("--resume", type=Path, help="the report: gone on with if it exists")
    parser.add_argument("--show", type=int, metavar="SEED", help="only this seed, with its history")
    chosen = parser.parse_args(arguments)
    if chosen.show is not None:
        outcome = KINDS[chosen.only](chosen.show)
        print("\n".join(outcome.trace), f"\n{outcome.breach or 'all well'}; history {outcome.trace_hash}")
        return int(outcome.breach is not None)

    first, kind = chosen.first, chosen.only
    report = load(chosen.resume, kind, first) if chosen.resume else Report(kind, first, first)

    def saved(report: Report) -> None:
        if chosen.resume:
            save(chosen.resume, report)
        print(report, file=sys.stderr)

    run(report, range(report.next_seed, report.first + chosen.seeds), saved=saved)
    for seed, breach in report.breaches.items():
        print(f"seed {seed}: {breach}   (--only {kind} --show {seed})")
    return int(bool(report.breaches) or report.recovery_s(0.99) > RECOVERY_S_P99_MAX)


if __name__ == "__main__":
    sys.exit(main())
