"""Where experts' bytes come from, and the hashes that name them.

An expert is one contiguous slice of each of its layer's tensors; its bytes are those slices one after the other. The
model's own file serves them as they lie (GGUFExpertSource), so adding a model copies no expert: it reads each byte
once, in pieces of some megabytes, to hash it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from backends import expert_tensors as et
from backends.gguf_file import GGUFFile, TensorInfo
from backends.manifest import PIECE_BYTES, CapturedLayer, ExpertTensor, FileHash, LayerExperts, Manifest

Progress = Callable[[int, int], None]


class GGUFExpertSource:
    """ExpertSource over the model's own file."""

    def __init__(self, gguf: GGUFFile, manifest: Manifest) -> None:
        self._gguf = gguf
        self._manifest = manifest

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
        """See ExpertSource. BadModelFile if the file was cut short since it was added, or cannot be read."""
        experts = self._manifest.experts_of(layer)
        experts.check_range(expert, offset, length)
        data = bytearray(length)
        target = memoryview(data)
        for tensor, begin in zip(experts.tensors, experts.offsets, strict=True):
            low, high = max(offset, begin), min(offset + length, begin + tensor.nbytes)
            if low < high:
                info = self._gguf.tensors[f"blk.{layer}.{tensor.name}"]
                self._gguf.read_into(info, expert * tensor.nbytes + low - begin, target[low - offset : high - offset])
        return bytes(data)


class MappedExperts:
    """ExpertSource over the mapped model's own file: a slice of one weight is a view, and nothing is copied.

    Where the file was cut short since, looking at it ends the process (SIGBUS): for a process that may be ended.
    """

    def __init__(self, gguf: GGUFFile, manifest: Manifest) -> None:
        self._gguf = gguf
        self._manifest = manifest

    def read(self, layer: int, expert: int, offset: int, length: int) -> memoryview:
        """See ExpertSource."""
        experts = self._manifest.experts_of(layer)
        experts.check_range(expert, offset, length)
        for tensor, begin in zip(experts.tensors, experts.offsets, strict=True):
            if begin <= offset and offset + length <= begin + tensor.nbytes:
                info = self._gguf.tensors[f"blk.{layer}.{tensor.name}"]
                return self._gguf.data(info, expert * tensor.nbytes + offset - begin, length)
        return memoryview(GGUFExpertSource(self._gguf, self._manifest).read(layer, expert, offset, length))


def verify_expert(layer: LayerExperts, expert: int, data: bytes | bytearray | memoryview) -> bool:
    """True if `data` is all of that expert, by its hash."""
    return len(data) == layer.expert_bytes and hashlib.sha256(data).digest() == layer.hashes[expert]


def build_layers(
    gguf: GGUFFile, used: Mapping[int, CapturedLayer], progress: Progress | None = None
) -> tuple[LayerExperts, ...]:
    """Hash the experts of the layers in `used`. `progress(done, total)` counts bytes.

    Raises:
        ValueError: a layer holds no routed experts, or its tensors do not have the widths that were captured.
        BadModelFile: the file was cut short meanwhile, or cannot be read.
    """
    infos = {layer: _layer_tensors(gguf, layer) for layer in sorted(used)}
    hasher = _Hasher(gguf, sum(info.nbytes for tensors in infos.values() for info in tensors), progress)
    return tuple(_build_layer(layer, tensors, used[layer], hasher) for layer, tensors in infos.items())


def hash_file(path: Path, progress: Progress | None = None) -> FileHash:
    """SHA-256 and size of a file and of its pieces. OSError if it cannot be read."""
    digest, buffer, done, pieces = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES)), 0, []
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer):  # buffered: as many bytes as there are
            digest.update(buffer[:count])
            pieces.append(hashlib.sha256(buffer[:count]).digest())
            done += count
            if progress is not None:
                progress(done, total)
    return FileHash(digest.digest(), done, tuple(pieces))


class _Hasher:
    """Hashes experts of one file through one buffer, and tells how far it is."""

    def __init__(self, gguf: GGUFFile, total: int, progress: Progress | None) -> None:
        self._gguf = gguf
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._done, self._total = 0, total
        self._progress = progress

    def expert(self, infos: list[TensorInfo], n_expert: int, expert: int) -> bytes:
        """SHA-256 of one expert's slices of `infos`, one after the other."""
        digest = hashlib.sha256()
        for info in infos:
            nbytes = info.nbytes // n_expert
            for begin in range(0, nbytes, PIECE_BYTES):
                piece = self._buffer[: min(PIECE_BYTES, nbytes - begin)]
                self._gguf.read_into(info, expert * nbytes + begin, piece)
                digest.update(piece)
                self._done += piece.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return digest.digest()


def _layer_tensors(gguf: GGUFFile, layer: int) -> list[TensorInfo]:
    """A layer's expert tensors in the order of their names, which is a manifest's."""
    prefix = f"blk.{layer}."
    found = [info for name, info in gguf.tensors.items() if name.startswith(prefix) and et.parse_name(name)]
    if not found:
        raise ValueError(f"layer {layer} holds no routed experts")
    return sorted(found, key=lambda info: info.name)


def _build_layer(layer: int, infos: list[TensorInfo], captured: CapturedLayer, hasher: _Hasher) -> LayerExperts:
    tensors, n_expert = [], 0
    for info in infos:
        shape, n_expert = et.split_shape(info)
        tensors.append(ExpertTensor(info.name.removeprefix(f"blk.{layer}."), info.type, shape, info.nbytes // n_expert))
    widths = et.check_slices({tensor.name: (tensor.type, tensor.shape) for tensor in tensors})
    if widths != (captured.n_in, captured.n_out):
        raise ValueError(f"layer {layer} was captured with widths {captured.n_in}, {captured.n_out}; it holds {widths}")
    hashes = tuple(hasher.expert(infos, n_expert, expert) for expert in range(n_expert))
    return LayerExperts(
        layer, n_expert, captured.n_used, captured.n_in, captured.n_out, captured.program_index, tuple(tensors), hashes
    )
