"""Trunks: what is copied, what shrinks, what llama.cpp says to it, and what happens when the disk is full."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as lc

from backends.gguf_file import GGUFFile
from backends.trunk_file import (
    COPY_BYTES,
    Change,
    TrunkForm,
    expert_layers,
    is_expert_tensor,
    trunk_forms,
    write_outline,
    write_trunk,
)
from capabilities.errors import BadModelFile, UsageError
from tests.gguf_samples import (
    F32,
    FF,
    N_EXPERT,
    N_LAYERS,
    WIDTH,
    Sample,
    SampleTensor,
    moe_sample,
    numbers,
    u32,
    write_split,
)
from tests.tiny_architectures import KINDS, write_tiny_model

F16 = 1


def loads(path: Path) -> bool:
    """True if llama.cpp itself loads the file and makes a context of it."""
    lc.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = lc.llama_model_default_params()
    params.use_extra_bufts = False
    model = lc.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        return False
    settings = lc.llama_context_default_params()
    settings.n_ctx, settings.n_threads = 32, 1
    context = lc.llama_init_from_model(model, settings)
    if context:
        lc.llama_free(context)
    lc.llama_model_free(model)
    return bool(context)


@lc.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, line: bytes, user_data: object) -> None:
    pass


def _with_tensors(*tensors: SampleTensor) -> Sample:
    sample = moe_sample()
    sample.tensors += tensors
    return sample


def _expert_extra(suffix: str, *shape: int, layer: int = 0) -> SampleTensor:
    size = 4
    for extent in shape:
        size *= extent
    return SampleTensor(f"blk.{layer}.ffn_{suffix}", shape, F32, os.urandom(size))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.ffn_gate_exps.weight", True),
        ("blk.511.ffn_gate_up_exps.bias", True),
        ("blk.3.ffn_down_exps.scale", True),
        ("blk.3.ffn_up_exps.input_scale", True),
        ("blk.0.ffn_gate_chexps.weight", False),
        ("blk.0.ffn_down_shexp.weight", False),
        ("blk.0.ffn_norm_exps.weight", False),
        ("blk.0.exp_probs_b.bias", False),
        ("blk.0.ffn_gate_inp.weight", False),
        ("blk.00.ffn_gate_exps.weight", False),
        ("xblk.0.ffn_gate_exps.weight", False),
        ("blk.0.ffn_gate_exps.weight2", False),
    ],
)
def test_which_tensors_are_experts(name: str, expected: bool) -> None:
    assert is_expert_tensor(name) is expected


@pytest.mark.parametrize("quantised", [False, True])
def test_llama_cpp_loads_the_trunk_and_all_else_is_copied(tmp_path: Path, quantised: bool) -> None:
    source, target = tmp_path / "model.gguf", tmp_path / "trunk.gguf"
    with GGUFFile.open(moe_sample(quantised).write(source)) as gguf:
        assert expert_layers(gguf) == (0, 1)
        forms = trunk_forms(gguf)
        loaded = []
        for form in forms:
            write_outline(gguf, target, form)
            loaded.append(loads(target))
        assert [form.name for form, good in zip(forms, loaded, strict=True) if good] == ["layer width"]
        write_trunk(gguf, target, forms[0])
        assert loads(target)
        with GGUFFile.open(target) as trunk:
            changed = {"olmoe.feed_forward_length"}
            assert trunk.metadata["olmoe.feed_forward_length"] == [1] * N_LAYERS
            assert set(trunk.metadata) == set(gguf.metadata)
            for key in set(gguf.metadata) - changed:
                assert trunk.raw_metadata(key) == gguf.raw_metadata(key)
            assert list(trunk.tensors) == list(gguf.tensors)
            for name, info in gguf.tensors.items():
                new = trunk.tensors[name]
                if is_expert_tensor(name):
                    assert new.type == F16
                    assert new.shape == ((1, WIDTH, N_EXPERT) if "down" in name else (WIDTH, 1, N_EXPERT))
                    assert not any(trunk.data(new))
                else:
                    assert (new.shape, new.type) == (info.shape, info.type)
                    assert trunk.data(new) == gguf.data(info)


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_fits_every_kind_of_expert_block(tmp_path: Path, kind: str) -> None:
    with GGUFFile.open(write_tiny_model(tmp_path / "model.gguf", kind)) as gguf:
        tried = []
        for form in trunk_forms(gguf):
            write_outline(gguf, tmp_path / "trunk.gguf", form)
            tried.append(loads(tmp_path / "trunk.gguf"))
            if tried[-1]:
                write_trunk(gguf, tmp_path / "trunk.gguf", form)
                assert loads(tmp_path / "trunk.gguf")
                break
        assert any(tried) is (kind != "llama4")  # its shared expert has the experts' width by definition


def test_biases_and_merged_projections_shrink_and_scales_stay(tmp_path: Path) -> None:
    sample = moe_sample()
    merged = SampleTensor(
        "blk.0.ffn_gate_up_exps.weight", (WIDTH, 2 * FF, N_EXPERT), F32, bytes(8 * WIDTH * FF * N_EXPERT)
    )
    sample.tensors = [
        t for t in sample.tensors if t.name not in ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
    ]
    down_bias, scale = _expert_extra("down_exps.bias", WIDTH, N_EXPERT), _expert_extra("down_exps.scale", N_EXPERT)
    sample.tensors += [
        merged,
        down_bias,
        scale,
        _expert_extra("gate_up_exps.bias", 2 * FF, N_EXPERT),
        _expert_extra("up_exps.bias", FF, N_EXPERT, layer=1),
        _expert_extra("up_exps.input_scale", N_EXPERT, layer=1),
    ]
    with GGUFFile.open(sample.write(tmp_path / "model.gguf")) as gguf:
        write_trunk(gguf, tmp_path / "trunk.gguf", trunk_forms(gguf)[0])
    with GGUFFile.open(tmp_path / "trunk.gguf") as trunk:
        shapes = {
            name.removeprefix("blk."): info.shape for name, info in trunk.tensors.items() if is_expert_tensor(name)
        }
        assert shapes["0.ffn_gate_up_exps.weight"] == (WIDTH, 2, N_EXPERT)
        assert shapes["0.ffn_gate_up_exps.bias"] == (2, N_EXPERT)
        assert shapes["0.ffn_down_exps.bias"] == (WIDTH, N_EXPERT)
        assert shapes["1.ffn_up_exps.bias"] == (1, N_EXPERT)
        assert shapes["0.ffn_down_exps.scale"] == shapes["1.ffn_up_exps.input_scale"] == (N_EXPERT,)
        assert trunk.data(trunk.tensors["blk.0.ffn_down_exps.scale"]) == scale.data


def _names(sample: Sample, folder: Path) -> list[str]:
    with GGUFFile.open(sample.write(folder / "forms.gguf")) as gguf:
        return [form.name for form in trunk_forms(gguf)]


def test_forms_follow_what_the_file_says(tmp_path: Path) -> None:
    shared = SampleTensor("blk.0.ffn_down_shexp.weight", (96, 8), F32, bytes(96 * 8 * 4))
    dense = moe_sample()
    dense.tensors = [tensor for tensor in dense.tensors if "_exps" not in str(tensor.name)]
    assert _names(dense, tmp_path) == []
    assert _names(moe_sample(), tmp_path) == ["layer width", "expert width"]
    with_width = moe_sample().set("olmoe.expert_feed_forward_length", u32(FF))
    assert _names(with_width, tmp_path) == ["expert width", "layer width"]
    without_any = moe_sample().drop("olmoe.feed_forward_length")
    assert _names(without_any, tmp_path) == ["expert width"]
    by_count = (
        _with_tensors(shared).set("olmoe.expert_feed_forward_length", u32(FF)).set("olmoe.expert_shared_count", u32(3))
    )
    assert _names(by_count, tmp_path)[:3] == [
        "expert width, shared count",
        "expert width",
        "expert width, shared width",
    ]
    by_width = by_count.set("olmoe.expert_shared_feed_forward_length", u32(96))
    assert _names(by_width, tmp_path) == ["expert width", "layer width"]
    assert (
        _names(by_width.set("olmoe.expert_shared_feed_forward_length", u32(0)), tmp_path)[0]
        == "expert width, shared count"
    )


def test_forms_carry_the_right_numbers(tmp_path: Path) -> None:
    sample = _with_tensors(SampleTensor("blk.0.ffn_down_shexp.weight", (96, 8), F32, bytes(96 * 8 * 4)))
    sample.tensors = [t for t in sample.tensors if not str(t.name).startswith("blk.0.ffn_") or "shexp" in str(t.name)]
    sample.tensors.append(SampleTensor("blk.1.ffn_down_shexp.weight", (160, 8), F32, bytes(160 * 8 * 4)))
    sample.set("olmoe.expert_feed_forward_length", numbers(4, [0, FF])).set("olmoe.expert_shared_count", u32(0))
    with GGUFFile.open(sample.write(tmp_path / "model.gguf")) as gguf:
        assert expert_layers(gguf) == (1,)
        forms = {form.name: form.changes for form in trunk_forms(gguf)}
    narrow = Change("olmoe.expert_feed_forward_length", (1, 1), array=True)
    assert forms["expert width, shared count"] == (narrow, Change("olmoe.expert_shared_count", (160,)))
    assert forms["layer width"] == (Change("olmoe.feed_forward_length", (FF, 1), array=True), narrow)


def test_layers_that_no_graph_runs_shrink_too(tmp_path: Path) -> None:
    sample = moe_sample().set("olmoe.nextn_predict_layers", u32(1))
    with GGUFFile.open(sample.write(tmp_path / "model.gguf")) as gguf:
        write_trunk(gguf, tmp_path / "trunk.gguf", trunk_forms(gguf)[0])
    with GGUFFile.open(tmp_path / "trunk.gguf") as trunk:
        assert trunk.tensors["blk.1.ffn_up_exps.weight"].shape == (WIDTH, 1, N_EXPERT)


def test_a_split_model_gives_the_trunk_of_the_whole(tmp_path: Path) -> None:
    sample = moe_sample()
    paths = write_split(sample, tmp_path, 3)
    with GGUFFile.open(paths[0]) as gguf, GGUFFile.open(sample.write(tmp_path / "whole.gguf")) as whole:
        form = trunk_forms(gguf)[0]
        write_trunk(gguf, tmp_path / f"{gguf.stem}.trunk.gguf", form)
        write_trunk(whole, tmp_path / "whole.trunk.gguf", form)
    assert (tmp_path / "model.trunk.gguf").read_bytes() == (tmp_path / "whole.trunk.gguf").read_bytes()
    assert loads(tmp_path / "model.trunk.gguf")


def test_alignment_is_kept(tmp_path: Path) -> None:
    sample = moe_sample().set("general.alignment", u32(256))
    sample.alignment = 256
    with GGUFFile.open(sample.write(tmp_path / "model.gguf")) as gguf:
        write_trunk(gguf, tmp_path / "trunk.gguf", trunk_forms(gguf)[0])
    with GGUFFile.open(tmp_path / "trunk.gguf") as trunk:
        assert all(info.offset % 256 == 0 for info in trunk.tensors.values())
        assert bytes(trunk.data(trunk.tensors["output.weight"])) == sample.tensors[2].data


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which this system lacks")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    sample = _with_tensors(SampleTensor("large.weight", (24 << 20,), F32))  # 96 MiB, a hole in the file
    os.truncate(sample.write(tmp_path / "model.gguf"), (tmp_path / "model.gguf").stat().st_size + (96 << 20))
    seen: list[tuple[int, int, int]] = []
    with GGUFFile.open(tmp_path / "model.gguf") as gguf:
        before = _anonymous_bytes()
        write_trunk(
            gguf,
            tmp_path / "trunk.gguf",
            trunk_forms(gguf)[0],
            lambda done, total: seen.append((done, total, _anonymous_bytes())),
        )
    assert max(memory for _, _, memory in seen) < before + 4 * COPY_BYTES
    done = [count for count, _, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[0][1] > 96 << 20
    assert (tmp_path / "trunk.gguf").stat().st_size > 96 << 20


@contextmanager
def _files_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    with GGUFFile.open(moe_sample().write(tmp_path / "model.gguf")) as gguf:
        form = trunk_forms(gguf)[0]
        with _files_at_most(20_000), pytest.raises(UsageError) as caught:
            write_trunk(gguf, tmp_path / "trunk.gguf", form)
        assert "cannot write" in caught.value.message
        assert "free some space" in caught.value.hint
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
        with pytest.raises(UsageError, match="cannot write"):
            write_trunk(gguf, tmp_path / "model.gguf" / "trunk.gguf", form)


def test_an_interrupted_write_leaves_the_old_trunk(tmp_path: Path) -> None:
    target = tmp_path / "trunk.gguf"
    target.write_bytes(b"old")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with GGUFFile.open(moe_sample().write(tmp_path / "model.gguf")) as gguf:
        with pytest.raises(KeyboardInterrupt):
            write_trunk(gguf, target, trunk_forms(gguf)[0], interrupt)
        os.truncate(tmp_path / "model.gguf", 20_000)
        with pytest.raises(BadModelFile, match="cut short"):
            write_trunk(gguf, target, trunk_forms(gguf)[0])
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "trunk.gguf"]


def test_a_form_may_add_a_key(tmp_path: Path) -> None:
    with GGUFFile.open(moe_sample().write(tmp_path / "model.gguf")) as gguf:
        write_outline(gguf, tmp_path / "trunk.gguf", TrunkForm("", (Change("olmoe.new", (5,)),)))
    with GGUFFile.open(tmp_path / "trunk.gguf") as trunk:
        assert trunk.metadata["olmoe.new"] == 5
