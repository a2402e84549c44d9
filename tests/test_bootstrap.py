"""Set-up: what it checks, which commands it runs, what it keeps, how it shows progress. No network, no real build."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarmnode import bootstrap
from swarmnode.bootstrap import Console, Setup, SetupError
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent


class FakeRunner:
    """Stands for pip and venv: notes each command and leaves behind the file that the real one would."""

    def __init__(self, root: Path, *, fail_at: str = "") -> None:
        self.root = root
        self.fail_at = fail_at
        self.steps: list[str] = []
        self.commands: list[list[str]] = []
        self.environs: list[dict[str, str]] = []

    def run(self, title: str, command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float) -> None:
        words = [str(word) for word in command]
        self.steps.append(title)
        self.commands.append(words)
        self.environs.append(dict(environ))
        assert timeout_s > 0
        if self.fail_at and self.fail_at in title:
            raise SetupError(f"{title}: failed with exit status 1.")
        if "venv" in words:
            python = self.root / ".venv" / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text("#!/bin/sh\nexit 0\n")
            python.chmod(0o755)
        if "wheel" in words:
            folder = Path(words[words.index("--wheel-dir") + 1])
            zipfile.ZipFile(folder / "llama_cpp_python-0-py3-none-any.whl", "w").close()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


def setup(root: Path, runner: FakeRunner, *, dev: bool = False, **environ: str) -> Setup:
    return Setup(root, root.parent / "wheels", {"PATH": os.environ["PATH"], **environ}, runner, dev)


def test_first_run_makes_venv_then_builds_then_installs_pinned_versions_only(checkout: Path) -> None:
    runner = FakeRunner(checkout)
    assert setup(checkout, runner).run()
    assert [step.split()[0] for step in runner.steps] == ["Making", "Building", *["Installing"] * 4]
    build = runner.commands[1]
    assert "--no-cache-dir" in build, "pip's cache would hand out a wheel with other flags"
    assert re.fullmatch(r"llama-cpp-python==[\d.]+", build[-1])
    assert "-DGGML_LLAMAFILE=OFF" in runner.environs[1]["CMAKE_ARGS"].split()
    for command in runner.commands[1:]:
        assert "--no-deps" in command, "pip must never choose a version on its own"
        for word in command[command.index("--no-deps") :]:
            exact = re.fullmatch(r"[\w.-]+==[\w.]+", word)
            local = Path(word).is_absolute()
            assert exact or local or word.startswith("-") or word == "llama-cpp-python", f"not pinned: {word}"


def test_second_run_does_nothing_and_a_change_does_the_least(checkout: Path) -> None:
    assert setup(checkout, FakeRunner(checkout), dev=True).run()
    for dev in (True, False):
        runner = FakeRunner(checkout)
        assert not setup(checkout, runner, dev=dev).run()
        assert runner.steps == []
    with (checkout / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    runner = FakeRunner(checkout)
    assert setup(checkout, runner).run()
    assert not any("Making" in step or "Building" in step for step in runner.steps)


def test_another_flag_is_another_wheel_and_comes_after_ours(checkout: Path) -> None:
    setup(checkout, FakeRunner(checkout)).run()
    runner = FakeRunner(checkout)
    assert setup(checkout, runner, CMAKE_ARGS="-DGGML_CUDA=ON '-DX=a b'").run()
    (built,) = (environ["CMAKE_ARGS"] for environ in runner.environs if "CMAKE_BUILD_PARALLEL_LEVEL" in environ)
    assert built.startswith("-DGGML_LLAMAFILE=OFF")
    assert built.endswith("-DGGML_CUDA=ON '-DX=a b'")
    assert len(list((checkout.parent / "wheels").iterdir())) == 2


def test_failed_build_leaves_no_wheel_and_no_stamp_and_the_next_run_goes_on(checkout: Path) -> None:
    with pytest.raises(SetupError, match="Building"):
        setup(checkout, FakeRunner(checkout, fail_at="Building")).run()
    assert list((checkout.parent / "wheels").iterdir()) == []
    runner = FakeRunner(checkout)
    assert setup(checkout, runner).run()
    assert "Making .venv" not in runner.steps


def test_damaged_wheel_in_the_cache_is_built_again(checkout: Path) -> None:
    setup(checkout, FakeRunner(checkout)).run()
    (wheel,) = (checkout.parent / "wheels").glob("*/*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-4])
    (checkout / ".venv" / "swarmnode-setup.json").unlink()
    runner = FakeRunner(checkout)
    setup(checkout, runner).run()
    assert any("Building" in step for step in runner.steps)


def test_moved_checkout_and_broken_venv_are_made_anew(checkout: Path, tmp_path: Path) -> None:
    setup(checkout, FakeRunner(checkout)).run()
    moved = tmp_path / "moved"
    checkout.rename(moved)
    runner = FakeRunner(moved)
    setup(moved, runner).run()
    assert runner.steps[0] == "Making .venv", "scripts in .venv name the old place"
    (moved / ".venv" / "bin" / "python").unlink()
    runner = FakeRunner(moved)
    setup(moved, runner).run()
    assert runner.steps[0] == "Making .venv"


def test_missing_compiler_is_one_line_before_anything_runs(checkout: Path, tmp_path: Path) -> None:
    runner = FakeRunner(checkout)
    with pytest.raises(SetupError, match=r"no working C compiler.*build-essential.*gcc-c.*xcode-select") as caught:
        setup(checkout, runner, PATH=str(tmp_path)).run()
    assert "\n" not in str(caught.value)
    assert runner.commands == []


def test_compiler_that_cannot_link_is_no_compiler(tmp_path: Path) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    bootstrap.check_compilers(os.environ)
    with pytest.raises(SetupError, match=r"no working C\+\+ compiler"):
        bootstrap.check_compilers({**os.environ, "CXX": str(broken)})


def test_python_too_old_or_without_venv() -> None:
    bootstrap.check_python((3, 11, 0))
    with pytest.raises(SetupError, match=r"3\.11 or newer and this is 3\.9\.2"):
        bootstrap.check_python((3, 9, 2))
    with pytest.raises(SetupError, match="python3-venv"):
        bootstrap.check_python((3, 12), ("venv", "a_module_that_is_not_there"))


def test_wheel_key_names_all_that_the_bits_depend_on() -> None:
    base = bootstrap.wheel_key("0.3.36", bootstrap.CMAKE_FLAGS, "avx avx2")
    assert base == bootstrap.wheel_key("0.3.36", bootstrap.CMAKE_FLAGS, "avx avx2")
    assert base.startswith(f"llama-cpp-python-0.3.36-cp{sys.version_info[0]}{sys.version_info[1]}-")
    others = {
        bootstrap.wheel_key("0.3.37", bootstrap.CMAKE_FLAGS, "avx avx2"),
        bootstrap.wheel_key("0.3.36", (*bootstrap.CMAKE_FLAGS, "-DGGML_CUDA=ON"), "avx avx2"),
        bootstrap.wheel_key("0.3.36", bootstrap.CMAKE_FLAGS, "avx"),
    }
    assert len(others | {base}) == 4


def test_cpu_features_do_not_depend_on_order_or_core_count(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("processor: 0\nflags\t\t: fpu avx2 sse\n")
    two.write_text("flags\t\t: sse fpu\n\nflags\t\t: avx2\n")
    assert bootstrap.cpu_features(one) == bootstrap.cpu_features(two) == "avx2 fpu sse"
    arm = tmp_path / "arm"
    arm.write_text("Features\t: fp asimd\n")
    assert bootstrap.cpu_features(arm) == "asimd fp"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("  [34/139] /usr/bin/c++ -c x.cpp\n", "34/139"),
        ("[ 24%] Building CXX object\n[ 25%] Building", "25%"),
        ("  Collecting foo[bar]>=1\n", ""),
        ("see note [3/4] below\n", ""),
    ],
)
def test_progress_is_read_from_ninja_and_make(text: str, count: str) -> None:
    assert bootstrap.progress_of(text) == count


def test_console_shows_plain_lines_and_keeps_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import time\nfor i in range(3): print(f'[{i + 1}/3] step', flush=True); time.sleep((0.2, 1.5, 0)[i])"
    Console(tmp_path, plain_period_s=0.1).run("Building it", [sys.executable, "-c", script], os.environ, 30)
    shown = capsys.readouterr().out
    assert "2/3" in shown
    assert "\r" not in shown
    assert re.search(r"\nBuilding it: done in 0:\d\d\n\Z", shown)
    assert (tmp_path / "building-it.log").read_text().count("step") == 3


def test_console_stops_what_takes_too_long_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(SetupError, match="not done after 3 s") as caught:
        Console(tmp_path).run("Waiting", ["sh", "-c", script], os.environ, 3)
    assert caught.value.log == tmp_path / "waiting.log"
    sleeper = int((tmp_path / "pid").read_text())
    _until(lambda: not _runs(sleeper))  # it was told to end with the shell, and may need a moment more


def test_failure_shows_the_last_lines_and_names_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(SetupError) as caught:
        Console(tmp_path).run("Building", [sys.executable, "-c", script], os.environ, 30)
    bootstrap._report(caught.value)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "  | line 80"
    assert shown[-2:] == [
        "set-up: Building: failed with exit status 3.",
        f"The whole log is {tmp_path / 'building.log'}",
    ]


def test_interrupt_of_a_real_run_ends_the_child_and_says_so(checkout: Path, tmp_path: Path) -> None:
    (checkout / "swarmnode").mkdir()
    shutil.copy(ROOT / "swarmnode" / "bootstrap.py", checkout / "swarmnode")
    sleeper = tmp_path / "cc"
    sleeper.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    sleeper.chmod(0o755)
    command = [sys.executable, str(checkout / "swarmnode" / "bootstrap.py")]
    environ = {**os.environ, "CC": str(sleeper), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    child = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _until((tmp_path / "pid").exists)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert errors == "set-up: stopped; run it again to go on.\n"


def children_s() -> float:
    """What processes that were started here and have ended took of a processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_up_to_date_run_takes_no_time(checkout: Path, tmp_path: Path) -> None:
    (checkout / "swarmnode").mkdir()
    shutil.copy(ROOT / "swarmnode" / "bootstrap.py", checkout / "swarmnode")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    Setup(checkout, bootstrap.cache_folder(environ), environ, FakeRunner(checkout)).run()
    stamp = json.loads((checkout / ".venv" / "swarmnode-setup.json").read_text())
    assert stamp["dev"] is False
    command = [sys.executable, str(checkout / "swarmnode" / "bootstrap.py")]
    before = children_s()
    done = subprocess.run(command, env=environ, capture_output=True, check=True, timeout=PATIENCE_S)
    assert children_s() - before < 2
    assert done.stdout == b""


def test_every_package_that_is_needed_is_pinned() -> None:
    """Walks the installed packages' own requirements, so a new dependency that nobody pinned has a name here."""
    pins = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    dev_pins = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE))
    assert _closure("swarmnode") - {"swarmnode"} <= pins
    assert _closure("swarmnode[dev]") - {"swarmnode"} <= pins | dev_pins


def _closure(requirement: str) -> set[str]:
    todo, seen = [Requirement(requirement)], set()
    while todo:
        wanted = todo.pop()
        if (key := (canonicalize_name(wanted.name), tuple(sorted(wanted.extras)))) in seen:
            continue
        seen.add(key)
        for text in distribution(key[0]).requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                todo.append(needed)
    return {name for name, _ in seen}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process still runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
