"""What a model's metadata and tensors must say before llama.cpp sees them.

llama.cpp answers most nonsense with an exception, but some with an assertion that ends the process
(llama_model_base::load_hparams, llama_vocab::impl::load) and some by reading out of bounds. This module refuses the
second and third kind, and what the trunk writer and the manifest rely on. It does not repeat checks that differ by
architecture: those are llama.cpp's, and a child process meets them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from backends import expert_tensors as et
from backends.gguf_header import GGUFError, Metadata, TensorInfo, shown, type_name
from backends.gguf_types import ValueType

ARCHITECTURE_BYTES_MAX = 64
VOCABULARY_MAX = 1 << 24  # 64 times the largest known; llama.cpp allocates 50 bytes for each token that a file claims
CONTEXT_MAX = 1 << 30  # 100 times the longest known
_HEADS_MAX = 1 << 16
_CACHE_WIDTH_MAX = 1 << 21  # keys of one token in all layers; the widest known has 61 of 128 x 192. A GB in 256 cells
_STATE_MAX = 1 << 28  # numbers that recurrent layers keep of a sequence: 1 GB; the largest known has 42 million
_GATING_MAX = 4  # llama.cpp aborts beyond
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # llama.cpp aborts on any other
_DENSE_IF_SINGLE = ("hunyuan-dense", "hunyuan_vl")  # llama.cpp takes their single "expert" for none

_STRINGS = (ValueType.STRING,)
_TOKENIZER_ARRAYS: dict[str, tuple[ValueType, ...]] = {
    "tokens": _STRINGS,
    "merges": _STRINGS,
    "scores": (ValueType.FLOAT32, ValueType.INT32),
    "token_type": (ValueType.INT32,),
    "precompiled_charsmap": (ValueType.UINT8, ValueType.INT8),
    "suppress_tokens": (ValueType.INT32,),
}
_ONE_PER_TOKEN = ("scores", "token_type")
_WITHOUT_TOKENS = ("no_vocab", "none")


def check_model(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> str:
    """The architecture's name, once everything that holds for every model is checked. Raises GGUFError."""
    architecture = check_architecture(metadata)
    if not tensors:
        raise GGUFError("has no tensors")
    keys = _Keys(metadata, architecture)
    n_layers = _check_sizes(keys)
    _check_expert_keys(keys, n_layers)
    _check_experts(keys, tensors.values(), n_layers)
    _check_tokenizer(metadata)
    return architecture


def check_architecture(metadata: Metadata) -> str:
    """`general.architecture`, a short printable name."""
    name = metadata.get("general.architecture")
    if name is None:
        raise GGUFError("has no general.architecture")
    if not isinstance(name, str):
        raise GGUFError("general.architecture is not a string")
    if not name or not name.isascii() or not name.isprintable() or len(name) > ARCHITECTURE_BYTES_MAX:
        raise GGUFError(f"general.architecture is \"{shown(name)}\", not a name")
    kind = metadata.get("general.type", "model")
    if name == "clip" or kind in ("mmproj", "adapter", "imatrix"):
        what = f"is a companion file ({'mmproj' if name == 'clip' else kind}), not a language model"
        raise GGUFError(what, hint="Name the model's own GGUF file.")
    return name


class _Keys:
    """The architecture's own keys, with the type and range that llama.cpp needs."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A UINT32 from low to high; `default` if the key is absent, which is a GGUFError without one."""
        key = self.key(name)
        if key not in self.metadata:
            if default is None:
                raise GGUFError(f"has no {key}")
            return default
        kind, _ = self.metadata.types(key)
        if kind != ValueType.UINT32:
            raise GGUFError(f"{key} has type {type_name(kind)}; it must be UINT32")
        value = self.metadata[key]
        assert isinstance(value, int)
        if not low <= value <= high:
            raise GGUFError(f"{key} is {value:,}; it must be from {low:,} to {high:,}")
        return value

    def per_layer(self, name: str, n_layers: int, high: int) -> tuple[int, ...]:
        """One number a layer, from a scalar or an array; () if the key is absent."""
        key = self.key(name)
        if key not in self.metadata:
            return ()
        kind, element = self.metadata.types(key)
        if kind != ValueType.ARRAY:
            return (self.number(name, 0, high),) * n_layers
        count = self.metadata.entries[key].count
        if element not in (ValueType.UINT32, ValueType.INT32) or count != n_layers:
            raise GGUFError(f"{key} must have {n_layers} elements of type UINT32 or INT32, one a layer")
        values = self.metadata[key]
        assert isinstance(values, list)
        numbers = tuple(int(value) for value in values)
        if not all(0 <= number <= high for number in numbers):
            raise GGUFError(f"{key} has elements outside 0 to {high:,}")
        return numbers


