"""The models that this node knows: one folder each, made by a child process and read here.

A model's own files stay where they are; the folder has its trunk, its manifest and where the source is. A source that
changed since (size or time) is an error that says so, never different numbers.

A model may also come from the swarm: then it has no files of its own, and its experts are those in this node's cache.
While it is fetched it lies in a draft, a hidden folder that becomes the model's when everything is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from backends.add_model import MANIFEST, SOURCE, TRUNK, hidden, summary, sweep
from backends.atomic_file import sync_folder
from backends.child import LINE_BYTES_MAX, parse_line, verdict_of_death
from backends.expert_source import GGUFExpertSource
from backends.gguf_file import GGUFFile
from backends.manifest import Manifest
from capabilities.errors import BadModelFile, Internal, ModelNotFound, PeerMistake, SwarmError, UsageError
from swarmnode.shards.service import ServedModel
from swarmnode.shards.store import CachedExperts, ShardCache

_log = structlog.get_logger(__name__)

MODELS_MAX: Final = 64
ADD_SECONDS_MAX: Final = 6 * 3600.0
FETCHED: Final = "fetched"
"""An empty file in place of SOURCE: the model came from the swarm. Its time is when the model was last opened."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DRAFT: Final = ".fetch-"

OnProgress = Callable[[str, int, int], None]


@dataclass(eq=False)
class OpenModel:
    """A model that is served: its manifest, where its trunk is, and its experts' bytes.

    `gguf` is its own file; None: it came from the swarm, and `served.source` has the experts that are in the cache.
    lies_at: that file, or the cache's folder.
    """

    manifest: Manifest
    trunk: Path
    gguf: GGUFFile | None
    served: ServedModel
    lies_at: Path

    def close(self) -> None:
        if self.gguf is not None:
            self.gguf.close()


