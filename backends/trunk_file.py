"""Writing a model's trunk: the same GGUF with its routed experts shrunk to width 1.

llama.cpp checks that every tensor has the shape that the metadata implies, so a key must change with the experts'
width. Which one differs by architecture, and no table says so: `trunk_forms` gives the few changes that make sense for
a file, likeliest first, and the first that llama.cpp loads is right (`write_outline` makes that trial cheap: a trunk
with holes instead of data). Everything else is copied byte for byte, in pieces, whatever the model's size. Shrunk
experts are holes in the file: zeros that take no space on disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from backends import gguf_types as gt
from backends.atomic_file import replacing
from backends.expert_tensors import parse_name
from backends.gguf_file import GGUFFile, TensorInfo
from backends.gguf_types import ValueType
from capabilities.errors import UsageError

COPY_BYTES = 4 << 20  # one buffer of this size is all the memory that copying takes
_SPLIT_KEYS = "split."
_WIDTH = 1  # of the shrunk experts; F16 allows it, quantised types need whole blocks

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Change:
    """A metadata key set to a UINT32 (`values` has one element) or to an array of them."""

    key: str
    values: tuple[int, ...]
    array: bool = False

    def to_bytes(self) -> bytes:
        """Type and value as they stand in a GGUF."""
        values = struct.pack(f"<{len(self.values)}I", *self.values)
        if self.array:
            return struct.pack("<IIQ", ValueType.ARRAY, ValueType.UINT32, len(self.values)) + values
        return struct.pack("<I", ValueType.UINT32) + values


@dataclass(frozen=True, slots=True)
class TrunkForm:
    """One way to tell llama.cpp that the experts are narrow."""

    name: str
    changes: tuple[Change, ...]


def is_expert_tensor(name: str) -> bool:
    """True for `blk.N.ffn_{gate,up,down,gate_up}_exps.{weight,bias,scale,input_scale}`, the routed experts."""
    return parse_name(name) is not None


def expert_layers(gguf: GGUFFile) -> tuple[int, ...]:
    """The layers that hold routed experts, ascending; also those whose experts an ordinary graph never runs."""
    return tuple(sorted({name.layer for tensor in gguf.tensors if (name := parse_name(tensor)) is not None}))


def trunk_forms(gguf: GGUFFile) -> tuple[TrunkForm, ...]:
    """The forms to try, likeliest first; () if the model has no routed experts.

    The experts' width comes from `expert_feed_forward_length`, or from `feed_forward_length` (then per layer: dense
    layers keep theirs). Where `expert_shared_feed_forward_length` is not set, a shared expert's width may hang on
    the experts', times `expert_shared_count`: one of these two then takes the width that the shared expert has.
    """
    layers = expert_layers(gguf)
    if not layers:
        return ()
    widths = [form for form in (_by_expert_width(gguf), _by_layer_width(gguf, layers)) if form is not None]
    if not _numbers(gguf, "expert_feed_forward_length"):
        widths.reverse()
    return tuple(
        TrunkForm(f"{width.name}{shared.name}", width.changes + shared.changes)
        for width in widths
        for shared in _shared_forms(gguf, layers)
    )


def write_trunk(gguf: GGUFFile, target: Path, form: TrunkForm, progress: Progress | None = None) -> None:
    """Write the trunk of `gguf` in `form` to `target`: complete and on disk, or not at all.

    `progress(done, total)` counts bytes of tensors. Raises UsageError if the disk is full or the target cannot be
    written, BadModelFile if the model's file changed underneath.
    """
    _write(gguf, target, form, progress, with_data=True)


def write_outline(gguf: GGUFFile, target: Path, form: TrunkForm) -> None:
    """Write a trunk whose tensors are all holes: llama.cpp loads it if it would load the trunk. Costs milliseconds."""
    _write(gguf, target, form, None, with_data=False)


def _by_expert_width(gguf: GGUFFile) -> TrunkForm:
    key = f"{gguf.architecture}.expert_feed_forward_length"
    old = gguf.metadata.get(key)
    count = len(old) if isinstance(old, list) else 1
    return TrunkForm("expert width", (Change(key, (_WIDTH,) * count, array=isinstance(old, list)),))


def _by_layer_width(gguf: GGUFFile, layers: tuple[int, ...]) -> TrunkForm | None:
    widths = _numbers(gguf, "feed_forward_length")
    n_layers = _numbers(gguf, "block_count")[0]
    if not widths:
        return None
    per_layer = list(widths) if len(widths) == n_layers else [widths[0]] * n_layers
    for layer in layers:
        per_layer[layer] = _WIDTH
    changes = [Change(f"{gguf.architecture}.feed_forward_length", tuple(per_layer), array=True)]
    if _numbers(gguf, "expert_feed_forward_length"):
        changes.extend(_by_expert_width(gguf).changes)
    return TrunkForm("layer width", tuple(changes))


def _shared_forms(gguf: GGUFFile, layers: tuple[int, ...]) -> tuple[TrunkForm, ...]:
    """What may keep the shared expert's width; the form without a change has no name."""
    none = TrunkForm("", ())
    down = (gguf.tensors.get(f"blk.{layer}.ffn_down_shexp.weight") for layer in layers)
    width = next((info.shape[0] for info in down if info is not None), None)
    if width is None or _numbers(gguf, "expert_shared_feed_forward_length"):
        return (none,)
    by_count = TrunkForm(", shared count", (Change(f"{gguf.architecture}.expert_shared_count", (width // _WIDTH,)),))
    by_width = TrunkForm(
        ", shared width", (Change(f"{gguf.architecture}.expert_shared_feed_forward_length", (width,)),)
    )
    if f"{gguf.architecture}.expert_shared_count" in gguf.metadata:
        return by_count, none, by_width
    return none, by_width


def _numbers(gguf: GGUFFile, name: str) -> tuple[int, ...]:
    """The architecture's key `name` as numbers; () if it is absent, or nothing but zeros (which says as much)."""
    value = gguf.metadata.get(f"{gguf.architecture}.{name}")
    values = value if isinstance(value, list) else [value]
    numbers = tuple(item for item in values if isinstance(item, int))
    return numbers if any(numbers) else ()


def _shrunk(info: TensorInfo) -> TensorInfo:
    """`info` as it stands in the trunk: its offset is not meant, all else is."""
    name = parse_name(info.name)
    if name is None or name.kind.endswith("scale"):
        return info
    shape, kind = list(info.shape), gt.F16 if name.kind == "weight" else gt.F32
    narrow = _WIDTH * (2 if name.projection == "gate_up" else 1)
    if name.kind == "weight":
        shape[0 if name.projection == "down" else 1] = narrow
    elif name.projection != "down":
        shape[0] = narrow
    return TensorInfo(info.name, tuple(shape), kind, info.part, info.offset, gt.tensor_bytes(kind, tuple(shape)))


def _write(gguf: GGUFFile, target: Path, form: TrunkForm, progress: Progress | None, with_data: bool) -> None:
    tensors = [_shrunk(info) for info in gguf.tensors.values()]
    header, offsets, end = header_of(gguf, form.changes, tensors)
    placed = zip(tensors, offsets, strict=True) if with_data else ()
    copied = [(new, offset) for new, offset in placed if new == gguf.tensors[new.name]]
    total = sum(info.nbytes for info, _ in copied)
    try:
        with replacing(target) as partial, partial.open("wb", buffering=0) as file:
            write_all(file, memoryview(header))
            done, buffer = 0, memoryview(bytearray(COPY_BYTES))
            for info, offset in copied:
                file.seek(offset)
                for begin in range(0, info.nbytes, COPY_BYTES):
                    piece = buffer[: min(COPY_BYTES, info.nbytes - begin)]
                    gguf.read_into(info, begin, piece)
                    write_all(file, piece)
                    done += piece.nbytes
                    if progress is not None:
                        progress(done, total)
            os.truncate(file.fileno(), end)
    except OSError as error:
        hint = f"The trunk needs up to {end:,} bytes: free some space, or choose another data folder."
        raise UsageError(f"cannot write {target}: {error.strerror}", hint=hint, path=str(target)) from error


def header_of(
    gguf: GGUFFile, changes: Sequence[Change], tensors: Sequence[TensorInfo]
) -> tuple[bytes, list[int], int]:
    """(header, absolute offset of each tensor, size of the file) of a file like `gguf` with these changes."""
    alignment = gguf.metadata.get("general.alignment", gt.DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    keys = {key: gguf.raw_metadata(key) for key in gguf.metadata if not key.startswith(_SPLIT_KEYS)}
    keys |= {change.key: change.to_bytes() for change in changes}
    pieces = [gt.MAGIC, struct.pack("<IQQ", gt.VERSIONS[-1], len(tensors), len(keys))]
    for key, value in keys.items():
        pieces += [_text(key), value]
    offset, offsets = 0, []
    for info in tensors:
        offsets.append(offset)
        pieces.append(_text(info.name))
        pieces.append(struct.pack(f"<I{len(info.shape)}QIQ", len(info.shape), *info.shape, info.type, offset))
        offset = gt.padded(offset + info.nbytes, alignment)
    header = b"".join(pieces)
    start = gt.padded(len(header), alignment)
    return header, [start + at for at in offsets], start + offset


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write every byte to an unbuffered file."""
    done = 0
    while done < data.nbytes:
        done += file.write(data[done:])


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte at that place of an open file. OSError where the disk does not take it."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
