"""What a dense `llama` model's feed-forward blocks see and do on a text: a plain NumPy forward pass.

It exists to calibrate the demo model, so it keeps what that needs (each layer's feed-forward inputs and hidden
activations over all tokens) and nothing else: no cache, no sampling, no logits. Weights are dequantised one layer at a
time; everything is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from capabilities.errors import UnsupportedModel

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Sizes of a dense `llama` model."""

    n_layers: int
    width: int
    ff: int
    n_head: int
    n_head_kv: int
    rope_base: float
    rms_epsilon: float

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.width // self.n_head


class DenseModel:
    """The tensors and keys of a dense `llama` GGUF, mapped from disk.

    Raises UnsupportedModel when the file has another architecture.
    """

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields: dict[str, Any] = dict(reader.fields)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.value("general.architecture") != "llama":
            raise UnsupportedModel(f"{path.name} is not a dense llama model", path=str(path))
        self.shape = DenseShape(
            n_layers=int(self.value("llama.block_count")),
            width=int(self.value("llama.embedding_length")),
            ff=int(self.value("llama.feed_forward_length")),
            n_head=int(self.value("llama.attention.head_count")),
            n_head_kv=int(self.value("llama.attention.head_count_kv")),
            rope_base=float(self.value("llama.rope.freq_base")),
            rms_epsilon=float(self.value("llama.attention.layer_norm_rms_epsilon")),
        )

    def value(self, key: str) -> Any:
        """A metadata value as plain Python."""
        return self.fields[key].contents()

    def weights(self, name: str) -> F32:
        """A tensor's weights, dequantised, in NumPy order (fan-in last)."""
        tensor = self.tensors[name]
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


@dataclass(frozen=True, slots=True)
class FeedForwardActivity:
    """One feed-forward block over all calibration tokens.

    `inputs` is what the gate and up matrices see, F32 [tokens, width]; `hidden` what the down matrix sees, F32 [tokens,
    ff]; `stream` the residual stream that leaves the layer, F32 [tokens, width].
    """

    layer: int
    inputs: F32
    hidden: F32
    stream: F32


def feed_forward_activity(model: DenseModel, sequences: Sequence[Sequence[int]]) -> Iterator[FeedForwardActivity]:
    """Run the sequences of token ids (each on its own) through the model; yields one item a layer, in order."""
    shape = model.shape
    ids = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    ends = np.cumsum([len(sequence) for sequence in sequences])
    segments = [slice(int(end) - len(sequence), int(end)) for end, sequence in zip(ends, sequences, strict=True)]
    x = model.weights("token_embd.weight")[ids]
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        x = x + _attention(model, block, _rms_norm(x, model.weights(f"{block}attn_norm.weight"), shape), segments)
        inputs = _rms_norm(x, model.weights(f"{block}ffn_norm.weight"), shape)
        gate = inputs @ model.weights(f"{block}ffn_gate.weight").T
        hidden = _silu(gate) * (inputs @ model.weights(f"{block}ffn_up.weight").T)
        x = x + hidden @ model.weights(f"{block}ffn_down.weight").T
        yield FeedForwardActivity(layer, inputs, hidden, x)


def _rms_norm(x: F32, gain: F32, shape: DenseShape) -> F32:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(shape.rms_epsilon)) * gain)


def _silu(x: F32) -> F32:
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(np.float32(0.5) * x)))  # no overflow at either end


def _attention(model: DenseModel, block: str, x: F32, segments: Sequence[slice]) -> F32:
    """Causal self-attention within each segment, F32 [tokens, width] to the same."""
    shape = model.shape
    q, k, v = (
        (x @ model.weights(f"{block}attn_{name}.weight").T).reshape(len(x), -1, shape.head) for name in ("q", "k", "v")
    )
    out = np.empty_like(q)
    for segment in segments:
        queries, keys = _rotated(q[segment], shape), _rotated(k[segment], shape)
        future = np.triu(np.full((len(queries), len(queries)), -np.inf, np.float32), 1)
        for head in range(shape.n_head):
            shared = head * shape.n_head_kv // shape.n_head  # grouped queries: several heads use one key and value
            scores = queries[:, head] @ keys[:, shared].T / np.float32(np.sqrt(shape.head)) + future
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[segment, head] = weights / weights.sum(axis=1, keepdims=True) @ v[segment, shared]
    return np.asarray(out.reshape(len(x), -1) @ model.weights(f"{block}attn_output.weight").T)


def _rotated(x: F32, shape: DenseShape) -> F32:
    """Rotary positions from 0 for [tokens, heads, head]; pairs are neighbours, as in llama.cpp's `norm` form."""
    frequencies = shape.rope_base ** -(np.arange(0, shape.head, 2) / shape.head)
    angles = np.arange(len(x))[:, None] * frequencies[None]
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
