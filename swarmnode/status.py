"""`swarmctl status`: what this node knows of its swarm, as one JSON object.

The leader knows the mesh; a worker asks it over /swarmnode/status/1 and puts its own state beside the answer. Where
the leader does not answer, the worker says so and shows what it knows of itself. Nothing is "ready" before a probe has
named every held expert of every layer and compared its output. docs/status.md says what each key means.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import structlog
import trio

from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.config import Config
from swarmnode.leader.members import Member
from swarmnode.leader.service import Leader
from swarmnode.net.interface import Network, NetworkError, Stream
from swarmnode.version import VERSION
from swarmnode.wire import Fields, encode_frame, read_frame
from swarmnode.worker.service import Worker

_log = structlog.get_logger(__name__)

PROTOCOL: Final = "/swarmnode/status/1"
LEADER_SECONDS_MAX: Final = 2.0

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


def _backend(name: str, device: str) -> list[Status]:
    unknown = {"declared": "unknown", "measured": "unknown", "measured_when_asked": "unknown"}
    return [{"name": name, "device": device, "accumulation": unknown, "source": unknown}]


def _network(network: Network) -> Status:
    """What this node's network met so far: connections, streams, and what was refused."""
    return {key: value for key, value in asdict(network.statistics()).items() if not key.startswith("bytes_")}


class LeaderStatus:
    """Builds the leader's view, and serves it to the others."""

    def __init__(self, network: Network, leader: Leader, facts: NodeFacts) -> None:
        self._network = network
        self._leader = leader
        self._facts = facts

    def register(self) -> None:
        self._network.serve(PROTOCOL, self._handle, max_streams_per_peer=limits.STATUS_STREAMS_PER_PEER_MAX)

    async def _handle(self, stream: Stream) -> None:
        with trio.fail_after(limits.IDLE_STREAM_SECONDS_MAX):
            Fields((await read_frame(stream, limits.STATUS_REQUEST)).header, "status request").text("kind", 16)
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(encode_frame({"kind": "status"}, json.dumps(self.view()).encode()))

    async def view_async(self) -> Status:
        return self.view()

    def view(self) -> Status:
        leader, me = self._leader, str(self._network.peer_id)
        refusal = leader.refusal()
        active = leader.active
        return {
            "swarm": {"id": None, "name": None},
            "self": me,
            "leader": me,
            "term": leader.term,
            "epoch": active.placer.coverage.epoch if active is not None else 0,
            "ready": refusal is None,
            "reason": None if refusal is None else refusal.message,
            "addresses": list(self._network.addresses),
            "peers": [self._own_row(me), *(self._row(member) for member in leader.members.by_peer.values())],
            "model": self._model(),
            "requests": leader.statistics(),
            "network": {**_network(self._network), "hellos_refused": leader.members.refused},
            "version": VERSION,
            "uptime_s": round(time.monotonic() - self._facts.started_s, 1),
        }

    def _own_row(self, me: str) -> Status:
        f = self._facts
        return {
            "peer_id": me,
            "name": f.name,
            "roles": ["leader", "backbone"],
            "state": "ready" if self._leader.active is not None else "loading",
            "backends": _backend(f.backend, f.device),
            "numeric_class": None,
            "fitness": "fit",
            "experts_held": 0,
            "progress": None,
            "memory": {"used_bytes": 0, "budget_bytes": f.memory_budget_bytes},
            "rtt_ms": 0.0,
            "version": VERSION,
            "error": None,
        }

    def _row(self, member: Member) -> Status:
        active, hello, progress = self._leader.active, member.hello, member.progress
        coverage = None if active is None else active.placer.coverage
        percent: Status | None = None
        if progress is not None and progress.phase in ("fetching", "loading") and progress.total:
            percent = {"phase": progress.phase, "done_bytes": progress.done, "total_bytes": progress.total}
        elif member.phase == "probing":
            percent = {"phase": "probing", "done_bytes": 0, "total_bytes": 0}
        link = member.link
        return {
            "peer_id": str(member.peer),
            "name": member.name,
            "roles": ["worker"],
            "state": coverage.state_of(member) if coverage else "joining" if member.stream_up else "gone",
            "backends": _backend(hello.backend, hello.device),
            "numeric_class": None,
            "fitness": "fit" if member.agreement is not None else None,
            "experts_held": coverage.held_now(member) if coverage else 0,
            "progress": percent,
            "memory": {
                "used_bytes": progress.memory_used_bytes if progress is not None and member.stream_up else 0,
                "budget_bytes": hello.memory_budget_bytes,
            },
            "rtt_ms": self._leader.members.watch.rtt_ms(member.peer) if member.stream_up else None,
            "rows_per_s": None if link is None else link.rate.rows_per_s,
            "dispatches": 0 if link is None else link.statistics.dispatches,
            "bit_identical_to_leader": None if member.agreement is None else member.agreement.bit_identical,
            "version": hello.version,
            "error": None if member.error is None else member.error.to_json(),
        }

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
        }