def _check_sizes(keys: _Keys) -> int:
    """The number of layers; sizes and positions make sense."""
    n_layers = keys.number("block_count", 1, et.LAYERS_MAX)
    keys.number("nextn_predict_layers", 0, n_layers, default=0)
    keys.number("context_length", 1, CONTEXT_MAX)
    keys.number("embedding_length", 1, et.WIDTH_MAX)
    keys.number("vocab_size", 0, VOCABULARY_MAX, default=0)
    keys.per_layer("feed_forward_length", n_layers, et.WIDTH_MAX)
    _check_attention(keys, n_layers)
    _check_state(keys, n_layers)
    scaling = keys.metadata.get(keys.key("rope.scaling.type"), "linear")
    if scaling not in _ROPE_SCALINGS:
        raise GGUFError(
            f"{keys.key('rope.scaling.type')} is \"{shown(str(scaling))}\", none of {', '.join(_ROPE_SCALINGS)}"
        )
    return n_layers


def _check_attention(keys: _Keys, n_layers: int) -> None:
    """A token's keys and values fit into memory, and norms have an epsilon: below zero llama.cpp aborts."""
    heads = keys.per_layer("attention.head_count", n_layers, _HEADS_MAX)
    cached = keys.per_layer("attention.head_count_kv", n_layers, _HEADS_MAX) or heads
    default = keys.number("embedding_length", 1, et.WIDTH_MAX) // max((1, *heads[:1]))
    for name in ("key_length", "value_length", "key_length_swa", "value_length_swa"):
        width = keys.number(f"attention.{name}", 0, et.WIDTH_MAX, default=default)
        if sum(cached) * width > _CACHE_WIDTH_MAX:
            raise GGUFError(
                f"wants a cache of {sum(cached) * width:,} numbers a token for attention ({name}); "
                f"the limit is {_CACHE_WIDTH_MAX:,}"
            )
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon"):
        epsilon = keys.metadata.get(keys.key(f"attention.{name}"), 0.0)
        if isinstance(epsilon, float) and not 0 <= epsilon < math.inf:
            raise GGUFError(f"{keys.key(f'attention.{name}')} is {epsilon:g}; it must be a number from zero up")


def _check_state(keys: _Keys, n_layers: int) -> None:
    """What recurrent layers keep of a sequence fits into memory."""

    def size(name: str) -> int:
        return keys.number(name, 0, _STATE_MAX, default=0)

    inner, state = size("ssm.inner_size"), size("ssm.state_size")
    convolved = size("ssm.conv_kernel") * (inner + 2 * size("ssm.group_count") * state)
    heads = max(keys.per_layer("attention.head_count", n_layers, _HEADS_MAX), default=0)
    short = size("shortconv.l_cache") * size("embedding_length")
    numbers = n_layers * (state * inner + convolved + size("kda.head_dim") ** 2 * heads + short)
    if numbers > _STATE_MAX:
        raise GGUFError(f"wants {numbers:,} numbers a sequence for recurrent layers; the limit is {_STATE_MAX:,}")


