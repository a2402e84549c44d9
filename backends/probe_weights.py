"""Weights of known bytes for measuring kernels: one constant everywhere, or noise that is the same on every machine.

Quantisers are of no use here. They differ between builds by a rounding, some take 20 seconds to start, and a numeric
class compares bits over machines. So blocks are written byte by byte: for each ggml type there is a template whose
weights all have one exact value, and its codes replaced by hashed bytes make noise. Every byte is legal as a code; only
scales are chosen, so that a product over n weights has about the size of its activations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.experts import ReadSlice
from backends.gguf_types import GGML_TYPES, tensor_bytes
from backends.manifest import ExpertTensor, LayerExperts
from backends.program import ExpertProgram, Node

Bytes = NDArray[np.uint8]

SUPER_BLOCK: Final = 256  # every type's block divides it
_POOL_BYTES: Final = 1 << 20  # of noise, repeated in larger matrices
_LAYER: Final = 1 << 20  # no model has it, so that measuring replaces nothing that is held
_NOT_ASKED: Final = (0.0, 0.0)

# y = W x
PRODUCT: Final = ExpertProgram((Node("x"), Node("mul_mat_id", (0,), "ffn_down_exps.weight", _NOT_ASKED)))
# y = silu(W_gate x) * W_up x
GATED: Final = ExpertProgram(
    (
        Node("x"),
        Node("mul_mat_id", (0,), "ffn_gate_exps.weight", _NOT_ASKED),
        Node("mul_mat_id", (0,), "ffn_up_exps.weight", _NOT_ASKED),
        Node("glu", (1, 2), "SWIGLU", (0.0, 0.0, 0.0)),
    )
)
# y = W_down (silu(W_gate x) * W_up x), as most models compute an expert
SWIGLU: Final = ExpertProgram(
    (
        Node("x"),
        Node("mul_mat_id", (0,), "ffn_gate_exps.weight", _NOT_ASKED),
        Node("mul_mat_id", (0,), "ffn_up_exps.weight", _NOT_ASKED),
        Node("glu", (1, 2), "SWIGLU", (0.0, 0.0, 0.0)),
        Node("mul_mat_id", (3,), "ffn_down_exps.weight", _NOT_ASKED),
    )
)


@dataclass(frozen=True, slots=True)
class _Template:
    """One block of a type.

    even: the bytes of a block whose weights are all `value`, exactly.
    scales: where its half-precision scales are.
    spread: log2 of the size of a weight with random codes under scales of 1.
    fixed: (at, bytes) for noise, where a scale is not in half precision.
    """

    even: bytes
    scales: tuple[int, ...] = ()
    value: float = 0.5
    spread: int = 0
    fixed: tuple[int, bytes] = (0, b"")


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


# Layouts are those of ggml-common.h, values those of ggml-quants.c.
_TEMPLATES: Final[dict[str, _Template]] = {
    "f32": _Template(np.float32(0.5).tobytes()),
    "f16": _Template(_half(0.5)),
    "bf16": _Template(np.float32(0.5).tobytes()[2:]),
    "q4_0": _Template(_half(1 / 8) + b"\xcc" * 16, (0,), spread=2),
    "q4_1": _Template(_half(1 / 16) + _half(1 / 4) + b"\x44" * 16, (0, 2), spread=3),
    "q5_0": _Template(_half(1 / 16) + b"\xff" * 4 + b"\x88" * 16, (0,), spread=3),
    "q5_1": _Template(_half(1 / 16) + _half(1 / 4) + bytes(4) + b"\x44" * 16, (0, 2), spread=4),
    "q8_0": _Template(_half(2**-7) + b"\x40" * 32, (0,), spread=6),
    "q2_K": _Template(b"\x11" * 16 + b"\xaa" * 64 + _half(1 / 2) * 2, (80, 82), spread=4),
    "q3_K": _Template(b"\xff" * 32 + b"\xaa" * 64 + b"\x11" * 8 + b"\xaa" * 4 + _half(1 / 4), (108,), spread=5),
    "q4_K": _Template(_half(1 / 8) + _half(1 / 2) + b"\x01" * 8 + b"\x11" * 4 + b"\x88" * 128, (0, 2), spread=8),
    "q5_K": _Template(
        _half(1 / 8) + _half(1 / 2) + b"\x01" * 8 + b"\x11" * 4 + bytes(32) + b"\x88" * 128, (0, 2), spread=9
    ),
    "q6_K": _Template(bytes(128) + b"\xff" * 64 + b"\x01" * 16 + _half(2**-5), (208,), spread=10),
    "iq2_xxs": _Template(_half(1 / 2) + bytes(64), (0,), spread=6),
    "iq2_xs": _Template(_half(1 / 2) + bytes(72), (0,), spread=6),
    "iq2_s": _Template(_half(1 / 2) + bytes(80), (0,), spread=6),
    "iq3_xxs": _Template(_half(1 / 2) + bytes(96), (0,), spread=7),
    "iq3_s": _Template(_half(1 / 2) + bytes(108), (0,), spread=7),
    "iq1_s": _Template(_half(1 / 2) + b"\xff" * 32 + b"\xff\x0f" * 8, (0,), 9 / 16, spread=3),
    "iq1_m": _Template(
        b"\xff" * 32 + b"\x77" * 16 + b"\0\0\0\0\0\x80\0\x30", (), 9 / 16, fixed=(48, b"\0\0\0\0\0\x40\0\x20")
    ),
    "iq4_nl": _Template(_half(1 / 2) + b"\x88" * 16, (0,), spread=6),
    "iq4_xs": _Template(_half(1 / 2) + b"\xaa\xaa" + b"\x11" * 4 + b"\x88" * 128, (0,), spread=10),
    "tq1_0": _Template(b"\xff" * 52 + _half(1 / 2), (52,)),
    "tq2_0": _Template(b"\xaa" * 64 + _half(1 / 2), (64,)),
    "mxfp4": _Template(b"\x7f" + b"\x11" * 16, fixed=(0, b"\x79")),
    "nvfp4": _Template(b"\x38" * 4 + b"\x11" * 32, fixed=(0, b"\x08" * 4)),
    "q1_0": _Template(_half(1 / 2) + b"\xff" * 16, (0,)),
    "q2_0": _Template(_half(1 / 2) + b"\xaa" * 16, (0,)),
}

WEIGHT_TYPES: Final = tuple(kind for kind, known in GGML_TYPES.items() if known.name in _TEMPLATES)


@dataclass(frozen=True, eq=False)
class ProbeLayer:
    """A made-up layer, ready for `ExpertBackend.load_layer(layer, program, experts, read)`."""

    layer: LayerExperts
    program: ExpertProgram
    read: ReadSlice

    @property
    def experts(self) -> list[int]:
        return list(range(self.layer.n_expert))


def even_layer(kind: int, n_in: int, n_out: int, n_expert: int) -> tuple[ProbeLayer, float]:
    """Experts that are one matrix each, every weight of it one value, and that value. n_in is a multiple of 256."""
    template = _template(kind)
    data = template.even * (n_in * n_out // GGML_TYPES[kind].block)
    shapes = {"ffn_down_exps.weight": (kind, n_in, n_out)}
    return _layer(PRODUCT, shapes, n_expert, lambda name, expert: data), template.value


def noise_layer(kind: int, n_in: int, n_ff: int, n_expert: int, distinct: int = 2) -> ProbeLayer:
    """SwiGLU experts of hashed weights, the same bytes everywhere. Widths are raised to whole blocks of the type.

    Only `distinct` experts differ, so that many take no more memory here than those.
    """
    block = GGML_TYPES[kind].block
    n_in, n_ff = (-(-width // block) * block for width in (n_in, n_ff))
    shapes = {
        "ffn_gate_exps.weight": (kind, n_in, n_ff),
        "ffn_up_exps.weight": (kind, n_in, n_ff),
        "ffn_down_exps.weight": (kind, n_ff, n_in),
    }
    stored = {
        (name, expert): noise(kind, width, rows, f"{name} {expert}")
        for name, (_, width, rows) in shapes.items()
        for expert in range(min(n_expert, distinct))
    }
    return _layer(SWIGLU, shapes, n_expert, lambda name, expert: stored[name, expert % distinct])


def product_layer(kind: int, n_in: int, n_out: int, n_expert: int) -> ProbeLayer:
    """Experts that are one matrix each, of hashed weights. n_in is raised to whole blocks of the type."""
    block = GGML_TYPES[kind].block
    n_in = -(-n_in // block) * block
    stored = [noise(kind, n_in, n_out, f"product {expert}") for expert in range(n_expert)]
    return _layer(PRODUCT, {"ffn_down_exps.weight": (kind, n_in, n_out)}, n_expert, lambda name, expert: stored[expert])


def gated_layer(width: int, n_expert: int) -> ProbeLayer:
    """Experts whose row is silu(x) times x backwards: the weights are ones and noughts in F32, which round nothing."""
    ones = np.eye(width, dtype="<f4")
    stored = {"ffn_gate_exps.weight": ones.tobytes(), "ffn_up_exps.weight": ones[::-1].tobytes()}
    return _layer(GATED, dict.fromkeys(stored, (0, width, width)), n_expert, lambda name, expert: stored[name])


def unit_layer(unit: Node, width: int) -> ProbeLayer:
    """Two experts whose row is unit(x), or unit(x, x[0]) where it gates: F32 weights of ones and noughts round nothing.

    unit: a `glu` or `unary` node; its inputs do not matter.
    """
    inputs = (1, 2) if unit.op == "glu" else (1,)
    gate, up = "ffn_gate_exps.weight", "ffn_up_exps.weight"
    products = [Node("mul_mat_id", (0,), name, _NOT_ASKED) for name in (gate, up)[: len(inputs)]]
    program = ExpertProgram((Node("x"), *products, replace(unit, inputs=inputs)))
    first = np.zeros((width, width), "<f4")
    first[:, 0] = 1
    stored = {gate: np.eye(width, dtype="<f4").tobytes(), up: first.tobytes()}
    return _layer(program, dict.fromkeys(program.weights, (0, width, width)), 2, lambda name, expert: stored[name])


def noise(kind: int, width: int, rows: int, seed: str) -> bytes:
    """A matrix [rows, width] of hashed weights of a size of about 1 / sqrt(width), as it is stored."""
    template, known = _template(kind), GGML_TYPES[kind]
    n_blocks, exponent = width * rows // known.block, -(width.bit_length() // 2)
    pool = min(n_blocks, _POOL_BYTES // known.nbytes | 1)  # odd: out of step with the rows
    if known.block == 1:
        blocks = _numbers(known.name, hashed_bytes(f"{known.name} {seed}", 2 * pool), exponent)
    else:
        hashed = hashed_bytes(f"{known.name} {seed}", pool * known.nbytes)
        blocks = np.frombuffer(hashed, np.uint8).reshape(pool, known.nbytes).copy()
        for at in template.scales:
            blocks[:, at : at + 2] = _scales(blocks[:, at], exponent - template.spread)
        at, fixed = template.fixed
        blocks[:, at : at + len(fixed)] = np.frombuffer(fixed, np.uint8)
    return np.resize(blocks, (n_blocks, known.nbytes)).tobytes()


def hashed_bytes(seed: str, count: int) -> bytes:
    """`count` bytes that are the same on every machine and in every version of every library."""
    return hashlib.shake_128(seed.encode()).digest(count)


def _template(kind: int) -> _Template:
    known = GGML_TYPES.get(kind)
    if known is None or known.name not in _TEMPLATES:
        raise ValueError(f"{kind} is no type of weights that can be measured")
    return _TEMPLATES[known.name]


def _scales(random: Bytes, exponent: int) -> Bytes:
    """Half-precision numbers [n, 2 bytes] of random sign between 1 and 2, times 2^exponent."""
    values = (1 + (random & 15) / 16) * 2.0**exponent * np.where(random & 128, -1, 1)
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _numbers(name: str, random: bytes, exponent: int) -> Bytes:
    """Unquantised weights [n, bytes of one] from 2 n bytes, even over +-2^(exponent + 1)."""
    values = np.frombuffer(random, "<i2").astype("<f4") * np.float32(2.0 ** (exponent - 14))
    if name == "bf16":  # the upper half of single precision
        return values.view(np.uint8).reshape(-1, 4)[:, 2:].copy()
    return values.astype({"f32": "<f4", "f16": "<f2"}[name]).view(np.uint8).reshape(len(values), -1)


def _layer(
    program: ExpertProgram,
    shapes: dict[str, tuple[int, int, int]],
    n_expert: int,
    data: Callable[[str, int], bytes],
) -> ProbeLayer:
    tensors = tuple(
        ExpertTensor(name, kind, (width, rows), tensor_bytes(kind, (width, rows)))
        for name, (kind, width, rows) in shapes.items()
    )
    n_in, n_out = tensors[0].shape[0], tensors[-1].shape[1]
    layer = LayerExperts(_LAYER, n_expert, n_expert, n_in, n_out, 0, tensors, (bytes(32),) * n_expert)
    return ProbeLayer(layer, program, lambda expert, index: data(tensors[index].name, expert))
