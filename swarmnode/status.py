"""`swarmctl status`: what a node knows of its swarm, as one JSON object.

The leader knows the mesh; the others ask it (status_service.py) and put their own state beside the answer. Nothing is
"ready" before a probe has named every held expert of every layer and compared its output. docs/status.md says what each
key means.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from capabilities.verdict import Verdict
from scheduler.advert_findings import CLONED_HINT, Finding, FindingKind
from swarmnode.config import Config
from swarmnode.leader.members import Member
from swarmnode.leader.service import Leader
from swarmnode.net.interface import Network
from swarmnode.version import VERSION
from swarmnode.worker.service import Worker

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself in `status`."""

    name: str
    backend: str
    device: str
    threads: int
    memory_budget_bytes: int
    started_s: float

    @classmethod
    def of(cls, config: Config, backend: str, device: str, threads: int, budget_bytes: int) -> NodeFacts:
        """Of a node that starts now."""
        name = config.node.name or socket.gethostname().split(".")[0][:63] or "node"
        return cls(name, backend, device, threads, budget_bytes, time.monotonic())

    @property
    def uptime_s(self) -> float:
        return round(time.monotonic() - self.started_s, 1)


class Mesh(Protocol):
    """What the swarm's record and the adverts add to what a node knows of its own."""

    @property
    def swarm(self) -> Status:
        """`id` and `name`."""

    def roles(self, peer: str, *, leads: bool, works: bool) -> list[str]:
        """Any of leader, backbone and worker."""

    def backends(self, peer: str) -> list[Status]:
        """As its advert says; empty if there is none."""

    def load(self, peer: str) -> float | None:
        """Its kernels' share of the recent time, 0 to 1, by its last heartbeat; None if it has said nothing."""

    def others(self, known: Collection[str]) -> list[Status]:
        """A row for each peer that was heard, but for those."""

    def findings(self) -> list[Status]:
        """What is wrong around here, by name."""


class NoMesh:
    """A swarm whose configuration names the leader: it has no record and no adverts."""

    @property
    def swarm(self) -> Status:
        return {"id": None, "name": None}

    def roles(self, peer: str, *, leads: bool, works: bool) -> list[str]:
        return ["leader", "backbone"] if leads else ["worker"]

    def backends(self, peer: str) -> list[Status]:
        return []

    def load(self, peer: str) -> float | None:
        return None

    def others(self, known: Collection[str]) -> list[Status]:
        return []

    def findings(self) -> list[Status]:
        return []


def unknown_backend(name: str, device: str) -> Status:
    """A backend of which nothing was measured."""
    unknown = {"declared": "unknown", "measured": "unknown", "measured_when_asked": "unknown"}
    return {
        "name": name,
        "device": device,
        "accumulation": unknown,
        "source": unknown,
        "numeric_class": None,
        "types": [],
        "batch_invariant": None,
        "repeatable": None,
        "rows_per_s": None,
        "error": None,
    }


def network_status(network: Network) -> Status:
    """What this node's network met so far: connections, streams, and what was refused."""
    return {key: value for key, value in asdict(network.statistics()).items() if not key.startswith("bytes_")}


def counters(network: Network, worker: Worker | None) -> Status:
    """What a node counts of itself, for its metrics."""
    if worker is None:
        return {"network": asdict(network.statistics()), "worker": None}
    held = worker.serving
    experts = {"experts_held": 0 if held is None else held.experts_held, "bytes_held": worker.bytes_held}
    return {"network": asdict(network.statistics()), "worker": {**asdict(worker.experts.statistics), **experts}}


def peer_row(peer: str, name: str, state: str, backends: list[Status], **more: Any) -> Status:
    """A row of `peers`; `more` replaces what nobody knows."""
    return {
        "peer_id": peer,
        "name": name,
        "roles": [],
        "state": state,
        "backends": backends,
        "numeric_class": backends[0]["numeric_class"] if backends else None,
        "fitness": None,
        "verdict": None,
        "experts_held": 0,
        "progress": None,
        "memory": {"used_bytes": 0, "budget_bytes": 0},
        "rtt_ms": None,
        "load": None,
        "version": VERSION,
        "error": None,
        **more,
    }


def verdict_fields(verdict: Verdict | None) -> Status:
    """`fitness` and `verdict` of a row; the whole evidence is `swarmctl peer`'s."""
    if verdict is None:
        return {}
    return {
        "fitness": verdict.fitness,
        "verdict": {
            "reason": verdict.evidence[-1].text if verdict.evidence else None,
            "audits_agreed": verdict.audits_agreed,
            "audits_differed": verdict.audits_differed,
            "term": verdict.term,
            "sequence": verdict.sequence,
        },
    }


