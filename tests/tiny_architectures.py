"""One function for each kind of expert block: keys and tensors as llama.cpp's loader for that architecture wants them.

`KINDS` maps a kind's name to its function; `write_tiny_model` is what tests call. `llama4` is here to be refused: it
multiplies by the router's weights before the experts and ties its shared expert to the experts' width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.tiny_models import N_EXPERT, TinyWriter

Kind = tuple[str, Callable[[TinyWriter], None]]


def write_tiny_model(path: Path, kind: str, seed: int = 0, quantisation: str = "f32") -> Path:
    """Write a tiny model of a kind from `KINDS` to `path`; the same arguments give the same bytes. Returns `path`.

    `quantisation` names any ggml type that needs no importance matrix (q4_0, q8_0, q4_k, f16, mxfp4, ...); widths grow
    to 256 for types of super-blocks.
    """
    architecture, describe = KINDS[kind]
    return _write(path, architecture, describe, seed, quantisation)


def write_olmoe(path: Path, n_layers: int, *, quantisation: str = "f32", widths: tuple[int, int] | None = None) -> Path:
    """The kind `olmoe` with so many layers, and with other widths (of the model and of an expert)."""
    return _write(path, "olmoe", lambda writer: _olmoe(writer, n_layers), quantisation=quantisation, widths=widths)


def write_deep(path: Path, n_layers: int = 49, *, quantisation: str = "q8_0") -> Path:
    """A deep `olmoe` whose residual grows from layer to layer as a trained model's does (see `GROWTH`)."""
    return _write(path, "olmoe", lambda writer: _deep(writer, n_layers), quantisation=quantisation, widths=(128, 64))


# The residual's root mean square by depth, from the first layer to the last: what the demo model's (SmolLM2) was
# measured to be, growing fast at first, slowly in the middle, and fast again.
GROWTH = (1.65, 3.08, 3.66, 4.06, 4.81, 5.59, 5.68, 6.4, 7.54, 8.35, 9.94, 13.86, 19.57, 23.21, 36.86)
_DEEP_BLOCK = 0.9  # the root mean square of what one layer of `_deep` adds with a gain of one


def _deep(w: TinyWriter, n_layers: int) -> None:
    """As `_olmoe`, but each layer adds just as much as lets the residual follow GROWTH."""
    w.keys(n_layers, feed_forward_length=w.ff)
    w.embeddings()
    sizes = np.interp(np.linspace(0, len(GROWTH) - 1, n_layers), np.arange(len(GROWTH)), GROWTH)
    for layer, added in enumerate(np.sqrt(np.diff(np.square(sizes), prepend=0.0))):
        block, gain = f"blk.{layer}.", float(added) / _DEEP_BLOCK
        w.norms(block, "attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
        for name, factor in (("attn_q", 1.0), ("attn_k", 1.0), ("attn_v", 1.0), ("attn_output", gain)):
            w.matrix(f"{block}{name}", w.width, w.width, gain=factor)
        w.router(block)
        for name in ("gate", "up"):
            w.matrix(f"{block}ffn_{name}_exps", w.width, w.ff, N_EXPERT)
        w.matrix(f"{block}ffn_down_exps", w.ff, w.width, N_EXPERT, gain=2 * gain)


def _write(
    path: Path,
    architecture: str,
    describe: Callable[[TinyWriter], None],
    seed: int = 0,
    quantisation: str = "f32",
    widths: tuple[int, int] | None = None,
) -> Path:
    super_blocks = quantisation.endswith("_k")
    width, ff = widths or ((256, 256) if super_blocks else (64, 32))
    writer = TinyWriter(path, architecture, seed=seed, quantisation=quantisation, width=width, ff=ff)
    describe(writer)
    writer.finish()
    return path


def _olmoe(w: TinyWriter, n_layers: int = 3) -> None:
    """Softmax over all experts, the chosen weights left as they are (they add up to less than one)."""
    w.keys(n_layers, feed_forward_length=w.ff)
    w.embeddings()
    for layer in range(n_layers):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
        w.attention(block)
        w.router(block)
        w.experts(block)


def _qwen3moe(w: TinyWriter, *scales: str) -> None:
    """Softmax, weights normalised over the chosen experts; with `scales`, a factor for each expert's projection."""
    w.keys(2, expert_feed_forward_length=w.ff)
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
        w.attention(block)
        w.router(block)
        w.experts(block, scales=scales)


def _gpt_oss(w: TinyWriter) -> None:
    """Biases everywhere, a clamped SwiGLU, softmax over the chosen experts only, attention sinks, sliding windows."""
    w.keys(2, expert_feed_forward_length=w.ff, attention__sliding_window=8)
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "post_attention_norm")
        w.attention(block, bias=True)
        w.vector(f"{block}attn_sinks.weight", w.n_head)
        w.router(block, bias=True)
        w.experts(block, bias=True)


