"""`swarmctl kernels`: what building checks and leaves behind, without a compiler; and built ones, where there are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import variants
from backends.device import Device
from backends.experts import F32, ExpertBackend, GgmlExperts
from backends.gguf_types import GGML_TYPES
from backends.measure import measure_precision
from backends.probe_weights import product_layer
from backends.variant_process import KernelProcess
from backends.variants import VARIANTS, Variant, of_group
from capabilities.agreement import compare
from capabilities.errors import KernelFailed, UsageError
from capabilities.precision import Precision
from swarmnode.bootstrap import SetupError
from swarmnode.cli import common
from swarmnode.cli.ctl import swarmctl
from swarmnode.compute import choose_compute
from swarmnode.config_sections import ComputeConfig
from swarmnode.equivalence.targets import find_target
from swarmnode.kernels import arm64, store
from swarmnode.kernels import build as building
from swarmnode.kernels.build import Builder
from swarmnode.kernels.matrix import compare_all, tables
from swarmnode.kernels.mixed import is_measured, run_mixed, worker_row
from swarmnode.kernels.recipes import RECIPES, SHIM, Need, Part
from swarmnode.kernels.store import is_built, kernels_called, launch_of
from tests.documents import first_codes, section

ROWS, LENGTH = 32, 256
Q4_0 = next(kind for kind, known in GGML_TYPES.items() if known.name == "q4_0")


class FakeRunner:
    """Stands for pip and cmake: notes each step and leaves behind what the real one would."""

    def __init__(self, folder: Path, *, fail_at: str = "") -> None:
        self.folder, self.fail_at = folder, fail_at
        self.steps: list[str] = []
        self.commands: list[list[str]] = []

    def run(self, title: str, command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float) -> None:
        words = [str(word) for word in command]
        self.steps.append(title.split(" (")[0])
        self.commands.append(words)
        assert timeout_s > 0
        if self.fail_at and self.fail_at in title:
            raise SetupError(f"{title}: failed with exit status 1.", self.folder / "the.log")
        if "download" in words:
            self._sdist(Path(words[words.index("-d") + 1]))
        elif "--build" in words:
            libraries = Path(words[words.index("--build") + 1]) / "bin"
            libraries.mkdir(parents=True, exist_ok=True)
            for target in words[words.index("--target") + 1 :]:
                suffix = ".so" if "-cpu-" in target else ".so.0"
                (libraries / f"lib{target}{suffix}").write_text(target)

    @staticmethod
    def _sdist(folder: Path) -> None:
        name = building._SDIST
        for inner in ("vendor/llama.cpp/CMakeLists.txt", "llama_cpp/__init__.py", "docs/other"):
            file = folder / name / inner
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(folder / name, name)
        shutil.rmtree(folder / name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a compiler, whatever this one has."""
    monkeypatch.setattr(building.bootstrap, "check_compilers", lambda environ: None)


def builder(tmp_path: Path, runner: FakeRunner) -> Builder:
    return Builder(tmp_path / "kernels", runner, {"PATH": os.environ["PATH"]})


@pytest.mark.usefixtures("machine")
def test_a_group_is_fetched_configured_built_and_kept(tmp_path: Path) -> None:
    runner = FakeRunner(tmp_path)
    made = builder(tmp_path, runner)
    assert made.build(["x86-64"]) == ["x86-64"]
    assert [step.split()[0] for step in runner.steps] == [
        "Fetching", "Configuring", "Building", "Configuring", "Building",
    ]  # fmt: skip
    kept = tmp_path / "kernels" / RECIPES["x86-64"].key / "lib"
    names = {path.name for path in kept.iterdir()}
    assert {variant.library for variant in of_group("x86-64")} <= names
    assert {"libggml.so.0", "libggml-base.so.0"} <= names
    left = {path.name for path in (tmp_path / "kernels").iterdir()}
    assert left == {RECIPES["x86-64"].key, ".lock"}, "neither source nor build folders stay"
    assert made.build(["x86-64"]) == []
    assert len(runner.steps) == 5


@pytest.mark.usefixtures("machine")
def test_what_fails_leaves_no_result_and_goes_on_from_there(tmp_path: Path) -> None:
    with pytest.raises(KernelFailed, match=r"Building the kernels .* failed .* log is .*the\.log"):
        builder(tmp_path, FakeRunner(tmp_path, fail_at="Building the kernels")).build(["x86-64"])
    assert not (tmp_path / "kernels" / RECIPES["x86-64"].key).exists()
    again = FakeRunner(tmp_path)
    builder(tmp_path, again).build(["x86-64"])
    assert not any(step.startswith("Fetching") for step in again.steps)


