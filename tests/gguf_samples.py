"""Small GGUFs byte by byte: one valid model, and the means to break every part of it.

gguf-py and llama.cpp only write what is well-formed, so this writer takes anything: keys are (name, raw bytes of type
and value) and every field of a tensor can be overridden.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from backends.gguf_file import GGUFFile
from capabilities.errors import BadModelFile

Number = int | float
F32, Q4_0 = 0, 2
N_LAYERS, N_EXPERT, N_USED, WIDTH, FF, N_VOCAB = 2, 4, 2, 64, 32, 40
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def number(kind: int, value: Number) -> bytes:
    """Raw value of a number of GGUF type `kind`."""
    return struct.pack(f"<I{_CODES[kind]}", kind, value)


def u32(value: int) -> bytes:
    return number(4, value)


def name_bytes(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def text(value: str | bytes) -> bytes:
    return struct.pack("<I", 8) + name_bytes(value)


def numbers(kind: int, values: Iterable[Number]) -> bytes:
    items = list(values)
    return struct.pack(f"<IIQ{len(items)}{_CODES[kind]}", 9, kind, len(items), *items)


def texts(values: Iterable[str | bytes]) -> bytes:
    items = list(values)
    return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(name_bytes, items))


@dataclass(frozen=True)
class SampleTensor:
    """`data` may be shorter than the shape says; `offset` overrides the place after the tensor before."""

    name: str | bytes
    shape: tuple[int, ...]
    type: int = F32
    data: bytes = b""
    offset: int | None = None


@dataclass
class Sample:
    """A GGUF to be. `to_bytes` writes whatever stands here."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[SampleTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    alignment: int = 32
    n_tensors: int | None = None
    n_keys: int | None = None

    def set(self, key: str, value: bytes) -> Sample:
        """Replace a key's value in place, or add the key."""
        index = next((i for i, (name, _) in enumerate(self.keys) if name == key), None)
        if index is None:
            self.keys.append((key, value))
        else:
            self.keys[index] = (key, value)
        return self

    def drop(self, key: str) -> Sample:
        self.keys = [(name, value) for name, value in self.keys if name != key]
        return self

    def tensor(self, wanted: str, /, **changes: object) -> Sample:
        """Change fields of the tensor `wanted`."""
        self.tensors = [replace(t, **changes) if t.name == wanted else t for t in self.tensors]  # type: ignore[arg-type]
        return self

    def to_bytes(self) -> bytes:
        counts = (
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.keys) if self.n_keys is None else self.n_keys,
        )
        out = bytearray(self.magic + self.version + struct.pack("<QQ", *counts))
        for key, value in self.keys:
            out += name_bytes(key) + value
        body = bytearray()
        for tensor in self.tensors:
            offset = len(body) if tensor.offset is None else tensor.offset
            out += name_bytes(tensor.name)
            out += struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.type, offset)
            body += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return bytes(out + bytes(-len(out) % self.alignment) + body)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def moe_sample(quantised: bool = False) -> Sample:
    """A random OLMoE that llama.cpp loads and runs: 2 layers, 4 experts of which 2 are used, 64 wide."""
    random = np.random.default_rng(7)

    def matrix(name: str, *shape: int, kind: int = Q4_0 if quantised else F32) -> SampleTensor:
        return SampleTensor(name, shape, kind, _random_data(random, shape, kind))

    tensors = [
        matrix("token_embd.weight", WIDTH, N_VOCAB),
        matrix("output_norm.weight", WIDTH, kind=F32),
        matrix("output.weight", WIDTH, N_VOCAB),
    ]
    for block in (f"blk.{layer}." for layer in range(N_LAYERS)):
        norms = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
        tensors += [matrix(f"{block}{norm}.weight", WIDTH, kind=F32) for norm in norms]
        projections = ("attn_q", "attn_k", "attn_v", "attn_output")
        tensors += [matrix(f"{block}{projection}.weight", WIDTH, WIDTH) for projection in projections]
        tensors.append(matrix(f"{block}ffn_gate_inp.weight", WIDTH, N_EXPERT, kind=F32))
        tensors += [matrix(f"{block}ffn_{p}_exps.weight", WIDTH, FF, N_EXPERT) for p in ("gate", "up")]
        tensors.append(matrix(f"{block}ffn_down_exps.weight", FF, WIDTH, N_EXPERT))
    return Sample(_moe_keys(), tensors)


def _moe_keys() -> list[tuple[str | bytes, bytes]]:
    sizes = {
        "block_count": N_LAYERS, "context_length": 128, "embedding_length": WIDTH, "feed_forward_length": FF,
        "attention.head_count": 2, "attention.head_count_kv": 2, "expert_count": N_EXPERT, "expert_used_count": N_USED,
    }  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", *(f"t{index}" for index in range(4, N_VOCAB))]
    return [
        ("general.architecture", text("olmoe")),
        ("general.name", text("sample")),
        *((f"olmoe.{key}", u32(value)) for key, value in sizes.items()),
        ("olmoe.attention.layer_norm_rms_epsilon", number(6, 1e-5)),
        ("tokenizer.ggml.model", text("llama")),
        ("tokenizer.ggml.tokens", texts(tokens)),
        ("tokenizer.ggml.scores", numbers(6, [0.0] * N_VOCAB)),
        ("tokenizer.ggml.token_type", numbers(5, [2, 3, 3, 6, *[1] * (N_VOCAB - 4)])),
        ("tokenizer.ggml.merges", texts([])),
    ]


def _random_data(random: np.random.Generator, shape: tuple[int, ...], kind: int) -> bytes:
    if kind == F32:
        return random.normal(0, shape[0] ** -0.5, np.prod(shape)).astype("<f4").tobytes()
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // block, nbytes), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)  # the scale that opens a block
    return blocks.tobytes()


def write_split(
    sample: Sample,
    folder: Path,
    n_parts: int,
    stem: str = "model",
    change: Callable[[int, Sample], object] = lambda index, part: None,
) -> list[Path]:
    """Write `sample` as gguf-split --no-tensor-first-split does: metadata in part 1, tensors in the others.

    `change(index, part)` may break a part before it is written.
    """
    paths, per_part = [], -(-len(sample.tensors) // (n_parts - 1))
    for index in range(n_parts):
        tensors = sample.tensors[(index - 1) * per_part : index * per_part] if index else []
        part = Sample(list(sample.keys) if index == 0 else [], tensors)
        part.set("split.no", number(2, index)).set("split.count", number(2, n_parts))
        part.set("split.tensors.count", number(5, len(sample.tensors)))
        change(index, part)
        paths.append(part.write(folder / f"{stem}-{index + 1:05}-of-{n_parts:05}.gguf"))
    return paths


def fault_of(path: Path) -> str:
    """The message for a file that must not open: one line that begins with the file's name."""
    with pytest.raises(BadModelFile) as caught:
        GGUFFile.open(path)
    message = caught.value.message
    assert message.isprintable()
    assert len(message) < 400
    assert ": " in message
    assert caught.value.hint
    assert caught.value.details["path"]
    return message
