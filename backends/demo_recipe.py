"""Builds the demo model: SmolLM2-135M-Instruct, rewritten as a mixture of experts that computes the same.

`paired_experts.py` splits one feed-forward block; here every layer of a dense `llama` GGUF is split and written as
architecture `deepseek` (routed experts beside a shared one, weights not normalised), with attention, embeddings,
tokenizer and chat template copied byte for byte. As a command it is the child process that `demo_model.py` starts:

    python -m backends.demo_recipe SOURCE TARGET

It speaks the protocol of `child.py`. Run it with one BLAS thread: then the same machine gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from backends.atomic_file import replacing
from backends.child import Report, run_child
from backends.dense_forward import DenseModel, FeedForwardActivity, feed_forward_activity
from backends.paired_experts import DenseBlock, PairedBlock, Pairing, split_block
from capabilities.errors import UnsupportedModel

ARCHITECTURE = "deepseek"
_COPIED = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
_Q4_1 = GGMLQuantizationType.Q4_1


def calibration_sequences() -> list[list[int]]:
    """The bundled calibration text: token ids of SmolLM2, one list a passage."""
    text = files("backends.data").joinpath("calibration.json").read_text()
    return [list(sequence) for sequence in json.loads(text)["sequences"]]


def build_demo_model(
    source_gguf: Path,
    target: Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    pairing: Pairing = Pairing(),  # noqa: B008 - frozen
    calibration: list[list[int]] | None = None,
) -> None:
    """Write the mixture made from the dense `source_gguf` to `target`, atomically.

    `progress(done, total)` counts layers. Raises UnsupportedModel if the source is not a `llama` model with Q4_1
    feed-forward blocks whose width can be split.
    """
    model = DenseModel(source_gguf)
    _check(model, source_gguf, pairing)
    sequences = calibration_sequences() if calibration is None else calibration
    with replacing(target) as partial, closing(GGUFWriter(partial, ARCHITECTURE)) as writer:
        _write_keys(writer, model, pairing)
        for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
            if name in model.tensors:
                _copy(writer, model, name)
        for activity in feed_forward_activity(model, sequences):
            _write_layer(writer, model, activity, pairing)
            if progress is not None:
                progress(activity.layer + 1, model.shape.n_layers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _check(model: DenseModel, path: Path, pairing: Pairing) -> None:
    for layer in range(model.shape.n_layers):
        for name in _FEED_FORWARD:
            tensor = model.tensors.get(f"blk.{layer}.{name}.weight")
            if tensor is None or tensor.tensor_type != _Q4_1:
                raise UnsupportedModel(f"{path.name}: {name} of layer {layer} is not in Q4_1", path=str(path))
    try:
        pairing.n_shared(model.shape.ff)
    except ValueError as error:
        raise UnsupportedModel(f"{path.name}: {error}", path=str(path)) from error


def _write_keys(writer: GGUFWriter, model: DenseModel, pairing: Pairing) -> None:
    shape = model.shape
    writer.add_name(f"{model.value('general.name')}, paired experts")
    writer.add_description("A dense model rewritten as a mixture of experts that computes the same function.")
    writer.add_license("apache-2.0")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(model.value("llama.context_length"))
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    writer.add_vocab_size(len(model.value("tokenizer.ggml.tokens")))
    writer.add_quantization_version(2)
    writer.add_leading_dense_block_count(0)
    writer.add_expert_count(pairing.n_expert)
    writer.add_expert_used_count(pairing.n_slots)
    writer.add_expert_feed_forward_length(pairing.expert_width)
    writer.add_expert_shared_count(pairing.n_shared(shape.ff))
    writer.add_expert_weights_scale(1.0)
    for key, field in model.fields.items():
        if key.startswith("tokenizer."):
            element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], element)


def _write_layer(writer: GGUFWriter, model: DenseModel, activity: FeedForwardActivity, pairing: Pairing) -> None:
    block = f"blk.{activity.layer}."
    gate, up, down = (np.asarray(model.tensors[f"{block}{name}.weight"].data) for name in _FEED_FORWARD)
    split = split_block(DenseBlock(gate, up, down), activity.inputs, activity.hidden, pairing, seed=activity.layer)
    for name in _COPIED:
        _copy(writer, model, f"{block}{name}.weight")
    _write_paired(writer, block, split)


def _write_paired(writer: GGUFWriter, block: str, split: PairedBlock) -> None:
    writer.add_tensor(f"{block}ffn_gate_inp.weight", split.router)
    tensors: dict[str, Any] = {
        "ffn_gate_exps": split.gate,
        "ffn_up_exps": split.up,
        "ffn_down_exps": split.down,
        "ffn_gate_shexp": split.shared.gate,
        "ffn_up_shexp": split.shared.up,
        "ffn_down_shexp": split.shared.down,
    }
    for name, data in tensors.items():
        writer.add_tensor(f"{block}{name}.weight", np.ascontiguousarray(data), raw_dtype=_Q4_1)


def _copy(writer: GGUFWriter, model: DenseModel, name: str) -> None:
    tensor = model.tensors[name]
    writer.add_tensor(name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)


def main(source: str, target: str) -> int:
    """The child process: build `source` into `target`, reporting after each layer."""

    def build(report: Report) -> None:
        step = "building the demo model"
        build_demo_model(Path(source), Path(target), lambda done, total: report(step, done, total))

    return run_child(build)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