def _cloned(member: Member) -> Status:
    message = f"two daemons use the identity of {member.name} in turn"
    return dict(Finding(FindingKind.CLONED_IDENTITY, str(member.peer), message, CLONED_HINT).to_json())


class LeaderStatus:
    """The view of a leader, from its own node."""

    def __init__(self, network: Network, leader: Leader, facts: NodeFacts, mesh: Mesh) -> None:
        self._network = network
        self._leader = leader
        self._facts = facts
        self._mesh = mesh

    def view(self) -> Status:
        leader, me = self._leader, str(self._network.peer_id)
        refusal = leader.refusal()
        active = leader.active
        members = {str(member.peer): member for member in leader.members.by_peer.values()}
        rows = [self._row(member) for peer, member in members.items() if peer != me]
        own = self._own_row(me, members.get(me))
        return {
            "swarm": self._mesh.swarm,
            "self": me,
            "leader": me,
            "term": leader.term,
            "epoch": active.placer.coverage.epoch if active is not None else 0,
            "ready": refusal is None,
            "reason": None if refusal is None else refusal.message,
            "addresses": list(self._network.addresses),
            "peers": [own, *rows, *self._mesh.others({me, *members})],
            "model": self._model(),
            "requests": leader.statistics(),
            "network": {**network_status(self._network), "hellos_refused": leader.members.refused},
            "findings": [*map(_cloned, leader.members.cloned()), *self._mesh.findings()],
            "version": VERSION,
            "uptime_s": self._facts.uptime_s,
        }

    def _own_row(self, me: str, member: Member | None) -> Status:
        f = self._facts
        row = {} if member is None else self._row(member)
        return peer_row(
            me,
            f.name,
            "ready" if self._leader.active is not None else "loading",
            self._mesh.backends(me) or [unknown_backend(f.backend, f.device)],
            roles=self._mesh.roles(me, leads=True, works=member is not None),
            fitness="fit",
            rtt_ms=0.0,
            load=self._mesh.load(me),
            memory=row.get("memory", {"used_bytes": 0, "budget_bytes": f.memory_budget_bytes}),
            **{key: row[key] for key in ("experts_held", "progress", "error") if key in row},
        )

    def _row(self, member: Member) -> Status:
        active, hello, progress = self._leader.active, member.hello, member.progress
        coverage = None if active is None else active.placer.coverage
        percent: Status | None = None
        if progress is not None and progress.phase in ("fetching", "loading") and progress.total:
            percent = {"phase": progress.phase, "done_bytes": progress.done, "total_bytes": progress.total}
        elif member.phase == "probing":
            percent = {"phase": "probing", "done_bytes": 0, "total_bytes": 0}
        link, peer = member.link, str(member.peer)
        state = coverage.state_of(member) if coverage else "joining" if member.stream_up else "gone"
        return peer_row(
            peer,
            member.name,
            "draining" if member.draining and state in ("joining", "loading", "ready") else state,
            self._mesh.backends(peer) or [unknown_backend(hello.backend, hello.device)],
            roles=self._mesh.roles(peer, leads=False, works=True),
            experts_held=coverage.held_now(member) if coverage else 0,
            progress=percent,
            memory={
                "used_bytes": progress.memory_used_bytes if progress is not None and member.stream_up else 0,
                "budget_bytes": hello.memory_budget_bytes,
            },
            rtt_ms=self._leader.members.watch.rtt_ms(member.peer) if member.stream_up else None,
            load=self._mesh.load(peer) if member.stream_up else None,
            rows_per_s=None if link is None else link.rate.rows_per_s,
            dispatches=0 if link is None else link.statistics.dispatches,
            bit_identical_to_leader=None if member.agreement is None else member.agreement.bit_identical,
            audits=None if active is None else active.placer.auditing.statistics(peer),
            version=hello.version,
            error=None if (error := member.quarantined or member.error or member.unfit) is None else error.to_json(),
            **{"fitness": member.fitness, **verdict_fields(self._leader.board.verdict_of(peer))},
        )

    def _model(self) -> Status | None:
        active = self._leader.active
        if active is None:
            return None
        fewest, missing = active.placer.coverage.copies()
        manifest = active.manifest
        return {
            "name": manifest.name,
            "id": manifest.id,
            "architecture": manifest.architecture,
            "moe_layers": len(manifest.layers),
            "experts": sum(layer.n_expert for layer in manifest.layers),
            "combine": active.combine,
            "coverage": {"min_copies": fewest, "missing": missing},
            "degraded": list(active.placer.wrong_outputs()),
            "audits": active.placer.auditing.totals(),
            "layers": {
                "computed": active.remote.timing.layers,
                "round_trip_s": round(active.remote.timing.round_trip_s, 6),
                "decode_computed": active.remote.timing.decode_layers,
                "decode_round_trip_s": round(active.remote.timing.decode_round_trip_s, 6),
            },
        }
