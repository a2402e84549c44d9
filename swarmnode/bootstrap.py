"""Set-up on a machine that has never seen the project: `python3 swarmnode/bootstrap.py [--dev]`.

Runs on the system's Python with the standard library alone, since nothing is installed yet. What takes minutes is
llama.cpp, so its wheel is built once and kept in the user's cache under a name made of everything that its bits depend
on: version, build flags, processor features, Python and platform. All else is a list of exact versions
(requirements.txt) that pip installs as it stands. A stamp in `.venv` makes the next run a matter of milliseconds.

Order: see what the machine can do, before anything is downloaded; then .venv, the wheel, the packages, the stamp.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PYTHON_MIN = (3, 11)
# LLAMAFILE's matrix kernels add in an order that depends on the batch's width: without them a token's bits do not
# depend on who shares its batch. OPENMP's threads spin while they wait. NATIVE uses all that this processor has.
CMAKE_FLAGS = ("-DGGML_LLAMAFILE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF")
LLAMA = "llama-cpp-python"
VENV_TIMEOUT_S = 10 * 60  # a few seconds, unless the disk is a slow card
PIP_TIMEOUT_S = 30 * 60  # 100 MB of wheels over a slow line
BUILD_TIMEOUT_S = 4 * 60 * 60  # 6 CPU minutes on a PC, an hour or two on the smallest boards
COMPILE_JOB_BYTES = 1 << 30  # what one compiler process needs at its peak; as many run at once as memory allows
PLAIN_PERIOD_S = 15.0  # without a terminal: a line of progress this often
LOG_TAIL_LINES = 20
_SPINNER = "|/-\\"
_COMPILERS = (
    ("C", "CC", ("cc", "gcc", "clang"), "probe.c", "#include <stdio.h>\nint main(void) { return 0; }\n"),
    ("C++", "CXX", ("c++", "g++", "clang++"), "probe.cpp", "#include <vector>\nint main() { std::vector<int> v; }\n"),
)


class SetupError(Exception):
    """Set-up cannot go on: one line for the person, and the log of the step that failed if one did."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class Runner(Protocol):
    """Runs one step's command to its end, or raises SetupError."""

    def run(self, title: str, command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float) -> None: ...


# What the machine has


def check_python(version: tuple[int, ...], modules: Sequence[str] = ("venv", "ensurepip")) -> None:
    """SetupError unless this Python is new enough and can make virtual environments."""
    if version < PYTHON_MIN:
        found = ".".join(map(str, version[:3]))
        raise SetupError(f"swarmnode needs Python 3.11 or newer and this is {found}; try `make PYTHON=python3.11`.")
    if any(importlib.util.find_spec(name) is None for name in modules):
        raise SetupError("this Python makes no virtual environments: `sudo apt install python3-venv` (Debian, Ubuntu).")


def check_compilers(environ: Mapping[str, str]) -> None:
    """SetupError unless a C and a C++ compiler each turn a tiny program into an executable."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-probe-") as folder:
        for language, variable, names, file_name, source in _COMPILERS:
            Path(folder, file_name).write_text(source)
            chosen = shlex.split(environ.get(variable, ""))
            commands = [chosen] if chosen else [[name] for name in names]
            if not any(_compiles([*command, file_name, "-o", "probe"], folder, environ) for command in commands):
                raise SetupError(
                    f"no working {language} compiler, and llama.cpp must be built: `sudo apt install build-essential`"
                    " (Debian, Ubuntu), `sudo dnf install gcc gcc-c++` (Fedora) or `xcode-select --install` (macOS)."
                )


def _compiles(command: Sequence[str], folder: str, environ: Mapping[str, str]) -> bool:
    try:
        subprocess.run(command, cwd=folder, env=dict(environ), capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What native code depends on: the processor's feature flags on Linux, its name elsewhere."""
    with contextlib.suppress(OSError):
        lines = cpuinfo.read_text(errors="replace").splitlines()
        named = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))]
        if flags := sorted({flag for line in named for flag in line.split()}):
            return " ".join(flags)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return platform.processor()


# Names: what is installed, and what a built wheel depends on


