"""The model that the swarm serves, as a client sees it: a name that may be asked for, and since when.

The leader knows it. A node that does not lead asks, not more often than every few seconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import trio

from swarmnode.api import limits
from swarmnode.handlers import Services

_ID_CHARS: Final = 10


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    id: str  # of the manifest
    combine: str

    @property
    def fingerprint(self) -> str:
        """Two answers with the same one come from the same weights, added up in the same way."""
        return "fp_" + hashlib.sha256(f"{self.id} {self.combine}".encode()).hexdigest()[:_ID_CHARS]


class ServedModels:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._started_s = int(time.time())
        self._turn = trio.Lock()
        self._known: ServedModel | None = None
        self._until = -1.0

    async def now(self) -> ServedModel | None:
        """The served model; None if there is none, or nobody who would know."""
        async with self._turn:
            if trio.current_time() >= self._until:
                self._known = _model_of(await self._services.status())
                self._until = trio.current_time() + (limits.SERVED_MODEL_SECONDS if self._known else 0)
            return self._known

    def to_json(self, model: ServedModel) -> dict[str, Any]:
        """As /v1/models shows it. When it was made nobody knows: `created` is when this daemon started."""
        return {"id": model.name, "object": "model", "created": self._started_s, "owned_by": "swarm"}


def _model_of(status: Mapping[str, Any]) -> ServedModel | None:
    model = status.get("model")
    if not isinstance(model, Mapping):
        return None
    return ServedModel(str(model.get("name")), str(model.get("id")), str(model.get("combine")))
