"""`swarmctl top`: what two statuses, a while apart, say of the time between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Any


def measure(before: Mapping[str, Json], after: Mapping[str, Json], seconds: float) -> dict[str, Json]:
    """Rates over `seconds`. None where a counter is missing or went back, as another leader's does."""
    requests, model = _object(after, "requests"), _object(after, "model")
    layers, earlier = _object(model, "layers"), _object(_object(before, "model"), "layers")
    decoded = _more(earlier, layers, "decode_computed")
    spent_s = _more(earlier, layers, "decode_round_trip_s")
    known = {peer.get("peer_id"): peer for peer in _objects(before)}
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": _rate(_more(_object(before, "requests"), requests, "tokens"), seconds),
        "layers_per_s": _rate(_more(earlier, layers, "computed"), seconds),
        "layer_ms": round(spent_s / decoded * 1e3, 3) if decoded and spent_s is not None else None,
        "running": requests.get("running"),
        "waiting": requests.get("waiting"),
        "peers": [_peer(known.get(peer.get("peer_id"), {}), peer, seconds) for peer in _objects(after)],
    }


def _peer(before: Mapping[str, Json], peer: Mapping[str, Json], seconds: float) -> dict[str, Json]:
    return {
        "peer_id": peer.get("peer_id"),
        "name": peer.get("name"),
        "state": peer.get("state"),
        "load": peer.get("load"),
        "dispatches_per_s": _rate(_more(before, peer, "dispatches"), seconds),
        "rows_per_s": peer.get("rows_per_s"),
        "rtt_ms": peer.get("rtt_ms"),
    }


def _more(before: Mapping[str, Json], after: Mapping[str, Json], key: str) -> float | None:
    first, last = before.get(key), after.get(key)
    if not isinstance(first, int | float) or not isinstance(last, int | float) or last < first:
        return None
    return last - first


def _rate(count: float | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else round(count / seconds, 3)


def _object(value: Mapping[str, Json], key: str) -> Mapping[str, Json]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _objects(status: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    peers = status.get("peers")
    return [peer for peer in peers if isinstance(peer, Mapping)] if isinstance(peers, list) else []
