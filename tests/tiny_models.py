"""Tiny random mixture-of-experts models in many architectures, written in milliseconds.

Each has live experts (the logits depend on them), routing that varies from token to token, and weights far from
uniform. Bytes are tokens, so any text is a prompt; the chat template is ChatML. What an architecture's expert block
looks like is in `tiny_architectures.py`; this module is the writer that those descriptions drive.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from backends.byte_vocabulary import add_byte_tokenizer

N_VOCAB = 320
N_EXPERT, N_USED = 8, 3


class TinyWriter:
    """A GGUF under construction: random tensors of sane scale, keys under the architecture's prefix.

    Shapes are in ggml order, fan-in first. `quantisation` names a ggml type for the matrices (also the experts');
    norms, biases, routers and convolutions stay F32.
    """

    def __init__(self, path: Path, architecture: str, *, seed: int, quantisation: str, width: int, ff: int) -> None:
        self.width, self.ff = width, ff
        self.n_head = 4
        self.head = width // self.n_head
        self._prefix = architecture
        self._type = GGMLQuantizationType[quantisation.upper()]
        self._random = np.random.default_rng(seed)
        self._writer = GGUFWriter(path, architecture)
        self._writer.add_name(f"tiny {architecture}")

    def keys(self, n_layers: int, **more: Any) -> None:
        """The keys that every architecture wants, and `more` (a double underscore stands for a dot)."""
        common: dict[str, Any] = {
            "block_count": n_layers,
            "context_length": 2048,
            "embedding_length": self.width,
            "feed_forward_length": 2 * self.width,
            "attention__head_count": self.n_head,
            "attention__head_count_kv": self.n_head,
            "attention__layer_norm_rms_epsilon": 1e-5,
            "expert_count": N_EXPERT,
            "expert_used_count": N_USED,
        }
        for name, value in (common | more).items():
            self._key(f"{self._prefix}.{name.replace('__', '.')}", value)

    def _key(self, name: str, value: Any) -> None:
        kinds = {
            bool: GGUFValueType.BOOL,
            int: GGUFValueType.UINT32,
            float: GGUFValueType.FLOAT32,
            str: GGUFValueType.STRING,
        }
        if isinstance(value, list):
            self._writer.add_key_value(name, value, GGUFValueType.ARRAY, kinds[type(value[0])])
        else:
            self._writer.add_key_value(name, value, kinds[type(value)])

    def matrix(self, name: str, *shape: int, gain: float = 1.0, bias: bool = False) -> None:
        """`name.weight` with a deviation of gain / sqrt(fan-in), quantised if rows fit whole blocks; and its bias."""
        values = self._normal(shape, gain * shape[0] ** -0.5)
        kind = self._type if shape[0] % GGML_QUANT_SIZES[self._type][0] == 0 else GGMLQuantizationType.F32
        self._add(f"{name}.weight", values, kind)
        if bias:
            self.vector(f"{name}.bias", *shape[1:], std=0.3)

    def vector(self, name: str, *shape: int, std: float = 0.1, mean: float = 0.0) -> None:
        """An F32 tensor `name` (with its suffix, if any)."""
        self._add(name, mean + self._normal(shape, std), GGMLQuantizationType.F32)

    def norms(self, block: str, *names: str, width: int | None = None) -> None:
        for name in names:
            self.vector(f"{block}{name}.weight", width or self.width, mean=1.0)

    def embeddings(self, *, output_norm: str = "output_norm") -> None:
        self.matrix("token_embd", self.width, N_VOCAB, gain=0.5 * self.width**0.5)
        self.norms("", output_norm)
        self.matrix("output", self.width, N_VOCAB, gain=3.0)

    def attention(self, block: str, *, bias: bool = False, q_factor: int = 1) -> None:
        """Plain multi-head projections. `q_factor` 2 leaves room for an output gate beside the queries."""
        self.matrix(f"{block}attn_q", self.width, q_factor * self.width, bias=bias)
        self.matrix(f"{block}attn_k", self.width, self.width, bias=bias)
        self.matrix(f"{block}attn_v", self.width, self.width, bias=bias)
        self.matrix(f"{block}attn_output", self.width, self.width, bias=bias)

    def dense_ffn(self, block: str, ff: int, suffix: str = "", *, gate: bool = True) -> None:
        """A dense or shared feed-forward block: `ffn_up<suffix>` and so on."""
        if gate:
            self.matrix(f"{block}ffn_gate{suffix}", self.width, ff)
        self.matrix(f"{block}ffn_up{suffix}", self.width, ff)
        self.matrix(f"{block}ffn_down{suffix}", ff, self.width)

    def router(self, block: str, *, bias: bool = False) -> None:
        """Router logits get a deviation of 2 over experts: choices vary, weights are far from uniform."""
        self.vector(f"{block}ffn_gate_inp.weight", self.width, N_EXPERT, std=2 * self.width**-0.5)
        if bias:
            self.vector(f"{block}ffn_gate_inp.bias", N_EXPERT, std=0.3)

    def experts(
        self,
        block: str,
        *,
        gate: str = "split",
        width: int | None = None,
        bias: bool = False,
        scales: tuple[str, ...] = (),
    ) -> None:
        """Routed experts. `gate` is split, merged (one `gate_up` tensor) or none; `scales` names per-expert factors."""
        width, ff = width or self.width, self.ff
        if gate == "merged":
            self.matrix(f"{block}ffn_gate_up_exps", width, 2 * ff, N_EXPERT, bias=bias)
        else:
            if gate == "split":
                self.matrix(f"{block}ffn_gate_exps", width, ff, N_EXPERT, bias=bias)
            self.matrix(f"{block}ffn_up_exps", width, ff, N_EXPERT, bias=bias)
        self.matrix(f"{block}ffn_down_exps", ff, width, N_EXPERT, gain=2.0, bias=bias)
        for name in scales:
            self.vector(f"{block}ffn_{name}_exps.scale", N_EXPERT, std=0.5, mean=1.0)

    def finish(self) -> None:
        add_byte_tokenizer(self._writer, N_VOCAB)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _normal(self, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
        return self._random.standard_normal(shape[::-1], dtype=np.float32) * np.float32(std)

    def _add(self, name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
        if kind == GGMLQuantizationType.F32:
            self._writer.add_tensor(name, values)
        else:
            self._writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)


def quantised(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """`values` [..., n] in the ggml type `kind`, uint8 [..., bytes of a row], rounded by ggml itself."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out = np.zeros((*values.shape[:-1], values.shape[-1] // block * block_bytes), np.uint8)
    quantise = _ggml().ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, row = values.size // values.shape[-1], values.shape[-1]
    written = quantise(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, row, None)
    assert written == out.nbytes
    return out


def _ggml() -> ctypes.CDLL:
    folder = Path(llama_cpp.__file__).parent / "lib"
    return ctypes.CDLL(str(min(folder.glob("libggml-base.*"))))
