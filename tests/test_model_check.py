"""`model check`: bit-identical over many architectures, and every way to be wrong is reported as what it is."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from gguf import GGUFReader

from backends.child import Report, parse_line, run_child, verdict_of_death
from backends.experts import F32, I32, GgmlExperts
from capabilities.errors import BadModelFile, Internal, SwarmError, UnsupportedModel
from swarmnode import model_check, models
from swarmnode.local_experts import LocalExperts
from swarmnode.model_check import CheckReport, check_model
from tests import tiny_models
from tests.expert_models import quiet, tiny_file
from tests.gguf_samples import moe_sample, numbers
from tests.patience import PATIENCE_S
from tests.tiny_architectures import KINDS, write_olmoe, write_tiny_model
from tests.tiny_models import N_EXPERT, TinyWriter

KEYS = {"architecture", "moe_layers", "experts", "experts_used", "bit_identical", "max_abs_diff", "supported", "reason"}
MOE_LAYERS = {"olmoe": 3, "deepseek2": 2, "deepseek2-merged": 2, "lfm2moe": 2, "step35": 2}


def as_json(report: CheckReport) -> dict[str, Any]:
    """What `--json` prints: strict JSON, so no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    values: dict[str, Any] = json.loads(json.dumps(asdict(report)), parse_constant=refuse)
    return values


# -- models that pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_architectures_are_bit_identical_over_three_workers(kind: str) -> None:
    report = check_model(tiny_file(kind), 3, quiet)
    assert report.passed
    values = as_json(report)
    assert values.keys() >= KEYS
    expected = {
        "architecture": KINDS[kind][0], "moe_layers": MOE_LAYERS.get(kind, 2), "experts": 8, "experts_used": 3,
        "bit_identical": True, "max_abs_diff": 0.0, "supported": True, "reason": None, "workers": 3, "layers": [],
    }  # fmt: skip
    assert values | expected == values


