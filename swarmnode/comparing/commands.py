"""What swarmctl may ask of its daemon for comparisons: who there is to compare, and one question to one of them.

Numbers travel in base64 within the control socket's lines; what they mean is for swarmctl to say, and for the peer to
judge.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import trio

from capabilities.errors import DeadlineExceeded, PeerMistake, UsageError
from swarmnode.comparing.asking import Asking
from swarmnode.control import ControlReply
from swarmnode.net.interface import PeerId

Params = dict[str, Any]
Handler = Callable[[Params, ControlReply], Awaitable[Mapping[str, Any]]]


class Compares(Protocol):
    """What a daemon lends to these commands."""

    async def status(self) -> Mapping[str, Any]: ...

    @property
    def asking(self) -> Asking:
        """Raises SwarmError where this node is in no swarm."""


class CompareCommands:
    """The table of methods for one daemon."""

    def __init__(self, services: Compares) -> None:
        self._services = services

    def table(self) -> Mapping[str, Handler]:
        return {"compare": self.compare, "compare_peers": self.peers}

    async def peers(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Everybody who is there, with what is needed to name and to group them, and what the leader holds of each."""
        status = await self._services.status()
        keys = ("peer_id", "name", "state", "numeric_class", "fitness", "experts_held")
        rows = [
            {**{key: row.get(key) for key in keys}, "types": row["backends"][0]["types"] if row["backends"] else []}
            for row in status["peers"]
        ]
        return {"self": status["self"], "peers": rows}

    async def compare(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Ask `peer` with `header` and `payload`; its answer likewise, an error of its own included."""
        peer, header = params.get("peer"), params.get("header")
        if not isinstance(peer, str) or not isinstance(header, dict):
            raise UsageError("a comparison names a peer and has a header")
        try:
            payload = base64.b64decode(params.get("payload", ""), validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise UsageError("the payload of a comparison is in base64") from None
        try:
            answer = await self._services.asking.ask(PeerId(peer), header, payload)
        except trio.TooSlowError:
            raise DeadlineExceeded(f"{peer} takes no request", peer=peer) from None
        try:
            json.dumps(answer.header, allow_nan=False)
        except (TypeError, ValueError):
            raise PeerMistake(f"{peer} answered with what no answer holds", peer=peer) from None
        return {"header": answer.header, "payload": base64.b64encode(answer.payload).decode()}
