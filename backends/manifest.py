"""What a swarm serves: the trunk and every expert of one model, by content.

A manifest names a model by the hash of its own bytes. For each layer that dispatches it says what an expert is made of
(the tensors of which it has a slice), the SHA-256 of each expert's bytes (its slices one after the other, in the order
of `tensors`), and which program computes it; for the trunk it has the SHA-256 of the whole and of each piece. Nobody
trusts a holder: what is fetched is checked against these hashes, and the manifest itself, which may come from a hostile
peer, against everything that a worker's kernels will take for granted.

The bytes are canonical msgpack: one manifest has one form, and any other form of it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgpack

from backends import expert_tensors as et
from backends.canonical import CanonicalReader
from backends.gguf_types import PARTS_MAX, tensor_bytes
from capabilities.errors import PeerMistake

FORMAT_VERSION = 2
MANIFEST_BYTES_MAX = 16 << 20  # 93 layers of 896 experts, the most known, take 2.7 MB; 512 such layers still fit
NAME_BYTES_MAX = 255
PROGRAM_BYTES_MAX = 65_536  # a captured program has some 500 bytes
TENSORS_MAX = 16  # four projections with a weight, a bias and two scales each
EXPERT_BYTES_MAX = 4 << 30  # 16 times the largest expert known, in F32
FILE_BYTES_MAX = 1 << 50
PIECE_BYTES = 4 << 20  # of a trunk: a wrong one costs seconds on any link, and the hashes of 40 GB take 0.3 MB
PIECES_MAX = 1 << 16  # a trunk of 256 GiB
TOKENS_MAX = 1 << 30  # of a vocabulary or a context
_HASH_BYTES = 32
_LAYER_KEYS = ("layer", "n_expert", "n_used", "n_in", "n_out", "program", "tensors", "hashes")
_MANIFEST_KEYS = (
    "format_version", "name", "architecture", "context_length", "n_vocab", "n_layers", "trunk", "layers", "programs",
    "source_files",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file: SHA-256 of the whole (32 bytes), size in bytes, and SHA-256 of each PIECE_BYTES (of the last, the rest).

    Pieces are what a file is fetched by: who sent a wrong one is known at once, whoever sent the others.
    """

    sha256: bytes
    size: int
    pieces: tuple[bytes, ...]

    def piece_bytes(self, index: int) -> int:
        """Size of a piece."""
        return min(PIECE_BYTES, self.size - index * PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One expert's slice of a tensor: `name` without `blk.N.`, ggml type, shape in ggml order, bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """What running a layer has shown: experts used a token, widths of its rows, index of its program."""

    n_used: int
    n_in: int
    n_out: int
    program_index: int


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of one layer. `n_in` and `n_out` are the widths of an expert's input and output rows."""

    layer: int
    n_expert: int
    n_used: int
    n_in: int
    n_out: int
    program: int  # index in Manifest.programs
    tensors: tuple[ExpertTensor, ...]
    hashes: tuple[bytes, ...]  # one for each expert

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert: its slices one after the other."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's slice begins in an expert's bytes."""
        return tuple(sum(tensor.nbytes for tensor in self.tensors[:index]) for index in range(len(self.tensors)))

    def check_range(self, expert: int, offset: int, length: int) -> None:
        """PeerMistake unless bytes [offset, offset + length) of `expert` exist."""
        if not 0 <= expert < self.n_expert:
            raise PeerMistake(f"layer {self.layer} has no expert {expert}", layer=self.layer)
        if not 0 <= offset <= offset + length <= self.expert_bytes:
            raise PeerMistake(f"layer {self.layer}: no {length} bytes at {offset} in an expert", layer=self.layer)


@dataclass(frozen=True)
class Manifest:
    """See the module. `layers` are those that dispatch, ascending; `n_layers` counts all of the model's."""

    name: str
    architecture: str
    context_length: int
    n_vocab: int
    n_layers: int
    trunk: FileHash
    layers: tuple[LayerExperts, ...]
    programs: tuple[bytes, ...]  # backends/program.py reads them
    source_files: tuple[tuple[str, int], ...]  # (name, bytes) of the model's own files
    format_version: int = FORMAT_VERSION

    @cached_property
    def id(self) -> str:
        """SHA-256 of the manifest's bytes, in hex: the model's identity in a swarm."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def by_layer(self) -> Mapping[int, LayerExperts]:
        return {layer.layer: layer for layer in self.layers}

    def experts_of(self, layer: int) -> LayerExperts:
        """PeerMistake if that layer dispatches nothing."""
        found = self.by_layer.get(layer)
        if found is None:
            raise PeerMistake(f"layer {layer} of {self.name} has no experts to serve", layer=layer)
        return found

    def to_bytes(self) -> bytes:
        """Canonical bytes. ValueError if the manifest contradicts itself, so that no peer is sent such a one."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        _check(self)
        data = _pack(self)
        if _decode(data) != self:
            raise ValueError("does not survive its own encoding")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Decode what a peer sent. PeerMistake unless every count, shape, size and reference in it is sound."""
        try:
            manifest = _decode(data)
            _check(manifest)
            if _pack(manifest) != data:
                raise ValueError("not in canonical form")
        except ValueError as error:
            raise PeerMistake(f"bad manifest: {error}") from None
        return manifest


class ExpertSource(Protocol):
    """Holds experts' bytes."""

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes | memoryview:
        """Bytes [offset, offset + length) of an expert.

        Raises:
            PeerMistake: there is no such range.
        """


def _pack(manifest: Manifest) -> bytes:
    packed: bytes = msgpack.packb(
        {
            "format_version": manifest.format_version,
            "name": manifest.name,
            "architecture": manifest.architecture,
            "context_length": manifest.context_length,
            "n_vocab": manifest.n_vocab,
            "n_layers": manifest.n_layers,
            "trunk": [manifest.trunk.sha256, manifest.trunk.size, b"".join(manifest.trunk.pieces)],
            "layers": [_layer_fields(layer) for layer in manifest.layers],
            "programs": manifest.programs,
            "source_files": manifest.source_files,
        },
        use_bin_type=True,
    )
    return packed


def _layer_fields(layer: LayerExperts) -> dict[str, object]:
    tensors = [[tensor.name, tensor.type, tensor.shape] for tensor in layer.tensors]  # bytes follow from these
    values = (
        layer.layer, layer.n_expert, layer.n_used, layer.n_in, layer.n_out, layer.program, tensors,
        b"".join(layer.hashes),
    )  # fmt: skip
    return dict(zip(_LAYER_KEYS, values, strict=True))


def _decode(data: bytes) -> Manifest:
    if len(data) > MANIFEST_BYTES_MAX:
        raise ValueError(f"{len(data):,} bytes; the limit is {MANIFEST_BYTES_MAX:,}")
    return _unpack(CanonicalReader(data))


def _unpack(read: CanonicalReader) -> Manifest:
    def entry(key: str) -> CanonicalReader:
        read.key(key)
        return read

    read.fields(len(_MANIFEST_KEYS), "manifest")
    version = entry("format_version").number(255, "format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format {version}; this node reads format {FORMAT_VERSION}")
    name = entry("name").text(NAME_BYTES_MAX, "name")
    architecture = entry("architecture").text(NAME_BYTES_MAX, "architecture")
    context_length = entry("context_length").number(TOKENS_MAX, "context_length")
    n_vocab = entry("n_vocab").number(TOKENS_MAX, "n_vocab")
    n_layers = entry("n_layers").number(et.LAYERS_MAX, "n_layers")
    if entry("trunk").items(3, "trunk") != 3:
        raise ValueError("trunk is not a hash, a size and the hashes of its pieces")
    trunk = FileHash(
        read.blob(_HASH_BYTES, "trunk hash"),
        read.number(FILE_BYTES_MAX, "trunk size"),
        _split_hashes(read.blob(PIECES_MAX * _HASH_BYTES, "trunk pieces")),
    )
    layers = tuple(_unpack_layer(read) for _ in range(entry("layers").items(et.LAYERS_MAX, "layers")))
    count = entry("programs").items(et.LAYERS_MAX, "programs")
    programs = tuple(read.blob(PROGRAM_BYTES_MAX, "program") for _ in range(count))
    files = []
    for _ in range(entry("source_files").items(PARTS_MAX, "source_files")):
        if read.items(2, "source file") != 2:
            raise ValueError("source file is not a name and a size")
        files.append((read.text(NAME_BYTES_MAX, "file name"), read.number(FILE_BYTES_MAX, "file size")))
    read.finish()
    return Manifest(
        name, architecture, context_length, n_vocab, n_layers, trunk, layers, programs, tuple(files), version
    )


def _unpack_layer(read: CanonicalReader) -> LayerExperts:
    read.fields(len(_LAYER_KEYS), "layer")

    def number(key: str, high: int) -> int:
        read.key(key)
        return read.number(high, key)

    layer, n_expert = number("layer", et.LAYERS_MAX), number("n_expert", et.EXPERTS_MAX)
    n_used, n_in, n_out = number("n_used", et.EXPERTS_MAX), number("n_in", et.WIDTH_MAX), number("n_out", et.WIDTH_MAX)
    program = number("program", et.LAYERS_MAX)
    read.key("tensors")
    tensors = tuple(_unpack_tensor(read) for _ in range(read.items(TENSORS_MAX, "tensors")))
    read.key("hashes")
    joined = read.blob(et.EXPERTS_MAX * _HASH_BYTES, "hashes")
    if len(joined) != n_expert * _HASH_BYTES:
        raise ValueError(f"layer {layer} has {len(joined)} bytes of hashes for {n_expert} experts")
    return LayerExperts(layer, n_expert, n_used, n_in, n_out, program, tensors, _split_hashes(joined))


def _split_hashes(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES))


