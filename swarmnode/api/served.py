"""The model that the swarm serves, as a client sees it: a name that may be asked for, and since when."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarmnode.api.seen import Seen

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
    """`status`: as it was a moment ago."""

    def __init__(self, status: Seen[Mapping[str, Any]]) -> None:
        self._status = status
        self._started_s = int(time.time())

    async def now(self) -> ServedModel | None:
        """The served model; None if there is none, or nobody who would know."""
        return _model_of(await self._status.now())

    def to_json(self, model: ServedModel) -> dict[str, Any]:
        """As /v1/models shows it. When it was made nobody knows: `created` is when this daemon started."""
        return {"id": model.name, "object": "model", "created": self._started_s, "owned_by": "swarm"}


def _model_of(status: Mapping[str, Any]) -> ServedModel | None:
    model = status.get("model")
    if not isinstance(model, Mapping):
        return None
    return ServedModel(str(model.get("name")), str(model.get("id")), str(model.get("combine")))
