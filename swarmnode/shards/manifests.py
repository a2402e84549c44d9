"""The manifests of the experts in the cache, on disk beside them, so that a peer that restarts serves them again.

A manifest is content under its own hash, like an expert: a file that is damaged or gone costs a fetch and nothing else,
so nothing is synced and every failure to write is only logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from pathlib import Path
from typing import Final

import structlog

from backends.manifest import Manifest
from capabilities.errors import PeerMistake
from swarmnode import limits

_log = structlog.get_logger(__name__)

FOLDER: Final = "manifests"
_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class ManifestStore:
    """Manifests by id; of more than MANIFESTS_KEPT_MAX those stored longest ago go. Thread-safe; methods block."""

    def __init__(self, cache_root: Path) -> None:
        """`cache_root`: the folder of the expert cache."""
        self._folder = cache_root / FOLDER
        self._lock = threading.Lock()
        self._read: dict[str, Manifest] = {}
        with contextlib.suppress(OSError):
            for part in self._folder.glob(".*"):  # of a process that was killed
                part.unlink()

    def get(self, manifest_id: str) -> Manifest | None:
        """None if it is not here."""
        if not _ID.fullmatch(manifest_id):
            return None
        with self._lock:
            found = self._read.get(manifest_id)
            if found is None and (found := self._load(manifest_id)) is not None:
                self._remember(found)
            return found

    def put(self, manifest: Manifest) -> None:
        """Keep a manifest."""
        with self._lock:
            self._remember(manifest)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file, part = self._folder / manifest.id, self._folder / f".{manifest.id}"
                part.write_bytes(manifest.to_bytes())
                part.replace(file)
                kept = sorted(self._folder.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime_ns)
                for old in kept[: -limits.MANIFESTS_KEPT_MAX]:
                    old.unlink()
            except OSError as error:
                _log.warning("manifest_not_stored", manifest=manifest.id, error=str(error))

    def _load(self, manifest_id: str) -> Manifest | None:
        try:
            data = (self._folder / manifest_id).read_bytes()
            if hashlib.sha256(data).hexdigest() == manifest_id:
                return Manifest.from_bytes(data)
        except (OSError, PeerMistake):  # PeerMistake: another version wrote it
            pass
        return None

    def _remember(self, manifest: Manifest) -> None:
        self._read.pop(manifest.id, None)
        self._read[manifest.id] = manifest
        while len(self._read) > limits.MANIFESTS_KEPT_MAX:
            del self._read[next(iter(self._read))]
