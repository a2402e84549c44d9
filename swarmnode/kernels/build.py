"""The steps of `swarmctl kernels build`: the source, cmake, and the libraries into the user's cache.

A group that is built is never built again, and one that was interrupted goes on where it stopped: its build folder
stays until the result is complete. Results appear by renaming, so that nobody ever sees half of one. Two builds of one
user wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.variants import Group
from capabilities.errors import KernelFailed, UsageError
from swarmnode import bootstrap
from swarmnode.bootstrap import Runner, SetupError
from swarmnode.kernels import arm64
from swarmnode.kernels.recipes import RECIPES, SHIM, SHIM_PLACE, VERSION, Need, Part, Recipe

FETCH_TIMEOUT_S: Final = 30 * 60  # 75 MB over a slow line
CONFIGURE_TIMEOUT_S: Final = 10 * 60
BUILD_TIMEOUT_S: Final = 4 * 60 * 60  # a few minutes on a PC; the smallest boards need an hour or two
_LOADERS: Final = ("libggml-base.so.0", "libggml.so.0", "libllama.so", "libllama.so.0")
_SDIST: Final = f"llama_cpp_python-{VERSION}"


@dataclass(frozen=True)
class Builder:
    """`folder` is the cache, `runner` runs steps and shows them, `environ` is the person's."""

    folder: Path
    runner: Runner
    environ: Mapping[str, str]

    def build(self, groups: Sequence[Group]) -> list[Group]:
        """Build what is missing; the groups that were.

        Raises:
            UsageError: the machine lacks something; the message says what, the hint how to get it.
            KernelFailed: a step failed; the message names its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._locked():
                missing = [group for group in groups if not (self.folder / RECIPES[group].key).is_dir()]
                for group in missing:
                    self._check(RECIPES[group])
                for group in missing:
                    self._build(RECIPES[group])
                if missing:
                    shutil.rmtree(self._source.parent, ignore_errors=True)
                self._renew_packages(groups)
                return missing
        except SetupError as error:
            log = f" Its log is {error.log}." if error.log else ""
            raise KernelFailed(
                f"{error}{log}", hint="Mend what the log names; building again goes on from there."
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- what the machine has -----------------------------------------------------------------------------------------

    def _check(self, recipe: Recipe) -> None:
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise UsageError(
                f"kernels are built and compared on x86-64 Linux, and this is {sys.platform} on {os.uname().machine}"
            )
        try:
            bootstrap.check_compilers(self.environ)
        except SetupError as error:
            raise UsageError(str(error), hint="Install a compiler and build again.") from error
        lacking = [need for need in recipe.needs if not self._has(need)]
        if lacking:
            names = ", ".join(need.program or need.header for need in lacking)
            packages = " ".join(dict.fromkeys(need.packages for need in lacking))
            raise UsageError(
                f"building {recipe.group} needs {names}, which this machine does not have",
                hint=f"`sudo apt install --no-install-recommends {packages}` (Debian, Ubuntu).",
            )

    def _has(self, need: Need) -> bool:
        if need.program:
            return shutil.which(need.program, path=self.environ.get("PATH")) is not None
        return any(Path(place, need.header).is_file() for place in ("/usr/include", "/usr/local/include"))

    # -- the steps ----------------------------------------------------------------------------------------------------

    @property
    def _source(self) -> Path:
        return self.folder / "source" / _SDIST

    def _build(self, recipe: Recipe) -> None:
        self._fetch_source()
        building = self.folder / f".building-{recipe.key}"
        for part in recipe.parts:
            self._compile(recipe, part, building / part.name)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=self.folder) as making:
            whole = Path(making) / recipe.key
            libraries = whole / ("site/llama_cpp/lib" if recipe.group == "arm64" else "lib")
            if recipe.group == "arm64":
                arm64.make_python(self.runner, self.environ, building, whole, self._source / "llama_cpp")
            libraries.mkdir(parents=True)
            for part in recipe.parts:
                copy_libraries(building / part.name / "bin", libraries)
            whole.replace(self.folder / recipe.key)
        shutil.rmtree(building, ignore_errors=True)

    def _renew_packages(self, groups: Sequence[Group]) -> None:
        """Compiled libraries stay; ARM64's Python packages follow requirements.txt."""
        made = self.folder / RECIPES["arm64"].key
        if "arm64" in groups and not arm64.is_current(made):
            work = self.folder / ".renewing"
            arm64.renew_site(self.runner, self.environ, work, made)
            shutil.rmtree(work, ignore_errors=True)

    def _fetch_source(self) -> None:
        """The pinned release's own source, as its package index has it."""
        if self._source.is_dir():
            return
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=self.folder) as fetching:
            options = ["--no-cache-dir", "--no-deps", "--no-binary", ":all:", "-d", fetching]
            pip = [sys.executable, "-m", "pip", "download", *options, f"llama-cpp-python=={VERSION}"]
            self.runner.run("Fetching the source of llama.cpp", pip, pip_environ(self.environ), FETCH_TIMEOUT_S)
            (archive,) = Path(fetching).glob(f"{_SDIST}.tar.gz")
            with tarfile.open(archive) as tar:
                wanted = (f"{_SDIST}/vendor/llama.cpp/", f"{_SDIST}/llama_cpp/")
                tar.extractall(fetching, (each for each in tar if each.name.startswith(wanted)), filter="data")
            self._source.parent.mkdir(exist_ok=True)
            (Path(fetching) / _SDIST).replace(self._source)

    def _compile(self, recipe: Recipe, part: Part, folder: Path) -> None:
        cmake, environ = self._cmake()
        flags = [flag.replace(SHIM_PLACE, str(SHIM)) for flag in part.flags]
        ninja = ["-G", "Ninja"] if shutil.which("ninja", path=environ.get("PATH")) else []
        source = self._source / "vendor" / "llama.cpp"
        title = f"{part.name} of {recipe.group}"
        configure: list[str | Path] = [cmake, "-S", source, "-B", folder, *ninja, *flags]
        self.runner.run(f"Configuring the {title}", configure, environ, CONFIGURE_TIMEOUT_S)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        jobs = max(1, min(os.cpu_count() or 1, memory // bootstrap.COMPILE_JOB_BYTES))
        build: list[str | Path] = [cmake, "--build", folder, "-j", str(jobs), "--target", *part.targets]
        self.runner.run(f"Building the {title} (some {recipe.minutes} min, once)", build, environ, BUILD_TIMEOUT_S)

    def _cmake(self) -> tuple[Path, dict[str, str]]:
        """The system's cmake, or one from the package index in a folder of its own; and the environment for it."""
        environ = dict(self.environ)
        if found := shutil.which("cmake", path=environ.get("PATH")):
            return Path(found), environ
        tools = self.folder / "tools"
        if not (tools / "bin" / "cmake").is_file():
            pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--target", str(tools), "cmake", "ninja"]
            self.runner.run("Installing cmake beside the kernels", pip, pip_environ(environ), FETCH_TIMEOUT_S)
        environ["PYTHONPATH"] = str(tools)
        environ["PATH"] = f"{tools / 'bin'}{os.pathsep}{environ.get('PATH', '')}"
        return tools / "bin" / "cmake", environ


def copy_libraries(built: Path, to: Path) -> None:
    """The loaders under the names that others look for, and every kernel library."""
    for path in sorted(built.glob("lib*.so*")):
        if path.name in _LOADERS or path.name.startswith(("libggml-cpu-", "libggml-vulkan.so")):
            shutil.copyfile(path, to / path.name)  # follows links: the cache holds files alone


def pip_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The person's environment without what would lead pip astray."""
    dropped = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_HASHES"}
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
