"""/swarmnode/status/1: a member asks the leader what it knows, for `swarmctl` on the member's machine.

    member  {"kind": "status"}                          leader  {"kind": "status"} and a JSON object as payload
    member  {"kind": "placement", "without": peer}      leader  likewise, or {"error"}
    member  {"kind": "outline", "without": peer}        leader  likewise: outline.py

Where the leader does not answer, a node says so and shows what it knows of itself and from adverts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from capabilities.advert import LOAD_MAX
from capabilities.errors import NoLeader, PeerMistake, SwarmError
from swarmnode import limits
from swarmnode.leadership import LeaderView
from swarmnode.net.interface import Network, NetworkError, ServesProtocols, Stream
from swarmnode.status import Mesh, NodeFacts, Status, network_status, peer_row, unknown_backend
from swarmnode.version import VERSION
from swarmnode.wire import Fields, bounded_error, encode_frame, read_frame
from swarmnode.worker.service import Worker

PROTOCOL: Final = "/swarmnode/status/1"
LEADER_SECONDS_MAX: Final = 2.0
_PEER_CHARS_MAX: Final = 128

Answer = Callable[[Mapping[str, Any]], Awaitable[Status]]
"""A request's header to its answer, on the leader. Raises SwarmError."""


def serve_status(network: ServesProtocols, answer: Answer) -> None:
    """Answer members from now on."""

    async def handle(stream: Stream) -> None:
        with trio.fail_after(limits.IDLE_STREAM_SECONDS_MAX):
            header = (await read_frame(stream, limits.STATUS_REQUEST)).header
        fields = Fields(header, "status request")
        asked: dict[str, Any] = {"kind": fields.text("kind", 16)}
        if fields.has("without"):
            asked["without"] = fields.text("without", _PEER_CHARS_MAX)
        try:
            reply = encode_frame({"kind": asked["kind"]}, json.dumps(await answer(asked)).encode())
        except SwarmError as error:
            reply = encode_frame({"error": bounded_error(error)})
        with trio.fail_after(limits.SEND_SECONDS_MAX):
            await stream.send(reply)

    network.serve(PROTOCOL, handle, max_streams_per_peer=limits.STATUS_STREAMS_PER_PEER_MAX)


def placement_request(without: str | None) -> dict[str, str]:
    """What to ask a leader for `swarmctl placement`; `without`: what the loss of that peer would cost, too."""
    return {"kind": "placement"} if without is None else {"kind": "placement", "without": without}


async def ask_leader(network: Network, view: LeaderView, request: Mapping[str, Any]) -> Status:
    """The leader's answer.

    Raises:
        NoLeader: there is none, or it does not answer.
        SwarmError: what it refuses with.
    """
    leader = view.leader
    if leader is None:
        raise NoLeader(f"there is no leader: {view.reason}")
    try:
        with trio.fail_after(LEADER_SECONDS_MAX):
            stream = await network.open_stream(leader.peer, PROTOCOL)
            try:
                await stream.send(encode_frame(dict(request)))
                frame = await read_frame(stream, limits.STATUS_REPLY)
            finally:
                await stream.reset()
        fields = Fields(frame.header, "status reply")
        if fields.has("error"):
            raise fields.error("error")
        answer = json.loads(bytes(frame.payload))
        if not isinstance(answer, dict):
            raise PeerMistake("the leader's answer is no object")
    except (NetworkError, trio.TooSlowError, PeerMistake, ValueError, RecursionError) as error:
        raise NoLeader(f"the leader did not answer: {error or 'too slow'}", peer=str(leader.peer)) from None
    return answer


class NodeStatus:
    """`status` on a node that does not lead: the leader's word where there is one, and this node's own beside it.

    worker: None on a node that computes nothing. term: the newest that this node knows. refusal: why the leader need
    not be asked, for this node knows that it will not answer.
    """

    def __init__(
        self,
        network: Network,
        view: LeaderView,
        facts: NodeFacts,
        mesh: Mesh,
        worker: Worker | None,
        term: Callable[[], int],
        refusal: Callable[[], SwarmError | None] = lambda: None,
    ) -> None:
        self._network = network
        self._view = view
        self._facts = facts
        self._mesh = mesh
        self._worker = worker
        self._term = term
        self._refusal = refusal

    async def view(self) -> Status:
        try:
            if (refusal := self._refusal()) is not None:
                raise refusal
            mesh = await ask_leader(self._network, self._view, {"kind": "status"})
        except SwarmError as error:
            mesh = self._alone(error.message)
        return self.with_own(mesh)

    def with_own(self, mesh: Status) -> Status:
        """A leader's view with what this node knows itself; findings are those of both."""
        own = self._own()
        theirs = [each for each in _objects(mesh.get("findings")) if each not in own["findings"]]
        return {**mesh, **own, "findings": [*own["findings"], *theirs]}

    def _own(self) -> Status:
        """What stands in every answer of this node, whoever knows the rest."""
        own: Status = {
            "swarm": self._mesh.swarm,
            "self": str(self._network.peer_id),
            "addresses": list(self._network.addresses),
            "findings": self._mesh.findings(),
        }
        return own if self._worker is None else {**own, "local": self._local(self._worker)}

    def _alone(self, reason: str) -> Status:
        f, me = self._facts, str(self._network.peer_id)
        works = self._worker is not None
        row = peer_row(
            me,
            f.name,
            "joining" if self._worker is None else str(self._worker.phase),
            self._mesh.backends(me) or [unknown_backend(f.backend, f.device)],
            roles=self._mesh.roles(me, leads=False, works=works),
            experts_held=self._held(),
            load=self._mesh.load(me),
            memory={"used_bytes": self._used(), "budget_bytes": f.memory_budget_bytes},
        )
        return {
            "leader": None,
            "term": self._term(),
            "epoch": 0,
            "ready": False,
            "reason": reason,
            "peers": [row, *self._mesh.others({me})],
            "model": None,
            "requests": None,
            "network": network_status(self._network),
            "version": VERSION,
            "uptime_s": f.uptime_s,
        }

    def _held(self) -> int:
        held = None if self._worker is None else self._worker.serving
        return 0 if held is None else held.experts_held

    def _used(self) -> int:
        held = None if self._worker is None else self._worker.serving
        return 0 if held is None else held.bytes_held

    def _local(self, worker: Worker) -> Status:
        s, m = worker.experts.statistics, worker.membership.state
        return {
            "phase": m.phase,
            "experts_held": self._held(),
            "dispatches": s.dispatches,
            "rows": s.rows,
            "refused": s.refused,
            "last_refusal": s.last_refusal or None,
            "rows_per_s": round(s.rows_per_s, 1),
            "load": worker.load() / LOAD_MAX,
            "network": network_status(self._network),
        }


def _objects(value: object) -> list[Status]:
    """A leader's list, whatever it sent."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
