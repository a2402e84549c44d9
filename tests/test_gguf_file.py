"""Model files at the border: what is sound opens fast, everything else is one clear line and nothing worse."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.gguf_file import GGUFFile
from backends.gguf_types import GGML_TYPES, HEADER_BYTES_MAX, ValueType
from capabilities.errors import BadModelFile
from tests.gguf_samples import (
    F32,
    N_EXPERT,
    N_VOCAB,
    Q4_0,
    WIDTH,
    Sample,
    SampleTensor,
    fault_of,
    moe_sample,
    number,
    numbers,
    text,
    texts,
    u32,
)

Change = Callable[[Sample], object]
ENDLESS_S = 30.0  # of the processor: what grows with the square of a file's counts takes longer, all else a second


def _ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(min((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_name.restype = ctypes.c_char_p
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    library.gguf_free.argtypes = [ctypes.c_void_p]
    return library


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def test_a_sound_model_opens(tmp_path: Path) -> None:
    sample = moe_sample(quantised=True)
    with GGUFFile.open(sample.write(tmp_path / "model.gguf")) as gguf:
        assert gguf.architecture == "olmoe"
        assert gguf.stem == "model"
        assert gguf.metadata["olmoe.expert_count"] == N_EXPERT
        assert gguf.metadata["olmoe.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
        assert gguf.metadata["tokenizer.ggml.tokens"][:2] == ["<unk>", "<s>"]  # type: ignore[index]
        assert gguf.metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # type: ignore[index]
        assert gguf.metadata["tokenizer.ggml.merges"] == []
        assert gguf.metadata_types["tokenizer.ggml.scores"] == (ValueType.ARRAY, ValueType.FLOAT32)
        assert gguf.metadata_types["general.name"] == (ValueType.STRING, None)
        assert list(gguf.tensors) == [tensor.name for tensor in sample.tensors]
        for tensor in sample.tensors:
            info = gguf.tensors[str(tensor.name)]
            assert (info.shape, info.type, info.part) == (tensor.shape, tensor.type, 0)
            assert bytes(gguf.data(info)) == tensor.data


def test_parts_of_a_tensor(tmp_path: Path) -> None:
    sample = moe_sample()
    gguf = GGUFFile.open(sample.write(tmp_path / "model.gguf"))
    info = gguf.tensors["output.weight"]
    data = next(tensor.data for tensor in sample.tensors if tensor.name == "output.weight")
    assert bytes(gguf.data(info, 100, 7)) == data[100:107]
    target = bytearray(300)
    gguf.read_into(info, 50, memoryview(target))
    assert target == data[50:350]
    for offset, length in ((-1, 4), (0, info.nbytes + 1), (info.nbytes, 1), (8, -1)):
        with pytest.raises(ValueError, match=r"output\.weight has"):
            gguf.data(info, offset, length)
    view = gguf.data(info)
    gguf.close()
    assert bytes(view) == data  # a view outlives its file


def test_a_file_cut_short_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = moe_sample().write(tmp_path / "model.gguf")
    with GGUFFile.open(path) as gguf:
        last = list(gguf.tensors.values())[-1]
        os.truncate(path, last.offset + 10)
        with pytest.raises(BadModelFile, match="cut short"):
            gguf.read_into(last, 0, memoryview(bytearray(100)))


def test_types_are_those_of_the_installed_ggml() -> None:
    library = _ggml()
    known = {t: (library.ggml_blck_size(t), library.ggml_type_size(t)) for t in range(max(GGML_TYPES) + 1)}
    assert {t: size for t, size in known.items() if size[0]} == {t: (k.block, k.nbytes) for t, k in GGML_TYPES.items()}
    assert {t: library.ggml_type_name(t).decode() for t in GGML_TYPES} == {t: k.name for t, k in GGML_TYPES.items()}


def _tokens(count: int) -> bytes:
    return texts(f"token{index}" for index in range(count))


def _double_tensor(sample: Sample) -> None:
    sample.tensors[1] = SampleTensor("token_embd.weight", (WIDTH,), F32, sample.tensors[1].data)


def _rename(sample: Sample, name: str | bytes) -> None:
    sample.tensors[1] = SampleTensor(name, (WIDTH,), F32, sample.tensors[1].data)


HEADER_FAULTS: dict[str, tuple[Change, str]] = {
    "magic": (lambda s: setattr(s, "magic", b"GGUX"), "is not a GGUF file: it does not begin with the letters GGUF"),
    "web page": (lambda s: setattr(s, "magic", b"<!DO"), "is a web page"),
    "lfs pointer": (lambda s: setattr(s, "magic", b"vers"), "Git LFS pointer"),
    "ggml file": (lambda s: setattr(s, "magic", b"tjgg"), "before GGUF"),
    "version 1": (lambda s: setattr(s, "version", struct.pack("<I", 1)), "GGUF version 1"),
    "version 4": (lambda s: setattr(s, "version", struct.pack("<I", 4)), "GGUF version 4"),
    "big-endian": (lambda s: setattr(s, "version", struct.pack(">I", 3)), "big-endian"),
    "tensor count": (lambda s: setattr(s, "n_tensors", 1 << 62), "the limit is 16,384"),
    "tensor count too high": (lambda s: setattr(s, "n_tensors", 16_000), "tensor"),
    "key count": (lambda s: setattr(s, "n_keys", 1 << 40), "metadata keys; the limit is"),
    "empty key": (lambda s: s.keys.append(("", u32(1))), "is empty"),
    "double key": (lambda s: s.keys.append(("general.name", text("x"))), "general.name appears twice"),
    "long key": (lambda s: s.keys.append(("k" * 70_000, u32(1))), "70,000 bytes long"),
    "key not utf-8": (lambda s: s.keys.append((b"k\xff", u32(1))), "not UTF-8"),
    "key with nul": (lambda s: s.keys.append(("general.alignment\0", u32(7))), "control characters"),
    "key with newline": (lambda s: s.keys.append(("a\nb", u32(1))), "control characters: a\\nb"),
    "value type": (lambda s: s.set("general.name", struct.pack("<IQ", 13, 0)), "value type 13"),
    "element type": (lambda s: s.set("general.name", struct.pack("<IIQ", 9, 77, 1) + bytes(8)), "value type 77"),
    "nested array": (
        lambda s: s.set("general.name", struct.pack("<IIQ", 9, 9, 1) + numbers(4, [1])),
        "array of arrays",
    ),
    "array length": (lambda s: s.set("general.name", struct.pack("<IIQ", 9, 0, 1 << 60)), "elements"),
    "string array length": (lambda s: s.set("general.name", struct.pack("<IIQ", 9, 8, 8_000_000)), "damaged"),
    "string length": (lambda s: s.set("general.name", struct.pack("<IQ", 8, 1 << 63)), "damaged"),
    "alignment type": (lambda s: s.set("general.alignment", number(5, 32)), "type INT32; it must be UINT32"),
    "alignment zero": (lambda s: s.set("general.alignment", u32(0)), "general.alignment is 0"),
    "alignment 48": (lambda s: s.set("general.alignment", u32(48)), "general.alignment is 48"),
    "alignment 8": (lambda s: s.set("general.alignment", u32(8)), "general.alignment is 8"),
    "alignment huge": (lambda s: s.set("general.alignment", u32(1 << 31)), "general.alignment is 2147483648"),
    "zero dimension": (lambda s: s.tensor("output.weight", shape=(WIDTH, 0)), "dimension of zero"),
    "huge dimension": (lambda s: s.tensor("output.weight", shape=((1 << 42) + 1,)), "impossible dimensions"),
    "overflow": (lambda s: s.tensor("output.weight", shape=(1 << 32, 1 << 32, 2)), "impossible dimensions"),
    "wraps to small": (lambda s: s.tensor("output.weight", shape=(1 << 63, 2, 4)), "impossible dimensions"),
    "five dimensions": (lambda s: s.tensor("output.weight", shape=(8, 1, 1, 1, 1)), "has 5 dimensions"),
    "unknown tensor type": (lambda s: s.tensor("output.weight", type=99), "tensor type 99"),
    "removed tensor type": (lambda s: s.tensor("output.weight", type=4), "tensor type 4"),
    "cut blocks": (lambda s: s.tensor("output.weight", type=Q4_0, shape=(33, 2)), "not whole q4_0 blocks of 32"),
    "overlap": (lambda s: s.tensor("output_norm.weight", offset=0), "overlaps the tensor before it"),
    "gap": (lambda s: s.tensor("output_norm.weight", offset=1 << 20), "leaves a gap"),
    "misaligned": (lambda s: s.tensor("output_norm.weight", offset=N_VOCAB * WIDTH * 4 + 4), "not a multiple of"),
    "offset wraps": (lambda s: s.tensor("output_norm.weight", offset=(1 << 64) - 32), "leaves a gap"),
    "double tensor": (_double_tensor, "two tensors named token_embd.weight"),
    "tensor without name": (lambda s: _rename(s, ""), "has no name"),
    "long tensor name": (lambda s: _rename(s, "n" * 64), "64 bytes long; the limit is 63"),
    "tensor name not utf-8": (lambda s: _rename(s, b"\xc3("), "not UTF-8"),
    "tensor name with nul": (lambda s: _rename(s, "a\0"), "control characters"),
}

MODEL_FAULTS: dict[str, tuple[Change, str]] = {
    "no architecture": (lambda s: s.drop("general.architecture"), "has no general.architecture"),
    "architecture type": (lambda s: s.set("general.architecture", u32(3)), "general.architecture is not a string"),
    "architecture name": (lambda s: s.set("general.architecture", text("a\nb")), "not a name"),
    "mmproj": (lambda s: s.set("general.architecture", text("clip")), "companion file (mmproj)"),
    "adapter": (lambda s: s.set("general.type", text("adapter")), "companion file (adapter)"),
    "no tensors": (lambda s: s.tensors.clear(), "has no tensors"),
    "no block_count": (lambda s: s.drop("olmoe.block_count"), "has no olmoe.block_count"),
    "block_count 0": (lambda s: s.set("olmoe.block_count", u32(0)), "olmoe.block_count is 0"),
    "block_count 513": (lambda s: s.set("olmoe.block_count", u32(513)), "olmoe.block_count is 513"),
    "block_count type": (lambda s: s.set("olmoe.block_count", number(10, 2)), "type UINT64; it must be UINT32"),
    "block_count too low": (lambda s: s.set("olmoe.block_count", u32(1)), "block_count (1) rules out"),
    "nextn": (lambda s: s.set("olmoe.nextn_predict_layers", u32(3)), "nextn_predict_layers is 3"),
    "no context": (lambda s: s.drop("olmoe.context_length"), "has no olmoe.context_length"),
    "context 0": (lambda s: s.set("olmoe.context_length", u32(0)), "context_length is 0"),
    "context huge": (lambda s: s.set("olmoe.context_length", u32(1 << 31)), "context_length is 2,147,483,648"),
    "width string": (lambda s: s.set("olmoe.embedding_length", text("64")), "embedding_length has type STRING"),
    "width 0": (lambda s: s.set("olmoe.embedding_length", u32(0)), "embedding_length is 0"),
    "vocabulary huge": (lambda s: s.set("olmoe.vocab_size", u32(1 << 31)), "vocab_size is 2,147,483,648"),
    "widths array": (lambda s: s.set("olmoe.feed_forward_length", numbers(4, [1])), "must have 2 elements"),
    "heads floats": (lambda s: s.set("olmoe.attention.head_count", numbers(6, [1, 1])), "UINT32 or INT32"),
    "key length": (
        lambda s: s.set("olmoe.attention.head_count_kv", u32(65535)).set("olmoe.attention.key_length", u32(64)),
        "8,388,480 numbers a token for attention (key_length)",
    ),
    "value length": (lambda s: s.set("olmoe.attention.value_length", u32(1 << 20)), "for attention (value_length)"),
    "key length type": (lambda s: s.set("olmoe.attention.key_length", number(5, 8)), "key_length has type INT32"),
    "recurrent state": (
        lambda s: s.set("olmoe.ssm.inner_size", u32(1 << 20)).set("olmoe.ssm.state_size", u32(256)),
        "wants 536,870,912 numbers a sequence for recurrent layers",
    ),
    "state size": (lambda s: s.set("olmoe.ssm.inner_size", u32(1 << 31)), "ssm.inner_size is 2,147,483,648"),
    "epsilon": (lambda s: s.set("olmoe.attention.layer_norm_rms_epsilon", number(6, -1e-5)), "is -1e-05; it must"),
    "epsilon nan": (lambda s: s.set("olmoe.attention.layer_norm_rms_epsilon", number(6, math.nan)), "is nan; it must"),
    "gating": (lambda s: s.set("olmoe.expert_gating_func", u32(5)), "expert_gating_func is 5"),
    "rope scaling": (lambda s: s.set("olmoe.rope.scaling.type", text("round")), '"round", none of none, linear'),
    "experts type": (lambda s: s.set("olmoe.expert_count", number(0, 4)), "expert_count has type UINT8"),
    "experts 0": (lambda s: s.set("olmoe.expert_count", u32(0)), "more than olmoe.expert_count (0)"),
    "experts 2048": (lambda s: s.set("olmoe.expert_count", u32(2048)), "expert_count is 2,048"),
    "other expert count": (lambda s: s.set("olmoe.expert_count", u32(8)), "holds 4 experts; olmoe.expert_count is 8"),
    "no expert count": (lambda s: s.drop("olmoe.expert_count"), "more than olmoe.expert_count (0)"),
    "used too many": (lambda s: s.set("olmoe.expert_used_count", u32(5)), "is 5, more than olmoe.expert_count (4)"),
    "used 0": (lambda s: s.set("olmoe.expert_used_count", u32(0)), "no olmoe.expert_used_count above zero"),
    "used array": (lambda s: s.set("olmoe.expert_used_count", numbers(4, [2, 9])), "is 9, more than"),
    "used negative": (lambda s: s.set("olmoe.expert_used_count", numbers(5, [2, -9])), "outside 0 to"),
    "groups": (lambda s: s.set("olmoe.expert_group_count", u32(3)), "0 of 3 groups of 4 experts"),
    "expert rank": (
        lambda s: s.tensor("blk.0.ffn_up_exps.weight", shape=(WIDTH * 32 * N_EXPERT,)), "holds 1 experts"
    ),
    "expert width": (lambda s: s.tensor("blk.1.ffn_down_exps.weight", shape=(WIDTH, 32, N_EXPERT)), "fit together"),
    "expert type": (lambda s: s.tensor("blk.1.ffn_down_exps.weight", type=26), "has type 26"),
    "half an expert": (lambda s: s.tensor("blk.1.ffn_down_exps.weight", name="x.weight"), "no ffn_down_exps.weight"),
    "no tokenizer": (lambda s: s.drop("tokenizer.ggml.model"), "has no tokenizer.ggml.model"),
    "tokenizer type": (lambda s: s.set("tokenizer.ggml.model", u32(1)), "tokenizer.ggml.model is not a string"),
    "template": (lambda s: s.set("tokenizer.chat_template", u32(1)), "chat_template is not a string"),
    "no tokens": (lambda s: s.drop("tokenizer.ggml.tokens"), "has no tokens"),
    "tokens uint8": (lambda s: s.set("tokenizer.ggml.tokens", numbers(0, [1] * N_VOCAB)), "an array of UINT8"),
    "tokens scalar": (lambda s: s.set("tokenizer.ggml.tokens", text("a")), "tokens is STRING; it must be an array"),
    "scores uint8": (lambda s: s.set("tokenizer.ggml.scores", numbers(0, [1] * N_VOCAB)), "an array of UINT8"),
    "scores short": (lambda s: s.set("tokenizer.ggml.scores", numbers(6, [0.0])), "1 elements for 40 tokens"),
    "types uint8": (lambda s: s.set("tokenizer.ggml.token_type", numbers(0, [1] * N_VOCAB)), "an array of UINT8"),
    "types short": (lambda s: s.set("tokenizer.ggml.token_type", numbers(5, [1, 1])), "2 elements for 40 tokens"),
    "merges numbers": (lambda s: s.set("tokenizer.ggml.merges", numbers(4, [1])), "an array of STRING"),
    "double token": (lambda s: s.set("tokenizer.ggml.tokens", texts(["a"] * N_VOCAB)), "token 1 of"),
    "token cut at nul": (
        lambda s: s.set("tokenizer.ggml.tokens", texts(["a", "a\0b", *map(str, range(N_VOCAB - 2))])), "repeats another"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HEADER_FAULTS, *MODEL_FAULTS])
def test_each_fault_is_one_clear_line(tmp_path: Path, name: str) -> None:
    change, expected = (HEADER_FAULTS | MODEL_FAULTS)[name]
    sample = moe_sample()
    change(sample)
    message = fault_of(sample.write(tmp_path / "broken.gguf"))
    assert message.startswith("broken.gguf: ")
    assert expected in message


def test_missing_bytes_are_counted(tmp_path: Path) -> None:
    data = moe_sample().to_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[:-1000])
    assert "1,000 of its" in fault_of(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = moe_sample(quantised=True).to_bytes()
    path = tmp_path / "short.gguf"
    for size in [*range(200), *range(200, len(data), 997)]:
        path.write_bytes(data[:size])
        message = fault_of(path)
        assert "truncated" in message or "is empty" in message or "not a GGUF" in message


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    assert "no such file" in fault_of(tmp_path / "absent.gguf")
    with pytest.raises(BadModelFile) as caught:
        GGUFFile.open(tmp_path / "absent.gguf")
    assert caught.value.hint == "Check the path."
    assert "is a directory" in fault_of(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in fault_of(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read: " in fault_of(tmp_path / "loop")
    assert "not a possible path" in fault_of(tmp_path / "a\0b")
    with (tmp_path / "huge.gguf").open("wb") as file:
        file.write(moe_sample().to_bytes())
        file.truncate(1 << 40)  # a hole of a terabyte: mapped, or refused, but never read
    GGUFFile.open(tmp_path / "huge.gguf").close()


def test_a_strange_file_name_stays_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "new\nline.gguf"
    path.write_bytes(b"nothing")
    assert fault_of(path).startswith("new\\nline.gguf: is not a GGUF file")


def test_a_header_of_endless_strings_is_bounded_in_time(tmp_path: Path) -> None:
    sample = moe_sample().set("general.name", struct.pack("<IIQ", 9, 8, 1 << 23) + bytes(8 << 23))
    sample.set("olmoe.more", struct.pack("<IIQ", 9, 8, 1))
    before = time.process_time()
    assert "elements" in fault_of(sample.write(tmp_path / "slow.gguf"))
    assert time.process_time() - before < 6
    path = tmp_path / "large.gguf"
    path.write_bytes(moe_sample().set("general.name", struct.pack("<IQ", 8, HEADER_BYTES_MAX)).to_bytes())
    os.truncate(path, 2 * HEADER_BYTES_MAX)
    assert "more than 256 MiB" in fault_of(path)


def test_a_large_vocabulary_opens(tmp_path: Path) -> None:
    sample = moe_sample().set("tokenizer.ggml.tokens", _tokens(150_000)).set("tokenizer.ggml.merges", _tokens(300_000))
    sample.set("tokenizer.ggml.scores", numbers(6, [0.0] * 150_000)).drop("tokenizer.ggml.token_type")
    path = sample.write(tmp_path / "model.gguf")
    before = time.process_time()
    GGUFFile.open(path).close()
    assert time.process_time() - before < 1


def test_thousands_of_tensors_open(tmp_path: Path) -> None:
    sample = moe_sample()
    sample.tensors += [SampleTensor(f"extra.{index}.weight", (8,), F32, bytes(32)) for index in range(16_000)]
    path = sample.write(tmp_path / "model.gguf")
    before = time.process_time()
    GGUFFile.open(path).close()
    assert time.process_time() - before < 1


def test_hints_say_what_to_name_instead(tmp_path: Path) -> None:
    companion = moe_sample().set("general.architecture", text("clip")).write(tmp_path / "mmproj.gguf")
    second = moe_sample().set("split.count", number(2, 2)).set("split.no", number(2, 1))
    for path, hint in (
        (companion, "Name the model's own GGUF file."),
        (second.write(tmp_path / "m-00002-of-00002.gguf"), "Name the first part: the others are found beside it."),
    ):
        with pytest.raises(BadModelFile) as caught:
            GGUFFile.open(path)
        assert caught.value.hint == hint


def test_other_files_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "model-00002-of-00002.gguf").write_bytes(b"rubbish")
    GGUFFile.open(moe_sample().write(tmp_path / "model.gguf")).close()
    GGUFFile.open(moe_sample().write(tmp_path / "model-00001-of-00002.gguf")).close()  # says nothing of parts


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_bytes_open_or_are_refused_and_ggml_agrees(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens to a header: BadModelFile, or a file that ggml's own reader takes as well."""
    original = moe_sample(quantised=True).to_bytes()
    header = original.index(b"output_norm.weight") + 1_500  # keys and tensor descriptions; data comes after
    raw = bytearray(original)
    interesting = st.sampled_from([0, 1, 2, 8, 9, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header))] = data.draw(interesting)
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[:cut])
    try:
        GGUFFile.open(path).close()
    except BadModelFile:
        return
    library = _ggml()
    context = library.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    assert context
    library.gguf_free(context)
