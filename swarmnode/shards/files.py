"""The expert cache's files, for whoever only reads them: a process beside the one whose cache it is (store.py)."""

from __future__ import annotations

from pathlib import Path

from backends.expert_source import verify_expert
from backends.manifest import Manifest
from capabilities.errors import ExpertsUnavailable


def shard_path(root: Path, digest: bytes) -> Path:
    """Where a cache keeps an expert, once it is complete."""
    name = digest.hex()
    return root / name[:2] / name


class ShardFiles:
    """ExpertSource over the expert cache's files, of which another process says what lies there. Each is verified."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self._read: tuple[bytes, bytes] | None = None  # the last expert: its tensors are read one after the other

    def read(self, layer: int, expert: int, offset: int, length: int) -> memoryview:
        """See ExpertSource. Raises ExpertsUnavailable if the file is not there, or not the expert's."""
        experts = self._manifest.experts_of(layer)
        experts.check_range(expert, offset, length)
        digest = experts.hashes[expert]
        if self._read is None or self._read[0] != digest:
            self._read = None
            try:
                data = shard_path(self._root, digest).read_bytes()
            except OSError as error:
                raise ExpertsUnavailable(f"expert {expert} of layer {layer}: {error}", layer=layer) from error
            if not verify_expert(experts, expert, data):
                raise ExpertsUnavailable(f"expert {expert} of layer {layer}: its file was damaged", layer=layer)
            self._read = digest, data
        return memoryview(self._read[1])[offset : offset + length]