def _deepseek2(w: TinyWriter, gate: str = "split") -> None:
    """Latent attention, one leading dense layer, a shared expert, sigmoid routing with selection biases and groups."""
    rank, rope, nope, value = w.width // 2, 16, 16, w.width // 4
    w.keys(
        3, leading_dense_block_count=1, expert_feed_forward_length=w.ff, expert_shared_count=2,
        expert_group_count=4, expert_group_used_count=2, expert_gating_func=2, expert_weights_norm=True,
        expert_weights_scale=2.5, rope__dimension_count=rope, attention__head_count_kv=1,
        attention__q_lora_rank=rank, attention__kv_lora_rank=rank, attention__key_length=rank + rope,
        attention__value_length=rank, attention__key_length_mla=nope + rope, attention__value_length_mla=value,
    )  # fmt: skip
    w.embeddings()
    for layer in range(3):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.norms(block, "attn_q_a_norm", "attn_kv_a_norm", width=rank)
        w.matrix(f"{block}attn_q_a", w.width, rank)
        w.matrix(f"{block}attn_q_b", rank, w.n_head * (nope + rope))
        w.matrix(f"{block}attn_kv_a_mqa", w.width, rank + rope)
        w.matrix(f"{block}attn_k_b", nope, rank, w.n_head)
        w.matrix(f"{block}attn_v_b", rank, value, w.n_head)
        w.matrix(f"{block}attn_output", w.n_head * value, w.width)
        if layer == 0:
            w.dense_ffn(block, 2 * w.width)
            continue
        w.router(block)
        w.vector(f"{block}exp_probs_b.bias", N_EXPERT, std=0.2)
        w.experts(block, gate=gate)
        w.dense_ffn(block, 2 * w.ff, "_shexp")


