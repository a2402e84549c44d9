"""An ARM64 Python with swarmnode's packages, run under an emulator of the processor alone.

The root comes from Debian's packages, fetched by an apt that knows only a state, a cache and an architecture of its
own, so the system's packages are neither used nor changed. Python's packages are ARM64's wheels of the versions in
requirements.txt; the few that have none are pure Python, and are built here. llama_cpp is its Python part from the
source, with libraries that were compiled for ARM64 beside it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from capabilities.errors import KernelFailed, UsageError
from swarmnode.bootstrap import Runner

EMULATOR: Final = "qemu-aarch64-static"
FETCH_TIMEOUT_S: Final = 30 * 60  # 80 MB over a slow line
_ASK_TIMEOUT_S: Final = 60
_WANTED_NAME: Final = "requirements.txt"
_WANTED: Final = ("python3", "libstdc++6", "libgomp1")
# What Python depends on for other programs' sake.
_NOT_WANTED: Final = ("perl", "libperl", "dpkg", "tar", "mailcap", "mime-support", "install-info", "libgdbm", "libpcre")
_PURE: Final = ("python-baseconv", "varint")  # have no wheels
_GLIBC_OLDEST, _GLIBC_NEWEST = 17, 36  # of manylinux's names; Debian 12 has 2.36
_COMMAND: Final = """\
#!/bin/sh
here=$(dirname "$0")/..
exec {emulator} -L "$here/root" -0 "$0" "$here/root/usr/bin/{python}" "$@"
"""
_APT_CONFIG: Final = """\
APT::Architecture "arm64";
APT::Architectures {{"arm64";}};
APT::Sandbox::User "root";
Dir::State "{folder}/state";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
"""


def make_python(runner: Runner, environ: Mapping[str, str], work: Path, to: Path, llama_cpp: Path) -> None:
    """Make `to`/root, `to`/site and `to`/bin/python; `work` keeps what was fetched, `llama_cpp` is the package.

    Raises:
        UsageError: the system's packages have no Python that is new enough.
        SetupError: a step failed.
    """
    _make_root(runner, environ, work, to / "root")
    minor = _minor_of(to)
    if minor < 11:
        raise UsageError(f"this system's packages have Python 3.{minor} for ARM64, and 3.11 is needed")
    _make_command(to, f"python3.{minor}")
    _make_site(runner, environ, work, to / "site", minor)
    shutil.copytree(llama_cpp, to / "site" / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__"))


def is_current(made: Path) -> bool:
    """Whether what was made has the packages that requirements.txt wants now."""
    try:
        return (made / "site" / _WANTED_NAME).read_text() == "\n".join(_wanted_lines())
    except OSError:
        return False


def renew_site(runner: Runner, environ: Mapping[str, str], work: Path, made: Path) -> None:
    """Install the packages that requirements.txt wants now, and keep llama_cpp as it was built.

    Raises:
        SetupError: a step failed; what was there stays.
    """
    site, new = made / "site", work / "site"
    shutil.rmtree(new, ignore_errors=True)
    work.mkdir(exist_ok=True)
    _make_site(runner, environ, work, new, _minor_of(made))
    shutil.copytree(site / "llama_cpp", new / "llama_cpp")
    site.rename(work / "old")
    new.rename(site)


def _minor_of(made: Path) -> int:
    """Of the root's Python 3; 0 if it has none."""
    python = next(iter((made / "root" / "usr" / "bin").glob("python3.*[0-9]")), None)
    return int(python.name.partition(".")[2]) if python else 0


def _wanted_lines() -> list[str]:
    """Packages with their versions, without llama_cpp's own."""
    listed = Path(__file__).parents[2] / _WANTED_NAME
    if not listed.is_file():
        raise UsageError(f"ARM64's packages are listed in {_WANTED_NAME} of a checkout, and this is none")
    return [line for line in listed.read_text().splitlines() if line and not line.startswith(("#", "llama-cpp"))]


def _make_command(to: Path, python: str) -> None:
    """`to`/bin/python. Python takes its name for its own, so that its children start under the emulator, too: the
    system knows no programs of another processor.
    """
    command = to / "bin" / "python"
    command.parent.mkdir()
    command.write_text(_COMMAND.format(emulator=EMULATOR, python=python))
    command.chmod(0o755)


def _make_root(runner: Runner, environ: Mapping[str, str], work: Path, root: Path) -> None:
    apt, debs = work / "apt", work / "debs"
    for folder in (apt / "state/lists/partial", apt / "cache/archives/partial", debs, root):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "state" / "status").touch()
    config = apt / "apt.conf"
    config.write_text(_APT_CONFIG.format(folder=apt))
    own = {**environ, "APT_CONFIG": str(config)}
    runner.run("Reading the list of ARM64 packages", ["apt-get", "update"], own, FETCH_TIMEOUT_S)
    fetch: list[str | Path] = ["env", "-C", debs, "apt-get", "download", *_closure(own)]
    runner.run("Fetching an ARM64 Python", fetch, own, FETCH_TIMEOUT_S)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True, timeout=_ASK_TIMEOUT_S, capture_output=True)


def _closure(environ: Mapping[str, str]) -> list[str]:
    """The packages that Python and C++ programs need, with all that those depend on."""
    no = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    done = subprocess.run(
        ["apt-cache", "depends", "--recurse", *no, *_WANTED],
        env=dict(environ), capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False,
    )  # fmt: skip
    names = {line for line in done.stdout.splitlines() if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", line)}
    if not names:
        raise KernelFailed(f"apt knows no ARM64 packages here: {done.stderr.strip()[-200:]}")
    return sorted(name for name in names if not name.startswith(_NOT_WANTED))


def _make_site(runner: Runner, environ: Mapping[str, str], work: Path, site: Path, minor: int) -> None:
    lines = _wanted_lines()
    pure = [line for line in lines if line.partition("==")[0] in _PURE]
    wanted, wheels = work / _WANTED_NAME, work / "wheels"
    wanted.write_text("\n".join(lines))
    pip = [sys.executable, "-m", "pip"]
    build: list[str | Path] = [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, *pure]
    runner.run("Building packages that have no wheels", build, environ, FETCH_TIMEOUT_S)
    glibc = [f"manylinux_2_{n}_aarch64" for n in range(_GLIBC_OLDEST, _GLIBC_NEWEST + 1)]
    tags = [f"--platform={tag}" for tag in ("manylinux2014_aarch64", *glibc, "any")]
    abis = [f"--abi={abi}" for abi in (f"cp3{minor}", "abi3", "none")]
    install: list[str | Path] = [
        *pip, "install", "--target", site, "--find-links", wheels, "--no-compile", "--no-deps", "--only-binary=:all:",
        f"--python-version=3.{minor}", "--implementation=cp", *abis, *tags, "-r", wanted,
    ]  # fmt: skip
    runner.run("Installing ARM64's Python packages", install, environ, FETCH_TIMEOUT_S)
    shutil.copyfile(wanted, site / _WANTED_NAME)
    if minor == sys.version_info[1]:  # the emulator would take minutes for it
        compile_all: list[str | Path] = [sys.executable, "-m", "compileall", "-q", site]
        subprocess.run(compile_all, timeout=FETCH_TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)
