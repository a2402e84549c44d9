"""Adding a model: its folder is whole or absent, the source stays as it is, and memory does not grow with the model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import add_model as add_model_module
from backends.add_model import MANIFEST, SOURCE, TRUNK, add_model
from backends.child import parse_line
from backends.expert_source import GGUFExpertSource, MappedExperts, verify_expert
from backends.gguf_file import GGUFFile
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import Manifest
from backends.program import ExpertProgram
from backends.synthetic import ModelShape, write_random_model
from capabilities.errors import BadModelFile, SwarmError, UnsupportedModel, UsageError
from tests.expert_models import quiet, take_apart, tiny_file
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
# 226 MB of experts beside a trunk of 9 MB.
LARGE = ModelShape("large", 4, 64, 8, 1024, 512, 8, 512)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_file("deepseek2", "q4_0"), tmp_path / "model.gguf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / "mine"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- what is written --------------------------------------------------------------------------------------------------


def test_the_folder_describes_the_model(source: Path, folder: Path) -> None:
    before = source.read_bytes()
    shown = add_model(source, folder, "mine", quiet)
    assert sorted(contents(folder)) == [MANIFEST, SOURCE, TRUNK]
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]
    assert source.read_bytes() == before

    manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    trunk = (folder / TRUNK).read_bytes()
    assert (manifest.trunk.sha256, manifest.trunk.size) == (hashlib.sha256(trunk).digest(), len(trunk))
    assert [layer.layer for layer in manifest.layers] == [1, 2]
    assert manifest.source_files == (("model.gguf", len(before)),)
    assert len(manifest.programs) == 1
    assert ExpertProgram.from_bytes(manifest.programs[0]) == take_apart("deepseek2", "q4_0").program
    assert shown == {
        "name": "mine", "id": manifest.id, "architecture": "deepseek2", "layers": 3, "moe_layers": 2, "experts": 8,
        "experts_used": 3, "context_length": 2048, "trunk_bytes": len(trunk),
        "expert_bytes": 2 * 8 * 3 * 32 * 64 * 18 // 32,
    }  # fmt: skip
    status = source.stat()
    described = {"path": str(source), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    assert json.loads((folder / SOURCE).read_text()) == {"files": [described]}


def test_every_experts_bytes_have_their_hash(source: Path, folder: Path) -> None:
    add_model(source, folder, "mine", quiet)
    manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    with GGUFFile.open(source) as gguf:
        experts, mapped = GGUFExpertSource(gguf, manifest), MappedExperts(gguf, manifest)
        for layer in manifest.layers:
            for expert in range(layer.n_expert):
                data = experts.read(layer.layer, expert, 0, layer.expert_bytes)
                assert verify_expert(layer, expert, data)
                slices = zip(layer.offsets, layer.tensors, strict=True)
                views = [mapped.read(layer.layer, expert, begin, tensor.nbytes) for begin, tensor in slices]
                assert b"".join(views) == data == mapped.read(layer.layer, expert, 0, layer.expert_bytes)
                assert mapped.read(layer.layer, expert, 7, layer.expert_bytes - 9) == data[7:-2]
                assert not verify_expert(layer, (expert + 1) % layer.n_expert, data)


def test_the_trunk_runs(source: Path, folder: Path) -> None:
    add_model(source, folder, "mine", quiet)
    with LlamaModel(folder / TRUNK, LlamaSettings(context_tokens=64, batch_tokens=8)) as model:
        n = np.arange(8, dtype=np.int32)
        assert np.isfinite(model.decode(n, n, n * 0, np.ones(8, bool))).all()
    assert (folder / TRUNK).stat().st_size < source.stat().st_size


def test_the_id_depends_on_the_content_alone(source: Path, folder: Path) -> None:
    first = add_model(source, folder, "mine", quiet)["id"]
    assert add_model(source, folder, "mine", quiet)["id"] == first
    changed = bytearray(source.read_bytes())
    changed[-5] ^= 1
    source.write_bytes(changed)
    assert add_model(source, folder, "mine", quiet)["id"] != first


def test_layers_with_other_blocks_have_other_programs(tmp_path: Path) -> None:
    """step35 clamps in some layers: the manifest tells the two programs apart."""
    add_model(tiny_file("step35"), tmp_path / "m", "m", quiet)
    manifest = Manifest.from_bytes((tmp_path / "m" / MANIFEST).read_bytes())
    assert [layer.program for layer in manifest.layers] == [0, 1]
    assert len(manifest.programs) == 2


def test_steps_are_told(source: Path, folder: Path) -> None:
    steps: dict[str, list[tuple[int, int]]] = {}
    add_model(source, folder, "mine", lambda step, done, total: steps.setdefault(step, []).append((done, total)))
    assert list(steps) == ["writing the trunk", "hashing the trunk", "hashing the experts"]
    for told in steps.values():
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1]


# -- failures ---------------------------------------------------------------------------------------------------------


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("step", ["make_trunk", "hash_file", "build_layers", "_sync_folder"])
@pytest.mark.parametrize("error", [UsageError("the disk is full"), OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_leaves_everything_as_it_was(
    step: str, error: BaseException, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(add_model_module, step, fail_with(error))
        with pytest.raises(type(error)):
            add_model(source, folder, "mine", quiet)
    assert list(folder.parent.iterdir()) == []
    add_model(source, folder, "mine", quiet)
    before = contents(folder)
    monkeypatch.setattr(add_model_module, step, fail_with(error))
    with pytest.raises(type(error)):
        add_model(source, folder, "mine", quiet)
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]
    assert contents(folder) == before


def test_models_that_cannot_be_added_leave_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="llama4 ties another tensor"):
        add_model(tiny_file("llama4"), folder, "mine", quiet)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_file("olmoe").read_bytes()[:-100])
    with pytest.raises(BadModelFile, match=r"cut\.gguf"):
        add_model(cut, folder, "mine", quiet)
    with pytest.raises(BadModelFile, match="no such file"):
        add_model(tmp_path / "none.gguf", folder, "mine", quiet)
    assert list(folder.parent.iterdir()) == []


def test_experts_that_never_run_are_refused(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = replace(take_apart("deepseek2", "q4_0").learned, layers={}, silent=(1, 2))

    def make_trunk(gguf: GGUFFile, target: Path, progress: object) -> object:
        target.write_bytes(b"trunk")
        return learned

    monkeypatch.setattr(add_model_module, "make_trunk", make_trunk)
    with pytest.raises(UnsupportedModel, match="routed experts that its architecture, deepseek2, never runs"):
        add_model(source, folder, "mine", quiet)
    assert list(folder.parent.iterdir()) == []


def test_a_source_that_changes_meanwhile_is_noticed(source: Path, folder: Path) -> None:
    def touch(step: str, done: int, total: int) -> None:
        if step == "hashing the experts" and done == total:
            os.utime(source, ns=(1, 1))

    with pytest.raises(BadModelFile, match=r"model\.gguf was changed while it was added"):
        add_model(source, folder, "mine", touch)
    assert list(folder.parent.iterdir()) == []


def test_what_a_killed_process_left_is_swept(source: Path, folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead, alive, own = int(ended.stdout), os.getppid(), os.getpid()
    for pid in (dead, alive, own):
        part = folder.with_name(f".mine.part-{pid}")
        part.mkdir(parents=True)
        (part / TRUNK).write_bytes(b"half a trunk")
    other = folder.with_name(f".mine.two.part-{dead}")
    other.mkdir()
    add_model(source, folder, "mine", quiet)
    assert {p.name for p in folder.parent.iterdir()} == {"mine", f".mine.part-{alive}", other.name}


# -- as a child -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_random_model(path, LARGE)
    return path


def test_memory_does_not_grow_with_the_model(large: Path, tmp_path: Path) -> None:
    """The peak of RssAnon in a child that adds 226 MB of experts. The allowance for all models is 500 MiB."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.add_model_memory_child", str(large), str(tmp_path / "m")],
        cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["expert_bytes"] > 200e6
    assert report["samples"] > 20
    assert report["peak_mib"] < 150
    assert report["peak_mib"] - report["start_mib"] < 24  # less than one of its tensors (18 MiB) and the usual


def test_a_terminated_child_leaves_nothing(large: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    child = subprocess.Popen(
        [sys.executable, "-m", "backends.add_model", str(large), str(folder), "m"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        while parse_line(child.stdout.readline()).get("progress", [""])[0] != "hashing the experts":
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        child.stdout.read()
        assert child.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert list(folder.parent.iterdir()) == []


def test_a_childs_refusal_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backends.add_model", str(tiny_file("llama4")), str(tmp_path / "m"), "m"],
        cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    error = SwarmError.from_json(parse_line(done.stdout.splitlines()[-1])["error"])
    assert isinstance(error, UnsupportedModel)
    assert "\n" not in error.message
    assert error.hint