class WorkerStatus:
    """Asks the leader, and answers for itself where the leader is silent."""

    def __init__(self, network: Network, worker: Worker, facts: NodeFacts) -> None:
        self._network = network
        self._worker = worker
        self._facts = facts

    async def view(self) -> Status:
        mesh, reason = await self._ask_leader()
        if mesh is None:
            mesh = self._alone(reason)
        mine = {"self": str(self._network.peer_id), "addresses": list(self._network.addresses)}
        return {**mesh, **mine, "local": self._local()}

    async def _ask_leader(self) -> tuple[Status | None, str]:
        if (refusal := self._worker.refusal()) is not None:
            return None, refusal.message
        leader = self._worker.leader_peer
        assert leader is not None  # or there would be a refusal
        try:
            with trio.fail_after(LEADER_SECONDS_MAX):
                stream = await self._network.open_stream(leader, PROTOCOL)
                try:
                    await stream.send(encode_frame({"kind": "status"}))
                    frame = await read_frame(stream, limits.STATUS_REPLY)
                finally:
                    await stream.reset()
            view = json.loads(bytes(frame.payload))
        except (NetworkError, trio.TooSlowError, PeerMistake, ValueError, RecursionError) as error:
            return None, f"the leader did not answer: {error or 'too slow'}"
        return (view, "") if isinstance(view, dict) else (None, "the leader's answer is no status")

    def _alone(self, reason: str) -> Status:
        f = self._facts
        return {
            "swarm": {"id": None, "name": None},
            "leader": None,
            "term": 0,
            "epoch": 0,
            "ready": False,
            "reason": reason,
            "peers": [
                {
                    "peer_id": str(self._network.peer_id),
                    "name": f.name,
                    "roles": ["worker"],
                    "state": "joining",
                    "backends": _backend(f.backend, f.device),
                    "numeric_class": None,
                    "fitness": None,
                    "experts_held": self._held(),
                    "progress": None,
                    "memory": {"used_bytes": self._used(), "budget_bytes": f.memory_budget_bytes},
                    "rtt_ms": None,
                    "version": VERSION,
                    "error": None,
                }
            ],
            "model": None,
            "requests": None,
            "version": VERSION,
            "uptime_s": round(time.monotonic() - f.started_s, 1),
        }

    def _held(self) -> int:
        held = self._worker.epochs.current or self._worker.epochs.prepared
        return 0 if held is None else held.experts_held

    def _used(self) -> int:
        held = self._worker.epochs.current or self._worker.epochs.prepared
        return 0 if held is None else held.bytes_held

    def _local(self) -> Status:
        s, m = self._worker.experts.statistics, self._worker.membership.state
        return {
            "phase": m.phase,
            "experts_held": self._held(),
            "dispatches": s.dispatches,
            "rows": s.rows,
            "refused": s.refused,
            "last_refusal": s.last_refusal or None,
            "rows_per_s": round(s.rows_per_s, 1),
            "network": _network(self._network),
        }