def _check_expert_keys(keys: _Keys, n_layers: int) -> None:
    """The relations between expert counts that llama.cpp asserts."""
    keys.number("expert_gating_func", 0, _GATING_MAX, default=0)
    n_expert = keys.number("expert_count", 0, et.EXPERTS_MAX, default=0)
    used = max(keys.per_layer("expert_used_count", n_layers, et.EXPERTS_MAX), default=0)
    groups = keys.number("expert_group_count", 0, et.EXPERTS_MAX, default=0)
    groups_used = keys.number("expert_group_used_count", 0, et.EXPERTS_MAX, default=0)
    if n_expert <= 1 and keys.architecture in _DENSE_IF_SINGLE:
        return
    if used > n_expert:
        raise GGUFError(f"{keys.key('expert_used_count')} is {used}, more than {keys.key('expert_count')} ({n_expert})")
    if n_expert == 0:
        if groups:
            raise GGUFError(f"{keys.key('expert_group_count')} is {groups} in a model without experts")
        return
    if used == 0:
        raise GGUFError(f"has {n_expert} experts a layer but no {keys.key('expert_used_count')} above zero")
    if groups >= n_expert or (groups > 1 and (n_expert % groups or not 0 < groups_used < groups)):
        raise GGUFError(f"cannot choose {groups_used} of {groups} groups of {n_expert} experts")


def _check_experts(keys: _Keys, tensors: Iterable[TensorInfo], n_layers: int) -> None:
    """Every layer's expert tensors fit each other and the metadata."""
    n_expert = keys.number("expert_count", 0, et.EXPERTS_MAX, default=0)
    layers: dict[int, dict[str, tuple[int, tuple[int, ...]]]] = {}
    for info in tensors:
        name = et.parse_name(info.name)
        if name is None:
            continue
        if name.layer >= n_layers:
            raise GGUFError(f"tensor {info.name} is of a layer that {keys.key('block_count')} ({n_layers}) rules out")
        try:
            shape, experts = et.split_shape(info)
        except ValueError as error:
            raise GGUFError(f"tensor {info.name} {error}") from None
        if experts != n_expert:
            raise GGUFError(f"tensor {info.name} holds {experts} experts; {keys.key('expert_count')} is {n_expert}")
        layers.setdefault(name.layer, {})[name.short] = info.type, shape
    for layer, slices in sorted(layers.items()):
        try:
            et.check_slices(slices)
        except ValueError as error:
            raise GGUFError(f"the experts of layer {layer} do not fit together: {error}") from None


def _check_tokenizer(metadata: Metadata) -> None:
    """The tokenizer's arrays have the element types and lengths that llama.cpp reads them with."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise GGUFError("has no tokenizer.ggml.model" if model is None else "tokenizer.ggml.model is not a string")
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise GGUFError("tokenizer.chat_template is not a string")
    counts: dict[str, int] = {}
    for name, allowed in _TOKENIZER_ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        if key not in metadata:
            continue
        kind, element = metadata.types(key)
        if kind != ValueType.ARRAY or element not in allowed:
            found = type_name(kind) if element is None else f"an array of {type_name(element)}"
            raise GGUFError(f"{key} is {found}; it must be an array of {' or '.join(t.name for t in allowed)}")
        counts[name] = metadata.entries[key].count
    if model in _WITHOUT_TOKENS:
        return
    n_tokens = counts.get("tokens", 0)
    if n_tokens == 0:
        raise GGUFError("has no tokens in tokenizer.ggml.tokens")
    for name in _ONE_PER_TOKEN:
        if counts.get(name, n_tokens) != n_tokens:
            raise GGUFError(f"tokenizer.ggml.{name} has {counts[name]:,} elements for {n_tokens:,} tokens")
    _check_tokens_differ(metadata.texts("tokenizer.ggml.tokens"))


def _check_tokens_differ(tokens: Iterable[bytes]) -> None:
    """llama.cpp aborts when two tokens have one text. It reads each up to a NUL and renames empty ones."""
    seen: set[bytes] = set()
    for index, raw in enumerate(tokens):
        text = raw.partition(b"\0")[0] or b"[EMPTY_%d]" % index
        if text in seen:
            raise GGUFError(f"token {index} of tokenizer.ggml.tokens repeats another: \"{shown(text)}\"")
        seen.add(text)