@pytest.mark.usefixtures("machine")
def test_what_the_machine_lacks_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = (Need("some-compiler", program="no-such-compiler"), Need("some-dev", header="no/such/header.h"))
    monkeypatch.setitem(building.RECIPES, "vulkan", replace(RECIPES["vulkan"], needs=needs))
    runner = FakeRunner(tmp_path)
    with pytest.raises(UsageError, match=r"no-such-compiler, no/such/header\.h") as caught:
        builder(tmp_path, runner).build(["vulkan"])
    assert "apt install --no-install-recommends some-compiler some-dev" in caught.value.hint
    assert runner.steps == [], "nothing is fetched before the machine is known to do"


def test_a_missing_compiler_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(environ: Mapping[str, str]) -> None:
        raise SetupError("no working C compiler, and llama.cpp must be built")

    monkeypatch.setattr(building.bootstrap, "check_compilers", none)
    with pytest.raises(UsageError, match="no working C compiler"):
        builder(tmp_path, FakeRunner(tmp_path)).build(["x86-64"])


def test_results_are_named_by_flags_and_not_by_this_checkout() -> None:
    recipe = RECIPES["x86-64"]
    loader, kernels = recipe.parts
    other = replace(recipe, parts=(loader, Part(kernels.name, (*kernels.flags, "-DGGML_NEW=ON"), kernels.targets)))
    assert recipe.key != other.key
    assert all(str(SHIM) not in repr(each) for each in RECIPES.values())
    flags = " ".join(kernels.flags)
    assert "-DGGML_LLAMAFILE=OFF" in flags, "its kernels add in an order that depends on the batch"
    assert "-DGGML_NATIVE=OFF" in flags


# -- which ones can be had --------------------------------------------------------------------------------------------


def test_targets_have_names_of_their_own() -> None:
    assert kernels_called("ggml-cpu:haswell") == ("haswell", False)
    assert kernels_called("ggml-vulkan") == ("vulkan", False)
    assert kernels_called("ggml-vulkan:f32") == ("vulkan", True)
    for name in ("ggml-cpu", "ggml-vulkan0", "ggml-vulkan:f16", "reference:q8", "peer:vulkan"):
        assert kernels_called(name) is None


def test_a_wrong_target_is_told_which_there_are() -> None:
    with pytest.raises(UsageError, match="there is no ggml-tpu") as caught:
        find_target("ggml-tpu")
    for name in ("ggml-cpu", "reference:q8", "peer:NAME", "`swarmctl kernels list`", "module:Class"):
        assert name in caught.value.hint


def test_kernels_that_are_not_built_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "kernels_folder", lambda: tmp_path)
    for name, option in (("x64", "build`"), ("armv8.2_2", "build --arm64`"), ("vulkan", "build --vulkan`")):
        with pytest.raises(UsageError, match="not built") as caught:
            find_target(next(variant.target for variant in VARIANTS if variant.name == name))
        assert option in caught.value.hint
        with pytest.raises(UsageError, match=r"\[compute\] kernel: .* not built"):
            choose_compute(ComputeConfig(kernel=name), 1)


def test_kernels_that_this_processor_lacks_are_refused_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    future = Variant("future", "x86-64", "of tomorrow", ("avx4096",))
    monkeypatch.setattr(variants, "VARIANTS", (future,))
    with pytest.raises(UsageError, match=r"cannot run the kernels future: it lacks .*avx4096|an x86-64"):
        launch_of("future")