class Models:
    """The folder of models. Methods block for some milliseconds unless they are async."""

    def __init__(self, folder: Path, cache: ShardCache | None = None) -> None:
        """`cache`: where the experts of models from the swarm are; without one those are listed and not opened."""
        self._folder = folder
        self._cache = cache
        self._adding: set[str] = set()
        self._ids: dict[str, tuple[tuple[int, int], str]] = {}  # by name: which file was hashed, and its hash

    def sweep(self) -> None:
        """Remove what killed processes left half added or half removed. Before anything is added here."""
        sweep(self._folder)

    def names(self) -> list[str]:
        """The models' names, sorted. A folder without a manifest is none: `add` writes it last."""
        if not self._folder.is_dir():
            return []
        return sorted(p.name for p in self._folder.iterdir() if (p / MANIFEST).is_file() and _NAME.fullmatch(p.name))

    def manifest(self, name: str) -> Manifest:
        """The manifest of a model.

        Raises:
            ModelNotFound: there is no such model, or its folder is damaged.
        """
        self._check_known(name)
        try:
            return Manifest.from_bytes((self._folder / name / MANIFEST).read_bytes())
        except PeerMistake as error:
            raise ModelNotFound(f"the manifest of {name} is damaged: {error.message}", hint=_mend(name)) from None

    def _check_known(self, name: str) -> None:
        known = self.names()
        if name not in known:
            raise ModelNotFound(f"there is no model {name!r} here; known: {', '.join(known) or 'none'}")

    def ids(self) -> dict[str, str]:
        """The manifest's id of every model, by name."""
        return {name: manifest_id for name in self.names() if (manifest_id := self._id(name))}

    def find(self, manifest_id: str) -> str | None:
        """The name of the model with this manifest; of several, the first."""
        return next((name for name, found in self.ids().items() if found == manifest_id), None)

    def _id(self, name: str) -> str | None:
        path = self._folder / name / MANIFEST
        try:
            status = path.stat()
            known = self._ids.get(name)
            if known is None or known[0] != (status.st_ino, status.st_mtime_ns):
                known = ((status.st_ino, status.st_mtime_ns), hashlib.sha256(path.read_bytes()).hexdigest())
                self._ids[name] = known
        except OSError:  # removed meanwhile
            return None
        return known[1]

    def trunk_bytes(self, *, except_draft: str = "") -> int:
        """What the trunks of all models and drafts take on the disk, without the draft of that manifest."""
        total = 0
        for file in self._folder.glob(f"*/{TRUNK}*"):
            if file.parent.name == f"{_DRAFT}{except_draft}":
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                total += file.stat().st_blocks * 512
        return total

    def summaries(self) -> list[dict[str, Any]]:
        """`show` of every model."""
        return [self.show(name) for name in self.names()]

    def show(self, name: str) -> dict[str, Any]:
        """What `model show` prints; `fault` tells if the source or the trunk is missing or changed."""
        fault: str | None = None
        files: list[dict[str, Any]] = []
        manifest, fetched = self.manifest(name), self._is_fetched(name)
        try:
            self._check_trunk(name, manifest)
            if not fetched:
                files = self._files(name)
                self._check_source(name, files)
        except SwarmError as error:
            fault = error.message
        shown = {**summary(manifest), "name": name, "source": "swarm" if fetched else "file"}
        return {**shown, "files": [f.get("path") for f in files], "fault": fault}

    def open(self, name: str) -> OpenModel:
        """Open a model to serve it.

        Raises:
            ModelNotFound: no such model.
            BadModelFile: its source or its trunk is missing or changed.
        """
        manifest, trunk = self.manifest(name), self._folder / name / TRUNK
        self._check_trunk(name, manifest)
        if self._is_fetched(name):
            _mark_served(self._folder / name)
            if self._cache is None:
                raise ModelNotFound(f"the model {name} came from the swarm, and this node keeps no experts of it")
            cached = CachedExperts(self._cache, manifest)
            served = ServedModel(manifest, manifest.to_bytes(), cached, trunk)
            return OpenModel(manifest, trunk, None, served, self._cache.root)
        files = self._files(name)
        self._check_source(name, files)
        gguf = GGUFFile.open(Path(files[0]["path"]))
        served = ServedModel(manifest, manifest.to_bytes(), GGUFExpertSource(gguf, manifest), trunk)
        return OpenModel(manifest, trunk, gguf, served, gguf.paths[0])

    # -- models from the swarm ----------------------------------------------------------------------------------

    def begin_draft(self, manifest: Manifest) -> Path:
        """The folder to fetch a model's trunk to, with its manifest in it. Drafts of other models are dropped.

        OSError if the disk does not take it.
        """
        folder = self._folder / f"{_DRAFT}{manifest.id}"
        for other in self._folder.glob(f"{_DRAFT}*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        return folder

    def drafted(self, manifest_id: str) -> Manifest | None:
        """The manifest of a draft that an earlier attempt left."""
        try:
            data = (self._folder / f"{_DRAFT}{manifest_id}" / MANIFEST).read_bytes()
            return Manifest.from_bytes(data) if hashlib.sha256(data).hexdigest() == manifest_id else None
        except (OSError, PeerMistake):
            return None

    def drop_draft(self, manifest_id: str) -> None:
        """Forget a draft."""
        shutil.rmtree(self._folder / f"{_DRAFT}{manifest_id}", ignore_errors=True)

    def finish_draft(self, manifest: Manifest) -> str:
        """Make a model of a draft whose trunk is there and was checked; returns its name here.

        That is the manifest's name, unless it is taken. Raises UsageError if there are too many models.
        """
        folder = self._folder / f"{_DRAFT}{manifest.id}"
        clean = _clean_name(manifest.name)
        taken = clean in self._adding or (self._folder / clean).exists()
        name = self._choose_name(folder, f"{clean[:54]}-{manifest.id[:8]}" if taken else clean)
        _mark_served(folder)
        for entry in (folder / MANIFEST, folder):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        folder.rename(self._folder / name)
        sync_folder(self._folder)
        return name

    def fetched(self, *, but: str) -> list[tuple[str, int]]:
        """(name, bytes of its trunk) of the models that came from the swarm, without the one of that manifest.

        The one that was served longest ago comes first.
        """
        found: list[tuple[int, str, int]] = []
        for name, manifest_id in self.ids().items():
            if manifest_id == but or not self._is_fetched(name):
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                used_ns = (self._folder / name / FETCHED).stat().st_mtime_ns
                found.append((used_ns, name, (self._folder / name / TRUNK).stat().st_blocks * 512))
        return [(name, nbytes) for _, name, nbytes in sorted(found)]

    def _is_fetched(self, name: str) -> bool:
        return (self._folder / name / FETCHED).is_file()

    def _check_trunk(self, name: str, manifest: Manifest) -> None:
        path = self._folder / name / TRUNK
        size = path.stat().st_size if path.is_file() else None
        if size != manifest.trunk.size:
            raise BadModelFile(
                f"the trunk of model {name} is {'gone' if size is None else 'damaged'}: {path}",
                hint="Remove the model, then add or fetch it again.",
                path=str(path),
            )

    # -- models from files --------------------------------------------------------------------------------------

    def _files(self, name: str) -> list[dict[str, Any]]:
        try:
            files = json.loads((self._folder / name / SOURCE).read_text())["files"]
            return [{"path": str(f["path"]), "size": int(f["size"]), "mtime_ns": int(f["mtime_ns"])} for f in files]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelNotFound(f"the folder of model {name} is damaged: {error}", hint=_mend(name)) from None

    def _check_source(self, name: str, files: list[dict[str, Any]]) -> None:
        for file in files:
            try:
                status = Path(file["path"]).stat()
            except OSError as error:
                raise BadModelFile(
                    f"the file of model {name} cannot be read: {file['path']} ({error.strerror})",
                    hint="Put it back where it was, or remove the model and add it again.",
                    path=file["path"],
                ) from None
            if (status.st_size, status.st_mtime_ns) != (file["size"], file["mtime_ns"]):
                raise BadModelFile(
                    f"the file of model {name} changed since it was added: {file['path']}",
                    hint="Remove the model and add it again, so that its hashes are right.",
                    path=file["path"],
                )

    def remove(self, name: str) -> None:
        """Forget a model: its trunk and manifest. Its own files stay. It goes whole, whenever this process ends."""
        self._check_known(name)
        going = hidden(self._folder / name)
        shutil.rmtree(going, ignore_errors=True)
        (self._folder / name).rename(going)
        shutil.rmtree(going)

    async def add(self, path: Path, name: str | None, progress: OnProgress) -> dict[str, Any]:
        """Add a model in a child process; returns its summary.

        Raises:
            BadModelFile, UnsupportedModel: the file is broken, or cannot be split.
            UsageError: the name is taken or no name.
        """
        chosen = self._choose_name(path, name)
        self._adding.add(chosen)
        try:
            command = [sys.executable, "-m", "backends.add_model", str(path), str(self._folder / chosen), chosen]
            return await run_child(command, path.name, progress)
        finally:
            self._adding.discard(chosen)

    def _choose_name(self, path: Path, name: str | None) -> str:
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        chosen = name or _clean_name(stem)
        if not _NAME.fullmatch(chosen):
            raise UsageError(f"{chosen!r} is no name for a model", hint="Use letters, digits, dots and dashes.")
        if chosen in self._adding or chosen in self.names():
            raise UsageError(
                f"there is a model {chosen} already", hint="Choose another one with --name, or remove it first."
            )
        if len(self.names()) >= MODELS_MAX:
            raise UsageError(f"this node knows {MODELS_MAX} models already", hint="Remove one first.")
        return chosen


def _mend(name: str) -> str:
    return f"Remove it (`swarmctl model remove {name}`), then add or fetch it again."


def _clean_name(text: str) -> str:
    """A name for a model that is like `text`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:63] or "model"


def _mark_served(folder: Path) -> None:
    """`fetched` orders by it. By the clock: the kernel's own time of a file stands still for some milliseconds."""
    mark, now_ns = folder / FETCHED, time.time_ns()
    mark.touch()
    os.utime(mark, ns=(now_ns, now_ns))


async def run_child(command: list[str], file: str, progress: OnProgress) -> dict[str, Any]:
    """Run a child process that speaks backends/child.py; its result, or its error raised.

    Cancelling ends the child.
    """
    fault: BaseException | None = None
    try:
        with trio.fail_after(ADD_SECONDS_MAX):
            outcome, status = await _listen_to_child(command, progress)
    except* OSError as errors:
        fault = errors.exceptions[0]
    if fault is not None:
        raise Internal(f"cannot run a child process for {file}: {fault}", hint="Close other programs, or restart.")
    if "result" in outcome:
        result: dict[str, Any] = outcome["result"]
        return result
    if "error" in outcome:
        raise SwarmError.from_json(outcome["error"])
    raise verdict_of_death(status, file) if status else Internal(f"adding {file} ended without a result")


async def _listen_to_child(command: list[str], progress: OnProgress) -> tuple[dict[str, Any], int | None]:
    """Its last message that is a result or an error, and its exit status."""
    outcome: dict[str, Any] = {}
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        process: trio.Process = await nursery.start(run)
        buffer = b""
        assert process.stdout is not None
        async for chunk in process.stdout:
            *lines, buffer = (buffer + chunk).split(b"\n")
            if len(buffer) > LINE_BYTES_MAX:
                buffer = b""
            for line in lines:
                message = parse_line(line)
                if isinstance(step := message.get("progress"), list) and len(step) == 3:
                    progress(str(step[0]), int(step[1]), int(step[2]))
                elif "result" in message or "error" in message:
                    outcome = message
    return outcome, process.returncode