def pinned(requirements: str, name: str) -> str:
    """The exact version of a package in the text of requirements.txt."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", requirements, re.MULTILINE)
    if found is None:
        raise SetupError(f"requirements.txt names no exact version of {name}.")
    return found[1]


def wheel_key(version: str, flags: Sequence[str], features: str) -> str:
    """A wheel's name in the cache; equal names mean interchangeable files. The hash covers flags, features and libc."""
    digest = hashlib.sha256("\0".join([*flags, features, *platform.libc_ver()]).encode()).hexdigest()
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    where = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"{LLAMA}-{version}-{python}-{where}-{digest[:16]}"


def cached_wheel(folder: Path) -> Path | None:
    """The wheel in a folder of the cache, if it is there and whole."""
    return next((path for path in sorted(folder.glob("*.whl")) if zipfile.is_zipfile(path)), None)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where built wheels are kept."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "swarmnode" / "wheels"


# The steps


@dataclass(frozen=True)
class Setup:
    """One checkout's set-up. `root` holds pyproject.toml; `cache` the wheels of all checkouts."""

    root: Path
    cache: Path
    environ: Mapping[str, str]
    runner: Runner
    dev: bool = False

    @property
    def python(self) -> Path:
        return self.root / ".venv" / "bin" / "python"

    @property
    def _stamp(self) -> Path:
        return self.root / ".venv" / "swarmnode-setup.json"

    def run(self) -> bool:
        """Do what is missing; False if nothing was. Two runs on one checkout wait for each other."""
        requirements = (self.root / "requirements.txt").read_text()
        version = pinned(requirements, LLAMA)
        flags = [*CMAKE_FLAGS, *shlex.split(self.environ.get("CMAKE_ARGS", ""))]
        folder = self.cache / wheel_key(version, flags, cpu_features())
        place = {"root": str(self.root), "python": sys.version}
        wanted = {**place, "wheel": folder.name, "files": self._files_hash(), "dev": self.dev}
        with _locked(self.root / "pyproject.toml"):
            have = self._read_stamp()
            if self.python.exists() and have in (wanted, {**wanted, "dev": True}):
                return False
            wheel = cached_wheel(folder)
            if wheel is None:
                check_compilers(self.environ)
            self._make_venv(keep=have is None or place.items() <= have.items())
            wheel = wheel or self._build_wheel(version, flags, folder)
            self._install(requirements, wheel)
            self._stamp.write_text(json.dumps(wanted, indent=2) + "\n")
        return True

    def _files_hash(self) -> str:
        names = ("pyproject.toml", "requirements.txt", "requirements-dev.txt")
        return hashlib.sha256(b"\0".join((self.root / name).read_bytes() for name in names)).hexdigest()

    def _read_stamp(self) -> dict[str, object] | None:
        try:
            value = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _make_venv(self, *, keep: bool) -> None:
        """A `.venv` whose pip runs. One that is half made, or was made for another Python or place, is made anew."""
        self._stamp.unlink(missing_ok=True)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if keep:
                pip = [str(self.python), "-m", "pip", "--version"]
                subprocess.run(pip, capture_output=True, timeout=60, check=True)
                return
        make: list[str | Path] = [sys.executable, "-m", "venv", "--clear", self.root / ".venv"]
        self.runner.run("Making .venv", make, self._env(), VENV_TIMEOUT_S)

    def _build_wheel(self, version: str, flags: Sequence[str], folder: Path) -> Path:
        """Build into a folder of its own, then rename: the cache never holds half a wheel."""
        self.cache.mkdir(parents=True, exist_ok=True)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        jobs = max(1, min(os.cpu_count() or 1, memory // COMPILE_JOB_BYTES))
        environ = {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), **self._env(), "CMAKE_ARGS": shlex.join(flags)}
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.cache) as building:
            # pip's own cache names wheels by version alone and would hand out one that was built with other flags.
            options = ["-v", "--no-cache-dir", "--no-deps", "--no-binary", LLAMA, "--wheel-dir", building]
            pip: list[str | Path] = [self.python, "-m", "pip", "wheel", *options, f"{LLAMA}=={version}"]
            self.runner.run("Building llama.cpp (minutes, once)", pip, environ, BUILD_TIMEOUT_S)
            built = cached_wheel(Path(building))
            if built is None:
                raise SetupError(f"pip built no wheel of {LLAMA} {version}.")
            folder.mkdir(exist_ok=True)
            return built.replace(folder / built.name)

    def _install(self, requirements: str, wheel: Path) -> None:
        pip: list[str | Path] = [self.python, "-m", "pip", "install", "--no-deps"]
        lists: list[str | Path] = ["-r", self.root / "requirements.txt"]
        if self.dev:
            lists += ["-r", self.root / "requirements-dev.txt"]
        steps: tuple[tuple[str, list[str | Path]], ...] = (
            ("Installing the build tool", [f"setuptools=={pinned(requirements, 'setuptools')}"]),
            ("Installing llama.cpp", ["--force-reinstall", wheel]),
            ("Installing packages", ["--no-build-isolation", *lists]),
            ("Installing swarmnode", ["--no-build-isolation", "-e", self.root]),
        )
        for title, arguments in steps:
            self.runner.run(title, [*pip, *arguments], self._env(), PIP_TIMEOUT_S)

    def _env(self) -> dict[str, str]:
        """The person's environment, proxies and mirrors included, without what would lead pip or Python astray."""
        dropped = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_HASHES"}
        kept = {name: value for name, value in self.environ.items() if name not in dropped}
        return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Showing that a long step lives


