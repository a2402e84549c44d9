"""All checks, in their order, as the JSON of `swarmctl doctor`. Pure."""

from __future__ import annotations

from typing import Any, Final

from swarmnode.doctor.checks import MACHINE_CHECKS
from swarmnode.doctor.facts import Facts
from swarmnode.doctor.node_checks import NODE_CHECKS

CHECKS: Final = (*MACHINE_CHECKS, *NODE_CHECKS)
_CAUSES_MAX: Final = 8  # of one check: a swarm of 256 peers with one fault is told by its first ones


def diagnose(facts: Facts) -> dict[str, Any]:
    """`healthy` (nothing fails) and `checks[]` with `id`, `state`, `cause` and `mend`."""
    checks = []
    for name, check in CHECKS:
        found = check(facts)
        if isinstance(found, str):
            checks.append({"id": name, "state": "skip", "cause": found, "mend": None})
            continue
        states = [problem.state for problem in found]
        causes = [problem.cause for problem in found[:_CAUSES_MAX]]
        if len(found) > _CAUSES_MAX:
            causes.append(f"and {len(found) - _CAUSES_MAX} more")
        mends = dict.fromkeys(problem.mend for problem in found[:_CAUSES_MAX])
        state = "fail" if "fail" in states else "warn" if states else "ok"
        checks.append({"id": name, "state": state, "cause": "; ".join(causes) or None, "mend": " ".join(mends) or None})
    return {"healthy": all(check["state"] != "fail" for check in checks), "checks": checks}
