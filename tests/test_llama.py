"""llama.cpp behind LlamaModel: a token's bits do not depend on its batch, and what it refuses comes with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from backends import llama, weight_layout
from backends.device import Device, DeviceInfo, list_devices
from backends.experts import F32, I32
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import LearningHook
from backends.vocabulary import Vocabulary
from backends.weight_layout import WeightLayout, choose_layout
from capabilities.errors import BadModelFile, Internal, UsageError
from tests.expert_models import take_apart, tiny_file
from tests.tiny_architectures import KINDS, RECURRENT, write_tiny_model

SETTINGS = LlamaSettings(context_tokens=64, batch_tokens=48)
N = 40
TOKENS = (np.arange(N, dtype=np.int32) * 37) % 256


def decode(model: LlamaModel, tokens: I32, first: int = 0, sequence: int = 0) -> F32:
    n = len(tokens)
    positions = np.arange(first, first + n, dtype=np.int32)
    return model.decode(tokens, positions, np.full(n, sequence, np.int32), np.ones(n, bool))


def in_chunks(model: LlamaModel, size: int) -> F32:
    model.clear_all()
    return np.concatenate([decode(model, TOKENS[i : i + size], i) for i in range(0, N, size)])


# -- batch invariance -------------------------------------------------------------------------------------------------

INVARIANT = [
    *((kind, "f32") for kind in KINDS),
    *(("olmoe", kind) for kind in ("f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "mxfp4")),
    ("deepseek2-merged", "q4_k"),
    ("gpt-oss", "q4_0"),
    ("grovemoe", "q4_0"),  # two of a token's experts may share a chunk
]


@pytest.mark.parametrize(("kind", "quantisation"), INVARIANT)
def test_chunks_of_any_size_give_the_same_bits(kind: str, quantisation: str) -> None:
    """Ten is above the width from which ggml's wide kernels for K-quants would take over."""
    with LlamaModel(tiny_file(kind, quantisation), SETTINGS) as model:
        whole = in_chunks(model, N)
        assert np.isfinite(whole).all()
        for size in (10, 7, 1):
            assert np.array_equal(in_chunks(model, size), whole), f"chunks of {size}"


def test_a_long_context_changes_no_bits() -> None:
    """Beyond 512 cells flash attention would split a lone token's work in another way."""
    n, last = 600, 8
    tokens = (np.arange(n, dtype=np.int32) * 37) % 256
    with LlamaModel(tiny_file("olmoe"), LlamaSettings(context_tokens=1024, batch_tokens=n)) as model:
        whole = decode(model, tokens)
        model.clear_all()
        decode(model, tokens[:-last])
        steps = [decode(model, tokens[i : i + 1], i) for i in range(n - last, n)]
        assert np.array_equal(np.concatenate(steps), whole[-last:])


@pytest.mark.parametrize(("kind", "quantisation"), [("olmoe", "q4_0"), ("qwen3next", "f32"), ("gpt-oss", "q6_k")])
def test_a_sequence_among_others_equals_itself_alone(kind: str, quantisation: str) -> None:
    settings = replace(SETTINGS, sequences=4)
    with LlamaModel(tiny_file(kind, quantisation), settings) as model:
        alone = decode(model, TOKENS[:8]), [decode(model, TOKENS[i : i + 1], i) for i in range(8, 14)]
        model.clear_all()
        # Four prompts in one batch, of four lengths and mixed up; then all four go on together.
        lengths = [8, 5, 11, 2]
        rows = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
        np.random.default_rng(0).shuffle(rows)
        rows.sort(key=lambda row: row[1])  # positions of a sequence ascend
        sequences, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        logits = model.decode(TOKENS[positions + 3 * sequences], positions, sequences, np.ones(len(rows), bool))
        assert np.array_equal(logits[sequences == 0], alone[0])
        for step, expected in zip(range(8, 14), alone[1], strict=True):
            places = np.array([length + step - 8 for length in lengths], np.int32)
            logits = model.decode(TOKENS[places], places, np.arange(4, dtype=np.int32), np.ones(4, bool))
            assert np.array_equal(logits[:1], expected), f"position {step}"


