"""`swarmctl peer NAME`: one peer, as whoever is asked knows it. docs/status.md says what each key means.

What the leader measured comes from its status; what the peer says of itself from its advert; what is held of it from
the newest verdict; bans and releases from the swarm's record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capabilities.advert_content import AdvertContent
from capabilities.errors import UsageError
from capabilities.held_experts import HeldExperts
from capabilities.verdict import Verdict

_PREFIX_CHARS_MIN: Final = 6
"""Of a peer id that is not named in full: peer ids begin alike."""

_FROM_ROW: Final = (
    "peer_id", "name", "roles", "state", "fitness", "version", "rtt_ms", "rows_per_s", "dispatches",
    "bit_identical_to_leader", "memory", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """What this node knows of a peer besides the leader's row.

    content: its advert, or None; heard_s: how long ago it was heard. releases: their count and the last one's Unix
    second (0, 0 for none).
    """

    content: AdvertContent | None = None
    heard_s: float | None = None
    verdict: Verdict | None = None
    releases: tuple[int, int] = (0, 0)
    banned: bool = False


def find_peer(name: str, status: Mapping[str, Any], others: Collection[str] = ()) -> str:
    """The peer id that a person means: a name, a peer id, or the beginning or end of one.

    others: peer ids that are known and stand in no row.

    Raises:
        UsageError: nobody is called that, or several are.
    """
    rows: dict[str, str] = {row["peer_id"]: row["name"] for row in status["peers"]}
    ids = {*rows, *others}
    if name in ids:
        return name
    found = sorted(peer for peer, called in rows.items() if called == name)
    if not found and len(name) >= _PREFIX_CHARS_MIN:
        found = sorted(peer for peer in ids if peer.startswith(name) or peer.endswith(name))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} may be any of {', '.join(found[:8])}", hint="Name one by its peer id.")
    raise UsageError(f"no peer is called {name!r}", hint="`swarmctl status` shows who is there.")


def explain(peer: str, status: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """What is known of a peer of `find_peer`'s."""
    row: Mapping[str, Any] = next((row for row in status["peers"] if row["peer_id"] == peer), {})
    content, verdict = known.content, known.verdict
    return {
        **{key: row.get(key) for key in _FROM_ROW},
        "peer_id": peer,
        "fitness": row.get("fitness") if verdict is None else verdict.fitness,
        "leader": status["leader"],
        "advertised": None if content is None else _advertised(content, known.heard_s),
        "backends": [_backend(each, content) for each in row.get("backends", [])],
        "experts": {
            "proven": row.get("experts_held", 0),
            "models": [] if content is None else [_held(each) for each in content.held],
        },
        "audits": row.get("audits"),
        "self_differed": (row.get("audits") or {}).get("self_differed"),
        "verdict": None if verdict is None else verdict.to_json(),
        "releases": {"count": known.releases[0], "last_at_s": known.releases[1] or None},
        "banned": known.banned,
    }


def _advertised(content: AdvertContent, heard_s: float | None) -> dict[str, Any]:
    return {
        "heard_s_ago": None if heard_s is None else round(heard_s, 1),
        "phase": str(content.phase),
        "roles": [str(role) for role in content.roles],
        "draining": content.policy.draining,
        "battery": content.policy.battery,
        "metered": content.policy.metered,
        "addresses": list(content.addresses),
        "not_reached": list(content.not_reached),
        "wire": content.wire,
        "memory_budget_bytes": content.memory_budget,
    }


def _backend(shown: Mapping[str, Any], content: AdvertContent | None) -> dict[str, Any]:
    """As in the status, and class and speed of each weight type."""
    said = () if content is None else content.backends
    return {
        **shown,
        "weights": [
            {"type": each.weight, "numeric_class": each.numeric_class or None, "rows_per_s": each.rows_per_s or None}
            for backend in said
            if backend.name == shown["name"]
            for each in backend.weights
        ],
    }


def _held(held: HeldExperts) -> dict[str, Any]:
    layers = [{"layer": layer, "experts": list(held.experts_of(layer))} for layer in held.layers]
    return {"model": held.model, "experts": held.count, "layers": layers}
