"""What this node can serve to others: the models that it knows, and whatever lies in its cache of experts.

So experts come from every peer that holds them, not from the one peer with the model's file alone. Models are opened
when somebody asks for one, few at a time. One that is closed lives on for the answers that still read it.
"""

from __future__ import annotations

import threading
import weakref

import structlog

from capabilities.errors import SwarmError
from swarmnode import limits
from swarmnode.models import Models
from swarmnode.shards.manifests import ManifestStore
from swarmnode.shards.service import ServedModel
from swarmnode.shards.store import CachedExperts, ShardCache

_log = structlog.get_logger(__name__)


class Serving:
    """`find` is what ShardService asks. Thread-safe; blocks for some milliseconds."""

    def __init__(self, models: Models, cache: ShardCache | None) -> None:
        self._models = models
        self._cache = cache
        self._manifests = None if cache is None else ManifestStore(cache.root)
        self._lock = threading.Lock()
        self._open: dict[str, ServedModel] = {}  # by manifest id, ordered by last use

    def find(self, manifest_id: str) -> ServedModel | None:
        """What there is of a model: from its file, or from the cache."""
        with self._lock:
            return self._from_models(manifest_id) or self._from_cache(manifest_id)

    def _from_models(self, manifest_id: str) -> ServedModel | None:
        served, name = self._open.pop(manifest_id, None), self._models.find(manifest_id)
        if name is None:
            return None
        if served is None:
            try:
                opened = self._models.open(name)
            except SwarmError as error:  # its file is gone or changed
                _log.warning("model_not_served", model=name, error=error.to_json())
                return None
            served = opened.served
            if opened.gguf is not None:  # answers in progress hold the source
                weakref.finalize(served.source, opened.gguf.close)
        self._open[manifest_id] = served
        while len(self._open) > limits.SERVED_MODELS_OPEN_MAX:
            del self._open[next(iter(self._open))]
        return served

    def _from_cache(self, manifest_id: str) -> ServedModel | None:
        if self._cache is None or self._manifests is None:
            return None
        manifest = self._manifests.get(manifest_id)
        if manifest is None:
            return None
        return ServedModel(manifest, manifest.to_bytes(), CachedExperts(self._cache, manifest))
