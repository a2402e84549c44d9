"""Learns how llama.cpp runs a model's MoE layers, and makes the trunk that runs them elsewhere.

One short decode with a LearningHook tells which layers really dispatch, where their results are collected and what one
expert computes. The trunk's form differs by architecture (trunk_file.py): the first that llama.cpp loads is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from backends.child import coming_back
from backends.gguf_file import GGUFFile
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import LearnedLayer, LearningHook
from backends.trunk_file import expert_layers, trunk_forms, write_outline, write_trunk
from capabilities.errors import BadModelFile, UnsupportedModel

_LEARN_TOKENS: Final = 3
_WRONG_SHAPE: Final = "wrong shape"  # llama.cpp's words for a tensor that is not as wide as the header says
# No repacking and one small context: adding a model must not need memory in proportion to it.
_SETTINGS: Final = LlamaSettings(context_tokens=64, batch_tokens=16, repack=False, gpu_layers=0)


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """What a decode of the trunk showed. `silent`: layers that hold experts but never dispatched."""

    layers: Mapping[int, LearnedLayer]
    silent: tuple[int, ...]
    n_vocab: int
    n_layers: int
    context_length: int


def learn(path: Path, holding: tuple[int, ...]) -> LearnedModel:
    """Run a trunk (or a whole model) once. `holding`: the layers that hold routed experts.

    Raises:
        BadModelFile: llama.cpp refuses the file.
        UnsupportedModel: a layer's expert block cannot be captured; the message names the layer and the operator.
    """
    hook = LearningHook()
    with coming_back(path.stat().st_size), LlamaModel(path, _SETTINGS, hook) as model:
        run_once(model)
        if hook.refused:
            raise next(iter(hook.refused.values()))
        return LearnedModel(
            layers=hook.layers,
            silent=tuple(i for i in holding if i not in hook.layers),
            n_vocab=model.vocabulary.n_vocab,
            n_layers=model.n_layers,
            context_length=model.trained_context_tokens,
        )


def run_once(model: LlamaModel) -> None:
    """Decode a few tokens in sequence 0, with logits for each, so that every layer has rows for a LearningHook."""
    n = min(_LEARN_TOKENS, model.settings.batch_tokens)
    tokens = np.arange(1, n + 1, dtype=np.int32) % model.vocabulary.n_vocab
    model.decode(tokens, np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.ones(n, bool))


def make_trunk(gguf: GGUFFile, target: Path, progress: Callable[[int, int], None] | None = None) -> LearnedModel:
    """Write the trunk of a model to `target` in the first form that llama.cpp loads, and learn its MoE layers.

    Raises:
        UnsupportedModel: no routed experts, no form that loads, or an expert block that cannot be replayed.
    """
    holding = expert_layers(gguf)
    if not holding:
        raise UnsupportedModel(
            f"{gguf.paths[0].name} has no routed experts: it is a dense model ({gguf.architecture})",
            hint="Choose a mixture-of-experts model.",
        )
    refusal: BadModelFile | None = None
    for form in trunk_forms(gguf):
        try:
            write_outline(gguf, target, form)  # no weights: only to ask llama.cpp whether the form loads
            with coming_back(target.stat().st_size), LlamaModel(target, _SETTINGS):
                pass
        except BadModelFile as error:
            refusal = error
            continue
        write_trunk(gguf, target, form, progress)
        return learn(target, holding)
    target.unlink(missing_ok=True)
    reason = re.sub(r".*?: ", "", str(refusal), count=1)
    if _WRONG_SHAPE in reason:
        raise UnsupportedModel(
            f"the architecture {gguf.architecture} ties another tensor to the experts' width, "
            f"so llama.cpp loads no trunk of it ({reason})"
        )
    raise UnsupportedModel(f"llama.cpp loads no trunk of this {gguf.architecture} model: {reason}")