class Console:
    """Runs commands, keeps what each prints in a log, and shows meanwhile that it lives."""

    def __init__(self, logs: Path, *, plain_period_s: float = PLAIN_PERIOD_S) -> None:
        self._logs = logs
        self._plain_period_s = plain_period_s

    def run(self, title: str, command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float) -> None:
        """Run to the end. SetupError with the log on a failure or past `timeout_s`; an interrupt ends the child too."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".log")
        meter = _Meter(title, sys.stdout.isatty(), self._plain_period_s, time.monotonic())
        with log.open("wb", buffering=0) as sink:
            child = subprocess.Popen(
                [str(part) for part in command], env=dict(environ), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                for chunk in _output(child, meter.begin + timeout_s):
                    sink.write(chunk)
                    meter.show(chunk)
                child.wait(timeout=60)
            except (TimeoutError, subprocess.TimeoutExpired):
                raise SetupError(f"{title}: not done after {timeout_s:.0f} s, so it was stopped.", log) from None
            finally:
                _end(child)
                meter.close()
        if child.returncode:
            raise SetupError(f"{title}: failed with exit status {child.returncode}.", log)
        print(f"{title}: done in {_clock(time.monotonic() - meter.begin)}", flush=True)


@dataclass
class _Meter:
    """One step's progress: a line that turns in place on a terminal, else a new line every `plain_period_s`."""

    title: str
    live: bool
    plain_period_s: float
    begin: float
    count: str = ""
    shown_s: float = 0.0

    def show(self, chunk: bytes) -> None:
        self.count = progress_of(chunk.decode(errors="replace")) or self.count
        elapsed_s = time.monotonic() - self.begin
        text = " ".join(part for part in (self.title, self.count, f"({_clock(elapsed_s)})") if part)
        if self.live:
            width = shutil.get_terminal_size().columns - 3
            print(f"\r\x1b[K{_SPINNER[int(elapsed_s * 5) % len(_SPINNER)]} {text[:width]}", end="", flush=True)
        elif elapsed_s - self.shown_s >= self.plain_period_s:
            self.shown_s = elapsed_s
            print(f"  {text}", flush=True)

    def close(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)


def progress_of(text: str) -> str:
    """The last count in a piece of build output: ninja's "[34/139]", make's "[ 24%]"; "" if there is none."""
    counts = re.findall(r"^\s*\[\s*(\d+/\d+|\d+%)\]", text, re.MULTILINE)
    return counts[-1] if counts else ""


def _output(child: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """What the child prints, as it comes, and b"" five times a second meanwhile. TimeoutError past `deadline`."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector, child.stdout as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(0.2):
                yield b""
            elif chunk := os.read(pipe.fileno(), 1 << 16):
                yield chunk
            else:
                return
    raise TimeoutError


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop a child that still runs, with all that it started (it leads a process group of its own)."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _report(error: SetupError) -> None:
    if error.log is not None:
        for line in error.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]:
            print(f"  | {line}", file=sys.stderr)
    print(f"set-up: {error}", file=sys.stderr)
    if error.log is not None:
        print(f"The whole log is {error.log}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make .venv and install swarmnode into it.")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    dev = parser.parse_args(arguments).dev
    root = Path(__file__).resolve().parent.parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_python(sys.version_info[:3])
        Setup(root, cache_folder(os.environ), os.environ, Console(root / "build" / "setup"), dev).run()
    except SetupError as error:
        _report(error)
        return 1
    except OSError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: stopped; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
