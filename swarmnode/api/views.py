"""What pages and monitors read: /healthz, /readyz, /metrics, and what `swarmctl` tells, as JSON under /api/."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import trio
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from capabilities.errors import UsageError
from swarmnode.api.metrics import HttpMetrics
from swarmnode.api.seen import Seen
from swarmnode.equivalence.kept import read_matrix
from swarmnode.handlers import Services

_EQUIVALENCE_KEYS: Final = ("peer_id", "name", "state", "numeric_class", "fitness", "bit_identical_to_leader")
_PEER_CHARS_MAX: Final = 128
_FRESH: Final = {"cache-control": "no-store"}

Status = Mapping[str, Any]


class Views:
    """`status`: as `swarmctl status --json` prints it. `folder`: the daemon's data folder."""

    def __init__(
        self, services: Services, status: Callable[[], Awaitable[Status]], metrics: HttpMetrics, folder: Path
    ) -> None:
        self._services = services
        self._metrics = metrics
        self._folder = folder
        self.status_now = Seen(lambda _: status())
        self._placement_now = Seen(lambda without: services.placement(without or None))

    async def healthz(self, request: Request) -> Response:
        """The daemon runs, and its event loop answers."""
        return PlainTextResponse("ok\n", headers=_FRESH)

    async def readyz(self, request: Request) -> Response:
        """Ready as `status` means it. Why not, /api/status tells those who may know."""
        if (await self.status_now.now())["ready"]:
            return PlainTextResponse("ready\n", headers=_FRESH)
        return PlainTextResponse("not ready\n", 503, headers=_FRESH)

    async def metrics(self, request: Request) -> Response:
        status, leader = await self.status_now.now(), self._services.leader
        leading = None if leader is None or leader.active is None else leader.active.statistics()
        text = self._metrics.text(status, self._services.counters(), leading)
        return Response(text, media_type=CONTENT_TYPE_LATEST, headers=_FRESH)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self.status_now.now(), headers=_FRESH)

    async def placement(self, request: Request) -> Response:
        """`?without=PEER`: what its loss would cost, too."""
        without = request.query_params.get("without", "")
        if len(without) > _PEER_CHARS_MAX:
            raise UsageError("without is a peer's name or id")
        return JSONResponse(await self._placement_now.now(without), headers=_FRESH)

    async def equivalence(self, request: Request) -> Response:
        """How peers' numbers agree, as far as it is known, and the last comparison of all that was made here."""
        peers = (await self.status_now.now())["peers"]
        known = [{key: peer.get(key) for key in _EQUIVALENCE_KEYS} for peer in peers]
        measured = await trio.to_thread.run_sync(read_matrix, self._folder)
        return JSONResponse({"peers": known, "measured": measured}, headers=_FRESH)
