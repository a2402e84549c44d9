"""The routes, each a line. Errors of any of them are the guard's (guard.py) to tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.api.access import Access
from swarmnode.api.completions import Completions
from swarmnode.api.errors import Refusal
from swarmnode.api.fair_use import FairUse
from swarmnode.api.guard import Guard
from swarmnode.api.metrics import HttpMetrics
from swarmnode.api.schema import DrainBody, parse
from swarmnode.api.served import ServedModels
from swarmnode.api.token import Token
from swarmnode.api.views import Views
from swarmnode.config_sections import ApiConfig
from swarmnode.handlers import Services

STATIC: Final = Path(__file__).parent / "static"
"""The files of the daemon's own page, if it has one: index.html is `/`, everything lies under /static/."""


def make_app(
    config: ApiConfig,
    services: Services,
    status: Callable[[], Awaitable[Mapping[str, Any]]],
    token: Token,
    folder: Path,
) -> ASGIApp:
    """The whole interface as one ASGI app. `status`: as `swarmctl status --json` prints it; `folder`: its data."""
    fair_use = FairUse(config)
    metrics = HttpMetrics(fair_use)
    views = Views(services, status, metrics, folder)
    served = ServedModels(views.status_now)
    completions, models = Completions(services, served, fair_use, metrics), _Models(services, served)
    routes: list[BaseRoute] = [
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.one, methods=["GET"]),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.completion, methods=["POST"]),
        Route("/healthz", views.healthz, methods=["GET"]),
        Route("/readyz", views.readyz, methods=["GET"]),
        Route("/metrics", views.metrics, methods=["GET"]),
        Route("/api/status", views.status, methods=["GET"]),
        Route("/api/placement", views.placement, methods=["GET"]),
        Route("/api/equivalence", views.equivalence, methods=["GET"]),
        Route("/api/drain", partial(_drain, services, token), methods=["POST"]),
        *_page(),
    ]
    router = Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # so that a router that finds nothing raises, rather than answers as it likes
        await router(scope, receive, send)

    return Guard(app, Access(config), metrics)


def _page() -> list[BaseRoute]:
    if not STATIC.is_dir():
        return []

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return [Route("/", index, methods=["GET"]), Mount("/static", StaticFiles(directory=STATIC))]


async def _drain(services: Services, token: Token, request: Request) -> Response:
    """`swarmctl drain`, with {"on": true}, and `undrain`."""
    token.check(request)
    body = await parse(DrainBody, await request.body())
    return JSONResponse(await services.drain(body.on))


class _Models:
    def __init__(self, services: Services, served: ServedModels) -> None:
        self._services = services
        self._served = served

    async def list(self, request: Request) -> Response:
        _ = self._services.asker  # whoever belongs to no swarm says so, rather than that it has no model
        model = await self._served.now()
        return JSONResponse({"object": "list", "data": [] if model is None else [self._served.to_json(model)]})

    async def one(self, request: Request) -> Response:
        _ = self._services.asker
        name, model = request.path_params["model"], await self._served.now()
        if model is None or name not in (model.name, model.id):
            raise Refusal(404, f"the model {name[:80]!r} does not exist here", "model_not_found", "model")
        return JSONResponse(self._served.to_json(model))