@pytest.mark.parametrize("quantisation", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "mxfp4", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss", "deepseek2-merged", "grovemoe"])
def test_quantised_models_are_bit_identical(kind: str, quantisation: str) -> None:
    assert check_model(tiny_file(kind, quantisation), 3, quiet).passed


@pytest.mark.parametrize("workers", [1, 8, 20])
def test_any_number_of_workers_will_do(workers: int) -> None:
    """One that holds all, one expert each, and more workers than experts."""
    report = check_model(tiny_file("qwen3moe", "q4_0"), workers, quiet)
    assert report.passed
    assert report.workers == workers


@pytest.mark.parametrize("quantisation", ["f32", "q4_0", "q4_k"])
def test_a_single_expert_a_layer(quantisation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp repacks no such tensor, since it has two dimensions."""
    monkeypatch.setattr(tiny_models, "N_EXPERT", 1)
    monkeypatch.setattr(tiny_models, "N_USED", 1)
    path = write_olmoe(tmp_path / "single.gguf", 1, quantisation=quantisation, widths=(256, 256))
    report = check_model(path, 2, quiet)
    assert report.passed
    assert (report.experts, report.experts_used) == (1, 1)


def test_progress_is_told() -> None:
    steps: dict[str, tuple[int, int]] = {}
    check_model(tiny_file("olmoe"), 2, lambda step, done, total: steps.update({step: (done, total)}))
    assert list(steps) == [
        "llama.cpp on the undivided model", "writing the trunk", "hashing the experts", "loading the experts",
        "the swarm's answer",
    ]  # fmt: skip
    assert all(done == total for done, total in steps.values())


def write_draft_model(path: Path) -> Path:
    """GLM 4.5: three layers, and a fourth that predicts one token more and that ordinary passes skip."""
    w = TinyWriter(path, "glm4moe", seed=0, quantisation="f32", width=64, ff=32)
    w.keys(
        4, expert_feed_forward_length=w.ff, expert_shared_count=1, leading_dense_block_count=1,
        nextn_predict_layers=1, rope__dimension_count=w.head,
    )  # fmt: skip
    w.embeddings()
    for layer in range(4):
        block = f"blk.{layer}."
        w.norms(block, "attn_norm", "post_attention_norm")
        w.attention(block)
        if layer == 0:
            w.dense_ffn(block, 2 * w.width)
            continue
        w.router(block)
        w.vector(f"{block}exp_probs_b.bias", N_EXPERT, std=0.2)
        w.experts(block)
        w.dense_ffn(block, w.ff, "_shexp")
    w.matrix("blk.3.nextn.eh_proj", 2 * w.width, w.width)
    w.norms("blk.3.", "nextn.enorm", "nextn.hnorm")
    w.finish()
    return path


def test_draft_layers_need_not_dispatch(tmp_path: Path) -> None:
    report = check_model(write_draft_model(tmp_path / "glm.gguf"), 3, quiet)
    assert report.passed
    assert report.moe_layers == 2


# -- models that cannot be served -------------------------------------------------------------------------------------


def test_an_architecture_whose_trunk_cannot_be_cut_is_unsupported() -> None:
    values = as_json(check_model(tiny_file("llama4"), 3, quiet))
    assert not values["supported"]
    assert values["bit_identical"] is None
    assert "llama4 ties another tensor to the experts' width" in values["reason"]
    assert "ffn_gate_shexp.weight' has wrong shape" in values["reason"]
    assert "\n" not in values["reason"]


def test_a_dense_model_is_unsupported(tmp_path: Path) -> None:
    w = TinyWriter(tmp_path / "dense.gguf", "llama", seed=0, quantisation="f32", width=64, ff=32)
    w.keys(1, expert_count=0, expert_used_count=0)
    w.embeddings()
    w.norms("blk.0.", "attn_norm", "ffn_norm")
    w.attention("blk.0.")
    w.dense_ffn("blk.0.", 2 * w.width)
    w.finish()
    values = as_json(check_model(tmp_path / "dense.gguf", 3, quiet))
    assert values["reason"] == "dense.gguf has no routed experts: it is a dense model (llama)"
    assert (values["architecture"], values["supported"], values["bit_identical"]) == ("llama", False, None)


def test_experts_that_never_dispatch_are_no_pass(tmp_path: Path) -> None:
    """refact's loader takes experts, and its graph ignores them."""
    w = TinyWriter(tmp_path / "refact.gguf", "refact", seed=0, quantisation="f32", width=64, ff=32)
    w.keys(2, feed_forward_length=w.ff)
    w.embeddings()
    for block in ("blk.0.", "blk.1."):
        w.norms(block, "attn_norm", "ffn_norm")
        w.attention(block)
        w.router(block)
        w.experts(block)
    w.finish()
    values = as_json(check_model(tmp_path / "refact.gguf", 3, quiet))
    assert not values["supported"]
    assert values["moe_layers"] == 0
    assert values["reason"] == "layers 0, 1 hold routed experts that refact never dispatches"


def test_an_architecture_that_llama_cpp_does_not_know_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_file("olmoe").read_bytes().replace(b"olmoe", b"olmox"))
    values = as_json(check_model(path, 3, quiet))
    assert (values["architecture"], values["supported"]) == ("olmox", False)
    assert "unknown model architecture" in values["reason"]


def test_a_model_that_computes_nonsense_is_no_pass(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "olmoe")
    reader = GGUFReader(path, "r+")
    next(t for t in reader.tensors if t.name == "blk.1.ffn_norm.weight").data[3] = np.nan
    reader.data.flush()
    values = as_json(check_model(path, 3, quiet))
    assert not values["supported"]
    assert values["reason"] == "llama.cpp's own logits on the undivided model are not finite"


def test_a_broken_file_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_file("olmoe").read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match=r"cut\.gguf"):
        check_model(path, 3, quiet)


# -- planted faults ---------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, F32, I32], F32]) -> None:
    """Let every layer's outputs pass through `fault(layer, y, ids)`."""

    class Faulty(LocalExperts):
        def dispatch(self, layer: int, x: F32, ids: I32) -> None:
            super().dispatch(layer, x, ids)
            self._results[layer] = np.ascontiguousarray(fault(layer, self._results[layer], ids))

    monkeypatch.setattr(model_check, "LocalExperts", Faulty)


def one_value(layer: int, y: F32, ids: I32) -> F32:
    y[-1, 0, 7] *= np.float32(1.001)
    return y


def damaged_expert(layer: int, y: F32, ids: I32) -> F32:
    return np.where((ids == 5)[..., None], y * np.float32(1.01), y)