def _mixtral(w: TinyWriter) -> None:
    """`llama` with experts: their width is the model's `feed_forward_length`. Grouped-query attention."""
    w.keys(2, feed_forward_length=w.ff, attention__head_count_kv=2)
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.matrix(f"{block}attn_q", w.width, w.width)
        w.matrix(f"{block}attn_k", w.width, w.width // 2)
        w.matrix(f"{block}attn_v", w.width, w.width // 2)
        w.matrix(f"{block}attn_output", w.width, w.width)
        w.router(block)
        w.experts(block)


def _grok(w: TinyWriter) -> None:
    """GELU experts beside a dense block, output norms after both, soft-capped attention."""
    w.keys(2, expert_feed_forward_length=w.ff, embedding_scale=1.0, logit_scale=1.0)
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "attn_output_norm", "ffn_norm", "layer_output_norm")
        w.attention(block)
        w.dense_ffn(block, 2 * w.width)
        w.router(block)
        w.experts(block)


def _smallthinker(w: TinyWriter) -> None:
    """ReLU experts; the router reads the layer's input, before attention."""
    w.keys(2, expert_feed_forward_length=w.ff, expert_gating_func=2)
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.attention(block)
        w.router(block)
        w.experts(block)


def _nemotron_h_moe(w: TinyWriter) -> None:
    """Squared-ReLU experts without a gate, in a narrower latent space; attention, Mamba 2 and experts take turns."""
    latent, state = w.width // 2, 16
    ff = 2 * w.width
    w.keys(
        4, feed_forward_length=[0, 0, ff, ff], attention__head_count_kv=[w.n_head, 0, 0, 0],
        attention__layer_norm_epsilon=1e-5, expert_feed_forward_length=w.ff, expert_weights_norm=True,
        expert_weights_scale=1.5, expert_shared_feed_forward_length=ff, moe_latent_size=latent, expert_shared_count=1,
        **_mamba_keys(w, state),
    )  # fmt: skip
    w.embeddings()
    for layer in range(4):
        w.norms(f"blk.{layer}.", "attn_norm")
    w.attention("blk.0.")
    _mamba2(w, "blk.1.", state)
    for block in ("blk.2.", "blk.3."):
        w.router(block)
        w.vector(f"{block}exp_probs_b.bias", N_EXPERT, std=0.2)
        w.matrix(f"{block}ffn_latent_down", w.width, latent)
        w.matrix(f"{block}ffn_latent_up", latent, w.width)
        w.experts(block, gate="none", width=latent)
        w.dense_ffn(block, ff, "_shexp", gate=False)


def _granitehybrid(w: TinyWriter) -> None:
    """Mamba 2 and attention layers, each with experts whose width is `feed_forward_length`, and a shared expert."""
    state = 16
    w.keys(
        2, feed_forward_length=w.ff, attention__head_count_kv=[0, w.n_head], rope__dimension_count=w.head,
        expert_shared_feed_forward_length=w.width, **_mamba_keys(w, state),
    )  # fmt: skip
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        if layer:
            w.attention(block)
        else:
            _mamba2(w, block, state)
        w.router(block)
        w.experts(block)
        w.dense_ffn(block, w.width, "_shexp")


def _mamba_keys(w: TinyWriter, state: int) -> dict[str, int]:
    return {
        "ssm__conv_kernel": 4, "ssm__inner_size": 2 * w.width, "ssm__state_size": state, "ssm__time_step_rank": 4,
        "ssm__group_count": 2,
    }  # fmt: skip


def _mamba2(w: TinyWriter, block: str, state: int) -> None:
    inner, groups, heads = 2 * w.width, 2, 4
    convolved = inner + 2 * groups * state
    w.matrix(f"{block}ssm_in", w.width, inner + convolved + heads)
    w.vector(f"{block}ssm_conv1d.weight", 4, convolved, std=0.5)
    w.vector(f"{block}ssm_conv1d.bias", convolved)
    w.vector(f"{block}ssm_dt.bias", heads)
    w.vector(f"{block}ssm_a", 1, heads, mean=-1.0)  # negative: the state decays
    w.vector(f"{block}ssm_d", 1, heads, mean=1.0)
    w.vector(f"{block}ssm_norm.weight", inner // groups, groups, mean=1.0)
    w.matrix(f"{block}ssm_out", inner, w.width)


def _lfm2moe(w: TinyWriter) -> None:
    """Short convolutions (recurrent) before attention, one leading dense layer, sigmoid routing with biases."""
    w.keys(
        3, attention__head_count_kv=[0, 0, w.n_head], leading_dense_block_count=1, expert_feed_forward_length=w.ff,
        expert_gating_func=2, shortconv__l_cache=3,
    )  # fmt: skip
    w.embeddings(output_norm="token_embd_norm")
    for layer in range(3):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        if layer == 2:
            w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
            w.attention(block)
        else:
            w.vector(f"{block}shortconv.conv.weight", 3, w.width, std=0.5)
            w.matrix(f"{block}shortconv.in_proj", w.width, 3 * w.width)
            w.matrix(f"{block}shortconv.out_proj", w.width, w.width)
        if layer == 0:
            w.dense_ffn(block, 2 * w.width)
            continue
        w.router(block)
        w.vector(f"{block}exp_probs_b.bias", N_EXPERT, std=0.2)
        w.experts(block)


def _qwen3next(w: TinyWriter) -> None:
    """Gated delta net (recurrent) and gated attention; merged gate_up experts and a gated shared expert."""
    state, k_heads, v_heads = 16, 2, 4
    keys, values = state * k_heads, state * v_heads
    w.keys(
        2, expert_feed_forward_length=w.ff, expert_shared_feed_forward_length=w.width, full_attention_interval=2,
        rope__dimension_count=w.head, ssm__conv_kernel=4, ssm__inner_size=values, ssm__state_size=state,
        ssm__time_step_rank=v_heads, ssm__group_count=k_heads,
    )  # fmt: skip
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "post_attention_norm")
        if layer:
            w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
            w.attention(block, q_factor=2)
        else:
            w.matrix(f"{block}attn_qkv", w.width, 2 * keys + values)
            w.matrix(f"{block}attn_gate", w.width, values)
            w.vector(f"{block}ssm_conv1d.weight", 4, 2 * keys + values, std=0.5)
            w.vector(f"{block}ssm_dt.bias", v_heads)
            w.vector(f"{block}ssm_a", v_heads, mean=-1.0)
            w.matrix(f"{block}ssm_ba", w.width, 2 * v_heads)
            w.norms(block, "ssm_norm", width=state)
            w.matrix(f"{block}ssm_out", values, w.width)
        w.router(block)
        w.experts(block, gate="merged")
        w.vector(f"{block}ffn_gate_inp_shexp.weight", w.width)
        w.dense_ffn(block, w.width, "_shexp")


def _gemma4(w: TinyWriter) -> None:
    """GELU experts, merged gate_up, a factor on each output, beside a dense block; the router has its own input."""
    w.keys(
        2, expert_feed_forward_length=w.ff, attention__sliding_window=8,
        attention__sliding_window_pattern=[True, False], attention__key_length=w.head,
        attention__value_length=w.head, attention__key_length_swa=w.head,
        attention__value_length_swa=w.head, rope__dimension_count=w.head, rope__dimension_count_swa=w.head,
        embedding_length_per_layer_input=0,
    )  # fmt: skip
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        w.norms(block, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
        w.attention(block)
        w.dense_ffn(block, 2 * w.width)
        w.router(block)
        w.vector(f"{block}ffn_gate_inp.scale", w.width, mean=w.width**0.5)
        w.experts(block, gate="merged", scales=("down",))
    w.vector("rope_freqs.weight", w.head // 2, std=0.0, mean=1.0)


def _step35(w: TinyWriter) -> None:
    """SwiGLU with clamped halves (the second layer only), one dense layer, a shared expert, gated heads."""
    w.keys(
        3, expert_feed_forward_length=w.ff, expert_shared_feed_forward_length=w.width, expert_weights_norm=True,
        expert_weights_scale=2.0, attention__sliding_window=8, attention__sliding_window_pattern=[True, False, True],
        swiglu_clamp_exp=[0.0, 0.0, 0.5], attention__key_length=w.head, attention__value_length=w.head,
        rope__dimension_count=w.head,
    )  # fmt: skip
    w.embeddings()
    for layer in range(3):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
        w.attention(block)
        w.matrix(f"{block}attn_gate", w.width, w.n_head)
        if layer == 0:
            w.dense_ffn(block, 2 * w.width)
            continue
        w.router(block)
        w.vector(f"{block}exp_probs_b.bias", N_EXPERT, std=0.2)
        w.experts(block)
        w.dense_ffn(block, w.width, "_shexp")


def _grovemoe(w: TinyWriter) -> None:
    """A second block of experts in each layer, one for each group of two, under the same names in llama.cpp's graph."""
    w.keys(
        2, expert_feed_forward_length=w.ff, expert_chunk_feed_forward_length=w.ff, expert_group_scale=0.5,
        experts_per_group=2, rope__dimension_count=w.head,
    )  # fmt: skip
    w.embeddings()
    for layer in range(2):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.norms(block, "attn_q_norm", "attn_k_norm", width=w.head)
        w.attention(block)
        w.router(block)
        w.experts(block)
        w.matrix(f"{block}ffn_gate_chexps", w.width, w.ff, N_EXPERT // 2)
        w.matrix(f"{block}ffn_up_chexps", w.width, w.ff, N_EXPERT // 2)
        w.matrix(f"{block}ffn_down_chexps", w.ff, w.width, N_EXPERT // 2, gain=2.0)


def _llama4(w: TinyWriter) -> None:
    """Weights applied before the experts; a shared expert of exactly the experts' width; dense layers in between."""
    w.keys(
        4, expert_feed_forward_length=w.ff, interleave_moe_layer_step=2, expert_used_count=1,
        rope__dimension_count=w.head,
    )  # fmt: skip
    w.embeddings()
    for layer in range(4):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "ffn_norm")
        w.attention(block)
        if layer % 2 == 0:
            w.dense_ffn(block, 2 * w.width)
            continue
        w.router(block)
        w.experts(block)
        w.dense_ffn(block, w.ff, "_shexp")


KINDS: Mapping[str, Kind] = {
    "olmoe": ("olmoe", _olmoe),
    "qwen3moe": ("qwen3moe", _qwen3moe),
    "qwen3moe-scales": ("qwen3moe", lambda w: _qwen3moe(w, "gate", "up", "down")),
    "gpt-oss": ("gpt-oss", _gpt_oss),
    "deepseek2": ("deepseek2", _deepseek2),
    "deepseek2-merged": ("deepseek2", lambda w: _deepseek2(w, "merged")),
    "mixtral": ("llama", _mixtral),
    "grok": ("grok", _grok),
    "smallthinker": ("smallthinker", _smallthinker),
    "nemotron-h-moe": ("nemotron_h_moe", _nemotron_h_moe),
    "granite-hybrid": ("granitehybrid", _granitehybrid),
    "lfm2moe": ("lfm2moe", _lfm2moe),
    "qwen3next": ("qwen3next", _qwen3next),
    "gemma4": ("gemma4", _gemma4),
    "step35": ("step35", _step35),
    "grovemoe": ("grovemoe", _grovemoe),
    "llama4": ("llama4", _llama4),
}
RECURRENT = frozenset({"nemotron-h-moe", "granite-hybrid", "lfm2moe", "qwen3next"})
