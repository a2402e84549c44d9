"""Which tensors are routed experts, and what shapes they must have.

A layer's experts are `blk.N.ffn_{gate,up,down,gate_up}_exps.{weight,bias,scale,input_scale}`. The expert is always the
outermost dimension, so an expert's slice of each tensor is one contiguous byte range. Not among them: `_chexps` and
`_shexp` (chunk and shared experts run in the trunk), `exp_probs_b` (the router's bias), `ffn_norm_exps` (a norm).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from backends.gguf_header import TensorInfo
from backends.gguf_types import F32, GGML_TYPES

LAYERS_MAX = 512  # LLAMA_MAX_LAYERS: llama.cpp aborts beyond
EXPERTS_MAX = 1_024  # LLAMA_MAX_EXPERTS: llama.cpp aborts beyond
WIDTH_MAX = 1 << 20  # 70 times the widest model known

_SHORT = r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale|input_scale)"
_SHORT_NAME = re.compile(_SHORT)
_NAME = re.compile(rf"blk\.(0|[1-9]\d{{0,2}})\.({_SHORT})", re.ASCII)
# q8_1, q8_K, integers and f64 have no matrix kernel: ggml would abort, or call a null pointer
_WEIGHT_TYPES = GGML_TYPES.keys() - {9, 15, 24, 25, 26, 27, 28}
_RANK = {"weight": 2, "bias": 1, "scale": 0, "input_scale": 0}  # dimensions of one expert's slice


class ExpertName(NamedTuple):
    """`blk.7.ffn_up_exps.weight` is (7, "ffn_up_exps.weight", "up", "weight")."""

    layer: int
    short: str
    projection: str
    kind: str


def parse_name(name: str) -> ExpertName | None:
    """The parts of a routed expert tensor's name, None for any other tensor."""
    match = _NAME.fullmatch(name)
    return ExpertName(int(match[1]), match[2], match[3], match[4]) if match else None


def slice_rank(short_name: str) -> int | None:
    """Dimensions of one expert's slice of `ffn_up_exps.weight` and its like; None if the name is no expert tensor's."""
    match = _SHORT_NAME.fullmatch(short_name)
    return _RANK[match[2]] if match else None


def split_shape(info: TensorInfo) -> tuple[tuple[int, ...], int]:
    """(shape of one expert's slice, number of experts), both from the tensor. ValueError if its rank is wrong."""
    name = parse_name(info.name)
    assert name is not None
    rank = _RANK[name.kind] + 1
    shape = info.shape + (1,) * (rank - len(info.shape))  # writers may drop outer dimensions of one
    if len(shape) != rank:
        raise ValueError(f"has {len(shape)} dimensions instead of {rank}")
    return shape[:-1], shape[-1]


def check_slices(slices: Mapping[str, tuple[int, tuple[int, ...]]]) -> tuple[int, int]:
    """(n_in, n_out) of a layer's experts, whose `slices` give (type, slice shape) by short name.

    ValueError unless the shapes make a feed-forward block: kernels trust them, so both a file's and a peer's pass here.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    down = _weight_shape(slices, "down")
    if down is None:
        raise ValueError("no ffn_down_exps.weight")
    n_ff, n_out = down
    n_in = next((shape[0] for p in ("gate_up", "up", "gate") if (shape := _weight_shape(slices, p)) is not None), None)
    if n_in is None:
        raise ValueError("no ffn_up_exps, ffn_gate_exps or ffn_gate_up_exps weight")
    for projection, width_in, width_out in (
        ("down", n_ff, n_out), ("up", n_in, n_ff), ("gate", n_in, n_ff), ("gate_up", n_in, 2 * n_ff)
    ):  # fmt: skip
        wanted[f"ffn_{projection}_exps.weight"] = (width_in, width_out)
        wanted[f"ffn_{projection}_exps.bias"] = (width_out,)
        wanted[f"ffn_{projection}_exps.scale"] = wanted[f"ffn_{projection}_exps.input_scale"] = ()
    for name, (kind, shape) in slices.items():
        if name not in wanted:
            raise ValueError(f"unknown expert tensor {name}")
        if shape != wanted[name]:
            raise ValueError(f"{name} has shape {list(shape)} an expert where the others imply {list(wanted[name])}")
        if kind not in (_WEIGHT_TYPES if name.endswith(".weight") else (F32,)):
            raise ValueError(f"{name} has type {kind}, which ggml's kernels do not take there")
    if max(n_in, n_ff, n_out) > WIDTH_MAX:
        raise ValueError(f"widths {n_in}, {n_ff}, {n_out} are beyond {WIDTH_MAX:,}")
    return n_in, n_out


def _weight_shape(slices: Mapping[str, tuple[int, tuple[int, ...]]], projection: str) -> tuple[int, ...] | None:
    found = slices.get(f"ffn_{projection}_exps.weight")
    if found is None:
        return None
    if len(found[1]) != 2:
        raise ValueError(f"ffn_{projection}_exps.weight has {len(found[1])} dimensions an expert instead of 2")
    return found[1]