FAULTS: dict[str, Callable[[int, F32, I32], F32]] = {
    "two experts' rows swapped": lambda layer, y, ids: y[:, [1, 0, 2]],
    "tokens out of order": lambda layer, y, ids: y[::-1],
    "one expert's weights damaged": damaged_expert,
    "one value by a thousandth": one_value,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported_with_its_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda layer, y, ids: FAULTS[name](layer, y, ids) if layer == 1 else y)
    report = check_model(tiny_file("olmoe"), 3, quiet)
    assert report.supported
    assert report.bit_identical is False
    assert not report.passed
    values = as_json(report)
    assert values["max_abs_diff"] > 0
    assert values["reason"].startswith("expert outputs differ first at layer 1, by up to ")
    differences = {row["layer"]: row["max_abs_diff"] for row in values["layers"]}
    assert differences.keys() == {0, 1, 2}
    assert differences[0] == 0 < differences[1]


def test_rows_that_are_not_finite_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = GgmlExperts.compute

    def broken(self: GgmlExperts, layer: int, *rows: Any) -> F32:
        y = compute(self, layer, *rows)
        return y * np.float32(np.nan) if layer == 1 else y

    monkeypatch.setattr(GgmlExperts, "compute", broken)
    report = check_model(tiny_file("olmoe"), 3, quiet)
    assert (report.supported, report.bit_identical, report.max_abs_diff) == (True, False, None)
    values = as_json(report)
    assert "worker-0 answered" in values["reason"]
    assert "NaN or infinite" in values["reason"]
    assert "layer 1" in values["reason"]


def test_a_fault_in_decoding_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda layer, y, ids: y[:, ::-1] if layer == 2 and len(y) == 1 else y)
    report = check_model(tiny_file("olmoe"), 3, quiet)
    assert report.prefill_bit_identical
    assert report.decode_bit_identical is False
    assert report.bit_identical is False
    assert report.reason is not None
    assert "first at layer 2" in report.reason


def test_a_difference_outside_the_experts_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = model_check._run

    def other_trunk(path: Path, hook: Any, model_bytes: int) -> tuple[F32, F32]:
        prefill, decode = run(path, hook, model_bytes)
        return (prefill + np.float32(1e-3), decode) if path.name == "trunk.gguf" else (prefill, decode)

    monkeypatch.setattr(model_check, "_run", other_trunk)
    report = check_model(tiny_file("olmoe"), 3, quiet)
    assert report.reason == "the logits differ although every layer's expert outputs agree"
    assert report.max_abs_diff == pytest.approx(1e-3, rel=1e-2)


# -- the child process ------------------------------------------------------------------------------------------------


