"""`swarmctl predict`: what this machine would hold in a swarm and how fast that would be, and what was measured since.

Without joining: the inviting peer tells the swarm's outline to whoever has an invite, this machine measures its own
kernels on the model's very weight types, and the placement is worked out here, on paper. What was foretold is kept in
the data folder, so that it stands beside the measurement later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import trio

from backends.measure import DEADLINE_S, Request
from capabilities.errors import NotReady, UsageError
from scheduler.placement import WorkerSpec
from scheduler.prediction import Prediction, predict
from swarmnode.compute import choose_compute
from swarmnode.config import Config
from swarmnode.config_sections import MIB
from swarmnode.durable import write_whole
from swarmnode.identity import Identity
from swarmnode.leader.specs import RTT_MS_MIN
from swarmnode.measure_child import order
from swarmnode.measured import Measured
from swarmnode.measuring import measure_in_child
from swarmnode.net.groups import without_groups
from swarmnode.outline import Outline
from swarmnode.paths import Paths, shared_cache_folder
from swarmnode.swarm.commands import outbound_network
from swarmnode.swarm.invites import Invite
from swarmnode.swarm.joining import preview
from swarmnode.threads import machine_threads

_NEWCOMER: Final = "this machine"
_KEPT_BYTES_MAX: Final = 64 << 10

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Offer:
    """What this machine brings."""

    budget_bytes: int
    rows_per_s: float
    rtt_ms: float
    accumulates_f32: bool

    def spec(self) -> WorkerSpec:
        return WorkerSpec(
            _NEWCOMER,
            self.budget_bytes,
            host=_NEWCOMER,
            rows_per_s=self.rows_per_s,
            rtt_ms=max(RTT_MS_MIN, self.rtt_ms),
            accumulates_f32=self.accumulates_f32,
        )


def outline_by_invite(token: str) -> tuple[Outline, float]:
    """The swarm behind an invite, and the round trip to the inviting peer in seconds. The invite is not used up.

    Raises:
        UsageError: it is no invite.
        NotAdmitted: the inviting peer does not answer, or refuses.
    """
    invite = Invite.parse(token)

    async def ask() -> tuple[Outline, float]:
        async with outbound_network(Identity.generate(), invite.psk) as network:  # a stranger: a daemon may run here
            return await preview(network, invite)

    with without_groups():
        return trio.run(ask)


def offer_of_member(own: Mapping[str, Any], memory_mib: int | None) -> Offer | None:
    """What a node's row of its status says; None if its kernels were not measured yet."""
    backend: Mapping[str, Any] = next(iter(own.get("backends") or []), {})
    rate = backend.get("rows_per_s")
    if not rate:
        return None
    budget = int((own.get("memory") or {}).get("budget_bytes") or 0) if memory_mib is None else memory_mib * MIB
    f32 = (backend.get("accumulation") or {}).get("measured_when_asked") == "f32"
    return Offer(budget, float(rate), float(own.get("rtt_ms") or 0.0), f32)


def make_offer(config: Config, outline: Outline, *, memory_mib: int | None, rtt_ms: float) -> Offer:
    """Measure this machine's kernels on the model's weight types, unless that was done before. Takes seconds at most.

    Raises:
        SwarmError: the configured backend cannot be had.
    """
    threads = config.compute.threads or machine_threads()
    compute = choose_compute(config.compute, threads)
    ordered = order(
        config.compute,
        threads,
        shared_cache_folder() / "measurements",
        Request(outline.kinds, *outline.widths),
        fast=config.leader.fast,
        deadline_s=DEADLINE_S,
        anew=False,
    )
    measured = Measured(compute.name, compute.device, trio.run(measure_in_child, ordered))
    if not measured.rows_per_s:
        hint = "`swarmctl doctor` says what is wrong with the kernels."
        raise NotReady("this machine's kernels could not be measured in time", hint=hint)
    available = config.node.memory_bytes(psutil.virtual_memory().available)
    wanted = available if memory_mib is None else memory_mib * MIB
    return Offer(wanted, measured.rows_per_s, rtt_ms, measured.accumulates_f32(outline.kinds))


def report(outline: Outline, offer: Offer, *, foretold: Json | None, status: Mapping[str, Any] | None) -> Json:
    """The whole answer. status: of this node as a member; None before it is one."""
    found = predict(outline.layers, outline.used, outline.workers, offer.spec(), replicas=outline.replicas)
    return {
        "model": outline.model,
        "moe_layers": len(outline.layers),
        "experts": sum(spec.n_expert for spec in outline.layers),
        "expert_bytes": sum(spec.n_expert * spec.expert_bytes for spec in outline.layers),
        "workers": len(outline.workers),
        "layers_ms_now": None if outline.layer_ms is None else round(outline.layer_ms * len(outline.layers), 3),
        "offer": asdict(offer),
        "predicted": prediction_json(found),
        "foretold": foretold,
        "measured": None if status is None else _measured(status, len(outline.layers)),
    }


def prediction_json(found: Prediction) -> Json:
    most = None if found.layers_ms is None else round(1e3 / max(found.layers_ms, 1e-3), 2)
    return {
        "experts": found.experts,
        "layers": found.layers,
        "bytes": found.nbytes,
        "kernel_ms": round(found.kernel_ms, 3),
        "layers_ms": None if found.layers_ms is None else round(found.layers_ms, 3),
        "layers_ms_without": None if found.layers_ms_without is None else round(found.layers_ms_without, 3),
        "tokens_per_s_max": most,
        "missing": found.missing or None,
    }


def _measured(status: Mapping[str, Any], layers: int) -> Json:
    """What a member's status says of the same things."""
    rows: list[Json] = [row for row in status.get("peers") or [] if row.get("peer_id") == status.get("self")]
    own = rows[0] if rows else {}
    timing = (status.get("model") or {}).get("layers") or {}
    count, seconds = timing.get("decode_computed"), timing.get("decode_round_trip_s")
    return {
        "experts": own.get("experts_held"),
        "bytes": (own.get("memory") or {}).get("used_bytes"),
        "rows_per_s": (status.get("local") or {}).get("rows_per_s") or None,
        "rtt_ms": own.get("rtt_ms"),
        "layers_ms": round(seconds / count * 1e3 * layers, 3) if count and seconds is not None else None,
    }


# -- what was foretold -------------------------------------------------------------------------------------------------


def _file(paths: Paths) -> Path:
    return paths.data / "prediction.json"


def keep(paths: Paths, result: Mapping[str, Any]) -> None:
    """For after joining. A disk that does not take it is no reason to tell nothing."""
    kept = {"model": result["model"], "predicted": result["predicted"]}
    try:
        paths.make()
        write_whole(_file(paths), json.dumps(kept).encode())
    except (OSError, UsageError):
        return


def foretold(paths: Paths, model: str) -> Json | None:
    """What was kept of this model's prediction."""
    try:
        with _file(paths).open("rb") as file:
            kept = json.loads(file.read(_KEPT_BYTES_MAX))
        if isinstance(kept["predicted"], dict) and kept["model"] == model:
            return dict(kept["predicted"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None