def test_the_trunk_is_batch_invariant_too() -> None:
    """Its own weights matter, not its stand-ins for experts: of these llama.cpp would repack Q4_K."""
    with LlamaModel(take_apart("deepseek2-merged", "q4_k").trunk, SETTINGS, LearningHook()) as model:
        whole = in_chunks(model, N)
        assert all(np.array_equal(in_chunks(model, size), whole) for size in (10, 1))


def test_threads_change_no_bits() -> None:
    results = []
    for threads in (1, 2):
        with LlamaModel(tiny_file("olmoe", "q4_k"), replace(SETTINGS, threads=threads)) as model:
            results.append(in_chunks(model, N))
    assert np.array_equal(*results)


def test_types_that_repack_unevenly_stay_plain_but_for_experts() -> None:
    cpu = Device("CPU")
    if not cpu.repack_type(12, (256, 256)):
        pytest.skip("this processor's llama.cpp repacks no Q4_K")
    layout = choose_layout(tiny_file("deepseek2-merged", "q4_k"), cpu, batch_invariant=True)
    repacked = cpu.extra_buffer_types[-1]
    assert not layout.may_repack
    assert layout.overrides == (
        (rb"^blk\.(1|2)\.ffn_gate_up_exps\.weight$", repacked),
        (rb"^blk\.(1|2)\.ffn_down_exps\.weight$", repacked),
    )


def test_other_models_are_repacked_as_llama_cpp_likes() -> None:
    for quantisation in ("f32", "q4_0", "mxfp4", "q8_0"):
        layout = choose_layout(tiny_file("olmoe", quantisation), Device("CPU"), batch_invariant=True)
        assert layout == WeightLayout(may_repack=True)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_chunk_experts_stay_plain(batch_invariant: bool) -> None:
    cpu = Device("CPU")
    if not (repacked := cpu.repack_type(2, (64, 32, 4))):
        pytest.skip("this processor's llama.cpp repacks no Q4_0")
    layout = choose_layout(tiny_file("grovemoe", "q4_0"), cpu, batch_invariant=batch_invariant)
    assert not layout.may_repack
    assert layout.overrides == tuple(
        (rf"^blk\.(0|1)\.ffn_{name}_exps\.weight$".encode(), repacked) for name in ("gate", "up", "down")
    )
    assert choose_layout(tiny_file("grovemoe"), cpu, batch_invariant=batch_invariant).may_repack


def test_the_trial_notices_an_uneven_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(device: Device, kind: int, weights: F32, x: F32) -> F32:
        return x[:, :1] + (1e-7 if kind == 2 and len(x) >= 4 else 0)

    monkeypatch.setattr(weight_layout, "_product", product)
    device = Device("CPU")  # a new one: verdicts are kept by device
    assert not weight_layout._repacks_evenly(device, 2)
    assert weight_layout._repacks_evenly(device, 20)


def test_experts_stay_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second device that claims to be a GPU: the trunk loads with its experts' place prescribed."""
    gpu = DeviceInfo("GPU0", "a made-up one", "None", False, 1, 1)
    monkeypatch.setattr(llama, "list_devices", lambda: (gpu, *list_devices()))
    path = take_apart("olmoe").trunk
    with LlamaModel(path, SETTINGS, LearningHook()) as model:
        logits = in_chunks(model, N)
    monkeypatch.undo()
    with LlamaModel(path, SETTINGS, LearningHook()) as model:
        assert np.array_equal(in_chunks(model, N), logits)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_file_that_llama_cpp_refuses_comes_with_its_reason(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "olmoe")
    reader = GGUFReader(path, "r+")
    reader.fields["olmoe.feed_forward_length"].parts[-1][0] = 33
    reader.data.flush()
    with pytest.raises(BadModelFile, match=r"refuses model\.gguf: tensor 'blk\.0\..*' has wrong shape") as caught:
        LlamaModel(path, SETTINGS)
    assert caught.value.details == {"path": str(path)}
    assert "\n" not in caught.value.message


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_file("olmoe").read_bytes().replace(b"olmoe", b"olmox"))
    with pytest.raises(BadModelFile, match="unknown model architecture: 'olmox'"):
        LlamaModel(path, SETTINGS)


