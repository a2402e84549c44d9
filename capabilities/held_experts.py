"""Which experts of a model a peer holds, in few bytes: layers that hold the same experts share one entry.

Usually a peer holds the same run of experts in every layer, which takes ten bytes in all; scattered ones cost a bit for
each expert between the lowest and the highest. An entry is

    u16 first layer | u16 layers | u16 lowest expert | u16 n | n bytes of mask, little-endian, from the lowest expert on

and n = 0 stands for a run without gaps, whose length follows as u16.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from capabilities.errors import PeerMistake

HELD_BYTES_MAX: Final = 7 * 1024
"""Of an advert's eight. 94 layers with scattered ones of 256 experts take 3.8 KB."""

MODEL_ID_CHARS: Final = 64
LAYERS_MAX: Final = 1_024
EXPERTS_MAX: Final = 4_096
_HEAD: Final = struct.Struct("<HHHH")
_COUNT: Final = struct.Struct("<H")


@dataclass(frozen=True)
class HeldExperts:
    """Experts of the model with this manifest id (64 hexadecimal digits).

    `entries` are (first layer, layers, mask): bit e of the mask says that expert e is held in each of these layers.
    Entries are sorted, do not overlap, hold something, and two that could be one are one.
    """

    model: str
    entries: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, model: str, experts: Mapping[int, Collection[int]]) -> HeldExperts:
        """From layer -> experts. Raises ValueError for layers or experts out of range."""
        masks = sorted((layer, _mask(held)) for layer, held in experts.items() if held)
        if masks and not 0 <= masks[0][0] <= masks[-1][0] < LAYERS_MAX:
            raise ValueError(f"layers {masks[0][0]} to {masks[-1][0]} are not in 0..{LAYERS_MAX - 1}")
        return cls(model, _joined((layer, 1, mask) for layer, mask in masks))

    @cached_property
    def count(self) -> int:
        """Experts over all layers."""
        return sum(layers * mask.bit_count() for _, layers, mask in self.entries)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of which something is held, sorted."""
        return tuple(layer for first, layers, _ in self.entries for layer in range(first, first + layers))

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """The experts that are held of a layer, sorted."""
        for first, layers, mask in self.entries:
            if first <= layer < first + layers:
                return tuple(expert for expert in range(mask.bit_length()) if mask >> expert & 1)
        return ()

    def to_blob(self) -> bytes:
        return b"".join(_entry_to_bytes(*entry) for entry in self.entries)

    @classmethod
    def from_blob(cls, model: str, blob: bytes) -> HeldExperts:
        """PeerMistake unless `blob` is what `to_blob` writes."""
        entries = tuple(_read_entries(blob))
        held = cls(model, entries)
        if _joined(entries) != entries or held.to_blob() != blob:
            raise PeerMistake("held experts: not in canonical form")
        return held


def covers_all(n_expert: Mapping[int, int], held: Iterable[HeldExperts]) -> bool:
    """Whether they hold every expert of a model together. `n_expert`: how many each layer has."""
    masks = dict.fromkeys(n_expert, 0)
    for each in held:
        for first, layers, mask in each.entries:
            for layer in range(first, first + layers):
                if layer in masks:
                    masks[layer] |= mask
    return all(masks[layer] & (full := (1 << count) - 1) == full for layer, count in n_expert.items())


def _mask(experts: Iterable[int]) -> int:
    mask = 0
    for expert in experts:
        if not 0 <= expert < EXPERTS_MAX:
            raise ValueError(f"expert {expert} is not in 0..{EXPERTS_MAX - 1}")
        mask |= 1 << expert
    return mask


def _joined(entries: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Entries in ascending order, adjoining ones with one mask made one."""
    joined: list[tuple[int, int, int]] = []
    for first, layers, mask in entries:
        if joined and joined[-1][2] == mask and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + layers, mask)
        else:
            joined.append((first, layers, mask))
    return tuple(joined)


def _entry_to_bytes(first: int, layers: int, mask: int) -> bytes:
    lowest = (mask & -mask).bit_length() - 1
    bits = mask >> lowest
    if bits & (bits + 1) == 0:
        return _HEAD.pack(first, layers, lowest, 0) + _COUNT.pack(bits.bit_length())
    size = (bits.bit_length() + 7) // 8
    return _HEAD.pack(first, layers, lowest, size) + bits.to_bytes(size, "little")


def _read_entries(blob: bytes) -> Iterable[tuple[int, int, int]]:
    if len(blob) > HELD_BYTES_MAX:
        raise PeerMistake(f"held experts: {len(blob):,} bytes, over {HELD_BYTES_MAX:,}")
    at, layer_min = 0, 0
    while at < len(blob):
        try:
            first, layers, lowest, size = _HEAD.unpack_from(blob, at)
            at += _HEAD.size
            if size:
                bits = int.from_bytes(blob[at : at + size], "little")
            else:
                (count,) = _COUNT.unpack_from(blob, at)
                if count > EXPERTS_MAX:
                    raise PeerMistake(f"held experts: a run of {count}")
                bits, size = (1 << count) - 1, _COUNT.size
        except struct.error:
            raise PeerMistake("held experts: cut off within an entry") from None
        at += size
        if not (layer_min <= first and layers and first + layers <= LAYERS_MAX):
            raise PeerMistake("held experts: layers out of range or out of order")
        if not bits & 1 or lowest + bits.bit_length() > EXPERTS_MAX:
            raise PeerMistake("held experts: an empty entry, or experts out of range")
        layer_min = first + layers
        yield first, layers, bits << lowest
