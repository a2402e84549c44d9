"""Manifests over random bytes: enough of a model for everything that moves experts and trunks without running them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from backends.manifest import PIECE_BYTES, ExpertTensor, FileHash, LayerExperts, Manifest

_F32 = 0


@dataclass(frozen=True)
class ShardModel:
    """A manifest and the bytes that it describes, by (layer, expert). It is an ExpertSource."""

    manifest: Manifest
    experts: dict[tuple[int, int], bytes]
    trunk: bytes

    @property
    def everything(self) -> dict[int, list[int]]:
        """Every expert of every layer, as a fetch wants it."""
        return {layer.layer: list(range(layer.n_expert)) for layer in self.manifest.layers}

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.experts.values()))

    def read(self, layer: int, expert: int, offset: int, length: int) -> bytes:
        self.manifest.experts_of(layer).check_range(expert, offset, length)
        return self.experts[layer, expert][offset : offset + length]


def shard_model(
    layers: tuple[int, ...] = (1, 3), n_expert: int = 4, width: int = 32, ff: int = 64, trunk_bytes: int = 1
) -> ShardModel:
    """`n_expert` experts in each of `layers`, each of 12 * width * ff random bytes in three tensors, and a trunk."""
    source = random.Random(7)
    tensors = tuple(
        ExpertTensor(f"ffn_{name}_exps.weight", _F32, shape, 4 * width * ff)
        for name, shape in (("down", (ff, width)), ("gate", (width, ff)), ("up", (width, ff)))
    )
    experts = {(layer, expert): source.randbytes(12 * width * ff) for layer in layers for expert in range(n_expert)}
    described = [
        LayerExperts(
            layer=layer, n_expert=n_expert, n_used=2, n_in=width, n_out=width, program=0, tensors=tensors,
            hashes=tuple(hashlib.sha256(experts[layer, expert]).digest() for expert in range(n_expert)),
        )
        for layer in layers
    ]  # fmt: skip
    trunk = source.randbytes(trunk_bytes)
    pieces = (trunk[at : at + PIECE_BYTES] for at in range(0, trunk_bytes, PIECE_BYTES))
    hashed = FileHash(
        hashlib.sha256(trunk).digest(), trunk_bytes, tuple(hashlib.sha256(piece).digest() for piece in pieces)
    )
    manifest = Manifest(
        name="random", architecture="olmoe", context_length=64, n_vocab=16, n_layers=max(layers) + 1,
        trunk=hashed, layers=tuple(described), programs=(b"\x80",), source_files=(("m.gguf", 1),),
    )  # fmt: skip
    return ShardModel(manifest, experts, trunk)