def _unpack_tensor(read: CanonicalReader) -> ExpertTensor:
    if read.items(3, "tensor") != 3:
        raise ValueError("tensor is not a name, a type and a shape")
    name = read.text(64, "tensor name")
    kind = read.number(255, "tensor type")
    shape = tuple(read.number(2 * et.WIDTH_MAX, "extent") for _ in range(read.items(2, "shape")))
    if 0 in shape:
        raise ValueError(f"{name} has a dimension of zero")
    return ExpertTensor(name, kind, shape, _slice_bytes(name, kind, shape))


def _slice_bytes(name: str, kind: int, shape: tuple[int, ...]) -> int:
    try:
        return tensor_bytes(kind, shape)
    except ValueError as error:
        raise ValueError(f"tensor {name} {error}") from None


def _check(manifest: Manifest) -> None:
    """Everything that must hold beyond the form. ValueError says what does not."""
    for what, text in (("name", manifest.name), ("architecture", manifest.architecture)):
        if not text or not text.isprintable():
            raise ValueError(f"{what} is empty or holds control characters")
    if min(manifest.context_length, manifest.n_vocab, manifest.n_layers) < 1:
        raise ValueError("no context, vocabulary or layers")
    trunk = manifest.trunk
    if len(trunk.sha256) != _HASH_BYTES or trunk.size < 1:
        raise ValueError("no trunk")
    if len(trunk.pieces) != -(-trunk.size // PIECE_BYTES) or any(len(each) != _HASH_BYTES for each in trunk.pieces):
        raise ValueError(f"not one hash of 32 bytes for each {PIECE_BYTES:,} bytes of the trunk")
    if not manifest.layers:
        raise ValueError("no layer with experts")
    numbers = [layer.layer for layer in manifest.layers]
    if numbers != sorted(set(numbers)) or numbers[-1] >= manifest.n_layers or numbers[0] < 0:
        raise ValueError(f"layers are not ascending numbers below {manifest.n_layers}")
    for name, size in manifest.source_files:
        if not name.isprintable() or "/" in name or name in ("", ".", "..") or size < 1:
            raise ValueError("a source file has no name of a file, or no bytes")
    for layer in manifest.layers:
        try:
            _check_layer(layer, len(manifest.programs))
        except ValueError as error:
            raise ValueError(f"layer {layer.layer}: {error}") from None


def _check_layer(layer: LayerExperts, n_programs: int) -> None:
    if not 1 <= layer.n_used <= layer.n_expert <= et.EXPERTS_MAX:
        raise ValueError(f"{layer.n_used} experts of {layer.n_expert} cannot be used")
    if not 0 <= layer.program < n_programs:
        raise ValueError(f"program {layer.program} does not exist")
    if len(layer.hashes) != layer.n_expert or any(len(digest) != _HASH_BYTES for digest in layer.hashes):
        raise ValueError("not one hash of 32 bytes for each expert")
    names = [tensor.name for tensor in layer.tensors]
    if names != sorted(set(names)):
        raise ValueError("tensors are not in the order of their names")
    widths = et.check_slices({tensor.name: (tensor.type, tensor.shape) for tensor in layer.tensors})
    if widths != (layer.n_in, layer.n_out):
        raise ValueError(f"widths {layer.n_in} and {layer.n_out} are not its tensors' {widths[0]} and {widths[1]}")
    for tensor in layer.tensors:
        if tensor.nbytes != _slice_bytes(tensor.name, tensor.type, tensor.shape):
            raise ValueError(f"{tensor.name} does not take {tensor.nbytes} bytes")
    if layer.expert_bytes > EXPERT_BYTES_MAX:
        raise ValueError(f"an expert of {layer.expert_bytes:,} bytes; the limit is {EXPERT_BYTES_MAX:,}")
