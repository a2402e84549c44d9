"""What many trials show, and no more than they prove.

Of n trials without a miss the chance of one is, with 95 % confidence, at most 3 / n (the rule of three: 0.95 is about
1 - e^-3); the same of n audits of honest peers without a false conviction. Results are kept line by line as they come,
so that a long experiment goes on where it was interrupted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capabilities.errors import UsageError
from capabilities.row_grades import Grade
from scheduler.audit_tests import Change
from swarmnode.experiment.trials import Trial, Watch

SUSPECTED_WITHIN: Final = 90
OUT_WITHIN: Final = 100
LATE_SHARE: Final = 0.01
_LATE_SIGMAS: Final = 3.0  # by so much chance may exceed the share in a few hundred trials
_RULE_OF_THREE: Final = 3.0

Json = dict[str, Any]


class Kept:
    """A file of results, one JSON object a line; without a file they are only remembered."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """about: what the results depend on; a file of another experiment is refused.

        Raises:
            UsageError: the file is of another experiment, damaged before its last line, or cannot be read or written.
        """
        self._path = path
        self._found: dict[str, Json] = {}
        if path is None:
            return
        try:
            path.touch()
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be used: {error}", hint="Name another file for --resume.") from None
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut off
        try:
            read = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise UsageError(f"{path} is damaged", hint="Name another file for --resume.") from None
        if read and read[0] != {"about": dict(about)}:
            raise UsageError(f"{path} is of another experiment", hint="Name another file for --resume.")
        if whole != text or not read:
            path.write_text(whole or json.dumps({"about": dict(about)}) + "\n")
        self._found = {each["key"]: each["result"] for each in read[1:]}

    def get(self, key: str) -> Json | None:
        return self._found.get(key)

    def put(self, key: str, result: Json) -> Json:
        self._found[key] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "result": result}) + "\n")
        return result


def trial_json(trial: Trial) -> Json:
    return {"suspected": trial.suspected, "out": trial.out, "dispatches": trial.dispatches}


def watch_json(watch: Watch, seconds: float, restarts: int) -> Json:
    """restarts: times that its kernels' process ended meanwhile."""
    return {
        "audits": watch.audits,
        "refused": watch.refused,
        "rows": {grade.name.lower(): watch.grades[grade] for grade in Grade},
        "wrong_audits": watch.wrong_audits,
        "changes": {str(change): count for change, count in watch.changes.items()},
        "worst_relative_l2": watch.worst,
        "seconds": seconds,
        "restarts": restarts,
    }


def cheat_summary(name: str, standing: str, every: int, trials: Sequence[Json]) -> Json:
    """Over all trials of a cheat. A miss is one that was still in at the end."""
    missed = sum(trial["out"] is None for trial in trials)
    late = sum(not _in_time(trial) for trial in trials) if every == 1 else None
    return {
        "name": name,
        "standing": standing,
        "every": every,
        "trials": len(trials),
        "missed": missed,
        "missed_bound": None if missed else _RULE_OF_THREE / max(1, len(trials)),
        "suspected": _quantiles(trial["suspected"] for trial in trials),
        "out": _quantiles(trial["out"] for trial in trials),
        "late": late,
        "pass": missed == 0 and (late is None or late <= late_max(len(trials))),
    }


def late_max(trials: int) -> int:
    """Of so many trials of a peer that always cheats, how many may take longer than promised."""
    mean = trials * LATE_SHARE
    return math.floor(mean + _LATE_SIGMAS * math.sqrt(mean * (1 - LATE_SHARE)))


def honest_summary(target: str, watches: Sequence[Json], reason: str | None = None) -> Json:
    """Over all audits of a kind of honest peer. reason: why it computed no more."""
    audits, changes, rows = 0, Counter[str](), Counter[str]()
    for watch in watches:
        audits += watch["audits"]
        changes.update(watch["changes"])
        rows.update(watch["rows"])
    quarantined, wrong = changes[Change.QUARANTINED], sum(watch["wrong_audits"] for watch in watches)
    return {
        "target": target,
        "audits": audits,
        "refused": sum(watch["refused"] for watch in watches),
        "minutes": sum(watch["seconds"] for watch in watches) / 60,
        "restarts": sum(watch.get("restarts", 0) for watch in watches),
        "reason": reason,
        "quarantined": quarantined,
        "quarantined_bound": None if quarantined else _RULE_OF_THREE / max(1, audits),
        "suspected": changes[Change.SUSPECTED],
        "unfit": changes[Change.UNFIT],
        "wrong_audits": wrong,
        "wrong_audits_bound": None if wrong else _RULE_OF_THREE / max(1, audits),
        "rows": {grade.name.lower(): rows[grade.name.lower()] for grade in Grade},
        "worst_relative_l2": max((watch["worst_relative_l2"] for watch in watches), default=0.0),
        "pass": quarantined == 0,
    }


def _in_time(trial: Json) -> bool:
    suspected, out = trial["suspected"], trial["out"]
    return suspected is not None and suspected <= SUSPECTED_WITHIN and out is not None and out <= OUT_WITHIN


def _quantiles(values: Iterable[int | None]) -> Json:
    """Of the numbers of dispatches; null where the trial at that place had not come to it."""
    ordered = sorted(math.inf if value is None else value for value in values)

    def at(share: float) -> int | None:
        value = ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf
        return None if math.isinf(value) else int(value)

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}