def run_as_child(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode.model_check", *arguments],
        cwd=Path(__file__).parents[1], capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.returncode, [parse_line(line) for line in done.stdout.splitlines()]


def test_the_child_writes_lines_and_a_verdict() -> None:
    status, lines = run_as_child(str(tiny_file("olmoe")), "2")
    assert status == 0
    assert all(line.keys() == {"progress"} for line in lines[:-1])
    assert lines[-1]["result"]["bit_identical"] is True


def test_the_childs_error_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "junk.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    status, lines = run_as_child(str(path), "2")
    assert status == 1
    error = SwarmError.from_json(lines[-1]["error"])
    assert isinstance(error, BadModelFile)
    assert "\n" not in error.message
    assert "junk.gguf" in error.message


async def end_of(code: str) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        await models.run_child([sys.executable, "-c", code], "model.gguf", quiet)
    return caught.value


async def test_a_crash_of_the_child_is_one_line() -> None:
    for name in ("SIGABRT", "SIGSEGV", "SIGFPE"):
        error = await end_of(f"import os, signal; print('noise'); os.kill(os.getpid(), signal.{name})")
        assert isinstance(error, BadModelFile)
        assert error.message == f"llama.cpp crashed on model.gguf ({name}): the file is damaged or unsupported"
    error = await end_of(
        "import time; from backends import child; child._ENDLESS_S = 0.1\n"
        "def work(report):\n  with child.coming_back(1000): time.sleep(0)\n"
        "  time.sleep(0.2)\n"
        "  with child.coming_back(1000): time.sleep(100)\n"
        "child.run_child(work)"
    )
    assert isinstance(error, BadModelFile)
    assert error.message == "llama.cpp comes to no end with model.gguf: damaged or unsupported"
    error = await end_of("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert isinstance(error, Internal)
    assert "want of memory" in error.message
    assert "status 3" in (await end_of("raise SystemExit(3)")).message
    assert isinstance(await end_of("pass"), Internal)


def test_no_debugger_runs_when_llama_cpp_aborts(tmp_path: Path) -> None:
    """The layers want different numbers of experts, which this architecture's graph is not made for."""
    moe_sample().set("olmoe.expert_used_count", numbers(4, [1, 2])).write(tmp_path / "uneven.gguf")
    command = [sys.executable, "-m", "swarmnode.model_check", str(tmp_path / "uneven.gguf"), "2"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT
    assert b"GGML_ASSERT" in done.stderr
    assert len(done.stderr.splitlines()) < 3


async def test_an_ended_child_that_said_its_error_is_believed() -> None:
    lines = '{"progress": ["step", 1, 2]}\\n{"error": {"type": "unsupported_model", "message": "no"}}\\n'
    error = await end_of(f"import sys; sys.stdout.write('{lines}'); sys.exit(1)")
    assert isinstance(error, UnsupportedModel)
    assert error.message == "no"


async def test_cancelling_ends_the_child(tmp_path: Path) -> None:
    mark, started = tmp_path / "alive", trio.Event()
    code = (
        'import time\nprint(\'{"progress": ["step", 1, 2]}\', flush=True)\n'
        f"while True:\n    open({str(mark)!r}, 'w').close()\n    time.sleep(0.02)"
    )
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            command = [sys.executable, "-c", code]
            nursery.start_soon(models.run_child, command, "model.gguf", lambda *step: started.set())
            await started.wait()
            nursery.cancel_scope.cancel()
    mark.unlink(missing_ok=True)
    await trio.sleep(0.2)
    assert not mark.exists()


def test_what_a_child_may_say(capsys: pytest.CaptureFixture[str]) -> None:
    def outcome(work: Callable[[Report], Any]) -> tuple[int, dict[str, Any]]:
        status = run_child(work)
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    def failing(error: BaseException) -> Callable[[Report], Any]:
        def work(report: Report) -> None:
            raise error

        return work

    assert outcome(lambda report: {"answer": 42}) == (0, {"result": {"answer": 42}})
    status, line = outcome(failing(UnsupportedModel("no", hint="another")))
    assert (status, line["error"]) == (1, {"type": "unsupported_model", "message": "no", "hint": "another"})
    assert outcome(failing(MemoryError()))[1]["error"]["message"] == "out of memory"
    unforeseen = outcome(failing(ZeroDivisionError("by zero")))[1]["error"]
    assert re.fullmatch(r"ZeroDivisionError at test_model_check\.py:\d+: by zero", unforeseen["message"])
    assert outcome(failing(OSError(28, "No space left on device")))[1]["error"]["message"] == "No space left on device"


def test_lines_that_are_none_are_passed_over() -> None:
    for line in (b"", b"llama: loading", b"[1, 2]", b"17", b"\xff\xfe", b'{"result": ', b"null"):
        assert parse_line(line) == {}
    assert parse_line(b'{"result": 1}') == {"result": 1}
    assert isinstance(verdict_of_death(-200, "f"), BadModelFile)


def test_progress_is_not_told_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    def work(report: Report) -> None:
        for done in range(1001):
            report("counting", done, 1000)
        report("another step", 0, 1)

    run_child(work)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counting = [line["progress"][1] for line in lines if line.get("progress", [""])[0] == "counting"]
    assert counting[0] == 0
    assert counting[-1] == 1000
    assert len(counting) < 10
    assert {"progress": ["another step", 0, 1]} in lines


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check.tempfile, "tempdir", str(tmp_path))
    source = tmp_path / "models" / "model.gguf"
    source.parent.mkdir()
    shutil.copy(tiny_file("olmoe"), source)
    check_model(source, 2, quiet)
    check_model(tiny_file("llama4"), 2, quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["models"]
    assert [p.name for p in source.parent.iterdir()] == ["model.gguf"]