def test_a_truncated_file_never_reaches_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_file("olmoe").read_bytes()[:-400])
    with pytest.raises(BadModelFile, match=r"model\.gguf"):
        LlamaModel(path, SETTINGS)


def test_an_earlier_refusal_is_not_blamed_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_file("olmoe").read_bytes().replace(b"olmoe", b"olmox"))
    with pytest.raises(BadModelFile):
        LlamaModel(path, SETTINGS)
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model, pytest.raises(Internal) as caught:
        model.decode(TOKENS[:1], np.array([70], np.int32), np.full(1, 5, np.int32), np.ones(1, bool))
    assert "olmox" not in caught.value.message


def test_batches_have_bounds() -> None:
    with LlamaModel(tiny_file("olmoe"), replace(SETTINGS, context_tokens=256, batch_tokens=8)) as model:
        for n in (0, 9):
            with pytest.raises(ValueError, match="at most 8"):
                decode(model, TOKENS[:n])
        for first in range(0, 256, 8):
            decode(model, TOKENS[:8], first)
        with pytest.raises(Internal, match="no room in the context"):
            decode(model, TOKENS[:8], 256)
        model.clear(0)
        assert decode(model, TOKENS[:8]).shape == (8, 320)


# -- what a model says of itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_models_are_known(kind: str) -> None:
    with LlamaModel(tiny_file(kind), SETTINGS) as model:
        assert model.is_recurrent == (kind in RECURRENT)
        assert model.has_decoder
        assert not model.has_encoder
        assert model.trained_context_tokens == 2048


def test_contexts_are_counted_for_each_sequence() -> None:
    with LlamaModel(tiny_file("olmoe"), replace(SETTINGS, sequences=3, context_tokens=256)) as model:
        assert model.context_tokens == 256
        assert model.n_layers == 3
        model.close()
        model.close()


def test_logits_come_only_for_rows_that_want_them() -> None:
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        whole = decode(model, TOKENS)
        model.clear_all()
        wanted = np.zeros(N, bool)
        wanted[[3, 17, 39]] = True
        some = model.decode(TOKENS, np.arange(N, dtype=np.int32), np.zeros(N, np.int32), wanted)
        assert np.array_equal(some, whole[wanted])


# -- vocabulary -------------------------------------------------------------------------------------------------------


def test_text_and_tokens() -> None:
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        vocabulary = model.vocabulary
        assert vocabulary.n_vocab == 320
        text = "naïve 😀\n<|im_end|>"
        tokens = vocabulary.tokenize(text)
        assert b"".join(map(vocabulary.piece, tokens)) == "naïve 😀\n".encode()  # control tokens have no bytes
        assert vocabulary.is_end(tokens[-1])
        assert not vocabulary.is_end(tokens[0])
        plain = vocabulary.tokenize(text, parse_special=False)
        assert b"".join(map(vocabulary.piece, plain)) == text.encode()
        assert vocabulary.tokenize("") == []
        assert vocabulary.tokenize("\ud800")  # half of a pair has no UTF-8 form
        assert vocabulary.piece(0) == b"\x00"


def test_a_prompt_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends import vocabulary

    monkeypatch.setattr(vocabulary, "_PROMPT_BYTES_MAX", 10)
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        assert len(model.vocabulary.tokenize("a" * 10)) == 10
        with pytest.raises(UsageError, match="11 bytes; at most 10"):
            model.vocabulary.tokenize("a" * 11)


def test_chats_are_rendered_by_the_models_template() -> None:
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        prompt = model.vocabulary.render_chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        )
        assert (
            prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{% for %}", "refuses this conversation"),
        ("{{ messages[0].content.nothing.at.all }}", "refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "refuses this conversation"),
        ("{{ messages + 1 }}", "refuses this conversation"),
    ],
)
def test_a_template_that_fails_is_the_conversations_fault(template: str | None, message: str) -> None:
    with LlamaModel(tiny_file("olmoe"), SETTINGS) as model:
        vocabulary: Vocabulary = model.vocabulary
        vocabulary.chat_template = template
        with pytest.raises(UsageError, match=message):
            vocabulary.render_chat([{"role": "user", "content": "Hi"}])