def test_the_list_says_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.main(swarmctl, "swarmctl", ["kernels", "list", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    keys = {f"kernels[].{key}" for row in result["kernels"] for key in row} | set(result) - {"kernels"}
    listed = section("status.md", "`swarmctl kernels`").split("`swarmctl kernels compare")[0]
    assert keys | {"built[]"} == set(first_codes(listed))


# -- the built ones ---------------------------------------------------------------------------------------------------


def built(name: str) -> Variant:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    if not is_built(variant):
        option = {"x86-64": ""}.get(variant.group, f" --{variant.group}")
        pytest.skip(f"the kernels {name} are not built: swarmctl kernels build{option}")
    if missing := variant.missing():
        pytest.skip(f"this processor lacks {', '.join(missing)}, which the kernels {name} need")
    return variant


def products(backend: ExpertBackend, *, rows: int = ROWS, kind: int = Q4_0, ask_f32: bool = False) -> F32:
    """The same product of any backend: rows [rows, 64]."""
    probe = product_layer(kind, LENGTH, 64, 2)
    backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
    x = np.random.default_rng(3).standard_normal((rows, LENGTH), np.float32)
    each = np.arange(rows, dtype=np.int32)
    return backend.compute(probe.layer.layer, x, each, each % 2, ask_f32=ask_f32)


@pytest.mark.parametrize("name", [variant.name for variant in of_group("x86-64")])
def test_every_built_kernel_computes_the_same_function(name: str) -> None:
    process = KernelProcess(launch_of(built(name).name))
    try:
        found = compare(products(process.experts()), products(GgmlExperts(Device("CPU"))))
    finally:
        process.close()
    assert found.median_relative_l2 < 1e-6
    assert found.worst_relative_l2 < 1e-2


def test_a_daemon_computes_with_the_kernels_that_it_was_told() -> None:
    variant = built("sse42")
    compute = choose_compute(ComputeConfig(kernel="sse42"), 1)
    assert (compute.name, compute.device) == ("ggml-cpu:sse42", variant.meaning)
    assert compute.rounds_as_ggml_cpu
    backend = compute.make()
    assert products(backend).shape == (ROWS, 64)
    backend.close()


def test_emulated_kernels_compute_the_same_function() -> None:
    process = KernelProcess(launch_of(built("armv8.2_2").name))
    try:
        found = compare(products(process.experts()), products(GgmlExperts(Device("CPU"))))
    finally:
        process.close()
    assert found.median_relative_l2 < 1e-6
    assert found.worst_relative_l2 < 1e-2


def test_vulkan_adds_in_half_precision_above_a_width_unless_it_is_asked_not_to() -> None:
    process = KernelProcess(launch_of(built("vulkan").name))
    try:
        narrow, wide = (measure_precision(process.experts(), Q4_0, [width]) for width in (1, 64))
        asked = measure_precision(process.experts(ask_f32=True), Q4_0, [64])
    finally:
        process.close()
    assert narrow.accumulation is Precision.F32
    assert asked.accumulation is Precision.F32
    assert wide.accumulation is not Precision.F32


# -- all against all --------------------------------------------------------------------------------------------------


def test_every_pair_is_compared_and_equal_bits_share_a_line() -> None:
    names = ["ggml-cpu", "tests.test_kernels:SameAgain", "reference:q8", "reference"]
    result = compare_all(names, ["q4_0"], lambda *_: None)
    (operator,) = result["operators"]
    pairs = {(pair["a"], pair["b"]): pair for pair in operator["pairs"]}
    assert set(pairs) == set(combinations(names, 2))
    assert pairs["ggml-cpu", names[1]]["bit_identical"]
    # The activations' eight bits are nearly all of a kernel's distance to exact arithmetic.
    assert pairs["ggml-cpu", "reference:q8"]["relative_l2"] < 1e-5
    assert 1e-3 < pairs["ggml-cpu", "reference"]["relative_l2"] < 1e-2
    _, compared = section("status.md", "`swarmctl kernels`").split("`swarmctl kernels compare")
    compared = compared.split("`swarmctl kernels swarm --json`")[0]
    keys = {"targets[]", *(f"operators[].{key}" for key in operator if key != "pairs")}
    keys |= {f"failed[].{key}" for key in ("target", "operator", "reason")}
    assert keys | {f"operators[].pairs[].{key}" for key in pairs["ggml-cpu", "reference"]} == set(first_codes(compared))
    text = tables(result, "ggml-cpu")
    assert f"ggml-cpu stands for {names[1]}: the same bits" in text
    assert f"| {names[1]} | same |" in text
    assert result == json.loads(json.dumps(result))


class Dying(GgmlExperts):
    """Kernels whose process dies over whatever it is asked."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(Device("CPU", threads=threads))

    def compute(self, *arguments: Any, **asked: Any) -> F32:
        raise KernelFailed("the process ended")


def test_kernels_that_die_over_an_operator_are_named_and_the_others_compared() -> None:
    dying = "tests.test_kernels:Dying"
    result = compare_all(["ggml-cpu", dying, "reference"], ["q4_0"], lambda *_: None)
    assert result["failed"] == [{"target": dying, "operator": "q4_0", "reason": "the process ended"}]
    assert [(pair["a"], pair["b"]) for pair in result["operators"][0]["pairs"]] == [("ggml-cpu", "reference")]
    assert f"{dying} failed over q4_0: the process ended" in tables(result, "ggml-cpu")


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="two targets"):
        compare_all(["ggml-cpu"], ["q4_0"], lambda *_: None)
    with pytest.raises(UsageError, match="no weights of type 'q99'"):
        compare_all(["ggml-cpu", "reference"], ["q99"], lambda *_: None)


class SameAgain(GgmlExperts):
    """The installed kernels under another name."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(Device("CPU", threads=threads))


# -- a swarm of them --------------------------------------------------------------------------------------------------


def test_a_swarm_of_unknown_kernels_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="no kernels called 'z80'"):
        run_mixed(["z80"], model="demo", prompt="?", max_tokens=1, deadline_s=1, progress=lambda *_: None)
    with pytest.raises(UsageError, match="0 workers"):
        run_mixed([], model="demo", prompt="?", max_tokens=1, deadline_s=1, progress=lambda *_: None)


def test_what_a_worker_of_a_mixed_swarm_says_is_documented() -> None:
    backend = dict.fromkeys(("device", "numeric_class", "rows_per_s")) | {
        "accumulation": {"measured": "f32"}, "source": {"measured": "q8"},
    }  # fmt: skip
    keys = ("state", "fitness", "experts_held", "dispatches", "bit_identical_to_leader", "error")
    row = dict.fromkeys(keys) | {"name": "worker-1", "backends": [backend]}
    listed = section("status.md", "`swarmctl kernels`").split("`swarmctl kernels swarm --json`")[1]
    found = {code.removeprefix("workers[].") for code in first_codes(listed) if code.startswith("workers[].")}
    assert set(worker_row("x64", {"peers": [row]}, "worker-1")) == found


def test_a_worker_is_measured_once_all_of_its_types_have_a_class() -> None:
    def told(error: str | None = None, **classes: str | None) -> list[dict[str, Any]]:
        weights = [{"type": name, "numeric_class": found} for name, found in classes.items()]
        return [{"error": error, "weights": weights}]

    assert is_measured(told(q4_1="ab"), {"q4_1"})
    assert not is_measured(told(q4_1=None), {"q4_1"})
    assert not is_measured(told(q4_K="ab", f16="cd"), {"q4_K", "f16", "q4_1"}), "before the model was known"
    assert not is_measured(told(), set()), "nothing is known yet"
    assert is_measured(told("the device failed"), {"q4_1"})


# -- ARM64's Python ---------------------------------------------------------------------------------------------------


class PipRunner:
    """Stands for pip: notes commands, and leaves a package in the folder that is named."""

    def __init__(self, *, fails: bool = False) -> None:
        self.commands: list[list[str]] = []
        self.fails = fails

    def run(self, title: str, command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float) -> None:
        words = [str(word) for word in command]
        self.commands.append(words)
        if "--target" in words:
            if self.fails:
                raise SetupError("pip failed")
            site = Path(words[words.index("--target") + 1])
            site.mkdir(parents=True)
            (site / "package.py").write_text("new")


def made_python(folder: Path) -> Path:
    """What a build leaves, with packages of the past."""
    for inner in ("root/usr/bin/python3.11", "site/llama_cpp/lib/libllama.so", "site/package.py", "site/old.py"):
        (folder / inner).parent.mkdir(parents=True, exist_ok=True)
        (folder / inner).write_text("old")
    (folder / "site" / "requirements.txt").write_text("package==0.1")
    return folder


def test_packages_follow_the_requirements_and_libraries_stay(tmp_path: Path) -> None:
    made, runner = made_python(tmp_path / "made"), PipRunner()
    assert not arm64.is_current(made)
    arm64.renew_site(runner, os.environ, tmp_path / "work", made)
    assert arm64.is_current(made)
    assert (made / "site" / "package.py").read_text() == "new"
    assert (made / "site" / "llama_cpp" / "lib" / "libllama.so").read_text() == "old"
    assert not (made / "site" / "old.py").exists()
    install = runner.commands[-1]
    assert {"--only-binary=:all:", "--no-deps", "--python-version=3.11", "--abi=cp311"} <= set(install)
    assert not any("x86_64" in word for word in install)


def test_packages_that_cannot_be_fetched_leave_the_old_ones(tmp_path: Path) -> None:
    made = made_python(tmp_path / "made")
    with pytest.raises(SetupError):
        arm64.renew_site(PipRunner(fails=True), os.environ, tmp_path / "work", made)
    assert (made / "site" / "old.py").exists()


def test_an_emulated_python_starts_its_children_under_the_emulator(tmp_path: Path) -> None:
    """What stands for Python is a script that names itself, for the system knows no programs of that processor."""
    arm64._make_command(tmp_path, "python3.11")
    fake = tmp_path / "path" / arm64.EMULATOR
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    command = tmp_path / "bin" / "python"
    environ = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    said = subprocess.run([command, "-m", "x"], env=environ, capture_output=True, text=True, check=True).stdout.split()
    assert said[said.index("-0") + 1] == str(command)
    assert said[-3].endswith("root/usr/bin/python3.11")
    assert said[-2:] == ["-m", "x"]


@pytest.mark.timeout(300)
def test_an_emulated_daemons_kernels_are_those_of_its_processor() -> None:
    built("armv8.2_2")
    code = "from backends.device import list_devices; import platform; list_devices(); print(platform.machine())"
    for processor, library in (("cortex-a53", "armv8.0_1"), ("cortex-a76", "armv8.2_2")):
        environ = {**os.environ, **store.emulated_environ(), "QEMU_CPU": processor}
        done = subprocess.run(
            [*store.emulated_python(), "-c", code], env=environ, capture_output=True, text=True, timeout=140, check=True
        )
        assert done.stdout.split() == ["aarch64"]
        assert f"libggml-cpu-{library}.so" in done.stderr
