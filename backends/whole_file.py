"""Making a model's file whole again, from its trunk and its experts.

The trunk (trunk_file.py) is the model's own file with narrow experts, so most of the way back is to give the experts
their shapes again, which the manifest has, and the metadata that says how wide they are. llama.cpp checks both against
each other when it loads the file, and the bytes of trunk and experts are known by their hashes: what it then computes
is the undivided model. Only values that nothing computes with may differ from the original file's: the experts' width
in layers without experts, and how a model in several files was split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from backends.expert_tensors import parse_name
from backends.gguf_file import GGUFFile, TensorInfo
from backends.gguf_types import tensor_bytes
from backends.manifest import LayerExperts, Manifest
from backends.trunk_file import COPY_BYTES, Change, expert_layers, header_of, write_at
from capabilities.errors import UnsupportedModel


@dataclass(frozen=True)
class WholePlan:
    """Where everything lies in the whole file, of `nbytes`.

    copies: tensors of the trunk's file, and where each begins. starts: where each of a layer's tensors begins, in the
    order of the manifest.
    """

    header: bytes
    nbytes: int
    copies: tuple[tuple[TensorInfo, int], ...]
    starts: Mapping[int, tuple[int, ...]]

    def places(self, layer: LayerExperts, expert: int) -> tuple[tuple[int, int, int], ...]:
        """(where in the expert's bytes, where in the file, how many bytes) of each slice of an expert."""
        slices = zip(layer.tensors, layer.offsets, self.starts[layer.layer], strict=True)
        return tuple((offset, start + expert * tensor.nbytes, tensor.nbytes) for tensor, offset, start in slices)

    def write_trunk(self, trunk: GGUFFile, descriptor: int) -> None:
        """Everything but the experts, into an open file. OSError where the disk does not take it."""
        write_at(descriptor, memoryview(self.header), 0)
        buffer = memoryview(bytearray(COPY_BYTES))
        for info, start in self.copies:
            for begin in range(0, info.nbytes, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, info.nbytes - begin)]
                trunk.read_into(info, begin, piece)
                write_at(descriptor, piece, start + begin)
        os.ftruncate(descriptor, self.nbytes)


def plan_whole(trunk: GGUFFile, manifest: Manifest) -> WholePlan:
    """How to put a model together whose trunk's file is open.

    Raises:
        UnsupportedModel: the trunk has experts that the manifest does not have, since no graph runs them.
    """
    if unknown := sorted(set(expert_layers(trunk)) - set(manifest.by_layer)):
        raise UnsupportedModel(
            f"{manifest.name} has experts that are never computed, in layer {unknown[0]}; the swarm does not have them",
            hint="Its whole file is only where the model came from.",
        )
    tensors = [_whole(info, manifest) for info in trunk.tensors.values()]
    header, starts, nbytes = header_of(trunk, _changes(trunk, manifest), tensors)
    at = {info.name: start for info, start in zip(tensors, starts, strict=True)}
    copies = tuple((info, at[info.name]) for info in tensors if info == trunk.tensors[info.name])
    starts_of = {
        layer.layer: tuple(at[f"blk.{layer.layer}.{tensor.name}"] for tensor in layer.tensors)
        for layer in manifest.layers
    }
    return WholePlan(header, nbytes, copies, starts_of)


def whole_bytes(manifest: Manifest) -> int:
    """About how large the file will be: the trunk and all experts."""
    return manifest.trunk.size + sum(layer.expert_bytes * layer.n_expert for layer in manifest.layers)


def _whole(info: TensorInfo, manifest: Manifest) -> TensorInfo:
    """A tensor of the trunk with its shape in the whole file."""
    name = parse_name(info.name)
    if name is None or name.kind.endswith("scale"):
        return info
    layer = manifest.by_layer[name.layer]
    (one,) = (tensor for tensor in layer.tensors if tensor.name == name.short)
    shape = (*one.shape, layer.n_expert)
    return TensorInfo(info.name, shape, one.type, info.part, info.offset, tensor_bytes(one.type, shape))


def _changes(trunk: GGUFFile, manifest: Manifest) -> tuple[Change, ...]:
    """The metadata whose values the trunk's narrow experts changed (trunk_file.trunk_forms), as the whole file needs
    it."""
    widths = {layer.layer: _n_ff(layer) for layer in manifest.layers}
    usual = max(widths.values())
    changes = []
    for name in ("expert_feed_forward_length", "feed_forward_length"):
        key = f"{trunk.architecture}.{name}"
        old = trunk.metadata.get(key)
        if isinstance(old, list):
            values = tuple(
                widths.get(layer, usual) if value == 1 else value
                for layer, value in enumerate(old)
                if isinstance(value, int)
            )
            changes.append(Change(key, values, array=True))
        elif old == 1:
            changes.append(Change(key, (usual,)))
    key = f"{trunk.architecture}.expert_shared_count"
    count, width = trunk.metadata.get(key), _shared_width(trunk)
    if width is not None and count == width and width % usual == 0:
        changes.append(Change(key, (width // usual,)))
    return tuple(changes)


def _n_ff(layer: LayerExperts) -> int:
    (down,) = (tensor for tensor in layer.tensors if tensor.name == "ffn_down_exps.weight")
    return down.shape[0]


def _shared_width(trunk: GGUFFile) -> int | None:
    """Of the shared expert, None if there is none."""
    names = (f"blk.{layer}.ffn_down_shexp.weight" for layer in expert_layers(trunk))
    return next((trunk.tensors[name].shape[0] for name in names if name in trunk.tensors), None)
