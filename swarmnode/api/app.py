"""The routes, each a line. Errors of any of them are the guard's (guard.py) to tell."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from swarmnode.api.access import Access
from swarmnode.api.completions import Completions
from swarmnode.api.errors import Refusal
from swarmnode.api.fair_use import FairUse
from swarmnode.api.guard import Guard
from swarmnode.api.served import ServedModels
from swarmnode.config import ApiConfig
from swarmnode.handlers import Services


def make_app(config: ApiConfig, services: Services) -> ASGIApp:
    """The whole interface as one ASGI app."""
    served = ServedModels(services)
    completions, models = Completions(services, served, FairUse(config)), _Models(services, served)
    routes = [
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.one, methods=["GET"]),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.completion, methods=["POST"]),
        Route("/healthz", healthz, methods=["GET"]),
    ]
    router = Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # so that a router that finds nothing raises, rather than answers as it likes
        await router(scope, receive, send)

    return Guard(app, Access(config))


async def healthz(request: Request) -> Response:
    """The daemon runs, and its event loop answers."""
    return PlainTextResponse("ok\n")


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
